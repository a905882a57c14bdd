"""Rotary position embedding, of q and k together.

Each pair (x1, x2) of a head is rotated by its token's angle to (x1 cos - x2 sin, x1 sin + x2 cos):
Su et al., arXiv:2104.09864, eq. 34. Half-split (Llama): the pair is (x[j], x[j + dr/2]).
Interleaved (GPT-J, DeepSeek): the pair is (x[2j], x[2j + 1]). The gradient is the rotation by the
negative angle.
"""

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import (
    FirstOrderFunction,
    jit,
    next_power_of_2,
    statistics_dtype,
    tl,
)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turns heads by the tables of `_by_column`: each number times its cosine, plus its partner
    times its sine."""
    wide, dr = cos.dtype, cos.shape[-1]
    rotary = (x if x.shape[-1] == dr else x[..., :dr]).to(wide)
    partner = (
        rotary.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        if interleaved
        else rotary.roll(dr // 2, -1)
    )
    rotated = (rotary * cos + partner * sin).to(x.dtype)
    return rotated if x.shape[-1] == dr else torch.cat((rotated, x[..., dr:]), dim=-1)


def _by_column(
    cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns tables `[s, b|1, 1, dr]` of each rotary dim, the sine with its sign.

    They stay on cos: all layers that are given the same make them once.
    """
    given, known = (cos._version, sin._version, interleaved, dtype), getattr(cos, "by_column", None)
    if known is None or known[0] is not sin or known[1] != given:
        c, s = (
            cos.unsqueeze(2).to(statistics_dtype(dtype)),
            sin.unsqueeze(2).to(statistics_dtype(dtype)),
        )
        if interleaved:
            made = c.repeat_interleave(2, -1), torch.stack((-s, s), -1).flatten(-2)
        else:
            made = torch.cat((c, c), -1), torch.cat((-s, s), -1)
        cos.by_column = known = sin, given, made  # type: ignore[attr-defined]
    return known[2]


def apply_rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Applies rotary embeddings in plain torch, rounded once."""
    cos, sin = _by_column(cos, sin, interleaved, q.dtype)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


@jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    cos,
    sin,
    num_heads,
    head_dim,
    head_stride,
    half,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Turns all heads of one token; those of `y` begin `head_dim` elements apart."""
    j = tl.arange(0, HALF)[None, :]
    if INTERLEAVED:
        first, second = 2 * j, 2 * j + 1
    else:
        first, second = j, j + half
    for start in range(0, num_heads, HEADS):
        head = (start + tl.arange(0, HEADS))[:, None]
        live = (head < num_heads) & (j < half)
        x = x_ptr + head.to(tl.int64) * head_stride
        y = y_ptr + head.to(tl.int64) * head_dim
        x1 = tl.load(x + first, live, other=0.0).to(tl.float32)
        x2 = tl.load(x + second, live, other=0.0).to(tl.float32)
        tl.store(y + first, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), live)
        tl.store(y + second, (x1 * sin + x2 * cos).to(y_ptr.dtype.element_ty), live)
        if REST > 0:
            column = 2 * half + tl.arange(0, REST)[None, :]
            passes = (head < num_heads) & (column < head_dim)
            tl.store(y + column, tl.load(x + column, passes, other=0.0), passes)


@jit
def _angles(cos_ptr, sin_ptr, half, turn, HALF: tl.constexpr):
    """Computes `[1, HALF]` cosines and sines of one token, of the inverse rotation if `turn` is -1
    and not 1."""
    j = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + j, j < half, other=0.0)
    return cos, tl.load(sin_ptr + j, j < half, other=0.0) * turn


@jit(do_not_specialize=["batch", "q_heads", "k_heads"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    batch,
    q_heads,
    k_heads,
    q_dim,
    k_dim,
    half,
    q_stride_s,
    q_stride_b,
    q_stride_a,
    k_stride_s,
    k_stride_b,
    k_stride_a,
    q_out_stride_s,
    q_out_stride_b,
    k_out_stride_s,
    k_out_stride_b,
    table_stride_s,
    table_stride_b,
    turn,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    Q_REST: tl.constexpr,
    K_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    row = s * table_stride_s + b * table_stride_b
    cos, sin = _angles(cos_ptr + row, sin_ptr + row, half, turn, HALF)
    q = q_ptr + s * q_stride_s + b * q_stride_b
    k = k_ptr + s * k_stride_s + b * k_stride_b
    q_out = q_out_ptr + s * q_out_stride_s + b * q_out_stride_b
    k_out = k_out_ptr + s * k_out_stride_s + b * k_out_stride_b
    # Perhaps in place: both numbers of a pair are loaded before either is stored, and no other
    # thread touches them.
    _rotate_heads(
        q, q_out, cos, sin, q_heads, q_dim, q_stride_a, half, INTERLEAVED, HEADS, HALF, Q_REST
    )
    _rotate_heads(
        k, k_out, cos, sin, k_heads, k_dim, k_stride_a, half, INTERLEAVED, HEADS, HALF, K_REST
    )


def _rest(head_dim: int, half: int) -> int:
    """Lanes for the dims that pass through, 0 where none do."""
    return next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0


def _launch(
    inputs: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    backward: bool,
    interleaved: bool,
) -> None:
    """Turns q and k into two tensors, or in place, in one launch, forwards or back; views are read
    where they lie.

    Outputs have neighbours in memory along a head; heads of an output that is not its input have no
    gaps.
    """
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (*inputs, cos, sin))
    cos, sin, steps = _tables(cos, sin)
    s, b = q.shape[:2]
    half = cos.shape[-1]
    q_out, k_out = outputs
    sizes = (b, q.shape[2], k.shape[2], q_out.stride(2), k_out.stride(2), half)
    strides = (*q.stride()[:3], *k.stride()[:3], *q_out.stride()[:2], *k_out.stride()[:2], *steps)
    flags = {"INTERLEAVED": interleaved, "HALF": next_power_of_2(half)}
    # What passes through is where it belongs already, in place.
    rest = {
        "Q_REST": 0 if q_out is q else _rest(q.shape[3], half),
        "K_REST": 0 if k_out is k else _rest(k.shape[3], half),
    }
    config, turn = tuning.select("rope", q.device), -1.0 if backward else 1.0
    _rope_kernel[(s * b,)](
        q, k, cos, sin, q_out, k_out, *sizes, *strides, turn, **flags, **rest, **config
    )


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Contiguous tables, and their strides by token and by row of the batch."""
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (cos.stride(0), 0 if cos.shape[1] == 1 else cos.stride(1))


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _apply(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    outputs = _like(q), _like(k)
    _launch((q, k), outputs, cos, sin, backward, interleaved)
    return outputs


class _Rope(FirstOrderFunction):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _apply(q, k, cos, sin, False, interleaved)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return (*_apply(dq, dk, cos, sin, True, ctx.interleaved), None, None, None)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    dr = 2 * cos.shape[-1]
    if dr > q.shape[-1] or dr > k.shape[-1]:
        raise ValueError(f"rotary dim {dr} exceeds the head dim (q {q.shape[-1]}, k {k.shape[-1]})")
    if cos.shape != sin.shape or cos.shape[0] != q.shape[0] or cos.shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [s, b or 1, dr/2] for q {tuple(q.shape)}"
        )


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turns the first `dr` dims of every head of q and k by their token's angles; the rest passes
    through.

    Args:
        q: `[s, b, a, d]`.
        k: `[s, b, g, d]`; head counts and head dims may differ from q's.
        cos: `[s, b or 1, dr/2]`, float32 (or float64).
        sin: as `cos`.
        interleaved: pairs are neighbours instead of half a rotary dim apart.

    Returns:
        The rotated q and k, in their own dtypes.

    Raises:
        ValueError: the rotary dim exceeds a head dim, or the tables do not fit q.
    """
    _check(q, k, cos, sin)
    if not (dispatch.runs_triton(q) and dispatch.runs_triton(k)):
        return apply_rope_reference(q, k, cos, sin, interleaved)
    return _Rope.apply(q, k, cos, sin, interleaved)


def _rotate_ends(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool, interleaved: bool
) -> Tensor:
    """Turns the last dims of q's heads where they lie; returns k rotated."""
    ends = q[..., -k.shape[-1] :]
    if dispatch.runs_triton(q) and q.stride(-1) == 1:
        k_out = _like(k)
        _launch((ends, k), (ends, k_out), cos, sin, backward, interleaved)
        return k_out
    cos, sin = _by_column(cos, sin, interleaved, q.dtype)
    sin = -sin if backward else sin
    ends.copy_(_rotate(ends, cos, sin, interleaved))
    return _rotate(k, cos, sin, interleaved)


class _RopeOfEnds(FirstOrderFunction):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        rotated = q.detach()
        k_out = _rotate_ends(rotated, k, cos, sin, False, interleaved)
        torch.autograd.graph.increment_version(q)  # a backward that has saved it raises
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotated, k_out

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        dq = dq.clone(memory_format=torch.contiguous_format)
        dk = _rotate_ends(dq, dk, cos, sin, True, ctx.interleaved)
        return dq, dk, None, None, None


def _check_overwritten(x: Tensor, name: str) -> None:
    if x.is_leaf and x.requires_grad:
        raise ValueError(
            f"the leaf {tuple(x.shape)} would be overwritten by its rotated heads: clone it first"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        raise ValueError(
            f"{name} {tuple(x.shape)} with strides {x.stride()} shares memory between elements: clone it first"
        )


def apply_rope_to_ends(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turns the last `dr` dims of q's heads where they lie, and k, all of it, into a copy: what
    latent attention wants.

    The old q is gone: autograd refuses a backward that needs it.

    Args:
        q: `[s, b, a, d]`; a tensor or a view whose elements do not share memory.
        k: `[s, b, g, dr]`.
        cos, sin, interleaved: as in `apply_rope`.

    Returns:
        q, the same memory, and the rotated k.

    Raises:
        ValueError: k is not as wide as the rotary dim, it exceeds q's head dim, the tables do not
            fit, q is a leaf, or its elements share memory.
    """
    _check(q, k, cos, sin)
    if k.shape[-1] != 2 * cos.shape[-1]:
        raise ValueError(
            f"k {tuple(k.shape)} is rotated whole: its heads have the rotary dim, {2 * cos.shape[-1]}"
        )
    _check_overwritten(q, "q")
    return _RopeOfEnds.apply(q, k, cos, sin, interleaved)


@jit
def _join_kernel(
    gradients,
    strides,
    cos_ptr,
    sin_ptr,
    out_ptr,
    batch,
    q_heads,
    k_heads,
    dim,
    half,
    table_stride_s,
    table_stride_b,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    row = s * table_stride_s + b * table_stride_b
    cos, sin = _angles(cos_ptr + row, sin_ptr + row, half, -1.0, HALF)
    dq = gradients[0] + s * strides[0][0] + b * strides[0][1]
    dk = gradients[1] + s * strides[1][0] + b * strides[1][1]
    dv = gradients[2] + s * strides[2][0] + b * strides[2][1]
    dq_out = out_ptr + token * (q_heads + 2 * k_heads) * dim
    dk_out = dq_out + q_heads * dim
    dv_out = dk_out + k_heads * dim
    _rotate_heads(
        dq, dq_out, cos, sin, q_heads, dim, strides[0][2], half, INTERLEAVED, HEADS, HALF, REST
    )
    _rotate_heads(
        dk, dk_out, cos, sin, k_heads, dim, strides[1][2], half, INTERLEAVED, HEADS, HALF, REST
    )
    column = tl.arange(0, DIM)[None, :]
    for start in range(0, k_heads, HEADS):
        head = (start + tl.arange(0, HEADS))[:, None]
        live = (head < k_heads) & (column < dim)
        value = tl.load(dv + head.to(tl.int64) * strides[2][2] + column, live, other=0.0)
        tl.store(dv_out + head.to(tl.int64) * dim + column, value, live)


def _join_rotated_back(
    gradients: tuple[Tensor, ...], cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """Joins dq and dk, rotated back, and dv."""
    gradients = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in gradients)
    cos, sin, steps = _tables(cos, sin)
    s, b, q_heads, dim = gradients[0].shape
    k_heads, half = gradients[1].shape[2], cos.shape[-1]
    out = gradients[0].new_empty(s, b, q_heads + 2 * k_heads, dim)
    sizes = (b, q_heads, k_heads, dim, half, *steps)
    flags = {"INTERLEAVED": interleaved, "HALF": next_power_of_2(half), "REST": _rest(dim, half)}
    strides = tuple(x.stride()[:3] for x in gradients)
    config = tuning.select("rope", out.device)
    _join_kernel[(s * b,)](
        gradients, strides, cos, sin, out, *sizes, **flags, DIM=next_power_of_2(dim), **config
    )
    return out


class _RopeOfProjection(FirstOrderFunction):
    @staticmethod
    def forward(ctx, qkv, heads, cos, sin, interleaved):
        q, k, v = qkv.detach().split([heads[0], heads[1], heads[1]], dim=2)
        _launch((q, k), (q, k), cos, sin, False, interleaved)
        torch.autograd.graph.increment_version(qkv)  # a backward that has saved it raises
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return q, k, v

    @staticmethod
    def backward(ctx, *gradients):
        cos, sin = ctx.saved_tensors
        return _join_rotated_back(gradients, cos, sin, ctx.interleaved), None, None, None, None


def apply_rope_to_projection(
    qkv: Tensor, heads: tuple[int, int], cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates the heads of q and k in their projection, and splits it; the backward is one pass
    too.

    `apply_rope` instead writes rotated copies, and a v that is kept for the backward keeps all of
    qkv beside them. The old qkv is gone: autograd refuses a backward that needs it.

    Args:
        qkv: `[s, b, a + 2g, d]`: heads of q, of k, of v; a tensor or a view whose elements do not
            share memory.
        heads: a and g.
        cos, sin, interleaved: as in `apply_rope`.

    Returns:
        q `[s, b, a, d]`, k and v `[s, b, g, d]`: views of qkv.

    Raises:
        ValueError: the rotary dim exceeds the head dim, the tables or heads do not fit, qkv is a
            leaf, or its elements share memory.
    """
    _check(qkv, qkv, cos, sin)
    a, g = heads
    if a + 2 * g != qkv.shape[2]:
        raise ValueError(
            f"{a} heads of q and {g} each of k and v are not the {qkv.shape[2]} of {tuple(qkv.shape)}"
        )
    _check_overwritten(qkv, "qkv")
    if not (dispatch.runs_triton(qkv) and qkv.stride(-1) == 1):
        q_and_k, v = qkv.split_with_sizes((a + g, g), 2)
        rotated = _rotate(q_and_k, *_by_column(cos, sin, interleaved, qkv.dtype), interleaved)
        q, k = rotated.split_with_sizes((a, g), 2)
        return q, k, v
    return _RopeOfProjection.apply(qkv, (a, g), cos, sin, interleaved)

"""Rotary position embedding of q and k.

Each pair (x1, x2) of a head is rotated by its token's angle to (x1 cos - x2 sin, x1 sin + x2 cos):
Su et al., arXiv:2104.09864, eq. 34. Half-split (Llama): the pair is (x[j], x[j + dr/2]).
Interleaved (GPT-J, DeepSeek): the pair is (x[2j], x[2j + 1]). The gradient is the rotation by the
negative angle.

Three entry points share one kernel. `apply_rope` returns copies; `apply_rope_to_projection` (MHA,
GQA) and `apply_rope_to_ends` (MLA) overwrite their input, which saves memory and traffic.
"""

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import (
    FirstOrderFunction,
    jit,
    load_float32,
    next_power_of_2,
    statistics_dtype,
    tl,
)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates heads by the tables of `_by_column`: x · cos + (partner of x) · sin."""
    dtype, dr = cos.dtype, cos.shape[-1]
    rotary = (x if x.shape[-1] == dr else x[..., :dr]).to(dtype)
    if interleaved:
        partner = rotary.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = rotary.roll(dr // 2, -1)
    rotated = (rotary * cos + partner * sin).to(x.dtype)
    return rotated if x.shape[-1] == dr else torch.cat((rotated, x[..., dr:]), dim=-1)


def _by_column(
    cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tables `[s, b|1, 1, dr]` with a column per rotary dim, the sine signed.

    They are cached on cos, because all layers of a micro-batch are given the same tables.
    """
    key = cos._version, sin._version, interleaved, dtype
    cached_sin, cached_key, tables = vars(cos).get("by_column", (None, None, None))
    if cached_sin is not sin or cached_key != key:
        c, s = (table.unsqueeze(2).to(statistics_dtype(dtype)) for table in (cos, sin))
        if interleaved:
            tables = c.repeat_interleave(2, -1), torch.stack((-s, s), -1).flatten(-2)
        else:
            tables = torch.cat((c, c), -1), torch.cat((-s, s), -1)
        vars(cos)["by_column"] = sin, key, tables
    return tables


def apply_rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Applies rotary embeddings in plain torch, rounding once."""
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
    """Rotates all heads of one token; the heads of `y` begin `head_dim` elements apart."""
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
        x1, x2 = load_float32(x + first, live), load_float32(x + second, live)
        tl.store(y + first, x1 * cos - x2 * sin, live)
        tl.store(y + second, x1 * sin + x2 * cos, live)
        if REST > 0:
            column = 2 * half + tl.arange(0, REST)[None, :]
            passes = (head < num_heads) & (column < head_dim)
            tl.store(y + column, tl.load(x + column, passes, other=0.0), passes)


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
    direction,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    Q_REST: tl.constexpr,
    K_REST: tl.constexpr,
):
    """Rotates all heads of one token, by the negative angle where `direction` is -1."""
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    row = s * table_stride_s + b * table_stride_b
    j = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + row + j, j < half, other=0.0)
    sin = tl.load(sin_ptr + row + j, j < half, other=0.0) * direction
    q = q_ptr + s * q_stride_s + b * q_stride_b
    k = k_ptr + s * k_stride_s + b * k_stride_b
    q_out = q_out_ptr + s * q_out_stride_s + b * q_out_stride_b
    k_out = k_out_ptr + s * k_out_stride_s + b * k_out_stride_b
    # May run in place: both numbers of a pair are loaded before either is stored, and no other
    # thread touches them.
    _rotate_heads(
        q, q_out, cos, sin, q_heads, q_dim, q_stride_a, half, INTERLEAVED, HEADS, HALF, Q_REST
    )
    _rotate_heads(
        k, k_out, cos, sin, k_heads, k_dim, k_stride_a, half, INTERLEAVED, HEADS, HALF, K_REST
    )


def _passing_lanes(x: Tensor, out: Tensor, half: int) -> int:
    """Lanes for the dims that are copied unrotated; 0 where there are none, or in place."""
    dims = x.shape[3] - 2 * half
    return next_power_of_2(dims) if dims > 0 and out is not x else 0


def _launch(
    inputs: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    backward: bool,
) -> None:
    """Rotates q and k into other tensors, or in place, in one launch.

    Inputs may be views. Outputs have unit stride along a head; the heads of an output that is not
    its input have no gaps.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs)
    q_out, k_out = outputs
    cos, sin = cos.contiguous(), sin.contiguous()
    half = cos.shape[-1]
    sizes = (q.shape[1], q.shape[2], k.shape[2], q_out.stride(2), k_out.stride(2), half)
    strides = (*q.stride()[:3], *k.stride()[:3], *q_out.stride()[:2], *k_out.stride()[:2])
    table_strides = cos.stride(0), 0 if cos.shape[1] == 1 else cos.stride(1)
    _rope_kernel[(q.shape[0] * q.shape[1],)](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        *sizes,
        *strides,
        *table_strides,
        -1.0 if backward else 1.0,
        INTERLEAVED=interleaved,
        HALF=next_power_of_2(half),
        Q_REST=_passing_lanes(q, q_out, half),
        K_REST=_passing_lanes(k, k_out, half),
        **tuning.select("rope", q.device),
    )


def _empty_like(x: Tensor) -> Tensor:
    """Contiguous, unlike what `torch.empty_like` makes of a permuted x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _Rope(FirstOrderFunction):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        outputs = _empty_like(q), _empty_like(k)
        _launch((q, k), outputs, cos, sin, interleaved, False)
        return outputs

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        outputs = _empty_like(dq), _empty_like(dk)
        _launch((dq, dk), outputs, cos, sin, ctx.interleaved, True)
        return *outputs, None, None, None


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    dr = 2 * cos.shape[-1]
    if dr > q.shape[-1] or dr > k.shape[-1]:
        raise ValueError(f"rotary dim {dr} exceeds the head dim (q {q.shape[-1]}, k {k.shape[-1]})")
    if cos.shape != sin.shape or cos.shape[0] != q.shape[0] or cos.shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"rope requires cos and sin of [s, b or 1, dr/2] for q {tuple(q.shape)} "
            f"(got {tuple(cos.shape)} and {tuple(sin.shape)})"
        )


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates the first `dr` dims of every head of q and k; the other dims are copied.

    Args:
        q: `[s, b, a, d]`.
        k: `[s, b, g, d]`; head counts and head dims may differ from q's.
        cos: `[s, b or 1, dr/2]`, float32 (or float64).
        sin: as `cos`.
        interleaved: pairs are adjacent instead of half a rotary dim apart.

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
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool
) -> Tensor:
    """Rotates the last dims of q's heads in place; returns a rotated copy of k."""
    ends = q[..., -k.shape[-1] :]
    if dispatch.runs_triton(q) and q.stride(-1) == 1:
        k_out = _empty_like(k)
        _launch((ends, k), (ends, k_out), cos, sin, interleaved, backward)
        return k_out
    cos, sin = _by_column(cos, sin, interleaved, q.dtype)
    sin = -sin if backward else sin
    ends.copy_(_rotate(ends, cos, sin, interleaved))
    return _rotate(k, cos, sin, interleaved)


class _RopeOfEnds(FirstOrderFunction):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        rotated = q.detach()
        k_out = _rotate_ends(rotated, k, cos, sin, interleaved, False)
        torch.autograd.graph.increment_version(q)  # so that a backward that saved q raises
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotated, k_out

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        dq = dq.clone(memory_format=torch.contiguous_format)
        dk = _rotate_ends(dq, dk, cos, sin, ctx.interleaved, True)
        return dq, dk, None, None, None


def _check_overwritten(x: Tensor, name: str) -> None:
    if x.is_leaf and x.requires_grad:
        raise ValueError(
            f"{name} {tuple(x.shape)} is a leaf, which rotating in place would overwrite: "
            "clone it first"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        raise ValueError(
            f"{name} {tuple(x.shape)} with strides {x.stride()} shares memory between elements: "
            "clone it first"
        )


def apply_rope_to_ends(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates the last `dr` dims of q's heads in place, and all of k into a copy, for MLA.

    The old q is overwritten: autograd raises in a backward that needs it.

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
            f"rotating all of k requires heads of the rotary dim, {2 * cos.shape[-1]} "
            f"(got k {tuple(k.shape)})"
        )
    _check_overwritten(q, "q")
    return _RopeOfEnds.apply(q, k, cos, sin, interleaved)


class _RopeOfProjection(FirstOrderFunction):
    @staticmethod
    def forward(ctx, qkv, heads, cos, sin, interleaved):
        q, k, v = qkv.detach().split(heads, dim=2)
        _launch((q, k), (q, k), cos, sin, interleaved, False)
        torch.autograd.graph.increment_version(qkv)  # so that a backward that saved qkv raises
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.interleaved = heads, interleaved
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        cos, sin = ctx.saved_tensors
        dqkv = dq.new_empty(*dq.shape[:2], sum(ctx.heads), dq.shape[3])
        dq_out, dk_out, dv_out = dqkv.split(ctx.heads, dim=2)
        _launch((dq, dk), (dq_out, dk_out), cos, sin, ctx.interleaved, True)
        dv_out.copy_(dv)
        return dqkv, None, None, None, None


def apply_rope_to_projection(
    qkv: Tensor, heads: tuple[int, int], cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates the heads of q and k in their projection, and splits it.

    `apply_rope` would write rotated copies, while a v that is saved for the backward keeps all of
    qkv allocated beside them. The old qkv is overwritten: autograd raises in a backward that needs
    it.

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
            f"{a} heads of q and {g} each of k and v require {a + 2 * g} heads "
            f"(got qkv {tuple(qkv.shape)})"
        )
    _check_overwritten(qkv, "qkv")
    if dispatch.runs_triton(qkv) and qkv.stride(-1) == 1:
        return _RopeOfProjection.apply(qkv, (a, g, g), cos, sin, interleaved)
    q_and_k, v = qkv.split((a + g, g), 2)
    rotated = _rotate(q_and_k, *_by_column(cos, sin, interleaved, qkv.dtype), interleaved)
    return *rotated.split((a, g), 2), v

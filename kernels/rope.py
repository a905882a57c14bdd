"""Rotary position embedding, of q and k together.

Each pair (x1, x2) of a head turns by its token's angle to (x1 cos - x2 sin, x1 sin + x2 cos):
Su et al., arXiv:2104.09864, eq. 34.
Half-split (Llama): the pair is (x[j], x[j + dr/2]). Interleaved (GPT-J, DeepSeek): the pair is (x[2j], x[2j + 1]).
The gradient is the rotation by the negative angle.
"""

import torch
from torch import Tensor

from kernels import dispatch, tuning
from kernels.dispatch import statistics_dtype
from kernels.language import jit, next_power_of_2, tl


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dr = 2 * cos.shape[-1]
    wide = statistics_dtype(x.dtype)
    cos, sin = cos.unsqueeze(2).to(wide), sin.unsqueeze(2).to(wide)  # [s, b|1, 1, dr/2]
    turning, rest = x[..., :dr].to(wide), x[..., dr:]
    if interleaved:
        x1, x2 = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2)
    else:
        x1, x2 = turning.chunk(2, dim=-1)
        turned = torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def apply_rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotary embedding in plain torch, rounded once."""
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


@jit
def _turn_heads(
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
    """Turn all heads of one token; those of `y` begin `head_dim` elements apart."""
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
def _angles(cos_ptr, sin_ptr, half, BACKWARD: tl.constexpr, HALF: tl.constexpr):
    """`[1, HALF]` cosines and sines of one token, turning back for the gradient."""
    j = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + j, j < half, other=0.0)
    sin = tl.load(sin_ptr + j, j < half, other=0.0)
    if BACKWARD:
        sin = -sin
    return cos, sin


@jit
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
    table_stride_s,
    table_stride_b,
    BACKWARD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    Q_REST: tl.constexpr,
    K_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    row = s * table_stride_s + b * table_stride_b
    cos, sin = _angles(cos_ptr + row, sin_ptr + row, half, BACKWARD, HALF)
    q = q_ptr + s * q_stride_s + b * q_stride_b
    k = k_ptr + s * k_stride_s + b * k_stride_b
    q_out = q_out_ptr + token * q_heads * q_dim
    k_out = k_out_ptr + token * k_heads * k_dim
    _turn_heads(q, q_out, cos, sin, q_heads, q_dim, q_stride_a, half, INTERLEAVED, HEADS, HALF, Q_REST)
    _turn_heads(k, k_out, cos, sin, k_heads, k_dim, k_stride_a, half, INTERLEAVED, HEADS, HALF, K_REST)


def _rest(head_dim: int, half: int) -> int:
    """Lanes for the dims that pass through, 0 where none do."""
    return next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Turn q and k in one launch, forwards or back; strided views are read where they lie."""
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    sin = sin if sin.stride() == cos.stride() else sin.contiguous()
    cos = cos if sin.stride() == cos.stride() else cos.contiguous()
    s, b = q.shape[:2]
    half = cos.shape[-1]
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    sizes = (b, q.shape[2], k.shape[2], q.shape[3], k.shape[3], half)
    strides = (*q.stride()[:3], *k.stride()[:3], cos.stride(0), 0 if cos.shape[1] == 1 else cos.stride(1))
    flags = {"BACKWARD": backward, "INTERLEAVED": interleaved, "HALF": next_power_of_2(half)}
    rest = {"Q_REST": _rest(q.shape[3], half), "K_REST": _rest(k.shape[3], half)}
    config = tuning.select("rope", q.device)
    _rope_kernel[(s * b,)](q, k, cos, sin, q_out, k_out, *sizes, *strides, **flags, **rest, **config)
    return q_out, k_out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _launch(q, k, cos, sin, False, interleaved)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return (*_launch(dq, dk, cos, sin, True, ctx.interleaved), None, None, None)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    dr = 2 * cos.shape[-1]
    if dr > q.shape[-1] or dr > k.shape[-1]:
        raise ValueError(f"rotary dim {dr} exceeds the head dim (q {q.shape[-1]}, k {k.shape[-1]})")
    if cos.shape != sin.shape or cos.shape[0] != q.shape[0] or cos.shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [s, b or 1, dr/2] for q {tuple(q.shape)}"
        )


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Turn the first `dr` dims of every head of q and k by their token's angles; the rest passes through.

    Args:
        q: `[s, b, a, d]`.
        k: `[s, b, g, d]`; head counts and head dims may differ from q's.
        cos: `[s, b or 1, dr/2]`, float32 (or float64).
        sin: as `cos`.
        interleaved: pairs are neighbours instead of half a rotary dim apart.

    Returns:
        The turned q and k, in their own dtypes.

    Raises:
        ValueError: the rotary dim exceeds a head dim, or the tables do not fit q.
    """
    _check(q, k, cos, sin)
    if not (dispatch.runs_triton(q) and dispatch.runs_triton(k)):
        return apply_rope_reference(q, k, cos, sin, interleaved)
    return _Rope.apply(q, k, cos, sin, interleaved)


@jit
def _rope_in_place_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    batch,
    heads,
    half,
    stride_s,
    stride_b,
    stride_a,
    table_stride_s,
    table_stride_b,
    BACKWARD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    row = s * table_stride_s + b * table_stride_b
    cos, sin = _angles(cos_ptr + row, sin_ptr + row, half, BACKWARD, HALF)
    x = x_ptr + s * stride_s + b * stride_b
    # Both numbers of a pair are loaded before either is stored, and no other thread touches them.
    _turn_heads(x, x, cos, sin, heads, stride_a, stride_a, half, INTERLEAVED, HEADS, HALF, 0)


def _turn_in_place(x: Tensor, heads: int, cos: Tensor, sin: Tensor, backward: bool, interleaved: bool) -> None:
    if not dispatch.runs_triton(x) or x.stride(-1) != 1:
        part = x[:, :, :heads]
        part.copy_(_rotate(part, cos, -sin if backward else sin, interleaved))
        return
    cos, sin = cos.contiguous(), sin.contiguous()
    half = cos.shape[-1]
    sizes = (x.shape[1], heads, half, *x.stride()[:3], cos.stride(0), 0 if cos.shape[1] == 1 else cos.stride(1))
    flags = {"BACKWARD": backward, "INTERLEAVED": interleaved, "HALF": next_power_of_2(half)}
    _rope_in_place_kernel[(x.shape[0] * x.shape[1],)](x, cos, sin, *sizes, **flags, **tuning.select("rope", x.device))


class _RopeInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, heads, cos, sin, interleaved):
        _turn_in_place(x, heads, cos, sin, False, interleaved)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.interleaved = heads, interleaved
        return x

    @staticmethod
    def backward(ctx, dx):
        cos, sin = ctx.saved_tensors
        dx = dx.clone()  # a gradient may belong to others too: autograd hands out the same tensor to several
        _turn_in_place(dx, ctx.heads, cos, sin, True, ctx.interleaved)
        return dx, None, None, None, None


def apply_rope_in_place(x: Tensor, num_heads: int, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the first heads of x where they lie: q and k of a projection that holds q, k, v side by side.

    Autograd refuses it, as every operation in place, where someone needs the old x for a backward, where x is a leaf,
    and where x is one of several views made by one split: turn first, split afterwards.

    Args:
        x: `[s, b, heads, d]`, a tensor or a view whose elements do not share memory.
        num_heads: how many are turned, the others stay (those of v).
        cos, sin, interleaved: as in `apply_rope`.

    Returns:
        x.

    Raises:
        ValueError: the rotary dim exceeds the head dim, the tables or heads do not fit, or elements share memory.
    """
    _check(x, x, cos, sin)
    if not 0 <= num_heads <= x.shape[2]:
        raise ValueError(f"{num_heads} heads to turn, and x {tuple(x.shape)} has {x.shape[2]}")
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        raise ValueError(f"x {tuple(x.shape)} with strides {x.stride()} shares memory between elements: clone it first")
    return _RopeInPlace.apply(x, num_heads, cos, sin, interleaved)

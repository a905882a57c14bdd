"""Feed-forward activations: SwiGLU and GELU.

SwiGLU   silu(gate) · up, silu(z) = z s, s = sigmoid(z)                       Shazeer, arXiv:2002.05202, eq. 6
         d gate = dy up s (1 + z (1 - s)),   d up = dy silu(z)
GELU     z Phi(z), or z (1 + tanh u) / 2, u = sqrt(2/pi) (z + 0.044715 z³)   Hendrycks & Gimpel, arXiv:1606.08415
         dz = Phi(z) + z phi(z), and for the approximation (1 + t) / 2 + z (1 - t²) u' / 2

What stands between the two matrices of an expert: the activation, times the router's weight of the row.

    y[r] = w[r] · act(x[r])     dx[r] = w[r] · dact(x[r], dy[r])     dw[r] = dy[r] · act(x[r])

The next product is linear, so an expert's output is weighted as well, and tokens only add up what comes home. Weighted
there, the rows that come home would have to be kept for the gradient of the weights: k·h elements a token, mostly the
largest activation of a layer. Here that gradient is made of what the activation keeps anyhow.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import dispatch, tuning
from kernels.dispatch import cdiv, first_order, jit, rows_of, statistics_dtype, tl


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """SwiGLU in plain torch, rounded once."""
    gate, up = gate_up.to(statistics_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU in plain torch, rounded once."""
    return F.gelu(x.to(statistics_dtype(x.dtype)), approximate=approximate).to(x.dtype)


@jit
def swiglu_slopes(gate, up):
    """silu(gate) · up, and its derivatives with respect to both."""
    s = tl.sigmoid(gate)
    return gate * s * up, up * s * (1.0 + gate * (1.0 - s)), gate * s


@jit
def _swiglu_kernel(gate_up_ptr, y_ptr, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    gate = tl.load(gate_up_ptr + row * stride + column, live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + column, live, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), live)


@jit
def _swiglu_backward_kernel(dy_ptr, gate_up_ptr, d_gate_up_ptr, width, dy_stride, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    dy = tl.load(dy_ptr + row * dy_stride + column, live, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + row * stride + column, live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + column, live, other=0.0).to(tl.float32)
    _, slope_gate, slope_up = swiglu_slopes(gate, up)
    out = d_gate_up_ptr + row * (2 * width) + column
    tl.store(out, (dy * slope_gate).to(d_gate_up_ptr.dtype.element_ty), live)
    tl.store(out + width, (dy * slope_up).to(d_gate_up_ptr.dtype.element_ty), live)


@jit
def gelu_terms(z, TANH: tl.constexpr):
    """The share of z that passes, and its derivative with respect to z."""
    if TANH:
        u = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        t = 2.0 * tl.sigmoid(2.0 * u) - 1.0
        share = 0.5 * (1.0 + t)
        slope = 0.5 * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * z * z)
    else:
        share = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * z * z)
    return share, slope


@jit
def _gelu_kernel(x_ptr, y_ptr, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x_ptr + i, i < count, other=0.0).to(tl.float32)
    share, _ = gelu_terms(z, TANH)
    tl.store(y_ptr + i, (z * share).to(y_ptr.dtype.element_ty), i < count)


@jit
def _gelu_backward_kernel(dy_ptr, x_ptr, dx_ptr, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x_ptr + i, i < count, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + i, i < count, other=0.0).to(tl.float32)
    share, slope = gelu_terms(z, TANH)
    tl.store(dx_ptr + i, (dy * (share + z * slope)).to(dx_ptr.dtype.element_ty), i < count)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, overwrite):
        rows = rows_of(gate_up)
        width = rows.shape[1] // 2
        y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
        config = tuning.select("swiglu", rows.device)
        grid = (rows.shape[0], cdiv(width, config["BLOCK"]))
        _swiglu_kernel[grid](rows, y, width, rows.stride(0), **config)
        ctx.overwrite = overwrite and gate_up.is_contiguous()
        ctx.save_for_backward(gate_up if ctx.overwrite else rows)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return swiglu_backward(dy, rows, ctx.overwrite), None


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tanh, overwrite):
        ctx.overwrite = overwrite and x.is_contiguous()
        x = x.contiguous()
        y = torch.empty_like(x)
        config = tuning.select("gelu", x.device)
        _gelu_kernel[(cdiv(x.numel(), config["BLOCK"]),)](x, y, x.numel(), TANH=tanh, **config)
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        if ctx.overwrite:  # each program reads its numbers before it writes them
            torch.autograd.graph.increment_version(x)
            dx = x.detach()
        else:
            dx = torch.empty_like(x)
        config = tuning.select("gelu", x.device)
        grid = (cdiv(x.numel(), config["BLOCK"]),)
        _gelu_backward_kernel[grid](dy.contiguous(), x, dx, x.numel(), TANH=ctx.tanh, **config)
        return dx, None, None


def check_overwrite(x: Tensor, overwrite: bool) -> None:
    """Refuses to write the gradient of a leaf over its value."""
    if overwrite and x.is_leaf and x.requires_grad:
        raise ValueError(f"overwrite=True would write the gradient of the leaf {tuple(x.shape)} over its value")


def swiglu(gate_up: Tensor, overwrite: bool = False) -> Tensor:
    """`silu(gate) * up` where gate is the first half of the last dim and up the second.

    Args:
        gate_up: `[..., 2f]`, any floating dtype.
        overwrite: the backward may write the gradient over gate_up, which nobody else needs then: 2f elements a row
            less at the peak. The plain path and gate_up that is no block of memory do not use it.

    Returns:
        `[..., f]` in the same dtype, computed in float32 (float64 for float64).

    Raises:
        ValueError: the last dim is odd, or a leaf would be overwritten.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu splits the last dim in two halves (gate, up); {gate_up.shape[-1]} is odd")
    check_overwrite(gate_up, overwrite)
    return _SwiGLU.apply(gate_up, overwrite) if dispatch.runs_triton(gate_up) else swiglu_reference(gate_up)


def swiglu_backward(dy: Tensor, gate_up: Tensor, overwrite: bool = False) -> Tensor:
    """The gradient of what went into `swiglu`.

    Args:
        dy: `[..., f]`.
        gate_up: `[..., 2f]`.
        overwrite: as in `swiglu`.

    Returns:
        `[..., 2f]` in the dtype of gate_up.
    """
    if not dispatch.runs_triton(gate_up):
        return dispatch.gradients_of(swiglu_reference, dy, gate_up)[0]
    if overwrite and gate_up.is_contiguous():  # each program reads its numbers before it writes them
        torch.autograd.graph.increment_version(gate_up)  # a second backward of the same graph is refused, not wrong
        d_gate_up = gate_up.detach()
    else:
        d_gate_up = torch.empty(*dy.shape[:-1], gate_up.shape[-1], dtype=gate_up.dtype, device=gate_up.device)
    grads, rows = rows_of(dy), rows_of(gate_up)
    width, config = grads.shape[1], tuning.select("swiglu", rows.device)
    grid = (rows.shape[0], cdiv(width, config["BLOCK"]))
    _swiglu_backward_kernel[grid](grads, rows, d_gate_up, width, grads.stride(0), rows.stride(0), **config)
    return d_gate_up


def gelu(x: Tensor, approximate: str = "none", overwrite: bool = False) -> Tensor:
    """The Gaussian error linear unit.

    Args:
        x: any shape, any floating dtype.
        approximate: "none" (erf) or "tanh".
        overwrite: as in `swiglu`.

    Returns:
        The shape and dtype of `x`, computed in float32 (float64 for float64).

    Raises:
        ValueError: an unknown approximation, or a leaf would be overwritten.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu knows approximate='none' and 'tanh', not {approximate!r}")
    check_overwrite(x, overwrite)
    return (
        _GELU.apply(x, approximate == "tanh", overwrite) if dispatch.runs_triton(x) else gelu_reference(x, approximate)
    )


def activate(x: Tensor, kind: str, overwrite: bool = False) -> Tensor:
    """What stands between the two matrices of a feed-forward layer: `swiglu`, `gelu` or `gelu_tanh`.

    Args:
        x: `[..., 2f]` for swiglu, else `[..., f]`.
        kind: the activation.
        overwrite: as in `swiglu`.

    Returns:
        `[..., f]`.

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "swiglu":
        return swiglu(x, overwrite)
    if kind not in ("gelu", "gelu_tanh"):
        raise ValueError(f"activate knows swiglu, gelu and gelu_tanh, not {kind!r}")
    return gelu(x, "tanh" if kind == "gelu_tanh" else "none", overwrite)


KINDS = ("swiglu", "gelu", "gelu_tanh")


def weighted_activation_reference(x: Tensor, weights: Tensor, kind: str) -> Tensor:
    """The same in plain torch, rounded once."""
    wide, weights = x.to(statistics_dtype(x.dtype)), weights[:, None]
    if kind == "swiglu":
        y = swiglu_reference(wide)
    else:
        y = gelu_reference(wide, "tanh" if kind == "gelu_tanh" else "none")
    return (y * weights.to(y.dtype)).to(x.dtype)


@jit
def _weighted_kernel(
    x_ptr, weights_ptr, y_ptr, width, stride, GATED: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    z = tl.load(x_ptr + row * stride + column, live, other=0.0).to(tl.float32)
    if GATED:
        y = z * tl.sigmoid(z) * tl.load(x_ptr + row * stride + width + column, live, other=0.0).to(tl.float32)
    else:
        share, _ = gelu_terms(z, TANH)
        y = z * share
    y *= tl.load(weights_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), live)


@jit
def _weighted_backward_kernel(
    dy_ptr, x_ptr, weights_ptr, dx_ptr, dw_ptr, width, dy_stride, stride,
    GATED: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, block after block: a block is read before its gradient is written, perhaps over it."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        live = column < width
        dy = tl.load(dy_ptr + row * dy_stride + column, live, other=0.0).to(tl.float32)
        z = tl.load(x_ptr + row * stride + column, live, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(x_ptr + row * stride + width + column, live, other=0.0).to(tl.float32)
            y, slope_gate, slope_up = swiglu_slopes(z, up)
            at = dx_ptr + row * (2 * width) + column
            tl.store(at, (dy * weight * slope_gate).to(dx_ptr.dtype.element_ty), live)
            tl.store(at + width, (dy * weight * slope_up).to(dx_ptr.dtype.element_ty), live)
        else:
            share, slope = gelu_terms(z, TANH)
            y = z * share
            dx = dy * weight * (share + z * slope)
            tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), live)
        total += dy * y
    tl.store(dw_ptr + row, tl.sum(total, 0).to(dw_ptr.dtype.element_ty))


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, kind: str, overwrite: bool):
        rows = rows_of(x)
        width = rows.shape[1] // 2 if kind == "swiglu" else rows.shape[1]
        y = torch.empty(rows.shape[0], width, dtype=x.dtype, device=x.device)
        config = tuning.select("swiglu", x.device)
        grid = (rows.shape[0], cdiv(width, config["BLOCK"]))
        _weighted_kernel[grid](rows, weights.contiguous(), y, width, rows.stride(0), **_flags(kind), **config)
        ctx.kind, ctx.overwrite = kind, overwrite and x.is_contiguous()
        ctx.save_for_backward(x if ctx.overwrite else rows, weights)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weights = ctx.saved_tensors
        return *weighted_activation_backward(dy, x, weights, ctx.kind, ctx.overwrite), None, None


def _flags(kind: str) -> dict[str, bool]:
    return {"GATED": kind == "swiglu", "TANH": kind == "gelu_tanh"}


def weighted_activation(x: Tensor, weights: Tensor, kind: str, overwrite: bool = False) -> Tensor:
    """`activate` of rows, each times a weight of its own, differentiable in both.

    Args:
        x: `[r, 2f]` for swiglu, else `[r, f]`; any floating dtype.
        weights: `[r]`, any floating dtype.
        kind: `swiglu`, `gelu` or `gelu_tanh`.
        overwrite: as in `swiglu`.

    Returns:
        `[r, f]` in the dtype of x, computed in float32 (float64 for float64).

    Raises:
        ValueError: an unknown kind, weights of other rows, or a leaf would be overwritten.
    """
    if kind not in KINDS:
        raise ValueError(f"an expert's activation is one of {', '.join(KINDS)}, not {kind!r}")
    if weights.shape != x.shape[:1]:
        raise ValueError(f"{tuple(weights.shape)} weights for rows {tuple(x.shape)}: one for each row is wanted")
    check_overwrite(x, overwrite)
    if not dispatch.runs_triton(x):
        return weighted_activation_reference(x, weights, kind)
    return _WeightedActivation.apply(x, weights, kind, overwrite)


def weighted_activation_backward(
    dy: Tensor, x: Tensor, weights: Tensor, kind: str, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of what went into `weighted_activation`.

    Args:
        dy: `[r, f]`.
        x, weights, kind: as there.
        overwrite: as in `swiglu`.

    Returns:
        Those of x and of the weights, in their dtypes.
    """
    if not dispatch.runs_triton(x):
        dx, dweights = dispatch.gradients_of(lambda x, w: weighted_activation_reference(x, w, kind), dy, x, weights)
        return dx, dweights
    if overwrite and x.is_contiguous():
        torch.autograd.graph.increment_version(x)  # a second backward of the same graph is refused, not wrong
        dx = x.detach()
    else:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weights = weights.contiguous()
    grads, rows, dweights = rows_of(dy), rows_of(x), torch.empty_like(weights)
    sizes = (grads.shape[1], grads.stride(0), rows.stride(0))
    config = tuning.select("swiglu", x.device)
    _weighted_backward_kernel[(rows.shape[0],)](grads, rows, weights, dx, dweights, *sizes, **_flags(kind), **config)
    return dx, dweights

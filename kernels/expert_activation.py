"""What stands between the two matrices of an expert: the activation, times the router's weight of the row.

    y[r] = w[r] · act(x[r])     dx[r] = w[r] · dact(x[r], dy[r])     dw[r] = dy[r] · act(x[r])

The next product is linear, so an expert's output is weighted as well, and tokens only add up what comes home. Weighted
there, the rows that come home would have to be kept for the gradient of the weights: k·h elements a token, mostly the
largest activation of a layer. Here that gradient is made of what the activation keeps anyhow.
"""

import torch
from torch import Tensor

from kernels import dispatch, tuning
from kernels.activation import check_overwrite, gelu_reference, gelu_terms, swiglu_reference, swiglu_slopes
from kernels.dispatch import first_order, rows_of, statistics_dtype
from kernels.language import cdiv, jit, tl

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

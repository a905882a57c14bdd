"""Activations of feed-forward layers: SwiGLU, GeGLU and GELU, optionally times a weight per row.

SwiGLU   silu(gate) · up, silu(z) = z s, s = sigmoid(z)
         d gate = dy up s (1 + z (1 - s)),   d up = dy silu(z)
GELU     z Phi(z), dz = Phi(z) + z phi(z); tanh form: Phi(z) = (1 + tanh u) / 2,
         u = sqrt(2/pi) (z + 0.044715 z³)
GeGLU    gelu(gate) · up, with the tanh form of GELU
clamped  g s (u + 1), g = min(gate, 7), s = sigmoid(1.702 g), u = up clamped to [-7, 7];
         beyond a limit the derivative is 0
weighted y[r] = w[r] · act(x[r]),   dx[r] = w[r] · dact(x[r], dy[r]),   dw[r] = dy[r] · act(x[r])

In a mixture of experts, w is the router's weight of each row. The next GEMM is linear, so w could
scale an expert's output instead. Those outputs would have to be kept for the gradient of w: k·h
elements a token, often the largest activation of a layer. Here that gradient needs nothing but what
the activation keeps anyway.

Source: Shazeer, arXiv:2002.05202, eq. 6 (SwiGLU, GeGLU); Hendrycks & Gimpel, arXiv:1606.08415
(GELU); gpt-oss (OpenAI, 2025; clamped).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import (
    FirstOrderFunction,
    cdiv,
    jit,
    load_float32,
    rows_of,
    statistics_dtype,
    tl,
)

GATED = ("swiglu", "geglu_tanh", "swiglu_clamped")
KINDS = (*GATED, "gelu", "gelu_tanh")
_REGISTERED: dict[str, Callable[[Tensor], Tensor]] = {}  # other kinds, in plain torch


def register_activation(kind: str, function: Callable[[Tensor], Tensor]) -> None:
    """Adds a kind for `activate`, computed by a function of differentiable operations.

    Raises:
        ValueError: a kind of this file has the name.
    """
    if kind in KINDS:
        raise ValueError(f"activation {kind!r} exists")
    _REGISTERED[kind] = function


def _within(x: Tensor, low: float, high: float) -> Tensor:
    """x between two limits, where its derivative is 1; that of `clamp` is 0 since torch 2.14."""
    return torch.where(x > high, high, torch.where(x < low, low, x))


def activation_reference(x: Tensor, kind: str, weights: Tensor | None = None) -> Tensor:
    """Computes `activate` in plain torch, rounded once."""
    approximate = "tanh" if kind.endswith("tanh") else "none"
    if weights is None and kind not in GATED:
        return F.gelu(x, approximate=approximate)  # computes narrow dtypes in float32 itself
    wide = x.to(statistics_dtype(x.dtype))
    if kind not in GATED:
        y = F.gelu(wide, approximate=approximate)
    else:
        gate, up = wide.chunk(2, dim=-1)
        if kind == "swiglu_clamped":
            gate, up = _within(gate, -torch.inf, 7.0), _within(up, -7.0, 7.0)
            y = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
        else:
            y = (F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")) * up
    return (y if weights is None else y * weights[:, None].to(y.dtype)).to(x.dtype)


@jit
def swiglu_with_derivatives(gate, up):
    """Computes silu(gate) · up and its derivatives with respect to gate and up."""
    s = tl.sigmoid(gate)
    return gate * s * up, up * s * (1.0 + gate * (1.0 - s)), gate * s


@jit
def _normal_distribution(z, KIND: tl.constexpr):
    """Computes Phi(z) and phi(z) of GELU, or their approximations by tanh."""
    if KIND != "gelu":
        u = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        t = 2.0 * tl.sigmoid(2.0 * u) - 1.0
        cdf = 0.5 * (1.0 + t)
        pdf = 0.5 * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * z * z)
    else:
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        pdf = 0.3989422804014327 * tl.exp(-0.5 * z * z)
    return cdf, pdf


@jit
def _gated_with_derivatives(gate, up, KIND: tl.constexpr):
    """Computes a gated activation and its derivatives with respect to gate and up."""
    if KIND == "swiglu_clamped":
        g = tl.minimum(gate, 7.0)
        u = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        s = tl.sigmoid(1.702 * g)
        y = g * s * u
        dgate = tl.where(gate <= 7.0, u * s * (1.0 + 1.702 * g * (1.0 - s)), 0.0)
        dup = tl.where((up >= -7.0) & (up <= 7.0), g * s, 0.0)
    elif KIND == "geglu_tanh":
        cdf, pdf = _normal_distribution(gate, KIND)
        y = gate * cdf * up
        dgate = up * (cdf + gate * pdf)
        dup = gate * cdf
    else:
        y, dgate, dup = swiglu_with_derivatives(gate, up)
    return y, dgate, dup


@jit
def _activation_kernel(
    x_ptr,
    weights_ptr,
    y_ptr,
    width,
    stride,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Processes one block of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    z = load_float32(x_ptr + row * stride + column, mask)
    if GATED:
        up = load_float32(x_ptr + row * stride + width + column, mask)
        y, _, _ = _gated_with_derivatives(z, up, KIND)
    else:
        cdf, _ = _normal_distribution(z, KIND)
        y = z * cdf
    if WEIGHTED:
        y *= tl.load(weights_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * width + column, y, mask)


@jit
def _block_gradient(
    dy,
    x_ptr,
    dx_ptr,
    column,
    width,
    mask,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
):
    """Stores the gradient of a block, possibly over the block itself, and returns its
    activation."""
    z = load_float32(x_ptr + column, mask)
    if GATED:
        up = load_float32(x_ptr + width + column, mask)
        y, dgate, dup = _gated_with_derivatives(z, up, KIND)
        tl.store(dx_ptr + column, dy * dgate, mask)
        tl.store(dx_ptr + width + column, dy * dup, mask)
    else:
        cdf, pdf = _normal_distribution(z, KIND)
        y = z * cdf
        tl.store(dx_ptr + column, dy * (cdf + z * pdf), mask)
    return y


@jit
def _activation_backward_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    width,
    dy_stride,
    stride,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Processes one block of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    dy = load_float32(dy_ptr + row * dy_stride + column, mask)
    # The gradient is contiguous; x may be strided.
    dx_ptr += row * (width * (1 + GATED))
    _block_gradient(dy, x_ptr + row * stride, dx_ptr, column, width, mask, KIND, GATED)


@jit
def _weighted_backward_kernel(
    dy_ptr,
    x_ptr,
    weights_ptr,
    dx_ptr,
    dw_ptr,
    width,
    dy_stride,
    stride,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Processes a whole row, block by block, because the gradient of its weight sums over it."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    dx_ptr += row * (width * (1 + GATED))
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        dy = load_float32(dy_ptr + row * dy_stride + column, mask)
        y = _block_gradient(
            dy * weight, x_ptr + row * stride, dx_ptr, column, width, mask, KIND, GATED
        )
        dw += dy * y
    tl.store(dw_ptr + row, tl.sum(dw, 0))


def _launch_config(kind: str, device: torch.device) -> dict:
    return {"KIND": kind, "GATED": kind in GATED, **tuning.select("swiglu", device)}


class _Activation(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, kind: str, weights, overwrite: bool):
        rows = rows_of(x)
        width = rows.shape[1] // 2 if kind in GATED else rows.shape[1]
        y = x.new_empty(*x.shape[:-1], width)
        config = _launch_config(kind, x.device)
        grid = (rows.shape[0], cdiv(width, config["BLOCK"]))
        factors = rows if weights is None else weights.contiguous()
        config["WEIGHTED"] = weights is not None
        _activation_kernel[grid](rows, factors, y, width, rows.stride(0), **config)
        ctx.kind, ctx.overwrite = kind, overwrite and x.is_contiguous()
        ctx.save_for_backward(x if ctx.overwrite else rows, weights)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weights = ctx.saved_tensors
        dx, dweights = activation_backward(dy, x, ctx.kind, weights, overwrite=ctx.overwrite)
        return dx, None, dweights, None


def activate(
    x: Tensor, kind: str, weights: Tensor | None = None, *, overwrite: bool = False
) -> Tensor:
    """Applies the activation between the two matrices of a feed-forward layer.

    Args:
        x: `[..., 2f]` for a gated kind, gate first, else `[..., f]`; any floating dtype.
        kind: one of `KINDS`, or a registered one.
        weights: `[r]`, by which the rows of a matrix `[r, 2f]` or `[r, f]` are multiplied.
        overwrite: the backward may write the gradient over x, which nothing else may read
            afterwards. It saves as much memory as x takes. The plain path, and x that is not
            contiguous, ignore it.

    Returns:
        `[..., f]` in the dtype of x, computed in float32 (float64 for float64); differentiable in x
        and weights.

    Raises:
        ValueError: an unknown kind, an odd last dim of a gated one, weights of another shape, or a
            leaf that would be overwritten.
    """
    if kind in _REGISTERED:
        y = _REGISTERED[kind](x)
        return y if weights is None else y * weights[:, None].to(y.dtype)
    if kind not in KINDS:
        raise ValueError(f"unknown activation {kind!r}: expected one of {', '.join(KINDS)}")
    if weights is not None and weights.shape != x.shape[:1]:
        raise ValueError(
            f"expected one weight per row of x {tuple(x.shape)} (got {tuple(weights.shape)})"
        )
    if kind in GATED and x.shape[-1] % 2:
        raise ValueError(
            f"{kind} splits the last dim into halves (gate, up), so its size must be even "
            f"(got {x.shape[-1]})"
        )
    if overwrite and x.is_leaf and x.requires_grad:
        raise ValueError(
            f"overwrite=True would replace the leaf {tuple(x.shape)} by its gradient: "
            "pass overwrite=False"
        )
    if not dispatch.runs_triton(x):
        return activation_reference(x, kind, weights)
    return _Activation.apply(x, kind, weights, overwrite)


def activation_backward(
    dy: Tensor, x: Tensor, kind: str, weights: Tensor | None = None, *, overwrite: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradients of `activate`.

    Args:
        dy: `[..., f]`.
        x, kind, weights, overwrite: as in `activate`.

    Returns:
        The gradients of x and of the weights (None without weights), in their dtypes.
    """
    if not dispatch.runs_triton(x):
        leaves = (x,) if weights is None else (x, weights)
        dx, *grads = dispatch.gradients_of(
            lambda x, w=None: activation_reference(x, kind, w), dy, *leaves
        )
        return dx, grads[0] if grads else None
    if overwrite and x.is_contiguous():  # a program reads its block before it writes the gradient
        # So that autograd raises in a second backward instead of reading the gradient as x.
        torch.autograd.graph.increment_version(x)
        dx = x.detach()
    else:
        dx = x.new_empty(*dy.shape[:-1], x.shape[-1])
    # Without weights, blocks of a row are independent programs.
    dy_rows, rows, config = rows_of(dy), rows_of(x), _launch_config(kind, x.device)
    num_rows, width = dy_rows.shape
    sizes = (width, dy_rows.stride(0), rows.stride(0))
    if weights is None:
        grid = (num_rows, cdiv(width, config["BLOCK"]))
        _activation_backward_kernel[grid](dy_rows, rows, dx, *sizes, **config)
        return dx, None
    weights = weights.contiguous()
    dweights = torch.empty_like(weights)
    _weighted_backward_kernel[(num_rows,)](dy_rows, rows, weights, dx, dweights, *sizes, **config)
    return dx, dweights

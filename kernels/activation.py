"""Feed-forward activations SwiGLU, GeGLU and GELU, and the same for experts: times the router's
weight of each row.

SwiGLU   silu(gate) · up, silu(z) = z s, s = sigmoid(z)                       Shazeer, arXiv:2002.05202, eq. 6
         d gate = dy up s (1 + z (1 - s)),   d up = dy silu(z)
GELU     z Phi(z), or z (1 + tanh u) / 2, u = sqrt(2/pi) (z + 0.044715 z³)   Hendrycks & Gimpel, arXiv:1606.08415
         dz = Phi(z) + z phi(z), and for the approximation (1 + t) / 2 + z (1 - t²) u' / 2
GeGLU    gelu(gate) · up, with the tanh form of GELU                          Shazeer, arXiv:2002.05202, eq. 6
clamped  g s (u + 1), g = min(gate, 7), s = sigmoid(1.702 g), u = up clamped to [-7, 7]   gpt-oss (OpenAI, 2025)
         beyond a limit the derivative is 0
weighted y[r] = w[r] · act(x[r])     dx[r] = w[r] · dact(x[r], dy[r])     dw[r] = dy[r] · act(x[r])

The next GEMM is linear, so the weight may as well apply to an expert's output. There the outputs
would have to be kept for the gradient of the weights: k·h elements a token, mostly the largest
activation of a layer. Here that gradient is computed from what the activation keeps anyway.
"""

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


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Computes SwiGLU in plain torch, rounded once."""
    gate, up = gate_up.to(statistics_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """Computes GELU in plain torch, which computes it in float32 itself: rounded once."""
    return F.gelu(x, approximate=approximate)


def _approximation(kind: str) -> str:
    return "tanh" if kind == "gelu_tanh" else "none"


def activation_reference(x: Tensor, weights: Tensor | None, kind: str) -> Tensor:
    """Computes `activate`, or with weights `weighted_activation`, in plain torch, rounded once."""
    if weights is None and kind not in GATED:
        return gelu_reference(x, _approximation(kind))
    wide = x.to(statistics_dtype(x.dtype))
    if kind in GATED:
        gate, up = wide.chunk(2, dim=-1)
        if kind == "swiglu":
            y = F.silu(gate) * up
        elif kind == "geglu_tanh":
            y = gelu_reference(gate, "tanh") * up
        else:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            y = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        y = gelu_reference(wide, _approximation(kind))
    return (y if weights is None else y * weights[:, None].to(y.dtype)).to(x.dtype)


@jit
def swiglu_slopes(gate, up):
    """Computes silu(gate) · up, and its derivatives with respect to both."""
    s = tl.sigmoid(gate)
    return gate * s * up, up * s * (1.0 + gate * (1.0 - s)), gate * s


@jit
def gelu_terms(z, TANH: tl.constexpr):
    """Returns the share of z that passes, and its derivative with respect to z."""
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
def gated_slopes(gate, up, TANH: tl.constexpr, CLAMPED: tl.constexpr):
    """Computes a gated activation, and its derivatives with respect to gate and up."""
    if CLAMPED:
        g = tl.minimum(gate, 7.0)
        u = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        s = tl.sigmoid(1.702 * g)
        y = g * s * u
        slope_gate = tl.where(gate <= 7.0, u * s * (1.0 + 1.702 * g * (1.0 - s)), 0.0)
        slope_up = tl.where((up >= -7.0) & (up <= 7.0), g * s, 0.0)
    elif TANH:
        share, slope = gelu_terms(gate, True)
        y = gate * share * up
        slope_gate = up * (share + gate * slope)
        slope_up = gate * share
    else:
        y, slope_gate, slope_up = swiglu_slopes(gate, up)
    return y, slope_gate, slope_up


@jit
def _activation_kernel(
    x_ptr,
    weights_ptr,
    y_ptr,
    width,
    stride,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    CLAMPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    z = load_float32(x_ptr + row * stride + column, live)
    if GATED:
        up = load_float32(x_ptr + row * stride + width + column, live)
        y, _, _ = gated_slopes(z, up, TANH, CLAMPED)
    else:
        share, _ = gelu_terms(z, TANH)
        y = z * share
    if WEIGHTED:
        y *= tl.load(weights_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * width + column, y, live)


@jit
def _block_gradient(
    dy,
    x_ptr,
    dx_ptr,
    column,
    width,
    live,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    """Stores the gradient of a block of a row, perhaps over the block, and returns its
    activation."""
    z = load_float32(x_ptr + column, live)
    if GATED:
        up = load_float32(x_ptr + width + column, live)
        y, slope_gate, slope_up = gated_slopes(z, up, TANH, CLAMPED)
        tl.store(dx_ptr + column, dy * slope_gate, live)
        tl.store(dx_ptr + width + column, dy * slope_up, live)
    else:
        share, slope = gelu_terms(z, TANH)
        y = z * share
        tl.store(dx_ptr + column, dy * (share + z * slope), live)
    return y


@jit
def _activation_backward_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    width,
    dy_stride,
    stride,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    dy = load_float32(dy_ptr + row * dy_stride + column, live)
    dx_ptr += row * (width * (1 + GATED))
    _block_gradient(dy, x_ptr + row * stride, dx_ptr, column, width, live, GATED, TANH, CLAMPED)


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
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Processes one row, block after block, for the gradient of its weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    dx_ptr += row * (width * (1 + GATED))
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        live = column < width
        dy = load_float32(dy_ptr + row * dy_stride + column, live)
        y = _block_gradient(
            dy * weight, x_ptr + row * stride, dx_ptr, column, width, live, GATED, TANH, CLAMPED
        )
        total += dy * y
    tl.store(dw_ptr + row, tl.sum(total, 0))


def _flags(kind: str) -> dict[str, bool]:
    return {
        "GATED": kind in GATED,
        "TANH": kind.endswith("tanh"),
        "CLAMPED": kind == "swiglu_clamped",
    }


class _Activation(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, weights, kind: str, overwrite: bool):
        rows = rows_of(x)
        width = rows.shape[1] // 2 if kind in GATED else rows.shape[1]
        y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
        config = tuning.select("swiglu", x.device)
        grid = (rows.shape[0], cdiv(width, config["BLOCK"]))
        factors = rows if weights is None else weights.contiguous()
        flags = {**_flags(kind), "WEIGHTED": weights is not None}
        _activation_kernel[grid](rows, factors, y, width, rows.stride(0), **flags, **config)
        ctx.kind, ctx.overwrite = kind, overwrite and x.is_contiguous()
        ctx.save_for_backward(x if ctx.overwrite else rows, weights)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weights = ctx.saved_tensors
        return *activation_backward(dy, x, weights, ctx.kind, ctx.overwrite), None, None


def _apply(x: Tensor, weights: Tensor | None, kind: str, overwrite: bool) -> Tensor:
    if kind not in KINDS:
        raise ValueError(f"the activation is one of {', '.join(KINDS)}, not {kind!r}")
    if kind in GATED and x.shape[-1] % 2:
        raise ValueError(
            f"{kind} splits the last dim in two halves (gate, up); {x.shape[-1]} is odd"
        )
    if overwrite and x.is_leaf and x.requires_grad:
        raise ValueError(
            f"overwrite=True would write the gradient of the leaf {tuple(x.shape)} over its value"
        )
    if not dispatch.runs_triton(x):
        return activation_reference(x, weights, kind)
    return _Activation.apply(x, weights, kind, overwrite)


def swiglu(gate_up: Tensor, overwrite: bool = False) -> Tensor:
    """Computes `silu(gate) * up` where gate is the first half of the last dim and up the second.

    Args:
        gate_up: `[..., 2f]`, any floating dtype.
        overwrite: the backward may write the gradient over gate_up, which nothing else needs then:
            2f elements a row less at the peak. The plain path, and gate_up that is not contiguous,
            do not use it.

    Returns:
        `[..., f]` in the same dtype, computed in float32 (float64 for float64).

    Raises:
        ValueError: the last dim is odd, or a leaf would be overwritten.
    """
    return _apply(gate_up, None, "swiglu", overwrite)


def gelu(x: Tensor, approximate: str = "none", overwrite: bool = False) -> Tensor:
    """Computes GELU, the Gaussian error linear unit.

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
    return _apply(x, None, "gelu_tanh" if approximate == "tanh" else "gelu", overwrite)


def activate(x: Tensor, kind: str, overwrite: bool = False) -> Tensor:
    """Applies the activation between the two matrices of a feed-forward layer.

    Args:
        x: `[..., 2f]` for a gated kind, gate first, else `[..., f]`.
        kind: one of `KINDS`.
        overwrite: as in `swiglu`.

    Returns:
        `[..., f]`.

    Raises:
        ValueError: an unknown kind, an odd last dim of a gated one, or a leaf would be overwritten.
    """
    return _apply(x, None, kind, overwrite)


def weighted_activation(x: Tensor, weights: Tensor, kind: str, overwrite: bool = False) -> Tensor:
    """Computes `activate` of rows, each times a weight of its own, differentiable in both.

    Args:
        x: `[r, 2f]` for a gated kind, gate first, else `[r, f]`; any floating dtype.
        weights: `[r]`, any floating dtype.
        kind: one of `KINDS`.
        overwrite: as in `swiglu`.

    Returns:
        `[r, f]` in the dtype of x, computed in float32 (float64 for float64).

    Raises:
        ValueError: as in `activate`, or weights of other rows.
    """
    if weights.shape != x.shape[:1]:
        raise ValueError(
            f"{tuple(weights.shape)} weights for rows {tuple(x.shape)}: one for each row is wanted"
        )
    return _apply(x, weights, kind, overwrite)


def activation_backward(
    dy: Tensor, x: Tensor, weights: Tensor | None, kind: str, overwrite: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradients of `activate`, or with weights of `weighted_activation`.

    Args:
        dy: `[..., f]`.
        x: the input.
        weights: `[r]` or None.
        kind: one of `KINDS`.
        overwrite: as in `swiglu`.

    Returns:
        Those of x and of the weights, in their dtypes.
    """
    if not dispatch.runs_triton(x):
        leaves = (x,) if weights is None else (x, weights)
        dx, *rest = dispatch.gradients_of(
            lambda x, w=None: activation_reference(x, w, kind), dy, *leaves
        )
        return dx, rest[0] if rest else None
    if overwrite and x.is_contiguous():  # each program reads a block before it writes the gradient
        # a second backward of the same graph is refused, not wrong
        torch.autograd.graph.increment_version(x)
        dx = x.detach()
    else:
        dx = torch.empty(*dy.shape[:-1], x.shape[-1], dtype=x.dtype, device=x.device)
    grads, rows, config = rows_of(dy), rows_of(x), tuning.select("swiglu", x.device)
    sizes = (grads.shape[1], grads.stride(0), rows.stride(0))
    if weights is None:
        grid = (rows.shape[0], cdiv(grads.shape[1], config["BLOCK"]))
        _activation_backward_kernel[grid](grads, rows, dx, *sizes, **_flags(kind), **config)
        return dx, None
    weights = weights.contiguous()
    dweights = torch.empty_like(weights)
    _weighted_backward_kernel[(rows.shape[0],)](
        grads, rows, weights, dx, dweights, *sizes, **_flags(kind), **config
    )
    return dx, dweights

"""RMSNorm and LayerNorm over the last dim; with the residual stream, whose sum and gradient cost no pass of their own.

RMSNorm     y = w · x / sqrt(mean(x²) + eps)                      Zhang & Sennrich, arXiv:1910.07467, eq. 4
LayerNorm   y = w · (x - mean x) / sqrt(var x + eps) + b          Ba, Kiros & Hinton, arXiv:1607.06450, eq. 4

With n = the normalised row and g = w · dy:
    dx = (g - n mean(g n)) / sqrt(...)       and for LayerNorm also minus mean(g)
    dw = sum over rows of dy n,   db = sum over rows of dy
and what arrives for x (or x + residual) itself is added to dx before it is stored.
The backward is bound by memory: each program walks many rows and keeps its share of dw in registers, so that x and dy
are read once; the shares of all programs are summed at the end.
"""

import torch
from torch import Tensor

from kernels import dispatch, tuning
from kernels.dispatch import cdiv, first_order, jit, next_power_of_2, rows_of, statistics_dtype, tl
from kernels.wide_normalization import wide_backward_kernel, wide_forward_kernel


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in plain torch; the product with the weight is rounded once, to the dtype of `x`."""
    wide = x.to(statistics_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm in plain torch; the result is rounded once, to the dtype of `x`."""
    wide = x.to(statistics_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype)


@jit
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    scale_ptr,
    num_rows,
    width,
    x_stride,
    residual_stride,
    eps,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    row_is_live = row < num_rows
    column_is_live = column < width
    live = row_is_live[:, None] & column_is_live[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row[:, None] * residual_stride + column[None, :], live, other=0.0).to(tl.float32)
        # The statistics are of the sum as stored: the backward reads it back and must see the same numbers.
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row[:, None] * width + column[None, :], total, live)
        x = total.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / width
        x = tl.where(live, x - mean[:, None], 0.0)
        tl.store(mean_ptr + row, mean, row_is_live)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(scale_ptr + row, scale, row_is_live)
    y = x * scale[:, None] * tl.load(weight_ptr + column, column_is_live, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, column_is_live, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row[:, None] * width + column[None, :], y.to(y_ptr.dtype.element_ty), live)


@jit
def _backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    scale_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    width,
    dy_stride,
    dtotal_stride,
    x_stride,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DTOTAL: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    column_is_live = column < width
    weight = tl.load(weight_ptr + column, column_is_live, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((ROWS, WIDTH), tl.float32)
    dbias = tl.zeros((ROWS, WIDTH), tl.float32)
    # In more than one stage, the next rows are on their way while these are worked on.
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_is_live = row < num_rows
        live = row_is_live[:, None] & column_is_live[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], live, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], live, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, row_is_live, other=0.0)[:, None]
        if CENTRED:
            x = tl.where(live, x - tl.load(mean_ptr + row, row_is_live, other=0.0)[:, None], 0.0)
        normal = x * scale
        g = dy * weight
        dx = g - normal * (tl.sum(g * normal, 1) / width)[:, None]
        if CENTRED:
            dx -= (tl.sum(g, 1) / width)[:, None]
        dx *= scale
        if HAS_DTOTAL:
            dx += tl.load(dtotal_ptr + row[:, None] * dtotal_stride + column[None, :], live, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row[:, None] * width + column[None, :], dx.to(dx_ptr.dtype.element_ty), live)
        dweight += dy * normal
        if HAS_BIAS:
            dbias += dy
    mine = tl.program_id(0).to(tl.int64) * width + column
    tl.store(dweight_ptr + mine, tl.sum(dweight, 0), column_is_live)
    if HAS_BIAS:
        tl.store(dbias_ptr + mine, tl.sum(dbias, 0), column_is_live)


def _tile(operation: str, x: Tensor) -> dict:
    """ROWS, WIDTH and warps for rows of this width, narrow ones (heads) sharing a program; CHUNK for wide rows."""
    config = tuning.select(operation, x.device, width=x.shape[-1])
    if "CHUNK" in config:
        return config
    config["WIDTH"] = next_power_of_2(x.shape[-1])
    config["ROWS"] = max(1, config.pop("ELEMENTS") // config["WIDTH"])
    return config


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm of x + residual, that sum as rows, and mean (without `centred`, nothing) and 1 / scale of each row."""
    shape, x = x.shape, rows_of(x)
    num_rows, width = x.shape
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(scale) if centred else scale
    total, added = x, x
    if residual is not None:
        added, total = rows_of(residual), torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    tile = _tile("norm_forward", x)
    pointers = (x, added, weight, weight if bias is None else bias, y, total, mean, scale)
    flags = {"CENTRED": centred, "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
    sizes = (width, x.stride(0), added.stride(0), eps)
    if "CHUNK" in tile:
        wide_forward_kernel[(num_rows,)](*pointers, *sizes, **flags, **tile)
    else:
        _forward_kernel[(cdiv(num_rows, tile["ROWS"]),)](*pointers, num_rows, *sizes, **flags, **tile)
    return y, total, mean, scale


class _Norm(torch.autograd.Function):
    """(x, residual) -> (norm of x + residual, x + residual); without a residual the second is x."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, centred):
        y, total, mean, scale = launch_forward(x, residual, weight, bias, eps, centred)
        ctx.save_for_backward(total, weight, bias, mean, scale)
        ctx.flags, ctx.has_residual = {"CENTRED": centred, "HAS_BIAS": bias is not None}, residual is not None
        ctx.set_materialize_grads(False)  # where one of the two results is not used, nothing is read in its place
        return y, x if residual is None else total.view(x.shape)

    @staticmethod
    @first_order
    def backward(ctx, dy, dtotal):
        if dy is None:
            return dtotal, dtotal if ctx.has_residual else None, None, None, None, None
        x, weight, bias, mean, scale = ctx.saved_tensors
        dx, dweight, dbias = _launch_backward(dy, dtotal, (x, weight, mean, scale), ctx.flags)
        bias_grad = None if bias is None else dbias.to(bias.dtype)
        return dx, dx if ctx.has_residual else None, dweight.to(weight.dtype), bias_grad, None, None


def _launch_backward(
    dy: Tensor, dtotal: Tensor | None, kept: tuple[Tensor, Tensor, Tensor, Tensor], flags: dict[str, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradients and what the forward has kept: dx, and dw and db in float32 (db = dw without a bias)."""
    x, weight, mean, scale = kept
    shape, dy, x = dy.shape, rows_of(dy), rows_of(x)
    num_rows, width = x.shape
    tile = _tile("norm_backward", x)
    waves = tile.pop("PROGRAMS_PER_PROCESSOR")
    programs = min(cdiv(num_rows, tile["ROWS"]), waves * dispatch.num_processors(x.device))
    dx = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    shares = torch.zeros if "CHUNK" in tile else torch.empty  # wide rows' are added to from the first row on
    dweight = shares(programs, width, dtype=torch.float32, device=x.device)
    dbias = shares(programs, width, dtype=torch.float32, device=x.device) if flags["HAS_BIAS"] else dweight
    arrived = dy if dtotal is None else rows_of(dtotal)
    strides = (dy.stride(0), arrived.stride(0), x.stride(0))
    pointers = (dy, arrived, x, weight, mean, scale, dx, dweight, dbias)
    kernel = wide_backward_kernel if "CHUNK" in tile else _backward_kernel
    kernel[(programs,)](*pointers, num_rows, width, *strides, **flags, HAS_DTOTAL=dtotal is not None, **tile)
    dweight = dweight.sum(0)
    return dx.view(shape), dweight, dbias.sum(0) if flags["HAS_BIAS"] else dweight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales each row to unit root mean square, then by `weight`.

    Args:
        x: `[..., h]`, any floating dtype.
        weight: `[h]`, any floating dtype.
        eps: added to the mean of squares.

    Returns:
        `[..., h]` in the dtype of `x`; statistics are float32 (float64 for float64).
    """
    return add_rms_norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The RMSNorm of `x + residual`, and that sum, in one pass over memory each way.

    Args:
        x: `[..., h]`, any floating dtype.
        residual: as `x`; None = x is the stream already, and comes back as it is: a branch that begins with a norm
            goes on with both, and their gradients meet in the norm's backward.
        weight: `[h]`, any floating dtype.
        eps: added to the mean of squares.

    Returns:
        The norm of the sum, and the sum, both `[..., h]` in the dtype of `x`.
    """
    if not dispatch.runs_triton(x):
        total = x if residual is None else x + residual
        return rms_norm_reference(total, weight, eps), total
    return _Norm.apply(x, residual, weight.contiguous(), None, eps, False)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, inverse: Tensor, dtotal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of what went into `rms_norm`.

    Args:
        dy, x: `[..., h]`.
        weight: `[h]`.
        eps: added to the mean of squares.
        inverse: `[rows]`, 1 / root mean square of each row of x; the plain path makes it again.
        dtotal: `[..., h]`, what arrives for x beside its norm.

    Returns:
        dx `[..., h]` and dw `[h]`, in the dtypes of x and weight.
    """
    if not dispatch.runs_triton(x):
        dx, dweight = dispatch.gradients_of(lambda x, weight: rms_norm_reference(x, weight, eps), dy, x, weight)
        return dx if dtotal is None else dx + dtotal, dweight
    kept = x, weight.contiguous(), inverse, inverse
    dx, dweight, _ = _launch_backward(dy, dtotal, kept, {"CENTRED": False, "HAS_BIAS": False})
    return dx, dweight.to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Centres each row and scales it to unit variance, then by `weight`, plus `bias`.

    Args:
        x: `[..., h]`, any floating dtype.
        weight: `[h]`, any floating dtype.
        bias: `[h]` or None.
        eps: added to the variance.

    Returns:
        `[..., h]` in the dtype of `x`; statistics are float32 (float64 for float64).
    """
    return add_layer_norm(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The LayerNorm of `x + residual`, and that sum: as `add_rms_norm`."""
    if not dispatch.runs_triton(x):
        total = x if residual is None else x + residual
        return layer_norm_reference(total, weight, bias, eps), total
    return _Norm.apply(x, residual, weight.contiguous(), None if bias is None else bias.contiguous(), eps, True)


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    statistics: tuple[Tensor, Tensor],
    dtotal: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of what went into `layer_norm`, its bias too.

    Args:
        dy, x, weight, eps, dtotal: as in `rms_norm_backward`.
        bias: `[h]`.
        statistics: mean and 1 / standard deviation of each row of x, `[rows]`; the plain path makes them again.

    Returns:
        dx `[..., h]`, dw and db `[h]`, in the dtypes of x, weight and bias.
    """
    if not dispatch.runs_triton(x):
        plain = dispatch.gradients_of(lambda x, w, b: layer_norm_reference(x, w, b, eps), dy, x, weight, bias)
        return plain[0] if dtotal is None else plain[0] + dtotal, plain[1], plain[2]
    kept = x, weight.contiguous(), *statistics
    dx, dweight, dbias = _launch_backward(dy, dtotal, kept, {"CENTRED": True, "HAS_BIAS": True})
    return dx, dweight.to(weight.dtype), dbias.to(bias.dtype)

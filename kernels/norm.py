"""RMSNorm and LayerNorm over the last dim, optionally fused with the sum of the residual stream.

RMSNorm     y = w · x / sqrt(mean(x²) + eps)                    Zhang & Sennrich, arXiv:1910.07467
LayerNorm   y = w · (x - mean x) / sqrt(var x + eps) + b        Ba, Kiros & Hinton, arXiv:1607.06450
            (eq. 4 in both papers)

With n = the normalized row and g = w · dy:
    dx = (g - n mean(g n)) / sqrt(...)       LayerNorm: also minus mean(g)
    dw = sum over rows of dy n,   db = sum over rows of dy
The gradient that reaches x (or x + residual) through the residual stream is added to dx before dx
is stored. The backward is bound by memory bandwidth: each program processes many rows and keeps its
partial sum of dw in registers, so x and dy are read once. The partial sums are added up at the end.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.kernels import choice, dispatch, tuning
from megatron5d.kernels.choice import AUTO, Settings
from megatron5d.kernels.dispatch import (
    FirstOrderFunction,
    cdiv,
    jit,
    load_float32,
    next_power_of_2,
    rows_of,
    statistics_dtype,
    tl,
)
from megatron5d.kernels.wide_norm import _wide_backward_kernel, _wide_forward_kernel, store_sum


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes RMSNorm in plain torch; the result is rounded once, to the dtype of `x`."""
    return norm_reference(x, weight, eps=eps, centered=False)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computes LayerNorm in plain torch; the result is rounded once, to the dtype of `x`."""
    return norm_reference(x, weight, bias, eps=eps, centered=True)


def norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, centered: bool
) -> Tensor:
    """Computes LayerNorm if `centered`, else RMSNorm, in plain torch."""
    wide = x.to(statistics_dtype(x.dtype))
    if centered:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


def norm_in_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    """Computes (norm of x, x) without a kernel; gradients of both are added in the norm's backward.

    Args:
        x, weight, bias, eps, centered: as in `norm_reference`.
    """
    dtype, wide = x.dtype, statistics_dtype(x.dtype)
    if centered and dtype == weight.dtype == wide and (bias is None or bias.dtype == wide):
        return F.layer_norm(x, weight.shape, weight, bias, eps), x
    if centered:
        # F.layer_norm would sum the gradients of bfloat16 weights in bfloat16.
        bias = None if bias is None else bias.to(wide)
        return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias, eps).to(dtype), x
    if weight.dtype != dtype:
        return rms_norm_reference(x, weight, eps), x
    if dtype != wide:
        return F.rms_norm(x, weight.shape, weight, eps), x
    return _RmsNorm.apply(x, weight, eps)


class _RmsNorm(FirstOrderFunction):
    """(x, weight) -> (norm of x, x), with half the operations of autograd's backward.

    In a small layer on a CPU the number of operations determines the time.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True).add_(eps))
        normal = x * scale
        ctx.save_for_backward(normal, scale, weight)
        # An unused output must not cost a tensor of zeros, nor the time to read it.
        ctx.set_materialize_grads(False)
        return normal * weight, x

    @staticmethod
    def backward(ctx, dy, dstream):
        if dy is None:
            return dstream, None, None
        normal, scale, weight = ctx.saved_tensors
        h = weight.numel()
        dy_normal = (dy * normal).reshape(-1, h)
        # As a matrix product: mv would load torch's compiler on the meta device.
        projection = dy_normal.mm(weight[:, None]).view(scale.shape)
        # g - n mean(g n)
        dx = torch.addcmul(dy * weight, normal, projection, value=-1 / h)
        dx = dx.mul_(scale) if dstream is None else torch.addcmul(dstream, dx, scale)
        return dx, dy_normal.sum(0), None


@jit
def normalize(x, mask, width, eps, mean_ptr, rstd_ptr, row_mask, CENTERED: tl.constexpr):
    """Normalizes whole float32 rows and stores their statistics."""
    if CENTERED:
        mean = tl.sum(x, 1) / width
        x = tl.where(mask, x - mean[:, None], 0.0)
        tl.store(mean_ptr, mean, row_mask)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(rstd_ptr, rstd, row_mask)
    return x * rstd[:, None]


@jit
def scale_and_shift(x, weight_ptr, bias_ptr, column, column_mask, HAS_BIAS: tl.constexpr):
    """Multiplies rows by the weight and adds the bias."""
    y = x * load_float32(weight_ptr + column, column_mask)[None, :]
    if HAS_BIAS:
        y += load_float32(bias_ptr + column, column_mask)[None, :]
    return y


@jit
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    width,
    x_stride,
    residual_stride,
    eps,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Processes ROWS whole rows."""
    # 64 bits, because a row times its stride may exceed 2³¹.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    row_mask, column_mask = row < num_rows, column < width
    mask = row_mask[:, None] & column_mask[None, :]
    rows, columns = row[:, None], column[None, :]
    x = load_float32(x_ptr + rows * x_stride + columns, mask)
    if HAS_RESIDUAL:
        residual = load_float32(residual_ptr + rows * residual_stride + columns, mask)
        x = store_sum(x, residual, sum_ptr + rows * width + columns, mask)
    y = normalize(x, mask, width, eps, mean_ptr + row, rstd_ptr + row, row_mask, CENTERED)
    y = scale_and_shift(y, weight_ptr, bias_ptr, column, column_mask, HAS_BIAS)
    tl.store(y_ptr + rows * width + columns, y, mask)


@jit
def _backward_kernel(
    dy_ptr,
    dstream_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    width,
    dy_stride,
    dstream_stride,
    x_stride,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DSTREAM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Processes many rows, ROWS at a time, and stores one partial sum of dw and db."""
    column = tl.arange(0, WIDTH)
    column_mask = column < width
    columns = column[None, :]
    weight = load_float32(weight_ptr + column, column_mask)[None, :]
    dweight = tl.zeros((ROWS, WIDTH), tl.float32)
    dbias = tl.zeros((ROWS, WIDTH), tl.float32)
    # With more than one stage, the next rows are loaded while these are processed.
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_mask = row < num_rows
        mask = row_mask[:, None] & column_mask[None, :]
        rows = row[:, None]
        x = load_float32(x_ptr + rows * x_stride + columns, mask)
        dy = load_float32(dy_ptr + rows * dy_stride + columns, mask)
        rstd = load_float32(rstd_ptr + row, row_mask)[:, None]
        if CENTERED:
            x = tl.where(mask, x - load_float32(mean_ptr + row, row_mask)[:, None], 0.0)
        # The formulas are at the top of this file.
        normal = x * rstd
        g = dy * weight
        dx = g - normal * (tl.sum(g * normal, 1) / width)[:, None]
        if CENTERED:
            dx -= (tl.sum(g, 1) / width)[:, None]
        dx *= rstd
        if HAS_DSTREAM:
            dx += load_float32(dstream_ptr + rows * dstream_stride + columns, mask)
        tl.store(dx_ptr + rows * width + columns, dx, mask)
        dweight += dy * normal
        if HAS_BIAS:
            dbias += dy
    # Row of this program among the partial sums.
    partial = tl.program_id(0).to(tl.int64) * width + column
    tl.store(dweight_ptr + partial, tl.sum(dweight, 0), column_mask)
    if HAS_BIAS:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), column_mask)


def launch_config(operation: str, x: Tensor, min_width: int = 1) -> dict:
    """Launch options for rows of this width: ROWS and WIDTH, or CHUNK for wide rows."""
    config = tuning.select(operation, x.device, width=x.shape[-1])
    if "CHUNK" not in config:
        config["WIDTH"] = max(min_width, next_power_of_2(x.shape[-1]))
        config["ROWS"] = max(1, config.pop("ELEMENTS") // config["WIDTH"])
    return config


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the norm of x + residual, without a gradient.

    Returns:
        The norm `[..., h]`, the sum `[rows, h]`, and of each row mean (only if `centered`) and rstd
        (1 / standard deviation or root mean square), both `[rows]`.
    """
    if (library := choice.norm_provider(x, weight, centered, settings)) is not None:
        return library.forward(x, residual, weight, bias, eps, centered)
    shape, x = x.shape, rows_of(x)
    num_rows, width = x.shape
    y = x.new_empty(shape)
    rstd = x.new_empty(num_rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centered else rstd
    # Without a residual or bias the kernel gets, and does not read, another pointer.
    total, residual_rows = x, x
    if residual is not None:
        total, residual_rows = x.new_empty(x.shape), rows_of(residual)
    config = launch_config("norm_forward", x)
    pointers = (x, residual_rows, weight, weight if bias is None else bias, y, total, mean, rstd)
    sizes = (width, x.stride(0), residual_rows.stride(0), eps)
    config |= {"CENTERED": centered, "HAS_BIAS": bias is not None}
    config["HAS_RESIDUAL"] = residual is not None
    if "CHUNK" in config:
        _wide_forward_kernel[(num_rows,)](*pointers, *sizes, **config)
    else:
        grid = (cdiv(num_rows, config["ROWS"]),)
        _forward_kernel[grid](*pointers, num_rows, *sizes, **config)
    return y, total, mean, rstd


class _Norm(FirstOrderFunction):
    """(x, residual) -> (norm of x + residual, x + residual); without a residual the second is x."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, centered, settings):
        y, total, *statistics = norm_forward(x, residual, weight, bias, eps, centered, settings)
        ctx.save_for_backward(total, weight, bias, *statistics)
        ctx.eps, ctx.centered, ctx.settings = eps, centered, settings
        ctx.has_residual = residual is not None
        # An unused output must not cost a tensor of zeros, nor the time to read it.
        ctx.set_materialize_grads(False)
        return y, x if residual is None else total.view(x.shape)

    @staticmethod
    def backward(ctx, dy, dstream):
        if dy is None:
            return dstream, dstream if ctx.has_residual else None, *[None] * 5
        x, weight, bias, *statistics = ctx.saved_tensors
        dx, dweight, dbias = norm_backward(
            dy, x, weight, bias, ctx.eps, statistics, dstream, ctx.settings, centered=ctx.centered
        )
        return dx, dx if ctx.has_residual else None, dweight, dbias, None, None, None


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    statistics: Sequence[Tensor],
    dstream: Tensor | None = None,
    settings: Settings = AUTO,
    *,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the gradients of `rms_norm`, or with `centered` of `layer_norm`.

    Args:
        dy, x: `[..., h]`.
        weight: `[h]`.
        bias: `[h]` or None.
        eps: added to the mean of squares.
        statistics: mean and rstd of each row of x, `[rows]`; the plain path recomputes them.
        dstream: `[..., h]`, the gradient that reaches x other than through its norm.
        settings: as in `rms_norm`.
        centered: the norm is LayerNorm.

    Returns:
        dx `[..., h]`, dw and db `[h]` (None without a bias), in the dtypes of x, weight and bias.
    """
    if (library := choice.norm_provider(x, weight, centered, settings, backward=True)) is not None:
        return library.backward(dy, x, weight, bias, statistics, dstream, centered)
    if dispatch.runs_triton(x):
        return _launch_backward(dy, x, weight, bias, statistics, dstream, centered)
    leaves = (x, weight) if bias is None else (x, weight, bias)
    dx, *grads = dispatch.gradients_of(
        lambda *leaves: norm_reference(*leaves, eps=eps, centered=centered), dy, *leaves
    )
    return dx if dstream is None else dx + dstream, grads[0], None if bias is None else grads[1]


def _launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Sequence[Tensor],
    dstream: Tensor | None,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    shape, dy, x = dy.shape, rows_of(dy), rows_of(x)
    num_rows, width = x.shape
    config = launch_config("norm_backward", x)
    waves = config.pop("PROGRAMS_PER_PROCESSOR")
    programs = min(cdiv(num_rows, config["ROWS"]), waves * dispatch.num_processors(x.device))
    dx = x.new_empty(x.shape)
    # The kernel for wide rows adds to its partial sums, the other one stores them once.
    new_parts = x.new_zeros if "CHUNK" in config else x.new_empty
    dweight = new_parts((programs, width), dtype=torch.float32)
    dbias = dweight if bias is None else new_parts(dweight.shape, dtype=torch.float32)
    dstream_rows = dy if dstream is None else rows_of(dstream)
    pointers = (dy, dstream_rows, x, weight.contiguous(), *statistics, dx, dweight, dbias)
    strides = (dy.stride(0), dstream_rows.stride(0), x.stride(0))
    config |= {"CENTERED": centered, "HAS_BIAS": bias is not None}
    config["HAS_DSTREAM"] = dstream is not None
    kernel = _wide_backward_kernel if "CHUNK" in config else _backward_kernel
    kernel[(programs,)](*pointers, num_rows, width, *strides, **config)
    bias_grad = None if bias is None else dbias.sum(0).to(bias.dtype)
    return dx.view(shape), dweight.sum(0).to(weight.dtype), bias_grad


def rms_norm(x: Tensor, weight: Tensor, eps: float, settings: Settings = AUTO) -> Tensor:
    """Scales each row to unit root mean square, then by `weight`.

    Args:
        x: `[..., h]`, any floating dtype.
        weight: `[h]`, any floating dtype.
        eps: added to the mean of squares.
        settings: which library may compute it on a GPU.

    Returns:
        `[..., h]` in the dtype of `x`; statistics are float32 (float64 for float64).
    """
    return add_rms_norm(x, None, weight, eps, settings)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, settings: Settings = AUTO
) -> tuple[Tensor, Tensor]:
    """Computes the RMSNorm of `x + residual`, and that sum, in one pass over memory each way.

    Args:
        x: `[..., h]`, any floating dtype.
        residual: as `x`. None: x is the residual stream itself and is returned unchanged. A branch
            that begins with a norm uses both results, so that their gradients are added in the
            norm's backward.
        weight: `[h]`, any floating dtype.
        eps: added to the mean of squares.

    Returns:
        The norm of the sum, and the sum, both `[..., h]` in the dtype of `x`.
    """
    return _add_norm(x, residual, weight, None, eps, False, settings)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, settings: Settings = AUTO
) -> Tensor:
    """Centers each row and scales it to unit variance, then by `weight`, and adds `bias`.

    Args:
        x: `[..., h]`, any floating dtype.
        weight: `[h]`, any floating dtype.
        bias: `[h]` or None.
        eps: added to the variance.
        settings: as in `rms_norm`.

    Returns:
        `[..., h]` in the dtype of `x`; statistics are float32 (float64 for float64).
    """
    return add_layer_norm(x, None, weight, bias, eps, settings)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    settings: Settings = AUTO,
) -> tuple[Tensor, Tensor]:
    """Computes the LayerNorm of `x + residual`, and that sum, as `add_rms_norm` does."""
    return _add_norm(x, residual, weight, bias, eps, True, settings)


def _add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    if not (dispatch.runs_triton(x) or choice.norm_provider(x, weight, centered, settings)):
        return norm_in_torch(x if residual is None else x + residual, weight, bias, eps, centered)
    bias = None if bias is None else bias.contiguous()
    return _Norm.apply(x, residual, weight.contiguous(), bias, eps, centered, settings)

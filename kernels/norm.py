"""RMSNorm and LayerNorm over the last dim; with the residual stream, whose sum and gradient cost no
pass of their own.

RMSNorm     y = w · x / sqrt(mean(x²) + eps)                      Zhang & Sennrich, arXiv:1910.07467, eq. 4
LayerNorm   y = w · (x - mean x) / sqrt(var x + eps) + b          Ba, Kiros & Hinton, arXiv:1607.06450, eq. 4

With n = the normalised row and g = w · dy:
    dx = (g - n mean(g n)) / sqrt(...)       and for LayerNorm also minus mean(g)
    dw = sum over rows of dy n,   db = sum over rows of dy
and the gradient of x (or x + residual) itself is added to dx before it is stored. The backward is
bound by memory: each program walks many rows and keeps its share of dw in registers, so that x and
dy are read once; the shares of all programs are summed at the end.

Rows too wide for the registers of a program (those with a CHUNK in the tables) are walked twice,
the second time from the second-level cache, through which the backward also adds up its float32
share of dw. It takes two rows at a time where the cache holds the rows of all programs.
"""

from collections.abc import Sequence

import torch
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
    tl,
)
from megatron5d.kernels.plain_norm import norm_in_torch, norm_reference


@jit
def stored_sum(x, added, total_at, live):
    """Stores x + added and returns it as rounded: the backward reads it back, and the statistics
    are of it."""
    total = (x + added).to(total_at.dtype.element_ty)
    tl.store(total_at, total, live)
    return total.to(tl.float32)


@jit
def normalised(x, live, width, eps, statistics, row_is_live, CENTRED: tl.constexpr):
    """Centres and scales whole rows of float32; their mean and 1 / scale are stored at
    `statistics`."""
    if CENTRED:
        mean = tl.sum(x, 1) / width
        x = tl.where(live, x - mean[:, None], 0.0)
        tl.store(statistics[0], mean, row_is_live)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(statistics[1], scale, row_is_live)
    return x * scale[:, None]


@jit
def scaled(x, weight_ptr, bias_ptr, column, column_is_live, HAS_BIAS: tl.constexpr):
    """Multiplies rows by the weight and adds the bias."""
    y = x * load_float32(weight_ptr + column, column_is_live)[None, :]
    if HAS_BIAS:
        y += load_float32(bias_ptr + column, column_is_live)[None, :]
    return y


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
    x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], live)
    if HAS_RESIDUAL:
        added = load_float32(residual_ptr + row[:, None] * residual_stride + column[None, :], live)
        x = stored_sum(x, added, total_ptr + row[:, None] * width + column[None, :], live)
    statistics = mean_ptr + row, scale_ptr + row
    y = normalised(x, live, width, eps, statistics, row_is_live, CENTRED)
    y = scaled(y, weight_ptr, bias_ptr, column, column_is_live, HAS_BIAS)
    tl.store(y_ptr + row[:, None] * width + column[None, :], y, live)


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
    weight = load_float32(weight_ptr + column, column_is_live)[None, :]
    dweight = tl.zeros((ROWS, WIDTH), tl.float32)
    dbias = tl.zeros((ROWS, WIDTH), tl.float32)
    # In more than one stage, the next rows are on their way while these are worked on.
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_is_live = row < num_rows
        live = row_is_live[:, None] & column_is_live[None, :]
        x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], live)
        dy = load_float32(dy_ptr + row[:, None] * dy_stride + column[None, :], live)
        scale = load_float32(scale_ptr + row, row_is_live)[:, None]
        if CENTRED:
            x = tl.where(live, x - load_float32(mean_ptr + row, row_is_live)[:, None], 0.0)
        normal = x * scale
        g = dy * weight
        dx = g - normal * (tl.sum(g * normal, 1) / width)[:, None]
        if CENTRED:
            dx -= (tl.sum(g, 1) / width)[:, None]
        dx *= scale
        if HAS_DTOTAL:
            dx += load_float32(dtotal_ptr + row[:, None] * dtotal_stride + column[None, :], live)
        tl.store(dx_ptr + row[:, None] * width + column[None, :], dx, live)
        dweight += dy * normal
        if HAS_BIAS:
            dbias += dy
    mine = tl.program_id(0).to(tl.int64) * width + column
    tl.store(dweight_ptr + mine, tl.sum(dweight, 0), column_is_live)
    if HAS_BIAS:
        tl.store(dbias_ptr + mine, tl.sum(dbias, 0), column_is_live)


@jit
def _wide_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    scale_ptr,
    width,
    x_stride,
    residual_stride,
    eps,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Processes one row a program.

    LayerNorm keeps, for each lane, the mean of what it has seen and the squares about it, and joins
    the lanes at the
    end: one walk finds both, without the cancellation of mean(x²) - mean(x)² (Chan, Golub & LeVeque
        1983, sec. 2).
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    lane_mean = tl.zeros((CHUNK,), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, width, CHUNK):
        column = start + lane
        live = column < width
        x = load_float32(x_ptr + row * x_stride + column, live)
        if HAS_RESIDUAL:
            added = load_float32(residual_ptr + row * residual_stride + column, live)
            x = stored_sum(x, added, total_ptr + row * width + column, live)
        if CENTRED:
            step = x - lane_mean
            grown = lane_mean + step / (start // CHUNK + 1)
            squares += tl.where(live, step * (x - grown), 0.0)
            lane_mean = tl.where(live, grown, lane_mean)
        else:
            squares += x * x
    mean = 0.0
    if CENTRED:
        count = (width - lane + CHUNK - 1) // CHUNK  # columns that the lane has seen
        mean = tl.sum(lane_mean * count, 0) / width
        squares += count * (lane_mean - mean) * (lane_mean - mean)
        tl.store(mean_ptr + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    tl.store(scale_ptr + row, scale)
    again_ptr = x_ptr + row * x_stride
    if HAS_RESIDUAL:
        again_ptr = total_ptr + row * width
        tl.debug_barrier()  # what other threads of the program have stored is read
    for start in range(0, width, CHUNK):
        column = start + lane
        live = column < width
        x = load_float32(again_ptr + column, live)
        y = (x - mean) * scale * load_float32(weight_ptr + column, live)
        if HAS_BIAS:
            y += load_float32(bias_ptr + column, live)
        tl.store(y_ptr + row * width + column, y, live)


@jit
def _wide_backward_kernel(
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
    CHUNK: tl.constexpr,
):
    """Walks many rows, some at a time, and keeps the program's share of dw and db in memory."""
    mine = tl.program_id(0).to(tl.int64) * width
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = (tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        row_is_live = row < num_rows
        scale = load_float32(scale_ptr + row, row_is_live)
        mean = load_float32(mean_ptr + row, row_is_live) if CENTRED else 0.0
        g_normal = tl.zeros((ROWS, CHUNK), tl.float32)
        g_total = tl.zeros((ROWS, CHUNK), tl.float32)
        for start in range(0, width, CHUNK):
            column = start + tl.arange(0, CHUNK)
            column_is_live = column < width
            live = row_is_live & column_is_live[None, :]
            x = load_float32(x_ptr + row * x_stride + column[None, :], live)
            g = load_float32(dy_ptr + row * dy_stride + column[None, :], live)
            g *= load_float32(weight_ptr + column, column_is_live)[None, :]
            g_normal += g * ((x - mean) * scale)
            g_total += g
        mean_g_normal = tl.sum(g_normal, 1)[:, None] / width
        mean_g = tl.sum(g_total, 1)[:, None] / width if CENTRED else 0.0
        for start in range(0, width, CHUNK):
            column = start + tl.arange(0, CHUNK)
            column_is_live = column < width
            live = row_is_live & column_is_live[None, :]
            x = load_float32(x_ptr + row * x_stride + column[None, :], live)
            dy = load_float32(dy_ptr + row * dy_stride + column[None, :], live)
            weight = load_float32(weight_ptr + column, column_is_live)[None, :]
            normal = (x - mean) * scale
            dx = (dy * weight - normal * mean_g_normal - mean_g) * scale
            if HAS_DTOTAL:
                dx += load_float32(dtotal_ptr + row * dtotal_stride + column[None, :], live)
            tl.store(dx_ptr + row * width + column[None, :], dx, live)
            dweight = load_float32(dweight_ptr + mine + column, column_is_live)
            tl.store(dweight_ptr + mine + column, dweight + tl.sum(dy * normal, 0), column_is_live)
            if HAS_BIAS:
                dbias = load_float32(dbias_ptr + mine + column, column_is_live)
                tl.store(dbias_ptr + mine + column, dbias + tl.sum(dy, 0), column_is_live)


def _tile(operation: str, x: Tensor) -> dict:
    """Selects ROWS, WIDTH and warps for rows of this width, narrow ones share a program; CHUNK for
    wide rows."""
    config = tuning.select(operation, x.device, width=x.shape[-1])
    if "CHUNK" in config:
        return config
    config["WIDTH"] = next_power_of_2(x.shape[-1])
    config["ROWS"] = max(1, config.pop("ELEMENTS") // config["WIDTH"])
    return config


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the norm of x + residual, that sum as rows, and mean (only if `centred`) and 1 /
    scale of each row."""
    if (library := choice.norm(x, weight, centred, settings)) is not None:
        return library.forward(x, residual, weight, bias, eps, centred)
    shape, x = x.shape, rows_of(x)
    num_rows, width = x.shape
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(scale) if centred else scale
    total, added = x, x
    if residual is not None:
        added, total = (
            rows_of(residual),
            torch.empty(num_rows, width, dtype=x.dtype, device=x.device),
        )
    tile = _tile("norm_forward", x)
    pointers = (x, added, weight, weight if bias is None else bias, y, total, mean, scale)
    flags = {"CENTRED": centred, "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
    sizes = (width, x.stride(0), added.stride(0), eps)
    if "CHUNK" in tile:
        _wide_forward_kernel[(num_rows,)](*pointers, *sizes, **flags, **tile)
    else:
        _forward_kernel[(cdiv(num_rows, tile["ROWS"]),)](
            *pointers, num_rows, *sizes, **flags, **tile
        )
    return y, total, mean, scale


class _Norm(FirstOrderFunction):
    """(x, residual) -> (norm of x + residual, x + residual); without a residual the second is x."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, centred, settings):
        y, total, *statistics = launch_forward(x, residual, weight, bias, eps, centred, settings)
        ctx.save_for_backward(total, weight, bias, *statistics)
        ctx.eps, ctx.centred, ctx.settings = eps, centred, settings
        ctx.has_residual = residual is not None
        # where one of the two results is not used, nothing is read in its place
        ctx.set_materialize_grads(False)
        return y, x if residual is None else total.view(x.shape)

    @staticmethod
    def backward(ctx, dy, dtotal):
        if dy is None:
            return dtotal, dtotal if ctx.has_residual else None, None, None, None, None, None
        x, weight, bias, *statistics = ctx.saved_tensors
        dx, *others = norm_backward(
            dy, x, weight, bias, ctx.eps, statistics, dtotal, ctx.settings, centred=ctx.centred
        )
        return dx, dx if ctx.has_residual else None, *others, None, None, None


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    statistics: Sequence[Tensor],
    dtotal: Tensor | None = None,
    settings: Settings = AUTO,
    *,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the gradients of `rms_norm`, or with `centred` of `layer_norm`.

    Args:
        dy, x: `[..., h]`.
        weight: `[h]`.
        bias: `[h]` or None.
        eps: added to the mean of squares.
        statistics: mean and 1 / scale of each row of x, `[rows]`; the plain path makes them again.
        dtotal: `[..., h]`, the gradient of x beside its norm.
        settings: as in `rms_norm`.
        centred: the norm is LayerNorm.

    Returns:
        dx `[..., h]`, dw and db `[h]` (None without a bias), in the dtypes of x, weight and bias.
    """
    if (library := choice.norm(x, weight, centred, settings, backward=True)) is not None:
        return library.backward(dy, x, weight, bias, statistics, dtotal, centred)
    if not dispatch.runs_triton(x):
        leaves = (x, weight) if bias is None else (x, weight, bias)
        dx, dweight, *rest = dispatch.gradients_of(
            lambda *leaves: norm_reference(*leaves, eps=eps, centred=centred), dy, *leaves
        )
        return dx if dtotal is None else dx + dtotal, dweight, rest[0] if rest else None
    shape, dy, x = dy.shape, rows_of(dy), rows_of(x)
    num_rows, width = x.shape
    tile = _tile("norm_backward", x)
    waves = tile.pop("PROGRAMS_PER_PROCESSOR")
    programs = min(cdiv(num_rows, tile["ROWS"]), waves * dispatch.num_processors(x.device))
    dx = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    # wide rows' are added to from the first row on
    shares = torch.zeros if "CHUNK" in tile else torch.empty
    dweight = shares(programs, width, dtype=torch.float32, device=x.device)
    dbias = (
        dweight if bias is None else shares(programs, width, dtype=torch.float32, device=x.device)
    )
    arrived = dy if dtotal is None else rows_of(dtotal)
    strides = (dy.stride(0), arrived.stride(0), x.stride(0))
    pointers = (dy, arrived, x, weight.contiguous(), *statistics, dx, dweight, dbias)
    flags = {"CENTRED": centred, "HAS_BIAS": bias is not None, "HAS_DTOTAL": dtotal is not None}
    kernel = _wide_backward_kernel if "CHUNK" in tile else _backward_kernel
    kernel[(programs,)](*pointers, num_rows, width, *strides, **flags, **tile)
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
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    settings: Settings = AUTO,
) -> tuple[Tensor, Tensor]:
    """Returns the RMSNorm of `x + residual`, and that sum, in one pass over memory each way.

    Args:
        x: `[..., h]`, any floating dtype.
        residual: as `x`; None = x is the stream already, and comes back as it is: a branch that
            begins with a norm continues with both, and their gradients meet in the norm's backward.
        weight: `[h]`, any floating dtype.
        eps: added to the mean of squares.

    Returns:
        The norm of the sum, and the sum, both `[..., h]` in the dtype of `x`.
    """
    return _add_norm(x, residual, weight, None, eps, False, settings)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, settings: Settings = AUTO
) -> Tensor:
    """Centres each row and scales it to unit variance, then by `weight`, plus `bias`.

    Args:
        x: `[..., h]`, any floating dtype.
        weight: `[h]`, any floating dtype.
        bias: `[h]` or None.
        eps: added to the variance.

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
    """Returns the LayerNorm of `x + residual`, and that sum: as `add_rms_norm`."""
    return _add_norm(x, residual, weight, bias, eps, True, settings)


def _add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    if not (dispatch.runs_triton(x) or choice.norm(x, weight, centred, settings)):
        return norm_in_torch(x if residual is None else x + residual, weight, bias, eps, centred)
    bias = None if bias is None else bias.contiguous()
    return _Norm.apply(x, residual, weight.contiguous(), bias, eps, centred, settings)

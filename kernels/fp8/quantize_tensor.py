"""Quantisation to FP8 with one scale for a whole tensor, from its present maximum.

Two passes over memory: the largest magnitude (`amax_of`), then scaling and the saturating cast
(`quantize_tensor`). They are calls of their own, so that the maximum can be one over several ranks
(current scaling: Micikevicius et al., arXiv:2209.05433, sec. 3).

Experts have a scale each, for their rows: there both passes work by row (`amax_of_rows`,
`quantize_by_row`), and the caller makes the maxima of experts out of those of rows.

Each program writes the maximum of its tile, and those maxima are reduced on the device: no atomics,
no waiting for the host, and the same bits in any order. The arithmetic is that of quantize.py: the
kernels' bits are the references'.
"""

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import cdiv, jit, load_float32, rows_of, tl
from megatron5d.kernels.fp8.quantize import (
    E4M3,
    Quantized,
    cast_scaled,
    largest,
    launch_blocks,
    quantized,
    scales_of,
)


def amax_reference(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros((), device=x.device)
    # one pass; exact in any dtype, and NaN where an element is
    amax = torch.linalg.vector_norm(x, torch.inf).float()
    return torch.where(amax.isnan(), torch.inf, amax)


def quantize_tensor_reference(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False, amax: Tensor | None = None
) -> Quantized:
    amax = amax_reference(x) if amax is None else amax
    scale, largest = scales_of(amax, dtype, powers_of_two), torch.finfo(dtype).max
    # not 0-d, which would leave 16 bits so
    factor = torch.where(amax < torch.inf, 1.0 / scale, torch.nan).reshape(1)
    # float32, without a copy of x in between
    q = (x if x.element_size() == 2 else x.float()) * factor
    return Quantized(q.clamp_(-largest, largest).to(dtype).contiguous(), scale.reshape(1, 1), 0)


def amax_of_rows_reference(x: Tensor) -> Tensor:
    amax = torch.linalg.vector_norm(x, torch.inf, dim=-1).float()
    return torch.where(amax.isnan(), torch.inf, amax)


def quantize_by_row_reference(
    x: Tensor, amax: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    scales = scales_of(amax[:, None], dtype, powers_of_two)
    return cast_scaled(x.float(), amax[:, None], scales, dtype).contiguous(), scales


@jit
def _tile(rows, columns, TILE: tl.constexpr):
    """Returns the rows and columns of this program's tile, and which of its elements exist."""
    tile, across = tl.program_id(0).to(tl.int64), tl.cdiv(columns, TILE)
    row = tile // across * TILE + tl.arange(0, TILE)
    column = tile % across * TILE + tl.arange(0, TILE)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@jit(do_not_specialize=["rows"])
def _amax_kernel(
    x_ptr, parts_ptr, rows, columns, x_stride, BY_ROW: tl.constexpr, TILE: tl.constexpr
):
    """Finds the largest magnitude of one tile, or of each of its rows."""
    row, column, live = _tile(rows, columns, TILE)
    x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], live)
    if BY_ROW:
        across = tl.cdiv(columns, TILE)
        tl.store(parts_ptr + row * across + tl.program_id(0) % across, largest(x, 1), row < rows)
    else:
        tl.store(parts_ptr + tl.program_id(0), largest(largest(x, 1), 0))


@jit
def _cast_kernel(
    x_ptr,
    amax_ptr,
    values_ptr,
    scale_ptr,
    rows,
    columns,
    x_stride,
    LARGEST: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    """Casts one tile; the first program writes the scale, which each computes for itself."""
    row, column, live = _tile(rows, columns, TILE)
    x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], live)
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    values, scale = quantized(x, tl.load(amax_ptr), LARGEST, POWERS_OF_TWO, DTYPE)
    tl.store(values_ptr + row[:, None] * columns + column[None, :], values, live)
    tl.store(scale_ptr, scale, tl.program_id(0) == 0)


@jit(do_not_specialize=["rows"])
def _cast_rows_kernel(
    x_ptr,
    amax_ptr,
    values_ptr,
    scales_ptr,
    rows,
    columns,
    x_stride,
    LARGEST: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    """Casts one tile with a scale for each row; the first tile of a row writes them. Rows change
    with each step."""
    row, column, live = _tile(rows, columns, TILE)
    x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], live)
    amax = load_float32(amax_ptr + row, row < rows)
    values, scale = quantized(x, amax[:, None], LARGEST, POWERS_OF_TWO, values_ptr.dtype.element_ty)
    tl.store(values_ptr + row[:, None] * columns + column[None, :], values, live)
    if tl.program_id(0) % tl.cdiv(columns, TILE) == 0:
        tl.store(scales_ptr + row[:, None], scale, (row < rows)[:, None])


def _tiles(rows: int, columns: int, tile: int) -> int:
    return cdiv(rows, tile) * cdiv(columns, tile)


def _amax(x: Tensor, by_row: bool) -> Tensor:
    """Returns the maxima of the tiles of a matrix, `[tiles]`, or of its rows in each tile, `[rows,
    tiles across]`."""
    rows, columns = x.shape
    config = tuning.select("fp8_tensor", x.device)
    tile, tiles = config["TILE"], _tiles(rows, columns, config["TILE"])
    shape = (rows, cdiv(columns, tile)) if by_row else (tiles,)
    parts = torch.empty(shape, device=x.device)
    _amax_kernel[(tiles,)](x, parts, rows, columns, x.stride(0), BY_ROW=by_row, **config)
    return parts


def _cast(x: Tensor, dtype: torch.dtype, powers_of_two: bool, amax: Tensor) -> Quantized:
    """Casts x `[..., columns]`."""
    flat = rows_of(x)
    rows, columns = flat.shape
    values, scale = (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty(1, 1, device=x.device),
    )
    flags = {"LARGEST": torch.finfo(dtype).max, "POWERS_OF_TWO": powers_of_two}
    config = tuning.select("fp8_tensor", x.device)
    grid = (_tiles(rows, columns, config["TILE"]),)
    _cast_kernel[grid](flat, amax, values, scale, rows, columns, flat.stride(0), **flags, **config)
    return Quantized(values, scale, 0)


def _maximum(x: Tensor, amax: Tensor | None) -> Tensor:
    """Checks the given maximum, or finds that of x."""
    if amax is None:
        return amax_of(x)
    if amax.numel() != 1 or amax.dtype != torch.float32 or amax.device != x.device:
        raise ValueError(
            f"amax {tuple(amax.shape)} {amax.dtype} on {amax.device} must be one float32 number on {x.device}"
        )
    return amax


def amax_of(x: Tensor) -> Tensor:
    """Returns the largest magnitude of a tensor, in one pass and without waiting for the device.

    Args:
        x: any shape, floating dtype and layout; one whose last dim is not contiguous is copied
            first.

    Returns:
        float32 0-d; infinite where an element is not finite, 0 without elements.
    """
    if not dispatch.runs_triton(x):
        return amax_reference(x)
    return _amax(rows_of(x if x.ndim else x.reshape(1)), False).amax()


def quantize_tensor(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False, amax: Tensor | None = None
) -> Quantized:
    """Quantises with one scale for the whole tensor.

    Args:
        x: `[..., columns]`, any floating dtype and layout; one whose last dim is not contiguous is
            copied first.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scale up to a power of two.
        amax: one float32 number on x's device, the largest magnitude that the scale must serve,
            beyond which values saturate; None = that of x.

    Returns:
        values as x, contiguous, and scales `[1, 1]`.

    Raises:
        ValueError: an amax of another form.
    """
    amax = _maximum(x, amax)
    if dispatch.runs_triton(x):
        return _cast(x, dtype, powers_of_two, amax)
    return quantize_tensor_reference(x, dtype, powers_of_two=powers_of_two, amax=amax)


def quantize_tensor_both_ways(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False, amax: Tensor | None = None
) -> tuple[Quantized, Quantized]:
    """Computes `quantize_tensor` of a matrix and of its transpose, which have the same scale, from
    one reading of x.

    Args:
        x: `[rows, columns]`; everything else as in `quantize_tensor`.
        dtype, powers_of_two, amax: as there.

    Returns:
        x, and xᵀ `[columns, rows]`, contiguous.

    Raises:
        ValueError: x is not a matrix, or an amax of another form.
    """
    if x.ndim != 2:
        raise ValueError(f"x {tuple(x.shape)} must be a matrix to be transposed")
    amax = _maximum(x, amax)
    if dispatch.runs_triton(x):
        return launch_blocks(rows_of(x), dtype, powers_of_two, amax)
    straight = quantize_tensor_reference(x, dtype, powers_of_two=powers_of_two, amax=amax)
    return straight, Quantized(straight.values.t().contiguous(), straight.scales, 0)


def amax_of_rows(x: Tensor) -> Tensor:
    """Returns the largest magnitude of each row of a matrix `[rows, columns]`, columns > 0.

    Args:
        x: any floating dtype and layout, as in `amax_of`.

    Returns:
        float32 `[rows]`; infinite where an element of the row is not finite.
    """
    if not dispatch.runs_triton(x):
        return amax_of_rows_reference(x)
    return _amax(rows_of(x), True).amax(1)


def quantize_by_row(
    x: Tensor, amax: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises with a scale for each row, from maxima that rows may share.

    Args:
        x: `[rows, columns]`, any floating dtype and layout, as in `quantize_tensor`.
        amax: float32 `[rows]`, what each row's scale must serve.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scales up to powers of two.

    Returns:
        values as x, contiguous, and scales `[rows, 1]`.

    Raises:
        ValueError: an amax of another form.
    """
    if amax.shape != x.shape[:1] or amax.dtype != torch.float32 or amax.device != x.device:
        raise ValueError(
            f"amax {tuple(amax.shape)} {amax.dtype} on {amax.device} must be float32 {tuple(x.shape[:1])} on {x.device}"
        )
    if not dispatch.runs_triton(x):
        return quantize_by_row_reference(x, amax, dtype, powers_of_two=powers_of_two)
    flat, (rows, columns) = rows_of(x), x.shape
    values, scales = (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty(rows, 1, device=x.device),
    )
    inputs = (flat, amax.contiguous(), values, scales, rows, columns, flat.stride(0))
    config, largest = tuning.select("fp8_tensor", x.device), torch.finfo(dtype).max
    grid = (_tiles(rows, columns, config["TILE"]),)
    _cast_rows_kernel[grid](*inputs, LARGEST=largest, POWERS_OF_TWO=powers_of_two, **config)
    return values, scales

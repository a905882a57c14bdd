"""Quantization to FP8 with one scale per tensor, or per row, from its current maximum.

Two passes over memory: the largest magnitude (`amax_of`), then scaling and the saturating cast
(`quantize_tensor`). They are separate calls, so that the maximum may be taken over several ranks in
between (current scaling: Micikevicius et al., arXiv:2209.05433, sec. 3).

Each expert has one scale for all of its rows. There both passes work by row (`amax_of_rows`,
`quantize_by_row`), and the caller reduces the maxima of rows to those of experts.

Each program stores the maximum of its tile, and torch reduces those on the device: no atomics, no
host synchronization, and the same bits in any order. The arithmetic is that of quantize.py, so
kernels and references give the same bits.
"""

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import cdiv, jit, load_float32, rows_of, tl
from megatron5d.kernels.fp8.quantize import (
    E4M3,
    Quantized,
    amax_along,
    cast_scaled,
    launch_blocks,
    quantize_tile,
    scales_of,
)


def amax_reference(x: Tensor) -> Tensor:
    """Computes `amax_of` in plain torch."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return _infinite_norm(x, None)


def amax_of_rows_reference(x: Tensor) -> Tensor:
    """Computes `amax_of_rows` in plain torch."""
    return _infinite_norm(x, -1)


def _infinite_norm(x: Tensor, dim: int | None) -> Tensor:
    # One pass over memory; exact in any dtype, and NaN where an element is.
    amax = torch.linalg.vector_norm(x, torch.inf, dim=dim).float()
    return torch.where(amax.isnan(), torch.inf, amax)


def quantize_tensor_reference(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False, amax: Tensor | None = None
) -> Quantized:
    """Computes `quantize_tensor` in plain torch."""
    amax = amax_reference(x) if amax is None else amax
    scale, largest = scales_of(amax, dtype, powers_of_two), torch.finfo(dtype).max
    # One-dimensional, because a 0-d factor would leave the product in x's 16 bits.
    factor = torch.where(amax < torch.inf, 1.0 / scale, torch.nan).reshape(1)
    # Type promotion yields float32 without a wide copy of x.
    q = (x if x.element_size() == 2 else x.float()) * factor
    return Quantized(q.clamp_(-largest, largest).to(dtype).contiguous(), scale.reshape(1, 1), 0)


def quantize_by_row_reference(
    x: Tensor, amax: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes `quantize_by_row` in plain torch."""
    scales = scales_of(amax[:, None], dtype, powers_of_two)
    return cast_scaled(x.float(), amax[:, None], scales, dtype).contiguous(), scales


@jit
def _tile(rows, columns, TILE: tl.constexpr):
    """Computes the rows and columns of this program's tile, and the mask of its elements."""
    tile, across = tl.program_id(0).to(tl.int64), tl.cdiv(columns, TILE)
    row = tile // across * TILE + tl.arange(0, TILE)
    column = tile % across * TILE + tl.arange(0, TILE)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@jit(do_not_specialize=["rows"])
def _amax_kernel(
    x_ptr, amax_ptr, rows, columns, x_stride, BY_ROW: tl.constexpr, TILE: tl.constexpr
):
    """Finds the largest magnitude of one tile, or of each of its rows."""
    row, column, mask = _tile(rows, columns, TILE)
    x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], mask)
    if BY_ROW:
        across = tl.cdiv(columns, TILE)
        tl.store(amax_ptr + row * across + tl.program_id(0) % across, amax_along(x, 1), row < rows)
    else:
        tl.store(amax_ptr + tl.program_id(0), amax_along(amax_along(x, 1), 0))


@jit
def _cast_kernel(
    x_ptr,
    amax_ptr,
    values_ptr,
    scale_ptr,
    rows,
    columns,
    x_stride,
    POWERS_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    """Casts one tile. Each program computes the scale; the first one stores it."""
    row, column, mask = _tile(rows, columns, TILE)
    x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], mask)
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    values, scale = quantize_tile(x, tl.load(amax_ptr), DTYPE, POWERS_OF_TWO)
    tl.store(values_ptr + row[:, None] * columns + column[None, :], values, mask)
    tl.store(scale_ptr, scale, tl.program_id(0) == 0)


@jit(do_not_specialize=["rows"])  # an expert's number of rows changes with every batch
def _cast_rows_kernel(
    x_ptr,
    amax_ptr,
    values_ptr,
    scales_ptr,
    rows,
    columns,
    x_stride,
    POWERS_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    """Casts one tile with a scale for each row; the first tile of a row stores its scale."""
    row, column, mask = _tile(rows, columns, TILE)
    x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], mask)
    amax = load_float32(amax_ptr + row, row < rows)
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    values, scale = quantize_tile(x, amax[:, None], DTYPE, POWERS_OF_TWO)
    tl.store(values_ptr + row[:, None] * columns + column[None, :], values, mask)
    # Every tile of a row computes the row's scale.
    if tl.program_id(0) % tl.cdiv(columns, TILE) == 0:
        tl.store(scales_ptr + row[:, None], scale, (row < rows)[:, None])


def _num_tiles(rows: int, columns: int, tile: int) -> int:
    return cdiv(rows, tile) * cdiv(columns, tile)


def _tile_maxima(x: Tensor, by_row: bool) -> Tensor:
    """Maxima of the tiles of a matrix, `[tiles]`, or of the rows of its tiles, `[rows, across]`."""
    rows, columns = x.shape
    config = tuning.select("fp8_tensor", x.device)
    tiles = _num_tiles(rows, columns, config["TILE"])
    shape = (rows, cdiv(columns, config["TILE"])) if by_row else (tiles,)
    amax = x.new_empty(shape, dtype=torch.float32)
    _amax_kernel[(tiles,)](x, amax, rows, columns, x.stride(0), BY_ROW=by_row, **config)
    return amax


def _launch_cast(kernel, x: Tensor, amax: Tensor, scales: Tensor, dtype, powers_of_two) -> Tensor:
    """Casts x `[..., columns]` with one of the cast kernels, which fills `scales`."""
    matrix = rows_of(x)
    rows, columns = matrix.shape
    values = x.new_empty(x.shape, dtype=dtype)
    config = tuning.select("fp8_tensor", x.device)
    grid = (_num_tiles(rows, columns, config["TILE"]),)
    sizes = (rows, columns, matrix.stride(0))
    kernel[grid](matrix, amax, values, scales, *sizes, POWERS_OF_TWO=powers_of_two, **config)
    return values


def _check_amax(amax: Tensor, count: int, x: Tensor) -> None:
    if amax.numel() != count or amax.dtype != torch.float32 or amax.device != x.device:
        raise ValueError(
            f"amax of x {tuple(x.shape)} must have {count} float32 elements on {x.device} "
            f"(got {tuple(amax.shape)}, {amax.dtype}, {amax.device})"
        )


def amax_of(x: Tensor) -> Tensor:
    """Largest magnitude of a tensor, found in one pass and without a host synchronization.

    Args:
        x: any shape, floating dtype and layout; copied first if its last dim is not contiguous.

    Returns:
        float32 0-d; infinite if an element is not finite, 0 without elements.
    """
    if not dispatch.runs_triton(x):
        return amax_reference(x)
    return _tile_maxima(rows_of(x if x.ndim else x.reshape(1)), False).amax()


def quantize_tensor(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False, amax: Tensor | None = None
) -> Quantized:
    """Quantizes with one scale for the whole tensor.

    Args:
        x: `[..., columns]`, any floating dtype and layout; copied first if its last dim is not
            contiguous.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scale up to a power of two.
        amax: one float32 number on x's device, the largest magnitude for which the scale is chosen;
            larger values saturate. None = that of x.

    Returns:
        values as x, contiguous, and scales `[1, 1]`.

    Raises:
        ValueError: an amax of another size, dtype or device.
    """
    amax = amax_of(x) if amax is None else amax
    _check_amax(amax, 1, x)
    if not dispatch.runs_triton(x):
        return quantize_tensor_reference(x, dtype, powers_of_two=powers_of_two, amax=amax)
    scale = x.new_empty(1, 1, dtype=torch.float32)
    return Quantized(_launch_cast(_cast_kernel, x, amax, scale, dtype, powers_of_two), scale, 0)


def quantize_tensor_both_ways(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False, amax: Tensor | None = None
) -> tuple[Quantized, Quantized]:
    """Computes `quantize_tensor` of a matrix and of its transpose from one read of x.

    Args:
        x: `[rows, columns]`.
        dtype, powers_of_two, amax: as in `quantize_tensor`.

    Returns:
        x, and xᵀ `[columns, rows]`, contiguous, with the same scale.

    Raises:
        ValueError: x is not a matrix, or an amax of another size, dtype or device.
    """
    if x.ndim != 2:
        raise ValueError(f"expected a matrix to transpose (got x {tuple(x.shape)})")
    amax = amax_of(x) if amax is None else amax
    _check_amax(amax, 1, x)
    if dispatch.runs_triton(x):
        return launch_blocks(rows_of(x), dtype, powers_of_two, amax)
    q = quantize_tensor_reference(x, dtype, powers_of_two=powers_of_two, amax=amax)
    return q, Quantized(q.values.t().contiguous(), q.scales, 0)


def amax_of_rows(x: Tensor) -> Tensor:
    """Largest magnitude of each row of a matrix.

    Args:
        x: `[rows, columns]`, columns > 0; any floating dtype and layout, as in `amax_of`.

    Returns:
        float32 `[rows]`; infinite where an element of the row is not finite.
    """
    if not dispatch.runs_triton(x):
        return amax_of_rows_reference(x)
    return _tile_maxima(rows_of(x), True).amax(1)


def quantize_by_row(
    x: Tensor, amax: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantizes with a scale for each row, from given maxima.

    Args:
        x: `[rows, columns]`, any floating dtype and layout, as in `quantize_tensor`.
        amax: float32 `[rows]`, the largest magnitude for which each row's scale is chosen.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scales up to powers of two.

    Returns:
        values as x, contiguous, and scales `[rows, 1]`.

    Raises:
        ValueError: an amax of another size, dtype or device.
    """
    _check_amax(amax, x.shape[0], x)
    amax = amax.reshape(-1)
    if not dispatch.runs_triton(x):
        return quantize_by_row_reference(x, amax, dtype, powers_of_two=powers_of_two)
    scales = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    return _launch_cast(_cast_rows_kernel, x, amax, scales, dtype, powers_of_two), scales

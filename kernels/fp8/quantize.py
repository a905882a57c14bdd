"""Quantization to FP8 with one scale per 1×128 group of a row or per 128×128 block.

value ≈ scale · q with scale = amax / largest finite q (448 for e4m3, 57344 for e5m2), so the
largest value of each group maps to the largest FP8 number (Micikevicius et al., arXiv:2209.05433,
sec. 3; groups: DeepSeek-V3, arXiv:2412.19437, sec. 3.3.2). With `powers_of_two` the scale is
rounded up to a power of two. Scaling is then exact, and requantizing a value in other groups loses
only what falls below their smallest number.

The arithmetic is fixed so that every device gives the same bits: scale = amax / largest, q =
round(x · (1 / scale)), each operation rounded once in float32. A group of zeros has scale 1. A
group that contains an infinity or NaN becomes NaN throughout, with scale 1, so that errors stay
visible. An amax below 2⁻¹⁰⁰ counts as 2⁻¹⁰⁰, so that 1 / scale is finite; values that lie below it
by more than the FP8 range become zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import cdiv, jit, load_float32, rows_of, statistics_dtype, tl
from megatron5d.kernels.fp8.tiles import amax_of_slices, load_slices, store_transposed

GROUP = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 2.0**-100


@dataclass(frozen=True)
class Quantized:
    """FP8 values and their scales.

    Args:
        values: `[..., rows, columns]` float8.
        scales: float32; `[..., rows, ceil(columns/128)]` for rows_per_scale 1,
            `[..., ceil(rows/128), ceil(columns/128)]` for 128, `[..., 1, 1]` for 0.
        rows_per_scale: 1 (a scale for each 1×128 group), 128 (for each 128×128 block) or 0 (one for
            the matrix).
    """

    values: Tensor
    scales: Tensor
    rows_per_scale: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Computes `[..., rows, columns]` in a wide dtype, rounded once."""
        wide, scales = self.values.to(statistics_dtype(dtype)), self.scales
        if self.rows_per_scale:
            rows, columns = wide.shape[-2:]
            scales = scales.repeat_interleave(self.rows_per_scale, -2)[..., :rows, :]
            scales = scales.repeat_interleave(GROUP, -1)[..., :columns]
        return wide.mul_(scales).to(dtype)


def scales_of(amax: Tensor, dtype: torch.dtype, powers_of_two: bool) -> Tensor:
    """Computes the float32 scales of groups from their `amax` (infinite where a value is NaN)."""
    # A tensor, because on a GPU torch multiplies by the reciprocal of a Python number.
    largest = torch.full_like(amax, torch.finfo(dtype).max)
    scale = amax.clamp(min=SMALLEST_AMAX) / largest
    if powers_of_two:
        # The carry of a nonzero mantissa increments the exponent.
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)


def magnitude_of(x: Tensor) -> Tensor:
    """Computes |x|, with infinity for NaN, which a maximum might drop."""
    return torch.where(x.isnan(), torch.inf, x.abs())


def cast_scaled(x: Tensor, amax: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts float32 x to FP8; `amax` and `scales` of the groups broadcast over x."""
    largest = torch.finfo(dtype).max
    q = (x * (1.0 / scales)).clamp(-largest, largest)
    return torch.where(amax < torch.inf, q, torch.nan).to(dtype)


def quantize_reference(
    x: Tensor, rows_per_scale: int, dtype: torch.dtype = E4M3, powers_of_two: bool = False
) -> Quantized:
    """Quantizes `[..., rows, columns]` in plain torch, for rows_per_scale 1 or 128."""
    rows, columns = x.shape[-2:]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % GROUP, 0, -rows % rows_per_scale))
    # [..., row groups, rows_per_scale, column groups, 128]
    blocks = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, rows_per_scale))
    amax = magnitude_of(blocks).amax((-3, -1), keepdim=True)
    scales = scales_of(amax, dtype, powers_of_two)
    values = cast_scaled(blocks, amax, scales, dtype).flatten(-2, -1).flatten(-3, -2)
    values = values[..., :rows, :columns].contiguous()
    return Quantized(values, scales.squeeze(-1).squeeze(-2), rows_per_scale)


@jit
def amax_along(x, axis: tl.constexpr):
    """Computes the largest |x| of float32 along an axis, with infinity for NaN.

    Compares bits: as integers, magnitudes have the same order, with NaN above infinity, and a warp
    compares integers in one instruction.
    """
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    return tl.where(bits > 0x7F800000, float("inf"), bits.to(tl.float32, bitcast=True))


@jit
def scale_and_factor(amax, DTYPE: tl.constexpr, POWERS_OF_TWO: tl.constexpr):
    """Computes the scale of a maximum and its reciprocal, with the reference's bits."""
    LARGEST: tl.constexpr = 448.0 if tl.float8e4nv == DTYPE else 57344.0
    scale = tl.div_rn(tl.maximum(amax, 7.888609052210118e-31), LARGEST)
    if POWERS_OF_TWO:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    scale = tl.where((amax > 0.0) & (amax < float("inf")), scale, 1.0)
    return scale, tl.where(amax < float("inf"), tl.div_rn(1.0, scale), float("nan"))


@jit
def quantize_tile(x, amax, DTYPE: tl.constexpr, POWERS_OF_TWO: tl.constexpr):
    """Divides a tile by its scales (`amax` broadcasts) and casts it, saturating."""
    scale, factor = scale_and_factor(amax, DTYPE, POWERS_OF_TWO)
    return (x * factor).to(DTYPE), scale


@jit
def store_quantized_rows(x, values_ptr, scales_ptr, mask, row_mask, POWERS_OF_TWO: tl.constexpr):
    """Stores one group of columns of some rows in FP8, and its scales."""
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    values, scale = quantize_tile(x, amax_along(x, 1)[:, None], DTYPE, POWERS_OF_TWO)
    tl.store(values_ptr, values, mask)
    tl.store(scales_ptr, scale, row_mask)


@jit(do_not_specialize=["rows"])  # an expert's number of rows changes with every batch
def _quantize_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    rows,
    columns,
    x_stride,
    POWERS_OF_TWO: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Quantizes one 128×128 tile by rows."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    column = group * GROUP + tl.arange(0, GROUP)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], mask)
    values_ptr += row[:, None] * columns + column[None, :]
    scales_ptr += row[:, None] * tl.cdiv(columns, GROUP) + group
    store_quantized_rows(x, values_ptr, scales_ptr, mask, (row < rows)[:, None], POWERS_OF_TWO)


@jit
def _quantize_blocks_kernel(
    x_ptr,
    amax_ptr,
    values_ptr,
    scales_ptr,
    transposed_ptr,
    transposed_scales_ptr,
    rows,
    columns,
    x_stride,
    transposed_stride,
    HAS_AMAX: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Quantizes one 128×128 tile and its transpose, from the tile's own amax or a given one."""
    row_group, column_group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    matrix = tl.program_id(2).to(tl.int64)
    # Load the tile in slices, which both forms are stored from.
    x_ptr += matrix * rows * x_stride
    first_row, first_column = row_group * GROUP, column_group * GROUP
    slices = load_slices(x_ptr, x_stride, first_row, first_column, rows, columns, GROUP)
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    wide: tl.tuple = ()
    for j in tl.static_range(16):
        wide += (slices[j].to(tl.float32),)
    # One scale for the tile, and for its transpose.
    if HAS_AMAX:
        amax = tl.load(amax_ptr)
    else:
        amax = amax_along(amax_along(amax_of_slices(wide), 1), 0)
    scale, factor = scale_and_factor(amax, DTYPE, POWERS_OF_TWO)
    # Store the tile.
    values_ptr += (matrix * rows + first_row) * columns + first_column
    column, columns_left = tl.arange(0, GROUP)[None, :], (columns - first_column).to(tl.int32)
    scaled: tl.tuple = ()
    for j in tl.static_range(16):
        row = 16 * tl.arange(0, GROUP // 16)[:, None] + j
        scaled += (wide[j] * factor,)
        mask = (row < rows - first_row) & (column < columns_left)
        tl.store(values_ptr + row * columns + column, scaled[j].to(DTYPE), mask)
    # Store its transpose.
    transposed_ptr += matrix * columns * transposed_stride + first_row
    count = transposed_stride - first_row
    store_transposed(
        transposed_ptr, scaled, first_column, columns, transposed_stride, count, DTYPE, GROUP
    )
    # Store the scale: of the tensor once, or of the block in both matrices.
    if HAS_AMAX:
        tl.store(scales_ptr, scale, (row_group == 0) & (column_group == 0))
    else:
        row_groups, column_groups = tl.num_programs(0), tl.num_programs(1)
        scales = matrix * row_groups * column_groups
        tl.store(scales_ptr + scales + row_group * column_groups + column_group, scale)
        tl.store(transposed_scales_ptr + scales + column_group * row_groups + row_group, scale)


def launch_blocks(
    x: Tensor, dtype: torch.dtype, powers_of_two: bool, amax: Tensor | None = None
) -> tuple[Quantized, Quantized]:
    """Quantizes x `[..., rows, columns]` and its transpose: in blocks, or with one scale if `amax`
    is given."""
    *stack, rows, columns = x.shape
    row_groups, column_groups = cdiv(rows, GROUP), cdiv(columns, GROUP)
    values = x.new_empty(x.shape, dtype=dtype)
    padded = cdiv(rows, 16) * 16  # the transpose is stored 16 bytes at a time
    transposed = x.new_empty((*stack, columns, padded), dtype=dtype)
    scales_shape = (*stack, row_groups, column_groups) if amax is None else (1, 1)
    scales = x.new_empty(scales_shape, dtype=torch.float32)
    transposed_scales = scales
    if amax is None:
        transposed_scales = x.new_empty((*stack, column_groups, row_groups), dtype=torch.float32)
    config = {"HAS_AMAX": amax is not None, "POWERS_OF_TWO": powers_of_two, "GROUP": GROUP}
    config |= tuning.select("fp8_blocks", x.device)
    outputs = (values, scales, transposed, transposed_scales)
    sizes = (rows, columns, x.stride(-2), padded)
    _quantize_blocks_kernel[row_groups, column_groups, stack[0] if stack else 1](
        x, scales if amax is None else amax, *outputs, *sizes, **config
    )
    height = GROUP if amax is None else 0
    transposed = transposed[..., :rows].contiguous()
    return Quantized(values, scales, height), Quantized(transposed, transposed_scales, height)


def quantize_rows(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> Quantized:
    """Quantizes with a scale for each 1×128 group of a row: for activations and gradients.

    Args:
        x: `[rows, columns]`, any floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scales up to powers of two.

    Returns:
        values `[rows, columns]`, scales `[rows, ceil(columns/128)]`.
    """
    if not dispatch.runs_triton(x):
        return quantize_reference(x, 1, dtype, powers_of_two)
    x = rows_of(x)
    rows, columns = x.shape
    grid = (cdiv(rows, GROUP), cdiv(columns, GROUP))
    values = x.new_empty(rows, columns, dtype=dtype)
    scales = x.new_empty(rows, grid[1], dtype=torch.float32)
    config = {"POWERS_OF_TWO": powers_of_two, "GROUP": GROUP}
    config |= tuning.select("fp8_quantize", x.device)
    _quantize_kernel[grid](x, values, scales, rows, columns, x.stride(0), **config)
    return Quantized(values, scales, 1)


def quantize_blocks(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> tuple[Quantized, Quantized]:
    """Quantizes x and its transpose with the same scale for each 128×128 block: for weights.

    Args:
        x: `[rows, columns]`, or a stack of such matrices `[E, rows, columns]` (experts); any
            floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scales up to powers of two.

    Returns:
        x with scales `[..., ceil(rows/128), ceil(columns/128)]`, and xᵀ with those scales
        transposed.
    """
    # A stack must be contiguous, because the kernel steps over matrices by rows · stride.
    if dispatch.runs_triton(x):
        return launch_blocks(rows_of(x) if x.ndim == 2 else x.contiguous(), dtype, powers_of_two)
    q = quantize_reference(x, GROUP, dtype, powers_of_two)
    return q, Quantized(q.values.mT.contiguous(), q.scales.mT.contiguous(), GROUP)

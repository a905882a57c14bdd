"""Quantisation to FP8 with one scale per 1×128 group of a row or per 128×128 block, and the
transpose of its results.

value ≈ scale · q with scale = amax / largest finite q (448 for e4m3, 57344 for e5m2), so the
largest value of each group meets the largest number (Micikevicius et al., arXiv:2209.05433, sec. 3;
groups: DeepSeek-V3, arXiv:2412.19437, sec. 3.3.2). With powers of two the scale is rounded up to
one: scaling is then exact, and a value that is quantised again in other groups loses nothing but
what falls below their smallest number.

The arithmetic is fixed so that every device gives the same bits: scale = amax / largest, q =
round(x · (1 / scale)), each operation rounded once in float32. A group of zeros has scale 1. A
group that holds an infinity or NaN is NaN throughout, with scale 1: what has gone wrong stays
visible. An amax below 2⁻¹⁰⁰ counts as 2⁻¹⁰⁰, so that 1 / scale is finite; what lies under it by
more than the FP8 range becomes zero.

The operands of a weight gradient are transposes, quantised anew along the other dim (`fp8_transpose`):
dW = dyᵀ x contracts the tokens, so both are wanted as `[features, tokens]` with scales for groups
of 128 tokens, while forward and input gradient have kept them as `[tokens, features]` with scales
for groups of 128 features (DeepSeek-V3, arXiv:2412.19437, sec. 3.5.2). Between scales that are
powers of two this loses nothing but what falls below the smallest number of the new group.

Where all tokens of an expert share one scale (tensorwise), the transpose keeps values and scale as
they are. Where they all do, or the scales are of whole blocks, only values move
(`transpose_values`).

Tokens sorted by expert are transposed expert by expert: each begins a new group, whose rest is
zeros at its end. Group t holds the tokens that tile t of 128 would hold in `grouped_matmul`, so
where an expert's groups begin follows from the offsets, on the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import cdiv, jit, load_float32, rows_of, statistics_dtype, tl
from megatron5d.kernels.fp8.tiles import largest_of, row_slices, store_transposed
from megatron5d.kernels.gemm import ends_of, expert_lanes, expert_of

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
    """Computes float32 scales of groups whose largest magnitudes are `amax` (infinite where one is
    not a number)."""
    # on a GPU torch divides by a number by its reciprocal
    largest = torch.full_like(amax, torch.finfo(dtype).max)
    scale = amax.clamp(min=SMALLEST_AMAX) / largest
    if powers_of_two:  # the mantissa's carry raises the exponent unless the mantissa is zero
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)


def magnitude_of(x: Tensor) -> Tensor:
    """Computes |x|, and infinity where x is not a number, which a maximum must not lose."""
    return torch.where(x.isnan(), torch.inf, x.abs())


def cast_scaled(x: Tensor, amax: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts float32 x to FP8; `amax` and `scales` of the groups broadcast over x."""
    largest = torch.finfo(dtype).max
    q = (x * (1.0 / scales)).clamp(-largest, largest)
    return torch.where(amax < torch.inf, q, torch.nan).to(dtype)


def quantize_reference(
    x: Tensor, rows_per_scale: int, dtype: torch.dtype = E4M3, powers_of_two: bool = False
) -> Quantized:
    """Groups of 1×128 (rows_per_scale 1) or blocks of 128×128 of `[..., rows, columns]` in plain
    torch."""
    rows, columns = x.shape[-2:]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % GROUP, 0, -rows % rows_per_scale))
    groups, heights = padded.shape[-1] // GROUP, padded.shape[-2] // rows_per_scale
    # [..., R, h, C, 128]
    blocks = padded.unflatten(-1, (groups, GROUP)).unflatten(-3, (heights, rows_per_scale))
    amax = magnitude_of(blocks).amax((-3, -1), keepdim=True)
    scales = scales_of(amax, dtype, powers_of_two)
    values = (
        cast_scaled(blocks, amax, scales, dtype)
        .flatten(-2, -1)
        .flatten(-3, -2)[..., :rows, :columns]
    )
    return Quantized(values.contiguous(), scales.squeeze(-1).squeeze(-2), rows_per_scale)


@jit
def largest(x, axis: tl.constexpr):
    """Returns the largest |x| along an axis, x float32, and infinity where one is not a number.

    It is found among the bits: as integers they are in the same order, NaN above infinity, and a
    warp compares integers in one instruction.
    """
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    return tl.where(bits > 0x7F800000, float("inf"), bits.to(tl.float32, bitcast=True))


@jit
def scale_and_factor(amax, LARGEST: tl.constexpr, POWERS_OF_TWO: tl.constexpr):
    """Returns the scale of a maximum, and what its group is multiplied by; bits as in the
    reference."""
    scale = tl.div_rn(tl.maximum(amax, 7.888609052210118e-31), LARGEST)
    if POWERS_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(
            tl.float32, bitcast=True
        )
    scale = tl.where((amax > 0.0) & (amax < float("inf")), scale, 1.0)
    return scale, tl.where(amax < float("inf"), tl.div_rn(1.0, scale), float("nan"))


@jit
def quantized(x, amax, LARGEST: tl.constexpr, POWERS_OF_TWO: tl.constexpr, DTYPE: tl.constexpr):
    """Divides a tile by its scales (`amax` broadcasts) and casts it, saturating."""
    scale, factor = scale_and_factor(amax, LARGEST, POWERS_OF_TWO)
    return (x * factor).to(DTYPE), scale


@jit(do_not_specialize=["rows"])  # those of experts change with every batch of tokens
def _quantize_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    rows,
    columns,
    x_stride,
    LARGEST: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Processes one 128×128 tile, quantised by rows."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    column = group * GROUP + tl.arange(0, GROUP)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    x = load_float32(x_ptr + row[:, None] * x_stride + column[None, :], live)
    values, scale = quantized(
        x, largest(x, 1)[:, None], LARGEST, POWERS_OF_TWO, values_ptr.dtype.element_ty
    )
    tl.store(values_ptr + row[:, None] * columns + column[None, :], values, live)
    tl.store(
        scales_ptr + row[:, None] * tl.cdiv(columns, GROUP) + group, scale, (row < rows)[:, None]
    )


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
    GIVEN: tl.constexpr,
    LARGEST: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Processes one 128×128 tile and its transpose: with a scale of its own, or that of the GIVEN
    maximum."""
    row_group, column_group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    matrix = tl.program_id(2).to(tl.int64)
    x_ptr += matrix * rows * x_stride
    first_row, first_column = row_group * GROUP, column_group * GROUP
    slices = row_slices(x_ptr, x_stride, first_row, first_column, rows, columns, GROUP)
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    wide: tl.tuple = ()
    for j in tl.static_range(16):
        wide += (slices[j].to(tl.float32),)
    if GIVEN:
        amax = tl.load(amax_ptr)
    else:
        amax = largest(largest(largest_of(wide), 1), 0)
    scale, factor = scale_and_factor(amax, LARGEST, POWERS_OF_TWO)
    values_ptr += (matrix * rows + first_row) * columns + first_column
    column, columns_left = tl.arange(0, GROUP)[None, :], (columns - first_column).to(tl.int32)
    scaled: tl.tuple = ()
    for j in tl.static_range(16):
        row = 16 * tl.arange(0, GROUP // 16)[:, None] + j
        scaled += (wide[j] * factor,)
        live = (row < rows - first_row) & (column < columns_left)
        tl.store(values_ptr + row * columns + column, scaled[j].to(DTYPE), live)
    transposed_ptr += matrix * columns * transposed_stride + first_row
    count = transposed_stride - first_row
    store_transposed(
        transposed_ptr, scaled, first_column, columns, transposed_stride, count, DTYPE, GROUP
    )
    if GIVEN:
        tl.store(scales_ptr, scale, (row_group == 0) & (column_group == 0))
    else:
        row_groups, column_groups = tl.num_programs(0), tl.num_programs(1)
        scales = matrix * row_groups * column_groups
        tl.store(scales_ptr + scales + row_group * column_groups + column_group, scale)
        tl.store(transposed_scales_ptr + scales + column_group * row_groups + row_group, scale)


def launch_blocks(
    x: Tensor, dtype: torch.dtype, powers_of_two: bool, amax: Tensor | None = None
) -> tuple[Quantized, Quantized]:
    """Quantises x `[..., rows, columns]` and its transpose: in blocks, or with the scale of `amax`
    for all of it."""
    *matrices, rows, columns = x.shape
    grid = (cdiv(rows, GROUP), cdiv(columns, GROUP), matrices[0] if matrices else 1)
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    padded = cdiv(rows, 16) * 16  # the transpose is written by 16 bytes
    transposed = torch.empty((*matrices, columns, padded), dtype=dtype, device=x.device)
    scales = torch.empty((*matrices, *grid[:2]) if amax is None else (1, 1), device=x.device)
    others = (
        scales if amax is not None else torch.empty((*matrices, grid[1], grid[0]), device=x.device)
    )
    flags = {
        "GIVEN": amax is not None,
        "POWERS_OF_TWO": powers_of_two,
        "LARGEST": torch.finfo(dtype).max,
    }
    outputs = (values, scales, transposed, others)
    sizes = (rows, columns, x.stride(-2), padded)
    config = tuning.select("fp8_blocks", x.device)
    _quantize_blocks_kernel[grid](
        x, scales if amax is None else amax, *outputs, *sizes, **flags, GROUP=GROUP, **config
    )
    height = GROUP if amax is None else 0
    return Quantized(values, scales, height), Quantized(
        transposed[..., :rows].contiguous(), others, height
    )


def quantize_rows(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> Quantized:
    """Quantises with a scale for each group of 128 neighbours in a row: activations and gradients.

    Args:
        x: `[rows, columns]`, any floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scales up to powers of two.

    Returns:
        values `[rows, columns]`, scales `[rows, ceil(columns/128)]`.
    """
    if dispatch.runs_triton(x):
        flat, largest = rows_of(x), torch.finfo(dtype).max
        (rows, columns), groups = flat.shape, cdiv(x.shape[-1], GROUP)
        values = torch.empty(rows, columns, dtype=dtype, device=x.device)
        scales = torch.empty(rows, groups, device=x.device)
        flags = {"LARGEST": largest, "POWERS_OF_TWO": powers_of_two, "GROUP": GROUP}
        sizes = (rows, columns, flat.stride(0))
        config = tuning.select("fp8_quantize", x.device)
        _quantize_kernel[(cdiv(rows, GROUP), groups)](
            flat, values, scales, *sizes, **flags, **config
        )
        return Quantized(values, scales, 1)
    return quantize_reference(x, 1, dtype, powers_of_two)


def quantize_blocks(
    x: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> tuple[Quantized, Quantized]:
    """Quantises with a scale for each 128×128 block, of x and of its transpose (the same numbers):
    weights.

    Args:
        x: `[rows, columns]`, or a stack of such matrices `[E, rows, columns]` (experts); any
            floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scales up to powers of two.

    Returns:
        x with scales `[..., ceil(rows/128), ceil(columns/128)]`, and xᵀ with those scales
        transposed.
    """
    if dispatch.runs_triton(x):
        return launch_blocks(rows_of(x) if x.ndim == 2 else x.contiguous(), dtype, powers_of_two)
    straight = quantize_reference(x, GROUP, dtype, powers_of_two)
    return straight, Quantized(
        straight.values.mT.contiguous(), straight.scales.mT.contiguous(), GROUP
    )


def fp8_transpose_reference(
    x: Quantized, offsets: Tensor | None = None, *, powers_of_two: bool = False, keep: bool = False
) -> Quantized:
    """Computes `fp8_transpose` in plain torch; asks the host for the offsets."""
    rows, columns = x.values.shape
    ends = [0, rows] if offsets is None else ends_of(offsets, rows)
    num_groups = groups_of(rows, offsets)
    values = torch.zeros(columns, num_groups * GROUP, dtype=x.values.dtype, device=x.values.device)
    scales = torch.ones(columns, num_groups, device=x.values.device)
    group = 0
    for first, last in zip(ends, ends[1:]):
        mine = Quantized(x.values[first:last], x.scales[first:last], 1)
        size = cdiv(last - first, GROUP)
        if size and keep:
            transposed = Quantized(mine.values.t(), mine.scales[:1, :1].expand(columns, size), 1)
        else:
            transposed = quantize_reference(mine.dequantize().t(), 1, x.values.dtype, powers_of_two)
        values[:, group * GROUP : group * GROUP + last - first] = transposed.values
        scales[:, group : group + size] = transposed.scales
        group += size
    return Quantized(values, scales, 1)


def groups_of(rows: int, offsets: Tensor | None) -> int:
    """Returns how many groups of 128 tokens there can be, however the tokens are distributed over
    experts."""
    return cdiv(rows, GROUP) + (0 if offsets is None else offsets.numel() - 1)


@jit
def scaled_anew(
    slices,
    scales_ptr,
    scales_stride,
    rows,
    LARGEST: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Scales a tile in slices, with a scale for each of its rows, anew along its columns; returns
    the new ones too."""
    wide: tl.tuple = ()
    for j in tl.static_range(16):
        row = 16 * tl.arange(0, GROUP // 16) + j
        factor = load_float32(scales_ptr + row * scales_stride, row < rows)
        wide += (slices[j].to(tl.float32) * factor[:, None],)
    scale, factor = scale_and_factor(largest(largest_of(wide), 0)[None, :], LARGEST, POWERS_OF_TWO)
    scaled: tl.tuple = ()
    for j in tl.static_range(16):
        scaled += (wide[j] * factor,)
    return scaled, scale


@jit(do_not_specialize=["rows", "groups", "num_experts"])
def _fp8_transpose_kernel(
    values_ptr,
    scales_ptr,
    transposed_ptr,
    transposed_scales_ptr,
    offsets_ptr,
    rows,
    columns,
    groups,
    num_experts,
    EXPERTS: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    KEEP: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Processes one 128×128 tile."""
    group, column_group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = group * GROUP, rows
    if EXPERTS > 0:
        expert, first, last = expert_of(group, offsets_ptr, num_experts, rows, GROUP, EXPERTS)
        if expert >= num_experts:
            return
    first = first.to(tl.int64)
    column_groups = tl.cdiv(columns, GROUP)
    slices = row_slices(values_ptr, columns, first, column_group * GROUP, last, columns, GROUP)
    if KEEP:
        scale = tl.load(scales_ptr + first * column_groups + column_group)
    else:
        scales_ptr += first * column_groups + column_group
        left = (last - first).to(tl.int32)
        slices, scale = scaled_anew(
            slices, scales_ptr, column_groups, left, LARGEST, POWERS_OF_TWO, GROUP
        )
    # The tile's dead rows are stored too: they are the zeros that fill the group.
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    first_column = column_group * GROUP
    store_transposed(
        transposed_ptr + group * GROUP,
        slices,
        first_column,
        columns,
        groups * GROUP,
        GROUP,
        DTYPE,
        GROUP,
    )
    column = column_group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(transposed_scales_ptr + group.to(tl.int64) * columns + column, scale, column < columns)


@jit
def _transpose_kernel(x_ptr, out_ptr, rows, columns, stride, GROUP: tl.constexpr):
    """Processes one tile of one matrix of bytes."""
    across = tl.cdiv(columns, GROUP)
    matrix = tl.program_id(1).to(tl.int64)
    first_row = (tl.program_id(0) // across).to(tl.int64) * GROUP
    first_column = (tl.program_id(0) % across).to(tl.int64) * GROUP
    slices = row_slices(
        x_ptr + matrix * rows * columns, columns, first_row, first_column, rows, columns, GROUP
    )
    out_ptr += matrix * columns * stride + first_row
    store_transposed(
        out_ptr, slices, first_column, columns, stride, stride - first_row, tl.uint8, GROUP
    )


def transpose_values(values: Tensor) -> Tensor:
    """Matrices in FP8, transposed.

    Args:
        values: `[rows, columns]`, or a stack `[E, rows, columns]`.

    Returns:
        `[columns, rows]` or `[E, columns, rows]`, contiguous, the same dtype.
    """
    if not dispatch.runs_triton(values):
        return values.mT.contiguous()
    *matrices, rows, columns = values.shape
    padded = cdiv(rows, 16) * 16  # the transpose is written by 16 bytes
    out = torch.empty(*matrices, columns, padded, dtype=values.dtype, device=values.device)
    config = tuning.select("fp8_transpose", values.device)
    grid = (cdiv(rows, GROUP) * cdiv(columns, GROUP), matrices[0] if matrices else 1)
    sides = (values.contiguous().view(torch.uint8), out.view(torch.uint8))
    _transpose_kernel[grid](*sides, rows, columns, padded, GROUP=GROUP, **config)
    return out[..., :rows].contiguous()


def fp8_transpose(
    x: Quantized, offsets: Tensor | None = None, *, powers_of_two: bool = False, keep: bool = False
) -> Quantized:
    """Computes `xᵀ` with a scale for each group of 128 tokens.

    Args:
        x: values `[rows, columns]` contiguous, a scale for each 1×128 group.
        offsets: `[E + 1]` as in `grouped_matmul`: groups do not straddle experts; None = all rows
            are one expert's.
        powers_of_two: round the scales up to powers of two.
        keep: all scales of an expert's rows are one number; values and scale stay as they are.

    Returns:
        values `[columns, G·128]`, scales `[columns, G]`, with G = ceil(rows/128), and E more with
        offsets. Groups behind the last expert's hold nothing that may be read. Scales of one group
        are neighbours in memory: a GEMM reads those of many columns at a time.
    """
    rows, columns = x.values.shape
    if not dispatch.runs_triton(x.scales) or not x.values.numel():
        return fp8_transpose_reference(x, offsets, powers_of_two=powers_of_two, keep=keep)
    groups = groups_of(rows, offsets)
    values = torch.empty(columns, groups * GROUP, dtype=x.values.dtype, device=x.values.device)
    scales = torch.empty(groups, columns, device=x.values.device).t()
    experts = 0 if offsets is None else offsets.numel() - 1
    flags = {
        "EXPERTS": expert_lanes(experts) if experts else 0,
        "POWERS_OF_TWO": powers_of_two,
        "KEEP": keep,
    }
    pointers = (x.values, x.scales, values, scales, x.scales if offsets is None else offsets)
    config = tuning.select("fp8_transpose", values.device)
    grid = (groups, cdiv(columns, GROUP))
    largest = torch.finfo(values.dtype).max
    _fp8_transpose_kernel[grid](
        *pointers, rows, columns, groups, experts, **flags, LARGEST=largest, GROUP=GROUP, **config
    )
    return Quantized(values, scales, 1)

"""Transposes of FP8 matrices.

The operands of a weight gradient dW = dyᵀ x are transposes, requantized along the other dim
(`fp8_transpose`). The product contracts the tokens, so both operands must be `[features, tokens]`
with scales for groups of 128 tokens, while forward and input gradient have kept them as
`[tokens, features]` with scales for groups of 128 features (DeepSeek-V3, arXiv:2412.19437, sec.
3.5.2). Between scales that are powers of two this loses only what falls below the smallest number
of the new group.

If all tokens of an expert share one scale (tensorwise), the transpose keeps values and scale. If
all tokens do, or the scales are of whole blocks, only the values move (`transpose_values`).

Tokens sorted by expert are transposed expert by expert. Each expert begins a new group and its last
group is padded with zeros. Group t holds the tokens of tile t of 128 in `grouped_matmul`, so the
device finds an expert's groups from the offsets.
"""

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import cdiv, jit, load_float32, tl
from megatron5d.kernels.fp8.quantize import (
    GROUP,
    Quantized,
    amax_along,
    quantize_reference,
    scale_and_factor,
)
from megatron5d.kernels.fp8.tiles import amax_of_slices, load_slices, store_transposed
from megatron5d.kernels.gemm import expert_lanes, expert_of, host_offsets


def fp8_transpose_reference(
    x: Quantized,
    offsets: Tensor | None = None,
    *,
    powers_of_two: bool = False,
    keep_scales: bool = False,
) -> Quantized:
    """Computes `fp8_transpose` in plain torch; copies the offsets to the host."""
    rows, columns = x.values.shape
    ends = [0, rows] if offsets is None else host_offsets(offsets, rows)
    num_groups = max_groups(rows, offsets)
    values = x.values.new_zeros(columns, num_groups * GROUP)
    scales = x.scales.new_ones(columns, num_groups)
    group = 0
    for first, last in zip(ends, ends[1:]):
        expert_rows = Quantized(x.values[first:last], x.scales[first:last], 1)
        size = cdiv(last - first, GROUP)
        if size and keep_scales:
            scale = expert_rows.scales[:1, :1].expand(columns, size)
            transposed = Quantized(expert_rows.values.t(), scale, 1)
        else:
            wide = expert_rows.dequantize().t()
            transposed = quantize_reference(wide, 1, x.values.dtype, powers_of_two)
        values[:, group * GROUP : group * GROUP + last - first] = transposed.values
        scales[:, group : group + size] = transposed.scales
        group += size
    return Quantized(values, scales, 1)


def max_groups(rows: int, offsets: Tensor | None) -> int:
    """Number of groups of 128 tokens that suffices for any distribution of tokens to experts."""
    return cdiv(rows, GROUP) + (0 if offsets is None else offsets.numel() - 1)


@jit
def _requantize_columns(
    slices,
    scales_ptr,
    scales_stride,
    rows,
    DTYPE: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Replaces the scales of a tile's rows by scales of its columns; returns both."""
    wide: tl.tuple = ()
    for j in tl.static_range(16):
        row = 16 * tl.arange(0, GROUP // 16) + j
        factor = load_float32(scales_ptr + row * scales_stride, row < rows)
        wide += (slices[j].to(tl.float32) * factor[:, None],)
    amax = amax_along(amax_of_slices(wide), 0)[None, :]
    scale, factor = scale_and_factor(amax, DTYPE, POWERS_OF_TWO)
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
    KEEP_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Transposes one 128×128 tile."""
    group, column_group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Rows of this group; with experts, those of the expert that owns it.
    first, last = group * GROUP, rows
    if EXPERTS > 0:
        expert, first, last = expert_of(group, offsets_ptr, num_experts, rows, GROUP, EXPERTS)
        if expert >= num_experts:
            return
    first = first.to(tl.int64)
    column_groups = tl.cdiv(columns, GROUP)
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    slices = load_slices(values_ptr, columns, first, column_group * GROUP, last, columns, GROUP)
    # Requantize the columns, unless values and scale are kept.
    if KEEP_SCALES:
        scale = tl.load(scales_ptr + first * column_groups + column_group)
    else:
        scales_ptr += first * column_groups + column_group
        rows_left = (last - first).to(tl.int32)
        slices, scale = _requantize_columns(
            slices, scales_ptr, column_groups, rows_left, DTYPE, POWERS_OF_TWO, GROUP
        )
    # Rows past the expert's last are stored as well: they are the zeros that pad the group.
    out_ptr, stride = transposed_ptr + group * GROUP, groups * GROUP
    first_column = column_group * GROUP
    store_transposed(out_ptr, slices, first_column, columns, stride, GROUP, DTYPE, GROUP)
    # The scales are stored transposed: those of one group are adjacent.
    column = column_group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(transposed_scales_ptr + group.to(tl.int64) * columns + column, scale, column < columns)


@jit
def _transpose_kernel(x_ptr, out_ptr, rows, columns, stride, GROUP: tl.constexpr):
    """Transposes one tile of one matrix of bytes."""
    column_groups = tl.cdiv(columns, GROUP)
    matrix = tl.program_id(1).to(tl.int64)
    first_row = (tl.program_id(0) // column_groups).to(tl.int64) * GROUP
    first_column = (tl.program_id(0) % column_groups).to(tl.int64) * GROUP
    x_ptr += matrix * rows * columns
    slices = load_slices(x_ptr, columns, first_row, first_column, rows, columns, GROUP)
    out_ptr += matrix * columns * stride + first_row
    count = stride - first_row
    store_transposed(out_ptr, slices, first_column, columns, stride, count, tl.uint8, GROUP)


def transpose_values(values: Tensor) -> Tensor:
    """Transposes FP8 matrices.

    Args:
        values: `[rows, columns]`, or a stack `[E, rows, columns]`.

    Returns:
        `[columns, rows]` or `[E, columns, rows]`, contiguous, the same dtype.
    """
    if not dispatch.runs_triton(values):
        return values.mT.contiguous()
    *stack, rows, columns = values.shape
    padded = cdiv(rows, 16) * 16  # the transpose is stored 16 bytes at a time
    out = values.new_empty(*stack, columns, padded)
    config = tuning.select("fp8_transpose", values.device)
    grid = (cdiv(rows, GROUP) * cdiv(columns, GROUP), stack[0] if stack else 1)
    pointers = (values.contiguous().view(torch.uint8), out.view(torch.uint8))
    _transpose_kernel[grid](*pointers, rows, columns, padded, GROUP=GROUP, **config)
    return out[..., :rows].contiguous()


def fp8_transpose(
    x: Quantized,
    offsets: Tensor | None = None,
    *,
    powers_of_two: bool = False,
    keep_scales: bool = False,
) -> Quantized:
    """Computes `xᵀ` with a scale for each group of 128 tokens.

    Args:
        x: values `[rows, columns]` contiguous, a scale for each 1×128 group.
        offsets: `[E + 1]` as in `grouped_matmul`: no group spans two experts; None = all rows
            belong to one expert.
        powers_of_two: round the scales up to powers of two.
        keep_scales: all rows of an expert have the same scale, so values and scale are kept.

    Returns:
        values `[columns, G·128]`, scales `[columns, G]`, with G = ceil(rows/128), plus E with
        offsets. Groups after the last expert's are uninitialized. The scales of a group are
        adjacent in memory, because a GEMM reads those of many columns at a time.
    """
    rows, columns = x.values.shape
    if not dispatch.runs_triton(x.scales) or not x.values.numel():
        return fp8_transpose_reference(
            x, offsets, powers_of_two=powers_of_two, keep_scales=keep_scales
        )
    groups = max_groups(rows, offsets)
    values = x.values.new_empty(columns, groups * GROUP)
    scales = x.scales.new_empty(groups, columns).t()
    num_experts = 0 if offsets is None else offsets.numel() - 1
    config = {"POWERS_OF_TWO": powers_of_two, "KEEP_SCALES": keep_scales, "GROUP": GROUP}
    config["EXPERTS"] = expert_lanes(num_experts) if num_experts else 0
    config |= tuning.select("fp8_transpose", values.device)
    pointers = (x.values, x.scales, values, scales, x.scales if offsets is None else offsets)
    grid = (groups, cdiv(columns, GROUP))
    _fp8_transpose_kernel[grid](*pointers, rows, columns, groups, num_experts, **config)
    return Quantized(values, scales, 1)

"""The transpose of a quantised matrix, quantised anew along its other dim: the operands of a weight gradient.

dW = dyᵀ x contracts the tokens, so both operands are wanted as `[features, tokens]` with scales for groups of 128
tokens, while forward and input gradient have kept them as `[tokens, features]` with scales for groups of 128 features
(DeepSeek-V3, arXiv:2412.19437, sec. 3.5.2). Between scales that are powers of two this loses nothing but what falls
below the smallest number of the new group.

Where all tokens of an expert share one scale (tensorwise), the transpose keeps values and scale as they are. Where they
all do, or the scales are of whole blocks, only values move (`transposed`).

Tokens sorted by expert are turned expert by expert: each begins a new group, and the rest of its last group is zeros.
Group t holds the tokens that tile t of 128 would hold in `grouped_matmul`, so where an expert's groups begin follows
from the offsets, on the device.
"""

import torch
from torch import Tensor

from kernels import dispatch, tuning
from kernels.fp8.quantize import GROUP, Quantized, largest, quantize_reference, quantized
from kernels.gemm import ends_of, expert_of
from kernels.language import cdiv, jit, next_power_of_2, tl


def turn_reference(
    x: Quantized, offsets: Tensor | None = None, *, powers_of_two: bool = False, keep: bool = False
) -> Quantized:
    """`turn` in plain torch; asks the host for the offsets."""
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
            turned = Quantized(mine.values.t(), mine.scales[:1, :1].expand(columns, size), 1)
        else:
            turned = quantize_reference(mine.dequantize().t(), 1, x.values.dtype, powers_of_two)
        values[:, group * GROUP : group * GROUP + last - first] = turned.values
        scales[:, group : group + size] = turned.scales
        group += size
    return Quantized(values, scales, 1)


def groups_of(rows: int, offsets: Tensor | None) -> int:
    """How many groups of 128 tokens there can be, however the tokens are distributed over experts."""
    return cdiv(rows, GROUP) + (0 if offsets is None else offsets.numel() - 1)


@jit(do_not_specialize=["rows", "groups"])
def _turn_kernel(
    values_ptr,
    scales_ptr,
    turned_ptr,
    turned_scales_ptr,
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
    """One 128×128 tile."""
    group, column_group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = group * GROUP, rows
    if EXPERTS > 0:
        expert, first, last = expert_of(group, offsets_ptr, num_experts, rows, GROUP, EXPERTS)
        if expert >= num_experts:
            return
    row = first.to(tl.int64) + tl.arange(0, GROUP)
    column_groups = tl.cdiv(columns, GROUP)
    column = column_group * GROUP + tl.arange(0, GROUP)
    live = (row < last)[:, None] & (column < columns)[None, :]
    values = tl.load(values_ptr + row[:, None] * columns + column[None, :], live, other=0.0)
    if KEEP:
        scale = tl.load(scales_ptr + first.to(tl.int64) * column_groups + column_group)
    else:
        x = values.to(tl.float32)
        x *= tl.load(scales_ptr + row * column_groups + column_group, row < last, other=0.0)[:, None]
        DTYPE: tl.constexpr = turned_ptr.dtype.element_ty
        values, scale = quantized(x, largest(x, 0)[None, :], LARGEST, POWERS_OF_TWO, DTYPE)
    place = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    # The tile's dead rows are stored too: they are the zeros that fill the group. A mask with `row` in it, where an
    # expert's rows begin anywhere, would have every byte stored by itself.
    known = (column < columns)[None, :]
    tl.store(turned_ptr + column[None, :] * (groups * GROUP) + place[:, None], values, known)
    tl.store(turned_scales_ptr + group.to(tl.int64) * columns + column[None, :], scale, known)


@jit
def _transpose_kernel(x_ptr, out_ptr, rows, columns, TILE: tl.constexpr):
    """One tile of one matrix of bytes."""
    across = tl.cdiv(columns, TILE)
    matrix = tl.program_id(1).to(tl.int64) * rows * columns
    row = (tl.program_id(0) // across).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + matrix + row[:, None] * columns + column[None, :], live, other=0)
    tl.store(out_ptr + matrix + column[None, :] * rows + row[:, None], x, live)


def transposed(values: Tensor) -> Tensor:
    """Matrices in 8 bits, transposed.

    Args:
        values: `[rows, columns]`, or a stack `[E, rows, columns]`.

    Returns:
        `[columns, rows]` or `[E, columns, rows]`, contiguous, the same dtype.
    """
    if not dispatch.runs_triton(values):
        return values.mT.contiguous()
    *matrices, rows, columns = values.shape
    out = torch.empty(*matrices, columns, rows, dtype=values.dtype, device=values.device)
    config = tuning.select("fp8_turn", values.device)
    grid = (cdiv(rows, GROUP) * cdiv(columns, GROUP), matrices[0] if matrices else 1)
    sides = (values.contiguous().view(torch.uint8), out.view(torch.uint8))
    _transpose_kernel[grid](*sides, rows, columns, TILE=GROUP, **config)
    return out


def turn(x: Quantized, offsets: Tensor | None = None, *, powers_of_two: bool = False, keep: bool = False) -> Quantized:
    """`xᵀ` with a scale for each group of 128 tokens.

    Args:
        x: values `[rows, columns]` contiguous, a scale for each 1×128 group.
        offsets: `[E + 1]` as in `grouped_matmul`: groups do not straddle experts; None = all rows are one expert's.
        powers_of_two: round the scales up to powers of two.
        keep: all scales of an expert's rows are one number; values and scale stay as they are.

    Returns:
        values `[columns, G·128]`, scales `[columns, G]`, with G = ceil(rows/128), and E more with offsets. Groups
        behind the last expert's hold nothing that may be read. Scales of one group are neighbours in memory: a
        product reads those of many columns at a time.
    """
    rows, columns = x.values.shape
    if not dispatch.runs_triton(x.scales) or not x.values.numel():
        return turn_reference(x, offsets, powers_of_two=powers_of_two, keep=keep)
    groups = groups_of(rows, offsets)
    values = torch.empty(columns, groups * GROUP, dtype=x.values.dtype, device=x.values.device)
    scales = torch.empty(groups, columns, device=x.values.device).t()
    experts = 0 if offsets is None else offsets.numel() - 1
    flags = {"EXPERTS": next_power_of_2(experts) if experts else 0, "POWERS_OF_TWO": powers_of_two, "KEEP": keep}
    pointers = (x.values, x.scales, values, scales, x.scales if offsets is None else offsets)
    config = tuning.select("fp8_turn", values.device)
    grid = (groups, cdiv(columns, GROUP))
    largest = torch.finfo(values.dtype).max
    _turn_kernel[grid](*pointers, rows, columns, groups, experts, **flags, LARGEST=largest, GROUP=GROUP, **config)
    return Quantized(values, scales, 1)

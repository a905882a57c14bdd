"""FP8 GEMMs with scales, one per tensor or per 128 elements of the contracted dim; grouped GEMMs.

    y[i, j] = sum over groups g of
              sa[i, g] sb[j, g] · (sum over the 128 columns of g of a[i, k] b[j, k])
The tensor cores compute the inner sum; their FP8 accumulator keeps about 14 bits on Hopper. Every
128 columns it is scaled and added in float32 (DeepSeek-V3, arXiv:2412.19437, sec. 3.3.2), and just
as often with one scale per tensor.

The three GEMMs of experts, over tokens sorted by expert; the token counts stay on the device:

    forward          y[r] = W[e] x[r]
                     1×128 groups of x, 128×128 blocks of W
    input gradient   dx[r] = W[e]ᵀ dy[r]
                     the same with the transposed weight
    weight gradient  dW[e] = sum over the rows r of e of dy[r] x[r]ᵀ
                     both operands transposed: 1×128 groups of tokens
Each expert begins new groups of the weight gradient (transpose.py), so no group mixes the tokens of
two experts.
"""

import torch
from torch import Tensor

from megatron5d.kernels import choice, dispatch, tuning
from megatron5d.kernels.choice import AUTO, Fp8Request, Settings
from megatron5d.kernels.dispatch import TensorDescriptor, cdiv, jit, load_float32, tl
from megatron5d.kernels.fp8.quantize import GROUP, Quantized
from megatron5d.kernels.gemm import (
    expert_lanes,
    grouped_matmul_reference,
    host_offsets,
    launch_rows,
)
from megatron5d.kernels.tuning import needs_mma_barrier, read_by_all_warps, readable, swizzled


def fp8_matmul_reference(a: Quantized, b: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Computes `a bᵀ` in plain torch, in float32 or float64."""
    return a.dequantize(dtype) @ b.dequantize(dtype).t()


@jit
def scales_of_tile(
    scales, strides, first, index, count, group, ROWS: tl.constexpr, GROUP: tl.constexpr
):
    """Loads a group's scales: one per row of a tile, or one for all of them; 1 if the whole matrix
    has a single scale."""
    scale = 1.0
    if ROWS == 1:
        scale = load_float32(
            scales + index.to(tl.int64) * strides[0] + group * strides[1], index < count
        )
    elif ROWS == GROUP:
        # A tile of rows lies within one block, because tiles are at most 128 high and start at
        # multiples of their height.
        scale = tl.load(scales + first // GROUP * strides[0] + group * strides[1])
    return scale


@jit
def add_scaled(total, product, a, b, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr):
    """Computes total + product · a · b, with one multiply-add an element if at most one operand has
    a scale per row."""
    if A_ROWS == 1 and B_ROWS == 1:
        total += product * a[:, None] * b[None, :]
    elif A_ROWS == 1:
        total += product * (a * b)[:, None]
    elif B_ROWS == 1:
        total += product * (a * b)[None, :]
    elif A_ROWS == 0 and B_ROWS == 0:
        total += product
    else:
        total += product * (a * b)
    return total


# `accumulate` is not specialized: the first micro-batch of a step and later ones share a binary.
@jit(do_not_specialize=["accumulate"])
def _fp8_matmul_kernel(
    a_desc,
    b_desc,
    a_scales,
    a_strides,
    b_scales,
    b_strides,
    out_ptr,
    m,
    n,
    k,
    accumulate,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    INTO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
    GROUP: tl.constexpr,
    SETTLE: tl.constexpr,
):
    """Computes one tile of the product."""
    tile_m, tile_n = swizzled(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), BAND)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # One group of 128 columns at a time, the depth at which sums must be promoted.
    for group in range(tl.cdiv(k, GROUP)):
        a = a_desc.load([tile_m * BLOCK_M, group * GROUP])
        b = b_desc.load([tile_n * BLOCK_N, group * GROUP])
        product = read_by_all_warps(tl.dot(a, b.T, out_dtype=tl.float32), SETTLE)
        a_scale = scales_of_tile(
            a_scales, a_strides, tile_m * BLOCK_M, row, m, group, A_ROWS, GROUP
        )
        b_scale = scales_of_tile(
            b_scales, b_strides, tile_n * BLOCK_N, column, n, group, B_ROWS, GROUP
        )
        total = add_scaled(total, product, a_scale, b_scale, A_ROWS, B_ROWS)
    # Scales of a whole matrix are applied once, at the end.
    if A_ROWS == 0:
        total *= tl.load(a_scales)
    if B_ROWS == 0:
        total *= tl.load(b_scales)
    index = row.to(tl.int64)[:, None] * n + column[None, :]
    mask = (row < m)[:, None] & (column < n)[None, :]
    if INTO:
        total += load_float32(out_ptr + index, mask & (accumulate != 0))
    tl.store(out_ptr + index, total, mask)


def fp8_matmul(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    into: Tensor | None = None,
    accumulate: bool = True,
    settings: Settings = AUTO,
) -> Tensor:
    """Computes `a bᵀ` of quantized matrices.

    Args:
        a: values `[m, k]`; any of the three kinds of scales.
        b: values `[n, k]`; any kind (a weight `[out, in]` as it is stored).
        out_dtype: bfloat16, float16 or float32; float64 takes the plain path.
        into: `[m, n]` contiguous, of one of these dtypes, to which the product is added in place;
            `out_dtype` is then ignored.
        accumulate: False: the product overwrites `into`, whose values are not read.
        settings: which library may compute it on a GPU.

    Returns:
        `[m, n]`, or `into`.

    Raises:
        ValueError: shapes that do not match.
    """
    (m, k), (n, b_columns) = a.values.shape, b.values.shape
    if k != b_columns:
        raise ValueError(
            f"a {tuple(a.values.shape)} and b {tuple(b.values.shape)} must have the same last dim, "
            "which is contracted"
        )
    if into is not None and (into.shape != (m, n) or not into.is_contiguous()):
        raise ValueError(f"into must be contiguous {(m, n)} (got {tuple(into.shape)})")
    dtype, accumulate = out_dtype if into is None else into.dtype, accumulate and into is not None
    if capability := choice.capability_of(a.values):
        values, rows = (a.values, b.values), (a.rows_per_scale, b.rows_per_scale)
        dtypes = (a.values.dtype, b.values.dtype)
        request = Fp8Request(capability, (m, n, k), rows, dtypes, dtype, into is not None)
        if (library := choice.provider(request, settings)) is not None:
            return library.fp8_matmul(values, (a.scales, b.scales), rows, dtype, into, accumulate)
    has_kernel = dispatch.runs_triton(a.scales) and dtype != torch.float64 and bool(m and n and k)
    if has_kernel and readable(a.values) and readable(b.values):
        return _launch_matmul(a, b, dtype, into, accumulate)
    y = fp8_matmul_reference(a, b, dispatch.statistics_dtype(dtype))
    if into is None:
        return y.to(out_dtype)
    return into.add_(y) if accumulate else into.copy_(y)


def _launch_matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, into: Tensor | None, accumulate: bool
) -> Tensor:
    (m, k), n = a.values.shape, b.values.shape[0]
    out = a.values.new_empty(m, n, dtype=dtype) if into is None else into
    config = tuning.select("fp8_matmul", a.values.device)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    assert max(block_m, block_n) <= GROUP, "a block scale must cover a whole tile"
    descriptors = _descriptors(a, b, block_m, block_n)
    scales = (a.scales, a.scales.stride(), b.scales, b.scales.stride())
    config |= {"A_ROWS": a.rows_per_scale, "B_ROWS": b.rows_per_scale, "INTO": into is not None}
    config |= {"GROUP": GROUP, "SETTLE": needs_mma_barrier(out.device)}
    grid = (cdiv(m, block_m) * cdiv(n, block_n),)
    _fp8_matmul_kernel[grid](*descriptors, *scales, out, m, n, k, int(accumulate), **config)
    return out


def _descriptors(a: Quantized, b: Quantized, a_rows: int, b_rows: int) -> list[TensorDescriptor]:
    """Descriptors of the values, with which the copy engine loads tiles of 128 columns."""
    return [
        TensorDescriptor.from_tensor(x.values, [rows, GROUP])
        for x, rows in ((a, a_rows), (b, b_rows))
    ]


def grouped_matmul_fp8(
    x: Quantized, weight: Quantized, offsets: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Computes `y[r] = W[e] x[r]` for rows sorted by expert; with the transposed weight, the input
    gradient.

    Args:
        x: values `[rows, k]`, a scale for each 1×128 group.
        weight: values `[E, n, k]`, scales `[E, ceil(n/128), ceil(k/128)]`.
        offsets: as in `grouped_matmul`.
        out_dtype: bfloat16, float16 or float32; float64 takes the plain path.

    Returns:
        `[rows, n]`.
    """
    _, n, k = weight.values.shape
    has_kernel = (
        dispatch.runs_triton(x.scales) and x.values.numel() > 0 and out_dtype != torch.float64
    )
    has_kernel = has_kernel and weight.values.is_contiguous()
    if has_kernel and readable(x.values) and readable(weight.values[0]):
        scales = (x.scales, weight.scales.contiguous())
        return launch_rows(x.values, weight.values, offsets, n, k, False, scales, out_dtype)
    wide = dispatch.statistics_dtype(out_dtype)
    y = grouped_matmul_reference(x.dequantize(wide), weight.dequantize(wide), offsets)
    return y.to(out_dtype)


def grouped_weight_grad_fp8_reference(
    dy: Quantized, x: Quantized, offsets: Tensor, main_grad: Tensor, *, accumulate: bool = True
) -> None:
    """Computes `grouped_weight_grad_fp8` in plain torch; copies the offsets to the host."""
    wide = dispatch.statistics_dtype(main_grad.dtype)
    a, b, group = dy.dequantize(wide), x.dequantize(wide), 0
    ends = host_offsets(offsets, (dy.scales.shape[1] - offsets.numel() + 1) * GROUP)
    for grad, first, last in zip(main_grad, ends, ends[1:]):
        tokens = slice(group * GROUP, group * GROUP + last - first)
        if not accumulate:
            grad.zero_()
        grad.add_(a[:, tokens] @ b[:, tokens].t())
        group += cdiv(last - first, GROUP)


@jit
def _groups_of_expert(expert, offsets_ptr, num_experts, GROUP: tl.constexpr, EXPERTS: tl.constexpr):
    """Computes an expert's first group and its number of groups."""
    lane = tl.arange(0, EXPERTS)
    mask = lane < num_experts
    first = tl.load(offsets_ptr + lane, mask, other=0).to(tl.int32)
    last = tl.load(offsets_ptr + lane + 1, mask, other=0).to(tl.int32)
    groups = (last - first + GROUP - 1) // GROUP
    begin = tl.sum(tl.where(lane < expert, groups, 0), 0)
    return begin, tl.sum(tl.where(lane == expert, groups, 0), 0)


@jit(do_not_specialize=["num_experts", "accumulate"])
def _weight_grad_fp8_kernel(
    dy_desc,
    x_desc,
    dy_scales,
    dy_strides,
    x_scales,
    x_strides,
    grad_ptr,
    offsets_ptr,
    n,
    k,
    num_experts,
    accumulate,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    GROUP: tl.constexpr,
    SETTLE: tl.constexpr,
):
    """Computes one tile of one expert's weight gradient."""
    tile_n, tile_k = swizzled(tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K), BAND)
    expert = tl.program_id(1).to(tl.int64)
    begin, count = _groups_of_expert(expert, offsets_ptr, num_experts, GROUP, EXPERTS)
    row = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    # Empty experts have no group, so their sum is zero.
    for group in range(begin, begin + count):
        dy = dy_desc.load([tile_n * BLOCK_N, group * GROUP])
        x = x_desc.load([tile_k * BLOCK_K, group * GROUP])
        product = read_by_all_warps(tl.dot(dy, x.T, out_dtype=tl.float32), SETTLE)
        dy_scale = scales_of_tile(dy_scales, dy_strides, 0, row, n, group, 1, GROUP)
        x_scale = scales_of_tile(x_scales, x_strides, 0, column, k, group, 1, GROUP)
        total = add_scaled(total, product, dy_scale, x_scale, 1, 1)
    mask = (row < n)[:, None] & (column < k)[None, :]
    grad_ptr += expert * n * k + row.to(tl.int64)[:, None] * k + column[None, :]
    total += load_float32(grad_ptr, mask & (accumulate != 0))
    tl.store(grad_ptr, total, mask)


def grouped_weight_grad_fp8(
    dy: Quantized, x: Quantized, offsets: Tensor, main_grad: Tensor, *, accumulate: bool = True
) -> None:
    """Computes `main_grad[e] += sum over the rows of e of dy xᵀ`, in place.

    Args:
        dy: from `fp8_transpose` with these offsets: values `[n, G·128]`, scales `[n, G]`.
        x: the same, values `[k, G·128]`.
        offsets: as in `grouped_matmul`.
        main_grad: `[E, n, k]` contiguous, float32 or bfloat16; float64 takes the plain path.
        accumulate: False: the sums overwrite `main_grad`, whose values are not read.

    Raises:
        ValueError: shapes that do not match.
    """
    experts, n, k = main_grad.shape
    if dy.values.shape[1] != x.values.shape[1] or (n, k) != (len(dy.values), len(x.values)):
        raise ValueError(
            "a weight gradient [E, n, k] requires dy [n, G·128] and x [k, G·128] (got "
            f"{tuple(main_grad.shape)}, dy {tuple(dy.values.shape)}, x {tuple(x.values.shape)})"
        )
    has_kernel = dispatch.runs_triton(dy.scales) and main_grad.dtype != torch.float64
    has_kernel = has_kernel and x.values.numel() > 0 and main_grad.is_contiguous()
    if not (has_kernel and readable(dy.values) and readable(x.values)):
        grouped_weight_grad_fp8_reference(dy, x, offsets, main_grad, accumulate=accumulate)
        return
    config = tuning.select("grouped_weight_grad_fp8", main_grad.device)
    block_n, block_k = config["BLOCK_N"], config["BLOCK_K"]
    descriptors = _descriptors(dy, x, block_n, block_k)
    scales = (dy.scales, dy.scales.stride(), x.scales, x.scales.stride())
    sizes = (n, k, experts, int(accumulate))
    config |= {"EXPERTS": expert_lanes(experts), "GROUP": GROUP}
    config["SETTLE"] = needs_mma_barrier(main_grad.device)
    grid = (cdiv(n, block_n) * cdiv(k, block_k), experts)
    _weight_grad_fp8_kernel[grid](*descriptors, *scales, main_grad, offsets, *sizes, **config)

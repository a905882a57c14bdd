"""FP8 GEMMs with scales: tensorwise, and blockwise by 128 along the contracted dim; and those of
experts.

    y[i, j] = sum over groups g of sa[i, g] sb[j, g] · (sum over the 128 columns of g of a[i, k]
    b[j, k])
The inner sum is made by the tensor cores, whose FP8 accumulator keeps about 14 bits on Hopper;
every 128 columns it is scaled and added in float32 (DeepSeek-V3, arXiv:2412.19437, sec. 3.3.2).
Tensorwise GEMMs are promoted as often.

The three GEMMs of experts, over tokens sorted by expert; counts stay on the device.

    forward          y[r] = W[e] x[r]                                     1×128 groups of x, 128×128 blocks of W
    input gradient   dx[r] = W[e]ᵀ dy[r]                                  the same with the transposed weight
    weight gradient  dW[e] = sum over the rows r of e of dy[r] x[r]ᵀ      both transposed: 1×128 groups of tokens
The groups of the weight gradient begin anew with every expert (quantize.py), so none mixes tokens
of two.
"""

import torch
from torch import Tensor

from megatron5d.kernels import choice, dispatch, tuning
from megatron5d.kernels.choice import AUTO, Fp8Request, Settings
from megatron5d.kernels.dispatch import TensorDescriptor, cdiv, jit, load_float32, tl
from megatron5d.kernels.fp8.quantize import GROUP, Quantized
from megatron5d.kernels.gemm import ends_of, expert_lanes, grouped_matmul_reference, launch_rows
from megatron5d.kernels.tuning import readable, settles, swizzled, taken_out


def fp8_matmul_reference(a: Quantized, b: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Computes `a bᵀ` in plain torch, in float32 or float64."""
    return a.dequantize(dtype) @ b.dequantize(dtype).t()


@jit
def scales_of_tile(
    scales, strides, first, index, count, group, ROWS: tl.constexpr, GROUP: tl.constexpr
):
    """Returns a group's scales: of each row of a tile, or one for all of them; 1 where the whole
    matrix has one."""
    scale = 1.0
    if ROWS == 1:
        scale = tl.load(
            scales + index.to(tl.int64) * strides[0] + group * strides[1], index < count, other=0.0
        )
    elif ROWS == GROUP:
        # A tile of rows lies within one block: tiles are no taller than 128 and start at multiples
        # of their height.
        scale = tl.load(scales + first // GROUP * strides[0] + group * strides[1])
    return scale


@jit
def scaled_sum(total, part, a, b, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr):
    """Computes total + part · a · b, with one multiply-add an element if only one side has a scale
    a row."""
    if A_ROWS == 1 and B_ROWS == 1:
        total += part * a[:, None] * b[None, :]
    elif A_ROWS == 1:
        total += part * (a * b)[:, None]
    elif B_ROWS == 1:
        total += part * (a * b)[None, :]
    elif A_ROWS == 0 and B_ROWS == 0:
        total += part
    else:
        total += part * (a * b)
    return total


# one binary for the first micro-batch of a step and those after it
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
    tile_m, tile_n = swizzled(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), BAND)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(tl.cdiv(k, GROUP)):
        a = a_desc.load([tile_m * BLOCK_M, group * GROUP])
        b = b_desc.load([tile_n * BLOCK_N, group * GROUP])
        part = taken_out(tl.dot(a, b.T, out_dtype=tl.float32), SETTLE)
        a_scale = scales_of_tile(
            a_scales, a_strides, tile_m * BLOCK_M, row, m, group, A_ROWS, GROUP
        )
        b_scale = scales_of_tile(
            b_scales, b_strides, tile_n * BLOCK_N, column, n, group, B_ROWS, GROUP
        )
        total = scaled_sum(total, part, a_scale, b_scale, A_ROWS, B_ROWS)
    if A_ROWS == 0:
        total *= tl.load(a_scales)
    if B_ROWS == 0:
        total *= tl.load(b_scales)
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    live = (row < m)[:, None] & (column < n)[None, :]
    if INTO:
        total += load_float32(out_ptr + at, live & (accumulate != 0))
    tl.store(out_ptr + at, total, live)


def _check(a: Quantized, b: Quantized, into: Tensor | None) -> None:
    if a.values.shape[1] != b.values.shape[1]:
        raise ValueError(
            f"a {tuple(a.values.shape)} and b {tuple(b.values.shape)} contract their last dims, which differ"
        )
    shape = (a.values.shape[0], b.values.shape[0])
    if into is not None and (into.shape != shape or not into.is_contiguous()):
        raise ValueError(f"into {tuple(into.shape)} must be contiguous {shape}")


def _reads(x: Tensor) -> bool:
    """Says whether the copy engine can read x: rows 16 bytes apart, neighbours in memory."""
    return x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0


def fp8_matmul(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    into: Tensor | None = None,
    accumulate: bool = True,
    settings: Settings = AUTO,
) -> Tensor:
    """Computes `a bᵀ` of quantised matrices.

    Args:
        a: values `[m, k]`; any of the three kinds of scales.
        b: values `[n, k]`; any kind (a weight `[out, in]` as it lies).
        out_dtype: bfloat16, float16 or float32; float64 takes the plain path.
        into: `[m, n]` contiguous, of one of these dtypes, that the GEMM is added into, in place;
            `out_dtype` is then ignored.
        accumulate: False: the GEMM is written over `into`, whose values are not read.
        settings: which library may compute it on a GPU.

    Returns:
        `[m, n]`, or `into`.

    Raises:
        ValueError: shapes that do not belong together.
    """
    _check(a, b, into)
    m, k = a.values.shape
    n = b.values.shape[0]
    dtype, accumulate = out_dtype if into is None else into.dtype, accumulate and into is not None
    if capability := choice.capability_of(a.values):
        values, rows = (a.values, b.values), (a.rows_per_scale, b.rows_per_scale)
        dtypes = (a.values.dtype, b.values.dtype)
        request = Fp8Request(capability, (m, n, k), rows, dtypes, dtype, into is not None)
        if (library := choice.provider(request, settings)) is not None:
            return library.fp8_matmul(values, (a.scales, b.scales), rows, dtype, into, accumulate)
    fast = dispatch.runs_triton(a.scales) and dtype != torch.float64 and bool(m and n and k)
    if not (fast and _reads(a.values) and _reads(b.values)):
        y = fp8_matmul_reference(a, b, dispatch.statistics_dtype(dtype))
        if into is None:
            return y.to(out_dtype)
        return into.add_(y) if accumulate else into.copy_(y)
    out = torch.empty(m, n, dtype=out_dtype, device=a.values.device) if into is None else into
    config = tuning.select("fp8_matmul", a.values.device)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    assert max(block_m, block_n) <= GROUP, "a block scale must cover a whole tile"
    descriptors = (
        TensorDescriptor.from_tensor(a.values, [block_m, GROUP]),
        TensorDescriptor.from_tensor(b.values, [block_n, GROUP]),
    )
    kinds = {"A_ROWS": a.rows_per_scale, "B_ROWS": b.rows_per_scale, "INTO": into is not None}
    kinds["SETTLE"] = settles(out.device)
    inputs = (
        *descriptors,
        a.scales,
        a.scales.stride(),
        b.scales,
        b.scales.stride(),
        out,
        m,
        n,
        k,
        int(accumulate),
    )
    grid = (cdiv(m, block_m) * cdiv(n, block_n),)
    _fp8_matmul_kernel[grid](*inputs, **kinds, GROUP=GROUP, **config)
    return out


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
    fast = dispatch.runs_triton(x.scales) and x.values.numel() and out_dtype != torch.float64
    if fast and readable(x.values) and readable(weight.values[0]) and weight.values.is_contiguous():
        scales = (x.scales, weight.scales.contiguous())
        return launch_rows(x.values, weight.values, offsets, n, k, False, scales, out_dtype)
    wide = dispatch.statistics_dtype(out_dtype)
    return grouped_matmul_reference(x.dequantize(wide), weight.dequantize(wide), offsets).to(
        out_dtype
    )


def grouped_weight_grad_fp8_reference(
    dy: Quantized, x: Quantized, offsets: Tensor, main_grad: Tensor, *, accumulate: bool = True
) -> None:
    """Computes `grouped_weight_grad_fp8` in plain torch; asks the host for the offsets."""
    wide = dispatch.statistics_dtype(main_grad.dtype)
    a, b, group = dy.dequantize(wide), x.dequantize(wide), 0
    ends = ends_of(offsets, (dy.scales.shape[1] - offsets.numel() + 1) * GROUP)
    for grad, first, last in zip(main_grad, ends, ends[1:]):
        tokens = slice(group * GROUP, group * GROUP + last - first)
        if not accumulate:
            grad.zero_()
        grad.add_(a[:, tokens] @ b[:, tokens].t())
        group += cdiv(last - first, GROUP)


@jit
def _groups_of_expert(expert, offsets_ptr, num_experts, GROUP: tl.constexpr, EXPERTS: tl.constexpr):
    """Returns the first group of an expert, and how many it has."""
    lane = tl.arange(0, EXPERTS)
    real = lane < num_experts
    first = tl.load(offsets_ptr + lane, real, other=0).to(tl.int32)
    last = tl.load(offsets_ptr + lane + 1, real, other=0).to(tl.int32)
    groups = (last - first + GROUP - 1) // GROUP
    return tl.sum(tl.where(lane < expert, groups, 0), 0), tl.sum(
        tl.where(lane == expert, groups, 0), 0
    )


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
    tile_n, tile_k = swizzled(tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K), BAND)
    expert = tl.program_id(1).to(tl.int64)
    begin, count = _groups_of_expert(expert, offsets_ptr, num_experts, GROUP, EXPERTS)
    out = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for group in range(begin, begin + count):
        dy = dy_desc.load([tile_n * BLOCK_N, group * GROUP])
        x = x_desc.load([tile_k * BLOCK_K, group * GROUP])
        part = taken_out(tl.dot(dy, x.T, out_dtype=tl.float32), SETTLE)
        dy_scale = scales_of_tile(dy_scales, dy_strides, 0, out, n, group, 1, GROUP)
        x_scale = scales_of_tile(x_scales, x_strides, 0, column, k, group, 1, GROUP)
        total = scaled_sum(total, part, dy_scale, x_scale, 1, 1)
    live = (out < n)[:, None] & (column < k)[None, :]
    at = expert * n * k + out.to(tl.int64)[:, None] * k + column[None, :]
    total += load_float32(grad_ptr + at, live & (accumulate != 0))
    tl.store(grad_ptr + at, total, live)


def grouped_weight_grad_fp8(
    dy: Quantized, x: Quantized, offsets: Tensor, main_grad: Tensor, *, accumulate: bool = True
) -> None:
    """Computes `main_grad[e] += sum over the rows of e of dy xᵀ`, in place.

    Args:
        dy: from `fp8_transpose` with these offsets: values `[n, G·128]`, scales `[n, G]`.
        x: the same, values `[k, G·128]`.
        offsets: as in `grouped_matmul`.
        main_grad: `[E, n, k]` contiguous, float32 or bfloat16; float64 takes the plain path.
        accumulate: False: the sums are written over `main_grad`, whose values are not read.

    Raises:
        ValueError: operands that were not transposed alike.
    """
    if dy.values.shape[1] != x.values.shape[1] or main_grad.shape[1:] != (
        dy.values.shape[0],
        x.values.shape[0],
    ):
        shapes = f"dy {tuple(dy.values.shape)}, x {tuple(x.values.shape)}, main_grad {tuple(main_grad.shape)}"
        raise ValueError(
            f"a weight gradient [E, n, k] takes dy [n, G·128] and x [k, G·128]: {shapes}"
        )
    fast = dispatch.runs_triton(dy.scales) and x.values.numel() and main_grad.dtype != torch.float64
    if not (fast and main_grad.is_contiguous() and readable(dy.values) and readable(x.values)):
        grouped_weight_grad_fp8_reference(dy, x, offsets, main_grad, accumulate=accumulate)
        return
    experts, n, k = main_grad.shape
    config = tuning.select("grouped_weight_grad_fp8", main_grad.device)
    block_n, block_k = config["BLOCK_N"], config["BLOCK_K"]
    descriptors = (
        TensorDescriptor.from_tensor(dy.values, [block_n, GROUP]),
        TensorDescriptor.from_tensor(x.values, [block_k, GROUP]),
    )
    scales = (dy.scales, dy.scales.stride(), x.scales, x.scales.stride())
    inputs = (*descriptors, *scales, main_grad, offsets, n, k, experts, int(accumulate))
    grid = (cdiv(n, block_n) * cdiv(k, block_k), experts)
    constants = {
        "EXPERTS": expert_lanes(experts),
        "GROUP": GROUP,
        "SETTLE": settles(main_grad.device),
    }
    _weight_grad_fp8_kernel[grid](*inputs, **constants, **config)

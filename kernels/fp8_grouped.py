"""The three products of experts in 8 bits, over tokens sorted by expert; counts stay on the device.

    forward          y[r] = W[e] x[r]                                     1×128 groups of x, 128×128 blocks of W
    input gradient   dx[r] = W[e]ᵀ dy[r]                                  the same with the transposed weight
    weight gradient  dW[e] = sum over the rows r of e of dy[r] x[r]ᵀ      both turned: 1×128 groups of tokens
Every 128 terms the product leaves the tensor cores, is scaled and added in float32 (see fp8_matmul.py). The groups of
the weight gradient begin anew with every expert (fp8_turn.py), so no group mixes tokens of two.
"""

import torch
from torch import Tensor

from kernels import dispatch, tuning
from kernels.fp8.gemm import scaled_sum, scales_of_tile, settles, swizzled, taken_out
from kernels.fp8.quantize import GROUP, Quantized
from kernels.gemm import ends_of, grouped_matmul_reference, launch_rows
from kernels.language import TensorDescriptor, cdiv, jit, next_power_of_2, tl
from kernels.tiles import readable


def grouped_matmul_fp8(
    x: Quantized, weight: Quantized, offsets: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`y[r] = W[e] x[r]` for rows sorted by expert; the input gradient is the same call with the transposed weight.

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
    return grouped_matmul_reference(x.dequantize(wide), weight.dequantize(wide), offsets).to(out_dtype)


def grouped_weight_grad_fp8_reference(dy: Quantized, x: Quantized, offsets: Tensor, main_grad: Tensor) -> None:
    """`grouped_weight_grad_fp8` in plain torch; asks the host for the offsets."""
    wide = dispatch.statistics_dtype(main_grad.dtype)
    a, b, group = dy.dequantize(wide), x.dequantize(wide), 0
    ends = ends_of(offsets, (dy.scales.shape[1] - offsets.numel() + 1) * GROUP)
    for grad, first, last in zip(main_grad, ends, ends[1:]):
        tokens = slice(group * GROUP, group * GROUP + last - first)
        grad.add_(a[:, tokens] @ b[:, tokens].t())
        group += cdiv(last - first, GROUP)


@jit
def _groups_of_expert(expert, offsets_ptr, num_experts, GROUP: tl.constexpr, EXPERTS: tl.constexpr):
    """The first group of an expert, and how many it has."""
    lane = tl.arange(0, EXPERTS)
    real = lane < num_experts
    first = tl.load(offsets_ptr + lane, real, other=0).to(tl.int32)
    last = tl.load(offsets_ptr + lane + 1, real, other=0).to(tl.int32)
    groups = (last - first + GROUP - 1) // GROUP
    return tl.sum(tl.where(lane < expert, groups, 0), 0), tl.sum(tl.where(lane == expert, groups, 0), 0)


@jit
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
    total += tl.load(grad_ptr + at, live, other=0.0).to(tl.float32)
    tl.store(grad_ptr + at, total.to(grad_ptr.dtype.element_ty), live)


def grouped_weight_grad_fp8(dy: Quantized, x: Quantized, offsets: Tensor, main_grad: Tensor) -> None:
    """`main_grad[e] += sum over the rows of e of dy xᵀ`, in place.

    Args:
        dy: from `turn` with these offsets: values `[n, G·128]`, scales `[n, G]`.
        x: the same, values `[k, G·128]`.
        offsets: as in `grouped_matmul`.
        main_grad: `[E, n, k]` contiguous, float32 or bfloat16; float64 takes the plain path.

    Raises:
        ValueError: operands that were not turned alike.
    """
    if dy.values.shape[1] != x.values.shape[1] or main_grad.shape[1:] != (dy.values.shape[0], x.values.shape[0]):
        shapes = f"dy {tuple(dy.values.shape)}, x {tuple(x.values.shape)}, main_grad {tuple(main_grad.shape)}"
        raise ValueError(f"a weight gradient [E, n, k] takes dy [n, G·128] and x [k, G·128]: {shapes}")
    fast = dispatch.runs_triton(dy.scales) and x.values.numel() and main_grad.dtype != torch.float64
    if not (fast and main_grad.is_contiguous() and readable(dy.values) and readable(x.values)):
        grouped_weight_grad_fp8_reference(dy, x, offsets, main_grad)
        return
    experts, n, k = main_grad.shape
    config = tuning.select("grouped_weight_grad_fp8", main_grad.device)
    block_n, block_k = config["BLOCK_N"], config["BLOCK_K"]
    descriptors = (
        TensorDescriptor.from_tensor(dy.values, [block_n, GROUP]),
        TensorDescriptor.from_tensor(x.values, [block_k, GROUP]),
    )
    scales = (dy.scales, dy.scales.stride(), x.scales, x.scales.stride())
    inputs = (*descriptors, *scales, main_grad, offsets, n, k, experts)
    grid = (cdiv(n, block_n) * cdiv(k, block_k), experts)
    constants = {"EXPERTS": next_power_of_2(experts), "GROUP": GROUP, "SETTLE": settles(main_grad.device)}
    _weight_grad_fp8_kernel[grid](*inputs, **constants, **config)

"""GEMMs: in FP8, of experts, into a main gradient, and of rows from other ranks."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.kernels.fp8.gemm import fp8_matmul, grouped_matmul_fp8, grouped_weight_grad_fp8
from megatron5d.kernels.fp8.quantize import Quantized, quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import quantize_tensor
from megatron5d.kernels.fp8.transpose import fp8_transpose
from megatron5d.kernels.gemm import (
    accumulate_weight_grad,
    accumulate_weight_grad_triton,
    grouped_matmul,
    grouped_weight_grad,
)
from megatron5d.kernels.overlapped_gemm import (
    PeerBuffers,
    all_gather_gemm,
    gemm_reduce_scatter,
    sum_arrived,
)
from megatron5d.kernels.symm_mem_flags import Arrivals, WaitTimeout, addresses_of
from megatron5d.tools.bench.harness import (
    OURS,
    Benchmark,
    Call,
    Calls,
    Sizes,
    randn,
    returning,
)


def _flops(m: int, n: int, k: int, size: int = 1, experts: int = 1) -> float:
    """FLOPs of m rows on each of `size` ranks; experts divide the rows."""
    return 2 * size * m * n * k


def float8(device: str, m: int, n: int, k: int) -> Calls:
    """FP8 GEMMs: by blocks, by rows and with one scale, and with fp32 output."""
    x, weight = randn(device, m, k), randn(device, n, k)
    rows, blocks, weight_rows = quantize_rows(x), quantize_blocks(weight)[0], quantize_rows(weight)
    tensorwise = quantize_tensor(x), quantize_tensor(weight)
    main = torch.zeros(m, n, device=device)

    def torch_scaled(
        a: Quantized, b: Quantized, a_scales: Tensor, b_scales: Tensor, out_dtype=torch.bfloat16
    ) -> Call:
        b_values = b.values.t()
        return lambda: torch._scaled_mm(a.values, b_values, a_scales, b_scales, out_dtype=out_dtype)

    # the values of scales do not change the time
    by_row = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    # the layout in which cuBLAS reads 1x128
    a_scales, b_scales = rows.scales.t().contiguous().t(), weight_rows.scales.t().contiguous()

    return {
        "ours": partial(fp8_matmul, rows, blocks, settings=OURS),
        "ours, weight gradient": partial(fp8_matmul, rows, weight_rows, into=main, settings=OURS),
        "ours, tensorwise": partial(fp8_matmul, *tensorwise, settings=OURS),
        "cuBLAS bfloat16": lambda: x @ weight.t(),
        "torch._scaled_mm": torch_scaled(*tensorwise, *(x.scales.view(()) for x in tensorwise)),
        "torch._scaled_mm, rowwise": torch_scaled(*tensorwise, *by_row),
        "torch._scaled_mm, blockwise": torch_scaled(rows, blocks, a_scales, blocks.scales.t()),
        "torch._scaled_mm, weight gradient": torch_scaled(
            rows, weight_rows, a_scales, b_scales, out_dtype=torch.float32
        ),
    }


def _offsets(device: str, experts: int, rows: int) -> Tensor:
    return torch.linspace(0, rows, experts + 1, device=device).long()


def grouped(device: str, experts: int, m: int, n: int, k: int) -> Calls:
    """GEMMs of m rows, evenly over the experts."""
    x = randn(device, m, k)
    weight = randn(device, experts, n, k)
    offsets = _offsets(device, experts, m)
    ends = offsets[1:].int()
    rows8, weight8 = quantize_rows(x), quantize_blocks(weight)[0]
    # the values of scales do not change the time
    by_row = torch.ones(m, device=device), torch.ones(experts, n, device=device)

    def torch_scaled() -> Tensor:
        matrices = weight8.values.transpose(1, 2)
        return torch._scaled_grouped_mm(
            rows8.values, matrices, *by_row, offs=ends, out_dtype=torch.bfloat16
        )

    return {
        "ours": partial(grouped_matmul, x, weight, offsets, settings=OURS),
        "ours, float8": lambda: grouped_matmul_fp8(rows8, weight8, offsets),
        "torch grouped_mm": lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=ends),
        "torch._scaled_grouped_mm, rowwise": torch_scaled,
    }


def grouped_weight(device: str, experts: int, m: int, n: int, k: int) -> Calls:
    """Weight gradient of `grouped`, into fp32 main gradients."""
    x, dy, offsets = randn(device, m, k), randn(device, m, n), _offsets(device, experts, m)
    ends, main = offsets[1:].int(), torch.zeros(experts, n, k, device=device)
    transposed_dy, transposed_x = (fp8_transpose(quantize_rows(rows), offsets) for rows in (dy, x))
    return {
        "ours": returning(lambda: grouped_weight_grad(dy, x, offsets, main), main),
        "ours, float8": returning(
            lambda: grouped_weight_grad_fp8(transposed_dy, transposed_x, offsets, main), main
        ),
        "torch grouped_mm, bfloat16 out": lambda: F.grouped_mm(dy.t(), x, offs=ends),
    }


def weight_gradient(device: str, m: int, n: int, k: int) -> Calls:
    """Weight gradient `[m, n]` of a linear layer, added into an fp32 main gradient."""
    dy, x, main = randn(device, k, m), randn(device, k, n), torch.zeros(m, n, device=device)
    return {
        "ours": returning(lambda: accumulate_weight_grad(main, dy, x), main),
        "ours, Triton": returning(lambda: accumulate_weight_grad_triton(main, dy, x), main),
        "torch, GEMM and sum": returning(lambda: main.add_(dy.t() @ x), main),
        "cuBLAS bfloat16, GEMM alone": lambda: dy.t() @ x,
    }


def _arrived(device: str, size: int) -> Arrivals:
    """Flags of `size` ranks, all raised, so that GEMMs do not wait."""
    flags = torch.ones(size, dtype=torch.int32, device=device)
    return Arrivals(flags, 1, WaitTimeout(900.0, flags.device))


def gathered(device: str, size: int, m: int, n: int, k: int) -> Calls:
    """All-gather GEMM of m rows from each of `size` ranks."""
    x, weight, arrivals = randn(device, size, m, k), randn(device, n, k), _arrived(device, size)
    return {
        "ours": lambda: all_gather_gemm(x, weight, arrivals, 1),
        "cuBLAS bfloat16": lambda: x.flatten(0, 1) @ weight.t(),
        "cuBLAS, a GEMM a chunk": lambda: torch.cat([chunk @ weight.t() for chunk in x]),
    }


def scattered(device: str, size: int, m: int, n: int, k: int) -> Calls:
    """GEMM reduce-scatter of m rows for each of `size` ranks."""
    x, weight, arrivals = randn(device, size, m, k), randn(device, n, k), _arrived(device, size)
    terms, finished = randn(device, size, m, n), torch.zeros_like(arrivals.flags)
    buffers, views = list(terms.unbind()), list(arrivals.flags.split(1))
    out = PeerBuffers(buffers, views, addresses_of(buffers), addresses_of(views), finished)
    return {
        "ours": returning(lambda: gemm_reduce_scatter(x, weight, out, 1, 1), terms),
        "ours, the sum": lambda: sum_arrived(terms, arrivals),
        "cuBLAS bfloat16": lambda: x.flatten(0, 1) @ weight.t(),
    }


EXPERTS = {"experts": 64, "m": 65536, "n": 1408, "k": 2048}
FEW_EXPERTS = {"experts": 3, "m": 96, "n": 32, "k": 64}
TINY = {"m": 48, "n": 64, "k": 128}
OF_TWO = {"size": 2, **TINY}


def _row(make: Callable[..., Calls], sizes: Sizes, tiny: Sizes, **families: str) -> Benchmark:
    return Benchmark(make, _flops, "TFLOP/s", sizes, tiny, families)


GEMMS = {
    "float8 blockwise GEMM 4096x7168x16384": _row(
        float8,
        {"m": 4096, "n": 7168, "k": 16384},
        TINY,
        **dict.fromkeys(("ours", "ours, tensorwise", "ours, weight gradient"), "fp8"),
    ),
    "grouped GEMM, 64 experts": _row(grouped, EXPERTS, FEW_EXPERTS, ours="grouped"),
    "grouped GEMM weight gradient, 64 experts": _row(grouped_weight, EXPERTS, FEW_EXPERTS),
    "weight gradient into float32 14336x4096x8192": _row(
        weight_gradient, {"m": 14336, "n": 4096, "k": 8192}, TINY
    ),
    "all-gather GEMM, 8 ranks, 8192x1792x8192": _row(
        gathered, {"size": 8, "m": 1024, "n": 1792, "k": 8192}, OF_TWO
    ),
    "GEMM reduce-scatter, 8 ranks, 8192x8192x1792": _row(
        scattered, {"size": 8, "m": 1024, "n": 8192, "k": 1792}, OF_TWO
    ),
}

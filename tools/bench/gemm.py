"""GEMMs: in FP8, of experts, into a main gradient, and of rows from other ranks. Attention, both
ways."""

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron5d import kernels
from megatron5d.kernels.fp8.gemm import fp8_matmul, grouped_matmul_fp8, grouped_weight_grad_fp8
from megatron5d.kernels.fp8.quantize import Quantized, fp8_transpose, quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import quantize_tensor
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
from megatron5d.kernels.symm_mem_flags import Arrivals, Patience, addresses_of
from megatron5d.tools.bench.harness import (
    OURS,
    Benchmark,
    Calls,
    Forward,
    forward_or_backward,
    random_tensor,
    returning,
)


def _gemm_flops(m: int, n: int, k: int) -> float:
    return 2 * m * n * k


def float8(device: str, m: int, n: int, k: int) -> Calls:
    """Benchmarks an FP8 GEMM, and torch's forms of it."""
    x, weight = random_tensor(device, m, k), random_tensor(device, n, k)
    rows, blocks, weight_rows = quantize_rows(x), quantize_blocks(weight)[0], quantize_rows(weight)
    whole = quantize_tensor(x), quantize_tensor(weight)
    main = torch.zeros(m, n, device=device)

    def torch_scaled(
        a: Quantized, b: Quantized, *scales: Tensor, out_dtype=torch.bfloat16
    ) -> Callable[[], Tensor]:
        of_a, of_b = scales
        return lambda: torch._scaled_mm(a.values, b.values.t(), of_a, of_b, out_dtype=out_dtype)

    # as long as with any other scales
    by_row = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    # as cuBLAS reads 1x128
    a_scales, b_scales = rows.scales.t().contiguous().t(), weight_rows.scales.t().contiguous()

    return {
        "ours": partial(fp8_matmul, rows, blocks, settings=OURS),
        "ours, weight gradient": partial(fp8_matmul, rows, weight_rows, into=main, settings=OURS),
        "ours, tensorwise": partial(fp8_matmul, *whole, settings=OURS),
        "cuBLAS bfloat16": lambda: x @ weight.t(),
        "torch._scaled_mm": torch_scaled(*whole, *(each.scales.view(()) for each in whole)),
        "torch._scaled_mm, rowwise": torch_scaled(*whole, *by_row),
        "torch._scaled_mm, blockwise": torch_scaled(rows, blocks, a_scales, blocks.scales.t()),
        "torch._scaled_mm, weight gradient": torch_scaled(
            rows, weight_rows, a_scales, b_scales, out_dtype=torch.float32
        ),
    }


def _offsets(device: str, experts: int, rows: int) -> Tensor:
    return torch.linspace(0, rows, experts + 1, device=device).long()


def grouped(device: str, experts: int, m: int, n: int, k: int) -> Calls:
    """Benchmarks m rows, evenly over the experts."""
    x, weight, offsets = (
        random_tensor(device, m, k),
        random_tensor(device, experts, n, k),
        _offsets(device, experts, m),
    )
    ends = offsets[1:].int()
    rows8, weight8 = quantize_rows(x), quantize_blocks(weight)[0]
    # as long as with any other scales
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
    """Returns the weight gradient of `grouped`, into float32 main gradients."""
    x, dy, offsets = (
        random_tensor(device, m, k),
        random_tensor(device, m, n),
        _offsets(device, experts, m),
    )
    ends, main = offsets[1:].int(), torch.zeros(experts, n, k, device=device)
    transposed_dy, transposed_x = (fp8_transpose(quantize_rows(each), offsets) for each in (dy, x))
    return {
        "ours": returning(lambda: grouped_weight_grad(dy, x, offsets, main), main),
        "ours, float8": returning(
            lambda: grouped_weight_grad_fp8(transposed_dy, transposed_x, offsets, main), main
        ),
        "torch grouped_mm, bfloat16 out": lambda: F.grouped_mm(dy.t(), x, offs=ends),
    }


def weight_gradient(device: str, m: int, n: int, k: int) -> Calls:
    """Returns a linear layer's weight gradient `[m, n]` from k tokens, added into the float32 main
    gradient."""
    dy, x, main = (
        random_tensor(device, k, m),
        random_tensor(device, k, n),
        torch.zeros(m, n, device=device),
    )
    return {
        "ours": returning(lambda: accumulate_weight_grad(main, dy, x), main),
        "ours, Triton": returning(lambda: accumulate_weight_grad_triton(main, dy, x), main),
        "torch, GEMM and sum": returning(lambda: main.add_(dy.t() @ x), main),
        "cuBLAS bfloat16, GEMM alone": lambda: dy.t() @ x,
    }


def _arrived(device: str, size: int) -> Arrivals:
    """Makes raised flags of `size` ranks: the GEMMs without waits."""
    raised = torch.ones(size, dtype=torch.int32, device=device)
    return Arrivals(raised, 1, Patience(900.0, raised.device))


def gathered(device: str, size: int, m: int, n: int, k: int) -> Calls:
    """Benchmarks m rows of `size` ranks each."""
    x, weight, arrivals = (
        random_tensor(device, size, m, k),
        random_tensor(device, n, k),
        _arrived(device, size),
    )
    return {
        "ours": lambda: all_gather_gemm(x, weight, arrivals, 1),
        "cuBLAS bfloat16": lambda: x.flatten(0, 1) @ weight.t(),
        "cuBLAS, a GEMM a chunk": lambda: torch.cat([chunk @ weight.t() for chunk in x]),
    }


def scattered(device: str, size: int, m: int, n: int, k: int) -> Calls:
    """Benchmarks m rows for `size` ranks each."""
    x, weight, arrivals = (
        random_tensor(device, size, m, k),
        random_tensor(device, n, k),
        _arrived(device, size),
    )
    terms, finished = random_tensor(device, size, m, n), torch.zeros_like(arrivals.flags)
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
PRODUCTS = {
    "float8 blockwise GEMM 4096x7168x16384": Benchmark(
        float8,
        _gemm_flops,
        "TFLOP/s",
        {"m": 4096, "n": 7168, "k": 16384},
        TINY,
        dict.fromkeys(("ours", "ours, tensorwise", "ours, weight gradient"), "fp8"),
    ),
    "grouped GEMM, 64 experts": Benchmark(
        grouped,
        lambda experts, **sizes: _gemm_flops(**sizes),
        "TFLOP/s",
        EXPERTS,
        FEW_EXPERTS,
        {"ours": "grouped"},
    ),
    "grouped GEMM weight gradient, 64 experts": Benchmark(
        grouped_weight,
        lambda experts, **sizes: _gemm_flops(**sizes),
        "TFLOP/s",
        EXPERTS,
        FEW_EXPERTS,
    ),
    "weight gradient into float32 14336x4096x8192": Benchmark(
        weight_gradient, _gemm_flops, "TFLOP/s", {"m": 14336, "n": 4096, "k": 8192}, TINY
    ),
    "all-gather GEMM, 8 ranks, 8192x1792x8192": Benchmark(
        gathered,
        lambda size, m, n, k: _gemm_flops(size * m, n, k),
        "TFLOP/s",
        {"size": 8, "m": 1024, "n": 1792, "k": 8192},
        OF_TWO,
    ),
    "GEMM reduce-scatter, 8 ranks, 8192x8192x1792": Benchmark(
        scattered,
        lambda size, m, n, k: _gemm_flops(size * m, n, k),
        "TFLOP/s",
        {"size": 8, "m": 1024, "n": 8192, "k": 1792},
        OF_TWO,
    ),
}


def _flex(
    s: int, window: int, document: int, device: str, tiles: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], Tensor]:
    """Makes torch's flex attention with the same mask; tensors are `[b, heads, s, d]`."""

    def seen(batch, head, query, key):
        visible = query >= key
        if window:
            visible = visible & (query - key < window)
        return visible & (query // document == key // document) if document else visible

    @functools.cache
    def ready() -> tuple[Callable[..., Tensor], BlockMask]:
        return torch.compile(flex_attention, dynamic=False), create_block_mask(
            seen, None, None, s, s, device
        )

    def run() -> Tensor:
        compiled, mask = ready()
        return compiled(*tiles, block_mask=mask, enable_gqa=True)

    return run


def _varlen(s: int, window: int, document: int, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """Makes torch's flash attention over packed sequences; tensors are `[s, b, heads, d]`."""
    length = document or s
    q, k, v = (
        x.detach().transpose(0, 1).flatten(0, 1).requires_grad_(x.requires_grad) for x in (q, k, v)
    )
    ends = torch.arange(0, q.shape[0] + 1, length, device=q.device, dtype=torch.int32)
    seen = (window - 1 if window else -1, 0)

    def run() -> object:
        from torch.nn.attention.varlen import varlen_attn

        # older torch takes grouped heads as they are
        asks = "enable_gqa" in inspect.signature(varlen_attn).parameters
        grouped: dict[str, Any] = {"enable_gqa": True} if asks and q.shape[1] != k.shape[1] else {}
        return varlen_attn(q, k, v, ends, ends, length, length, window_size=seen, **grouped)

    return run, (q, k, v)


def attention(
    device: str,
    *,
    backward: bool,
    s: int,
    b: int,
    a: int,
    g: int,
    d: int,
    dv: int = 0,
    window: int = 0,
    document: int = 0,
) -> Calls:
    """Benchmarks causal attention of a query heads over g key heads; window and document lengths, 0
    = none."""
    sizes = ((a, d), (g, d), (g, dv or d))
    q, k, v = (random_tensor(device, s, b, *heads, grad=backward) for heads in sizes)
    qh, kh, vh = tiles = tuple(
        x.detach().permute(1, 2, 0, 3).contiguous().requires_grad_(backward) for x in (q, k, v)
    )
    ids = (
        (torch.arange(s, device=device) // document).expand(b, s).contiguous() if document else None
    )
    options = {"scale": d**-0.5, "window": window or None, "documents": ids, "settings": OURS}
    ours = partial(kernels.attention, q, k, v, **options)

    def torch_with(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(qh, kh, vh, is_causal=True, enable_gqa=a != g)

        return run

    forwards: dict[str, Forward] = {"ours": (lambda **options: ours(**options)[0], (q, k, v))}
    if not window and not document:
        forwards["torch flash"] = torch_with(SDPBackend.FLASH_ATTENTION), tiles
        forwards["cuDNN"] = torch_with(SDPBackend.CUDNN_ATTENTION), tiles
    else:
        forwards["torch flash, packed"] = _varlen(s, window, document, q, k, v)
    # it takes long to compile, and elsewhere flash and cuDNN are there
    if window or document or dv:
        forwards["torch flex"] = _flex(s, window, document, device, (qh, kh, vh)), tiles
    return forward_or_backward(forwards, backward)


def floating_point_operations(*, s, b, a, g, d, dv=0, window=0, document=0) -> float:
    """Counts the operations of the forward: two GEMMs over all pairs of a query and a key that it
    sees."""
    pairs = s * (window - window / 2 * window / s if window else (document or s) / 2)
    return 2 * (d + (dv or d)) * pairs * b * a


BASE = {"s": 8192, "b": 2, "a": 16, "g": 16, "d": 128}
TINY_ATTENTION = {"s": 64, "b": 1, "a": 2, "g": 2, "d": 32}
VARIANTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "causal, d 128, 8 k": ({}, {}),
    "causal, d 128, 8 k, 32 heads over 8": ({"b": 1, "a": 32, "g": 8}, {"g": 1}),
    "causal, d 128, 8 k, 4 heads over 1": ({"b": 1, "a": 4, "g": 1}, {"g": 1}),  # 8B at tp 8
    "causal, d 64, 8 k": ({"a": 32, "g": 32, "d": 64}, {"d": 16}),
    "causal, d 256, 8 k": ({"a": 8, "g": 8, "d": 256}, {"d": 64}),
    "causal, d 192 and 128, 8 k": ({"d": 192, "dv": 128}, {"d": 48, "dv": 32}),
    "window of 128, d 64, 8 k, 64 heads over 8": (
        {"window": 128, "b": 1, "a": 64, "g": 8, "d": 64},
        {"window": 8},
    ),
    "window of 1 k, d 128, 8 k": ({"window": 1024}, {"window": 24}),
    "documents of 1 k, d 128, 8 k": ({"document": 1024}, {"document": 24}),
}


def _rows(way: str, backward: bool) -> dict[str, Benchmark]:
    def work(**sizes) -> float:
        return floating_point_operations(**sizes) * (2.5 if backward else 1)  # five GEMMs for two

    make = partial(attention, backward=backward)
    return {
        f"attention {way}, {name}": Benchmark(
            make, work, "TFLOP/s", BASE | sizes, TINY_ATTENTION | tiny, {"ours": "attention"}
        )
        for name, (sizes, tiny) in VARIANTS.items()
    }


ATTENTION = {
    name: row
    for both in zip(_rows("forward", False).items(), _rows("backward", True).items())
    for name, row in both
}

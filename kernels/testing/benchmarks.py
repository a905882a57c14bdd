"""What is measured: each operation at the sizes of real training, beside every other implementation at hand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernels
from kernels.fp8_fused import rms_norm_quantized, swiglu_quantized
from kernels.fp8_grouped import grouped_matmul_fp8, grouped_weight_grad_fp8
from kernels.fp8_matmul import fp8_matmul
from kernels.fp8_quantize import (
    Quantized,
    quantize_blocks,
    quantize_reference,
    quantize_rows,
    quantize_rows_both_ways,
    quantize_tensor,
)
from kernels.fp8_turn import turn, turn_reference
from kernels.gather_matmul import gather_matmul
from kernels.grouped_matmul import grouped_matmul, grouped_weight_grad
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.matmul_scatter import Outboxes, matmul_scatter, sum_arrived
from kernels.multi_tensor import AdamWSettings, TensorTable, adamw_step
from kernels.signals import Arrivals, Patience, addresses_of

Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Benchmark:
    """One row of the table.

    Args:
        work: floating-point operations, or bytes that must move, of one call.
        unit: "TFLOP/s" or "GB/s".
        make: provider name -> call, on fresh random inputs; "ours" is always there. A call of ours returns all it
            makes, also in place, so that results can be compared.
    """

    work: float
    unit: str
    make: Callable[[], Calls]


def _random(*shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(grad)


def _writing(call: Callable[[], None], *written: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def run() -> tuple[Tensor, ...]:
        call()
        return written

    return run


def _both_ways(calls: dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]], backward: bool) -> Calls:
    """The forwards as they are, or the backwards of graphs recorded once."""
    if not backward:
        return {name: run for name, (run, _) in calls.items()}
    timed: Calls = {}
    for name, (run, leaves) in calls.items():
        try:
            out = run()
        except (RuntimeError, NotImplementedError):
            continue
        timed[name] = partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
    return timed


def _attention(backward: bool, s: int = 8192, b: int = 2, a: int = 16, d: int = 128) -> Calls:
    q, k, v = (_random(s, b, a, d, grad=backward) for _ in range(3))
    qh, kh, vh = (x.detach().permute(1, 2, 0, 3).contiguous().requires_grad_(backward) for x in (q, k, v))

    def torch_with(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(qh, kh, vh, is_causal=True)

        return run

    calls: dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]] = {
        "ours": (lambda: kernels.attention(q, k, v, scale=d**-0.5)[0], (q, k, v)),
        "torch flash": (torch_with(SDPBackend.FLASH_ATTENTION), (qh, kh, vh)),
        "cuDNN": (torch_with(SDPBackend.CUDNN_ATTENTION), (qh, kh, vh)),
    }
    return _both_ways(calls, backward)


def _pointwise(ours: Callable, reference: Callable, leaves: tuple[Tensor, ...], backward: bool) -> Calls:
    compiled = torch.compile(reference)
    return _both_ways(
        {"ours": (lambda: ours(*leaves), leaves), "torch.compile": (lambda: compiled(*leaves), leaves)}, backward
    )


def _rms_norm(backward: bool) -> Calls:
    leaves = (_random(16384, 4096, grad=backward), _random(4096, grad=backward))
    ours, reference = (lambda x, w: kernels.rms_norm(x, w, 1e-5)), (lambda x, w: kernels.rms_norm_reference(x, w, 1e-5))
    return _pointwise(ours, reference, leaves, backward)


def _swiglu(backward: bool) -> Calls:
    return _pointwise(kernels.swiglu, kernels.swiglu_reference, (_random(8192, 2 * 14336, grad=backward),), backward)


def _rope() -> Calls:
    q, k, angle = _random(8192, 2, 32, 128), _random(8192, 2, 8, 128), _random(8192, 1, 64, dtype=torch.float32)
    compiled = torch.compile(kernels.apply_rope_reference)
    tables, qkv = (angle.cos(), angle.sin()), _random(8192, 2, 48, 128)
    return {
        "ours": lambda: kernels.apply_rope(q, k, *tables),
        "ours, in a projection": lambda: kernels.apply_rope_to_projection(qkv, (32, 8), *tables),
        "torch.compile": lambda: compiled(q, k, *tables),
    }


def _cross_entropy() -> Calls:
    logits, labels = _random(8192, 128256), torch.randint(0, 128256, (8192,), device="cuda")
    compiled = torch.compile(kernels.cross_entropy_reference)
    calls: Calls = {
        "ours": lambda: kernels.cross_entropy(logits, labels),
        "torch.compile": lambda: compiled(logits, labels),
    }
    calls["torch"] = lambda: F.cross_entropy(logits, labels, reduction="none")
    return calls


def _linear_cross_entropy(tokens: int = 8192, width: int = 4096, vocabulary: int = 128256) -> Calls:
    x, weight = _random(tokens, width, grad=True), _random(vocabulary, width, grad=True)
    labels, token_weights = torch.randint(0, vocabulary, (tokens,), device="cuda"), torch.ones(tokens, device="cuda")

    def ours() -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_cross_entropy(x, weight, labels, token_weights)[0], (x, weight))

    def whole_logits() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(x @ weight.t(), labels, reduction="sum"), (x, weight))

    return {"ours": ours, "torch, whole logits": whole_logits}


def _fp8(m: int = 4096, n: int = 7168, k: int = 16384) -> Calls:
    x, weight = _random(m, k), _random(n, k)
    rows, blocks, weight_rows = quantize_rows(x), quantize_blocks(weight)[0], quantize_rows(weight)
    whole = quantize_tensor(x), quantize_tensor(weight)
    main = torch.zeros(m, n, device="cuda")

    def torch_scaled(a: Quantized, b: Quantized, *scales: Tensor, out_dtype=torch.bfloat16) -> Callable[[], Tensor]:
        of_a, of_b = scales
        return lambda: torch._scaled_mm(a.values, b.values.t(), of_a, of_b, out_dtype=out_dtype)

    by_row = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")  # as long as with any other scales
    a_scales, b_scales = rows.scales.t().contiguous().t(), weight_rows.scales.t().contiguous()  # as cuBLAS reads 1x128

    return {
        "ours": lambda: fp8_matmul(rows, blocks),
        "ours, weight gradient": lambda: fp8_matmul(rows, weight_rows, accumulate_into=main),
        "ours, tensorwise": lambda: fp8_matmul(*whole),
        "cuBLAS bfloat16": lambda: x @ weight.t(),
        "torch._scaled_mm": torch_scaled(*whole, *(each.scales.view(()) for each in whole)),
        "torch._scaled_mm, rowwise": torch_scaled(*whole, *by_row),
        "torch._scaled_mm, blockwise": torch_scaled(rows, blocks, a_scales, blocks.scales.t()),
        "torch._scaled_mm, weight gradient": torch_scaled(
            rows, weight_rows, a_scales, b_scales, out_dtype=torch.float32
        ),
    }


def _grouped(experts: int = 64, rows: int = 65536, n: int = 1408, k: int = 2048) -> Calls:
    x, weight = _random(rows, k), _random(experts, n, k)
    offsets = _offsets(experts, rows)
    ends = offsets[1:].int()
    rows8 = quantize_rows(x)
    parts = [quantize_blocks(w)[0] for w in weight]
    values = torch.stack([p.values.view(torch.uint8) for p in parts]).view(torch.float8_e4m3fn)
    weight8 = Quantized(values, torch.stack([p.scales for p in parts]), 128)
    return {
        "ours": lambda: grouped_matmul(x, weight, offsets),
        "ours, float8": lambda: grouped_matmul_fp8(rows8, weight8, offsets),
        "torch grouped_mm": lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=ends),
    }


def _offsets(experts: int, rows: int) -> Tensor:
    return torch.linspace(0, rows, experts + 1, device="cuda").long()


def _grouped_weight_grad(experts: int = 64, rows: int = 65536, n: int = 1408, k: int = 2048) -> Calls:
    x, dy, offsets = _random(rows, k), _random(rows, n), _offsets(experts, rows)
    ends, main = offsets[1:].int(), torch.zeros(experts, n, k, device="cuda")
    turned_dy, turned_x = (turn(quantize_rows(each), offsets) for each in (dy, x))
    return {
        "ours": _writing(lambda: grouped_weight_grad(dy, x, offsets, main), main),
        "ours, float8": _writing(lambda: grouped_weight_grad_fp8(turned_dy, turned_x, offsets, main), main),
        "torch grouped_mm": lambda: F.grouped_mm(dy.t(), x, offs=ends),
    }


def _quantisers(rows: int = 16384, width: int = 4096) -> Calls:
    x = _random(rows, width)
    compiled = torch.compile(lambda x: quantize_reference(x, 1))
    return {
        "ours": lambda: quantize_rows(x),
        "ours, both ways": lambda: quantize_rows_both_ways(x),
        "ours, blocks both ways": lambda: quantize_blocks(x),
        "torch.compile": lambda: compiled(x),
    }


def _turn(rows: int = 16384, width: int = 4096) -> Calls:
    x = quantize_rows(_random(rows, width))
    return {
        "ours": lambda: turn(x, powers_of_two=True),
        "torch": lambda: turn_reference(x, powers_of_two=True),
        "torch, values only": lambda: x.values.t().contiguous(),
    }


def _swiglu_quantized(rows: int = 8192, width: int = 14336) -> Calls:
    gate_up = _random(rows, 2 * width)
    compiled = torch.compile(lambda x: quantize_reference(kernels.swiglu_reference(x), 1))
    return {
        "ours": lambda: swiglu_quantized(gate_up),
        "ours, two kernels": lambda: quantize_rows(kernels.swiglu(gate_up)),
        "torch.compile": lambda: compiled(gate_up),
    }


def _rms_norm_quantized(rows: int = 16384, width: int = 4096) -> Calls:
    x, weight = _random(rows, width), _random(width)
    compiled = torch.compile(lambda x, w: quantize_reference(kernels.rms_norm_reference(x, w, 1e-5), 1))
    return {
        "ours": lambda: rms_norm_quantized(x, weight, 1e-5),
        "ours, two kernels": lambda: quantize_rows(kernels.rms_norm(x, weight, 1e-5)),
        "torch.compile": lambda: compiled(x, weight),
    }


def _arrived(size: int) -> Arrivals:
    """Flags of `size` ranks that have long been raised: what the products cost when nothing is awaited."""
    raised = torch.ones(size, dtype=torch.int32, device="cuda")
    return Arrivals(raised, 1, Patience(900.0, raised.device))


def _gather_matmul(size: int = 8, rows: int = 1024, n: int = 1792, k: int = 8192) -> Calls:
    x, weight, arrivals = _random(size, rows, k), _random(n, k), _arrived(size)

    def by_chunk() -> Tensor:
        return torch.cat([chunk @ weight.t() for chunk in x])

    return {
        "ours": lambda: gather_matmul(x, weight, arrivals, 3),
        "cuBLAS bfloat16": lambda: x.flatten(0, 1) @ weight.t(),
        "cuBLAS, a product a chunk": by_chunk,
    }


def _matmul_scatter(size: int = 8, rows: int = 1024, n: int = 8192, k: int = 1792) -> Calls:
    x, weight, arrivals = _random(size, rows, k), _random(n, k), _arrived(size)
    terms, finished = _random(size, rows, n), torch.zeros_like(arrivals.flags)
    boxes, views = list(terms.unbind()), list(arrivals.flags.split(1))
    out = Outboxes(boxes, views, addresses_of(boxes), addresses_of(views), finished)

    def ours() -> Tensor:
        matmul_scatter(x, weight, out, 1, 3)
        return terms

    return {
        "ours": ours,
        "ours, the sum": lambda: sum_arrived(terms, arrivals),
        "cuBLAS bfloat16": lambda: x.flatten(0, 1) @ weight.t(),
    }


def _adamw(tensors: int = 32, count: int = 2**24) -> Calls:
    def fresh() -> list[Tensor]:
        return [torch.rand(count, device="cuda") for _ in range(tensors)]

    columns = {name: fresh() for name in ("master", "grad", "exp_avg", "exp_avg_sq")}
    table, settings = TensorTable(**columns), AdamWSettings(1e-4, 0.9, 0.95, 1e-8, 10)
    factor, decay = torch.ones((), device="cuda"), torch.zeros(tensors, device="cuda")
    parameters = fresh()
    for p, grad in zip(parameters, columns["grad"]):
        p.grad = grad
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    ours = _writing(lambda: adamw_step(table, settings, factor, decay), *columns["master"])
    return {"ours": ours, "torch fused": optimizer.step}


ATTENTION_FLOP = 4 * 2 * 16 * 8192**2 * 128 / 2  # causal: half the square
BENCHMARKS = {
    "attention forward, causal, d 128, 8 k": Benchmark(ATTENTION_FLOP, "TFLOP/s", lambda: _attention(False)),
    "attention backward, causal, d 128, 8 k": Benchmark(2.5 * ATTENTION_FLOP, "TFLOP/s", lambda: _attention(True)),
    "float8 blockwise GEMM 4096x7168x16384": Benchmark(2 * 4096 * 7168 * 16384, "TFLOP/s", _fp8),
    "grouped GEMM, 64 experts": Benchmark(2 * 65536 * 1408 * 2048, "TFLOP/s", _grouped),
    "grouped GEMM weight gradient, 64 experts": Benchmark(2 * 65536 * 1408 * 2048, "TFLOP/s", _grouped_weight_grad),
    "float8 rows 16384x4096": Benchmark(16384 * 4096 * 3, "GB/s", _quantisers),
    "float8 turned 16384x4096": Benchmark(16384 * 4096 * 2, "GB/s", _turn),
    "SwiGLU to float8 8192x14336": Benchmark(8192 * 14336 * 5, "GB/s", _swiglu_quantized),
    "RMSNorm to float8 16384x4096": Benchmark(16384 * 4096 * 3, "GB/s", _rms_norm_quantized),
    "gathered product, 8 ranks, 8192x1792x8192": Benchmark(2 * 8192 * 1792 * 8192, "TFLOP/s", _gather_matmul),
    "scattered product, 8 ranks, 8192x8192x1792": Benchmark(2 * 8192 * 1792 * 8192, "TFLOP/s", _matmul_scatter),
    "RMSNorm forward 16384x4096": Benchmark(16384 * 4096 * 4, "GB/s", lambda: _rms_norm(False)),
    "RMSNorm backward 16384x4096": Benchmark(16384 * 4096 * 6, "GB/s", lambda: _rms_norm(True)),
    "SwiGLU forward 8192x14336": Benchmark(8192 * 14336 * 6, "GB/s", lambda: _swiglu(False)),
    "SwiGLU backward 8192x14336": Benchmark(8192 * 14336 * 10, "GB/s", lambda: _swiglu(True)),
    "RoPE, 32 and 8 heads, 16 k tokens": Benchmark(16384 * 40 * 128 * 4, "GB/s", _rope),
    "cross-entropy forward 8192x128256": Benchmark(8192 * 128256 * 2, "GB/s", _cross_entropy),
    "head and cross-entropy, both ways, 8192x4096x128256": Benchmark(
        3 * 2 * 8192 * 4096 * 128256, "TFLOP/s", _linear_cross_entropy
    ),
    "AdamW, 32 x 16 M": Benchmark(32 * 2**24 * 28, "GB/s", _adamw),
}

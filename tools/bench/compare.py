"""Correctness on a GPU: kernels, libraries and whole steps compared with the plain path."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from megatron5d.kernels import dispatch
from megatron5d.kernels.gemm import accumulate_weight_grad_triton
from megatron5d.tools.bench import BENCHMARKS
from megatron5d.tools.bench.harness import Calls, clear_device, copies_of, device_is_lost, median_ms
from megatron5d.tools.bench.results import Figures, unavailable

REPEATS = 3  # of a call of ours, which must give the same bits each time
TOLERANCE = 2e-2  # relative difference in norm between two summation orders in bfloat16 or FP8
FEW_LAYERS = "model=llama3_1b model.num_layers=2 train.seq_len=1024 train.mbs=2"
EXPERTS = (
    "model=qwen3_30b_a3b model.num_layers=2 model.num_experts=16 train.seq_len=1024 train.mbs=2"
)
LOSSES = {
    "bf16": FEW_LAYERS,
    "bf16, graphs": f"{FEW_LAYERS} train.cuda_graph=phases",
    "bf16, every library": f"{FEW_LAYERS} kernels.deterministic=false",
    "bf16, Triton alone": f"{FEW_LAYERS} kernels.attention=triton",
    "FP8, blockwise": f"{FEW_LAYERS} precision.fp8=blockwise",
    "FP8, tensorwise": f"{FEW_LAYERS} precision.fp8=tensorwise",
    "experts, bf16": EXPERTS,
    "experts, FP8": f"{EXPERTS} precision.fp8=blockwise",
}
# 8B's MLP, at tp 1 and tp 8
ADDMM = {"14336x4096x8192": (14336, 4096, 8192), "4096x1792x8192": (4096, 1792, 8192)}


def addmm(m: int, n: int, k: int, device: str = "cuda") -> Figures:
    """Whether `torch.addmm` adds bfloat16 `[k, m]ᵀ [k, n]` into an fp32 main gradient in place."""
    dy, x = (torch.randn(k, size, device=device, dtype=torch.bfloat16) for size in (m, n))
    main = torch.randn(m, n, device=device)
    expected = torch.addmm(main, dy.float().t(), x.float())

    def add() -> torch.Tensor:
        return torch.addmm(main, dy.t(), x, out_dtype=torch.float32, out=main)

    result = add()
    figures: Figures = {
        "in place": result.data_ptr() == main.data_ptr(),
        "difference": difference([result], [expected]),
    }
    calls: Calls = {
        "torch.addmm into it": add,
        "GEMM, then sum": lambda: main.add_(dy.t() @ x),
        "Triton": lambda: accumulate_weight_grad_triton(main, dy, x),
    }
    return figures | {
        f"{name}, ms": round(median_ms([call], 20), 4) for name, call in calls.items()
    }


def difference(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest relative difference in norm; infinite where one is NaN."""
    differences = [
        float((x.float() - y.float()).norm() / y.float().norm().clamp(min=1e-30))
        for x, y in zip(results, expected)
    ]
    return max(x if x == x else float("inf") for x in differences)


def without_triton() -> Any:
    """Context in which operations take the plain path."""
    return mock.patch.object(dispatch, "runs_triton", lambda x: False)


def reference(
    name: str, device: str = "cuda", tiny: bool = False, repeats: int = REPEATS
) -> Figures:
    """Compares our calls of a row, and the libraries behind them, with the plain path.

    Returns:
        Provider -> difference, whether repeated calls give the same bits, and whether it is right.
    """

    def compute(provider: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return copies_of(BENCHMARKS[name].calls_by_library(device, tiny)[provider]())

    figures: Figures = {}
    for provider in BENCHMARKS[name].calls_by_library(device, tiny):
        if not provider.startswith("ours"):
            continue
        plain, _, library = provider.partition(", by ")
        try:
            with without_triton():
                expected = compute(plain)
            result = compute(provider)
            same_bits = all(
                all(map(torch.equal, compute(provider), result)) for _ in range(repeats)
            )
            off = difference(result, expected)
            figures[provider] = {
                "difference": off,
                "same bits": same_bits,
                "right": off <= TOLERANCE and (same_bits or bool(library)),
            }
        except Exception as error:
            figures[provider] = unavailable(error)
            if device == "cuda" and device_is_lost():
                raise
    return figures


def losses(name: str, device: str = "cuda") -> Figures:
    """Trains a small model for five steps on one batch, with the kernels and by the plain path."""
    # needs Hydra; the other checks need torch and Triton only
    from megatron5d.tools.bench.training import configured, our_step, token_rows

    config = configured(LOSSES[name].split())
    rows, curves = next(token_rows(config)), {}
    for path in ("kernels", "plain"):
        with without_triton() if path == "plain" else nullcontext():
            step = our_step(config, torch.device(device))
            curves[path] = [step(rows) for _ in range(5)]
        del step
        clear_device()
    off = max(abs(a - b) for a, b in zip(curves["kernels"], curves["plain"]))
    return {"right": off <= TOLERANCE * curves["plain"][0], "difference": off, **curves}

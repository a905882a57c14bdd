"""Whether what a GPU computes is right: kernels, libraries and whole steps beside the plain
path."""

import gc
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

from megatron5d.kernels import dispatch
from megatron5d.kernels.gemm import accumulate_weight_grad_triton
from megatron5d.tools.bench import BENCHMARKS
from megatron5d.tools.bench.harness import device_is_lost, median_ms
from megatron5d.tools.bench_kernels import because, with_libraries
from megatron5d.tools.tune_kernels import results

REPEATS = 3  # of a call, whose bits must be those of the first where it is ours
CLOSE = 2e-2  # relative difference in norm between two orders of summation in bfloat16 or FP8
FEW_LAYERS = ["model=llama3_1b", "model.num_layers=2", "train.seq_len=1024", "train.mbs=2"]
EXPERTS = [
    "model=qwen3_30b_a3b",
    "model.num_layers=2",
    "model.num_experts=16",
    "train.seq_len=1024",
    "train.mbs=2",
]
LOSSES = {
    "bf16": FEW_LAYERS,
    "bf16, graphs": [*FEW_LAYERS, "train.cuda_graph=phases"],
    "bf16, every library": [*FEW_LAYERS, "kernels.deterministic=false"],
    "bf16, Triton alone": [*FEW_LAYERS, "kernels.attention=triton"],
    "FP8, blockwise": [*FEW_LAYERS, "precision.fp8=blockwise"],
    "FP8, tensorwise": [*FEW_LAYERS, "precision.fp8=tensorwise"],
    "experts, bf16": EXPERTS,
    "experts, FP8": [*EXPERTS, "precision.fp8=blockwise"],
}
# 8B's MLP, at tp 1 and tp 8
ADDMM = {"14336x4096x8192": (14336, 4096, 8192), "4096x1792x8192": (4096, 1792, 8192)}


def addmm(m: int, n: int, k: int, device: str = "cuda") -> dict[str, Any]:
    """Adds `[k, m]ᵀ [k, n]` in bfloat16 into a float32 main gradient by `torch.addmm(out_dtype=...,
    out=main)`."""
    dy, x = (torch.randn(k, size, device=device, dtype=torch.bfloat16) for size in (m, n))
    main = torch.randn(m, n, device=device)
    want = torch.addmm(main, dy.float().t(), x.float())
    got = torch.addmm(main, dy.t(), x, out_dtype=torch.float32, out=main)
    found: dict[str, Any] = {
        "in place": got.data_ptr() == main.data_ptr(),
        "difference": difference([got], [want]),
    }
    calls: dict[str, Callable[[], object]] = {
        "torch.addmm into it": lambda: torch.addmm(
            main, dy.t(), x, out_dtype=torch.float32, out=main
        ),
        "GEMM, then sum": lambda: main.add_(dy.t() @ x),
        "Triton": lambda: accumulate_weight_grad_triton(main, dy, x),
    }
    return found | {f"{name}, ms": round(median_ms([call], 20), 4) for name, call in calls.items()}


def difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Returns the largest relative difference in norm; infinite where one is not a number."""
    off = [
        float((g.float() - w.float()).norm() / w.float().norm().clamp(min=1e-30))
        for g, w in zip(got, want)
    ]
    return max(x if x == x else float("inf") for x in off)


def reference(
    name: str, device: str = "cuda", tiny: bool = False, repeats: int = REPEATS
) -> dict[str, Any]:
    """Returns of each call of ours in a row, and of the libraries behind it, how far it is from the
    plain path's, and whether it gives the same bits each time."""

    def fresh() -> dict[str, Callable[[], object]]:
        torch.manual_seed(0)
        return with_libraries(BENCHMARKS[name].calls(device, tiny), BENCHMARKS[name].families)

    found: dict[str, Any] = {}
    for provider in (provider for provider in fresh() if provider.startswith("ours")):
        plain = provider.partition(", by ")[0]
        try:
            with mock.patch.object(dispatch, "runs_triton", lambda x: False):
                torch.manual_seed(1)
                want = results(fresh()[plain]())
            torch.manual_seed(1)
            got = results(fresh()[provider]())
            off, same = difference(got, want), True
            for _ in range(repeats):
                torch.manual_seed(1)
                same = same and all(map(torch.equal, results(fresh()[provider]()), got))
            is_ours = provider == plain
            found[provider] = {
                "difference": off,
                "same bits": same,
                "right": off <= CLOSE and (same or not is_ours),
            }
        except Exception as error:
            found[provider] = because(error)
            if device == "cuda" and device_is_lost():
                raise
    return found


def losses(name: str, device: str = "cuda") -> dict[str, Any]:
    """Trains a small model for a few steps on one batch: with the kernels, and by the plain
    path."""
    if find_spec("hydra") is None:
        return {"unavailable": "hydra-core is not installed"}
    from megatron5d.tools.bench_train import configured, ours, tokens

    config = configured(LOSSES[name])
    rows, found = next(tokens(config)), {}
    for way in ("kernels", "plain"):
        with mock.patch.object(
            dispatch, "runs_triton", dispatch.runs_triton if way == "kernels" else lambda x: False
        ):
            step = ours(config, torch.device(device))
            found[way] = [step(rows) for _ in range(5)]
        del step
        gc.collect()
        torch.cuda.empty_cache()
    off = max(abs(a - b) for a, b in zip(found["kernels"], found["plain"]))
    return {"right": off <= CLOSE * found["plain"][0], "difference": off, **found}

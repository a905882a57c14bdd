"""Search the tile shapes, warps and stages of kernels on this GPU, and write the best to its table.

    python tools/tune_kernels.py attention_forward --dry-run      print what would change
    python tools/tune_kernels.py fp8_matmul                       write kernels/configs/sm_90.json
                                                                  (on a Hopper GPU)
    python tools/tune_kernels.py --list                           operations and candidates,
                                                                  without a GPU

A candidate counts only if it compiles and its result equals that of the present entry up to
rounding. Run the compile gate afterwards: it rejects spills. Only the entry that the operation's
benchmark selects, or that of --row, is tuned. First, one process per core compiles candidates and
compares their results, for at most half of the time. Then they are timed one after the other, in a
random order, which is the same every time. The table is written after each operation.
"""

import argparse
import functools
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere


def _arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument("operations", nargs="*", help="names that --list prints (default: all)")
    parser.add_argument(
        "--list", action="store_true", help="print operations and their numbers of candidates"
    )
    parser.add_argument(
        "--row", help="benchmark row of another entry, as tools/bench_kernels.py --list names it"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of each operation")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, write nothing")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    print_anywhere()
    # answers --help and rejects bad options before the imports below, which take seconds
    _arguments()

import torch

from megatron5d.kernels import tuning
from megatron5d.tools.bench import BENCHMARKS
from megatron5d.tools.bench.harness import Call, copies_of, device_is_lost, median_ms, no_gpu
from megatron5d.tools.bench.processes import NOT_REACHED, Send, run_tasks
from megatron5d.tools.bench.results import error_line, write_entries

SILENCE_S = 60.0  # of one candidate's compilation

WARPS = {"num_warps": (4, 8)}
FEW_WARPS, MANY_WARPS = {"num_warps": (2, 4, 8)}, {"num_warps": (4, 8, 16)}
STAGES = WARPS | {"num_stages": (2, 3, 4)}
ATTENTION = {
    "BLOCK_M": (32, 64, 128),
    "BLOCK_N": (32, 64, 128),
    "DESCRIBED": (True, False),
    **STAGES,
}
GEMM = {
    "BLOCK_M": (64, 128),
    "BLOCK_N": (64, 128, 256),
    "BLOCK_K": (64, 128),
    "BAND": (4, 8, 16),
    **STAGES,
}
GEMM_FP8 = GEMM | {"BLOCK_N": (64, 128)}
WEIGHT_GRAD = {
    "BLOCK_N": (64, 128, 256),
    "BLOCK_K": (64, 128),
    "BLOCK_R": (32, 64),
    "BAND": (4, 8),
    **STAGES,
}
WEIGHT_GRAD_FP8 = {"BLOCK_N": (64, 128), "BLOCK_K": (64, 128), "BAND": (4, 8, 16), **STAGES}
ELEMENTS = {"ELEMENTS": (4096, 8192)} | MANY_WARPS
NORM_BACKWARD = {
    "ELEMENTS": (4096, 8192),
    "PROGRAMS_PER_PROCESSOR": (1, 2, 4),
    "STAGES": (1, 2, 3),
    **MANY_WARPS,
}
COLUMNS = {"BLOCK": (2048, 4096, 8192)} | MANY_WARPS
BLOCKS = {"BLOCK": (1024, 2048, 4096), **WARPS}
ROWS = {"ROWS": (4, 8, 16, 32), **FEW_WARPS}
FORWARD, BACKWARD = (
    f"attention {direction}, causal, d 128, 8 k" for direction in ("forward", "backward")
)
GROUPED = "grouped GEMM, 64 experts"
GROUPED_GRAD = "grouped GEMM weight gradient, 64 experts"
SCATTER = "GEMM reduce-scatter, 8 ranks, 8192x8192x1792"
QUANTIZE, TOP_K = "float8 rows 16384x4096", "MoE top-k, 64 k tokens, 8 of 64"
# operation -> its benchmark, the provider that runs it, the values of each constant
SPACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "attention_forward": (FORWARD, "ours", {**ATTENTION, "AHEAD": (True, False)}),
    "attention_backward_keys": (BACKWARD, "ours", ATTENTION),
    "attention_backward_queries": (BACKWARD, "ours", ATTENTION),
    "attention_delta": (BACKWARD, "ours", {"ROWS": (16, 32, 64), **FEW_WARPS}),
    "fp8_matmul": ("float8 blockwise GEMM 4096x7168x16384", "ours", {**GEMM_FP8, "BLOCK_K": None}),
    "grouped_matmul": (GROUPED, "ours", GEMM),
    "grouped_matmul_fp8": (GROUPED, "ours, float8", {**GEMM_FP8, "BLOCK_K": (128,)}),
    "grouped_weight_grad": (GROUPED_GRAD, "ours", WEIGHT_GRAD),
    "grouped_weight_grad_fp8": (GROUPED_GRAD, "ours, float8", WEIGHT_GRAD_FP8),
    "fp8_quantize": (QUANTIZE, "ours, blocks", MANY_WARPS),
    "fp8_tensor": (
        "float8, one scale, 16384x4096",
        "ours, both ways",
        {"TILE": (64, 128), **MANY_WARPS},
    ),
    "fp8_blocks": (QUANTIZE, "ours, blocks", MANY_WARPS),
    "fp8_transpose": ("float8 transposed 16384x4096", "ours", MANY_WARPS),
    "fp8_swiglu": ("SwiGLU to float8 8192x14336", "ours", ROWS),
    "fp8_swiglu_backward": ("SwiGLU backward to float8 8192x14336", "ours", ROWS),
    "fp8_rms_norm": ("RMSNorm to float8 16384x4096", "ours", ELEMENTS),
    "all_gather_gemm": ("all-gather GEMM, 8 ranks, 8192x1792x8192", "ours", GEMM),
    "gemm_reduce_scatter": (SCATTER, "ours", GEMM),
    "sum_arrived": (SCATTER, "ours, the sum", BLOCKS),
    "norm_forward": ("RMSNorm forward 16384x4096", "ours", ELEMENTS),
    "norm_backward": ("RMSNorm backward 16384x4096", "ours", NORM_BACKWARD),
    "swiglu": ("SwiGLU forward 8192x14336", "ours", {"BLOCK": (512, 1024, 2048, 4096), **WARPS}),
    "rope": ("RoPE, 32 and 8 heads, 16 k tokens", "ours", {"HEADS": (4, 8, 16, 32), **FEW_WARPS}),
    "vocab_statistics": ("cross-entropy forward 8192x128256", "ours", COLUMNS),
    "vocab_cross_entropy_backward": ("cross-entropy backward 8192x128256", "ours", COLUMNS),
    "moe_permute": (
        "MoE permute, 16 k tokens, 8 of 64",
        "ours",
        {"BLOCK": (512, 1024, 2048), **FEW_WARPS},
    ),
    "moe_permutation": (
        TOP_K,
        "ours, permutation",
        {"BLOCK": (256, 512, 1024), "ROWS": (8, 16, 32), **WARPS},
    ),
    "moe_topk": (TOP_K, "ours", {"num_warps": (1, 2, 4)}),
    "squared_norm": ("gradient norm, 32 x 16 M", "ours", COLUMNS | WARPS),
    "adamw": ("AdamW, 32 x 16 M", "ours", BLOCKS),
}


def candidates(operation: str, architecture: str = "") -> list[dict]:
    """Every combination of the operation's values that is safe on the architecture."""
    values = {name: v for name, v in SPACE[operation][2].items() if v is not None}
    # on Blackwell, Triton 3.6 starts a GEMM ahead that overwrites scores other warps still read
    if architecture.startswith("sm_10") and "AHEAD" in values:
        values["AHEAD"] = (False,)
    return [dict(zip(values, combination)) for combination in itertools.product(*values.values())]


def agrees(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(
        bool((x - y).norm() <= 1e-2 * y.norm() + 1e-6)
        for x, y in zip(results, expected, strict=True)
    )


class Search:
    """Runs candidates of one operation, by answering its `tuning.select`.

    Args:
        operation: a name of `SPACE`; the other operations keep their tables.
        row: of the benchmark; None = the operation's.
        device, tiny: as in `Benchmark.calls`.
    """

    def __init__(
        self, operation: str, row: str | None = None, device: str = "cuda", tiny: bool = False
    ):
        self.operation, self.select = operation, tuning.select
        default_row, self.provider, _ = SPACE[operation]
        self.row = row or default_row
        self.inputs: dict[str, Any] = {"device": device, "tiny": tiny}
        self.present: dict = {}
        # the first call shows the present configuration and the expected result
        with mock.patch.object(tuning, "select", self._observe):
            self.call = self._fresh_call()
            self.expected = copies_of(self.call())

    def _fresh_call(self) -> Call:
        """The benchmark's call on inputs that are the same every time, even if it changes them."""
        torch.manual_seed(0)
        return BENCHMARKS[self.row].calls(**self.inputs)[self.provider]

    def _observe(self, operation: str, device: torch.device, **key: int) -> dict:
        config = self.select(operation, device, **key)
        if operation == self.operation:
            self.present = dict(config)
        return config

    def run(self, candidate: dict, measure: Callable[[Call], float]) -> float | None:
        """Measures the call with a candidate; None where it does not run or its result differs.

        Raises:
            RuntimeError: it has broken the device, on which no other candidate would run.
        """

        def select(operation: str, device: torch.device, **key: int) -> dict:
            if operation == self.operation:
                return dict(candidate)
            return self.select(operation, device, **key)

        with mock.patch.object(tuning, "select", select):
            try:
                call = self._fresh_call()
                return measure(call) if agrees(copies_of(call()), self.expected) else None
            except Exception as error:  # such as too much shared memory
                if device_is_lost():
                    raise RuntimeError(f"{candidate} has broken the device: {error}") from error
                return None

    def ms(self, candidate: dict) -> float | None:
        return self.run(candidate, lambda call: median_ms([call], 20))


def _compile(
    operation: str,
    row: str | None,
    every_candidate: Sequence[dict],
    numbers: Sequence[str],
    send: Send,
) -> None:
    """Runs the candidates of these numbers: the worker of `run_tasks`."""
    search = Search(operation, row)
    for number in numbers:
        ms = search.run(every_candidate[int(number)], lambda call: 0.0)
        send((number, ms is not None))
        send((number,))


def compiled(
    operation: str, row: str | None, every_candidate: Sequence[dict], deadline: float
) -> list[dict]:
    """Compiles candidates into Triton's cache.

    Args:
        deadline: in `time.monotonic()`.

    Returns:
        The candidates whose results are right, or not known for lack of time.
    """
    num_processes = min((os.cpu_count() or 1) - 1, len(every_candidate) // 4)
    if num_processes < 2:
        return list(every_candidate)
    numbers = [str(i) for i in range(len(every_candidate))]
    worker = functools.partial(_compile, operation, row, every_candidate)

    def run(numbers: list[str]) -> list[tuple]:
        return list(run_tasks(worker, numbers, SILENCE_S, deadline))

    with ThreadPoolExecutor(num_processes) as pool:
        shares = pool.map(run, (numbers[i::num_processes] for i in range(num_processes)))
        results = {number: result for share in shares for number, result in share}
    return [
        candidate
        for number, candidate in zip(numbers, every_candidate)
        if results.get(number) in (True, NOT_REACHED)
    ]


def write_entry(architecture: str, operation: str, present: dict, best: dict) -> None:
    """Replaces the configuration `present` of an operation by `best`."""
    path = tuning.DIRECTORY / f"{architecture}.json"
    table = json.loads(path.read_text())
    for entry in table[operation]:
        if entry["config"] == present and tuning.is_since(entry.get("triton", "0")):
            entry["config"] = best
    write_entries(path, table)


def tune(operation: str, minutes: float, dry_run: bool, row: str | None = None) -> None:
    """Times the candidates, prints each that is the fastest so far, and writes the best."""
    architecture = tuning.architecture(torch.device("cuda"))
    # a random order, so that a search that runs out of time has seen all kinds of candidates
    start, every_candidate = time.monotonic(), candidates(operation, architecture)
    random.Random(0).shuffle(every_candidate)
    # compiling fills Triton's cache and may take half of the time
    right = compiled(operation, row, every_candidate, start + 30 * minutes)
    search = Search(operation, row)
    best, best_ms = search.present, median_ms([search.call])
    print(
        f"{operation}: {best_ms:.3f} ms with {best}; "
        f"{len(right)} of {len(every_candidate)} candidates",
        flush=True,
    )
    try:
        for i, candidate in enumerate(right):
            if time.monotonic() > start + 60 * minutes:
                print(f"  out of time after {i} candidates", flush=True)
                break
            ms = search.ms(candidate)
            # less than one percent is noise
            if ms is not None and ms < 0.99 * best_ms:
                best, best_ms = candidate, ms
                print(f"  {ms:.3f} ms with {candidate}", flush=True)
    finally:
        if best != search.present and not dry_run:
            write_entry(architecture, operation, search.present, best)


def main() -> int:
    args = _arguments()
    operations = args.operations or list(SPACE)
    if unknown := [name for name in operations if name not in SPACE]:
        print(f"no operation {', '.join(unknown)}: choose of {', '.join(SPACE)}", file=sys.stderr)
        return 2
    if args.row and args.row not in BENCHMARKS:
        print(f"no row {args.row!r}: tools/bench_kernels.py --list prints all", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{name}: {len(candidates(name))} candidates" for name in operations))
        return 0
    if no_gpu("tune_kernels", "--list works without"):
        return 2
    exit_code = 0
    for operation in operations:
        try:
            tune(operation, args.minutes, args.dry_run, args.row)
        except Exception as error:  # the other operations do not depend on this one
            exit_code = 1
            print(f"{operation}: {error_line(error)}", file=sys.stderr, flush=True)
            if device_is_lost():
                break
    return exit_code


if __name__ == "__main__":
    sys.exit(main())

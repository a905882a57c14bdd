"""Search the tile shapes, warps and stages of a kernel on this GPU and write the best into its
architecture's table.

    python tools/tune_kernels.py attention_forward --dry-run      print what would change
    python tools/tune_kernels.py fp8_matmul                       write kernels/configs/sm_90.json (on a Hopper GPU)
    python tools/tune_kernels.py --list                           operations and candidates, without a GPU

A candidate counts only if it compiles and gives the same result as the present entry up to
rounding. Run the compile gate afterwards: it refuses spills. Only the entry that the operation's
benchmark selects, or the one named by --row, is tuned; the others keep what they have. As many
processes as there are cores first compile the candidates and compare their results, for at most
half of the time; then they are timed one after the other, in a random order, the same each time.
The table is written after each operation.
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
    parser.add_argument("operations", nargs="*", help="what --list names; without any, all of them")
    parser.add_argument(
        "--list", action="store_true", help="print operations and how many candidates each has"
    )
    parser.add_argument(
        "--row",
        help="a benchmark row for another entry of the table: `tools/bench_kernels.py --list`",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of search for each operation")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, write nothing")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    print_anywhere()
    # answers --help and refuses bad options before the seconds that the imports below take
    _arguments()

import torch

from megatron5d.kernels import tuning
from megatron5d.kernels.fp8.quantize import Quantized
from megatron5d.tools.bench import BENCHMARKS
from megatron5d.tools.bench.harness import device_is_lost, in_turn, median_ms

SILENCE_S = 60.0  # of one candidate's compilation

WARPS = {"num_warps": (4, 8)}
FEW, MANY = {"num_warps": (2, 4, 8)}, {"num_warps": (4, 8, 16)}
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
ELEMENTS, COLUMNS = {"ELEMENTS": (4096, 8192)} | MANY, {"BLOCK": (2048, 4096, 8192)} | MANY
BACKWARD, GROUPED = "attention backward, causal, d 128, 8 k", "grouped GEMM, 64 experts"
GROUPED_GRAD, SCATTER = (
    "grouped GEMM weight gradient, 64 experts",
    "GEMM reduce-scatter, 8 ranks, 8192x8192x1792",
)
# operation -> its benchmark, the provider that runs it, the values of each constant
SPACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "attention_forward": (
        "attention forward, causal, d 128, 8 k",
        "ours",
        {**ATTENTION, "AHEAD": (True, False)},
    ),
    "attention_backward_keys": (BACKWARD, "ours", ATTENTION),
    "attention_backward_queries": (BACKWARD, "ours", ATTENTION),
    "attention_delta": (BACKWARD, "ours", {"ROWS": (16, 32, 64), **FEW}),
    "fp8_matmul": ("float8 blockwise GEMM 4096x7168x16384", "ours", {**GEMM_FP8, "BLOCK_K": None}),
    "grouped_matmul": (GROUPED, "ours", GEMM),
    "grouped_matmul_fp8": (GROUPED, "ours, float8", {**GEMM_FP8, "BLOCK_K": (128,)}),
    "grouped_weight_grad": (
        GROUPED_GRAD,
        "ours",
        {
            "BLOCK_N": (64, 128, 256),
            "BLOCK_K": (64, 128),
            "BLOCK_R": (32, 64),
            "BAND": (4, 8),
            **STAGES,
        },
    ),
    "grouped_weight_grad_fp8": (
        GROUPED_GRAD,
        "ours, float8",
        {"BLOCK_N": (64, 128), "BLOCK_K": (64, 128), "BAND": (4, 8, 16), **STAGES},
    ),
    "fp8_quantize": ("float8 rows 16384x4096", "ours, blocks", MANY),
    "fp8_tensor": ("float8, one scale, 16384x4096", "ours, both ways", {"TILE": (64, 128), **MANY}),
    "fp8_blocks": ("float8 rows 16384x4096", "ours, blocks", MANY),
    "fp8_transpose": ("float8 transposed 16384x4096", "ours", MANY),
    "fp8_swiglu": ("SwiGLU to float8 8192x14336", "ours", {"ROWS": (4, 8, 16, 32), **FEW}),
    "fp8_swiglu_backward": (
        "SwiGLU backward to float8 8192x14336",
        "ours",
        {"ROWS": (4, 8, 16, 32), **FEW},
    ),
    "fp8_rms_norm": ("RMSNorm to float8 16384x4096", "ours", ELEMENTS),
    "all_gather_gemm": ("all-gather GEMM, 8 ranks, 8192x1792x8192", "ours", GEMM),
    "gemm_reduce_scatter": (SCATTER, "ours", GEMM),
    "sum_arrived": (SCATTER, "ours, the sum", {"BLOCK": (1024, 2048, 4096), **WARPS}),
    "norm_forward": ("RMSNorm forward 16384x4096", "ours", ELEMENTS),
    "norm_backward": (
        "RMSNorm backward 16384x4096",
        "ours",
        {
            "ELEMENTS": (4096, 8192),
            "PROGRAMS_PER_PROCESSOR": (1, 2, 4),
            "STAGES": (1, 2, 3),
            **MANY,
        },
    ),
    "swiglu": ("SwiGLU forward 8192x14336", "ours", {"BLOCK": (512, 1024, 2048, 4096), **WARPS}),
    "rope": ("RoPE, 32 and 8 heads, 16 k tokens", "ours", {"HEADS": (4, 8, 16, 32), **FEW}),
    "vocab_statistics": ("cross-entropy forward 8192x128256", "ours", COLUMNS),
    "vocab_cross_entropy_backward": ("cross-entropy backward 8192x128256", "ours", COLUMNS),
    "moe_permute": (
        "MoE permute, 16 k tokens, 8 of 64",
        "ours",
        {"BLOCK": (512, 1024, 2048), **FEW},
    ),
    "moe_permutation": (
        "MoE top-k, 64 k tokens, 8 of 64",
        "ours, permutation",
        {"BLOCK": (256, 512, 1024), "ROWS": (8, 16, 32), **WARPS},
    ),
    "moe_topk": ("MoE top-k, 64 k tokens, 8 of 64", "ours", {"num_warps": (1, 2, 4)}),
    "squared_norm": ("gradient norm, 32 x 16 M", "ours", COLUMNS | WARPS),
    "adamw": ("AdamW, 32 x 16 M", "ours", {"BLOCK": (1024, 2048, 4096), **WARPS}),
}


def candidates(operation: str, architecture: str = "") -> list[dict]:
    """Returns every combination of the operation's values, without what is known to go wrong on the
    architecture.

    On Blackwell Triton 3.6 starts a GEMM ahead over scores that other warps still read.
    """
    values = {name: v for name, v in SPACE[operation][2].items() if v is not None}
    if architecture.startswith("sm_10") and "AHEAD" in values:
        values["AHEAD"] = (False,)
    return [dict(zip(values, combination)) for combination in itertools.product(*values.values())]


def results(out: object) -> list[torch.Tensor]:
    """Copies of all tensors that a call has returned, in fp32. Raises TypeError: it has returned
    nothing that could be compared."""
    if isinstance(out, torch.Tensor):
        return [out.detach().float().clone()]
    if isinstance(out, Quantized):
        return results((out.values, out.scales))
    if isinstance(out, (tuple, list)) and out:
        return [tensor for each in out for tensor in results(each)]
    raise TypeError(f"a benchmark's call has to return tensors, not {out!r}")


def agrees(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(
        bool((g - w).norm() <= 1e-2 * w.norm() + 1e-6) for g, w in zip(got, want, strict=True)
    )


class Search:
    """Runs candidates of one operation by answering its `tuning.select`; the other operations keep
    their tables.

    Args:
        operation: a name of `SPACE`.
        row: of the benchmark; None = the operation's.
        device, tiny: as in `Benchmark.calls`.
    """

    def __init__(
        self, operation: str, row: str | None = None, device: str = "cuda", tiny: bool = False
    ):
        self.operation, self.original = operation, tuning.select
        usual, self.provider, _ = SPACE[operation]
        self.row = row or usual
        self.where: dict[str, Any] = {"device": device, "tiny": tiny}
        self.present: dict = {}
        with mock.patch.object(tuning, "select", self._observe):
            self.call = self._fresh()
            self.want = results(self.call())

    def _fresh(self) -> Callable[[], object]:
        """Returns the benchmark's call on inputs that are the same each time, also where it changes
        them."""
        torch.manual_seed(0)
        return BENCHMARKS[self.row].calls(**self.where)[self.provider]

    def _observe(self, operation: str, device: torch.device, **key: int) -> dict:
        config = self.original(operation, device, **key)
        if operation == self.operation:
            self.present = dict(config)
        return config

    def run(
        self, candidate: dict, measure: Callable[[Callable[[], object]], float]
    ) -> float | None:
        """Returns what `measure` says of the call with a candidate; None where it does not run or
        its result is another. Raises RuntimeError: it has broken the device, on which no other
        candidate would run."""

        def select(operation: str, device: torch.device, **key: int) -> dict:
            return (
                dict(candidate)
                if operation == self.operation
                else self.original(operation, device, **key)
            )

        with mock.patch.object(tuning, "select", select):
            try:
                call = self._fresh()
                return measure(call) if agrees(results(call()), self.want) else None
            except Exception as error:  # too much shared memory, or a tile that the compiler refuses: not a candidate
                if device_is_lost():
                    raise RuntimeError(f"{candidate} has broken the device: {error}") from error
                return None

    def ms(self, candidate: dict) -> float | None:
        return self.run(candidate, lambda call: median_ms([call], 20))


def _compile(
    operation: str,
    row: str | None,
    every: Sequence[dict],
    pieces: Sequence[str],
    tell: Callable[[tuple], None],
) -> None:
    """Runs candidates, whose numbers are the pieces: the worker of `in_turn`."""
    search = Search(operation, row)
    for piece in pieces:
        tell((piece, search.run(every[int(piece)], lambda call: 0.0) is not None))
        tell((piece,))


def compiled(operation: str, row: str | None, every: Sequence[dict], until: float) -> list[dict]:
    """Compiles candidates into Triton's cache, and returns those whose results are right or not
    known.

    Args:
        until: of `time.monotonic()`.
    """
    count = min((os.cpu_count() or 1) - 1, len(every) // 4)
    if count < 2:
        return list(every)
    numbers = [str(i) for i in range(len(every))]
    worker = functools.partial(_compile, operation, row, every)

    def follow(mine: list[str]) -> list[tuple]:
        return list(in_turn(worker, mine, SILENCE_S, until))

    with ThreadPoolExecutor(count) as pool:
        told = {
            number: result
            for part in pool.map(follow, (numbers[i::count] for i in range(count)))
            for number, result in part
        }
    unknown = "not reached: the time is up"
    return [
        each
        for number, each in zip(numbers, every)
        if told.get(number) is True or told.get(number) == unknown
    ]


def write_entry(architecture: str, operation: str, present: dict, best: dict) -> None:
    """Replaces the entry whose configuration is `present`, one entry a line."""
    path = tuning.DIRECTORY / f"{architecture}.json"
    entries = json.loads(path.read_text())
    for entry in entries[operation]:
        if entry["config"] == present:
            entry["config"] = best
    rows = [
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(e)}" for e in each) + "\n  ]"
        for name, each in entries.items()
    ]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def tune(operation: str, minutes: float, dry_run: bool, row: str | None = None) -> None:
    """Measures the candidates, prints the faster ones as they come, and writes the best."""
    architecture = tuning.architecture(torch.device("cuda"))
    begin, every = time.monotonic(), candidates(operation, architecture)
    random.Random(0).shuffle(every)
    right = compiled(operation, row, every, begin + 30 * minutes)
    search = Search(operation, row)
    best, best_ms = search.present, median_ms([search.call])
    print(
        f"{operation}: {best_ms:.3f} ms with {best}; {len(right)} of {len(every)} candidates",
        flush=True,
    )
    tried = 0
    try:
        for candidate in right:
            if time.monotonic() > begin + 60 * minutes:
                print(f"  the time is up after {tried} candidates", flush=True)
                break
            ms, tried = search.ms(candidate), tried + 1
            if ms is not None and ms < 0.99 * best_ms:
                best, best_ms = candidate, ms
                print(f"  {ms:.3f} ms with {candidate}", flush=True)
    finally:
        if best != search.present and not dry_run:
            write_entry(architecture, operation, search.present, best)


def main() -> int:
    args = _arguments()
    wanted = args.operations or list(SPACE)
    if unknown := [o for o in wanted if o not in SPACE]:
        print(
            f"unknown operation {', '.join(unknown)}; there are {', '.join(SPACE)}", file=sys.stderr
        )
        return 2
    if args.row and args.row not in BENCHMARKS:
        print(f"no row {args.row!r}: tools/bench_kernels.py --list prints them", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{o}: {len(candidates(o))} candidates" for o in wanted))
        return 0
    if not torch.cuda.is_available():
        print(
            "tune_kernels measures on a GPU, and torch sees none here; --list prints the candidates",
            file=sys.stderr,
        )
        return 2
    failed = 0
    for operation in wanted:
        try:
            tune(operation, args.minutes, args.dry_run, args.row)
        except Exception as error:  # the other operations' searches do not depend on this one
            failed = 1
            print(f"{operation}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if device_is_lost():
                break
    return failed


if __name__ == "__main__":
    sys.exit(main())

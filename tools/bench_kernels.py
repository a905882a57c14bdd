"""Measure every kernel on this GPU, and compare it with torch, the compiler and other libraries.

    python tools/bench_kernels.py                                    all rows, as a table
    python tools/bench_kernels.py attention --json attention.json
    python tools/bench_kernels.py --choose        also write which libraries kernels.*=auto prefers
    python tools/bench_kernels.py --list          the rows, without a GPU

Needs torch and Triton only; Liger-Kernel is measured where it is installed. A time is the median of
many calls on several sets of inputs with a cold cache. Shares are of the copy bandwidth or bfloat16
GEMM rate of the same device, measured in the same run. Memory is the peak of what a call allocates.
A provider that fails is listed with its error; one that crashes or hangs ends its row, and the next
row is measured. Rows for which no time is left are named. --json is rewritten after every figure.
"""

import argparse
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere


def _arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument("substrings", nargs="*", help="only rows whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--sets", type=int, default=3, help="sets of inputs")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls of each provider")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--choose", action="store_true", help="write the order that kernels.*=auto uses on this GPU"
    )
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    print_anywhere()
    # answers --help and rejects bad options before the imports below, which take seconds
    _arguments()

import torch
import torch._functorch.config

from megatron5d.kernels import choice, tuning
from megatron5d.kernels.choice import capability_of
from megatron5d.tools.bench import BENCHMARKS
from megatron5d.tools.bench.harness import (
    Benchmark,
    Call,
    clear_device,
    copy_gb_s,
    device_is_lost,
    gemm_tflop_s,
    median_ms,
    no_gpu,
    peak_bytes,
)
from megatron5d.tools.bench.processes import Send, run_tasks
from megatron5d.tools.bench.results import Figures, collect, unavailable, write_entries

PER_MS = {"TFLOP/s": 1e9, "GB/s": 1e6}
SILENCE_S = 150.0  # of one provider: three compilations and all its calls


def request_of(call: Call) -> choice.Request | None:
    """The last request that a call makes for a library; None where it makes none."""
    requests: list[choice.Request] = []
    original = choice.provider

    def observed(request: choice.Request, settings: choice.Settings) -> Any:
        requests.append(request)
        return original(request, settings)  # type: ignore[arg-type]

    with mock.patch.object(choice, "provider", observed):
        call()
    return requests[-1] if requests else None


def measure(
    benchmark: Benchmark, sets: int, repeats: int, select: Callable[[str], bool] = bool
) -> Iterator[tuple[str, Figures]]:
    """Yields time, rate and peak memory of each selected provider, or why it has none.

    Raises:
        Exception: a provider has broken the device; another process continues.
    """
    try:
        inputs = [benchmark.calls_by_library() for _ in range(sets)]
    except Exception as error:
        yield "inputs", unavailable(error)
        if device_is_lost():
            raise
        return
    for provider in filter(select, inputs[0]):
        # times are of several inputs, memory and the request for a library of the first
        call = inputs[0][provider]
        try:
            ms = median_ms([calls[provider] for calls in inputs], repeats)
            figures = {
                "ms": ms,
                "rate": benchmark.work_of_a_call / ms / PER_MS[benchmark.unit],
                "unit": benchmark.unit,
                "peak_bytes": peak_bytes(call),
            }
            if provider in benchmark.families and (request := request_of(call)):
                figures |= {"way": request.operation, "key": request.key}
        except Exception as error:  # a provider that this build lacks must not end the run
            yield provider, unavailable(error)
            if device_is_lost():
                raise
            continue
        yield provider, figures


def work(sets: int, repeats: int, names: Sequence[str], send: Send) -> None:
    """Measures the device and the named rows: the worker of `run_tasks`."""
    # compiled backwards run several times through one graph, which donated buffers forbid
    torch._functorch.config.donated_buffer = False
    facts = {
        "device": torch.cuda.get_device_name(),
        "capability": capability_of(torch.empty(0, device="cuda")),
        "torch": torch.__version__,
        "limits": {"GB/s": copy_gb_s(), "TFLOP/s": gemm_tflop_s()},
    }
    send((None, facts))
    for name in names:
        for provider, figures in measure(BENCHMARKS[name], sets, repeats):
            send((name, {provider: figures}))
        send((name,))
        clear_device()


def report(results: Iterator[tuple], file: Path | None) -> Figures:
    """Prints and collects the results of `work`, as `collect` does."""
    reports = (
        (name, {"the rest": {"unavailable": figures}} if isinstance(figures, str) else figures)
        for name, figures in results
    )
    return collect(reports, header, table, file)


def header(facts: Figures) -> str:
    limits = facts["limits"]
    return (
        f"{facts['device']}, torch {facts['torch']}: copy {limits['GB/s']:.0f} GB/s, "
        f"bfloat16 GEMM {limits['TFLOP/s']:.0f} TFLOP/s"
    )


def table(name: str, row: Figures, facts: Figures) -> str:
    """Rate, share of the device's limit, memory, and our speed over each provider's."""
    lines = [name]
    ours = row.get("ours", {}).get("ms")
    for provider, figures in row.items():
        if "unavailable" in figures:
            lines.append(f"  {provider:33} {figures['unavailable']}")
            continue
        share = figures["rate"] / facts["limits"][figures["unit"]]
        ratio = f"ours is {figures['ms'] / ours:.2f} x" if ours and provider != "ours" else ""
        lines.append(
            f"  {provider:33} {figures['ms']:9.3f} ms {figures['rate']:9.1f} {figures['unit']:8} "
            f"{share:6.1%} of limit {figures['peak_bytes'] / 2**20:9.1f} MiB  {ratio}"
        )
    return "\n".join(lines)


Order = tuple[dict[str, int], list[str]]
"""The key of a shape, and the libraries that computed it, the fastest first."""


def measured_orders(rows: Mapping[str, Figures]) -> dict[str, list[Order]]:
    """Orders by operation, of rows that more than one library computed."""
    orders: defaultdict[str, list[Order]] = defaultdict(list)
    for row in rows.values():
        for provider, figures in row.items():
            # a row that was not reached has a text instead
            if not isinstance(figures, dict) or "way" not in figures:
                continue
            prefix = f"{provider}, by "
            times = {
                name.removeprefix(prefix): other["ms"]
                for name, other in row.items()
                if name.startswith(prefix) and "ms" in other
            }
            if times:
                times[choice.TRITON] = figures["ms"]
                fastest_first = sorted(times, key=lambda library: times[library])
                orders[figures["way"]].append((figures["key"], fastest_first))
    return orders


def entries(orders: list[Order]) -> Iterator[Figures]:
    """Yields the entries of an operation's table, the smallest shapes first.

    A size is unbounded in the entry of its largest measured value.
    """
    if all(libraries == orders[0][1] for _, libraries in orders):
        yield {"config": {"order": orders[0][1]}}  # for any shape
        return
    largest = {name: max(key[name] for key, _ in orders) for name in orders[0][0]}
    for key, libraries in sorted(orders, key=lambda order: tuple(order[0].items())):
        bounds = {name: size for name, size in key.items() if size < largest[name]}
        yield ({"up_to": bounds} if bounds else {}) | {"config": {"order": libraries}}


def write_orders(rows: Mapping[str, Figures], capability: int) -> Path | None:
    """Replaces the table of an architecture; returns None where nothing was compared."""
    table = {name: [*entries(orders)] for name, orders in measured_orders(rows).items()}
    if not table:
        return None
    path = tuning.DIRECTORY / f"providers/sm_{capability}.json"
    path.parent.mkdir(exist_ok=True)
    write_entries(path, table)
    return path


def main() -> int:
    args = _arguments()
    names = [
        name
        for name in BENCHMARKS
        if not args.substrings or any(text.lower() in name.lower() for text in args.substrings)
    ]
    if not names:
        print(f"no row contains {' or '.join(args.substrings)}; --list prints all", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(names))
        return 0
    if no_gpu("bench_kernels", "--list works without"):
        return 2
    worker = functools.partial(work, args.sets, args.repeats)
    deadline = time.monotonic() + 60 * args.minutes
    results = report(run_tasks(worker, names, SILENCE_S, deadline), args.json)
    if args.choose:
        print(f"written: {write_orders(results['rows'], results.get('capability', 0))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

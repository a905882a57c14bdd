"""Measure every kernel on this GPU beside the other implementations at hand: torch's own, the
vendor's, the compiler's.

    python tools/bench_kernels.py                    all rows, a table
    python tools/bench_kernels.py attention --json attention.json
    python tools/bench_kernels.py --choose           and write which library `auto` takes on this GPU
    python tools/bench_kernels.py --list             the rows, without a GPU

Needs torch and Triton only. Each figure is the median of many calls over several sets of inputs
with a cold cache. Shares are of this very device's measured copy bandwidth or bfloat16 GEMM rate,
in the same run. Memory is what a call takes at its peak beyond what was there before it.
Liger-Kernel is measured where it is installed. A provider that fails says why and ends nothing; one
that crashes or hangs ends its row. The file is written with every figure, and rows that the time
does not suffice for are named.
"""

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    parser.add_argument("--repeats", type=int, default=50, help="timed calls a provider")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop, whatever is left")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--choose", action="store_true", help="write what kernels.*=auto goes by on this GPU"
    )
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    print_anywhere()
    # answers --help and refuses bad options before the seconds that the imports below take
    _arguments()

import torch
import torch._functorch.config

from megatron5d.config.convert import write_whole
from megatron5d.kernels import choice, tuning
from megatron5d.kernels.choice import capability_of
from megatron5d.tools.bench import BENCHMARKS
from megatron5d.tools.bench.harness import (
    Benchmark,
    Calls,
    copy_gb_s,
    device_is_lost,
    gemm_tflop_s,
    in_turn,
    median_ms,
    peak_bytes,
)

PER_MS = {"TFLOP/s": 1e9, "GB/s": 1e6}
SILENCE_S = 150.0  # of one provider: three compilations and all its calls


LIBRARIES = {
    "attention": ("cudnn", "fa4"),
    "fp8": ("torch",),
    "grouped": ("torch",),
    "norm": ("torch",),
}


def with_libraries(calls: Calls, families: Mapping[str, str]) -> Calls:
    """Adds to a row's calls of ours the same calls by each library; what a library does not take is
    an error there.

    Args:
        calls: by provider; those of `families` are made Triton's.
        families: provider -> key of `kernels`.
    """
    found = dict(calls)
    for provider, family in families.items():
        for name in (choice.TRITON, *LIBRARIES[family]):
            label = provider if name == choice.TRITON else f"{provider}, by {name}"
            settings = choice.Settings(**{family: name}, strict=True, deterministic=False)
            found[label] = functools.partial(calls[provider], settings=settings)
    return found


def asked_by(call: Callable[[], object]) -> choice.Request | None:
    """Returns the last request that a call makes; None where it makes none."""
    seen: list[choice.Request] = []
    original = choice.provider

    def observed(request: choice.Request, settings: choice.Settings) -> Any:
        seen.append(request)
        return original(request, settings)  # type: ignore[arg-type]

    with mock.patch.object(choice, "provider", observed):
        call()
    return seen[-1] if seen else None


def orders(
    figures: Iterable[tuple[str, dict[str, int], dict[str, float]]],
) -> dict[str, list[dict[str, Any]]]:
    """Makes the table of an architecture: way -> entries, the smallest shapes first.

    Args:
        figures: (way, shape keys, name -> milliseconds) of each row. A key has no bound where no
            larger one was measured.
    """
    table: dict[str, list[dict[str, Any]]] = {}
    rows = [each for each in figures if len(each[2]) > 1]
    for way in dict.fromkeys(way for way, *_ in rows):
        measured = sorted(
            ((tuple(key.items()), times) for each, key, times in rows if each == way),
            key=lambda each: each[0],
        )
        most = {name: max(dict(key)[name] for key, _ in measured) for name, _ in measured[0][0]}
        for key, times in measured:
            bounds = {name: size for name, size in key if size < most[name]}
            entry = {"up_to": bounds} if bounds else {}
            table.setdefault(way, []).append(
                entry | {"config": {"order": sorted(times, key=lambda name: times[name])}}
            )
        if all(entry["config"] == table[way][0]["config"] for entry in table[way]):
            table[way] = [{"config": table[way][0]["config"]}]  # of any shape
    return table


def times_of(
    rows: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> list[tuple[str, dict[str, int], dict[str, float]]]:
    """Returns what `orders` takes, of the figures of tools/bench_kernels.py."""
    found = []
    for row in rows.values():
        for provider, figures in row.items():
            if "way" not in figures:
                continue
            times = {choice.TRITON: figures["ms"]}
            for name in {name for names in LIBRARIES.values() for name in names}:
                if "ms" in (other := row.get(f"{provider}, by {name}", {})):
                    times[name] = other["ms"]
            found.append((figures["way"], figures["key"], times))
    return found


def write_orders(
    rows: Mapping[str, Mapping[str, Mapping[str, Any]]], capability: int
) -> Path | None:
    """Writes the table of an architecture in the place of an earlier one; returns None where
    nothing was compared."""
    table = orders(times_of(rows))
    if not table:
        return None
    path = tuning.DIRECTORY / f"providers/sm_{capability}.json"
    path.parent.mkdir(exist_ok=True)
    lines = [
        f"  {json.dumps(way)}: [\n"
        + ",\n".join(f"    {json.dumps(each)}" for each in entries)
        + "\n  ]"
        for way, entries in table.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def measure(
    benchmark: Benchmark, sets: int, repeats: int, wanted: Callable[[str], bool] = bool
) -> Iterator[tuple[str, dict]]:
    """Measures milliseconds, rate and peak memory of each provider that is wanted, or says why it
    has none."""
    try:
        made = [with_libraries(benchmark.calls(), benchmark.families) for _ in range(sets)]
    except Exception as error:
        yield "inputs", because(error)
        if device_is_lost():
            raise
        made = [{}]
    for provider in filter(wanted, made[0]):
        try:
            ms = median_ms([calls[provider] for calls in made], repeats)
            memory = peak_bytes(made[0][provider])
            request = asked_by(made[0][provider]) if provider in benchmark.families else None
        except Exception as error:  # a provider that this build lacks must not end the run
            yield provider, because(error)
            if device_is_lost():
                raise
            continue
        rate = benchmark.work_of_a_call / ms / PER_MS[benchmark.unit]
        asked = {} if request is None else {"way": request.way, "key": request.key}
        yield (
            provider,
            {"ms": ms, "rate": rate, "unit": benchmark.unit, "peak_bytes": memory, **asked},
        )


def because(error: Exception) -> dict[str, str]:
    """Returns the first line of an error in the place of figures."""
    said = str(error).strip().partition("\n")[0]
    return {"unavailable": f"{type(error).__name__}: {said[:120]}"}


def work(sets: int, repeats: int, names: Sequence[str], tell: Callable[[tuple], None]) -> None:
    """Measures the device and the named rows, telling of each figure at once: the worker of
    `in_turn`."""
    # or what is compiled refuses to go back through its graph again
    torch._functorch.config.donated_buffer = False
    limits = {"GB/s": copy_gb_s(), "TFLOP/s": gemm_tflop_s()}
    capability = capability_of(torch.empty(0, device="cuda"))
    about = {
        "device": torch.cuda.get_device_name(),
        "capability": capability,
        "torch": torch.__version__,
    }
    tell((None, {**about, "limits": limits}))
    for name in names:
        for provider, row in measure(BENCHMARKS[name], sets, repeats):
            tell((name, provider, row))
        tell((name,))
        # the next row's shapes are its own: neither recompiled as dynamic nor given up
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def table(name: str, rows: dict[str, dict], limits: dict[str, float]) -> str:
    """Formats one benchmark: rate, share of the device's limit, memory, our speed over each
    provider's."""
    lines = [name]
    ours = rows.get("ours", {}).get("ms")
    for provider, row in rows.items():
        if "unavailable" in row:
            lines.append(f"  {provider:33} {row['unavailable']}")
            continue
        share = row["rate"] / limits[row["unit"]]
        ratio = f"ours is {row['ms'] / ours:.2f} x" if ours and provider != "ours" else ""
        lines.append(
            f"  {provider:33} {row['ms']:9.3f} ms {row['rate']:9.1f} {row['unit']:8} {share:6.1%} of limit "
            f"{row['peak_bytes'] / 2**20:9.1f} MiB  {ratio}"
        )
    return "\n".join(lines)


def main() -> int:
    args = _arguments()
    wanted = [
        n
        for n in BENCHMARKS
        if not args.substrings or any(s.lower() in n.lower() for s in args.substrings)
    ]
    if not wanted:
        print(
            f"no row contains {' or '.join(args.substrings)}; --list prints them", file=sys.stderr
        )
        return 2
    if args.list:
        print("\n".join(wanted))
        return 0
    if not torch.cuda.is_available():
        print(
            "bench_kernels measures on a GPU, and torch sees none here; --list prints the rows",
            file=sys.stderr,
        )
        return 2
    worker = functools.partial(work, args.sets, args.repeats)
    try:
        found = report(
            in_turn(worker, wanted, SILENCE_S, time.monotonic() + 60 * args.minutes), args.json
        )
    except KeyboardInterrupt:
        print("interrupted: what is above is what was measured", file=sys.stderr)
        return 130
    if args.choose:
        print(f"written: {write_orders(found['rows'], found.get('capability', 0))}")
    return 0


def report(told: Iterator[tuple], file: Path | None) -> dict[str, Any]:
    """Prints rows as they end, writes all that is known to the file with each figure, and returns
    it.

    Args:
        told: `(None, what the device is)`, `(row, provider, figures)`, and `(row, why it ended
            early)`.
        file: of the figures, or None.
    """
    found: dict[str, Any] = {"rows": {}}
    printed = ""

    def show(name: str) -> None:
        if name:
            print(table(name, found["rows"][name], found.get("limits", {})), flush=True)

    try:
        for name, *rest in told:
            if name is None:
                new = "limits" not in found
                found = {**rest[0], **found}
                limits = found["limits"]
                if new:
                    print(
                        f"{found['device']}, torch {found['torch']}: copy {limits['GB/s']:.0f} GB/s, "
                        f"bfloat16 GEMM {limits['TFLOP/s']:.0f} TFLOP/s",
                        flush=True,
                    )
            else:
                if name != printed:
                    show(printed)
                    printed = name
                provider, row = rest if len(rest) == 2 else ("the rest", {"unavailable": rest[0]})
                found["rows"].setdefault(name, {})[provider] = row
            if file:  # at once: a machine that is taken away has left what it found
                write_whole(file, json.dumps(found, indent=1))
    finally:
        show(printed)
    return found


if __name__ == "__main__":
    sys.exit(main())

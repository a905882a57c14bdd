"""Measure every kernel on this GPU beside the other implementations at hand: torch's own, the vendor's, the compiler's.

    python tools/bench_kernels.py                    all rows, a table
    python tools/bench_kernels.py attention --json attention.json
    python tools/bench_kernels.py --list             the rows, without a GPU

Needs torch and Triton only. Each figure is the median of many calls over several sets of inputs with a cold cache.
Shares are of this very device's measured copy bandwidth or bfloat16 GEMM rate, in the same run. Memory is what a call
takes at its peak beyond what was there before it. Liger-Kernel is measured where it is installed.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("substrings", nargs="*", help="only rows whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--sets", type=int, default=3, help="sets of inputs")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls a provider")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    _arguments()  # answers --help and refuses bad options before the seconds that the imports below take

import torch

from kernels.testing.bench_row import Benchmark
from kernels.testing.benchmarks import BENCHMARKS
from kernels.testing.measure import copy_gb_s, gemm_tflop_s, median_ms, peak_bytes

PER_MS = {"TFLOP/s": 1e9, "GB/s": 1e6}


def measure(benchmark: Benchmark, sets: int, repeats: int) -> dict[str, dict]:
    """Milliseconds, rate and peak memory of each provider, or the reason why it has none."""
    made = [benchmark.calls() for _ in range(sets)]
    rows: dict[str, dict] = {}
    for provider in made[0]:
        try:
            ms = median_ms([calls[provider] for calls in made], repeats)
            memory = peak_bytes(made[0][provider])
        except Exception as error:  # a provider that this build lacks must not end the run
            rows[provider] = {"unavailable": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
            continue
        rate = benchmark.work_of_a_call / ms / PER_MS[benchmark.unit]
        rows[provider] = {"ms": ms, "rate": rate, "unit": benchmark.unit, "peak_bytes": memory}
    return rows


def table(name: str, rows: dict[str, dict], limits: dict[str, float]) -> str:
    """One benchmark as lines of text: rate, share of the device's limit, memory, our speed over each provider's."""
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
    wanted = [n for n in BENCHMARKS if not args.substrings or any(s.lower() in n.lower() for s in args.substrings)]
    if not wanted:
        print(f"no row contains {' or '.join(args.substrings)}; --list prints them", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(wanted))
        return 0
    if not torch.cuda.is_available():
        print("bench_kernels measures on a GPU, and torch sees none here; --list prints the rows", file=sys.stderr)
        return 2
    limits = {"GB/s": copy_gb_s(), "TFLOP/s": gemm_tflop_s()}
    device = torch.cuda.get_device_name()
    print(f"{device}: copy {limits['GB/s']:.0f} GB/s, bfloat16 GEMM {limits['TFLOP/s']:.0f} TFLOP/s", flush=True)
    results = {}
    for name in wanted:
        results[name] = measure(BENCHMARKS[name], args.sets, args.repeats)
        torch.cuda.empty_cache()
        print(table(name, results[name], limits), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "limits": limits, "rows": results}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

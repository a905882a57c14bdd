"""The first minutes on a new GPU: whether what is computed there is right, how fast, and beside
what.

    bash launch/gpu_check.sh                          nine minutes; runs/gpu_check/gpu_check.md and .json
    bash launch/gpu_check.sh --minutes 60 --write     more rows and tuning; their results go into kernels/configs/

Needs torch and Triton; whole steps also need Hydra, and transformers beside them. In this order, so
that what matters most is there first: the device; every kernel and library beside the plain path,
and compute-sanitizer on the kernels that overlap at the same time; losses of a small model, with
the kernels and without, and of layouts of several ranks, which share the GPUs that there are; what
a copy and a GEMM reach, and whether torch adds a GEMM into the main gradient in place; the rows of
tools/bench_kernels.py by importance; whole steps of tools/bench_train.py; and the tuner with the
time that is left. Each result is written at once, and what crashes or hangs ends its own line
alone: a machine that is taken away at any moment has left a whole table.
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere


def _arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop, whatever is left")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu_check"), help="folder of the two files"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep tuned tiles and the order of libraries"
    )
    parser.add_argument(
        "--run",
        metavar="ROW",
        help="only run our calls of a row once, small: for compute-sanitizer",
    )
    return parser.parse_args()


if __name__ == "__main__":
    print_anywhere()
    # answers --help and refuses bad options before the seconds that the imports below take
    _arguments()

import torch

from megatron5d.config.convert import write_whole
from megatron5d.config.schema import TrainConfig
from megatron5d.kernels import choice
from megatron5d.tools.bench import BENCHMARKS
from megatron5d.tools.bench.compare import ADDMM, LOSSES, addmm, losses, reference
from megatron5d.tools.bench.harness import copy_gb_s, device_is_lost, gemm_tflop_s, in_turn
from megatron5d.tools.bench.programs import ended, killed, started
from megatron5d.tools.bench_kernels import because, measure, write_orders
from megatron5d.tools.tune_kernels import SPACE

TOOLS = Path(__file__).resolve().parent
SILENCE_S = 120.0  # of one piece: three compilations and all its calls
# shares of the time at which the next part begins
UNTIL = {"checks": 0.35, "layouts": 0.5, "benchmarks": 0.75, "training": 0.92}
OVERLAPPING = ("all-gather GEMM", "GEMM reduce-scatter")
FIRST = (
    "attention forward, causal, d 128",
    "attention backward, causal, d 128",
    "window of 128",
    "float8 blockwise",
    "grouped",
    "weight gradient",
    "RMSNorm",
    "SwiGLU",
    "RoPE",
    "cross-entropy",
)
PACKAGES = ("triton", "flash-attn-4", "transformers", "hydra-core", "liger-kernel")


def sanitizers(rows: Sequence[str]) -> dict[str, subprocess.Popen[str]]:
    """Starts compute-sanitizer on the kernels of rows: `<tool>: <row>` -> its process."""
    program, script = shutil.which("compute-sanitizer"), str(TOOLS / "gpu_check.py")
    if program is None:
        return {}
    return {
        f"{tool}: {row}": started([program, "--tool", tool, sys.executable, script, "--run", row])
        for row in rows
        for tool in ("memcheck", "racecheck")
    }


def counted(program: subprocess.Popen[str], until: float) -> dict[str, Any]:
    """Returns how many errors compute-sanitizer has found."""
    _, said = ended(program, until, lines=20)
    # ERROR SUMMARY: 0 errors        RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
    summary = re.search(r"SUMMARY: (\d+) (?:error|hazard)", said)
    return (
        {"errors": int(summary[1])}
        if summary
        else {"unavailable": said[-200:] or "it has said nothing"}
    )


def versions() -> dict[str, str]:
    """Returns those of torch, its libraries, the driver and what may be beside them."""
    found = {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    if (smi := shutil.which("nvidia-smi")) is not None:
        query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit"
        found["driver, clocks, power"] = ended(
            started([smi, query, "--format=csv,noheader"]), time.monotonic() + 10
        )[1]
    return found


TITLES = {
    "device": "The device",
    "reference": "Beside the plain path",
    "losses": "Losses of a small model beside the plain path",
    "layouts": "Losses of several ranks beside those of one",
    "sanitizer": "compute-sanitizer",
    "limits": "What it reaches",
    "addmm": "torch.addmm into a main gradient",
    "benchmarks": "Speed",
    "training": "Whole steps",
    "tuning": "Tuned",
}


class Book:
    """The results so far: section -> name -> figures; those of one name add up.

    Args:
        folder: of gpu_check.json and gpu_check.md; made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.found: dict[str, dict[str, dict[str, Any]]] = {}

    def put(self, section: str, name: str, figures: Mapping[str, Any]) -> None:
        """Adds figures, prints them, and writes both files."""
        self.found.setdefault(section, {}).setdefault(name, {}).update(figures)
        print(f"{section}: {name}: {_words(figures)}", flush=True)
        write_whole(self.folder / "gpu_check.json", json.dumps(self.found, indent=1))
        write_whole(self.folder / "gpu_check.md", self.markdown())

    def all_right(self) -> bool:
        """Says whether nothing that was compared differs: kernels, addmm, and what the sanitizer
        found."""
        compared = [
            each for row in self.found.get("reference", {}).values() for each in row.values()
        ]
        compared += [
            *self.found.get("losses", {}).values(),
            *self.found.get("layouts", {}).values(),
        ]
        wrong = [each for each in compared if isinstance(each, dict) and each.get("right") is False]
        wrong += [
            row for row in self.found.get("addmm", {}).values() if row.get("in place") is False
        ]
        return not wrong and all(
            row.get("errors", 0) == 0 for row in self.found.get("sanitizer", {}).values()
        )

    def markdown(self) -> str:
        """Returns the tables of all sections that have begun."""
        lines = ["# GPU check"]
        for section, title in TITLES.items():
            if section in self.found:
                lines += ["", f"## {title}", "", *_table(section, self.found[section])]
        return "\n".join(lines) + "\n"


def _table(section: str, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    nested = section in ("reference", "benchmarks", "training")
    yield "| | | |\n|---|---|---|" if nested else "| | |\n|---|---|"
    for name, row in rows.items():
        each = (
            {key: value for key, value in row.items() if isinstance(value, dict)} if nested else {}
        )
        rest = {key: value for key, value in row.items() if key not in each}
        if rest:
            yield f"| {name} | {_words(rest)} |" + " |" * nested
        ours = each.get("ours", {}).get("ms")
        for provider, figures in each.items():
            ratio = (
                f", ours is {figures['ms'] / ours:.2f} x"
                if ours and "ms" in figures and provider != "ours"
                else ""
            )
            yield f"| {name} | {provider} | {_words(figures)}{ratio} |"


def _words(figures: Mapping[str, Any]) -> str:
    """Returns figures in one line; the shape of a request is for the program."""
    if "ms" in figures:
        return f"{figures['ms']:.3f} ms, {figures['rate']:.0f} {figures['unit']}, {figures['peak_bytes'] / 2**20:.0f} MiB"
    if "right" in figures:
        ends = "".join(
            f"; {way} {figures[way][0]:.3f} to {figures[way][-1]:.3f}"
            for way in ("kernels", "plain")
            if way in figures
        )
        bits = "" if figures.get("same bits", True) else ", other bits each time"
        return f"{'right' if figures['right'] else 'WRONG'}, differs by {figures['difference']:.1e}{bits}{ends}"
    words = (
        f"{key} {_words(value) if isinstance(value, dict) else _figure(value)}"
        for key, value in figures.items()
    )
    return "; ".join(words).replace("|", "/").replace("\n", " / ")


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def by_importance(names: Sequence[str]) -> list[str]:
    """Sorts rows of the benchmark; those that FIRST does not name keep their order behind the
    others."""
    rank = {
        name: next((i for i, part in enumerate(FIRST) if part in name), len(FIRST))
        for name in names
    }
    return sorted(names, key=lambda name: rank[name])


def compiles(provider: str) -> bool:
    """Says whether a provider is compiled by torch, which takes longer than all others' calls."""
    return "compile" in provider or "flex" in provider


def launches(provider: str) -> bool:
    """Says the opposite."""
    return not compiles(provider)


def device_facts() -> dict[str, Any]:
    """Returns what there is."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    about = {
        "device": properties.name,
        "capability": choice.capability_of(torch.empty(0, device="cuda")),
        "memory GB": round(properties.total_memory / 1e9, 1),
        "processors": properties.multi_processor_count,
    }
    return about | versions()


def limits() -> dict[str, float]:
    """Returns what a copy and a GEMM reach."""
    return {"copy, GB/s": copy_gb_s(), "bfloat16 GEMM, TFLOP/s": gemm_tflop_s()}


def work(pieces: Sequence[str], tell: Callable[[tuple], None]) -> None:
    """Does pieces, `<section>: <name>`, telling of each result: the worker of `in_turn`."""
    for piece in pieces:
        section, _, name = piece.partition(": ")
        if section in ("benchmarks", "compiled"):
            for provider, figures in measure(
                BENCHMARKS[name], 2, 30, compiles if section == "compiled" else launches
            ):
                tell((piece, {provider: figures}))
        else:
            made = {
                "device": lambda _: device_facts(),
                "addmm": lambda name: addmm(*ADDMM[name]),
                "limits": lambda _: limits(),
                "reference": reference,
                "losses": losses,
            }[section]
            try:
                tell((piece, made(name)))
            except Exception as error:
                tell((piece, because(error)))
                if device_is_lost():
                    raise
        tell((piece,))
        torch.compiler.reset()
        torch.cuda.empty_cache()


def training(book: Book, deadline: float) -> None:
    """Measures whole steps: each model in bfloat16 and FP8, with and without CUDA graphs where
    there is the key."""
    if find_spec("hydra") is None:
        book.put("training", "whole steps", {"unavailable": "hydra-core is not installed"})
        return
    graphs = ("none", "phases") if "cuda_graph" in TrainConfig.__dataclass_fields__ else (None,)
    variants = [
        (case, fp8, graph)
        for graph in graphs
        for fp8 in ("none", "blockwise")
        for case in ("1b", "8b")
    ]
    for i, (case, fp8, graph) in enumerate(variants):
        name = f"{case}, {'bf16' if fp8 == 'none' else 'FP8'}" + (
            f", graphs {graph}" if graph else ""
        )
        file = book.folder / "step.json"
        file.unlink(missing_ok=True)
        command = [
            sys.executable,
            str(TOOLS / "bench_train.py"),
            case,
            "--steps",
            "5",
            "--json",
            str(file),
        ]
        command += [
            "--set",
            f"precision.fp8={fp8}",
            *(["--set", f"train.cuda_graph={graph}"] if graph else []),
        ]
        command += [] if (fp8, graph) == ("none", graphs[0]) else ["--only", "ours"]
        until = time.monotonic() + (deadline - time.monotonic()) / (len(variants) - i)
        code, said = ended(started(command), until)
        rows = json.loads(file.read_text())["rows"] if file.exists() else {}
        book.put(
            "training",
            name,
            rows.get(case)
            or {
                "unavailable": said
                or ("the time is up" if code is None else f"it ended with {code}")
            },
        )


def tuned(book: Book, deadline: float, write: bool) -> None:
    """Tunes one operation after another, those of the first rows first."""
    rows = by_importance([space[0] for space in SPACE.values()])
    for operation in sorted(SPACE, key=lambda each: rows.index(SPACE[each][0])):
        left = deadline - time.monotonic()
        if left < 20:
            return
        command = [
            sys.executable,
            str(TOOLS / "tune_kernels.py"),
            operation,
            "--minutes",
            f"{min(120, left - 15) / 60}",
        ]
        _, said = ended(started([*command, *([] if write else ["--dry-run"])]), deadline, lines=4)
        book.put("tuning", operation, {"said": said or "the time is up"})


def check(book: Book, minutes: float, write: bool) -> None:
    """Does everything in its order."""
    began = time.monotonic()
    until = {name: began + 60 * minutes * share for name, share in UNTIL.items()}
    rows = by_importance(list(BENCHMARKS))
    programs = sanitizers([row for row in rows if row.startswith(OVERLAPPING)])
    try:
        checks = [
            "device: facts",
            *(f"reference: {name}" for name in rows),
            *(f"losses: {name}" for name in LOSSES),
        ]
        _fill(book, in_turn(work, checks, SILENCE_S, until["checks"]))
        for name, program in programs.items():
            book.put("sanitizer", name, counted(program, until["checks"]))
    finally:
        for program in programs.values():
            killed(program)
    if not programs:
        book.put("sanitizer", "compute-sanitizer", {"unavailable": "it is not on the PATH"})
    if find_spec("hydra") is not None:
        from megatron5d.tools.bench.layouts import compared  # needs more than torch and Triton

        for name, figures in compared(book.folder, until["layouts"]):
            book.put("layouts", name, figures)
    timed = ["limits: of the device", *(f"addmm: {name}" for name in ADDMM)]
    timed += [f"{section}: {row}" for section in ("benchmarks", "compiled") for row in rows]
    _fill(book, in_turn(work, timed, SILENCE_S, until["benchmarks"]))
    capability = book.found.get("device", {}).get("facts", {}).get("capability")
    if (
        write
        and capability
        and (file := write_orders(book.found.get("benchmarks", {}), capability))
    ):
        book.put("device", "order of libraries", {"written": str(file)})
    training(book, until["training"])
    tuned(book, began + 60 * minutes, write)


def _fill(book: Book, told: Iterator[tuple]) -> None:
    """Puts in what a worker tells; the pieces that the time did not suffice for share a line."""
    unreached: dict[str, list[str]] = {}
    for piece, result in told:
        section, _, name = piece.partition(": ")
        section = "benchmarks" if section == "compiled" else section
        if isinstance(result, str) and result.startswith("not reached"):
            unreached.setdefault(section, []).append(name)
        else:
            book.put(section, name, {"unavailable": result} if isinstance(result, str) else result)
    for section, names in unreached.items():
        book.put(section, "not reached", {"rows": "; ".join(dict.fromkeys(names))})


def main() -> int:
    args = _arguments()
    if args.run:
        for provider, call in BENCHMARKS[args.run].calls("cuda", tiny=True).items():
            if provider.startswith("ours"):
                call()
        torch.cuda.synchronize()
        return 0
    if not torch.cuda.is_available():
        print("gpu_check checks a GPU, and torch sees none here", file=sys.stderr)
        return 2
    book = Book(args.out)
    try:
        check(book, args.minutes, args.write)
    except KeyboardInterrupt:
        print("interrupted: what was found is written", file=sys.stderr)
        return 130
    finally:
        print(f"{book.folder}/gpu_check.md and .json", flush=True)
    return 0 if book.all_right() else 1


if __name__ == "__main__":
    sys.exit(main())

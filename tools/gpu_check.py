"""Check a new GPU in the first minutes: whether it computes right, and how fast.

    bash launch/gpu_check.sh                          nine minutes; writes gpu_check.md and .json to
                                                      runs/gpu_check
    bash launch/gpu_check.sh --minutes 60 --write     more rows and tuning; results are written to
                                                      kernels/configs/

Needs torch and Triton; whole steps also need Hydra, and transformers to be compared. In this order,
so that the most important results come first:

    1. facts about the device
    2. every kernel and library compared with the plain path, while compute-sanitizer runs on the
       kernels that overlap communication
    3. losses of a small model with the kernels and without, and of layouts of several ranks, which
       share the GPUs
    4. the rates of a copy and a GEMM, and whether torch adds a GEMM into a main gradient in place
    5. the rows of tools/bench_kernels.py, by importance
    6. whole steps of tools/bench_train.py
    7. the tuner, for the rest of the time

Both files are rewritten after every result, so that an interruption loses nothing. Whatever crashes
or hangs costs its own result only. Exit code 1 where a result is wrong, 2 without a GPU.
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere


def _arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu_check"), help="folder for the two files"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep tuned tiles and the order of libraries"
    )
    parser.add_argument(
        "--run", metavar="ROW", help="only run our calls of a row, small: for compute-sanitizer"
    )
    return parser.parse_args()


if __name__ == "__main__":
    print_anywhere()
    # answers --help and rejects bad options before the imports below, which take seconds
    _arguments()

import torch

from megatron5d.config.json_file import write_whole
from megatron5d.kernels import choice
from megatron5d.tools.bench import BENCHMARKS
from megatron5d.tools.bench.compare import ADDMM, LOSSES, addmm, losses, reference
from megatron5d.tools.bench.harness import (
    clear_device,
    copy_gb_s,
    device_is_lost,
    gemm_tflop_s,
    no_gpu,
)
from megatron5d.tools.bench.processes import (
    NOT_REACHED,
    OUT_OF_TIME,
    Send,
    finish_program,
    kill_program,
    run_tasks,
    start_program,
)
from megatron5d.tools.bench.results import Figures, unavailable
from megatron5d.tools.bench_kernels import measure, write_orders
from megatron5d.tools.tune_kernels import SPACE

TOOLS = Path(__file__).resolve().parent
SILENCE_S = 120.0  # of one task: three compilations and all its calls
# shares of the time at which the next part begins
END_OF = {"checks": 0.35, "layouts": 0.5, "benchmarks": 0.75, "training": 0.92}
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


def start_sanitizers(rows: Sequence[str]) -> dict[str, subprocess.Popen[str]]:
    """Starts compute-sanitizer on the kernels of rows: `<tool>: <row>` -> its process."""
    program, script = shutil.which("compute-sanitizer"), str(TOOLS / "gpu_check.py")
    if program is None:
        return {}
    return {
        f"{tool}: {row}": start_program(
            [program, "--tool", tool, sys.executable, script, "--run", row]
        )
        for row in rows
        for tool in ("memcheck", "racecheck")
    }


def sanitizer_errors(program: subprocess.Popen[str], deadline: float) -> Figures:
    """Number of errors that compute-sanitizer reports."""
    _, output = finish_program(program, deadline, lines=20)
    # ERROR SUMMARY: 0 errors        RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
    summary = re.search(r"SUMMARY: (\d+) (?:error|hazard)", output)
    if summary is None:
        return {"unavailable": output[-200:] or "no output"}
    return {"errors": int(summary[1])}


def versions() -> dict[str, str]:
    """Versions of torch, its libraries, the driver and optional packages."""
    by_name = {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
    }
    for package in PACKAGES:
        try:
            by_name[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            by_name[package] = "-"
    if (smi := shutil.which("nvidia-smi")) is not None:
        query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit"
        program = start_program([smi, query, "--format=csv,noheader"])
        by_name["driver, clocks, power"] = finish_program(program, time.monotonic() + 10)[1]
    return by_name


TITLES = {
    "device": "Device",
    "reference": "Kernels compared with the plain path",
    "losses": "Losses of a small model compared with the plain path",
    "layouts": "Losses of several ranks compared with one",
    "sanitizer": "compute-sanitizer",
    "limits": "Limits",
    "addmm": "torch.addmm into a main gradient",
    "benchmarks": "Speed",
    "training": "Whole steps",
    "tuning": "Tuned",
}


class Results:
    """The results so far, section -> name -> figures, as gpu_check.json and gpu_check.md.

    Args:
        folder: of the two files; created if missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.sections: dict[str, dict[str, Figures]] = {}

    def add(self, section: str, name: str, figures: Figures) -> None:
        """Adds figures to those of the same name, prints them, and writes both files."""
        self.sections.setdefault(section, {}).setdefault(name, {}).update(figures)
        print(f"{section}: {name}: {_in_words(figures)}", flush=True)
        write_whole(self.folder / "gpu_check.json", json.dumps(self.sections, indent=1))
        write_whole(self.folder / "gpu_check.md", self.markdown())

    def add_all(self, reports: Iterator[tuple]) -> None:
        """Adds the results of `work`; tasks that were not reached share a line."""
        not_reached: dict[str, list[str]] = {}
        for task, figures in reports:
            section, _, name = task.partition(": ")
            section = "benchmarks" if section == "compiled" else section
            if figures == NOT_REACHED:
                not_reached.setdefault(section, []).append(name)
            else:
                failed = isinstance(figures, str)
                self.add(section, name, {"unavailable": figures} if failed else figures)
        for section, names in not_reached.items():
            self.add(section, "not reached", {"rows": "; ".join(dict.fromkeys(names))})

    def all_right(self) -> bool:
        """Whether no comparison differs and the sanitizer reports no error."""

        def is_wrong(figures: Figures) -> bool:
            return (
                figures.get("right") is False
                or figures.get("in place") is False
                or figures.get("errors", 0) > 0
                or any(is_wrong(value) for value in figures.values() if isinstance(value, dict))
            )

        return not is_wrong(self.sections)

    def markdown(self) -> str:
        """Tables of all sections that have begun."""
        lines = ["# GPU check"]
        for section, title in TITLES.items():
            if section in self.sections:
                lines += ["", f"## {title}", "", *_table(self.sections[section])]
        return "\n".join(lines) + "\n"


def _table(rows: dict[str, Figures]) -> Iterator[str]:
    yield "| | | |\n|---|---|---|"
    for name, row in rows.items():
        providers = {key: value for key, value in row.items() if isinstance(value, dict)}
        properties = {key: value for key, value in row.items() if key not in providers}
        if properties:
            yield f"| {name} | | {_in_words(properties)} |"
        ours = providers.get("ours", {}).get("ms")
        for provider, figures in providers.items():
            compared = ours and "ms" in figures and provider != "ours"
            ratio = f", ours is {figures['ms'] / ours:.2f} x" if compared else ""
            yield f"| {name} | {provider} | {_in_words(figures)}{ratio} |"


def _in_words(figures: Figures) -> str:
    """Figures in one line, without the shape of a request, which is for programs."""
    if "ms" in figures:
        return (
            f"{figures['ms']:.3f} ms, {figures['rate']:.0f} {figures['unit']}, "
            f"{figures['peak_bytes'] / 2**20:.0f} MiB"
        )
    if "right" in figures:
        curves = "".join(
            f"; {path} {figures[path][0]:.3f} to {figures[path][-1]:.3f}"
            for path in ("kernels", "plain")
            if path in figures
        )
        bits = "" if figures.get("same bits", True) else ", other bits each time"
        verdict = "right" if figures["right"] else "WRONG"
        return f"{verdict}, differs by {figures['difference']:.1e}{bits}{curves}"
    words = (f"{key} {_figure(value)}" for key, value in figures.items())
    return "; ".join(words).replace("|", "/").replace("\n", " / ")


def _figure(value: object) -> str:
    if isinstance(value, dict):
        return _in_words(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def by_importance(names: Sequence[str]) -> list[str]:
    """Sorts benchmark rows: those of FIRST, then the others in their order."""

    def rank(name: str) -> int:
        return next((i for i, text in enumerate(FIRST) if text in name), len(FIRST))

    return sorted(names, key=rank)


def is_compiled(provider: str) -> bool:
    """Whether torch compiles a provider, which takes longer than all other calls together."""
    return "compile" in provider or "flex" in provider


# providers that torch compiles are measured after all others
SELECTED: dict[str, Callable[[str], bool]] = {
    "benchmarks": lambda provider: not is_compiled(provider),
    "compiled": is_compiled,
}


def device_facts() -> Figures:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = {
        "device": properties.name,
        "capability": choice.capability_of(torch.empty(0, device="cuda")),
        "memory GB": round(properties.total_memory / 1e9, 1),
        "processors": properties.multi_processor_count,
    }
    return facts | versions()


CHECKS: dict[str, Callable[[str], Figures]] = {
    "device": lambda _: device_facts(),
    "addmm": lambda name: addmm(*ADDMM[name]),
    "limits": lambda _: {"copy, GB/s": copy_gb_s(), "bfloat16 GEMM, TFLOP/s": gemm_tflop_s()},
    "reference": reference,
    "losses": losses,
}


def work(tasks: Sequence[str], send: Send) -> None:
    """Runs tasks, `<section>: <name>`: the worker of `run_tasks`."""
    for task in tasks:
        section, _, name = task.partition(": ")
        if section in SELECTED:
            for provider, figures in measure(BENCHMARKS[name], 2, 30, SELECTED[section]):
                send((task, {provider: figures}))
        else:
            try:
                send((task, CHECKS[section](name)))
            except Exception as error:
                send((task, unavailable(error)))
                if device_is_lost():
                    raise
        send((task,))
        clear_device()


def measure_training(results: Results, deadline: float) -> None:
    """Measures whole steps in bfloat16 and FP8, without and with CUDA graphs."""
    variants = [
        (case, fp8, graph)
        for graph in ("none", "phases")
        for fp8 in ("none", "blockwise")
        for case in ("1b", "8b")
    ]
    file = results.folder / "step.json"
    for i, (case, fp8, graph) in enumerate(variants):
        file.unlink(missing_ok=True)
        command = [sys.executable, str(TOOLS / "bench_train.py"), case, "--steps", "5"]
        command += ["--json", str(file), "--set", f"precision.fp8={fp8}"]
        command += ["--set", f"train.cuda_graph={graph}"]
        # the peer of a model is measured once
        if (fp8, graph) != ("none", "none"):
            command += ["--only", "ours"]
        # the variants share the remaining time evenly
        remaining_s = deadline - time.monotonic()
        end = time.monotonic() + remaining_s / (len(variants) - i)
        code, output = finish_program(start_program(command), end)
        rows = json.loads(file.read_text())["rows"] if file.exists() else {}
        reason = output or (OUT_OF_TIME if code is None else f"exit code {code}")
        name = f"{case}, {'bf16' if fp8 == 'none' else 'FP8'}, graphs {graph}"
        results.add("training", name, rows.get(case) or {"unavailable": reason})


def tune(results: Results, deadline: float, write: bool) -> None:
    """Tunes operations until the deadline, in the order of their rows' importance."""
    rows = by_importance([row for row, *_ in SPACE.values()])
    for operation in sorted(SPACE, key=lambda operation: rows.index(SPACE[operation][0])):
        remaining_s = deadline - time.monotonic()
        # starting the tuner takes about 15 seconds
        if remaining_s < 20:
            return
        command = [sys.executable, str(TOOLS / "tune_kernels.py"), operation]
        command += ["--minutes", f"{min(120, remaining_s - 15) / 60}"]
        command += [] if write else ["--dry-run"]
        _, output = finish_program(start_program(command), deadline, lines=4)
        results.add("tuning", operation, {"said": output or OUT_OF_TIME})


def check(results: Results, minutes: float, write: bool) -> None:
    """Runs everything, in the order of the module's docstring."""
    start = time.monotonic()
    end_of = {name: start + 60 * minutes * share for name, share in END_OF.items()}
    rows = by_importance(list(BENCHMARKS))

    # correctness: of kernels, of losses, of several ranks
    check_kernels(results, rows, end_of["checks"])

    has_hydra = find_spec("hydra") is not None
    if has_hydra:
        from megatron5d.tools.bench.layouts import compared  # needs more than torch and Triton

        for name, figures in compared(results.folder, end_of["layouts"]):
            results.add("layouts", name, figures)

    # speed: providers that torch compiles come last, because they take longest
    tasks = ["limits: of the device", *(f"addmm: {name}" for name in ADDMM)]
    tasks += [f"{section}: {row}" for section in ("benchmarks", "compiled") for row in rows]
    results.add_all(run_tasks(work, tasks, SILENCE_S, end_of["benchmarks"]))
    # which library `kernels.*=auto` prefers on this GPU
    capability = results.sections.get("device", {}).get("facts", {}).get("capability")
    if write and capability:
        file = write_orders(results.sections.get("benchmarks", {}), capability)
        if file is not None:
            results.add("device", "order of libraries", {"written": str(file)})

    if has_hydra:
        measure_training(results, end_of["training"])
    else:
        results.add("training", "whole steps", {"unavailable": "hydra-core is not installed"})
    tune(results, start + 60 * minutes, write)


def check_kernels(results: Results, rows: Sequence[str], deadline: float) -> None:
    """Compares kernels and losses with the plain path, while compute-sanitizer runs."""
    sanitizers = start_sanitizers([row for row in rows if row.startswith(OVERLAPPING)])
    try:
        tasks = ["device: facts", *(f"reference: {row}" for row in rows)]
        tasks += [f"losses: {name}" for name in LOSSES]
        results.add_all(run_tasks(work, tasks, SILENCE_S, deadline))
        for name, program in sanitizers.items():
            results.add("sanitizer", name, sanitizer_errors(program, deadline))
    finally:
        for program in sanitizers.values():
            kill_program(program)
    if not sanitizers:
        results.add("sanitizer", "compute-sanitizer", {"unavailable": "not on the PATH"})


def main() -> int:
    args = _arguments()
    # compute-sanitizer runs this program with --run
    if args.run:
        for provider, call in BENCHMARKS[args.run].calls("cuda", tiny=True).items():
            if provider.startswith("ours"):
                call()
        torch.cuda.synchronize()
        return 0
    if no_gpu("gpu_check"):
        return 2
    results = Results(args.out)
    try:
        check(results, args.minutes, args.write)
    except KeyboardInterrupt:
        print("interrupted: the results so far are written", file=sys.stderr)
        return 130
    finally:
        print(f"{results.folder}/gpu_check.md and .json", flush=True)
    return 0 if results.all_right() else 1


if __name__ == "__main__":
    sys.exit(main())

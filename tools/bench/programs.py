"""Programs that launch/gpu_check.sh starts, each ended at a certain time; and the versions of what there is.

What is found is written as JSON and as tables in Markdown, both whole after every result.
"""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron5d.tools.bench.harness import write_whole

PACKAGES = ("triton", "flash-attn-4", "transformers", "hydra-core", "liger-kernel")


def ended(command: Sequence[str], until: float, lines: int = 1) -> tuple[int | None, str]:
    """Runs a program in a session of its own.

    Args:
        until: of `time.monotonic()`; then it and what it has started are killed.
        lines: of its output, the last ones, that are returned.

    Returns:
        (its code or None if it was killed, lines).
    """
    left = until - time.monotonic()
    if left <= 0:
        return None, "not reached: the time is up"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as program:
        try:
            said, code = program.communicate(timeout=left)[0], program.returncode
        except BaseException as error:
            os.killpg(program.pid, signal.SIGKILL)
            said, code = program.communicate()[0], None
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    return code, "\n".join([line for line in said.splitlines() if line.strip()][-lines:])


def sanitizer(tool: str, command: Sequence[str], until: float) -> dict[str, Any]:
    """Runs a program under compute-sanitizer and counts what it finds."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"unavailable": "compute-sanitizer is not on the PATH"}
    _, said = ended([program, "--tool", tool, *command], min(until, time.monotonic() + 90), lines=20)
    # ERROR SUMMARY: 0 errors        RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
    summary = re.search(r"SUMMARY: (\d+) (?:error|hazard)", said)
    return {"errors": int(summary[1])} if summary else {"unavailable": said[-200:] or "it has said nothing"}


def versions() -> dict[str, str]:
    """Returns those of torch, its libraries, the driver and what may be beside them."""
    found = {"torch": torch.__version__, "CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    if (smi := shutil.which("nvidia-smi")) is not None:
        query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit"
        found["driver, clocks, power"] = ended([smi, query, "--format=csv,noheader"], time.monotonic() + 10)[1]
    return found


TITLES = {
    "device": "The device",
    "addmm": "torch.addmm into a main gradient",
    "reference": "Beside the plain path",
    "sanitizer": "compute-sanitizer",
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
        write_whole(self.folder / "gpu_check.json", self.found)
        part = self.folder / "gpu_check.md.part"
        part.write_text(self.markdown())
        part.replace(self.folder / "gpu_check.md")

    def all_right(self) -> bool:
        """Says whether nothing that was compared differs: kernels, addmm, and what the sanitizer found."""
        compared = [each for row in self.found.get("reference", {}).values() for each in row.values()]
        wrong = [each for each in compared if isinstance(each, dict) and each.get("right") is False]
        wrong += [row for row in self.found.get("addmm", {}).values() if row.get("in place") is False]
        return not wrong and all(row.get("errors", 0) == 0 for row in self.found.get("sanitizer", {}).values())

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
        each = {key: value for key, value in row.items() if isinstance(value, dict)} if nested else {}
        rest = {key: value for key, value in row.items() if key not in each}
        if rest:
            yield f"| {name} | {_words(rest)} |" + " |" * nested
        ours = each.get("ours", {}).get("ms")
        for provider, figures in each.items():
            ratio = f", ours is {figures['ms'] / ours:.2f} x" if ours and "ms" in figures and provider != "ours" else ""
            yield f"| {name} | {provider} | {_words(figures)}{ratio} |"


def _words(figures: Mapping[str, Any]) -> str:
    """Returns figures in one line; the shape of a request is for the program."""
    if "ms" in figures:
        return (
            f"{figures['ms']:.3f} ms, {figures['rate']:.0f} {figures['unit']}, {figures['peak_bytes'] / 2**20:.0f} MiB"
        )
    if "right" in figures:
        return f"{'right' if figures['right'] else 'WRONG'}, differs by {figures['difference']:.1e}"
    words = (f"{key} {_words(value) if isinstance(value, dict) else _figure(value)}" for key, value in figures.items())
    return "; ".join(words).replace("|", "/").replace("\n", " / ")


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

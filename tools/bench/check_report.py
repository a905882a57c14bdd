"""What launch/gpu_check.sh finds, as JSON and as tables in Markdown: both whole after every result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron5d.tools.bench.harness import write_whole

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

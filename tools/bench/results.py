"""Results of benchmarks: collected and printed as they arrive, and written to files."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron5d.config.json_file import write_whole

Figures = dict[str, Any]
"""Figures by name; those of a row by provider, beside properties of the row itself."""


def error_line(error: Exception) -> str:
    """Type of an error and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message[:120]}"


def unavailable(error: Exception) -> dict[str, str]:
    """Entry for a provider without figures."""
    return {"unavailable": error_line(error)}


def collect(
    reports: Iterator[tuple[str | None, Figures]],
    header: Callable[[Figures], str],
    table: Callable[[str, Figures, Figures], str],
    file: Path | None,
    **facts: Any,
) -> Figures:
    """Collects reports, and prints each row once it is complete.

    Args:
        reports: `(None, facts about the device)` from every new process, and `(row, figures)`.
        header: formats the facts.
        table: formats a row, from its name, its figures and the facts.
        file: rewritten after every report, so that an interruption loses nothing; None = no file.

    Returns:
        The facts, and `rows`.

    Raises:
        SystemExit: code 130, on Ctrl-C.
    """
    rows: dict[str, Figures] = {}
    current = None

    def print_current() -> None:
        if current is not None:
            print(table(current, rows[current], facts), flush=True)

    try:
        for name, figures in reports:
            if name is None:
                # the first process's facts stand for all: limits vary a little between processes
                if "device" not in facts:
                    facts |= figures
                    print(header(facts), flush=True)
            else:
                if name != current:
                    print_current()
                    current = name
                row = rows.setdefault(name, {})
                for key, value in figures.items():
                    row[key] = row.get(key, {}) | value if isinstance(value, dict) else value
            if file:
                write_whole(file, json.dumps({**facts, "rows": rows}, indent=1))
    except KeyboardInterrupt:
        print("interrupted: the figures above were measured", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        # the last row, also after an error or Ctrl-C
        print_current()
    return {**facts, "rows": rows}


def print_rows(
    rows: Iterable[tuple[str, Figures]], line: Callable[[str, Figures], str], as_json: bool
) -> None:
    """Prints each row as soon as it is measured, or all of them as one JSON object."""
    results = {}
    for name, row in rows:
        results[name] = row
        if not as_json:
            print(line(name, row), flush=True)
    if as_json:
        print(json.dumps(results))


def seconds_line(name: str, seconds: Figures) -> str:
    """Our seconds, and their ratio to each peer's."""
    ours = seconds["ours"]
    ratios = (
        f"  {ours / other:6.2f} of {peer} ({other:.3f})"
        for peer, other in seconds.items()
        if peer != "ours"
    )
    return f"{name:28}{ours:8.3f} s{''.join(ratios)}"


def write_entries(path: Path, table: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Writes a table of kernels/configs, one entry a line."""
    operations = [
        f"  {json.dumps(operation)}: [\n"
        + ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
        + "\n  ]"
        for operation, entries in table.items()
    ]
    path.write_text("{\n" + ",\n".join(operations) + "\n}\n")

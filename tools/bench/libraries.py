"""Libraries behind our operations, measured through them; and the order that follows for `auto` (kernels/choice.py)."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from megatron5d.kernels import choice, tuning
from megatron5d.tools.bench.harness import Calls

LIBRARIES = {"attention": ("cudnn", "fa4"), "fp8": ("torch",), "grouped": ("torch",), "norm": ("torch",)}


def with_libraries(calls: Calls, families: Mapping[str, str]) -> Calls:
    """Adds to a row's calls of ours the same calls by each library; what a library does not take is an error there.

    Args:
        calls: by provider; those of `families` are made Triton's.
        families: provider -> key of `kernels`.
    """
    found = dict(calls)
    for provider, family in families.items():
        for name in (choice.TRITON, *LIBRARIES[family]):
            label = provider if name == choice.TRITON else f"{provider}, by {name}"
            found[label] = _by(calls[provider], {family: name})
    return found


def _by(call: Callable[[], object], asked: Mapping[str, str]) -> Callable[[], object]:
    def run() -> object:
        with choice.using(**asked, strict=True, deterministic=False):
            return call()

    return run


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


def orders(figures: Iterable[tuple[str, dict[str, int], dict[str, float]]]) -> dict[str, list[dict[str, Any]]]:
    """Makes the table of an architecture: way -> entries, the smallest shapes first.

    Args:
        figures: (way, shape keys, name -> milliseconds) of each row. A key has no bound where no larger one was
            measured.
    """
    table: dict[str, list[dict[str, Any]]] = {}
    rows = [each for each in figures if len(each[2]) > 1]
    for way in dict.fromkeys(way for way, *_ in rows):
        measured = sorted((tuple(key.items()), times) for each, key, times in rows if each == way)
        most = {name: max(dict(key)[name] for key, _ in measured) for name, _ in measured[0][0]}
        for key, times in measured:
            bounds = {name: size for name, size in key if size < most[name]}
            entry = {"up_to": bounds} if bounds else {}
            table.setdefault(way, []).append(entry | {"config": {"order": sorted(times, key=lambda name: times[name])}})
    return table


def times_of(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[tuple[str, dict[str, int], dict[str, float]]]:
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


def write_orders(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], capability: int) -> Path | None:
    """Writes the table of an architecture in the place of an earlier one; returns None where nothing was compared."""
    table = orders(times_of(rows))
    if not table:
        return None
    path = tuning.DIRECTORY / f"providers/sm_{capability}.json"
    path.parent.mkdir(exist_ok=True)
    lines = [f"  {json.dumps(way)}: [\n" + ",\n".join(f"    {json.dumps(each)}" for each in entries) + "\n  ]"
             for way, entries in table.items()]  # fmt: skip
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path

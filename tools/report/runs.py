"""What the log of a run holds, thinned out for drawing, and its events."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from megatron5d.checkpoint.folder import saved_steps
from megatron5d.config.json_file import parse_json

CHARTS = (
    ("loss", "training loss"),
    ("valid_loss", "validation loss"),
    ("lr", "learning rate"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_s_per_gpu", "tokens/s a GPU"),
    ("mfu", "MFU"),
    ("memory_gb", "memory, GB"),
    ("step_time_s", "step time, s"),
    ("bubble", "pipeline bubble"),
    ("expert_load", "load of the busiest expert, of an even share"),
)
MOST_POINTS = 600


def read_run(log: Path) -> dict[str, Any]:
    """Returns `run_record` of a run's log and of the checkpoints beside it."""
    lines = log.read_text(errors="replace").splitlines()
    return run_record(log.resolve().parent.name, lines, saved_steps(log.parent / "checkpoints"))


def run_record(name: str, records: Iterable[str], saved: Iterable[int] = ()) -> dict[str, Any]:
    """Returns the curves and events of a run.

    Args:
        name: of the run.
        records: lines of its log, the last of which may be unfinished.
        saved: steps of its checkpoints.

    Raises:
        ValueError: no line is the record of a step.
    """
    steps = [record for record in map(_parsed, records) if record is not None]
    if not steps:
        raise ValueError(f"{name} holds no record of a step")
    fields = {field: _thinned(_points(steps, field)) for field, _ in CHARTS}
    return {
        "name": name,
        "steps": steps[-1]["step"],
        "last_loss": steps[-1].get("loss"),
        "fields": {field: points for field, points in fields.items() if points},
        "events": _events(steps, saved),
        "step_time_s": _median(steps, "step_time_s"),
        "breakdown": _breakdown(steps),
        "sent_bytes": _by_axis(steps, "_bytes"),
        "exposed_s": _exposed(steps),
        "world": _world(steps),
    }


def _world(steps: list[dict[str, Any]]) -> int | None:
    """Returns the number of ranks: a step's tokens over its time and the tokens/s of one rank."""
    for before, record in zip(steps, steps[1:]):
        rate = record.get("tokens_per_s_per_gpu")
        if rate and record["step"] == before["step"] + 1:
            return round((record["tokens"] - before["tokens"]) / (record["step_time_s"] * rate))
    return None


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _points(steps: list[dict[str, Any]], field: str) -> list[tuple[int, float]]:
    if field == "expert_load":
        loads = [
            (record["step"], max((value for key, value in record.items() if key.endswith("/load")), default=None))
            for record in steps
        ]
        return [(step, load) for step, load in loads if load is not None]
    values = [(record["step"], record.get(field)) for record in steps]
    if field == "valid_loss" and (first := steps[0].get("initial_valid_loss")) is not None:
        values.insert(0, (steps[0]["step"] - 1, first))
    return [(step, float(value)) for step, value in values if isinstance(value, (int, float))]


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns at most MOST_POINTS points: means of neighbours, the last one as it is."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-len(points) // MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    means = [(group[len(group) // 2][0], sum(value for _, value in group) / len(group)) for group in groups]
    return [*means, points[-1]]


def _events(steps: list[dict[str, Any]], saved: Iterable[int]) -> list[dict[str, Any]]:
    found = [{"step": step, "what": "checkpoint saved"} for step in saved]
    for before, record in zip([None, *steps], steps):
        if before is not None and record["step"] <= before["step"]:
            found.append({"step": record["step"], "what": f"restarted after step {before['step']}"})
        if record.get("update_skipped"):
            found.append({"step": record["step"], "what": "update skipped"})
    return sorted(found, key=lambda event: event["step"])


def _breakdown(steps: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Returns the parts of a step's measured time that the log tells apart, as medians in seconds, and the rest."""
    total = _median(steps, "step_time_s")
    parts = [(key.removesuffix("_s").replace("_", " "), _median(steps, key)) for key in sorted(steps[-1])
             if key.endswith("_exposed_s")]  # fmt: skip
    if "bubble" in steps[-1]:
        parts.append(("pipeline bubble", _median(steps, "bubble") * total))
    return [("everything else", max(0.0, total - sum(value for _, value in parts))), *parts]


def _by_axis(steps: list[dict[str, Any]], ending: str) -> dict[str, float]:
    """Returns axis -> median of what rank 0 sent or waited there in a step, of the fields that end so."""
    fields = {field for record in steps for field in record if field.startswith("comm_") and field.endswith(ending)}
    return {field.removeprefix("comm_").removesuffix(ending): _median(steps, field) for field in sorted(fields)}


def _exposed(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Returns axis -> median of the seconds in which rank 0 waited there in a step, as far as the log tells.

    On pp it is the bubble; on dp the waits for ZeRO's weights, where no axis of dp was timed.
    """
    found = _by_axis(steps, "_exposed_s")
    if "bubble" in steps[-1]:
        found["pp"] = _median(steps, "bubble") * _median(steps, "step_time_s")
    if "zero_exposed_s" in steps[-1] and not any(axis.startswith("dp") for axis in found):
        found["dp"] = _median(steps, "zero_exposed_s")
    return found


def _median(steps: list[dict[str, Any]], field: str) -> float:
    values = [record[field] for record in steps if isinstance(record.get(field), (int, float))]
    return median(values) if values else 0.0

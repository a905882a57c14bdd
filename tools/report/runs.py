"""Reads the logs of runs: curves and events for a report, losses over tokens for a plot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron5d.checkpoint.folder import saved_steps
from megatron5d.config.json_file import parse_json

CHARTS = (
    ("loss", "training loss"),
    ("valid_loss", "validation loss"),
    ("lr", "learning rate"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_s_per_gpu", "tokens/s per GPU"),
    ("mfu", "MFU"),
    ("memory_gb", "memory, GiB"),
    ("step_time_s", "step time, s"),
    ("bubble", "pipeline bubble"),
    ("expert_load", "load of the busiest expert, of an even share"),
)
MAX_POINTS = 600  # of one curve of a report
MAX_COLUMNS = 160  # of a map of the experts' load
LOAD_FIELD = re.compile(r"moe/layer_(\d+)/load")


def read_run(log: Path) -> dict[str, Any]:
    """Curves and events of a run, from its log and the checkpoints next to it."""
    lines = log.read_text(errors="replace").splitlines()
    return run_record(log.resolve().parent.name, lines, saved_steps(log.parent / "checkpoints"))


def run_record(name: str, lines: Iterable[str], saved: Iterable[int] = ()) -> dict[str, Any]:
    """Curves and events of a run.

    Args:
        name: shown for the run.
        lines: of its log; the last one may be incomplete.
        saved: steps that have a checkpoint.

    Raises:
        ValueError: no line is a record of a step.
    """
    steps = [record for record in map(_parsed, lines) if record is not None]
    if not steps:
        raise ValueError(f"{name} holds no record of a step")
    fields = {field: _thin(_points(steps, field)) for field, _ in CHARTS}
    return {
        "name": name,
        "steps": steps[-1]["step"],
        "last_loss": steps[-1].get("loss"),
        "fields": {field: points for field, points in fields.items() if points},
        "events": _events(steps, saved),
        "step_time_s": _median(steps, "step_time_s"),
        "sent_bytes": _by_axis(steps, "_bytes"),
        "exposed_s": _exposed(steps),
        "world": _world(steps),
        "expert_loads": _expert_loads(steps),
    }


def _world(steps: list[dict[str, Any]]) -> int | None:
    """Number of ranks: tokens of a step over its time and the tokens/s of one rank."""
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
            (
                record["step"],
                max(
                    (value for key, value in record.items() if key.endswith("/load")), default=None
                ),
            )
            for record in steps
        ]
        return [(step, load) for step, load in loads if load is not None]
    values = [(record["step"], record.get(field)) for record in steps]
    if field == "valid_loss" and (first := steps[0].get("initial_valid_loss")) is not None:
        values.insert(0, (steps[0]["step"] - 1, first))
    return [(step, float(value)) for step, value in values if isinstance(value, (int, float))]


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MAX_POINTS points: means of neighbors, then the last point unchanged."""
    if len(points) <= MAX_POINTS:
        return points
    size = -(-len(points) // MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    means = [
        (group[len(group) // 2][0], sum(value for _, value in group) / len(group))
        for group in groups
    ]
    return [*means, points[-1]]


def _expert_loads(steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Load of the busiest expert by layer over steps, relative to an even share, as logged.

    Returns:
        `layers`, `steps` and `loads` [layers, steps] (None: not logged), where neighboring records
        are merged into their mean above MAX_COLUMNS; None without such records.
    """
    names = dict.fromkeys(field for record in steps for field in record)
    fields = {int(match[1]): field for field in names if (match := LOAD_FIELD.fullmatch(field))}
    records = [record for record in steps if any(field in record for field in fields.values())]
    if not records:
        return None
    size = -(-len(records) // MAX_COLUMNS)
    groups = [records[start : start + size] for start in range(0, len(records), size)]
    layers = sorted(fields)
    return {
        "layers": layers,
        "steps": [group[0]["step"] for group in groups],
        "loads": [[_mean_of(group, fields[layer]) for group in groups] for layer in layers],
    }


def _mean_of(records: list[dict[str, Any]], field: str) -> float | None:
    values = [record[field] for record in records if isinstance(record.get(field), (int, float))]
    return round(fmean(values), 4) if values else None


def _events(steps: list[dict[str, Any]], saved: Iterable[int]) -> list[dict[str, Any]]:
    events = [{"step": step, "what": "checkpoint saved"} for step in saved]
    for before, record in zip([None, *steps], steps):
        if before is not None and record["step"] <= before["step"]:
            events.append(
                {"step": record["step"], "what": f"restarted after step {before['step']}"}
            )
        if record.get("update_skipped"):
            events.append({"step": record["step"], "what": "update skipped"})
    return sorted(events, key=lambda event: event["step"])


def _by_axis(steps: list[dict[str, Any]], suffix: str) -> dict[str, float]:
    """Axis -> median over steps of the field `comm_<axis><suffix>`, as rank 0 logged it."""
    fields = {
        field
        for record in steps
        for field in record
        if field.startswith("comm_") and field.endswith(suffix)
    }
    return {
        field.removeprefix("comm_").removesuffix(suffix): _median(steps, field)
        for field in sorted(fields)
    }


def _exposed(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Axis -> median seconds per step that rank 0 waited for communication, as far as logged.

    pp counts the bubble. dp counts the waits for ZeRO's weights if no dp axis was timed.
    """
    exposed = _by_axis(steps, "_exposed_s")
    if "bubble" in steps[-1]:
        exposed["pp"] = _median(steps, "bubble") * _median(steps, "step_time_s")
    if "zero_exposed_s" in steps[-1] and not any(axis.startswith("dp") for axis in exposed):
        exposed["dp"] = _median(steps, "zero_exposed_s")
    return exposed


def _median(steps: list[dict[str, Any]], field: str) -> float:
    values = [record[field] for record in steps if isinstance(record.get(field), (int, float))]
    return median(values) if values else 0.0


@dataclass(frozen=True)
class Curve:
    """One run's losses, in nats per token."""

    name: str
    train: list[tuple[int, float]]  # (tokens seen, loss) of every record
    # field (`valid_loss`, `valid_loss/<name>`) -> (tokens seen, loss) of every evaluation; an
    # evaluation before training is at 0 tokens
    valid: dict[str, list[tuple[int, float]]]
    # every other number of a record (`grad_norm`, `moe/layer_0/load`) -> (tokens seen, value)
    fields: dict[str, list[tuple[int, float]]]


def find_logs(run: Path) -> list[Path]:
    """The .jsonl file of a run, or those of all runs in a folder of runs.

    Raises:
        ValueError: there is no such file, or one folder holds several.
    """
    if run.is_file():
        return [run]
    if not run.is_dir():
        raise ValueError(f"{run} does not exist: name a run's folder or its .jsonl file")
    logs = sorted(run.glob("*.jsonl"))
    if not logs:
        logs = sorted(path for path in run.rglob("*.jsonl") if "wandb" not in path.parts)
        if logs and len({path.parent for path in logs}) == len(logs):
            return logs
    if len(logs) != 1:
        names = ", ".join(str(path.relative_to(run)) for path in logs) or "none"
        raise ValueError(
            f"{run} should hold one .jsonl file (log.jsonl), found {names}: name the file itself"
        )
    return logs


def read_curve(path: Path) -> Curve:
    """Reads one JSON object per step, as `log.jsonl` writes them; skips an incomplete last line.

    Raises:
        ValueError: a line is not such an object (names file and line), or there is none.
    """
    train: list[tuple[int, float]] = []
    valid: dict[str, list[tuple[int, float]]] = {}
    fields: dict[str, list[tuple[int, float]]] = {}
    complete, _, _ = path.read_text(errors="replace").rpartition("\n")
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            record: dict[str, Any] = parse_json(line)
            tokens = int(record["tokens"])
            if record["loss"] is not None:  # null stands for a loss that was not finite
                train.append((tokens, float(record["loss"])))
            # Sorting puts initial_valid_loss, measured before training, before valid_loss.
            for key, value in sorted(record.items()):
                field = key.removeprefix("initial_")
                if field.partition("/")[0] == "valid_loss" and value is not None:
                    at = tokens if field == key else 0
                    valid.setdefault(field, []).append((at, float(value)))
                elif key != "loss" and isinstance(value, (int, float)):
                    fields.setdefault(key, []).append((tokens, float(value)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}:{number}: not a record of a step with tokens and loss ({error!r})"
            ) from error
    if not train:
        raise ValueError(f"{path} holds no record: the run has not completed a step")
    return Curve(path.resolve().parent.name, train, valid, fields)


def smoothed(points: Sequence[tuple[int, float]], records: int) -> list[tuple[int, float]]:
    """Running mean over at most `records` records up to each point."""
    means, total = [], 0.0
    for number, (tokens, value) in enumerate(points):
        total += value - (points[number - records][1] if number >= records else 0.0)
        means.append((tokens, total / min(number + 1, records)))
    return means


def match_fields(curves: Sequence[Curve], panels: str) -> list[str]:
    """Fields that match a comma-separated list of names and patterns, in the order of the list.

    Raises:
        ValueError: a pattern matches no field.
    """
    available = sorted({field for curve in curves for field in curve.fields})
    matches: dict[str, None] = {}
    for pattern in filter(None, panels.split(",")):
        fields = [field for field in available if fnmatchcase(field, pattern)]
        if not fields:
            raise ValueError(
                f"--panels {pattern} matches no numeric field (available: {', '.join(available)})"
            )
        matches |= dict.fromkeys(fields)
    return list(matches)


def dataset_suffix(field: str) -> str:
    """` of <name>` for the field `valid_loss/<name>`, an empty string for `valid_loss`."""
    _, slash, name = field.partition("/")
    return f" of {name}" if slash else ""


def summary(curve: Curve) -> dict[str, Any]:
    """First and last losses of a run."""
    figures = {"run": curve.name, "tokens": curve.train[-1][0]}
    for field, points in {"loss": curve.train, **curve.valid}.items():
        figures |= {f"first_{field}": points[0][1], f"last_{field}": points[-1][1]}
    return figures

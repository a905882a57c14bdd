"""What the log of a run holds: curves and events for a report, and the picture of losses and any
other figure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import cycle
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
        records: lines of its log, the last of which may be unfinished.

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


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns at most MOST_POINTS points: means of neighbours, the last one as it is."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-len(points) // MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points) - 1, size)]
    means = [
        (group[len(group) // 2][0], sum(value for _, value in group) / len(group))
        for group in groups
    ]
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
    """Returns the parts of a step's measured time that the log tells apart, as medians in seconds,
    and the rest."""
    total = _median(steps, "step_time_s")
    parts = [
        (key.removesuffix("_s").replace("_", " "), _median(steps, key))
        for key in sorted(steps[-1])
        if key.endswith("_exposed_s")
    ]
    if "bubble" in steps[-1]:
        parts.append(("pipeline bubble", _median(steps, "bubble") * total))
    return [("everything else", max(0.0, total - sum(value for _, value in parts))), *parts]


def _by_axis(steps: list[dict[str, Any]], ending: str) -> dict[str, float]:
    """Returns axis -> median of what rank 0 sent or waited there in a step, of the fields that end
    so."""
    fields = {
        field
        for record in steps
        for field in record
        if field.startswith("comm_") and field.endswith(ending)
    }
    return {
        field.removeprefix("comm_").removesuffix(ending): _median(steps, field)
        for field in sorted(fields)
    }


def _exposed(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Returns axis -> median of the seconds in which rank 0 waited there in a step, as far as the
    log tells.

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


@dataclass(frozen=True)
class Curve:
    """One run's losses, in nats per token."""

    name: str
    train: list[tuple[int, float]]  # (tokens seen, loss) of every record
    # field (`valid_loss`, `valid_loss/<name>`) -> (tokens seen, loss) of every evaluation; the
    # first stands at 0 where it came before training
    valid: dict[str, list[tuple[int, float]]]
    # every other number of a record (`grad_norm`, `moe/layer_0/load`) -> (tokens seen, value)
    fields: dict[str, list[tuple[int, float]]]


def find_records(run: Path) -> list[Path]:
    """Returns the run's .jsonl file, or those of all runs in a folder of runs. Raises ValueError:
    there is none, or one folder holds several."""
    if run.is_file():
        return [run]
    if not run.is_dir():
        raise ValueError(f"{run} does not exist: name a run's folder or its .jsonl file")
    found = sorted(run.glob("*.jsonl"))
    if not found:
        found = sorted(path for path in run.rglob("*.jsonl") if "wandb" not in path.parts)
        if found and len({path.parent for path in found}) == len(found):
            return found
    if len(found) != 1:
        names = ", ".join(str(path.relative_to(run)) for path in found) or "none"
        raise ValueError(
            f"{run} should hold one .jsonl file (log.jsonl), found {names}: name the file itself"
        )
    return found


def read_curve(path: Path) -> Curve:
    """Reads one JSON object a step, as `log.jsonl` writes them; a last line that is still being
    written is left out. Raises ValueError: a line is not such an object; names file and line."""
    train: list[tuple[int, float]] = []
    valid: dict[str, list[tuple[int, float]]] = {}
    fields: dict[str, list[tuple[int, float]]] = {}
    whole, _, _ = path.read_text(errors="replace").rpartition("\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record: dict[str, Any] = parse_json(line)
            tokens = int(record["tokens"])
            if record["loss"] is not None:  # as is a loss that was not finite
                train.append((tokens, float(record["loss"])))
            for key, loss in sorted(record.items()):  # those before training first
                field = key.removeprefix("initial_")
                if field.partition("/")[0] == "valid_loss" and loss is not None:
                    valid.setdefault(field, []).append((tokens if field == key else 0, float(loss)))
                elif key != "loss" and isinstance(loss, (int, float)):
                    fields.setdefault(key, []).append((tokens, float(loss)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}:{number}: not a record of a step with tokens and loss ({error!r})"
            ) from error
    if not train:
        raise ValueError(f"{path} holds no record: has the run made a step?")
    return Curve(path.resolve().parent.name, train, valid, fields)


def smoothed(points: Sequence[tuple[int, float]], records: int) -> list[tuple[int, float]]:
    """Returns the mean of each value and those before it, of at most `records` records together."""
    means, total = [], 0.0
    for number, (tokens, value) in enumerate(points):
        total += value - (points[number - records][1] if number >= records else 0.0)
        means.append((tokens, total / min(number + 1, records)))
    return means


def chosen_fields(curves: Sequence[Curve], panels: str) -> list[str]:
    """Returns the fields that a list of names and patterns means, in its order. Raises ValueError:
    one of them means none."""
    there = sorted({field for curve in curves for field in curve.fields})
    found: dict[str, None] = {}
    for pattern in filter(None, panels.split(",")):
        fields = [field for field in there if fnmatchcase(field, pattern)]
        if not fields:
            raise ValueError(
                f"--panels {pattern}: no record has such a number; there are {', '.join(there)}"
            )
        found |= dict.fromkeys(fields)
    return list(found)


def drawable(name: str, number: int) -> str:
    """Returns a run's name if some font here has its letters, which is then used; else `run
    <number>`."""
    from matplotlib import font_manager, rcParams
    from matplotlib.ft2font import FT2Font

    letters = set(name) - {" "}
    fonts = [font_manager.findfont("DejaVu Sans"), *sorted(font_manager.findSystemFonts())]
    for path in fonts:
        with suppress(RuntimeError, OSError):  # a file that is no font
            font = FT2Font(path)
            if all(font.get_char_index(ord(letter)) for letter in letters):
                if path != fonts[0]:
                    font_manager.fontManager.addfont(path)
                    rcParams["font.family"] = [
                        *dict.fromkeys([*rcParams["font.family"], font.family_name])
                    ]
                return name
    print(f"run {number} is {name!r}: no font here has its letters", file=sys.stderr)
    return f"run {number}"


def draw(
    curves: Sequence[Curve], out: Path, fields: Sequence[str] = (), smooth: int | None = None
) -> None:
    """Writes the picture, losses above and a panel for each field below; its format follows from
    the name.

    Args:
        fields: of records, to draw below.
        smooth: records of a mean; None = a fortieth of the run.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, or asked for
    from matplotlib import pyplot

    names = [drawable(curve.name, number) for number, curve in enumerate(curves, 1)]
    height = 5 + 2 * len(fields)
    figure, all_axes = pyplot.subplots(
        1 + len(fields),
        figsize=(8, height),
        layout="constrained",
        sharex=True,
        squeeze=False,
        height_ratios=[5, *[2] * len(fields)],
    )
    axes, *panels = all_axes[:, 0]
    for number, (name, curve) in enumerate(zip(names, curves)):
        color, width = (
            f"C{number % 10}",
            1 + 3 * (1 - (number + 1) / len(curves)),
        )  # what lies on top leaves an edge free
        mean_of = smooth or max(1, len(curve.train) // 40)
        if mean_of > 1:
            axes.plot(*zip(*curve.train), color=color, alpha=0.25, linewidth=width)
        shown = smoothed(curve.train, mean_of)
        axes.plot(*zip(*shown), color=color, alpha=0.6, linewidth=width, label=f"{name}, training")
        for (field, points), style in zip(
            sorted(curve.valid.items()), cycle(("-", "--", ":", "-."))
        ):
            label = f"{name}, validation{of_set(field)}"
            few = len(points) < 10  # straight lines between few points would look like a curve
            axes.plot(
                *zip(*points),
                color=color,
                linestyle="none" if few else style,
                marker="o",
                markersize=4 + width,
                markeredgecolor="black",
                label=label,
            )
        for panel, field in zip(panels, fields):
            if points := curve.fields.get(field, []):
                panel.plot(
                    *zip(*smoothed(points, mean_of)), color=color, alpha=0.6, linewidth=width
                )
    axes.set(ylabel="loss (nats per token)")
    for panel, field in zip(panels, fields):
        panel.set(ylabel=field)
    for each in all_axes[:, 0]:
        each.grid(alpha=0.3)
    all_axes[-1, 0].set(xlabel="tokens")
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def of_set(field: str) -> str:
    """Returns ` of <name>` for the field `valid_loss/<name>`; nothing for `valid_loss`."""
    _, slash, name = field.partition("/")
    return f" of {name}" if slash else ""


def summary(curve: Curve) -> dict[str, Any]:
    """Returns first and last losses, for people and programs."""
    figures = {"run": curve.name, "tokens": curve.train[-1][0]}
    for field, points in {"loss": curve.train, **curve.valid}.items():
        figures |= {f"first_{field}": points[0][1], f"last_{field}": points[-1][1]}
    return figures

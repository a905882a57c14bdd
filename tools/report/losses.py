"""Curves of losses and of any other figure of runs' records, and their picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import cycle
from pathlib import Path
from typing import Any

from megatron5d.config.json_file import parse_json


@dataclass(frozen=True)
class Curve:
    """One run's losses, in nats per token.

    Args:
        name: of the run.
        train: (tokens seen, loss) of every record.
        valid: field (`valid_loss`, `valid_loss/<name>`) -> (tokens seen, loss) of every evaluation; the first stands
            at 0 where it came before training.
        fields: every other number of a record (`grad_norm`, `moe/layer_0/load`) -> (tokens seen, value).
    """

    name: str
    train: list[tuple[int, float]]
    valid: dict[str, list[tuple[int, float]]]
    fields: dict[str, list[tuple[int, float]]]


def find_records(run: Path) -> list[Path]:
    """Returns the run's .jsonl file, or those of all runs in a folder of runs.

    Raises:
        ValueError: there is none, or one folder holds several.
    """
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
        raise ValueError(f"{run} should hold one .jsonl file (log.jsonl), found {names}: name the file itself")
    return found


def read_curve(path: Path) -> Curve:
    """Reads one JSON object a step, as `log.jsonl` writes them; a last line that is still being written is left out.

    Raises:
        ValueError: a line is not such an object; names file and line.
    """
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
            raise ValueError(f"{path}:{number}: not a record of a step with tokens and loss ({error!r})") from error
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
    """Returns the fields that a list of names and patterns means, in its order.

    Raises:
        ValueError: one of them means none.
    """
    there = sorted({field for curve in curves for field in curve.fields})
    found: dict[str, None] = {}
    for pattern in filter(None, panels.split(",")):
        fields = [field for field in there if fnmatchcase(field, pattern)]
        if not fields:
            raise ValueError(f"--panels {pattern}: no record has such a number; there are {', '.join(there)}")
        found |= dict.fromkeys(fields)
    return list(found)


def drawable(name: str, number: int) -> str:
    """Returns a run's name if some font here has its letters, which is then used; else `run <number>`."""
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
                    rcParams["font.family"] = [*dict.fromkeys([*rcParams["font.family"], font.family_name])]
                return name
    print(f"run {number} is {name!r}: no font here has its letters", file=sys.stderr)
    return f"run {number}"


def draw(curves: Sequence[Curve], out: Path, fields: Sequence[str] = (), smooth: int | None = None) -> None:
    """Writes the picture, losses above and a panel for each field below; its format follows from the name.

    Args:
        curves: runs.
        out: file.
        fields: of records, to draw below.
        smooth: records of a mean; None = a fortieth of the run.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, or asked for
    from matplotlib import pyplot

    names = [drawable(curve.name, number) for number, curve in enumerate(curves, 1)]
    height = 5 + 2 * len(fields)
    figure, all_axes = pyplot.subplots(
        1 + len(fields), figsize=(8, height), layout="constrained", sharex=True, squeeze=False,
        height_ratios=[5, *[2] * len(fields)],
    )  # fmt: skip
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
        for (field, points), style in zip(sorted(curve.valid.items()), cycle(("-", "--", ":", "-."))):
            label = f"{name}, validation{of_set(field)}"
            few = len(points) < 10  # straight lines between few points would look like a curve
            axes.plot(*zip(*points), color=color, linestyle="none" if few else style, marker="o", markersize=4 + width,
                      markeredgecolor="black", label=label)  # fmt: skip
        for panel, field in zip(panels, fields):
            if points := curve.fields.get(field, []):
                panel.plot(*zip(*smoothed(points, mean_of)), color=color, alpha=0.6, linewidth=width)
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

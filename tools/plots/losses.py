"""Plots the losses of runs over tokens, and other logged fields in panels below."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from megatron5d.tools.report.runs import Curve, dataset_suffix, smoothed

FEW_EVALUATIONS = 10  # fewer are drawn as markers only


def draw_losses(
    curves: Sequence[Curve], out: Path, fields: Sequence[str] = (), window: int | None = None
) -> None:
    """Writes the plot; the suffix of the file sets its format.

    Args:
        curves: runs to draw, one color each.
        out: file to write; its folder is created.
        fields: of records, one panel each below the losses.
        window: records per running mean; None = 1/40 of the run.
    """
    from matplotlib.figure import Figure

    names = [drawable_name(curve.name, number) for number, curve in enumerate(curves, 1)]
    figure = Figure(figsize=(8, 5 + 2 * len(fields)), layout="constrained")
    all_axes = figure.subplots(
        1 + len(fields), sharex=True, squeeze=False, height_ratios=[5, *[2] * len(fields)]
    )[:, 0]
    losses, *panels = all_axes
    for index, (name, curve) in enumerate(zip(names, curves)):
        # Later curves are thinner, so an equal curve below them stays visible at its edges.
        width = 1 + 3 * (1 - (index + 1) / len(curves))
        style = {"color": f"C{index % 10}", "linewidth": width}
        records = window or max(1, len(curve.train) // 40)
        _draw_training(losses, name, curve, records, style)
        _draw_validation(losses, name, curve, style)
        for panel, field in zip(panels, fields):
            if points := curve.fields.get(field, []):
                panel.plot(*zip(*smoothed(points, records)), alpha=0.6, **style)
    for axes, label in zip(all_axes, ("loss (nats per token)", *fields)):
        axes.set(ylabel=label)
        axes.grid(alpha=0.3)
    all_axes[-1].set(xlabel="tokens")
    losses.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def _draw_training(axes: Any, name: str, curve: Curve, records: int, style: dict[str, Any]) -> None:
    if records > 1:
        axes.plot(*zip(*curve.train), alpha=0.25, **style)
    points = smoothed(curve.train, records)
    axes.plot(*zip(*points), alpha=0.6, label=f"{name}, training", **style)


def _draw_validation(axes: Any, name: str, curve: Curve, style: dict[str, Any]) -> None:
    for (field, points), line in zip(sorted(curve.valid.items()), cycle(("-", "--", ":", "-."))):
        axes.plot(
            *zip(*points),
            # Straight lines between few points would look like a measured curve.
            linestyle="none" if len(points) < FEW_EVALUATIONS else line,
            marker="o",
            markersize=4 + style["linewidth"],
            markeredgecolor="black",
            label=f"{name}, validation{dataset_suffix(field)}",
            color=style["color"],
        )


def drawable_name(name: str, number: int) -> str:
    """Name of a run if an installed font has all its letters, else `run <number>`.

    Selects that font for the plots of this process.
    """
    from matplotlib import font_manager, rcParams
    from matplotlib.ft2font import FT2Font

    letters = set(name) - {" "}
    fonts = [font_manager.findfont("DejaVu Sans"), *sorted(font_manager.findSystemFonts())]
    for path in fonts:
        with suppress(RuntimeError, OSError):  # the file is not a font
            font = FT2Font(path)
            if all(font.get_char_index(ord(letter)) for letter in letters):
                if path != fonts[0]:
                    font_manager.fontManager.addfont(path)
                    families = [*rcParams["font.family"], font.family_name]
                    rcParams["font.family"] = [*dict.fromkeys(families)]
                return name
    print(f"run {number} is {name!r}: no installed font has its letters", file=sys.stderr)
    return f"run {number}"

"""Plots a sweep: throughput and memory over GPUs and micro-batch sizes, MFU over tp and pp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_sweep(records: Sequence[dict[str, Any]], title: str, out: Path) -> None:
    """Writes the plots of a sweep; the suffix of the file sets its format.

    Args:
        records: of `report.sweep`; those of runs have no `tp`, so two plots stay empty.
        title: above the plots.
        out: file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (rate, memory), (batch, heat) = figure.subplots(2, 2)
    figure.suptitle(title)
    _draw_scaling(rate, memory, records)
    if "tp" in records[0]:
        world = max(record["world"] for record in records)
        largest = _select(records, "world", world)
        _draw_batches(batch, largest, world)
        _draw_heat_map(heat, largest, world)
    else:
        batch.set_axis_off()
        heat.set_axis_off()
    figure.savefig(out, dpi=120)


def _draw_scaling(rate: Any, memory: Any, records: Sequence[dict[str, Any]]) -> None:
    """Draws throughput of all layouts and of the best ones, and memory of the best, over GPUs."""
    worlds = sorted({record["world"] for record in records})
    best = [
        max(_select(records, "world", world), key=lambda record: record["tokens_per_s_per_gpu"])
        for world in worlds
    ]
    rate.plot(
        [record["world"] for record in records],
        [record["tokens_per_s_per_gpu"] for record in records],
        ".",
        color="0.7",
    )
    rate.plot(worlds, [record["tokens_per_s_per_gpu"] for record in best], "o-", label="best")
    rate.set(xlabel="GPUs", ylabel="tokens/s per GPU", xscale="log", ylim=(0, None))
    memory.plot(worlds, [record["memory_gib"] for record in best], "o-", color="C1")
    memory.set(xlabel="GPUs", ylabel="GiB per rank, best layout", xscale="log", ylim=(0, None))
    for axes in (rate, memory):
        axes.set_xticks(worlds, [str(world) for world in worlds])
        axes.minorticks_off()
        axes.grid(alpha=0.3)


def _draw_batches(axes: Any, records: Sequence[dict[str, Any]], world: int) -> None:
    sizes = sorted({record["mbs"] for record in records})
    best = [
        max(record["tokens_per_s_per_gpu"] for record in _select(records, "mbs", size))
        for size in sizes
    ]
    axes.bar([str(size) for size in sizes], best, color="C2")
    axes.set(xlabel=f"micro-batch (train.mbs), {world} GPUs", ylabel="tokens/s per GPU, best")


def _draw_heat_map(axes: Any, records: Sequence[dict[str, Any]], world: int) -> None:
    tps, pps = (sorted({record[name] for record in records}) for name in ("tp", "pp"))
    axes.set_xticks(range(len(tps)), [str(tp) for tp in tps])
    axes.set_yticks(range(len(pps)), [str(pp) for pp in pps])
    axes.set(xlabel="tp", ylabel="pp", title=f"best MFU in %, {world} GPUs")
    cells = [[float("nan")] * len(tps) for _ in pps]
    for row, pp in enumerate(pps):
        for column, tp in enumerate(tps):
            if layouts := _select(_select(records, "tp", tp), "pp", pp):
                value = cells[row][column] = max(100 * record["mfu"] for record in layouts)
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", color="white")
    axes.imshow(cells, aspect="auto", cmap="viridis", origin="lower")


def _select(records: Sequence[dict[str, Any]], key: str, value: Any) -> list[dict[str, Any]]:
    return [record for record in records if record[key] == value]

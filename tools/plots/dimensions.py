"""Draws parallel dimensions as SVG: a block's tensors, memory under ZeRO, and the grid of ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

from megatron5d.planning.clusters import GIB
from megatron5d.topology.grid import Grid, Sizes, dense_grid, expert_grid

COLORS = {
    "zero": "#8758b8",
    "tp": "#3b76c4",
    "sp": "#6aa9e9",
    "cp": "#2a9d8f",
    "pp": "#d98c1f",
    "ep": "#c8443f",
}
INK = "#1b1f24"  # headings; other text is gray
KIND_COLORS = {
    "weights": "#3b76c4",
    "gradients": "#8758b8",
    "optimizer": "#d98c1f",
    "activations": "#2a9d8f",
    "everything else": "#c3c9cf",
}
GROUP_COLORS = ("#c8443f", "#2a9d8f", "#8758b8", "#d98c1f")
CELL = 60.0  # pixels of a rank's square in the grid
PITCH = CELL + 8


def draw_block(record: dict[str, Any]) -> str:
    """SVG of a block: each tensor that is cut, with the part of rank 0 filled, and its messages."""
    elements, x, bottom = [], 10.0, 0.0
    for phase in record["layer"]:
        y = 26.0
        elements.append(text_at(x, 16, phase["name"], 14, INK))
        entries = [*phase["weights"], *phase["tensors"]]
        for entry in entries:
            if entry["cut"]:
                elements.append(_tensor(entry, x, y))
                y += 50
        for line in _block_notes(entries, phase["sent"]):
            elements.append(text_at(x, y + 12, line))
            y += 16
        bottom, x = max(bottom, y), x + 310
    return svg_of(x, bottom + 12, elements)


def _block_notes(
    entries: Sequence[dict[str, Any]], messages: Sequence[dict[str, Any]]
) -> list[str]:
    """Lines below a phase: tensors that are not cut, and messages of rank 0."""
    uncut = [entry["name"].removeprefix("output of ") for entry in entries if not entry["cut"]]
    lines = textwrap.wrap("not cut: " + ", ".join(dict.fromkeys(uncut)), 44) if uncut else []
    for message in messages:
        direction = {"F": "forward", "B": "backward"}[message["pass"]]
        megabytes = f"{message['bytes'] / 1e6:,.0f} MB"
        lines.append(f"{direction}: {message['operation']} {message['axis']} {megabytes}")
    return lines


def draw_memory(stages: Sequence[dict[str, Any]]) -> str:
    """SVG of a rank's memory under each ZeRO stage, by kind."""
    scale, elements = 560 / max(stage["needed_bytes"] for stage in stages), []
    for row, stage in enumerate(stages):
        x, y = 70.0, 10.0 + 30 * row
        elements.append(text_at(6, y + 16, f"ZeRO {stage['stage']}", 13, INK))
        sums = dict.fromkeys(KIND_COLORS, 0)
        for name, value in stage["memory"][stage["worst_rank"]].items():
            kind = name.split("/")[0]
            sums[kind if kind in KIND_COLORS else "everything else"] += value
        for kind, value in sums.items():
            elements.append(
                f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="22" '
                f'fill="{KIND_COLORS[kind]}"/>'
            )
            x += value * scale
        elements.append(text_at(x + 6, y + 16, f"{stage['needed_bytes'] / GIB:.0f} GiB", 12))
    for column, (kind, color) in enumerate(KIND_COLORS.items()):
        x = 70 + 130 * column
        elements.append(f'<rect x="{x}" y="136" width="11" height="11" fill="{color}"/>')
        elements.append(text_at(x + 16, 146, kind, 12))
    return svg_of(720, 158, elements)


def draw_grid(sizes: Sizes) -> str:
    """SVG of all ranks: rows are pipeline stages, columns replicas; inside are cp, tp and ep."""
    dense = dense_grid(sizes)
    groups = list(expert_grid(sizes, dense).groups("ep"))
    axes = f"pp {sizes.pp} × dp {sizes.dp} × cp {sizes.cp} × tp {sizes.tp}"
    title = f"{sizes.world} ranks: {axes}; ep {sizes.ep} over cp, tp"
    elements = [text_at(10, 18, title, 13, INK)]
    for rank in range(sizes.world):
        group = next(number for number, group in enumerate(groups) if rank in group)
        elements += _grid_cell(sizes, dense, rank, GROUP_COLORS[group % len(GROUP_COLORS)])
    bottom = 62 + sizes.pp * (sizes.cp * PITCH + 26)
    legend = (
        "across: tp cuts matrices · down: cp cuts the sequence · "
        "frames of one color: ranks that share the experts (ep)"
    )
    return svg_of(640, bottom + 24, [*elements, text_at(10, bottom + 10, legend, 12)])


def _grid_cell(sizes: Sizes, dense: Grid, rank: int, frame: str) -> list[str]:
    """Square of a rank, with the labels of its column and row if it is the first of them."""
    coordinates = {name: dense.coordinate(rank, name) for name in dense.names}
    pp, cp, tp = coordinates["pp"], coordinates["cp"], coordinates["tp"]
    dp = coordinates["dp_replicate"] * sizes.dp_shard + coordinates["dp_shard"]
    x = 70 + dp * (sizes.tp * PITCH + 60) + tp * PITCH
    y = 62 + pp * (sizes.cp * PITCH + 26) + cp * PITCH
    elements = [
        f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="6" fill="#e8eef5" '
        f'stroke="{frame}" stroke-width="3"/>',
        text_at(x + 8, y + 20, str(rank), 14, INK) + text_at(x + 8, y + 36, f"cp {cp} tp {tp}", 10),
    ]
    if cp == tp == pp == 0:
        elements.append(text_at(x, 52, f"dp {dp}: its own sequences", 12, COLORS["zero"]))
    if cp == tp == dp == 0:
        elements.append(text_at(10, y + CELL, f"pp {pp}", 13, COLORS["pp"]))
    return elements


def _tensor(entry: dict[str, Any], x: float, y: float) -> str:
    shape, local = entry.get("whole", entry["local"]), entry["local"]
    width, height = 78.0, 40.0 if len(shape) > 1 else 8.0
    local_height = height * local[0] / shape[0] if len(shape) > 1 else height
    local_width = width * local[-1] / shape[-1]
    names = list(dict.fromkeys(name for _, name in entry["cut"]))
    label = f"{entry['name'].removeprefix('output of ')} · {', '.join(names)}"
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#8a8f98" '
        f'stroke-dasharray="3 3"/>'
        f'<rect x="{x}" y="{y}" width="{max(2.0, local_width):.1f}" '
        f'height="{max(2.0, local_height):.1f}" fill="{COLORS[names[0]]}"/>'
        + text_at(x + 88, y + 14, label, 12, INK)
        + text_at(x + 88, y + 30, f"{shape} → {local}")
    )


def text_at(x: float, y: float, text: str, size: int = 11, color: str = "#5b6670") -> str:
    """A text as an SVG element."""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}">{escape(text)}</text>'


def svg_of(width: float, height: float, elements: list[str]) -> str:
    """A complete SVG of some elements, on white."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    background = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([opening, background, *elements, "</svg>\n"])

"""What each parallel dimension does to a real model: tables and pictures of docs/parallelism.md and
its pages.

Each example switches one dimension on in a node of eight H100s; the numbers are those of a report.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from megatron5d.config.load import CONF
from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.simulate import simulate
from megatron5d.planning.clusters import GIB, cluster_called
from megatron5d.planning.planned_config import planned_config
from megatron5d.tools.plots.schedule import draw_svg
from megatron5d.tools.report.collect import Asked, name_cuts, variant, zero_stage
from megatron5d.topology.grid import Sizes, dense_grid, expert_grid, resolve

COMMON = (
    "recompute.mode=none",
    "train.gbs=64",
    "train.mbs=1",
    "parallel.tp=1",
    "parallel.sp=false",
    "parallel.zero=0",
)
COLORS = {
    "zero": "#8758b8",
    "tp": "#3b76c4",
    "sp": "#6aa9e9",
    "cp": "#2a9d8f",
    "pp": "#d98c1f",
    "ep": "#c8443f",
}


@dataclass(frozen=True)
class Example:
    """One dimension at work."""

    page: str  # its page in docs/parallelism/
    title: str
    experiment: str  # a model
    overrides: tuple[str, ...]  # that switch the dimension on
    switches: tuple[str, ...]  # of a report, which switch it off
    drawback: str  # what it costs or where it ends, in words


EXAMPLES = (
    Example(
        "data",
        "data + ZeRO-3",
        "llama3_8b",
        ("parallel.zero=3",),
        ("zero",),
        "weights are gathered for every pass; needs a large batch",
    ),
    Example(
        "tensor",
        "tensor + sequence",
        "llama3_8b",
        ("parallel.tp=8", "parallel.sp=true"),
        ("tp", "sp"),
        "sends activations in every layer, so it stays inside a node",
    ),
    Example(
        "context",
        "context",
        "llama3_8b",
        ("parallel.cp=8", "train.seq_len=32768"),
        ("cp",),
        "every rank keeps all weights; short sequences do not hide the ring",
    ),
    Example(
        "pipeline",
        "pipeline",
        "llama3_8b",
        ("parallel.pp=8",),
        ("pp",),
        "idle ranks at both ends of a step; stages must be even",
    ),
    Example(
        "expert",
        "expert",
        "qwen3_30b_a3b",
        ("parallel.ep=8",),
        ("ep",),
        "two all-to-alls in every layer; the busiest rank sets the pace",
    ),
)


def asked_of(example: Example) -> Asked:
    """Returns the layout of an example: eight H100s of one node."""
    overrides = (f"experiment={example.experiment}", *COMMON, *example.overrides)
    return Asked(example.page, planned_config(overrides, 8), 8, cluster_called("h100"))


def with_and_without(example: Example) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the numbers of an example with its dimension and without it."""
    asked = asked_of(example)
    off = example.switches
    variants = {"": variant(asked, ())} | {
        " ".join(some): variant(asked, some) for some in {off, off[:1], off[1:]} if some
    }
    name_cuts(variants, off)
    return variants[""], variants[" ".join(off)]


def master_table() -> str:
    """Returns one row a dimension: what it cuts, saves, sends and costs."""
    rows = [
        "| dimension | cuts | memory of a rank | sends, a layer and micro-batch | step | drawback |",
        "|---|---|---|---|---|---|",
    ]
    for example in EXAMPLES:
        now, before = with_and_without(example)
        name = f"[{example.title}](parallelism/{example.page}.md)"
        memory, step = (
            _change(before, now, "needed_bytes", GIB, "GiB"),
            _change(before, now, "step_time_s", 1, "s"),
        )
        rows.append(
            f"| {name} | {_cuts(example, now)} | {memory} | {_sends(now)} | {step} | {example.drawback} |"
        )
    return "\n".join(rows)


def _cuts(example: Example, now: dict[str, Any]) -> str:
    if example.page == "pipeline":
        return "layers: each rank holds an eighth of them"
    if example.page == "data":
        return "the batch; with ZeRO optimizer state (1), gradients (2), weights (3)"
    parts = []
    for kind, label in (("weights", "weights"), ("tensors", "activations")):
        entries = [entry for phase in now["layer"] for entry in phase[kind]]
        cut = [entry for entry in entries if entry["cut"]]
        if cut:
            names = ", ".join(
                dict.fromkeys(entry["name"].removeprefix("output of ") for entry in cut)
            )
            parts.append(f"{len(cut)} of {len(entries)} {label} ({names})")
    return "; ".join(parts)


def _change(before: dict[str, Any], now: dict[str, Any], key: str, unit: float, name: str) -> str:
    return f"{before[key] / unit:.1f} → {now[key] / unit:.1f} {name}"


def _sends(now: dict[str, Any]) -> str:
    """Returns the collectives of a block's passes; where it sends nothing, what a whole step sends
    besides."""
    found: dict[tuple[str, str], list[float]] = {}
    for entry in (entry for phase in now["layer"] for entry in phase["sent"]):
        place = found.setdefault((entry["operation"], entry["axis"]), [0.0, 0.0])
        place["FB".index(entry["pass"])] += entry["bytes"] / 1e6
    if found:
        return "; ".join(
            f"{op} {axis} {f:,.0f} + {b:,.0f} MB" for (op, axis), (f, b) in sorted(found.items())
        )
    axes = {axis: value for axis, value in now["sent_bytes"][0].items() if value}
    return "in a step: " + ", ".join(
        f"{axis} {value / 1e9:,.1f} GB" for axis, value in sorted(axes.items())
    )


def block_table(now: dict[str, Any]) -> str:
    """Returns a table of a block's tensors and messages, phase by phase."""
    rows = ["| phase | tensor | whole | a rank's part | cut by |", "|---|---|---|---|---|"]
    for phase in now["layer"]:
        for entry in (*phase["weights"], *phase["tensors"]):
            cut = (
                ", ".join(dict.fromkeys(f"{name} (dim {dim})" for dim, name in entry["cut"])) or "–"
            )
            whole = entry.get("whole", entry["local"])
            rows.append(
                f"| {phase['name']} | {entry['name']} | {whole} | {entry['local']} | {cut} |"
            )
    return "\n".join(rows)


def picture(now: dict[str, Any]) -> str:
    """Returns an SVG of a block: every tensor that is cut, the part of rank 0 filled, and what is
    sent."""
    parts, x, tall = [], 10.0, 0.0
    for phase in now["layer"]:
        y = 26.0
        parts.append(_text(x, 16, phase["name"], 14, "#1b1f24"))
        entries = [*phase["weights"], *phase["tensors"]]
        for entry in filter(lambda each: each["cut"], entries):
            parts.append(_tensor(entry, x, y))
            y += 50
        whole = [entry["name"].removeprefix("output of ") for entry in entries if not entry["cut"]]
        lines = textwrap.wrap("not cut: " + ", ".join(dict.fromkeys(whole)), 44) if whole else []
        for entry in phase["sent"]:
            way = {"F": "forward", "B": "backward"}[entry["pass"]]
            lines.append(
                f"{way}: {entry['operation']} {entry['axis']} {entry['bytes'] / 1e6:,.0f} MB"
            )
        for line in lines:
            parts.append(_text(x, y + 12, line))
            y += 16
        tall, x = max(tall, y), x + 310
    return _svg(x, tall + 12, parts)


def memory_picture(stages: Sequence[dict[str, Any]]) -> str:
    """Returns an SVG of a rank's memory under each ZeRO stage, by kind."""
    scale, parts = 560 / max(each["needed_bytes"] for each in stages), []
    kinds = {
        "weights": "#3b76c4",
        "gradients": "#8758b8",
        "optimizer": "#d98c1f",
        "activations": "#2a9d8f",
    }
    for row, each in enumerate(stages):
        x, y, memory = 70.0, 10.0 + 30 * row, each["memory"][each["worst_rank"]]
        parts.append(_text(6, y + 16, f"ZeRO {each['stage']}", 13, "#1b1f24"))
        sums = {
            kind: sum(value for name, value in memory.items() if name.split("/")[0] == kind)
            for kind in kinds
        }
        sums["everything else"] = each["needed_bytes"] - sum(sums.values())
        for kind, value in sums.items():
            color = kinds.get(kind, "#c3c9cf")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="22" fill="{color}"/>'
            )
            x += value * scale
        parts.append(_text(x + 6, y + 16, f"{each['needed_bytes'] / GIB:.0f} GiB", 12))
    for place, (kind, color) in enumerate([*kinds.items(), ("everything else", "#c3c9cf")]):
        parts.append(
            f'<rect x="{70 + 130 * place}" y="136" width="11" height="11" fill="{color}"/>'
        )
        parts.append(_text(86 + 130 * place, 146, kind, 12))
    return _svg(720, 158, parts)


def grid_picture(sizes: Sizes) -> str:
    """Returns an SVG of all ranks: rows are pipeline stages, columns replicas, and in each cp and
    tp; frames are ep."""
    dense = dense_grid(sizes)
    expert = expert_grid(sizes, dense)
    title = f"{sizes.world} ranks: pp {sizes.pp} × dp {sizes.dp} × cp {sizes.cp} × tp {sizes.tp}; ep {sizes.ep} over cp, tp"
    cell, parts = 60.0, [_text(10, 18, title, 13, "#1b1f24")]
    shades = ("#c8443f", "#2a9d8f", "#8758b8", "#d98c1f")
    groups = list(expert.groups("ep"))
    for rank in range(sizes.world):
        pp, cp, tp = (dense.coordinate(rank, name) for name in ("pp", "cp", "tp"))
        dp = dense.coordinate(rank, "dp_replicate") * sizes.dp_shard + dense.coordinate(
            rank, "dp_shard"
        )
        x = 70 + dp * (sizes.tp * (cell + 8) + 60) + tp * (cell + 8)
        y = 62 + pp * (sizes.cp * (cell + 8) + 26) + cp * (cell + 8)
        group = next(number for number, group in enumerate(groups) if rank in group)
        parts.append(
            f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" rx="6" fill="#e8eef5" '
            f'stroke="{shades[group % len(shades)]}" stroke-width="3"/>'
        )
        parts.append(
            _text(x + 8, y + 20, str(rank), 14, "#1b1f24")
            + _text(x + 8, y + 36, f"cp {cp} tp {tp}", 10)
        )
        if rank == dense.group(rank, "cp", "tp")[0] and pp == 0:
            parts.append(_text(x, 52, f"dp {dp}: its own sequences", 12, COLORS["zero"]))
        if rank == dense.group(rank, "dp_replicate", "dp_shard", "cp", "tp")[0]:
            parts.append(_text(10, y + cell, f"pp {pp}", 13, COLORS["pp"]))
    bottom = 62 + sizes.pp * (sizes.cp * (cell + 8) + 26)
    told = "across: tp cuts matrices · down: cp cuts the sequence · frames of one color: ep shares out the experts"
    return _svg(640, bottom + 24, [*parts, _text(10, bottom + 10, told, 12)])


def _tensor(entry: dict[str, Any], x: float, y: float) -> str:
    shape, local = entry.get("whole", entry["local"]), entry["local"]
    width, height = 78.0, 40.0 if len(shape) > 1 else 8.0
    part_h = height * local[0] / shape[0] if len(shape) > 1 else height
    part_w = width * local[-1] / shape[-1]
    names = list(dict.fromkeys(name for _, name in entry["cut"]))
    label = f"{entry['name'].removeprefix('output of ')} · {', '.join(names)}"
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#8a8f98" stroke-dasharray="3 3"/>'
        f'<rect x="{x}" y="{y}" width="{max(2.0, part_w):.1f}" height="{max(2.0, part_h):.1f}" '
        f'fill="{COLORS[names[0]]}"/>'
        + _text(x + 88, y + 14, label, 12, "#1b1f24")
        + _text(x + 88, y + 30, f"{shape} → {local}")
    )


def _text(x: float, y: float, text: str, size: int = 11, color: str = "#5b6670") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}">{escape(text)}</text>'


def _svg(width: float, height: float, parts: list[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    ground = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
    body = "\n".join([ground, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n{body}\n</svg>\n'


def published_table() -> str:
    """Returns a table of the layouts in conf/experiment/published, whose headers name devices and
    source."""
    rows = [
        "| experiment=published/… | devices | tp | pp | cp | ep | dp | ZeRO | batch | tokens | source |",
        "|" + "---|" * 11,
    ]
    for file in sorted((CONF / "experiment" / "published").glob("*.yaml")):
        found = re.search(r" on (\d+) \w+ \((.+)\)\.\n", file.read_text())
        assert found is not None, file
        world = int(found[1])
        config = planned_config([f"experiment=published/{file.stem}"], world)
        p, train = config.parallel, config.train
        sizes = (
            world,
            p.tp,
            p.pp,
            p.cp,
            p.ep,
            world // (p.tp * p.pp * p.cp),
            p.zero,
            train.gbs,
            train.seq_len,
        )
        rows.append(f"| {file.stem} | {' | '.join(f'{size:,}' for size in sizes)} | {found[2]} |")
    return "\n".join(rows)


def write_docs(docs: Path) -> list[Path]:
    """Writes the generated tables and pictures below `docs`; returns the files."""
    pages = {
        docs / "parallelism.md": {"table": master_table()},
        docs / "parallelism" / "combining.md": {"published": published_table()},
    }
    pictures = {}
    for example in EXAMPLES:
        now, _ = with_and_without(example)
        pages[docs / "parallelism" / f"{example.page}.md"] = {"layer": block_table(now)}
        pictures[docs / "pictures" / f"{example.page}.svg"] = _picture_of(example, now)
    pictures[docs / "pictures" / "grid.svg"] = grid_picture(
        resolve(16, tp=2, cp=2, pp=2, ep=4, etp=1)
    )
    program = build_program("dualpipe", 8, 20)
    costs = Costs(a2aF=0.3, a2aB=0.3)
    pictures[docs / "pictures" / "dualpipe.svg"] = draw_svg(
        program, simulate(program, costs), width=1000, row=22
    )
    for file, blocks in pages.items():
        file.write_text(filled(file.read_text(), blocks))
    for file, text in pictures.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return [*pages, *pictures]


def _picture_of(example: Example, now: dict[str, Any]) -> str:
    if example.page == "pipeline":
        program = build_program("1f1b", 4, 8)
        return draw_svg(program, simulate(program, Costs()), width=1000)
    if example.page == "data":
        return memory_picture([zero_stage(asked_of(example), stage) for stage in range(4)])
    return picture(now)


def filled(text: str, blocks: dict[str, str]) -> str:
    """Returns a page with its generated blocks replaced. Raises ValueError: the page lacks a
    block."""
    for name, block in blocks.items():
        start, stop = f"<!-- generated: {name} -->", "<!-- end -->"
        pattern = re.compile(f"({re.escape(start)}\n).*?({re.escape(stop)})", re.DOTALL)
        text, count = pattern.subn(partial(_between, block), text)
        if count != 1:
            raise ValueError(
                f"the block {start} ... {stop} stands {count} times in the page, and once is needed"
            )
    return text


def _between(block: str, found: re.Match[str]) -> str:
    return f"{found[1]}{block}\n{found[2]}"

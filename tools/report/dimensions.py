"""Writes the tables and pictures of docs/parallelism.md and its pages.

Each example switches one parallel dimension on in a node of eight H100s. The numbers are those of
a report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron5d.config.load import CONF
from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.simulate import simulate
from megatron5d.planning.clusters import GIB, cluster_called
from megatron5d.planning.planned_config import planned_config
from megatron5d.tools.plots.dimensions import draw_block, draw_grid, draw_memory
from megatron5d.tools.plots.motion import draw_ring, follow_microbatch
from megatron5d.tools.plots.schedule import draw_svg
from megatron5d.tools.report.collect import ReportLayout, variant, zero_stage
from megatron5d.tools.report.layer import key_of, name_cuts
from megatron5d.tools.report.microbatch import sequence_pieces
from megatron5d.topology.grid import resolve

COMMON = (
    "recompute.mode=none",
    "train.gbs=64",
    "train.mbs=1",
    "parallel.tp=1",
    "parallel.sp=false",
    "parallel.zero=0",
)


@dataclass(frozen=True)
class Example:
    """One parallel dimension in use."""

    page: str  # its page in docs/parallelism/
    title: str
    experiment: str  # sets the model
    overrides: tuple[str, ...]  # switch the dimension on
    switches: tuple[str, ...]  # of a report, to switch it off
    drawback: str  # its cost or limit, in words


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


def layout_of(example: Example) -> ReportLayout:
    """Layout of an example on the eight H100s of one node."""
    overrides = (f"experiment={example.experiment}", *COMMON, *example.overrides)
    return ReportLayout(example.page, planned_config(overrides, 8), 8, cluster_called("h100"))


def with_and_without(example: Example) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers of an example with its dimension and without it."""
    layout, off = layout_of(example), example.switches
    combinations = {key_of(names): names for names in ((), off, off[:1], off[1:])}
    variants = {key: variant(layout, names) for key, names in combinations.items()}
    name_cuts(variants, off)
    return variants[""], variants[key_of(off)]


def master_table() -> str:
    """Table of what each dimension cuts, saves, sends and costs, one row per dimension."""
    headers = (
        "dimension",
        "cuts",
        "memory of a rank",
        "sends, a layer and micro-batch",
        "step",
        "drawback",
    )
    rows = []
    for example in EXAMPLES:
        record, without = with_and_without(example)
        rows.append(
            (
                f"[{example.title}](parallelism/{example.page}.md)",
                _cuts(example, record),
                _change(without, record, "needed_bytes", GIB, "GiB"),
                _sends(record),
                _change(without, record, "step_time_s", 1, "s"),
                example.drawback,
            )
        )
    return _table(headers, rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (headers, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(headers), *lines[1:]])


def _cuts(example: Example, record: dict[str, Any]) -> str:
    if example.page == "pipeline":
        return "layers: each rank holds an eighth of them"
    if example.page == "data":
        return "the batch; with ZeRO optimizer state (1), gradients (2), weights (3)"
    clauses = []
    for kind, label in (("weights", "weights"), ("tensors", "activations")):
        entries = [entry for phase in record["layer"] for entry in phase[kind]]
        cut = [entry for entry in entries if entry["cut"]]
        if cut:
            names = dict.fromkeys(entry["name"].removeprefix("output of ") for entry in cut)
            clauses.append(f"{len(cut)} of {len(entries)} {label} ({', '.join(names)})")
    return "; ".join(clauses)


def _change(
    without: dict[str, Any], record: dict[str, Any], key: str, unit: float, name: str
) -> str:
    return f"{without[key] / unit:.1f} → {record[key] / unit:.1f} {name}"


def _sends(record: dict[str, Any]) -> str:
    """Collectives of a block, forward + backward; if it sends nothing, bytes of a whole step."""
    megabytes: dict[tuple[str, str], list[float]] = {}
    for phase in record["layer"]:
        for entry in phase["sent"]:
            by_pass = megabytes.setdefault((entry["operation"], entry["axis"]), [0.0, 0.0])
            by_pass["FB".index(entry["pass"])] += entry["bytes"] / 1e6
    if megabytes:
        return "; ".join(
            f"{operation} {axis} {forward:,.0f} + {backward:,.0f} MB"
            for (operation, axis), (forward, backward) in sorted(megabytes.items())
        )
    by_axis = sorted((axis, sent) for axis, sent in record["sent_bytes"][0].items() if sent)
    return "in a step: " + ", ".join(f"{axis} {sent / 1e9:,.1f} GB" for axis, sent in by_axis)


def block_table(record: dict[str, Any]) -> str:
    """Table of the tensors of a block, phase by phase."""
    rows = []
    for phase in record["layer"]:
        for entry in (*phase["weights"], *phase["tensors"]):
            cuts = dict.fromkeys(f"{name} (dim {dim})" for dim, name in entry["cut"])
            shape, local = entry.get("whole", entry["local"]), entry["local"]
            rows.append((phase["name"], entry["name"], shape, local, ", ".join(cuts) or "–"))
    return _table(("phase", "tensor", "whole", "a rank's part", "cut by"), rows)


def published_table() -> str:
    """Table of the layouts in conf/experiment/published.

    The header comment of each file names its devices and source.
    """
    headers = ["devices", "tp", "pp", "cp", "ep", "dp", "ZeRO", "batch", "tokens", "source"]
    rows = []
    for file in sorted((CONF / "experiment" / "published").glob("*.yaml")):
        header = re.search(r" on (\d+) \w+ \((.+)\)\.\n", file.read_text())
        assert header is not None, file
        world, source = int(header[1]), header[2]
        config = planned_config([f"experiment=published/{file.stem}"], world)
        p, train = config.parallel, config.train
        dp = world // (p.tp * p.pp * p.cp)
        numbers = (world, p.tp, p.pp, p.cp, p.ep, dp, p.zero, train.gbs, train.seq_len)
        rows.append((file.stem, *(f"{number:,}" for number in numbers), source))
    return _table(("experiment=published/…", *headers), rows)


def write_docs(docs: Path) -> list[Path]:
    """Writes the generated tables and pictures below `docs`.

    Returns:
        The files that it wrote.
    """
    pages = {
        docs / "parallelism.md": {"table": master_table()},
        docs / "parallelism" / "combining.md": {"published": published_table()},
    }
    pictures = {}
    for example in EXAMPLES:
        record, _ = with_and_without(example)
        pages[docs / "parallelism" / f"{example.page}.md"] = {"layer": block_table(record)}
        pictures[example.page] = _picture_of(example, record)
    pictures["grid"] = draw_grid(resolve(16, tp=2, cp=2, pp=2, ep=4, etp=1))
    ring = planned_config(
        ["experiment=llama3_8b", "parallel.tp=1", "parallel.sp=false", "parallel.cp=4"], 4
    )
    pictures["ring"] = draw_ring(sequence_pieces(ring))
    program = build_program("dualpipe", 8, 20)
    costs = Costs(a2aF=0.3, a2aB=0.3)
    pictures["dualpipe"] = draw_svg(program, simulate(program, costs), width=1000, row=22)
    texts = {file: fill_blocks(file.read_text(), blocks) for file, blocks in pages.items()}
    texts |= {docs / "pictures" / f"{name}.svg": text for name, text in pictures.items()}
    for file, text in texts.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return list(texts)


def _picture_of(example: Example, record: dict[str, Any]) -> str:
    if example.page == "pipeline":
        program = build_program("1f1b", 4, 8)
        result = simulate(program, Costs())
        svg = draw_svg(program, result, width=1000)
        return follow_microbatch(svg, program, result, width=1000, row=26)
    if example.page == "data":
        return draw_memory([zero_stage(layout_of(example), stage) for stage in range(4)])
    return draw_block(record)


def fill_blocks(text: str, blocks: dict[str, str]) -> str:
    """Page with its generated blocks replaced.

    Raises:
        ValueError: the page does not have a block exactly once.
    """
    for name, block in blocks.items():
        start, stop = f"<!-- generated: {name} -->\n", "\n<!-- end -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(stop[1:])}", re.DOTALL)
        count = len(pattern.findall(text))
        if count != 1:
            raise ValueError(
                f"the page must have the block {start.strip()} ... <!-- end --> once "
                f"(got {count} times)"
            )
        before, after = pattern.split(text)
        text = before + start + block + stop + after
    return text

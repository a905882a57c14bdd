"""Gathers what a report shows and writes it as one HTML file without any request: data and scripts
are inside."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron5d.config.convert import from_dict
from megatron5d.config.schema import Config
from megatron5d.planning.clusters import Cluster, cluster_called
from megatron5d.planning.planned_config import planned_config
from megatron5d.tools.report.runs import CHARTS, find_records, read_run


@dataclass(frozen=True)
class Question:
    """What a report is asked to show."""

    overrides: Sequence[str] = ()  # of pretrain.py, or of the first run's configuration
    runs: Sequence[Path] = ()  # folders of runs, or their logs
    world: int | None = None  # number of ranks; None = that of the first run
    # as plan.py takes it, or cpu; None = h100, and cpu for a run whose log has no MFU
    device: str | None = None
    against: str | None = None  # overrides of a second layout, in one string


def write_report(question: Question, out: Path, json_file: Path | None = None) -> str:
    """Writes the page, and its numbers where asked; returns the page's first sentence. Raises
    ConfigError: a layout is refused. Raises ValueError: a folder holds no run, or nobody says how
    many ranks there are."""
    report = report_of(question)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    out.write_text(page_of(report))
    return report["layouts"][0]["sentence"]


def report_of(question: Question) -> dict[str, Any]:
    """Returns all numbers of a report as one JSON object; see `write_report`."""
    runs = [read_run(log) for folder in question.runs for log in find_records(folder)]
    world = question.world or next((run["world"] for run in runs if run["world"]), None)
    if world is None:
        raise ValueError("a report needs --world N: the number of ranks")
    cluster = _cluster(question.device, runs)
    config = _config(question, question.overrides, world)
    configs = {_name(config, question): config}
    if question.against:
        more = shlex.split(question.against)
        configs[question.against] = _config(question, [*question.overrides, *more], world)
    # seconds, which no refusal waits for
    from megatron5d.tools.report.collect import Asked, differences, layout_record

    asked = [Asked(name, config, world, cluster) for name, config in configs.items()]
    layouts = [layout_record(each) for each in asked]
    return {
        "title": f"megatron5d: {layouts[0]['name']}",
        "layouts": layouts,
        "differences": differences(*layouts) if len(layouts) == 2 else [],
        "runs": runs,
        "charts": list(CHARTS),
        "sources": SOURCES,
    }


def _name(config: Config, question: Question) -> str:
    return question.runs[0].resolve().name if question.runs else config.model.name or "custom"


def _config(question: Question, overrides: Sequence[str], world: int) -> Config:
    """Returns the configuration: of the first run's config.yaml, or of the overrides alone. Raises ValueError:
    overrides beside a run, or a run without config.yaml."""
    if not question.runs or overrides:
        return planned_config(list(overrides), world)
    folder = question.runs[0] if question.runs[0].is_dir() else question.runs[0].parent
    file = folder / "config.yaml"
    if not file.is_file():
        raise ValueError(f"{file} is missing: name the run's layout with overrides")
    return from_dict(yaml.safe_load(file.read_text()))


def _cluster(device: str | None, runs: Sequence[dict[str, Any]]) -> Cluster | None:
    name = device or ("cpu" if runs and "mfu" not in runs[0]["fields"] else "h100")
    return None if name == "cpu" else cluster_called(name)


WEB = Path(__file__).resolve().parent / "web"
SCRIPTS = ("base", "layer", "grid", "memory", "pipeline", "step", "runs", "compare")


def page_of(report: dict[str, Any]) -> str:
    """Returns the page that shows a report."""
    data = json.dumps(report, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "@TITLE@": html.escape(report["title"]),
        "@STYLE@": (WEB / "style.css").read_text(),
        "@SCRIPT@": "\n".join((WEB / f"{name}.js").read_text() for name in SCRIPTS),
        "@DATA@": data,
    }
    page = (WEB / "page.html").read_text()
    for name, text in parts.items():
        page = page.replace(name, text)
    return page


SOURCES = {
    "memory": {
        "name": "Memory of a rank",
        "formula": (
            "Weights, gradients and optimizer state that stay, plus the worst moment of the step's passes: the "
            "model is built and run on the meta device, every tensor is counted, and the Program says how many "
            "micro-batches are in flight. Then 5 % for fragmentation, the CUDA context and NCCL's "
            "communicators."
        ),
        "file": "megatron5d/planning/memory/forecast.py",
    },
    "step": {
        "name": "Time of a step",
        "formula": (
            "Every pass of every layer: GEMM FLOPs and bytes over the device's fitted share of its peak, "
            "attention, memory traffic, collectives over the slowest link of their group; the Program simulated "
            "with these times, and what data parallelism and the optimizer add at the end."
        ),
        "file": "megatron5d/planning/time/step_time.py",
    },
    "mfu": {
        "name": "MFU",
        "formula": (
            "FLOPs of the model for the tokens of a step (recomputation not counted) over the step's time, the "
            "number of ranks and the device's peak in 16 bits. The median error of predicted step times is 6 % "
            "on 71 published dense runs that were not fitted; mixtures of experts, context parallelism, FP8 and Muon "
            "were never compared with a measurement."
        ),
        "file": "megatron5d/model/flops.py",
    },
    "sent": {
        "name": "Bytes sent",
        "formula": (
            "The layer runs on the meta device with a ledger on every axis, which counts each collective: bytes "
            "that one rank sends in a ring."
        ),
        "file": "megatron5d/comm/ledger.py",
    },
    "bubble": {
        "name": "Bubble",
        "formula": (
            "(makespan − compute of the busiest rank) / makespan, in the simulation of the Program that runs."
        ),
        "file": "megatron5d/pipeline_parallel/simulate.py",
    },
    "run": {
        "name": "A run's figure",
        "formula": ("As the run logged it, one JSON object a step."),
        "file": "megatron5d/train/monitoring/report.py",
    },
}

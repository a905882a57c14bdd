"""Collects the numbers of a report and writes them as one self-contained HTML file."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron5d.config.convert import changed, from_dict
from megatron5d.config.schema import Config
from megatron5d.planning.clusters import Cluster, cluster_called
from megatron5d.planning.planned_config import planned_config
from megatron5d.tools.report.runs import CHARTS, find_logs, read_run


@dataclass(frozen=True)
class ReportOptions:
    """Layouts and runs that a report shows."""

    overrides: Sequence[str] = ()  # of pretrain.py; none = configuration of the first run
    runs: Sequence[Path] = ()  # folders of runs, or their logs
    world: int | None = None  # number of ranks; None = that of the first run
    # of plan.py, or cpu; None = h100, or cpu for a run whose log has no MFU
    device: str | None = None
    against: str | None = None  # overrides of a second layout, in one string
    best: bool = False  # also the fastest layout that the search finds for this model


def write_report(options: ReportOptions, out: Path, json_file: Path | None = None) -> str:
    """Writes the page, optionally its numbers as JSON.

    Returns:
        The first sentence of the page.

    Raises:
        ConfigError: a layout is invalid.
        ValueError: a folder holds no run, or the number of ranks is unknown.
    """
    report = report_of(options)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    out.write_text(page_of(report))
    return report["layouts"][0]["sentence"]


def report_of(options: ReportOptions) -> dict[str, Any]:
    """All numbers of a report as one JSON object; raises like `write_report`."""
    runs = [read_run(log) for folder in options.runs for log in find_logs(folder)]
    world = options.world or next((run["world"] for run in runs if run["world"]), None)
    if world is None:
        raise ValueError(
            "a report requires --world N, the number of ranks (the log does not tell it)"
        )
    cluster = _cluster(options.device, runs)
    config = _config(options, options.overrides, world)
    configs = {_name(config, options): config}
    if options.against:
        overrides = [*options.overrides, *shlex.split(options.against)]
        configs[options.against] = _config(options, overrides, world)
    if options.best and cluster is None:
        raise ValueError("--best requires a device whose times are predicted (got cpu)")
    # Imported after the checks: it takes seconds, and an error should come at once.
    from megatron5d.tools.report.collect import ReportLayout, differences, layout_record

    if options.best and cluster is not None:
        configs["best of the search"] = _best_layout(config, world, cluster)

    layouts = [
        layout_record(ReportLayout(name, config, world, cluster))
        for name, config in configs.items()
    ]
    return {
        "title": f"megatron5d: {layouts[0]['name']}",
        "layouts": layouts,
        "differences": [text for other in layouts[1:] for text in differences(layouts[0], other)],
        "runs": runs,
        "charts": list(CHARTS),
        "sources": SOURCES,
    }


def _name(config: Config, options: ReportOptions) -> str:
    return options.runs[0].resolve().name if options.runs else config.model.name or "custom"


def _config(options: ReportOptions, overrides: Sequence[str], world: int) -> Config:
    """Configuration from the overrides; without any, from config.yaml of the first run.

    Raises:
        ValueError: the run has no config.yaml.
    """
    if not options.runs or overrides:
        return planned_config(list(overrides), world)
    folder = options.runs[0] if options.runs[0].is_dir() else options.runs[0].parent
    file = folder / "config.yaml"
    if not file.is_file():
        below = sorted(str(path.parent) for path in folder.rglob("config.yaml"))
        fix = f"name one of the runs in it: {', '.join(below[:8])}"
        if not below:
            fix = "pass the layout of the run as overrides"
        raise ValueError(f"{file} is missing: {fix}")
    return from_dict(yaml.safe_load(file.read_text()))


def _best_layout(config: Config, world: int, cluster: Cluster) -> Config:
    """The fastest layout of a model that fits; every key that the search knows is free.

    Raises:
        ValueError: no layout fits, or times cannot be predicted.
    """
    from megatron5d.planning.layout_search import LayoutSearch

    search, capacity = LayoutSearch(config, world, cluster), cluster.memory_bytes
    for candidate in search.best(search.candidates(capacity), capacity, 1):
        return changed(config, candidate.change)
    raise ValueError(f"--best: no layout of {config.model.name or 'the model'} fits {cluster.name}")


def _cluster(device: str | None, runs: Sequence[dict[str, Any]]) -> Cluster | None:
    name = device or ("cpu" if runs and "mfu" not in runs[0]["fields"] else "h100")
    return None if name == "cpu" else cluster_called(name)


WEB = Path(__file__).resolve().parent / "web"
SCRIPTS = (
    *("base", "layer", "grid", "memory", "pipeline", "step", "runs", "experts"),
    *("journey", "five", "five_scenes", "five_controls", "compare"),
)
STYLES = ("style", "five")


def page_of(report: dict[str, Any]) -> str:
    """HTML page that shows a report."""
    data = json.dumps(report, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    sections = {
        "@TITLE@": html.escape(report["title"]),
        "@STYLE@": "".join((WEB / f"{name}.css").read_text() for name in STYLES),
        "@SCRIPT@": "\n".join((WEB / f"{name}.js").read_text() for name in SCRIPTS),
        "@DATA@": data,
    }
    page = (WEB / "page.html").read_text()
    for name, text in sections.items():
        page = page.replace(name, text)
    return page


SOURCES = {
    "memory": {
        "name": "Memory of a rank",
        "formula": (
            "Weights, gradients and optimizer state, which stay all the time, plus the peak of the "
            "passes of a step: the model is built and run on the meta device, every tensor is "
            "counted, and the Program sets how many micro-batches are in flight. Fragmentation "
            "(5 %), the CUDA context and NCCL's communicators are added."
        ),
        "file": "megatron5d/planning/memory/forecast.py",
    },
    "step": {
        "name": "Time of a step",
        "formula": (
            "Every pass of every layer: GEMM FLOPs and bytes over the device's fitted share of its "
            "peak, attention, memory traffic, and collectives over the slowest link of a group. "
            "The Program is simulated with these times; data parallelism and the optimizer add "
            "their time at the end."
        ),
        "file": "megatron5d/planning/time/step_time.py",
    },
    "mfu": {
        "name": "MFU",
        "formula": (
            "FLOPs of the model for the tokens of a step (without recomputation) over its time, "
            "the number of ranks and the device's peak in 16 bits. The median error of predicted "
            "step times is 6 % on 71 published dense runs that were not used for fitting. Mixtures "
            "of experts, context parallelism, FP8 and Muon have not been compared with any "
            "measurement."
        ),
        "file": "megatron5d/model/flops.py",
    },
    "sent": {
        "name": "Bytes sent",
        "formula": (
            "The layer runs on the meta device with a ledger on every axis, which counts each "
            "collective: bytes that one rank sends in a ring."
        ),
        "file": "megatron5d/comm/ledger.py",
    },
    "bubble": {
        "name": "Bubble",
        "formula": (
            "(makespan − compute of the busiest rank) / makespan, in the simulation of the Program."
        ),
        "file": "megatron5d/pipeline_parallel/simulate.py",
    },
    "run": {
        "name": "Figure of a run",
        "formula": "As logged by the run, one JSON object per step.",
        "file": "megatron5d/train/monitoring/report.py",
    },
}

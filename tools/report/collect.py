"""Numbers of a layout for a report: memory, step time, layer, grid and pipeline.

Variants without each parallel dimension are compared with the layout. The numbers come from the
planner, the schedule simulator, and a layer that runs on the meta device.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations
from math import ceil
from typing import Any

from megatron5d.config.checks import run_checks
from megatron5d.config.convert import Change, changed
from megatron5d.config.schema import Config
from megatron5d.planning.clusters import GIB, Cluster
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.peak import Moment
from megatron5d.planning.memory.rank_memory import RankMemory, gigabytes
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults, quick_layout
from megatron5d.planning.time.predict import Estimator, bytes_on
from megatron5d.tools.report.layer import layer_record, name_cuts
from megatron5d.tools.report.microbatch import microbatch_record
from megatron5d.tools.report.timeline import (
    estimator_on,
    memory_over_time,
    pipeline_record,
    workloads_of,
)
from megatron5d.topology.grid import Grid, dense_grid, expert_grid
from megatron5d.train.build import sizes_of

SWITCHES: dict[str, Change] = {
    "zero": {"parallel.zero": 0},
    "tp": {"parallel.tp": 1, "parallel.sp": False, "parallel.tp_overlap": "none"},
    "sp": {"parallel.sp": False, "parallel.tp_overlap": "none"},
    "cp": {"parallel.cp": 1, "parallel.cp_method": "ring"},
    "pp": {
        "parallel.pp": 1,
        "parallel.vpp": 1,
        "pipeline.schedule": "1f1b",
        "pipeline.layout": None,
    },
    "ep": {"parallel.ep": 1, "parallel.etp": None},
}
"""Dimension -> the change that switches it off; its ranks then join data parallelism."""
DIMENSIONS = (
    ("the pipeline", "bubble"),
    ("tensor parallelism", "tp"),
    ("expert parallelism", "ep"),
    ("context parallelism", "cp"),
    ("data parallelism", "dp"),
)
"""Name of each parallel dimension, and the kind of step time that it costs."""
MAX_VARIANTS_S = 12.0  # time limit for computing combinations of switches
# Median error of predicted step times on 71 published runs not used for fitting (docs/planning.md).
MEDIAN_ERROR = 0.06


@dataclass(frozen=True)
class ReportLayout:
    """A layout to report on."""

    name: str  # shown for it
    config: Config
    world: int  # number of ranks
    cluster: Cluster | None  # device and network; None = CPUs, whose time is not predicted

    @property
    def target(self) -> Target:
        return Target(
            self.cluster.architecture if self.cluster else None, self.config.moe.planned_imbalance
        )


def layout_record(layout: ReportLayout) -> dict[str, Any]:
    """Numbers of a layout with its variants, grid and pipeline."""
    config, world, cluster = layout.config, layout.world, layout.cluster
    switches = _active_dimensions(config)
    variants, zero_stages, timelines, over_time = _forecasts(layout, switches)
    numbers = variants[""]
    if "sent_bytes" not in numbers:  # the estimator, which counts them, did not run
        sent_by_rank = bytes_on(config, world, quick_layout(config, world))
        numbers["sent_bytes"] = [dict(sent) for sent in sent_by_rank]
    name_cuts(variants, switches)
    units: list[dict[str, Any]] = []  # of all variants, most of which share them
    for microbatch in (record["microbatch"] for record in variants.values() if "layer" in record):
        units += [unit for unit in microbatch["units"] if unit not in units]
        microbatch["units"] = list(map(units.index, microbatch["units"]))
    return {
        "name": layout.name,
        "sentence": _sentence(config, numbers, timelines, cluster),
        "world": world,
        "device": _device(cluster),
        "model": _model(config),
        "switches": list(switches),
        "variants": variants,
        "units": units,
        "zero_stages": zero_stages,
        "pipeline": timelines,
        "memory_over_time": over_time,
        **_sizes_and_grids(config, world),
    }


def _forecasts(
    layout: ReportLayout, switches: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Runs the forecasts in two processes: variants, ZeRO stages, timelines, memory over time."""
    until = time.monotonic() + MAX_VARIANTS_S
    # Of the ZeRO stages, the layout's own and (by switching ZeRO off) stage 0 are variants.
    variant_of_stage = {0: "zero"} if "zero" in switches else {}
    variant_of_stage |= {layout.config.parallel.zero: ""}
    # On Ctrl-C the workers end without a traceback; the parent reports the interrupt.
    default_interrupt = (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(2, initializer=signal.signal, initargs=default_interrupt) as pool:
        base = pool.submit(_base_record, layout)
        stages: dict[int, Future[dict[str, Any]]] = {
            stage: pool.submit(zero_stage, layout, stage)
            for stage in range(4)
            if stage not in variant_of_stage
        }
        timelines = pool.submit(pipeline_record, layout.config, layout.world, layout.cluster)
        variants = _variants(pool, layout, switches, until)
        variants[""], over_time = base.result()
    zero_stages = [
        stages[stage].result()
        if stage in stages
        else _without_layer(variants[variant_of_stage[stage]], stage)
        for stage in range(4)
    ]
    return variants, zero_stages, timelines.result(), over_time


def _sizes_and_grids(config: Config, world: int) -> dict[str, Any]:
    sizes, parallel = sizes_of(config, world), config.parallel
    dense = dense_grid(sizes)
    expert = grid_record(expert_grid(sizes, dense)) if config.model.num_experts else None
    return {
        "sizes": {name: getattr(sizes, name) for name in ("dp", "tp", "cp", "pp", "ep", "etp")}
        | {"sp": parallel.sp, "zero": parallel.zero, "vpp": parallel.vpp},
        "grid": {"dense": grid_record(dense), "expert": expert},
    }


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Sentences that compare the second layout with the first."""
    sentences = [
        f"{name}: {value} → {second['sizes'][name]}"
        for name, value in first["sizes"].items()
        if value != second["sizes"][name]
    ]
    a, b = first["variants"][""], second["variants"][""]
    ratio = b["needed_bytes"] / a["needed_bytes"]
    comparison = f"{abs(1 - ratio):.0%} {'more' if ratio > 1 else 'less'} memory per rank"
    sentences.append(f"{second['name']} needs {comparison}")
    if a.get("step_time_s") and b.get("step_time_s"):
        ratio = b["step_time_s"] / a["step_time_s"]
        comparison = f"{abs(1 - ratio):.0%} {'longer' if ratio > 1 else 'less'}"
        sentences.append(f"its step takes {comparison}")
        for kind, value in b["seconds"].items():
            change = (value - a["seconds"].get(kind, 0.0)) / a["step_time_s"]
            if abs(change) > 0.02:
                sentences.append(f"{kind}: {change:+.0%} of the first layout's step")
    return sentences


def _sentence(
    config: Config,
    numbers: dict[str, Any],
    timelines: list[dict[str, Any]],
    cluster: Cluster | None,
) -> str:
    """Summary of a layout: whether it fits, its MFU, and the dimension that costs most time."""
    clauses = [f"Needs {gigabytes(numbers['needed_bytes'])} per rank"]
    if cluster is not None:
        spare = (cluster.memory_bytes - numbers["needed_bytes"]) / GIB
        clauses = [
            f"Fits with {spare:.1f} GiB to spare"
            if spare >= 0
            else f"Does not fit: {-spare:.1f} GiB too much"
        ]
    if "mfu" in numbers:
        is_measured = not (
            config.model.num_experts
            or config.parallel.cp > 1
            or config.precision.fp8 != "none"
            or config.optim.name != "adamw"
        )
        error = f"± {MEDIAN_ERROR:.0%} of it" if is_measured else "(no such run was measured)"
        clauses.append(f"{numbers['mfu']:.0%} MFU {error}")
        name, kind = max(DIMENSIONS, key=lambda item: numbers["seconds"][item[1]])
        share = numbers["seconds"][kind] / numbers["step_time_s"]
        clauses.append(f"{name} costs {share:.0%}" if share >= 0.005 else "no dimension costs time")
    elif timelines and "bubble" in timelines[0]:
        clauses.append(f"the pipeline's bubble is {timelines[0]['bubble']:.0%}")
    return "; ".join(clauses) + "."


def _active_dimensions(config: Config) -> tuple[str, ...]:
    parallel = config.parallel
    is_active = {
        "zero": parallel.zero > 0,
        "tp": parallel.tp > 1,
        "sp": parallel.sp,
        "cp": parallel.cp > 1,
        "pp": parallel.pp > 1,
        "ep": parallel.ep > 1,
    }
    return tuple(name for name, active in is_active.items() if active)


def _variants(
    pool: ProcessPoolExecutor, layout: ReportLayout, switches: Sequence[str], until: float
) -> dict[str, dict[str, Any]]:
    """Numbers of the layout without each dimension, all of them and, if time permits, some.

    Args:
        pool: of processes that compute them.
        layout: to change; its own entry is empty.
        switches: dimensions that it uses.
        until: time (`time.monotonic`) after which no further combination is started.

    Returns:
        The dimensions that are off, separated by blanks -> numbers.
    """
    combined = [
        off for count in range(1, len(switches) + 1) for off in combinations(switches, count)
    ]
    required = [off for off in combined if len(off) in (1, len(switches))]
    optional = [off for off in combined if off not in required]
    records: dict[tuple[str, ...], dict[str, Any]] = {(): {}}
    records |= zip(required, pool.map(variant, [layout] * len(required), required))
    # Two at a time, one per process, to stop soon after the limit.
    while optional and time.monotonic() < until:
        batch, optional = optional[:2], optional[2:]
        records |= zip(batch, pool.map(variant, [layout] * len(batch), batch))
    return {" ".join(off): record for off, record in records.items()}


def _base_record(layout: ReportLayout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers of the unchanged layout, and its memory over time, from one forecast."""
    moments: list[list[Moment]] = []
    ranks = Forecaster(layout.config, layout.world, layout.target, moments=moments).ranks()
    over_time = memory_over_time(layout.config, layout.world, layout.cluster, ranks, moments)
    return {"off": []} | _numbers(layout.config, layout, ranks), over_time


def zero_stage(layout: ReportLayout, stage: int) -> dict[str, Any]:
    """Numbers of a layout under another ZeRO stage, without its layer."""
    config = changed(layout.config, {"parallel.zero": stage})
    return _without_layer(_checked_numbers(config, layout), stage)


def _without_layer(record: dict[str, Any], stage: int) -> dict[str, Any]:
    return {"stage": stage} | {
        key: value for key, value in record.items() if key not in ("layer", "microbatch", "off")
    }


def variant(layout: ReportLayout, off: Sequence[str]) -> dict[str, Any]:
    """Numbers of a layout with some dimensions switched off."""
    config = layout.config
    for name in off:
        config = changed(config, SWITCHES[name])
    return {"off": list(off)} | _checked_numbers(config, layout)


def _checked_numbers(config: Config, layout: ReportLayout) -> dict[str, Any]:
    """Numbers of a changed configuration, or the reason (`refused`) why it is invalid.

    Raises the global batch (`changed`) if the ranks no longer divide it.
    """
    parallel, train = config.parallel, config.train
    record: dict[str, Any] = {}
    samples = train.mbs * layout.world // (parallel.tp * parallel.cp * parallel.pp)
    if train.gbs % samples:
        gbs = ceil(train.gbs / samples) * samples
        config = changed(config, {"train.gbs": gbs, "train.gbs_ramp": None})
        record["changed"] = f"train.gbs={gbs}"
    if faults := (
        run_checks(config, layout.world, files=False) or pipeline_faults(config, layout.world)
    ):
        return record | {"refused": faults[0].reason}
    ranks = Forecaster(config, layout.world, layout.target).ranks()
    return record | _numbers(config, layout, ranks)


def _numbers(
    config: Config, layout: ReportLayout, ranks: Mapping[int, RankMemory]
) -> dict[str, Any]:
    worst = max(ranks, key=lambda rank: ranks[rank].needed)
    estimator = estimator_on(layout.cluster) if layout.cluster else None
    workloads = estimator.workloads if estimator else workloads_of(layout.target)
    step = {"unknown_time": "step time is not predicted for CPUs"}
    if estimator:
        step = _step(estimator, config, layout.world)
    return {
        "needed_bytes": ranks[worst].needed,
        "worst_rank": worst,
        "moment": ranks[worst].moment,
        "memory": [ranks[rank].kinds() for rank in sorted(ranks)],
        **step,
        "layer": layer_record(config, workloads),
        "microbatch": microbatch_record(
            config, layout.world, estimator.workloads if estimator else workloads_of(Target())
        )
        | _sizes_and_grids(config, layout.world),
    }


def _step(estimator: Estimator, config: Config, world: int) -> dict[str, Any]:
    try:
        return estimator.step(config, world).record()
    except ValueError as error:
        return {"unknown_time": str(error)}


def grid_record(grid: Grid) -> dict[str, Any]:
    """Axes of a grid, slowest first, and its ranks in order; None = rank i at position i."""
    in_order = grid.ranks == tuple(range(len(grid.ranks)))
    axes = [{"name": name, "size": size} for name, size in zip(grid.names, grid.sizes)]
    return {"axes": axes, "ranks": None if in_order else list(grid.ranks)}


def _device(cluster: Cluster | None) -> dict[str, Any]:
    if cluster is None:
        return {"name": "CPU", "node": 8}
    return {
        key: value for key, value in asdict(cluster).items() if isinstance(value, (int, float, str))
    }


def _model(config: Config) -> dict[str, Any]:
    model, train = config.model, config.train
    return {
        "name": model.name or "custom",
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_experts": model.num_experts,
        "seq_len": train.seq_len,
        "mbs": train.mbs,
        "gbs": train.gbs,
        "dtype": config.precision.dtype,
        "fp8": config.precision.fp8,
        "recompute": config.recompute.mode,
    }

"""Numbers of a layout for a report: memory, step time, layer, grid and pipeline.

Variants without each parallel dimension are compared with the layout. The numbers come from the
planner, the schedule simulator, and a layer that runs on the meta device.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations
from math import ceil
from typing import Any

from tqdm import tqdm

from megatron5d.config.checks import run_checks
from megatron5d.config.convert import Change, changed
from megatron5d.config.schema import Config
from megatron5d.planning.clusters import Cluster
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.peak import Moment
from megatron5d.planning.memory.rank_memory import RankMemory
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults, quick_layout
from megatron5d.planning.time.predict import bytes_on, check_predictable
from megatron5d.tools.report.headline import KIND_NAMES, headline, toggles
from megatron5d.tools.report.layer import key_of, layer_record, name_cuts
from megatron5d.tools.report.microbatch import microbatch_record
from megatron5d.tools.report.timeline import (
    StepSimulator,
    estimator_on,
    memory_over_time,
    pipeline_record,
    timeline_record,
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
MAX_VARIANT_SLOTS = 12_000  # of the timelines of all variants of a layout


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
    name_cuts(variants, switches)
    units: list[dict[str, Any]] = []  # of all variants, most of which share them
    for microbatch in (record["microbatch"] for record in variants.values() if "layer" in record):
        units += [unit for unit in microbatch["units"] if unit not in units]
        microbatch["units"] = list(map(units.index, microbatch["units"]))
    for record in variants.values():
        if timelines and record.get("pipeline") and _same_step(record["pipeline"], timelines[0]):
            record["pipeline"] = 0
    _write_headlines(layout, variants, switches, zero_stages, timelines)
    return {
        "name": layout.name,
        "sentence": variants[""]["sentence"],
        "world": world,
        "device": _device(cluster),
        "free_messages": not StepSimulator(world, cluster).knows_messages(config),
        "model": _model(config),
        "switches": list(switches),
        "variants": variants,
        "units": units,
        "zero_stages": zero_stages,
        "pipeline": timelines,
        "memory_over_time": over_time,
        **_sizes_and_grids(config, world),
    }


def _same_step(first: dict[str, Any], second: dict[str, Any]) -> bool:
    names = ("name", "num_microbatches", "step_time", "bubble_by_cause")
    return all(first[name] == second[name] for name in names)


def _write_headlines(
    layout: ReportLayout,
    variants: dict[str, dict[str, Any]],
    switches: Sequence[str],
    zero_stages: Sequence[dict[str, Any]],
    timelines: Sequence[dict[str, Any]],
) -> None:
    """Adds `sentence` to each variant; only the layout itself may change its ZeRO stage."""
    capacity = layout.cluster.memory_bytes if layout.cluster else None
    for key, record in variants.items():
        changes = dict(toggles(variants, switches, key.split()))
        if not key:
            own = layout.config.parallel.zero
            changes |= {
                f"set parallel.zero={stage}": zero_stages[stage]
                for stage in range(1, 4)
                if stage != own
            }
        numbers = record
        if record.get("pipeline") == 0:
            numbers = record | {"pipeline": timelines[0]}
        record["sentence"] = headline(layout.config, numbers, changes, capacity)


def _forecasts(
    layout: ReportLayout, switches: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Runs the forecasts in two processes: variants, ZeRO stages, timelines, memory over time."""
    # Of the ZeRO stages, the layout's own and (by switching ZeRO off) stage 0 are variants.
    variant_of_stage = {0: "zero"} if "zero" in switches else {}
    variant_of_stage |= {layout.config.parallel.zero: ""}
    # Variants that cut the tensors alike share traces: one process gets them all.
    divides = next((name for name in ("tp", "cp", "ep") if name in switches), None)
    with _worker() as first, _worker() as second:
        base = first.submit(_base_record, layout)
        pending: dict[str, Future[dict[str, Any]]] = {
            key_of(off): (second if divides in off else first).submit(variant, layout, off)
            for off in _combinations(switches)
        }
        stages: dict[int, Future[dict[str, Any]]] = {
            stage: first.submit(zero_stage, layout, stage)
            for stage in range(4)
            if stage not in variant_of_stage
        }
        timelines = first.submit(_timelines, layout)
        bar = tqdm(pending.items(), desc="combinations of dimensions", leave=False, disable=None)
        variants = {key: future.result() for key, future in bar}
        numbers, over_time = base.result()
    variants = {"": numbers} | variants
    zero_stages = [
        stages[stage].result()
        if stage in stages
        else _without_layer(variants[variant_of_stage[stage]], stage)
        for stage in range(4)
    ]
    return variants, zero_stages, timelines.result(), over_time


def _worker() -> ProcessPoolExecutor:
    # On Ctrl-C the workers end without a traceback; the parent reports the interrupt.
    return ProcessPoolExecutor(
        1, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)
    )


def _combinations(switches: Sequence[str]) -> list[tuple[str, ...]]:
    """All sets of dimensions that can be off but the empty one; tp takes sp along."""
    return [
        off
        for count in range(1, len(switches) + 1)
        for off in combinations(switches, count)
        if not {"tp", "sp"} <= {*off}
    ]


def _timelines(layout: ReportLayout) -> list[dict[str, Any]]:
    return pipeline_record(StepSimulator(layout.world, layout.cluster), layout.config)


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
                name = KIND_NAMES.get(kind, kind)
                sentences.append(f"{name}: {change:+.0%} of the first layout's step")
    return sentences


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


def _base_record(layout: ReportLayout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers of the unchanged layout, and its memory over time, from one forecast."""
    moments: list[list[Moment]] = []
    ranks = Forecaster(layout.config, layout.world, layout.target, moments=moments).ranks()
    simulator = StepSimulator(layout.world, layout.cluster)
    over_time = memory_over_time(simulator, layout.config, ranks, moments)
    return {"off": []} | _numbers(layout.config, layout, ranks), over_time


def zero_stage(layout: ReportLayout, stage: int) -> dict[str, Any]:
    """Numbers of a layout under another ZeRO stage, without its layer."""
    config = changed(layout.config, {"parallel.zero": stage})
    return _without_layer(_checked_numbers(config, layout), stage)


def _without_layer(record: dict[str, Any], stage: int) -> dict[str, Any]:
    left_out = ("layer", "microbatch", "off", "pipeline")
    return {"stage": stage} | {key: record[key] for key in record if key not in left_out}


def variant(layout: ReportLayout, off: Sequence[str]) -> dict[str, Any]:
    """Numbers of a layout with some dimensions switched off."""
    config = layout.config
    for name in off:
        config = changed(config, SWITCHES[name])
    implied = ["sp"] if "tp" in off and "sp" not in off and layout.config.parallel.sp else []
    return {"off": [*off, *implied]} | _checked_numbers(config, layout)


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
    workloads, balanced = workloads_of(layout.target), workloads_of(Target())
    if layout.cluster:
        workloads = balanced = estimator_on(layout.cluster).workloads
    return {
        "needed_bytes": ranks[worst].needed,
        "worst_rank": worst,
        "moment": ranks[worst].moment,
        "memory": [ranks[rank].kinds() for rank in sorted(ranks)],
        "gbs": config.train.gbs,
        **_step(config, layout),
        "layer": layer_record(config, workloads),
        "microbatch": microbatch_record(config, layout.world, balanced)
        | _sizes_and_grids(config, layout.world),
    }


def _step(config: Config, layout: ReportLayout) -> dict[str, Any]:
    """Time of a step, bytes sent, and the timeline, with slots if the page has room for them."""
    simulator, world = StepSimulator(layout.world, layout.cluster), layout.world
    record: dict[str, Any] = {"unknown_time": "step time is not predicted for CPUs"}
    if layout.cluster:
        try:
            check_predictable(config)
        except ValueError as error:
            record = {"unknown_time": str(error)}
    if config.parallel.pp > 1 or simulator.predicts(config):
        step = simulator.step(config)
        if step.cost:
            record = step.cost.record()
        if config.parallel.pp > 1:
            num_variants = 2 ** len(_active_dimensions(layout.config))
            max_slots = MAX_VARIANT_SLOTS // num_variants
            record["pipeline"] = timeline_record(config.pipeline.schedule, step, max_slots)
    if "sent_bytes" not in record:
        sent_by_rank = bytes_on(config, world, quick_layout(config, world), workloads_of(Target()))
        record["sent_bytes"] = [dict(sent) for sent in sent_by_rank]
    return record


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

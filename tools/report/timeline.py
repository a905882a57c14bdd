"""Simulated steps of a pipeline, slot by slot, under the schedule of the run and all named ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from megatron5d.config.checks import run_checks
from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import Program
from megatron5d.pipeline_parallel.registry import schedule_names
from megatron5d.pipeline_parallel.simulate import Simulation, activations_by_slot, simulate
from megatron5d.planning.clusters import Cluster
from megatron5d.planning.memory.forecast import Target
from megatron5d.planning.memory.peak import Moment
from megatron5d.planning.memory.rank_memory import Peak, RankMemory
from megatron5d.planning.schedule_search.auto_schedule import quick_layout
from megatron5d.planning.schedule_search.stage_costs import run_costs
from megatron5d.planning.time.predict import Estimator
from megatron5d.planning.time.workload import Workloads
from megatron5d.train.pipeline_layout import micro_batch_counts

MAX_SLOTS = 40_000  # of all timelines of a page, to keep it below 2 MB
MAX_MOMENTS = 6_000  # of memory over time, of all pipeline ranks together
PERSISTENT = (
    "weights",
    "gradients",
    "optimizer",
    "buffers",
    "inputs",
    "library",
    "margin",
    "symmetric",
    "outside",
)
TEMPORARY = ("activations", "stash", "messages", "units", "workspace")
TICKS = 100_000  # per makespan, so that times of slots are integers


def pipeline_record(config: Config, world: int, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Timelines of the run's schedule and of every named schedule that its layout allows.

    Args:
        config: of the run.
        world: number of ranks.
        cluster: device and network. If no time is predicted (None, fp32), the forward of a stage
            takes one unit.

    Returns:
        One entry per schedule, the run's own first: `name`, `bubble` and `makespan` of the
        pipeline, `idle` by rank, `num_microbatches`, and, up to MAX_SLOTS in all, `slots`
        (`slots_of`) and `held_bytes` by rank.
    """
    if config.parallel.pp == 1:
        return []
    simulator = StepSimulator(config, world, cluster)
    records: list[dict[str, Any]] = []
    slots_left = MAX_SLOTS
    for name in dict.fromkeys([config.pipeline.schedule, *schedule_names()]):
        other = replace(config, pipeline=replace(config.pipeline, schedule=name))
        if records and run_checks(other, world, files=False):
            continue
        try:
            program, costs, simulation = simulator.step(other)
        except ValueError:  # the schedule does not allow the layout
            continue
        records.append(_record(name, program, simulation, simulator.in_seconds))
        count = len(program.table.slot_start) - 1
        if count <= slots_left:
            slots_left -= count
            activations = activations_by_slot(program, costs).astype(int)
            edges = program.table.rank_start.tolist()
            records[-1] |= {
                "slots": slots_of(program, simulation),
                "held_bytes": [activations[a:b].tolist() for a, b in pairwise(edges)],
            }
    return records


def memory_over_time(
    config: Config,
    world: int,
    cluster: Cluster | None,
    ranks: Mapping[int, RankMemory],
    moments: list[list[Moment]],
) -> dict[str, Any]:
    """Memory of every pipeline rank over a step: bytes from the forecast, times from the simulator.

    Args:
        config, world, cluster: as in `pipeline_record`.
        ranks, moments: of the forecast.

    Returns:
        `in_seconds`, `makespan`, and `ranks`, with for each rank `staying` (kind -> bytes during
        the whole step), `end_of_step` (temporary bytes after the passes), `start` and `end` of its
        spans in ticks, and `passing`: kind -> bytes at the peak of each span. A span is a slot, or
        the time from its end until the next one; above MAX_MOMENTS, neighboring spans are merged.
    """
    simulator = StepSimulator(config, world, cluster)
    program, _, simulation = simulator.step(config)
    times = _in_ticks(simulation)
    size = -(-2 * len(times) // MAX_MOMENTS)
    records = [
        _rank_record(rank, rank_moments, times[first:stop].ravel().tolist(), size)
        for rank, rank_moments, (first, stop) in zip(
            ranks.values(), moments, pairwise(program.table.rank_start.tolist())
        )
    ]
    return {
        "in_seconds": simulator.in_seconds,
        "makespan": simulation.makespan,
        "ranks": records,
    }


def _in_ticks(simulation: Simulation) -> np.ndarray:
    """Start and end of every slot in ticks: integers [slots, 2]."""
    scale = TICKS / simulation.makespan if simulation.makespan else 0.0
    return np.rint(scale * np.stack([simulation.start, simulation.end], 1)).astype(int)


def _rank_record(
    rank: RankMemory, moments: list[Moment], bounds: list[int], size: int
) -> dict[str, Any]:
    """Memory of one rank over time; `size` neighboring spans share one peak."""
    groups = [moments[first : first + size] for first in range(0, len(moments), size)]
    peaks = [_by_kind(max(group, key=lambda moment: moment.total).by_kind()) for group in groups]
    passing = {kind: [peak[kind] for peak in peaks] for kind in TEMPORARY}
    return {
        "staying": {kind: value for kind in PERSISTENT if (value := getattr(rank, kind))},
        "end_of_step": rank.end_of_step,
        "start": bounds[::size],
        "end": [*bounds[size::size], TICKS],
        "passing": {kind: values for kind, values in passing.items() if any(values)},
    }


def _by_kind(peak: Peak) -> dict[str, int]:
    return vars(peak) | {"activations": sum(peak.activations.values())}


# Cached because the layouts of a report share their traces.
workloads_of, estimator_on = cache(Workloads), cache(Estimator)


class StepSimulator:
    """Simulates steps of one model under any schedule.

    Args:
        config, world, cluster: as in `pipeline_record`.
    """

    def __init__(self, config: Config, world: int, cluster: Cluster | None) -> None:
        self.world = world
        self.in_seconds = cluster is not None and config.precision.dtype == "bf16"
        self._estimator = estimator_on(cluster) if cluster is not None and self.in_seconds else None
        self._workloads = workloads_of(Target(cluster.architecture if cluster else None))

    def step(self, config: Config) -> tuple[Program, StageCosts, Simulation]:
        """Program of a step, the time and kept bytes of its passes, and its simulation."""
        if self._estimator is not None:
            cost = self._estimator.step(config, self.world)
            return cost.program, cost.costs, cost.simulation
        layout = quick_layout(config, self.world)
        program = layout.program_of(micro_batch_counts(config, self.world)[-1])
        assigned = replace(config, pipeline=replace(config.pipeline, layout=list(layout.layers)))
        stages = self._workloads.stages(config, layout)
        kept_bytes = np.array(
            [sum(unit.passes["F"].kept_bytes for unit in units) for units in stages]
        )
        costs = replace(run_costs(assigned).of(program.placement), activation=kept_bytes)
        return program, costs, simulate(program, costs)


def _record(
    name: str, program: Program, simulation: Simulation, in_seconds: bool
) -> dict[str, Any]:
    lengths = simulation.end - simulation.start
    busy = [float(lengths[a:b].sum()) for a, b in pairwise(program.table.rank_start)]
    return {
        "name": name,
        "num_microbatches": program.num_microbatches,
        "num_stages": program.num_stages,
        "copies": program.copies,
        "in_seconds": in_seconds,
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "idle": [simulation.makespan - time for time in busy],
    }


def slots_of(program: Program, simulation: Simulation) -> list[list[list[Any]]]:
    """Slots of every rank as [start, length, action, second action of an overlapped pair].

    Times are in ticks.
    """
    times = iter(_in_ticks(simulation).tolist())
    return [
        [
            [start, end - start, *(f"{op}{stage}.{microbatch}" for op, stage, microbatch in slot)]
            for slot, (start, end) in zip(line, times)
        ]
        for line in program.ranks
    ]

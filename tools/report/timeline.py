"""Simulated steps of a pipeline, slot by slot, under the schedule of the run and all named ones.

The bubble is the time in which pipeline ranks run no pass, as a share of the step: the mean over
the ranks, which is the idle area of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from megatron5d.planning.schedule_search.stage_costs import costs_are_known, run_costs
from megatron5d.planning.time.predict import Estimator
from megatron5d.planning.time.step_time import StepCost
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


def pipeline_record(simulator: StepSimulator, config: Config) -> list[dict[str, Any]]:
    """Timelines of the run's schedule and of every named schedule that its layout allows.

    Args:
        simulator: of the run's ranks.
        config: of the run.

    Returns:
        `timeline_record` of each schedule, the run's own first, with slots up to MAX_SLOTS in all.
    """
    if config.parallel.pp == 1:
        return []
    records: list[dict[str, Any]] = []
    slots_left = MAX_SLOTS
    for name in dict.fromkeys([config.pipeline.schedule, *schedule_names()]):
        other = replace(config, pipeline=replace(config.pipeline, schedule=name))
        if records and run_checks(other, simulator.world, files=False):
            continue
        try:
            step = simulator.step(other)
        except ValueError:  # the schedule does not allow the layout
            continue
        records.append(timeline_record(name, step, slots_left))
        slots_left -= sum(map(len, records[-1].get("slots", [])))
    return records


def timeline_record(name: str, step: SimulatedStep, max_slots: int) -> dict[str, Any]:
    """A step of one schedule.

    Returns:
        `makespan` and `step_time` (with the update, where times are predicted); `bubble`, its share
        of the step, and `bubble_by_cause`; `idle` by rank; `busiest`, the rank whose seconds the
        planner lists; and, unless there are more than `max_slots`, `slots` (`slots_of`) and
        `held_bytes` by rank.
    """
    program, simulation = step.program, step.simulation
    step_time = step.cost.step_s if step.cost else simulation.makespan
    by_cause = bubble_by_cause(step)
    record = {
        "name": name,
        "num_microbatches": program.num_microbatches,
        "num_stages": program.num_stages,
        "copies": program.copies,
        "in_seconds": step.cost is not None,
        "makespan": simulation.makespan,
        "step_time": step_time,
        "bubble": sum(by_cause.values()) / step_time,
        "bubble_by_cause": by_cause,
        "busiest": int(simulation.work.argmax()),
        "idle": (simulation.makespan - _busy(step)).tolist(),
    }
    if len(program.table.slot_start) - 1 <= max_slots:
        activations = activations_by_slot(program, step.costs).astype(int)
        edges = program.table.rank_start.tolist()
        record |= {
            "slots": slots_of(program, simulation),
            "held_bytes": [activations[a:b].tolist() for a, b in pairwise(edges)],
        }
    return record


def bubble_by_cause(step: SimulatedStep) -> dict[str, float]:
    """Mean idle time of the pipeline ranks by cause, in the unit of the costs.

    Messages: what the makespan loses if they take no time. Imbalance: the passes of the busiest
    rank minus those of an average one. Warm-up and drain: the remainder.
    """
    busy, simulation = _busy(step), step.simulation
    busiest = float(busy.max())
    free = replace(step.costs, comm=0.0 * step.costs.comm)
    makespan = simulate(step.program, free).makespan
    return {
        "warm-up and drain": max(0.0, makespan - busiest),  # rounding may make it negative
        "messages": simulation.makespan - makespan,
        "imbalance": busiest - float(busy.mean()),
    }


def _busy(step: SimulatedStep) -> np.ndarray:
    """`[num_ranks]` time in which a rank runs passes."""
    lengths = step.simulation.end - step.simulation.start
    return np.add.reduceat(lengths, step.program.table.rank_start[:-1])


def memory_over_time(
    simulator: StepSimulator,
    config: Config,
    ranks: Mapping[int, RankMemory],
    moments: list[list[Moment]],
) -> dict[str, Any]:
    """Memory of every pipeline rank over a step: bytes from the forecast, times from the simulator.

    Args:
        simulator, config: as in `pipeline_record`.
        ranks, moments: of the forecast.

    Returns:
        `in_seconds`, `makespan`, and `ranks`, with for each rank `staying` (kind -> bytes during
        the whole step), `end_of_step` (temporary bytes after the passes), `start` and `end` of its
        spans in ticks, and `passing`: kind -> bytes at the peak of each span. A span is a slot, or
        the time from its end until the next one; above MAX_MOMENTS, neighboring spans are merged.
    """
    step = simulator.step(config)
    times = _in_ticks(step.simulation)
    size = -(-2 * len(times) // MAX_MOMENTS)
    records = [
        _rank_record(rank, rank_moments, times[first:stop].ravel().tolist(), size)
        for rank, rank_moments, (first, stop) in zip(
            ranks.values(), moments, pairwise(step.program.table.rank_start.tolist())
        )
    ]
    return {
        "in_seconds": step.cost is not None,
        "makespan": step.simulation.makespan,
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


@dataclass(frozen=True)
class SimulatedStep:
    """A step of a Program, with the time and the kept bytes of its passes."""

    program: Program
    costs: StageCosts
    simulation: Simulation
    cost: StepCost | None  # None = times are not predicted: a forward of a stage takes one unit


class StepSimulator:
    """Simulates steps of one model under any layout and schedule.

    Args:
        world: number of ranks.
        cluster: device and network; None = CPUs.
    """

    def __init__(self, world: int, cluster: Cluster | None) -> None:
        self.world = world
        self._estimator = estimator_on(cluster) if cluster is not None else None
        self._workloads = workloads_of(Target(cluster.architecture if cluster else None))

    def predicts(self, config: Config) -> bool:
        """Whether the steps of a configuration are predicted in seconds."""
        return self._estimator is not None and config.precision.dtype == "bf16"

    def knows_messages(self, config: Config) -> bool:
        """Whether messages take time; without a device whose links are known they are free."""
        return costs_are_known(config, "cuda" if self._estimator else "cpu")

    def step(self, config: Config) -> SimulatedStep:
        """A step of a valid configuration.

        Raises:
            ValueError: the schedule does not allow the layout.
        """
        if self._estimator is not None and self.predicts(config):
            cost = self._estimator.step(config, self.world)
            return SimulatedStep(cost.program, cost.costs, cost.simulation, cost)
        layout = quick_layout(config, self.world)
        program = layout.program_of(micro_batch_counts(config, self.world)[-1])
        assigned = replace(config, pipeline=replace(config.pipeline, layout=list(layout.layers)))
        if not self.knows_messages(config):
            free = replace(assigned.pipeline, flops_per_byte=0.0)
            assigned = replace(assigned, pipeline=free)
        stages = self._workloads.stages(config, layout)
        kept_bytes = np.array(
            [sum(unit.passes["F"].kept_bytes for unit in units) for units in stages]
        )
        costs = replace(run_costs(assigned).of(program.placement), activation=kept_bytes)
        return SimulatedStep(program, costs, simulate(program, costs), None)


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

"""The pipeline's step slot by slot, as the simulator times it, under the run's schedule and the
other named ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
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

MOST_SLOTS = 40_000  # of all timelines of a page together: it stays below 2 MB
MOST_MOMENTS = 6_000  # of memory over time, of all pipeline ranks together
STAYING = (
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
PASSING = ("activations", "stash", "messages", "units", "workspace")
TICKS = 100_000  # a makespan; times of slots are integers


def pipeline_record(config: Config, world: int, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Returns the timelines of a run's schedule and of every named schedule that its layout admits.

    Args:
        cluster: device and network. Where no time is predicted (None, fp32) a forward of one stage
            takes one unit.

    Returns:
        One entry a schedule, the run's own first: `name`, `bubble` and `makespan` of the pipeline,
        `idle` by rank, `num_microbatches`, and, as long as the page has room, `slots` (`slots_of`)
        and `held_bytes` by rank.
    """
    if config.parallel.pp == 1:
        return []
    timed = Timed(config, world, cluster)
    records: list[dict[str, Any]] = []
    room = MOST_SLOTS
    for name in dict.fromkeys([config.pipeline.schedule, *schedule_names()]):
        other = replace(config, pipeline=replace(config.pipeline, schedule=name))
        if records and run_checks(other, world, files=False):
            continue
        try:
            program, costs, found = timed.step(other)
        except ValueError:  # a schedule that does not admit the layout; the run's own does
            continue
        records.append(_record(name, program, found, timed.in_seconds))
        count = len(program.table.slot_start) - 1
        if count <= room:
            room -= count
            held = activations_by_slot(program, costs)
            edges = program.table.rank_start.tolist()
            records[-1] |= {
                "slots": slots_of(program, found),
                "held_bytes": [held[a:b].astype(int).tolist() for a, b in zip(edges, edges[1:])],
            }
    return records


def memory_over_time(
    config: Config,
    world: int,
    cluster: Cluster | None,
    ranks: Mapping[int, RankMemory],
    walked: list[list[Moment]],
) -> dict[str, Any]:
    """Returns what every pipeline rank needs over a step, as the forecast walks through it, in the
    simulator's time.

    Args:
        config, world, cluster: as in `pipeline_record`.
        ranks, walked: of the forecast, and its moments.

    Returns:
        `in_seconds`, `makespan`, and `ranks`: of each `staying` (kind -> bytes all the time),
        `end_of_step` (temporary bytes after the passes), `start` and `end` of its spans in ticks,
        and `passing`: kind -> bytes at the worst moment of each span. A span is a slot, or what is
        held from its end until the next; many are merged where the page has no room.
    """
    timed = Timed(config, world, cluster)
    program, _, found = timed.step(config)
    edges = program.table.rank_start.tolist()
    scale = TICKS / found.makespan if found.makespan else 0.0
    size = -(-2 * len(found.start) // MOST_MOMENTS)
    records = []
    for rank, moments, first, stop in zip(ranks.values(), walked, edges, edges[1:]):
        bounds = (
            np.rint(scale * np.stack([found.start[first:stop], found.end[first:stop]], 1))
            .astype(int)
            .ravel()
        )
        bounds = np.append(bounds, TICKS).tolist()
        groups = [moments[place : place + size] for place in range(0, len(moments), size)]
        worst = [
            _by_kind(max(group, key=lambda moment: moment.total).by_kind()) for group in groups
        ]
        records.append(
            {
                "staying": {kind: value for kind in STAYING if (value := getattr(rank, kind))},
                "end_of_step": rank.end_of_step,
                "start": bounds[:-1:size],
                "end": [*bounds[size:-1:size], TICKS],
                "passing": {
                    kind: values
                    for kind in PASSING
                    if any(values := [each[kind] for each in worst])
                },
            }
        )
    return {"in_seconds": timed.in_seconds, "makespan": found.makespan, "ranks": records}


def _by_kind(moment: Peak) -> dict[str, int]:
    return vars(moment) | {"activations": sum(moment.activations.values())}


# layouts of a report share what is traced
workloads_of, estimator_on = cache(Workloads), cache(Estimator)


class Timed:
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
        """Returns the Program of a step, what its passes cost and keep in bytes, and its
        simulation."""
        if self._estimator is not None:
            cost = self._estimator.step(config, self.world)
            return cost.program, cost.costs, cost.simulation
        layout = quick_layout(config, self.world)
        program = layout.program_of(micro_batch_counts(config, self.world)[-1])
        dealt = replace(config, pipeline=replace(config.pipeline, layout=list(layout.layers)))
        stages = self._workloads.stages(config, layout)
        kept = np.array([sum(unit.passes["F"].kept_bytes for unit in units) for units in stages])
        costs = replace(run_costs(dealt).of(program.placement), activation=kept)
        return program, costs, simulate(program, costs)


def _record(name: str, program: Program, found: Simulation, in_seconds: bool) -> dict[str, Any]:
    edges = program.table.rank_start
    busy = [float((found.end[a:b] - found.start[a:b]).sum()) for a, b in zip(edges, edges[1:])]
    return {
        "name": name,
        "num_microbatches": program.num_microbatches,
        "num_stages": program.num_stages,
        "copies": program.copies,
        "in_seconds": in_seconds,
        "makespan": found.makespan,
        "bubble": found.bubble,
        "idle": [found.makespan - each for each in busy],
    }


def slots_of(program: Program, found: Simulation) -> list[list[list[Any]]]:
    """Returns for every rank its slots as [start, length, action, second action of an overlapped
    pair], in ticks."""
    scale = TICKS / found.makespan if found.makespan else 0.0
    start, end = (
        np.rint(found.start * scale).astype(int).tolist(),
        np.rint(found.end * scale).astype(int).tolist(),
    )
    edges = program.table.rank_start.tolist()
    return [
        [
            [
                start[index],
                end[index] - start[index],
                *(f"{op}{stage}.{microbatch}" for op, stage, microbatch in slot),
            ]
            for slot, index in zip(line, range(first, stop))
        ]
        for line, first, stop in zip(program.ranks, edges, edges[1:])
    ]

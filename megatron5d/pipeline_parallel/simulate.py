"""How long a Program takes and what it holds: one pass over its actions in order of dependencies.

A plain action takes its compute plus its own all-to-all. Two overlapped actions start together, end
together, and take max(sum of computes, sum of all-to-alls, the longer of the two by itself). A
message delays the stage that waits for it and occupies no rank; between stages of one rank it costs
nothing. A rank runs its slots in program order.
"""

from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import OPS, B, F, I, Placement, Program, W


@dataclass(frozen=True)
class Simulation:
    """What one step of a Program costs; times in the unit of the costs, per rank where an array."""

    makespan: float  # from the first action's start to the last one's end
    overhead: float  # makespan − the compute of the busiest rank
    bubble: float  # overhead / makespan
    work: np.ndarray  # `[num_ranks]` compute without all-to-alls and without waiting
    # `[num_ranks]` time in which a rank's compute stood still for an all-to-all
    exposed_a2a: np.ndarray
    # `[num_ranks]` time in which a rank waited for a message in flight
    exposed_p2p: np.ndarray
    peak_activations: np.ndarray  # `[num_ranks]` in micro-batches of one rank's layers
    # `[num_ranks]` peak memory of deferred weight gradients, in the same unit
    peak_stash: np.ndarray
    start: np.ndarray  # `[num_slots]` start of every slot, in the order of `Program.table`
    end: np.ndarray  # `[num_slots]` end of every slot


def simulate(program: Program, costs: Costs | StageCosts) -> Simulation:
    """Simulates a Program under the given costs.

    Args:
        program: a complete Program; `verify` explains what is wrong with an incomplete one.
        costs: of an even split, or of every stage.

    Raises:
        ValueError: an action waits for one that never runs, or that runs only after it.
    """
    stage_costs = costs.of(program.placement) if isinstance(costs, Costs) else costs
    duration, compute = _slot_times(program, stage_costs)
    timeline = _Timeline(program, duration, stage_costs.comm)
    if timeline.stuck:
        waits = "; ".join(
            f"rank {rank} waits forever at position {position}"
            for rank, (position, _) in list(timeline.stuck.items())[:4]
        )
        raise ValueError(f"{program.name} never ends: {waits}; `verify` explains why")
    edges = program.table.rank_start
    work = _per_rank(compute, edges)
    makespan = max(timeline.end, default=0.0)
    overhead = makespan - float(work.max())
    memory = peak_memory(program, stage_costs)
    return Simulation(
        makespan=makespan,
        overhead=overhead,
        bubble=overhead / makespan if makespan else 0.0,
        work=work,
        exposed_a2a=_per_rank(duration - compute, edges),
        exposed_p2p=_per_rank(np.array(timeline.waited), edges),
        peak_activations=memory.peak_activations,
        peak_stash=memory.peak_stash,
        start=np.array(timeline.start),
        end=np.array(timeline.end),
    )


def idle_fractions(program: Program, simulation: Simulation) -> list[float]:
    """Idle fraction of each rank until its last action.

    That is the part of its bubble a rank can measure: once done, it does not see the other ranks'
    last actions.
    """
    fractions = []
    for first, stop in _spans(program.table.rank_start):
        busy = float((simulation.end[first:stop] - simulation.start[first:stop]).sum())
        last = float(simulation.end[first:stop].max(initial=0.0))
        fractions.append(1 - busy / last if last else 0.0)
    return fractions


def _slot_times(program: Program, costs: StageCosts) -> tuple[np.ndarray, np.ndarray]:
    """`[num_slots]` duration of every slot, and `[num_slots]` the compute in it."""
    table = program.table
    compute = costs.compute[table.op, table.stage]
    a2a = costs.a2a[table.op, table.stage]
    first = table.slot_start[:-1]
    if not len(first):
        return np.zeros(0), np.zeros(0)
    total = np.add.reduceat(compute, first)
    duration = np.maximum(total, np.add.reduceat(a2a, first))
    return np.maximum(duration, np.maximum.reduceat(compute + a2a, first)), total


class PeakMemory(NamedTuple):
    """The most that each rank holds at once, in micro-batches of one rank's layers."""

    peak_activations: np.ndarray  # `[num_ranks]` from F until W or B has run
    peak_stash: np.ndarray  # `[num_ranks]` of deferred weight gradients, from I until W has run


def peak_memory(program: Program, costs: StageCosts) -> PeakMemory:
    """Peaks of activations and of stashes, which follow from the order of each rank alone."""
    spans = _spans(program.table.rank_start)
    by_slot = activations_by_slot(program, costs), stash_by_slot(program, costs)
    return PeakMemory(
        *(np.array([memory[a:b].max(initial=0.0) for a, b in spans]) for memory in by_slot)
    )


def activations_by_slot(program: Program, costs: StageCosts) -> np.ndarray:
    """`[num_slots]` activations of a rank during each of its slots, from F until W or B has run."""
    return _memory_by_slot(program, costs.activation, (F,), (W, B))


def stash_by_slot(program: Program, costs: StageCosts) -> np.ndarray:
    """`[num_slots]` memory of a rank's deferred weight gradients, from I until W has run."""
    return _memory_by_slot(program, costs.stash, (I,), (W,))


def _memory_by_slot(
    program: Program, stage_size: np.ndarray, allocating: tuple[int, ...], freeing: tuple[int, ...]
) -> np.ndarray:
    """`[num_slots]` memory during each slot, which allocates at its start and frees at its end."""
    table = program.table
    num_slots, slot = len(table.slot_start) - 1, table.slot
    size = stage_size[table.stage]
    allocated, freed = (
        np.bincount(slot, np.where(np.isin(table.op, ops), size, 0.0), minlength=num_slots)
        for ops in (allocating, freeing)
    )
    memory = np.zeros(num_slots)
    for first, stop in _spans(table.rank_start):
        memory[first:stop] = np.cumsum(allocated[first:stop])
        memory[first + 1 : stop] -= np.cumsum(freed[first:stop])[:-1]
    return memory


def peak_between_slots(
    program: Program, activation: np.ndarray, stash: np.ndarray | float = 0.0
) -> np.ndarray:
    """`[num_ranks]` peak of a rank's activations between two slots, from F until I or B has run.

    It is less than the peak of `activations_by_slot` where a slot's actions overlap: while one
    allocates activations, the other frees its own.

    Args:
        program: a complete Program.
        activation: `[num_stages]` what a micro-batch keeps of a stage.
        stash: `[num_stages]` what of it stays from I until W has run.
    """
    table, changes = program.table, np.zeros((len(OPS), program.num_stages))
    changes[F], changes[B] = activation, -activation
    changes[I], changes[W] = stash - activation, -stash
    change = np.bincount(
        table.slot, changes[table.op, table.stage], minlength=len(table.slot_start) - 1
    )
    return np.array(
        [change[first:stop].cumsum().max(initial=0.0) for first, stop in _spans(table.rank_start)]
    )


def lower_bound(
    placement: Placement, costs: Costs | StageCosts, num_microbatches: int, memory: float
) -> float:
    """An overhead below which no Program of this placement gets with `memory` activations per rank.

    A rank idles until its first forward can have arrived, and again until its first backward can
    have: before that it can only run the forwards that memory admits.

    Args:
        placement: of the stages.
        costs: of an even split, or of every stage.
        num_microbatches: of one step, over both directions.
        memory: peak activations in micro-batches of one rank's layers.
    """
    stage_costs = costs.of(placement) if isinstance(costs, Costs) else costs
    starts = _earliest_starts(placement, stage_costs)
    per_copy = num_microbatches / placement.copies
    work = np.zeros(placement.num_ranks)
    idle = np.full(placement.num_ranks, np.inf)
    for rank in range(placement.num_ranks):
        chunks = placement.stages_of(rank)
        stages = [stage for _, stage in chunks]
        work[rank] = sum(stage_costs.compute[[F, B], stage].sum() for stage in stages) * per_copy
        first_forward = min(starts[direction][0][stage] for direction, stage in chunks)
        first_backward = min(starts[direction][1][stage] for direction, stage in chunks)
        admitted = _admitted_forwards(stage_costs, stages, per_copy, memory)
        idle[rank] = max(first_forward, first_backward - admitted)
    return float((work + idle).max() - work.max())


def _admitted_forwards(
    costs: StageCosts, stages: list[int], per_stage: float, memory: float
) -> float:
    """The most compute of forwards that a rank's memory admits before its first backward.

    Stages with little memory per compute go first.
    """
    admitted, size, compute = 0.0, costs.activation, costs.compute[F]
    for stage in sorted(stages, key=lambda stage: size[stage] / max(compute[stage], 1e-12)):
        count = min(per_stage, memory / size[stage]) if size[stage] else per_stage
        admitted, memory = admitted + count * float(compute[stage]), memory - count * size[stage]
    return admitted


def _earliest_starts(
    placement: Placement, costs: StageCosts
) -> list[tuple[np.ndarray, np.ndarray]]:
    """`[num_stages]` earliest start of a forward and of a backward, for each direction."""
    plain = costs.plain()
    starts = []
    for route in placement.route:
        hops = np.where(np.diff(route) != 0, np.broadcast_to(costs.comm, len(route))[:-1], 0.0)
        forward = np.concatenate([[0.0], np.cumsum(plain[F][:-1] + hops)])
        backward = np.cumsum((plain[I][1:] + hops)[::-1])[::-1]
        last_forward_end = forward[-1] + plain[F][-1]
        starts.append((forward, last_forward_end + np.concatenate([backward, [0.0]])))
    return starts


def find_cycle(program: Program) -> list[tuple[int, int]]:
    """The (rank, position) of slots that wait for each other; empty if a Program runs to its end.

    The Program must be complete: every input is made somewhere.
    """
    stuck = _Timeline(program, np.zeros(len(program.table.slot_start) - 1), 0.0).stuck
    if not stuck:
        return []
    num_cells = program.num_stages * program.num_microbatches
    rank, visited = next(iter(stuck)), list[int]()
    # Follow each stuck rank to the rank that makes its missing input.
    while rank not in visited:
        visited.append(rank)
        rank = program.rank_of(*divmod(stuck[rank][1] % num_cells, program.num_microbatches))
    return [(other, stuck[other][0]) for other in visited[visited.index(rank) :]]


class _Timeline:
    """Start and end of every slot under its duration and the latency of messages.

    `waited` is the time that a slot waits for a message in flight. `stuck` maps each rank that
    hangs to its position and the value that it waits for.
    """

    def __init__(self, program: Program, duration: np.ndarray, comm: float | np.ndarray) -> None:
        self._inputs, self._latencies, self._outputs = (
            column.ravel().tolist() for column in dependencies(program, comm)
        )
        self._slot_edges = program.table.slot_start.tolist()
        self._rank_edges = program.table.rank_start.tolist()
        self._durations = duration.tolist()
        self.start, self.end, self.waited = ([0.0] * len(duration) for _ in range(3))
        # When values are made, -1 while unknown; the last value exists from the beginning.
        self._times = [-1.0] * (3 * program.num_stages * program.num_microbatches) + [0.0]
        self._next_slot, self._free = self._rank_edges[:-1], [0.0] * program.num_ranks
        self._waiting: dict[int, int] = {}  # missing value -> rank that waits for it
        runnable = list(range(program.num_ranks))
        while runnable:
            runnable += self._run_rank(runnable.pop())
        self.stuck = {
            rank: (self._next_slot[rank] - self._rank_edges[rank], value)
            for value, rank in sorted(self._waiting.items(), key=itemgetter(1))
        }

    def _run_rank(self, rank: int) -> list[int]:
        """Runs a rank until an input is missing; returns ranks that waited for what it has made."""
        inputs, latencies, times = self._inputs, self._latencies, self._times
        resumed = []
        slot, now = self._next_slot[rank], self._free[rank]
        while slot < self._rank_edges[rank + 1]:
            first, stop = self._slot_edges[slot], self._slot_edges[slot + 1]
            begin = last_input = now
            for k in range(2 * first, 2 * stop):
                time = times[inputs[k]]
                if time < 0:
                    self._waiting[inputs[k]] = rank
                    break
                # Conditions, because calls of max would make the simulation a third slower.
                last_input = time if time > last_input else last_input
                time += latencies[k]
                begin = time if time > begin else begin
            else:
                now = begin + self._durations[slot]
                self.start[slot], self.end[slot], self.waited[slot] = begin, now, begin - last_input
                for value in self._outputs[first:stop]:
                    times[value] = now
                    if value in self._waiting:
                        resumed.append(self._waiting.pop(value))
                slot += 1
                continue
            break
        self._next_slot[rank], self._free[rank] = slot, now
        return resumed


def dependencies(
    program: Program, comm: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What every action waits for and makes, as numbers of values.

    A value is the output of a forward, of an input gradient or of a weight gradient of one (stage,
    micro-batch); the last value, number 3 · num_stages · num_microbatches, exists from the
    beginning.

    Returns:
        `[num_actions, 2]` inputs: the adjacent stage's output and its own stage's earlier pass;
        `[num_actions, 2]` latency of the messages that bring them; `[num_actions]` outputs.
    """
    table, m, num_stages = program.table, program.num_microbatches, program.num_stages
    stage, cell, size = table.stage.astype(np.int64), program.cell, num_stages * m
    exists = 3 * size
    is_forward, is_weight = table.op == F, table.op == W
    has_no_upstream = is_weight | (stage == num_stages - 1)
    upstream = np.where(
        is_forward,
        np.where(stage > 0, cell - m, exists),
        np.where(has_no_upstream, exists, size + cell + m),
    )
    earlier_pass = np.where(is_forward, exists, np.where(is_weight, size + cell, cell))
    adjacent = np.clip(stage + np.where(is_forward, -1, 1), 0, num_stages - 1)
    route, direction = np.array(program.placement.route), program.action_direction
    crosses = (route[direction, stage] != route[direction, adjacent]) & (upstream != exists)
    latency = np.broadcast_to(comm, num_stages)[np.minimum(stage, adjacent)]
    inputs = np.stack([upstream, earlier_pass], axis=1)
    latencies = np.stack([np.where(crosses, latency, 0.0), np.zeros(len(stage))], axis=1)
    outputs = np.where(is_forward, 0, np.where(is_weight, 2 * size, size)) + cell
    return inputs, latencies, outputs


def _spans(edges: np.ndarray) -> list[tuple[int, int]]:
    return list(pairwise(edges.tolist()))


def _per_rank(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.array([values[a:b].sum() for a, b in _spans(edges)])

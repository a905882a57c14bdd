"""How long a Program takes and what it holds: one pass over its actions in the order of their
dependencies.

A plain action takes its compute plus its own all-to-all. Two overlapped ones start together, end
together, and take max(sum of computes, sum of all-to-alls, the longest of the two alone). A message
delays the neighbour that waits for it and occupies nobody; between stages of one rank it costs
nothing. A rank runs its slots in program order.
"""

from dataclasses import dataclass

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import OPS, Placement, Program

F, I, W, B = (OPS.index(op) for op in "FIWB")


@dataclass(frozen=True)
class Simulation:
    """What one step of a Program costs; times in the unit of the costs, per rank where an array."""

    makespan: float  # from the first action's start to the last one's end
    overhead: float  # makespan − the compute of the busiest rank
    bubble: float  # overhead / makespan
    work: np.ndarray  # `[num_ranks]` compute without all-to-alls and without waiting
    # `[num_ranks]` time in which a rank's compute stood still for an all-to-all
    exposed_a2a: np.ndarray
    # `[num_ranks]` time in which a rank waited for a message already on its way
    exposed_p2p: np.ndarray
    peak_activations: np.ndarray  # `[num_ranks]` in micro-batches of one rank's layers
    # `[num_ranks]` the most that deferred weight gradients held at once, in the same unit
    peak_stash: np.ndarray
    start: np.ndarray  # `[num_slots]` start of every slot, in the order of `Program.table`
    end: np.ndarray  # `[num_slots]` end of every slot


def simulate(program: Program, costs: Costs | StageCosts) -> Simulation:
    """Returns times and memory of a Program under the given costs.

    Args:
        program: A complete Program; `verify` says what is wrong with one that is not.
        costs: costs of an even split, or of every stage by itself.

    Raises:
        ValueError: An action waits for one that never runs, or that runs only after it.
    """
    stage_costs = costs.of(program.placement) if isinstance(costs, Costs) else costs
    duration, compute = slot_times(program, stage_costs)
    start, end, waited, stuck = _run(program, duration, stage_costs.comm)
    if stuck:
        where = "; ".join(
            f"rank {rank} for ever at position {position}"
            for rank, (position, _) in list(stuck.items())[:4]
        )
        raise ValueError(f"{program.name} never ends: it waits on {where}; `verify` tells why")
    edges = program.table.rank_start
    work = _per_rank(compute, edges)
    makespan = max(end, default=0.0)
    overhead = makespan - float(work.max())
    activations, stash = peak_memory(program, stage_costs)
    return Simulation(
        makespan=makespan,
        overhead=overhead,
        bubble=overhead / makespan if makespan else 0.0,
        work=work,
        exposed_a2a=_per_rank(duration - compute, edges),
        exposed_p2p=_per_rank(np.array(waited), edges),
        peak_activations=activations,
        peak_stash=stash,
        start=np.array(start),
        end=np.array(end),
    )


def waiting_shares(program: Program, simulation: Simulation) -> list[float]:
    """Returns of every rank the share of the time from the step's beginning to its own last action
    in which it waits.

    It is what a run can measure of its bubble: a rank that is done sees nothing of the others' last
    actions.
    """
    shares = []
    for first, stop in _spans(program.table.rank_start):
        busy = float((simulation.end[first:stop] - simulation.start[first:stop]).sum())
        last = float(simulation.end[first:stop].max(initial=0.0))
        shares.append(1 - busy / last if last else 0.0)
    return shares


def slot_times(program: Program, costs: StageCosts) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[num_slots]` duration of every slot, and `[num_slots]` the compute in it."""
    table = program.table
    compute = costs.compute[table.op, table.stage]
    a2a = costs.a2a[table.op, table.stage]
    first = table.slot_start[:-1]
    if not len(first):
        return np.zeros(0), np.zeros(0)
    total = np.add.reduceat(compute, first)
    duration = np.maximum(total, np.add.reduceat(a2a, first))
    return np.maximum(duration, np.maximum.reduceat(compute + a2a, first)), total


def peak_memory(program: Program, costs: StageCosts) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[num_ranks]` peaks of activations (F until W or B has run) and of stashes (I until W
    has run)."""
    edges = program.table.rank_start
    held = held_activations(program, costs), held_stash(program, costs)
    activations, stash = (
        np.array([line[a:b].max(initial=0.0) for a, b in _spans(edges)]) for line in held
    )
    return activations, stash


def held_activations(program: Program, costs: StageCosts) -> np.ndarray:
    """Returns `[num_slots]` what a rank's activations hold during each of its slots, from F until W
    or B has run."""
    return _held(program, costs.activation, (F,), (W, B))


def held_stash(program: Program, costs: StageCosts) -> np.ndarray:
    """Returns `[num_slots]` what deferred weight gradients of a rank hold during each slot, from I
    until W has run."""
    return _held(program, costs.stash, (I,), (W,))


def _held(
    program: Program, size_of: np.ndarray, takes: tuple[int, ...], frees: tuple[int, ...]
) -> np.ndarray:
    """Returns memory, which follows from program order alone: a slot allocates at its start and
    frees at its end."""
    table = program.table
    num_slots, slot = len(table.slot_start) - 1, table.slot
    size = size_of[table.stage]
    taken = np.bincount(slot, np.where(np.isin(table.op, takes), size, 0.0), minlength=num_slots)
    freed = np.bincount(slot, np.where(np.isin(table.op, frees), size, 0.0), minlength=num_slots)
    held = np.zeros(num_slots)
    for first, stop in _spans(table.rank_start):
        held[first:stop] = np.cumsum(taken[first:stop])
        held[first + 1 : stop] -= np.cumsum(freed[first:stop])[:-1]
    return held


def kept_between_slots(
    program: Program, activation: np.ndarray, stash: np.ndarray | float = 0.0
) -> np.ndarray:
    """Returns `[num_ranks]` the most that a rank's activations hold between two slots, from F until
    I or B has run.

    It is less than `held_activations` where a slot's actions overlap: while one takes activations,
    the other frees its.

    Args:
        program: A complete Program.
        activation: `[num_stages]` what a micro-batch keeps of a stage.
        stash: `[num_stages]` what of it stays from I until W has run.
    """
    table, changes = program.table, np.zeros((len(OPS), program.num_stages))
    changes[F], changes[B], changes[I], changes[W] = (
        activation,
        -activation,
        stash - activation,
        -stash,
    )
    change = np.bincount(
        table.slot, changes[table.op, table.stage], minlength=len(table.slot_start) - 1
    )
    return np.array(
        [change[first:stop].cumsum().max(initial=0.0) for first, stop in _spans(table.rank_start)]
    )


def lower_bound(
    placement: Placement, costs: Costs | StageCosts, num_microbatches: int, memory: float
) -> float:
    """Returns an overhead that no Program of this placement goes below with `memory` activations
    per rank.

    A rank idles until its first forward can have arrived, and again until its first backward can
    have: before that it has only as many forwards to do as memory admits.

    Args:
        memory: peak activations in micro-batches of one rank's layers.
    """
    stage_costs = costs.of(placement) if isinstance(costs, Costs) else costs
    forward = _arrivals(placement, stage_costs)
    per_copy = num_microbatches / placement.copies
    work = np.zeros(placement.num_ranks)
    idle = np.full(placement.num_ranks, np.inf)
    for rank in range(placement.num_ranks):
        held = placement.stages_of(rank)
        work[rank] = sum(stage_costs.compute[[F, B], stage].sum() for _, stage in held) * per_copy
        first_forward = min(forward[d][0][stage] for d, stage in held)
        first_backward = min(forward[d][1][stage] for d, stage in held)
        admitted = _admitted(stage_costs, [stage for _, stage in held], per_copy, memory)
        idle[rank] = max(first_forward, first_backward - admitted)
    return float((work + idle).max() - work.max())


def _admitted(costs: StageCosts, stages: list[int], per_stage: float, memory: float) -> float:
    """Returns the most compute of forwards that memory admits on a rank: first of stages that hold
    little for long."""
    admitted, size, compute = 0.0, costs.activation, costs.compute[F]
    for stage in sorted(stages, key=lambda stage: size[stage] / max(compute[stage], 1e-12)):
        count = min(per_stage, memory / size[stage]) if size[stage] else per_stage
        admitted, memory = admitted + count * float(compute[stage]), memory - count * size[stage]
    return admitted


def _arrivals(placement: Placement, costs: StageCosts) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns for each direction the earliest start of a forward and of a backward on every
    stage."""
    plain = costs.plain()
    found = []
    for line in placement.route:
        hops = np.where(np.diff(line) != 0, np.broadcast_to(costs.comm, len(line))[:-1], 0.0)
        down = np.concatenate([[0.0], np.cumsum(plain[F][:-1] + hops)])
        back = np.cumsum((plain[I][1:] + hops)[::-1])[::-1]
        turn = down[-1] + plain[F][-1]
        found.append((down, turn + np.concatenate([back, [0.0]])))
    return found


def first_circle(program: Program) -> list[tuple[int, int]]:
    """Returns the (rank, position) of slots that wait for each other in a circle; empty where a
    Program runs through, which must be complete: whatever an action waits for is made somewhere."""
    stuck = _run(program, np.zeros(len(program.table.slot_start) - 1), 0.0)[3]
    rank, passed = next(iter(stuck), -1), []
    while stuck and rank not in passed:
        passed.append(rank)
        stage, microbatch = divmod(
            stuck[rank][1] % (program.num_stages * program.num_microbatches),
            program.num_microbatches,
        )
        rank = program.rank_of(stage, microbatch)
    return [(other, stuck[other][0]) for other in passed[passed.index(rank) :]] if stuck else []


Timeline = tuple[list[float], list[float], list[float], dict[int, tuple[int, int]]]


def _run(program: Program, duration: np.ndarray, comm: float | np.ndarray) -> Timeline:
    """Returns start, end and exposed message latency of every slot, and where a rank that hangs
    waits for which value.

    Every rank runs on until an input is missing, and is woken by the action that makes it.
    """
    inputs, latencies, outputs, num_values = wiring(program, comm)
    bounds = program.table.slot_start.tolist()
    edges = program.table.rank_start.tolist()
    cursor, free = edges[:-1], [0.0] * program.num_ranks
    took = duration.tolist()
    ready: list[float] = [-1.0] * num_values
    ready[-1] = 0.0
    waiting: dict[int, int] = {}
    start, end, waited = [0.0] * len(took), [0.0] * len(took), [0.0] * len(took)
    todo = list(range(program.num_ranks))
    while todo:
        rank = todo.pop()
        slot, now = cursor[rank], free[rank]
        while slot < edges[rank + 1]:
            begin, made, missing = now, now, -1
            for k in range(2 * bounds[slot], 2 * bounds[slot + 1]):
                time = ready[inputs[k]]
                if time < 0:
                    missing = inputs[k]
                    break
                made = time if time > made else made
                time += latencies[k]
                begin = time if time > begin else begin
            if missing >= 0:
                waiting[missing] = rank
                break
            now = begin + took[slot]
            start[slot], end[slot], waited[slot] = begin, now, begin - made
            for value in outputs[bounds[slot] : bounds[slot + 1]]:
                ready[value] = now
                if value in waiting:
                    todo.append(waiting.pop(value))
            slot += 1
        cursor[rank], free[rank] = slot, now
    stuck = {rank: (cursor[rank] - edges[rank], value) for value, rank in waiting.items()}
    return start, end, waited, dict(sorted(stuck.items()))


def wiring(
    program: Program, comm: float | np.ndarray
) -> tuple[list[int], list[float], list[int], int]:
    """Returns what every action waits for and makes, as numbers of values.

    A value is the output of a forward, of an input gradient or of a weight gradient of one (stage,
    micro-batch); the last value exists from the beginning. Every action has two inputs: its
    neighbour stage's output (with the message's latency) and its own stage's earlier pass
    (without).
    """
    table, m, num_stages = program.table, program.num_microbatches, program.num_stages
    stage, op = table.stage.astype(np.int64), table.op
    cell, size = stage * m + table.microbatch, num_stages * m
    given = 3 * size
    is_forward, is_weight = op == F, op == W
    is_backward = ~is_forward & ~is_weight
    upstream = np.where(is_forward & (stage > 0), cell - m, given)
    upstream = np.where(is_backward & (stage < num_stages - 1), size + cell + m, upstream)
    own = np.where(is_forward, given, np.where(is_weight, size + cell, cell))
    route = np.array(program.placement.route)
    direction = np.array(program.direction, dtype=np.int64)[table.microbatch]
    neighbour = np.clip(stage + np.where(is_forward, -1, 1), 0, num_stages - 1)
    far = (route[direction, stage] != route[direction, neighbour]) & (upstream != given)
    inputs = np.stack([upstream, own], axis=1).reshape(-1).tolist()
    late = np.broadcast_to(comm, num_stages)[np.minimum(stage, neighbour)]
    latencies = np.stack([np.where(far, late, 0.0), np.zeros(len(op))], axis=1).reshape(-1).tolist()
    outputs = (np.where(is_forward, 0, np.where(is_weight, 2 * size, size)) + cell).tolist()
    return inputs, latencies, outputs, given + 1


def _spans(edges: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(edges[:-1].tolist(), edges[1:].tolist()))


def _per_rank(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.array([values[a:b].sum() for a, b in _spans(edges)])

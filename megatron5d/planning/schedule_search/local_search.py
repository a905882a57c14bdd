"""Local search on a finished Program: what makes the critical path wait is moved out of its way,
slot by slot.

The makespan is the longest path through the slots of all ranks. Where a slot on it waits for the
slot before it on its rank although its input has arrived, one of the two jumps over the other, or
over several. Where there is an all-to-all to hide, slots on that path also gain a partner, drop
theirs, or hand it over. A slot may pass others of its stream: then each of them takes the place of
the one before it, so all begin sooner or later. Every Program on the way is legal.

A move stays where the makespan gets no longer: as there are many critical paths, sideways steps are
what leads on. Where no move helps any more, annealing begins: a Program may get longer by less and
less, and the shortest is returned.

Source: van Laarhoven, Aarts, Lenstra 1992, Job shop scheduling by simulated annealing, for moves on
    the critical path.
"""

import numpy as np

from megatron5d.pipeline_parallel.program import Program, Table, program_from_table
from megatron5d.planning.schedule_search.problem import Budget, Problem
from megatron5d.planning.schedule_search.timeline import (
    STUCK,
    Graph,
    Run,
    Times,
    awaited,
    begin,
    compiled,
    compiled_part,
    duration,
    empty_times,
    evaluate,
    graph_of,
)

FARTHEST, NEAR = 20, 6
"""Slots over which a slot may jump at once, where pairs may be formed and where none may."""
REACH = 24
"""Positions within which a slot looks for a partner."""
EQUAL = 1e-9
JUMP, PART, GIVE, JOIN = 0, 1, 2, 3


@compiled
def try_moves(
    graph: Graph, run: Run, times: tuple[Times, Times], makespan: float, count: int, heat: float
) -> float:
    """Tries some moves; returns the makespan, without heat no longer than before.

    Args:
        graph, run, makespan: the problem, and the order as it stands.
        times: of that order; and room for those of another.
        count: how many moves.
        heat: by how much a move that stays may lengthen the makespan: an exponential chance with
            this mean.
    """
    now, trial = times
    for _ in range(count):
        low, high = _move(graph, run, now, makespan)
        if high <= low:
            continue
        since, reached = now.start[run.kept[0]], STUCK
        limit = makespan + EQUAL - heat * np.log((_draw(run, 1 << 20) + 1) / (1 << 20))
        _in_turn(graph, run, low, high)
        if _fits(graph, run, low, high):
            reached = evaluate(graph, run, now, trial, since, limit)
        if reached <= limit:
            makespan = reached
            for action in range(len(now.start)):
                if now.start[action] >= since:
                    now.start[action], now.end[action] = trial.start[action], trial.end[action]
            continue
        for k in range(high - low):
            action = run.kept[k]
            run.order[low + k], run.place[action], run.joined[action] = (
                action,
                low + k,
                run.kept_joined[k],
            )
    return makespan


@compiled_part
def _draw(run, below):
    """Returns an integer from 0 to below − 1."""
    run.chance[0] = (run.chance[0] * 1103515245 + 12345) % 2147483648
    return (run.chance[0] >> 8) % below


@compiled_part
def _slot_start(run, position):
    """Returns where the slot begins in which a position lies."""
    return position - 1 if position > 0 and run.joined[run.order[position - 1]] else position


@compiled_part
def _slot_stop(run, position):
    """Returns where the slot ends that begins at a position."""
    return position + (2 if run.joined[run.order[position]] else 1)


@compiled_part
def _critical(graph, run, times, makespan, kind):
    """Returns the position of a slot on a critical path to which a kind of move applies, drawn
    evenly, or -1."""
    rank = _draw(run, len(graph.cap))
    while times.end[run.order[graph.rank_start[rank + 1] - 1]] < makespan - EQUAL:
        rank = (rank + 1) % len(graph.cap)
    position = _slot_start(run, graph.rank_start[rank + 1] - 1)
    seen, chosen = 0, -1
    while True:
        action = run.order[position]
        begin, first = times.start[action], graph.rank_start[graph.rank[action]]
        arrival, last = awaited(
            graph, times, action, run.order[position + 1] if run.joined[action] else -1
        )
        behind = position > first and times.end[run.order[position - 1]] >= begin - EQUAL
        waits = arrival >= begin - EQUAL
        if behind and not waits if kind == JUMP else run.joined[action] == (kind != JOIN):
            seen += 1
            if _draw(run, seen) == 0:
                chosen = position
        if behind and (not waits or _draw(run, 2) == 0):
            position = _slot_start(run, position - 1)
        elif last >= 0 and begin > EQUAL:
            position = _slot_start(run, run.place[last])
        else:
            return chosen


@compiled_part
def _move(graph, run, times, makespan):
    """Makes a move; returns the window that it rewrote, empty where none was possible."""
    kind, farthest = JUMP, NEAR
    if graph.pairing:
        kind, farthest = min(max(0, _draw(run, 6) - 1), JOIN), FARTHEST
    position = _critical(graph, run, times, makespan, kind)
    if position < 0:
        return 0, 0
    rank = graph.rank[run.order[position]]
    first, stop = graph.rank_start[rank], graph.rank_start[rank + 1]
    if kind in (GIVE, JOIN):
        return _join(graph, run, position, first, stop)
    far = 1 + _draw(run, farthest) if _draw(run, 2) == 0 else 1
    low, high = position, _slot_stop(run, position)
    earlier = kind == JUMP and _draw(run, 2) == 0
    if kind == JUMP and not earlier:
        low = _slot_start(run, position - 1)
    for _ in range(far - (0 if earlier else 1)):
        if earlier:
            low = _slot_start(run, low - 1) if low > first else low
        else:
            high = _slot_stop(run, high) if high < stop else high
    _keep(run, low, high)
    if kind == PART:
        run.joined[run.order[position]] = False
        position += _draw(run, 2)
        _swap(run, low, (position, position + 1, high))
    else:
        _swap(run, low, (low, position, high))
    return low, high


@compiled_part
def _keep(run, low, high):
    """Copies a window, so that a move can be undone."""
    for k in range(high - low):
        run.kept[k], run.kept_joined[k] = run.order[low + k], run.joined[run.order[low + k]]


@compiled_part
def _swap(run, window, edges):
    """Swaps two stretches of a kept window: from the first edge to the second, and from there to
    the third."""
    low, middle, high = edges
    for k in range(high - low):
        action = run.kept[low - window + (middle - low + k) % (high - low)]
        run.order[low + k], run.place[action] = action, low + k


@compiled_part
def _join(graph, run, position, first, stop):
    """Joins a single action with another one nearby, which leaves its pair where it has one.

    A pair at `position` gives one of its actions; a single action there takes one.
    """
    other = position - REACH + _draw(run, 2 * REACH + 1)
    if other < first or other >= stop:
        return 0, 0
    other = _slot_start(run, other)
    host, giver = (other, position) if run.joined[run.order[position]] else (position, other)
    if host == giver or run.joined[run.order[host]]:
        return 0, 0
    stop = _slot_stop(run, giver)
    guest = giver + _draw(run, stop - giver)
    if not _gains(graph, run.order[host], run.order[guest]):
        return 0, 0
    low, high = min(host, giver), max(host + 1, stop)
    _keep(run, low, high)
    run.joined[run.order[giver]], run.joined[run.order[host]] = False, True
    _swap(run, low, (host + 1, guest, guest + 1) if guest > host else (guest, guest + 1, host + 1))
    return low, high


@compiled_part
def _gains(graph, one, two):
    """Returns whether two actions may overlap and take less time then."""
    if (
        graph.microbatch[one] == graph.microbatch[two]
        or not graph.allowed[graph.op[one], graph.op[two]]
    ):
        return False
    return duration(graph, one, -1) + duration(graph, two, -1) > EQUAL + duration(graph, one, two)


@compiled_part
def _in_turn(graph, run, low, high):
    """Restores the order of every stream, that of its actions, in a rewritten window.

    So a forward that moves over others of its stream lets each of them begin a place sooner or
    later.
    """
    for k in range(low, high):
        early = run.order[k]
        for j in range(k + 1, high):
            late = run.order[j]
            if late < early and graph.stream[late] == graph.stream[early]:
                first, second = run.joined[early], run.joined[late]
                run.order[k], run.place[late], run.joined[late] = late, k, first
                run.order[j], run.place[early], run.joined[early] = early, j, second
                early = late


@compiled_part
def _fits(graph, run, low, high):
    """Returns whether a rank keeps to its memory up to the end of a rewritten window."""
    rank = graph.rank[run.order[low]]
    held, freed = 0.0, 0.0
    for position in range(graph.rank_start[rank], high):
        action = run.order[position]
        held, freed = held + graph.takes[action], freed + graph.frees[action]
        if run.joined[action]:
            continue
        if held > graph.cap[rank]:
            return False
        held, freed = held - freed, 0.0
    return True


ACTIONS = 1 << 20
"""Actions that are timed anew between two looks at the clock."""
HOT, COLD = 0.15, 0.02
"""How much longer a Program may get at a move, on average of those that make it longer, in mean computes of an action:
when annealing begins, and when it ends."""
PATIENCE = 10
"""Moves per action without progress after which annealing begins: where there is time for fewer, none is wasted."""
MOVE = 1 / 32
"""What a move counts for beside a list schedule of all actions: it times only those anew that come after it."""


def refine(
    program: Program, problem: Problem, budget: Budget, until: float, seed: int = 0
) -> Program:
    """Returns a Program that is no slower, fits the same memory, and keeps the order of
    micro-batches in every stream.

    Args:
        program, problem: A legal Program, and its costs, its memory, and which actions may be
            overlapped anew.
        budget: is used up to the share `until`; a move counts as MOVE evaluations.
        seed: of the random moves.
    """
    graph, run = (
        graph_of(program, problem.costs, problem.memory, problem.pairs),
        begin(program, seed),
    )
    now, trial = empty_times(graph), empty_times(graph)
    makespan = evaluate(graph, run, trial, now, -1.0, np.inf)
    count = max(1, min(100, ACTIONS // len(run.order)))
    best, order, joined = makespan, run.order.copy(), run.joined.copy()
    unit, idle, begun = float(graph.compute.mean()), 0, until
    while (share := budget.share()) < until:
        heat = (
            unit * HOT * (COLD / HOT) ** ((share - begun) / (until - begun))
            if begun < until
            else 0.0
        )
        makespan = try_moves(graph, run, (now, trial), makespan, count, heat)
        budget.used, idle = budget.used + count * MOVE, idle + count
        if makespan < best - EQUAL:
            best, order, joined, idle = makespan, run.order.copy(), run.joined.copy(), 0
        if begun == until and idle > PATIENCE * len(order):
            begun = share
    table, slot_start = program.table, np.flatnonzero(np.append(True, ~joined[order]))
    edges = np.searchsorted(slot_start, table.slot_start[table.rank_start])
    moved = Table(edges, slot_start, table.op[order], table.stage[order], table.microbatch[order])
    return program_from_table("auto", program.placement, program.direction, moved)

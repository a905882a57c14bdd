"""Local search on a finished Program: slots on which the critical path waits move, one by one.

The makespan is the longest path through the slots of all ranks. Where a slot on that path waits for
the previous slot of its rank although its input has arrived, one of the two jumps over the other,
or over several. If there is an all-to-all to hide, slots on the path also gain a partner, drop
theirs, or pass it on. A slot may pass others of its stream: then each of them takes the place of
the one before it, so all begin sooner or later. Every intermediate Program is legal.

A move is kept if the makespan gets no longer: there are many critical paths, so moves that change
nothing now are what makes progress later. Where no move helps any more, annealing begins: a Program
may get longer by less and less, and the shortest one is returned.

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
    compiled,
    compiled_part,
    duration,
    empty_times,
    evaluate,
    graph_of,
    initial_run,
    last_arrival,
)

MAX_JUMP_WITH_PAIRS, MAX_JUMP = 20, 6
"""Slots over which a slot may jump at once, where pairs may be formed and where they may not."""
REACH = 24
"""Positions within which a slot looks for a partner."""
TOLERANCE = 1e-9
JUMP, SPLIT, GIVE, JOIN = 0, 1, 2, 3


@compiled
def try_moves(
    graph: Graph, run: Run, times: tuple[Times, Times], makespan: float, count: int, heat: float
) -> float:
    """Tries random moves; returns the makespan, which without heat is no longer than before.

    Args:
        graph: the problem.
        run: the current order.
        times: of that order; and memory for those of another.
        makespan: of that order.
        count: number of moves.
        heat: mean of the exponentially distributed time by which a move that is kept may lengthen
            the makespan.
    """
    now, trial = times
    for _ in range(count):
        low, high = _move(graph, run, now, makespan)
        if high <= low:
            continue
        since, reached = now.start[run.saved[0]], STUCK
        limit = makespan + TOLERANCE - heat * np.log((_draw(run, 1 << 20) + 1) / (1 << 20))
        _restore_stream_order(graph, run, low, high)
        if _fits_memory(graph, run, low, high):
            reached = evaluate(graph, run, now, trial, since, limit)
        if reached <= limit:
            makespan = reached
            for action in range(len(now.start)):
                if now.start[action] >= since:
                    now.start[action], now.end[action] = trial.start[action], trial.end[action]
            continue
        for k in range(high - low):
            action = run.saved[k]
            run.order[low + k], run.position[action] = action, low + k
            run.joined[action] = run.saved_joined[k]
    return makespan


@compiled_part
def _draw(run, limit):
    """A random integer from 0 to limit − 1."""
    run.random_state[0] = (run.random_state[0] * 1103515245 + 12345) % 2147483648
    return (run.random_state[0] >> 8) % limit


@compiled_part
def _slot_start(run, position):
    """The first position of the slot at a position."""
    return position - 1 if position > 0 and run.joined[run.order[position - 1]] else position


@compiled_part
def _slot_stop(run, position):
    """The position after the slot that begins at a position."""
    return position + (2 if run.joined[run.order[position]] else 1)


@compiled_part
def _critical(graph, run, times, makespan, kind):
    """The position of a slot on a critical path that admits a kind of move, drawn evenly, or -1."""
    rank = _draw(run, len(graph.cap))
    while times.end[run.order[graph.rank_start[rank + 1] - 1]] < makespan - TOLERANCE:
        rank = (rank + 1) % len(graph.cap)
    position = _slot_start(run, graph.rank_start[rank + 1] - 1)
    num_admitted, drawn = 0, -1
    while True:
        action = run.order[position]
        begin, first = times.start[action], graph.rank_start[graph.rank[action]]
        partner = run.order[position + 1] if run.joined[action] else -1
        arrival, last = last_arrival(graph, times, action, partner)
        follows = position > first and times.end[run.order[position - 1]] >= begin - TOLERANCE
        waits = arrival >= begin - TOLERANCE
        if follows and not waits if kind == JUMP else run.joined[action] == (kind != JOIN):
            num_admitted += 1
            if _draw(run, num_admitted) == 0:
                drawn = position
        if follows and (not waits or _draw(run, 2) == 0):
            position = _slot_start(run, position - 1)
        elif last >= 0 and begin > TOLERANCE:
            position = _slot_start(run, run.position[last])
        else:
            return drawn


@compiled_part
def _move(graph, run, times, makespan):
    """Makes a move; returns the window that it rewrote, empty if no move was possible."""
    kind, max_jump = JUMP, MAX_JUMP
    if graph.pairing:
        kind, max_jump = min(max(0, _draw(run, 6) - 1), JOIN), MAX_JUMP_WITH_PAIRS
    position = _critical(graph, run, times, makespan, kind)
    if position < 0:
        return 0, 0
    rank = graph.rank[run.order[position]]
    first, stop = graph.rank_start[rank], graph.rank_start[rank + 1]
    if kind in (GIVE, JOIN):
        return _join(graph, run, position, first, stop)
    distance = 1 + _draw(run, max_jump) if _draw(run, 2) == 0 else 1
    low, high = position, _slot_stop(run, position)
    earlier = kind == JUMP and _draw(run, 2) == 0
    if kind == JUMP and not earlier:
        low = _slot_start(run, position - 1)
    for _ in range(distance - (0 if earlier else 1)):
        if earlier:
            low = _slot_start(run, low - 1) if low > first else low
        else:
            high = _slot_stop(run, high) if high < stop else high
    _save(run, low, high)
    if kind == SPLIT:
        run.joined[run.order[position]] = False
        position += _draw(run, 2)
        _swap(run, low, (position, position + 1, high))
    else:
        _swap(run, low, (low, position, high))
    return low, high


@compiled_part
def _save(run, low, high):
    """Copies a window, so that a move can be undone."""
    for k in range(high - low):
        run.saved[k], run.saved_joined[k] = run.order[low + k], run.joined[run.order[low + k]]


@compiled_part
def _swap(run, window, edges):
    """Swaps two sections of a saved window: from the first edge to the second, and from there to
    the third."""
    low, middle, high = edges
    for k in range(high - low):
        action = run.saved[low - window + (middle - low + k) % (high - low)]
        run.order[low + k], run.position[action] = action, low + k


@compiled_part
def _join(graph, run, position, first, stop):
    """Joins a single action with a nearby one, which leaves its pair if it has one.

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
    _save(run, low, high)
    run.joined[run.order[giver]], run.joined[run.order[host]] = False, True
    _swap(run, low, (host + 1, guest, guest + 1) if guest > host else (guest, guest + 1, host + 1))
    return low, high


@compiled_part
def _gains(graph, one, two):
    """Whether two actions may overlap and then take less time."""
    if (
        graph.microbatch[one] == graph.microbatch[two]
        or not graph.allowed[graph.op[one], graph.op[two]]
    ):
        return False
    separate = duration(graph, one, -1) + duration(graph, two, -1)
    return separate > TOLERANCE + duration(graph, one, two)


@compiled_part
def _restore_stream_order(graph, run, low, high):
    """Restores the order of the actions of every stream in a rewritten window.

    So a forward that moves over others of its stream lets each of them begin a place sooner or
    later.
    """
    for k in range(low, high):
        early = run.order[k]
        for j in range(k + 1, high):
            late = run.order[j]
            if late < early and graph.stream[late] == graph.stream[early]:
                first, second = run.joined[early], run.joined[late]
                run.order[k], run.position[late], run.joined[late] = late, k, first
                run.order[j], run.position[early], run.joined[early] = early, j, second
                early = late


@compiled_part
def _fits_memory(graph, run, low, high):
    """Whether a rank keeps within its memory up to the end of a rewritten window."""
    rank = graph.rank[run.order[low]]
    activations, freed = 0.0, 0.0
    for position in range(graph.rank_start[rank], high):
        action = run.order[position]
        activations, freed = activations + graph.allocates[action], freed + graph.frees[action]
        if run.joined[action]:
            continue
        if activations > graph.cap[rank]:
            return False
        activations, freed = activations - freed, 0.0
    return True


ACTIONS = 1 << 20
"""Actions that are timed between two looks at the clock."""
HOT, COLD = 0.15, 0.02
"""Mean time by which a move may lengthen a Program, in mean computes of an action: when annealing
begins, and when it ends."""
PATIENCE = 10
"""Moves per action without progress before annealing begins; a budget for fewer never anneals."""
MOVE = 1 / 32
"""Evaluations that a move counts as: it recomputes the times of the actions after it alone."""


def refine(
    program: Program, problem: Problem, budget: Budget, until: float, seed: int = 0
) -> Program:
    """Moves slots of a Program; the result is no slower, fits the same memory, and keeps the order
    of micro-batches in every stream.

    Args:
        program: a legal Program.
        problem: its costs, its memory, and which actions may be overlapped.
        budget: is used up to the share `until`; a move counts as MOVE evaluations.
        until: see `budget`.
        seed: of the random moves.
    """
    graph = graph_of(program, problem.costs, problem.memory, problem.pairs)
    run, now, trial = initial_run(program, seed), empty_times(graph), empty_times(graph)
    makespan = evaluate(graph, run, trial, now, -1.0, np.inf)
    count = max(1, min(100, ACTIONS // len(run.order)))
    best, order, joined = makespan, run.order.copy(), run.joined.copy()
    unit, num_idle, annealing_start = float(graph.compute.mean()), 0, until
    while (share := budget.share()) < until:
        heat = 0.0
        if annealing_start < until:
            progress = (share - annealing_start) / (until - annealing_start)
            heat = unit * HOT * (COLD / HOT) ** progress
        makespan = try_moves(graph, run, (now, trial), makespan, count, heat)
        budget.used, num_idle = budget.used + count * MOVE, num_idle + count
        if makespan < best - TOLERANCE:
            best, order, joined, num_idle = makespan, run.order.copy(), run.joined.copy(), 0
        if annealing_start == until and num_idle > PATIENCE * len(order):
            annealing_start = share
    return _reordered(program, order, joined)


def _reordered(program: Program, order: np.ndarray, joined: np.ndarray) -> Program:
    """The Program with its actions in another order, and pairs where they are `joined`."""
    table, slot_start = program.table, np.flatnonzero(np.append(True, ~joined[order]))
    edges = np.searchsorted(slot_start, table.slot_start[table.rank_start])
    moved = Table(edges, slot_start, table.op[order], table.stage[order], table.microbatch[order])
    return program_from_table("auto", program.placement, program.direction, moved)

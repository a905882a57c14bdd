"""The compiled core of the local search: moves of the slots on a critical path, each of which rewrites a few positions.

A slot may pass others of its lane: then each of them takes the place of the one before it, so all come sooner or later.
A move stays where the makespan gets no longer: as there are many critical paths, sideways steps are what leads on.
Under heat it may also stay where the makespan gets longer.

Local search on a finished Program: what makes the critical path wait is moved out of its way, slot by slot.

The makespan is the longest path through the slots of all ranks. Where a slot on it waits for the slot before it on its
rank although its input is there already, one of the two jumps over the other, or over several. Where there is an
all-to-all to hide, slots on that path also take up a partner, let theirs go, or pass it on. Every Program on the way is
legal. Where no move helps any more, annealing begins: a Program may get longer by less and less, and the shortest is
returned.

Source: van Laarhoven, Aarts, Lenstra 1992, Job shop scheduling by simulated annealing, for moves on the critical path.
"""

from collections.abc import Collection

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import Program, Table, program_from_table
from megatron5d.pipeline_parallel.search.problem import Clock, can_fold, folded, is_mirrored, unfolded
from megatron5d.pipeline_parallel.search.timeline import (
    STUCK,
    Graph,
    Run,
    Times,
    begin,
    compiled,
    compiled_part,
    duration,
    empty_times,
    evaluate,
    graph_of,
    is_second,
)

FARTHEST, NEAR = 20, 6
"""Slots over which a slot may jump at once, where pairs may be formed and where none may."""
REACH = 24
"""Positions within which a slot looks for a partner."""
EQUAL = 1e-9
ODDS = 1 << 20
"""Chances are multiples of one in so many."""
JUMP, JOIN, PART, GIVE, TAKE = 0, 1, 2, 3, 4


@compiled
def try_moves(graph: Graph, run: Run, times: tuple[Times, Times], makespan: float, count: int, heat: float) -> float:
    """Tries some moves; returns the makespan, without heat no longer than before.

    Args:
        graph: the problem.
        run: the order, which changes.
        times: of the order as it stands; and room for those of another.
        makespan: of the order as it stands.
        count: how many moves.
        heat: by how much a move that stays may lengthen the makespan: an exponential chance with this mean.
    """
    now, trial = times
    for _ in range(count):
        low, high = _move(graph, run, now, makespan)
        if high <= low:
            continue
        since, reached = now.start[run.kept[0]], STUCK
        limit = makespan + EQUAL - heat * np.log((_draw(run, ODDS) + 1) / ODDS)
        if _in_turn(graph, run, low, high) and _fits(graph, run, low, high):
            reached = evaluate(graph, run, now, trial, since, limit)
        if reached <= limit:
            makespan = reached
            _adopt(now, trial, since)
            continue
        for k in range(high - low):
            action = run.kept[k]
            run.order[low + k], run.place[action], run.joined[action] = action, low + k, run.kept_joined[k]
    return makespan


@compiled_part
def _draw(run, below):
    """Returns an integer from 0 to below − 1."""
    run.chance[0] = (run.chance[0] * 1103515245 + 12345) % 2147483648
    return (run.chance[0] >> 8) % below


@compiled_part
def _adopt(now, trial, since):
    """Takes over the times of a trial from `since` on."""
    for action in range(len(now.start)):
        if now.start[action] >= since:
            now.start[action], now.end[action] = trial.start[action], trial.end[action]
            now.arrival[action], now.last[action] = trial.arrival[action], trial.last[action]
    for rank in range(len(now.free)):
        now.free[rank] = trial.free[rank]


@compiled_part
def _rank_at(graph, position):
    rank = 0
    while graph.rank_start[rank + 1] <= position:
        rank += 1
    return rank


@compiled_part
def _slot_start(run, position):
    """Returns where the slot begins in which a position lies."""
    return position - 1 if is_second(run, run.order[position]) else position


@compiled_part
def _slot_stop(run, position):
    """Returns where the slot ends that begins at a position."""
    return position + (2 if run.joined[run.order[position]] else 1)


@compiled_part
def _critical(graph, run, times, makespan, kind):
    """Returns the position of a slot on a critical path to which a kind of move applies, drawn evenly, or -1."""
    rank = _draw(run, len(graph.cap))
    while times.free[rank] < makespan - EQUAL:
        rank = (rank + 1) % len(graph.cap)
    position = _slot_start(run, graph.rank_start[rank + 1] - 1)
    seen, chosen = 0, -1
    while True:
        action = run.order[position]
        begin = times.start[action]
        awaited = times.arrival[action] >= begin - EQUAL
        behind = False
        if position > graph.rank_start[rank]:
            behind = times.end[run.order[position - 1]] >= begin - EQUAL
        suits = behind and not awaited
        if kind != JUMP:
            suits = run.joined[action] == (kind in (PART, GIVE))
        if suits:
            seen += 1
            if _draw(run, seen) == 0:
                chosen = position
        if behind and (not awaited or _draw(run, 2) == 0):
            position = _slot_start(run, position - 1)
        elif times.last[action] >= 0 and begin > EQUAL:
            position = _slot_start(run, run.place[times.last[action]])
            rank = _rank_at(graph, position)
        else:
            return chosen


@compiled_part
def _move(graph, run, times, makespan):
    """Makes a move; returns the window that it rewrote, empty where none was possible."""
    kind = JUMP
    if graph.pairing:
        kind = max(0, _draw(run, 6) - 1)
    position = _critical(graph, run, times, makespan, kind)
    if position < 0:
        return 0, 0
    rank = _rank_at(graph, position)
    first, stop = graph.rank_start[rank], graph.rank_start[rank + 1]
    if kind == JOIN:
        return _join(graph, run, position, first, stop)
    if kind in (GIVE, TAKE):
        return _hand_over(graph, run, position, first, stop)
    farthest = FARTHEST if graph.pairing else NEAR
    far = 1 + _draw(run, farthest) if _draw(run, 2) == 0 else 1
    if kind == PART:
        return _part(run, position, stop, far - 1)
    if _draw(run, 2) == 0:
        low = position
        for _ in range(far):
            if low > first:
                low = _slot_start(run, low - 1)
        return _rotate(run, low, position, _slot_stop(run, position))
    low = _slot_start(run, position - 1)
    return _rotate(run, low, position, _skip(run, position, stop, far))


@compiled_part
def _skip(run, position, stop, slots):
    """Returns the position so many slots on."""
    for _ in range(slots):
        if position < stop:
            position = _slot_stop(run, position)
    return position


@compiled_part
def _keep(run, low, high):
    for k in range(high - low):
        action = run.order[low + k]
        run.kept[k], run.kept_joined[k], run.mark[action] = action, run.joined[action], k


@compiled_part
def _rotate(run, low, middle, high):
    """Lets what stands in low … middle − 1 and in middle … high − 1 change places."""
    _keep(run, low, high)
    for k in range(high - low):
        action = run.kept[(k + middle - low) % (high - low)]
        run.order[low + k], run.place[action] = action, low + k
    return low, high


@compiled_part
def _part(run, position, stop, far):
    """Takes a pair apart; the one that comes second moves some slots on."""
    one, two = run.order[position], run.order[position + 1]
    high = _skip(run, position + 2, stop, far)
    _keep(run, position, high)
    run.joined[one] = False
    first, second = (one, two) if _draw(run, 2) == 0 else (two, one)
    run.order[position], run.place[first] = first, position
    for at in range(position + 2, high):
        action = run.order[at]
        run.order[at - 1], run.place[action] = action, at - 1
    run.order[high - 1], run.place[second] = second, high - 1
    return position, high


@compiled_part
def _gains(graph, one, two):
    """Whether two actions may overlap, and take less time then."""
    if graph.microbatch[one] == graph.microbatch[two] or not graph.allowed[graph.op[one], graph.op[two]]:
        return False
    apart = graph.compute[one] + graph.a2a[one] + graph.compute[two] + graph.a2a[two]
    return apart > EQUAL + duration(graph, one, two)


@compiled_part
def _hand_over(graph, run, position, first, stop):
    """Lets one action of a pair leave it for a single one nearby: the pair or the single one is what was drawn."""
    other = position - REACH + _draw(run, 2 * REACH + 1)
    if other < first or other >= stop:
        return 0, 0
    other = _slot_start(run, other)
    pair, single = (position, other) if run.joined[run.order[position]] else (other, position)
    if not run.joined[run.order[pair]] or run.joined[run.order[single]]:
        return 0, 0
    one, two, host = run.order[pair], run.order[pair + 1], run.order[single]
    guest, left = (one, two) if _draw(run, 2) == 0 else (two, one)
    if not _gains(graph, host, guest):
        return 0, 0
    low, high = min(pair, single), max(pair + 2, single + 1)
    _keep(run, low, high)
    run.joined[one] = False
    run.joined[host] = True
    at = low
    for k in range(high - low):
        action = run.kept[k]
        if action == guest:
            continue
        run.order[at], run.place[action] = action, at
        at += 1
        if action == host:
            run.order[at], run.place[guest] = guest, at
            at += 1
    return low, high


@compiled_part
def _join(graph, run, position, first, stop):
    """Joins a single action with another one of its rank, which moves to it."""
    action = run.order[position]
    partner = position - REACH + _draw(run, 2 * REACH + 1)
    if partner < first or partner >= stop or partner == position:
        return 0, 0
    other = run.order[partner]
    if run.joined[other] or is_second(run, other) or not _gains(graph, action, other):
        return 0, 0
    low, high = min(position, partner), max(position, partner) + 1
    _keep(run, low, high)
    if partner > position:
        for at in range(partner, position + 1, -1):
            moved = run.order[at - 1]
            run.order[at], run.place[moved] = moved, at
        run.order[position + 1], run.place[other] = other, position + 1
        run.joined[action] = True
    else:
        for at in range(partner, position - 1):
            moved = run.order[at + 1]
            run.order[at], run.place[moved] = moved, at
        run.order[position - 1], run.place[other] = other, position - 1
        run.joined[other] = True
    return low, high


@compiled_part
def _in_turn(graph, run, low, high):
    """Lets the actions of every lane in a rewritten window take turns as before; returns whether anything changed.

    So a forward that moves over others of its lane lets each of them begin a place sooner or later.
    """
    changed = False
    for k in range(low, high):
        early = run.order[k]
        for j in range(k + 1, high):
            late = run.order[j]
            if run.mark[late] < run.mark[early] and graph.lane[late] == graph.lane[early]:
                first, second = run.joined[early], run.joined[late]
                run.order[k], run.place[late], run.joined[late] = late, k, first
                run.order[j], run.place[early], run.joined[early] = early, j, second
                early = late
        if early != run.kept[k - low] or run.joined[early] != run.kept_joined[k - low]:
            changed = True
    return changed


@compiled_part
def _fits(graph, run, low, high):
    """Whether a rewritten window keeps the dependencies and the rank's memory."""
    for k in range(low, high):
        late = run.order[k]
        for j in range(low, k):
            early = run.order[j]
            if run.mark[early] > run.mark[late] and not _may_precede(graph, early, late):
                return False
    rank = _rank_at(graph, low)
    held, freed = 0.0, 0.0
    for position in range(graph.rank_start[rank], high):
        action = run.order[position]
        held += graph.takes[action]
        if run.joined[action]:
            freed = graph.frees[action]
            continue
        if held > graph.cap[rank]:
            return False
        held -= graph.frees[action] + freed
        freed = 0.0
    return True


@compiled_part
def _may_precede(graph, early, late):
    """Whether an action may come before one that it came after."""
    made = graph.outputs[late]
    return graph.inputs[early, 0] != made and graph.inputs[early, 1] != made


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
    program: Program, costs: StageCosts, memory: np.ndarray, pairs: Collection[str], clock: Clock, until: float
) -> Program:
    """Returns a Program that is no slower, fits the same memory, and keeps every lane's order of micro-batches.

    Args:
        program: A legal Program.
        costs: of its stages.
        memory: `[num_ranks]` the most activations a rank may hold.
        pairs: which actions may be overlapped anew, such as F&I.
        clock: counts a move as MOVE evaluations.
        until: share of the clock at which to end.
    """
    graph, run = graph_of(program, costs, memory, pairs), begin(program)
    fold = can_fold(program.placement, program.num_microbatches, memory) and is_mirrored(program)
    if fold:
        graph, run = folded(graph, run, program)
    now, trial = empty_times(graph), empty_times(graph)
    makespan = evaluate(graph, run, trial, now, -1.0, np.inf)
    count = max(1, min(100, ACTIONS // len(run.order)))
    best, order, joined = makespan, run.order.copy(), run.joined.copy()
    unit, idle, begun = float(graph.compute.mean()), 0, until
    while (share := clock.share()) < until:
        heat = unit * HOT * (COLD / HOT) ** ((share - begun) / (until - begun)) if begun < until else 0.0
        makespan = try_moves(graph, run, (now, trial), makespan, count, heat)
        clock.used += count * MOVE
        idle += count
        if makespan < best - EQUAL:
            best, order, joined, idle = makespan, run.order.copy(), run.joined.copy(), 0
        if begun == until and idle > PATIENCE * len(order):
            begun = share
    if fold:
        order, joined = unfolded(order, joined, program.table.slot_start[program.table.rank_start])
    return _program(program, order, joined)


def _program(program: Program, order: np.ndarray, joined: np.ndarray) -> Program:
    table = program.table
    first = np.ones(len(order) + 1, dtype=bool)
    first[1:-1] = ~joined[order[:-1]]
    slot_start = np.flatnonzero(first)
    edges = np.searchsorted(slot_start, table.slot_start[table.rank_start])
    moved = Table(edges, slot_start, table.op[order], table.stage[order], table.microbatch[order])
    return program_from_table("auto", program.placement, program.direction, moved)

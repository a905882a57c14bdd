"""The compiled core of the search: from a policy to a schedule and its makespan, event by event.

Every rank, when free, takes the slot of highest score among what it may run: per lane the next F, I and W in the order
of the micro-batches, so that channels keep their order by construction. An input whose message is already under way
counts too: then the rank may rather wait, and decides anew when anything else arrives. A forward that the rank's memory
does not admit is no candidate.
"""

from typing import Any, NamedTuple

import numpy as np

from megatron5d.pipeline_parallel.search.policy import Lanes, Rules
from megatron5d.pipeline_parallel.search.timeline import IS_COMPILED, Records, compiled, compiled_part

F, I, W = 0, 1, 2
NEVER = np.inf
STUCK = 1e9
"""A makespan beyond this says that the policy got stuck; what exceeds it is the number of actions left."""

RANK = np.dtype(
    [
        ("held", "f8"),  # activations
        ("left", "f8"),  # activations of forwards still to come
        ("pending", "f8"),  # activations between I and W
        ("started", "i8"),  # I begun
        ("slots", "i8"),  # slots begun
        ("last", "i8"),  # op begun last, W at first
        ("free", "f8"),  # when the last slot ends
        ("wake", "f8"),  # when the rank decides next
    ]
)
ENTRY = np.dtype([("op", "i4"), ("lane", "i4"), ("microbatch", "i4")])
"""One action of a schedule: op −1 is none; the micro-batch is counted within the lane's direction."""


class State(NamedTuple):
    """Where a list schedule stands."""

    ranks: np.ndarray  # [R] of RANK
    done: np.ndarray  # [3, G] how many F, I, W a lane has begun
    arrival: np.ndarray  # [2, G, M] when the input of an F and of an I is there


def empty_schedule(num_ranks: int, slots: int) -> np.ndarray:
    """Returns `[num_ranks, slots, 2]` of ENTRY without an action, to be filled by a list schedule."""
    schedule = np.zeros((num_ranks, slots, 2), dtype=ENTRY)
    schedule["op"] = -1
    return schedule


def list_schedule(lanes: Lanes, rules: Rules, schedule: np.ndarray) -> float:
    """Returns the makespan under a policy, or more than STUCK.

    Args:
        lanes: the problem.
        rules: the policy, brought to the problem.
        schedule: an `empty_schedule` with three slots for every micro-batch of a rank's lanes, which is filled; or one
            for no rank, where only the makespan matters.
    """
    ranks = np.zeros(len(lanes.cap), dtype=RANK)
    if IS_COMPILED:
        return float(_list_schedule(lanes, rules, schedule, ranks))
    plain: Any = Records
    lanes = lanes._replace(table=plain(lanes.table))
    rules = rules._replace(inputs=plain(rules.inputs), phases=plain(rules.phases))
    return float(_list_schedule(lanes, rules, plain(schedule), plain(ranks)))


@compiled
def _list_schedule(lanes, rules, schedule, ranks):
    num_lanes, num_ranks = len(lanes.table), len(lanes.cap)
    longest, remaining = 1, 0
    for lane in range(num_lanes):
        longest = max(longest, lanes.table[lane].count)
        remaining += 3 * lanes.table[lane].count
    arrival = np.full((2, num_lanes, longest), NEVER)
    for lane in range(num_lanes):
        record = lanes.table[lane]
        ranks[record.rank].left += record.count * record.size
        if record.beside[1] < 0:
            arrival[F, lane, :] = 0.0
    for rank in range(num_ranks):
        ranks[rank].last = W
    state = State(ranks, np.zeros((3, num_lanes), dtype=np.int64), arrival)
    remaining -= _run_events(lanes, rules, state, schedule)
    if remaining > 0:
        return STUCK + remaining
    makespan = 0.0
    for rank in range(num_ranks):
        makespan = max(makespan, ranks[rank].free)
    return makespan


@compiled_part
def _run_events(lanes, rules, state, schedule):
    """Lets the rank that decides first decide, until none has anything left; returns the number of actions run."""
    finished = 0
    while True:
        rank = 0
        for other in range(1, len(state.ranks)):
            if state.ranks[other].wake < state.ranks[rank].wake:
                rank = other
        now = state.ranks[rank].wake
        if now == NEVER:
            return finished
        start, first, one, second, two = _decide(lanes, rules, state, rank, now)
        if start > now:
            state.ranks[rank].wake = start
        else:
            finished += _commit(lanes, state, schedule, rank, now, (first, one, second, two))


@compiled_part
def _decide(lanes, rules, state, rank, now):
    """Returns when the best slot starts and what it is: op, lane, second op or -1, second lane."""
    phase = 1
    if state.ranks[rank].started == 0:
        phase = 0
    elif state.ranks[rank].left <= rules.ending:
        phase = 2
    f_score, f_ready, f_lane = _best_input(lanes, rules, state, rank, now, (phase, F))
    i_score, i_ready, i_lane = _best_input(lanes, rules, state, rank, now, (phase, I))
    w_score, w_lane = _best_weight(lanes, rules, state, rank, phase)
    best, start, first, one, second, two = f_score, f_ready, F, f_lane, -1, -1
    if i_score > best:
        best, start, first, one = i_score, i_ready, I, i_lane
    if w_score > best:
        best, start, first, one = w_score, now, W, w_lane
    bonus, idle = rules.phases[phase].bonus, rules.phases[phase].idle
    if lanes.pairs[0] and f_lane >= 0 and i_lane >= 0:
        score = max(f_score, i_score) + bonus[0] - idle * abs(f_ready - i_ready)
        if score > best and _saves(lanes, F, f_lane, I, i_lane):
            best, start, first, one, second, two = score, max(f_ready, i_ready), F, f_lane, I, i_lane
    if lanes.pairs[1] and f_lane >= 0 and w_lane >= 0:
        score = max(f_score, w_score - idle * (f_ready - now)) + bonus[1]
        if score > best and _saves(lanes, F, f_lane, W, w_lane):
            best, start, first, one, second, two = score, f_ready, F, f_lane, W, w_lane
    if lanes.pairs[2] and i_lane >= 0 and w_lane >= 0:
        score = max(i_score, w_score - idle * (i_ready - now)) + bonus[2]
        if score > best and _saves(lanes, I, i_lane, W, w_lane):
            best, start, first, one, second, two = score, i_ready, I, i_lane, W, w_lane
    return start, first, one, second, two


@compiled_part
def _best_input(lanes, rules, state, rank, now, what):
    """Returns for F or I the best score, when its input is there, and the lane."""
    phase, op = what
    rule = rules.inputs[op]
    idle, room = rules.phases[phase].idle, -state.ranks[rank].held
    rhythm = rules.phases[phase].rhythm[state.ranks[rank].last, op]
    best, best_ready, best_lane = -NEVER, NEVER, -1
    for chunk in range(lanes.held_by.shape[1]):
        lane = lanes.held_by[rank, chunk]
        record = lanes.table[lane]
        index = state.done[op, lane]
        if index >= record.count:
            continue
        arrival = state.arrival[op, lane, index]
        if arrival == NEVER:
            continue
        score = rules.score[rank, phase, op, chunk] + rhythm
        if op == F:
            if record.size > room + rules.limit[rank, chunk]:
                continue
            score -= rules.crowding[chunk] * (index - state.done[W, lane]) * record.size
        if index % rule.group != 0:
            score += rule.sticky
        ready = now
        if arrival > now:
            ready = arrival
            score -= idle * (arrival - now)
        else:
            score += rule.age * (now - arrival)
        if score > best:
            best, best_ready, best_lane = score, ready, lane
    return best, best_ready, best_lane


@compiled_part
def _best_weight(lanes, rules, state, rank, phase):
    """Returns the best score of a W, and its lane."""
    best, best_lane = -NEVER, -1
    pressure = rules.phases[phase].pressure * state.ranks[rank].pending
    pressure += rules.phases[phase].rhythm[state.ranks[rank].last, W]
    for chunk in range(lanes.held_by.shape[1]):
        lane = lanes.held_by[rank, chunk]
        if state.done[W, lane] < state.done[I, lane]:
            score = rules.score[rank, phase, W, chunk] + pressure
            if score > best:
                best, best_lane = score, lane
    return best, best_lane


@compiled_part
def _saves(lanes, one, one_lane, two, two_lane):
    """Whether an overlapped pair takes less time than its actions one after the other."""
    first, second = lanes.table[one_lane], lanes.table[two_lane]
    apart = first.compute[one] + first.a2a[one] + second.compute[two] + second.a2a[two]
    return apart - _pair_time(lanes, one, one_lane, two, two_lane) > 1e-9


@compiled_part
def _pair_time(lanes, one, one_lane, two, two_lane):
    first, second = lanes.table[one_lane], lanes.table[two_lane]
    longest = max(first.compute[one] + first.a2a[one], second.compute[two] + second.a2a[two])
    return max(max(first.compute[one] + second.compute[two], first.a2a[one] + second.a2a[two]), longest)


@compiled_part
def _commit(lanes, state, schedule, rank, now, slot):
    """Runs a slot and returns how many actions it holds."""
    first, one, second, two = slot
    if second < 0:
        end = now + lanes.table[one].compute[first] + lanes.table[one].a2a[first]
    else:
        end = now + _pair_time(lanes, first, one, second, two)
    here = state.ranks[rank]
    here.free = end
    here.wake = end
    _run(lanes, state, schedule, rank, now, (end, 0, first, one))
    if second >= 0:
        _run(lanes, state, schedule, rank, now, (end, 1, second, two))
    here.slots += 1
    return 1 if second < 0 else 2


@compiled_part
def _run(lanes, state, schedule, rank, now, action):
    """Notes one action of a slot, and sends its output on its way."""
    end, place, op, lane = action
    record, here = lanes.table[lane], state.ranks[rank]
    here.last = op
    index = state.done[op, lane]
    state.done[op, lane] = index + 1
    if len(schedule) > 0:
        entry = schedule[rank, here.slots, place]
        entry.op, entry.lane, entry.microbatch = op, lane, index
    if op == W:
        here.held -= record.size
        here.pending -= record.size
        return
    if op == F:
        here.held += record.size
        here.left -= record.size
        if record.beside[0] < 0:
            state.arrival[I, lane, index] = end
    else:
        here.started += 1
        here.pending += record.size
    beside = record.beside[op]
    if beside >= 0:
        state.arrival[op, beside, index] = end + record.latency[op]
        other = state.ranks[lanes.table[beside].rank]
        if other.wake > now and other.free <= now:
            other.wake = now

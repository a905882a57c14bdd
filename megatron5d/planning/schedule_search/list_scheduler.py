"""The compiled core of the search: from a policy to a schedule and its makespan, event by event.

Every rank, when free, takes the slot with the highest score among those it may run: per stream the
next F, I and W in the order of the micro-batches, so that channels keep their order by
construction. An input whose message is in flight counts too: then the rank may prefer to wait, and
decides again when anything else arrives. A forward that the rank's memory does not admit is no
candidate.

A policy is the set of numbers by which a rank decides. They refer to no micro-batch, so a policy
serves pipelines of any size.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron5d.pipeline_parallel.program import F, I, W
from megatron5d.planning.schedule_search.timeline import STUCK, compiled, compiled_part, overlapped

# A full backward is an I and its W.
PAIR_OPS = ((F, I), (F, W), (I, W))
"""Ops that policies overlap; pairs of one op rarely pay, so only the local search forms them."""
NEVER = np.inf


class Streams(NamedTuple):
    """A placement with its costs and memory as the list scheduler reads them.

    A stream is one stage in one direction: its micro-batches pass in order. S streams; R ranks with
    C streams each.
    """

    rank: np.ndarray  # [S] the holder
    # [S, 2] the streams of the next and the previous stage, -1 where there is none
    neighbor: np.ndarray
    latency: np.ndarray  # [S, 2] of the messages to them
    num_microbatches: np.ndarray  # [S]
    compute: np.ndarray  # [S, 3] time of F, I, W
    a2a: np.ndarray  # [S, 3] all-to-all inside F, I, W
    size: np.ndarray  # [S] activations of one micro-batch
    streams_of: (
        np.ndarray
    )  # [R, C] the streams of each rank, the one nearest to the embedding first
    # [R] position of a rank between an end (-1) and the middle or turn (1) of its route
    position: np.ndarray
    cap: np.ndarray  # [R] the most activations a rank may hold
    pairs: np.ndarray  # [3] which of PAIR_OPS may overlap
    num_ranks: int  # of the entire pipeline, of which these may be half
    unit: float  # mean compute of an action: the unit of time in policies


class Policy(NamedTuple):
    """A rank takes the slot with the highest score; C is the number of streams a rank holds.

    Three phases: warm-up until a rank's first I; the steady phase; cool-down once the rank has few
    forwards left.

    The score of an action is its priority, shifted by the position of its rank, by what the rank
    ran last, by how long its input has been waiting, by what is in flight or pending, and lowered
    by the time the rank would idle for it. A pair has the better score of the two, plus a bonus.
    Times are in `Streams.unit`.
    """

    priority: np.ndarray  # [3 phases, 3 ops, C]
    slope: np.ndarray  # [3 phases, 3 ops, C] times the rank's position
    # [3 phases, 3 ops, 3 ops] of an op after another: F I W F I W wastes no latency where it fits
    rhythm: np.ndarray
    age: np.ndarray  # [2] of F and I, per unit of time since the input arrived
    # [C] of F, per micro-batch of one rank's layers between F and W on its stream, over p
    crowding: np.ndarray
    # [3 phases] of W, per micro-batch of one rank's layers between I and W, over p
    pressure: np.ndarray
    idle: np.ndarray  # [3 phases] per unit of time that the rank would wait
    bonus: np.ndarray  # [3 phases, 3 pairs]
    # [2, C] share of the cap that an F leaves free: constant, and times the rank's position
    reserve: np.ndarray
    sticky: np.ndarray  # [2] of F and of I, while its stream is in the middle of a group
    group: np.ndarray  # [2] micro-batches in a group of F and of I, over p
    # [1] cool-down begins when a rank has this many forwards left, over p, in micro-batches
    ending: np.ndarray


class Rules(NamedTuple):
    """A policy in the ranks, times and activations of one problem."""

    score: np.ndarray  # [R, 3 phases, 3 ops, C] priority and slope
    limit: np.ndarray  # [R, C] activations after an F on this stream
    policy: Policy  # its other fields, per time and per activation


def rules_of(policy: Policy, streams: Streams) -> Rules:
    """The Rules of a policy for one problem."""
    num_ranks, position = streams.num_ranks, streams.position[:, None]
    reserve = np.clip(policy.reserve[0] + policy.reserve[1] * position, 0, 1)
    return Rules(
        score=policy.priority + policy.slope * position[:, None, None],
        limit=streams.cap[:, None] * (1 - reserve) + 1e-9,
        policy=policy._replace(
            age=policy.age / streams.unit,
            crowding=policy.crowding / num_ranks,
            pressure=policy.pressure / num_ranks,
            idle=policy.idle / streams.unit,
            group=np.maximum(np.rint(policy.group * num_ranks), 1),
            ending=policy.ending * num_ranks,
        ),
    )


@cache
def shipped_policies(num_streams: int) -> tuple[Policy, ...]:
    """The policies of policies.json, interpolated to ranks of `num_streams` streams."""
    entries = json.loads(Path(__file__).with_name("policies.json").read_text())["policies"]
    return tuple(_interpolated(entry["policy"], num_streams) for entry in entries)


def _interpolated(fields: dict[str, list], num_streams: int) -> Policy:
    policy = {name: np.array(field, dtype=float) for name, field in fields.items()}
    last = len(policy["crowding"]) - 1
    points = np.linspace(0, last, num_streams) if num_streams > 1 else np.array([last / 2])
    below = np.floor(points).astype(int)
    above, share = np.minimum(below + 1, last), points - below
    for name in ("priority", "slope", "crowding", "reserve"):
        policy[name] = policy[name][..., below] * (1 - share) + policy[name][..., above] * share
    # numba compiles once for one memory layout.
    return Policy(**{name: np.ascontiguousarray(field) for name, field in policy.items()})


class State(NamedTuple):
    """The progress of a list schedule. R ranks, S streams, M micro-batches."""

    activations: np.ndarray  # [R] held by a rank
    remaining: np.ndarray  # [R] activations of forwards that have not begun
    pending: np.ndarray  # [R] activations between I and W
    last_op: np.ndarray  # [R] the op begun last, W at first
    free: np.ndarray  # [R] when the last slot ends
    wake: np.ndarray  # [R] when the rank decides next
    begun: np.ndarray  # [3, S] how many F, I, W of a stream have begun
    arrival: np.ndarray  # [2, S, M] when the input of an F and of an I arrives


@compiled
def list_schedule(streams: Streams, rules: Rules, actions: np.ndarray) -> float:
    """The makespan under a policy, or STUCK plus the number of actions that did not run.

    Args:
        streams: the problem.
        rules: the policy for it.
        actions: `[num_actions, 5]` is filled in the order of time with rank, whether it is the
            second of a pair, op, stream, and the index of its micro-batch within the stream; empty
            if only the makespan matters.
    """
    num_streams, num_ranks = len(streams.rank), len(streams.cap)
    arrival = np.full((2, num_streams, streams.num_microbatches.max()), NEVER)
    zeros = np.zeros((5, num_ranks))
    last_op = np.full(num_ranks, W)
    begun = np.zeros((3, num_streams), dtype=np.int64)
    state = State(zeros[0], zeros[1], zeros[2], last_op, zeros[3], zeros[4], begun, arrival)
    for stream in range(num_streams):
        size = streams.num_microbatches[stream] * streams.size[stream]
        state.remaining[streams.rank[stream]] += size
        if streams.neighbor[stream, 1] < 0:
            arrival[F, stream, :] = 0.0
    num_missing = 3 * streams.num_microbatches.sum() - _run_events(streams, rules, state, actions)
    return STUCK + num_missing if num_missing > 0 else state.free.max()


@compiled_part
def _run_events(streams, rules, state, actions):
    """Lets the earliest rank decide until none has anything to run; returns the number of actions
    run."""
    num_run = 0
    while True:
        rank = 0
        for other in range(len(state.wake)):
            if state.wake[other] < state.wake[rank]:
                rank = other
        now = state.wake[rank]
        if now == NEVER:
            return num_run
        start, first, one, second, two = _decide(streams, rules, state, rank, now)
        if start > now:
            state.wake[rank] = start
            continue
        end = now + _time(streams, first, one, second, two)
        state.free[rank], state.wake[rank] = end, end
        num_run = _run(streams, state, actions, rank, now, (end, num_run, 0, first, one))
        if second >= 0:
            num_run = _run(streams, state, actions, rank, now, (end, num_run, 1, second, two))


@compiled_part
def _decide(streams, rules, state, rank, now):
    """The start of the best slot, and its actions: op, stream, second op or -1, second stream."""
    phase = _phase(streams, rules, state, rank)
    f = _best(streams, rules, state, rank, now, phase, F)
    i = _best(streams, rules, state, rank, now, phase, I)
    w = _best(streams, rules, state, rank, now, phase, W)
    scores, ready, candidates = (f[0], i[0], w[0]), (f[1], i[1], w[1]), (f[2], i[2], w[2])
    best, start, first, one = -NEVER, NEVER, -1, -1
    for op in range(3):
        if scores[op] > best:
            best, start, first, one = scores[op], ready[op], op, candidates[op]
    pair = _best_pair(streams, rules.policy, phase, best, scores, ready, candidates)
    if pair < 0:
        return start, first, one, -1, -1
    a, b = PAIR_OPS[pair]
    return max(ready[a], ready[b]), a, candidates[a], b, candidates[b]


@compiled_part
def _phase(streams, rules, state, rank):
    """0 in warm-up, 1 in the steady phase, 2 in cool-down."""
    phase = 0
    for chunk in range(streams.streams_of.shape[1]):
        if state.begun[I, streams.streams_of[rank, chunk]] > 0:
            phase = 1
    if phase == 1 and state.remaining[rank] <= rules.policy.ending[0]:
        phase = 2
    return phase


@compiled_part
def _best_pair(streams, policy, phase, best, scores, ready, candidates):
    """The index of the pair that saves time and scores highest, above `best`; -1 if none does."""
    best_pair = -1
    for pair in range(3):
        a, b = PAIR_OPS[pair]
        if not streams.pairs[pair] or candidates[a] < 0 or candidates[b] < 0:
            continue
        wait = policy.idle[phase] * abs(ready[a] - ready[b])
        score = max(scores[a], scores[b] - wait) if b == W else max(scores[a], scores[b]) - wait
        score += policy.bonus[phase, pair]
        saved = _time(streams, a, candidates[a], -1, -1) + _time(streams, b, candidates[b], -1, -1)
        saved -= _time(streams, a, candidates[a], b, candidates[b])
        if score > best and saved > 1e-9:
            best, best_pair = score, pair
    return best_pair


@compiled_part
def _best(streams, rules, state, rank, now, phase, op):
    """The best score of an op, when its input arrives, and the stream, or -1 where none may run."""
    policy = rules.policy
    best, best_ready, best_stream = -NEVER, NEVER, -1
    for chunk in range(streams.streams_of.shape[1]):
        stream = streams.streams_of[rank, chunk]
        index = state.begun[op, stream]
        if index == (state.begun[I, stream] if op == W else streams.num_microbatches[stream]):
            continue
        score = rules.score[rank, phase, op, chunk] + policy.rhythm[phase, state.last_op[rank], op]
        ready = now
        if op == W:
            score += policy.pressure[phase] * state.pending[rank]
        else:
            ready = state.arrival[op, stream, index]
            if ready == NEVER:
                continue
            if op == F:
                if streams.size[stream] > rules.limit[rank, chunk] - state.activations[rank]:
                    continue
                in_flight = index - state.begun[W, stream]
                score -= policy.crowding[chunk] * in_flight * streams.size[stream]
            if index % policy.group[op] != 0:
                score += policy.sticky[op]
            score += policy.age[op] * max(0.0, now - ready) - policy.idle[phase] * max(
                0.0, ready - now
            )
        if score > best:
            best, best_ready, best_stream = score, max(now, ready), stream
    return best, best_ready, best_stream


@compiled_part
def _time(streams, one_op, one, two_op, two):
    """The time of a slot, of one action or of two."""
    compute, a2a = streams.compute[one, one_op], streams.a2a[one, one_op]
    if two < 0:
        return compute + a2a
    return overlapped(compute, a2a, streams.compute[two, two_op], streams.a2a[two, two_op])


@compiled_part
def _run(streams, state, actions, rank, now, action):
    """Records one action and sends its output; returns the number of actions so far."""
    end, num_run, is_second, op, stream = action
    index = state.begun[op, stream]
    state.begun[op, stream] = index + 1
    state.last_op[rank] = op
    if len(actions) > 0:
        entry = actions[num_run]
        entry[0], entry[1], entry[2], entry[3], entry[4] = rank, is_second, op, stream, index
    size = streams.size[stream]
    if op == F:
        state.activations[rank] += size
        state.remaining[rank] -= size
        if streams.neighbor[stream, F] < 0:
            state.arrival[I, stream, index] = end
    elif op == I:
        state.pending[rank] += size
    else:
        state.activations[rank] -= size
        state.pending[rank] -= size
        return num_run + 1
    neighbor = streams.neighbor[stream, op]
    if neighbor >= 0:
        state.arrival[op, neighbor, index] = end + streams.latency[stream, op]
        receiver = streams.rank[neighbor]
        if state.wake[receiver] > now and state.free[receiver] <= now:
            state.wake[receiver] = now
    return num_run + 1

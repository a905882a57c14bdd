"""When every action begins and ends under a given order of each rank's slots.

Positions count the actions of all ranks, rank after rank. Two adjacent actions run as one slot if
the first is `joined`. numba compiles these functions where it is installed; without it they run as
plain Python.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, B, F, I, Program, W
from megatron5d.pipeline_parallel.simulate import dependencies

_njit: Any
try:
    from numba import njit as _njit
except ImportError:
    _njit = None

Function = TypeVar("Function", bound=Callable[..., Any])

IS_COMPILED = _njit is not None
"""Whether a list schedule takes milliseconds (numba) or most of a second (plain Python)."""


def compiled(function: Function, **options: bool) -> Function:
    """Compiles a function on its first call and caches it on disk; it releases the GIL."""
    return function if _njit is None else _njit(cache=True, nogil=True, **options)(function)


def compiled_part(function: Function) -> Function:
    """Compiles a function that compiled ones call and that allocates no array.

    Without the runtime for allocation, numba does not count references to arrays, which takes four
    fifths of a list schedule's time.
    """
    return compiled(function, _nrt=False)


STUCK = 1e9
"""A makespan that means that slots wait for each other, or that a limit is exceeded."""


class Graph(NamedTuple):
    """What does not change while slots move. A actions, R ranks."""

    rank_start: np.ndarray  # [R + 1] positions of each rank
    rank: np.ndarray  # [A]
    inputs: np.ndarray  # [A, 2] the actions whose outputs it waits for, or -1
    latencies: np.ndarray  # [A, 2] of the messages that bring them
    op: np.ndarray  # [A] index into OPS
    microbatch: np.ndarray  # [A]
    stream: np.ndarray  # [A] equal numbers keep their order: one op of one stage in one direction
    compute: np.ndarray  # [A]
    a2a: np.ndarray  # [A]
    allocates: np.ndarray  # [A] activations at its start
    frees: np.ndarray  # [A] activations at its end
    cap: np.ndarray  # [R]
    allowed: np.ndarray  # [ops, ops] which ops may be joined
    pairing: bool  # whether any may


class Run(NamedTuple):
    """The current order of the local search, and what a move needs."""

    order: np.ndarray  # [A] the action at every position
    position: np.ndarray  # [A] the position of every action
    joined: np.ndarray  # [A] whether an action runs together with the next one
    saved: np.ndarray  # [A] the actions of the window in their order before the move
    saved_joined: np.ndarray  # [A]
    random_state: np.ndarray  # [1] the only source of randomness


class Times(NamedTuple):
    """When everything happens under one order."""

    start: np.ndarray  # [A]
    end: np.ndarray  # [A] -1 while unknown
    free: np.ndarray  # [R] when a rank's last timed slot ends
    remaining: np.ndarray  # [R] compute of its slots that have not been timed
    cursor: np.ndarray  # [R] its next position


def graph_of(
    program: Program, costs: StageCosts, memory: np.ndarray, pairs: Collection[str]
) -> Graph:
    """The Graph of a Program; the arguments are those of a Problem."""
    table, (inputs, latencies, outputs) = program.table, dependencies(program, costs.comm)
    op, stage = table.op.astype(np.int64), table.stage
    # The largest input is the value that exists from the beginning, which no action makes.
    makers = np.full(inputs.max() + 1, -1)
    makers[outputs] = np.arange(len(op))
    # A full backward is in one stream with the input gradients, as both send the same message.
    message = np.where(op == B, I, op)
    allowed = np.zeros((len(OPS), len(OPS)), dtype=np.bool_)
    for pair in pairs if costs.a2a.any() else ():  # otherwise there is nothing to hide
        one, two = (OPS.index(name) for name in pair.split("&"))
        allowed[one, two] = allowed[two, one] = True
    return Graph(
        rank_start=table.slot_start[table.rank_start],
        rank=table.rank,
        inputs=makers[inputs],
        latencies=latencies,
        op=op,
        microbatch=table.microbatch.astype(np.int64),
        stream=(program.action_direction * program.num_stages + stage) * len(OPS) + message,
        compute=costs.compute[op, stage],
        a2a=costs.a2a[op, stage],
        allocates=np.where(op == F, costs.activation[stage], 0.0),
        frees=np.where((op == W) | (op == B), costs.activation[stage], 0.0),
        cap=memory + 1e-9,
        allowed=allowed,
        pairing=bool(allowed.any()),
    )


def initial_run(program: Program, seed: int) -> Run:
    """The order in which a Program runs its slots."""
    starts, num_actions = program.table.slot_start, len(program.table.op)
    joined = np.zeros(num_actions, dtype=np.bool_)
    joined[starts[:-1][np.diff(starts) == 2]] = True
    order, position, saved = (np.arange(num_actions) for _ in range(3))
    return Run(order, position, joined, saved, joined.copy(), np.array([12345 + seed]))


def empty_times(graph: Graph) -> Times:
    """Allocates the times of one order."""
    num_actions, num_ranks = len(graph.op), len(graph.cap)
    start, end, free, remaining = (
        np.zeros(size) for size in (num_actions, num_actions, num_ranks, num_ranks)
    )
    return Times(start, end, free, remaining, np.zeros(num_ranks, dtype=int))


@compiled_part
def evaluate(graph, run, before, times, since, limit):
    """Computes all times; returns the makespan, or STUCK if it does not end or exceeds the limit.

    Actions that begin earlier than `since` under the times `before` keep them, which are not
    written again.
    """
    _resume(graph, run, before, times, since)
    ranks, makespan, progresses = len(graph.cap), 0.0, True
    while progresses:
        progresses = False
        for rank in range(ranks):
            while times.cursor[rank] < graph.rank_start[rank + 1] and _run_slot(
                graph, run, times, rank
            ):
                progresses = True
            if times.free[rank] + times.remaining[rank] > limit:
                return STUCK
    for rank in range(ranks):
        is_done = times.cursor[rank] == graph.rank_start[rank + 1]
        makespan = max(makespan, times.free[rank] if is_done else STUCK)
    return makespan


@compiled_part
def _resume(graph, run, before, times, since):
    """Moves every rank to its first slot that does not begin before `since`."""
    for action in range(len(graph.op)):
        times.end[action] = before.end[action] if before.start[action] < since else -1.0
    for rank in range(len(graph.cap)):
        first, stop = graph.rank_start[rank], graph.rank_start[rank + 1]
        times.cursor[rank], times.free[rank], times.remaining[rank] = first, 0.0, 0.0
        for position in range(first, stop):
            action = run.order[position]
            if times.end[action] < 0:
                times.remaining[rank] += graph.compute[action]
            else:
                times.cursor[rank], times.free[rank] = position + 1, times.end[action]


@compiled_part
def _run_slot(graph, run, times, rank):
    """Runs the next slot of a rank if all its inputs are made; returns whether it has run."""
    position = times.cursor[rank]
    one = run.order[position]
    two = run.order[position + 1] if run.joined[one] else -1
    arrival, _ = last_arrival(graph, times, one, two)
    if arrival == np.inf:
        return False
    start = max(times.free[rank], arrival)
    end = start + duration(graph, one, two)
    for action in (one, two):
        if action >= 0:
            times.start[action], times.end[action] = start, end
            times.remaining[rank] -= graph.compute[action]
    times.free[rank], times.cursor[rank] = end, position + (1 if two < 0 else 2)
    return True


@compiled_part
def last_arrival(graph, times, one, two):
    """When the last input of a slot arrives, inf if unknown, and the action that makes it."""
    arrival, last = 0.0, -1
    for action in (one, two):
        for k in range(2 if action >= 0 else 0):
            maker = graph.inputs[action, k]
            if maker >= 0 and times.end[maker] < 0:
                return np.inf, maker
            if maker >= 0 and times.end[maker] + graph.latencies[action, k] > arrival:
                arrival, last = times.end[maker] + graph.latencies[action, k], maker
    return arrival, last


@compiled_part
def duration(graph, one, two):
    """The time of a slot, of one action or of two."""
    if two < 0:
        return graph.compute[one] + graph.a2a[one]
    return overlapped(graph.compute[one], graph.a2a[one], graph.compute[two], graph.a2a[two])


@compiled_part
def overlapped(compute, a2a, other_compute, other_a2a):
    """The time of two overlapped actions, as `simulate` counts it."""
    return max(
        max(compute + other_compute, a2a + other_a2a), max(compute + a2a, other_compute + other_a2a)
    )

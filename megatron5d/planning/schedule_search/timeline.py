"""The longest path through a Program: when every action begins and ends under a given order of each
rank's slots.

Positions count the actions of all ranks, rank after rank. Two neighbours run as one slot where the
first is `joined`. numba compiles these functions where it is installed; without it they run as
plain Python.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, Program
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
    """Returns the function, compiled on its first call and cached on disk; it releases the
    interpreter lock."""
    return function if _njit is None else _njit(cache=True, nogil=True, **options)(function)


def compiled_part(function: Function) -> Function:
    """Returns a function that compiled ones call and that allocates no array.

    Without the runtime for allocation, numba counts no references to arrays: four fifths of a list
    schedule's time.
    """
    return compiled(function, _nrt=False)


STUCK = 1e9
"""A makespan that says that slots wait for each other in a circle, or that a limit is exceeded."""


class Graph(NamedTuple):
    """What stays while slots move. A actions, R ranks."""

    rank_start: np.ndarray  # [R + 1] positions of each rank
    rank: np.ndarray  # [A]
    inputs: np.ndarray  # [A, 2] the actions whose outputs it waits for, or -1
    latencies: np.ndarray  # [A, 2] of the messages that bring them
    op: np.ndarray  # [A] index into OPS
    microbatch: np.ndarray  # [A]
    stream: np.ndarray  # [A] equal numbers keep their order: one op of one stage in one direction
    compute: np.ndarray  # [A]
    a2a: np.ndarray  # [A]
    takes: np.ndarray  # [A] activations at its start
    frees: np.ndarray  # [A] activations at its end
    cap: np.ndarray  # [R]
    allowed: np.ndarray  # [ops, ops] which actions may be joined
    pairing: bool  # whether any may


class Run(NamedTuple):
    """Where the local search stands, and what a move needs."""

    order: np.ndarray  # [A] the action at every position
    place: np.ndarray  # [A] the position of every action
    joined: np.ndarray  # [A] whether an action runs together with the one behind it
    kept: np.ndarray  # [A] the actions of the window in their old order
    kept_joined: np.ndarray  # [A]
    chance: np.ndarray  # [1] state of the only source of chance


class Times(NamedTuple):
    """When everything happens under one order."""

    start: np.ndarray  # [A]
    end: np.ndarray  # [A] -1 while it is not known
    free: np.ndarray  # [R] when a rank is done
    left: np.ndarray  # [R] compute that a rank has still to do
    cursor: np.ndarray  # [R] its next position


def graph_of(
    program: Program, costs: StageCosts, memory: np.ndarray, pairs: Collection[str]
) -> Graph:
    """Returns what stays of a Program while its slots move; the arguments are those of `refine`."""
    table, (inputs, latencies, outputs) = program.table, dependencies(program, costs.comm)
    op, stage = table.op.astype(np.int64), table.stage
    makers = np.full(3 * program.num_stages * program.num_microbatches + 1, -1)
    makers[outputs] = np.arange(len(op))
    # a full backward is in one stream with the input gradients, for both send the same message
    sends = np.where(op == OPS.index("B"), OPS.index("I"), op)
    direction = np.array(program.direction, dtype=np.int64)[table.microbatch]
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
        stream=(direction * program.num_stages + stage) * len(OPS) + sends,
        compute=costs.compute[op, stage],
        a2a=costs.a2a[op, stage],
        takes=np.where(op == OPS.index("F"), costs.activation[stage], 0.0),
        frees=np.where(np.isin(op, (OPS.index("W"), OPS.index("B"))), costs.activation[stage], 0.0),
        cap=memory + 1e-9,
        allowed=allowed,
        pairing=bool(allowed.any()),
    )


def begin(program: Program, seed: int) -> Run:
    """Returns the order in which a Program runs its slots."""
    starts, num_actions = program.table.slot_start, len(program.table.op)
    joined = np.zeros(num_actions, dtype=np.bool_)
    joined[starts[:-1][np.diff(starts) == 2]] = True
    order, place, kept = (np.arange(num_actions) for _ in range(3))
    return Run(order, place, joined, kept, joined.copy(), np.array([12345 + seed]))


def empty_times(graph: Graph) -> Times:
    """Returns room for the times of one order."""
    start, end, free, left = (
        np.zeros(len(sizes)) for sizes in (graph.op, graph.op, graph.cap, graph.cap)
    )
    return Times(start, end, free, left, np.zeros(len(graph.cap), dtype=int))


@compiled_part
def evaluate(graph, run, before, times, since, limit):
    """Notes when everything happens; returns the makespan, or STUCK where it never ends or must
    exceed the limit.

    What begins earlier than `since` under the order `before` stays as it is, and is not noted
    again.
    """
    _resume(graph, run, before, times, since)
    ranks, makespan, moving = len(graph.cap), 0.0, True
    while moving:
        moving = False
        for rank in range(ranks):
            while times.cursor[rank] < graph.rank_start[rank + 1] and _run_slot(
                graph, run, times, rank
            ):
                moving = True
            if times.free[rank] + times.left[rank] > limit:
                return STUCK
    for rank in range(ranks):
        makespan = max(
            makespan,
            times.free[rank] if times.cursor[rank] == graph.rank_start[rank + 1] else STUCK,
        )
    return makespan


@compiled_part
def _resume(graph, run, before, times, since):
    """Brings every rank to its first slot that does not begin before `since`."""
    for action in range(len(graph.op)):
        times.end[action] = before.end[action] if before.start[action] < since else -1.0
    for rank in range(len(graph.cap)):
        times.cursor[rank], times.free[rank], times.left[rank] = graph.rank_start[rank], 0.0, 0.0
        for position in range(graph.rank_start[rank], graph.rank_start[rank + 1]):
            action = run.order[position]
            if times.end[action] < 0:
                times.left[rank] += graph.compute[action]
            else:
                times.cursor[rank], times.free[rank] = position + 1, times.end[action]


@compiled_part
def _run_slot(graph, run, times, rank):
    """Runs the next slot of a rank, if all that it waits for has been made; returns whether it
    has."""
    position = times.cursor[rank]
    one = run.order[position]
    two = run.order[position + 1] if run.joined[one] else -1
    arrival, last = awaited(graph, times, one, two)
    if arrival == np.inf:
        return False
    start = max(times.free[rank], arrival)
    end = start + duration(graph, one, two)
    for action in (one, two):
        if action >= 0:
            times.start[action], times.end[action] = start, end
            times.left[rank] -= graph.compute[action]
    times.free[rank], times.cursor[rank] = end, position + (1 if two < 0 else 2)
    return True


@compiled_part
def awaited(graph, times, one, two):
    """Returns when the last input of a slot arrives, inf where that is not known, and the action
    that makes it."""
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
    """Returns the time of a slot, of one action or of two."""
    if two < 0:
        return graph.compute[one] + graph.a2a[one]
    return overlapped(graph.compute[one], graph.a2a[one], graph.compute[two], graph.a2a[two])


@compiled_part
def overlapped(compute, a2a, other_compute, other_a2a):
    """Returns the time of two overlapped actions, as `simulate` counts it."""
    return max(
        max(compute + other_compute, a2a + other_a2a), max(compute + a2a, other_compute + other_a2a)
    )

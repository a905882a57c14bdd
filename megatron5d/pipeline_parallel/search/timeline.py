"""The longest path through a Program: when every action begins and ends under a given order of each rank's slots.

Positions count the actions of all ranks, rank after rank. Two neighbours run as one slot where the first is `joined`.
numba compiles these functions where it is installed; without it they run as plain Python.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, Program
from megatron5d.pipeline_parallel.simulate import wiring

_njit: Any
try:
    from numba import njit as _njit
except ImportError:
    _njit = None

Function = TypeVar("Function", bound=Callable[..., Any])

IS_COMPILED = _njit is not None
"""Whether a list schedule takes milliseconds (numba) or most of a second (plain Python)."""


def compiled(function: Function, **options: bool) -> Function:
    """Returns the function, compiled on its first call and cached on disk; it releases the interpreter lock."""
    return function if _njit is None else _njit(cache=True, nogil=True, **options)(function)


def compiled_part(function: Function) -> Function:
    """Returns a function that compiled ones call and that allocates no array.

    Without the runtime for allocation, arrays are not reference-counted on the way in and out, and that counting took
    four fifths of the time of a list schedule.
    """
    return compiled(function, _nrt=False)


STUCK = 1e9
"""A makespan that says that slots wait for each other in a circle, or that a limit is exceeded."""


class Graph(NamedTuple):
    """What stays while slots move. A actions, V values (see `simulate.wiring`), R ranks."""

    rank_start: np.ndarray  # [R + 1] positions of each rank
    inputs: np.ndarray  # [A, 2] values that an action waits for
    latencies: np.ndarray  # [A, 2] of the messages that bring them
    outputs: np.ndarray  # [A] the value it makes
    makers: np.ndarray  # [V] the action that makes a value
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
    chance: np.ndarray  # [1] state of the only source of chance
    mark: np.ndarray  # [A] where in the window an action was
    kept: np.ndarray  # [A] the actions of the window in their old order
    kept_joined: np.ndarray  # [A]


class Times(NamedTuple):
    """When everything happens under one order."""

    start: np.ndarray  # [A]
    end: np.ndarray  # [A]
    arrival: np.ndarray  # [A] when the last input of its slot arrives
    last: np.ndarray  # [A] the action that made it, or -1
    free: np.ndarray  # [R] when a rank is done
    left: np.ndarray  # [R] compute that a rank has still to do
    cursor: np.ndarray  # [R] its next position
    todo: np.ndarray  # [2R] ranks that may continue
    ready: np.ndarray  # [V] when a value is made, or -1
    waiting: np.ndarray  # [V] the rank that waits for it, or -1


def graph_of(program: Program, costs: StageCosts, memory: np.ndarray, pairs: Collection[str]) -> Graph:
    """Returns what stays of a Program while its slots move.

    Args:
        program: A legal Program.
        costs: of its stages.
        memory: `[num_ranks]` the most activations a rank may hold.
        pairs: which actions may be overlapped anew, such as F&I; none are where there is no all-to-all to hide.
    """
    table = program.table
    inputs, latencies, outputs, num_values = wiring(program, costs.comm)
    makers = np.full(num_values, -1)
    makers[outputs] = np.arange(len(outputs))
    op = table.op
    # a full backward is in one stream with the input gradients, for both send the same message
    sends = np.where(op == OPS.index("B"), OPS.index("I"), op)
    direction = np.array(program.direction, dtype=np.int64)[table.microbatch]
    allowed = np.zeros((len(OPS), len(OPS)), dtype=np.bool_)
    for pair in pairs if costs.a2a.any() else ():
        one, two = (OPS.index(name) for name in pair.split("&"))
        allowed[one, two] = allowed[two, one] = True
    size = costs.activation[table.stage]
    return Graph(
        rank_start=table.slot_start[table.rank_start],
        inputs=np.array(inputs).reshape(-1, 2),
        latencies=np.array(latencies).reshape(-1, 2),
        outputs=np.array(outputs),
        makers=makers,
        op=op.astype(np.int64),
        microbatch=table.microbatch.astype(np.int64),
        stream=(direction * program.num_stages + table.stage) * len(OPS) + sends,
        compute=costs.compute[op, table.stage],
        a2a=costs.a2a[op, table.stage],
        takes=np.where(op == OPS.index("F"), size, 0.0),
        frees=np.where(np.isin(op, (OPS.index("W"), OPS.index("B"))), size, 0.0),
        cap=memory + 1e-9,
        allowed=allowed,
        pairing=bool(allowed.any()),
    )


def begin(program: Program, seed: int) -> Run:
    """Returns the order in which a Program runs its slots."""
    starts, num_actions = program.table.slot_start, len(program.table.op)
    joined = np.zeros(num_actions, dtype=np.bool_)
    joined[starts[:-1][np.diff(starts) == 2]] = True
    order, place, mark, kept = (np.arange(num_actions) for _ in range(4))
    return Run(order, place, joined, np.array([12345 + seed]), mark, kept, joined.copy())


def empty_times(graph: Graph) -> Times:
    """Returns room for the times of one order."""
    num_actions, num_ranks, num_values = len(graph.op), len(graph.cap), len(graph.makers)
    start, end, arrival = (np.zeros(num_actions) for _ in range(3))
    free, left = np.zeros(num_ranks), np.zeros(num_ranks)
    last, cursor, todo, waiting = (np.zeros(n, dtype=int) for n in (num_actions, num_ranks, 2 * num_ranks, num_values))
    return Times(start, end, arrival, last, free, left, cursor, todo, np.zeros(num_values), waiting)


@compiled_part
def evaluate(graph, run, before, times, since, limit):
    """Notes when everything happens; returns the makespan, or STUCK where it never ends or must exceed the limit.

    What begins earlier than `since` under the order `before` stays as it is, and is not noted again.
    """
    num_ranks = len(graph.cap)
    done = _resume(graph, run, before, times, since)
    count = num_ranks
    while count > 0:
        rank = times.todo[count - 1]
        count -= 1
        while times.cursor[rank] < graph.rank_start[rank + 1]:
            first = times.cursor[rank]
            missing = _run_slot(graph, run, times, rank)
            if missing >= 0:
                times.waiting[missing] = rank
                break
            if times.free[rank] + times.left[rank] > limit:
                return STUCK
            done += times.cursor[rank] - first
            for position in range(first, times.cursor[rank]):
                value = graph.outputs[run.order[position]]
                if times.waiting[value] >= 0:
                    times.todo[count] = times.waiting[value]
                    count += 1
                    times.waiting[value] = -1
    makespan = 0.0
    for rank in range(num_ranks):
        makespan = max(makespan, times.free[rank])
    return makespan if done == len(run.order) else STUCK


@compiled_part
def _resume(graph, run, before, times, since):
    """Brings every rank to its first slot that does not begin before `since`; returns the number of actions passed."""
    for value in range(len(graph.makers)):
        maker = graph.makers[value]
        known = maker >= 0 and before.start[maker] < since
        times.ready[value] = before.end[maker] if known else -1.0
        times.waiting[value] = -1
    times.ready[-1] = 0.0
    passed = 0
    for rank in range(len(graph.cap)):
        first, stop = graph.rank_start[rank], graph.rank_start[rank + 1]
        low, high = first, stop
        while low < high:
            middle = (low + high) // 2
            if before.start[run.order[middle]] < since:
                low = middle + 1
            else:
                high = middle
        times.cursor[rank], times.todo[rank] = low, rank
        times.free[rank] = before.end[run.order[low - 1]] if low > first else 0.0
        times.left[rank] = 0.0
        for position in range(low, stop):
            times.left[rank] += graph.compute[run.order[position]]
        passed += low - first
    return passed


@compiled_part
def _run_slot(graph, run, times, rank):
    """Runs the next slot of a rank; returns the value that it still waits for, or -1."""
    position = times.cursor[rank]
    one = run.order[position]
    two = run.order[position + 1] if run.joined[one] else -1
    arrival, last = 0.0, -1
    for action in (one, two):
        if action < 0:
            continue
        for k in range(2):
            value = graph.inputs[action, k]
            time = times.ready[value]
            if time < 0:
                return value
            time += graph.latencies[action, k]
            if time > arrival:
                arrival, last = time, graph.makers[value]
    start = max(times.free[rank], arrival)
    end = start + duration(graph, one, two)
    for action in (one, two):
        if action >= 0:
            times.start[action], times.end[action] = start, end
            times.arrival[action], times.last[action] = arrival, last
            times.ready[graph.outputs[action]] = end
            times.left[rank] -= graph.compute[action]
    times.free[rank] = end
    times.cursor[rank] = position + (1 if two < 0 else 2)
    return -1


@compiled_part
def duration(graph, one, two):
    """Returns the time of a slot, of one action or of two."""
    if two < 0:
        return graph.compute[one] + graph.a2a[one]
    return overlapped(graph.compute[one], graph.a2a[one], graph.compute[two], graph.a2a[two])


@compiled_part
def overlapped(compute, a2a, other_compute, other_a2a):
    """Returns the time of two overlapped actions, as `simulate` counts it."""
    return max(max(compute + other_compute, a2a + other_a2a), max(compute + a2a, other_compute + other_a2a))


@compiled_part
def is_second(run, action):
    """Returns whether an action runs together with the one before it."""
    position = run.place[action]
    return position > 0 and run.joined[run.order[position - 1]]

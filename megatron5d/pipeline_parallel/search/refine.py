"""Local search on a finished Program: what makes the critical path wait is moved out of its way, slot by slot.

The makespan is the longest path through the slots of all ranks. Where a slot on it waits for the slot before it on its
rank although its input is there already, one of the two jumps over the other, or over several. Where there is an
all-to-all to hide, slots on that path also take up a partner, let theirs go, or pass it on. Every Program on the way is
legal.

Source: van Laarhoven, Aarts, Lenstra 1992, Job shop scheduling by simulated annealing, for moves on the critical path.
"""

from collections.abc import Collection

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, Program, Table, program_from_table
from megatron5d.pipeline_parallel.search.clock import Clock
from megatron5d.pipeline_parallel.search.moves import try_moves
from megatron5d.pipeline_parallel.search.timing import Graph, Run, Times, evaluate
from megatron5d.pipeline_parallel.simulate import wiring

ACTIONS = 1 << 20
"""Actions that are timed anew between two looks at the clock."""
MOVE = 1 / 32
"""What a move counts for beside a list schedule of all actions: it times only those anew that come after it."""


def refine(
    program: Program, costs: StageCosts, memory: np.ndarray, pairs: Collection[str], clock: Clock, until: float
) -> Program:
    """Return a Program that is no slower, fits the same memory, and keeps every lane's order of micro-batches.

    Args:
        program: A legal Program.
        costs: Of its stages.
        memory: `[num_ranks]` the most activations a rank may hold.
        pairs: Which actions may be overlapped anew, such as F&I.
        clock: Counts a move as MOVE evaluations.
        until: Share of the clock at which to end.
    """
    graph, run = _graph(program, costs, memory, pairs), _begin(program)
    now, trial = _times(graph), _times(graph)
    makespan = evaluate(graph, run, trial, now, -1.0, np.inf)
    count = max(1, min(100, ACTIONS // len(run.order)))
    while clock.share() < until:
        makespan = try_moves(graph, run, (now, trial), makespan, count)
        clock.used += count * MOVE
    return _program(program, run.order, run.joined)


def _graph(program: Program, costs: StageCosts, memory: np.ndarray, pairs: Collection[str]) -> Graph:
    table = program.table
    inputs, latencies, outputs, num_values = wiring(program, costs.comm)
    makers = np.full(num_values, -1)
    makers[outputs] = np.arange(len(outputs))
    size, op = costs.activation[table.stage], table.op
    frees = np.isin(op, (OPS.index("W"), OPS.index("B")))
    # a full backward stands in one lane with the input gradients, for both send the same message
    sends = np.where(op == OPS.index("B"), OPS.index("I"), op)
    direction = np.array(program.direction, dtype=np.int64)[table.microbatch]
    allowed = np.zeros((len(OPS), len(OPS)), dtype=np.bool_)
    for pair in pairs if costs.a2a.any() else ():
        one, two = (OPS.index(name) for name in pair.split("&"))
        allowed[one, two] = allowed[two, one] = True
    return Graph(
        rank_start=table.slot_start[table.rank_start],
        inputs=np.array(inputs).reshape(-1, 2),
        latencies=np.array(latencies).reshape(-1, 2),
        outputs=np.array(outputs),
        makers=makers,
        op=op.astype(np.int64),
        microbatch=table.microbatch.astype(np.int64),
        lane=(direction * program.num_stages + table.stage) * len(OPS) + sends,
        compute=costs.compute[op, table.stage],
        a2a=costs.a2a[op, table.stage],
        takes=np.where(op == OPS.index("F"), size, 0.0),
        frees=np.where(frees, size, 0.0),
        cap=np.asarray(memory, dtype=float) + 1e-9,
        allowed=allowed,
        pairing=bool(allowed.any()),
    )


def _begin(program: Program) -> Run:
    table = program.table
    positions = np.arange(len(table.op))
    joined = np.zeros(len(positions), dtype=np.bool_)
    joined[table.slot_start[:-1][np.diff(table.slot_start) == 2]] = True
    return Run(
        order=positions.copy(),
        place=positions.copy(),
        joined=joined,
        chance=np.array([12345]),
        mark=np.zeros_like(positions),
        window=np.zeros_like(positions),
        kept=np.zeros_like(positions),
        kept_joined=np.zeros_like(joined),
    )


def _times(graph: Graph) -> Times:
    num_actions, num_ranks, num_values = len(graph.op), len(graph.cap), len(graph.makers)
    return Times(
        start=np.zeros(num_actions),
        end=np.zeros(num_actions),
        arrival=np.zeros(num_actions),
        last=np.zeros(num_actions, dtype=np.int64),
        free=np.zeros(num_ranks),
        left=np.zeros(num_ranks),
        cursor=np.zeros(num_ranks, dtype=np.int64),
        todo=np.zeros(2 * num_ranks, dtype=np.int64),
        ready=np.zeros(num_values),
        waiting=np.zeros(num_values, dtype=np.int64),
    )


def _program(program: Program, order: np.ndarray, joined: np.ndarray) -> Program:
    table = program.table
    first = np.ones(len(order) + 1, dtype=bool)
    first[1:-1] = ~joined[order[:-1]]
    slot_start = np.flatnonzero(first)
    edges = np.searchsorted(slot_start, table.slot_start[table.rank_start])
    moved = Table(edges, slot_start, table.op[order], table.stage[order], table.microbatch[order])
    return program_from_table("auto", program.placement, program.direction, moved)

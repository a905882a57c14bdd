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
from megatron5d.pipeline_parallel.program import Program, Table, program_from_table
from megatron5d.pipeline_parallel.search.clock import Clock
from megatron5d.pipeline_parallel.search.moves import try_moves
from megatron5d.pipeline_parallel.search.timing import begin, empty_times, evaluate, graph_of

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
    graph, run = graph_of(program, costs, memory, pairs), begin(program)
    now, trial = empty_times(graph), empty_times(graph)
    makespan = evaluate(graph, run, trial, now, -1.0, np.inf)
    count = max(1, min(100, ACTIONS // len(run.order)))
    while clock.share() < until:
        makespan = try_moves(graph, run, (now, trial), makespan, count)
        clock.used += count * MOVE
    return _program(program, run.order, run.joined)


def _program(program: Program, order: np.ndarray, joined: np.ndarray) -> Program:
    table = program.table
    first = np.ones(len(order) + 1, dtype=bool)
    first[1:-1] = ~joined[order[:-1]]
    slot_start = np.flatnonzero(first)
    edges = np.searchsorted(slot_start, table.slot_start[table.rank_start])
    moved = Table(edges, slot_start, table.op[order], table.stage[order], table.microbatch[order])
    return program_from_table("auto", program.placement, program.direction, moved)

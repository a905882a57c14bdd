"""Local search on a finished Program: what makes the critical path wait is moved out of its way, slot by slot.

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
from megatron5d.pipeline_parallel.search.clock import Clock
from megatron5d.pipeline_parallel.search.fold import can_fold, folded, is_mirrored, unfolded
from megatron5d.pipeline_parallel.search.local_search import EQUAL, try_moves
from megatron5d.pipeline_parallel.search.timeline import begin, empty_times, evaluate, graph_of

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

"""The split of the layers for which one Program is fastest: layers move between stages, the order of slots stays."""

from collections.abc import Callable, Sequence

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import Placement, Program
from megatron5d.pipeline_parallel.search.timeline import (
    IS_COMPILED,
    begin,
    compiled_part,
    empty_times,
    evaluate,
    graph_of,
    priced,
)

TRIES = 1500 if IS_COMPILED else 30
"""Splits to look at from each start: with numba a second or two, after which little is gained."""
TOGETHER = 3
"""The most layers that change their stage at once: one alone often helps only together with another."""


def fitted(
    program: Program,
    costs_of: Callable[[Sequence[int]], StageCosts],
    starts: Sequence[Sequence[int]],
    memory: float,
    tries: int = TRIES,
) -> list[int]:
    """Returns layers per stage for which a Program is the fastest found, of those within the cap or nearest to it.

    Args:
        program: A legal Program.
        costs_of: layers of every stage -> costs.
        starts: some layers per stage, each a start of its own.
        memory: the most activations a rank may hold, in micro-batches of one rank's layers; inf = any.
        tries: splits to look at from each start.
    """
    rng, holders = np.random.default_rng(0), _holders(program.placement)
    graph = graph_of(program, costs_of(starts[0]), np.full(program.num_ranks, memory), ())
    run, times = begin(program), empty_times(graph)

    def look(counts: np.ndarray) -> tuple[float, float]:
        now = priced(graph, program, costs_of(counts.tolist()))
        makespan = evaluate(now, run, times, times, -1.0, np.inf)
        return round(float(_excess(now, run)), 9), round(float(makespan), 9)

    ends: list[tuple[tuple[float, float], list[int]]] = []
    for start in starts:
        best, reached = np.array(start), look(np.array(start))
        for _ in range(tries):
            counts = _moved(best, rng)
            if (holders @ counts + holders[:, [0, -1]].sum(axis=1)).all():  # an end is something to do, too
                found = look(counts)
                if found <= reached:
                    best, reached = counts, found
        ends.append((reached, best.tolist()))
    return min(ends)[1]


def _holders(placement: Placement) -> np.ndarray:
    """`[num_ranks, num_stages]` 1 where a rank holds a stage."""
    held = np.zeros((placement.num_ranks, placement.num_stages), dtype=int)
    for line in placement.route:
        held[line, range(placement.num_stages)] = 1
    return held


def _moved(layout: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another split of as many layers, a few of them in other stages."""
    counts = layout.copy()
    for _ in range(rng.integers(1, TOGETHER + 1)):
        counts[rng.choice(np.flatnonzero(counts))] -= 1
        counts[rng.integers(len(counts))] += 1
    return counts


@compiled_part
def _excess(graph, run):
    """By how much the fullest rank is over its cap; 0 where none is."""
    most = 0.0
    for rank in range(len(graph.cap)):
        held, freed = 0.0, 0.0
        for position in range(graph.rank_start[rank], graph.rank_start[rank + 1]):
            action = run.order[position]
            held += graph.takes[action]
            if run.joined[action]:
                freed = graph.frees[action]
                continue
            most = max(most, held - graph.cap[rank])
            held -= graph.frees[action] + freed
            freed = 0.0
    return most

"""Half of a pipeline that stands for all of it, where micro-batches go both ways.

Rank p − 1 − r can do for one direction what rank r does for the other. Then the first half of the ranks says what all
do: a message over the middle comes back to the rank that sent it, as the other rank of the pair sends the same at that
time. A Program takes half as long to time. Above all, a change improves both halves at once, where one half alone
would leave the makespan as it was.
"""

import numpy as np

from megatron5d.pipeline_parallel.program import Placement, Program
from megatron5d.pipeline_parallel.search.lanes import Lanes
from megatron5d.pipeline_parallel.search.timeline import Graph, Run


def can_fold(placement: Placement, num_microbatches: int, memory: np.ndarray) -> bool:
    """Whether the ranks of a placement come in pairs that hold the same stages and as much memory."""
    mirrored = placement.copies == 2 and placement.chunks == 1 and placement.route[1] == placement.route[0][::-1]
    return mirrored and num_microbatches % 2 == 0 and bool((memory == memory[::-1]).all())


def folded_lanes(lanes: Lanes, num_stages: int) -> Lanes:
    """Returns the lanes of the first half of the ranks: one a stage, in the order of the stages."""
    half = len(lanes.cap) // 2
    table = lanes.table[lanes.table["rank"] < half]
    table["beside"] = np.where(table["beside"] < 0, -1, table["beside"] % num_stages)
    held_by = lanes.held_by[:half] % num_stages
    return lanes._replace(table=table, held_by=held_by, position=lanes.position[:half], cap=lanes.cap[:half])


def unfolded_schedule(schedule: np.ndarray, num_stages: int) -> np.ndarray:
    """Returns `[num_ranks, slots, 2]` what all ranks do, on their own lanes, for what the first half does."""
    near, far = schedule.copy(), schedule[::-1].copy()
    behind = schedule["lane"] >= num_stages // 2
    near["lane"] += num_stages * behind
    far["lane"] += num_stages * ~behind[::-1]
    return np.concatenate([near, far])


def is_mirrored(program: Program) -> bool:
    """Whether every rank of the second half does what its partner does, for the other direction."""
    table = program.table
    number, direction = _numbers(program)[table.microbatch], np.array(program.direction)[table.microbatch]
    lines = []
    for first, stop in zip(table.rank_start[:-1], table.rank_start[1:]):
        low, high = table.slot_start[first], table.slot_start[stop]
        slots = table.slot_start[first : stop + 1] - low
        lines.append((slots, table.op[low:high], table.stage[low:high], number[low:high], direction[low:high]))
    return all(
        all(map(np.array_equal, one[:4], other[:4])) and np.array_equal(one[4], 1 - other[4])
        for one, other in zip(lines[: len(lines) // 2], lines[::-1])
    )


def folded(graph: Graph, run: Run, program: Program) -> tuple[Graph, Run]:
    """Returns the first half of a mirrored Program; a value and its mirror image are one."""
    ranks, microbatches = program.num_ranks // 2, program.num_microbatches
    half, given = graph.rank_start[ranks], len(graph.makers) - 1
    numbers = _numbers(program)

    def image(values: np.ndarray) -> np.ndarray:
        return np.where(values == given, given, values // microbatches * microbatches + numbers[values % microbatches])

    outputs, makers = image(graph.outputs[:half]), np.full_like(graph.makers, -1)
    makers[outputs] = np.arange(half)
    names = ("latencies", "op", "microbatch", "lane", "compute", "a2a", "takes", "frees")
    parts = {name: getattr(graph, name)[:half] for name in names}
    start, cap = graph.rank_start[: ranks + 1], graph.cap[:ranks]
    inputs = image(graph.inputs[:half])
    graph = graph._replace(rank_start=start, cap=cap, inputs=inputs, outputs=outputs, makers=makers, **parts)
    return graph, Run(*(part[:half] for part in run))


def unfolded(order: np.ndarray, joined: np.ndarray, rank_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order of all ranks and who is joined, where those of the second half follow their partners.

    Args:
        order: `[A / 2]` the action at every position of the first half.
        joined: `[A / 2]` whether an action runs together with the one behind it.
        rank_start: `[R + 1]` positions of each rank, of both halves.
    """
    orders, joins = [order], [joined]
    for rank in reversed(range(len(rank_start) // 2)):
        low, high = rank_start[rank], rank_start[rank + 1]
        orders.append(order[low:high] - low + rank_start[len(rank_start) - 2 - rank])
        joins.append(joined[low:high])
    return np.concatenate(orders), np.concatenate(joins)


def _numbers(program: Program) -> np.ndarray:
    """`[num_microbatches]` how many of the same direction come before each micro-batch."""
    direction = np.array(program.direction)
    return np.where(direction == 0, np.cumsum(direction == 0), np.cumsum(direction == 1)) - 1

"""One placement with its costs and its memory: what a policy is tried on.

The placements that the search tries, by name: `loop:4`, `zigzag:2` (the V), `mirrored`.

How much a search may still do: a number of evaluations, which repeats exactly, and a time limit, which does not.

Who says what a stage costs: the search asks for every placement that it tries.

Half of a pipeline that stands for all of it, where micro-batches go both ways.

Rank p − 1 − r can do for one direction what rank r does for the other. Then the first half of the ranks says what all
do: a message over the middle comes back to the rank that sent it, as the other rank of the pair sends the same at that
time. A Program takes half as long to time. Above all, a change improves both halves at once, where one half alone
would leave the makespan as it was.
"""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import (
    OPS,
    Placement,
    Program,
    Table,
    loop_placement,
    mirrored_placement,
    program_from_table,
    zigzag_placement,
)
from megatron5d.pipeline_parallel.search.list_scheduler import STUCK, empty_schedule, list_schedule
from megatron5d.pipeline_parallel.search.policy import LANE_OPS, PAIRS, Lanes, lanes_of, policy_of, rules_of
from megatron5d.pipeline_parallel.search.timeline import Graph, Run
from megatron5d.pipeline_parallel.simulate import B, F, lower_bound

DEFAULT = ("loop:1", "loop:2", "loop:4", "zigzag:2", "zigzag:4", "mirrored")
"""What is tried where the user names nothing; as far as copies and the number of ranks admit."""


def placement_called(name: str, num_ranks: int) -> Placement:
    """Returns the placement of a name.

    Raises:
        ValueError: An unknown name, or a number of chunks or ranks that it does not admit.
    """
    kind, _, text = name.partition(":")
    if kind not in ("loop", "zigzag", "mirrored") or (kind == "mirrored") == bool(text) or not (text or "1").isdigit():
        raise ValueError(f"placement {name!r} is none of loop:<chunks>, zigzag:<chunks>, mirrored; such as loop:4")
    if kind == "mirrored":
        if num_ranks % 2:
            raise ValueError(
                f"placement mirrored pairs ranks, but parallel.pp={num_ranks} is odd; set parallel.pp={num_ranks + 1}"
            )
        return mirrored_placement(num_ranks)
    chunks = int(text)
    if chunks < 1:
        raise ValueError(f"placement {name!r} has {chunks} chunks per rank; the fewest is {kind}:1")
    return loop_placement(num_ranks, chunks) if kind == "loop" else zigzag_placement(num_ranks, chunks)


def called(placement: Placement) -> str:
    """Returns the name of a placement, or its number of stages where it has none."""
    chunks, num_ranks = placement.chunks, placement.num_ranks
    for name in (f"loop:{chunks}", f"zigzag:{chunks}", "mirrored"):
        if (name != "mirrored" or num_ranks % 2 == 0) and placement_called(name, num_ranks) == placement:
            return name
    return f"custom:{chunks}"


def candidates(num_ranks: int, copies: int) -> list[str]:
    """Returns the names of the default placements that need no more copies and that this number of ranks admits."""
    return [name for name in DEFAULT if name != "mirrored" or (copies >= 2 and num_ranks % 2 == 0)]


class Clock:
    """Counts evaluations against two limits.

    Args:
        seconds: the time limit; None = none.
        evaluations: the most list schedules to try; None = no limit.
    """

    def __init__(self, seconds: float | None, evaluations: int | None) -> None:
        self.seconds, self.limit, self.used = seconds, evaluations, 0.0
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def share(self) -> float:
        """Returns how much of the tighter limit is used up, 1 or more where one is reached."""
        by_time = 0.0 if self.seconds is None else self.elapsed_s / self.seconds if self.seconds else 1.0
        if self.limit is None:
            return by_time
        by_count = self.used / self.limit if self.limit else 1.0
        return max(by_count, by_time if by_time >= 1 else 0.0)


class CostModel(Protocol):
    """Gives the costs of every stage of any placement; `Costs` is one, for stages that are alike."""

    def of(self, placement: Placement) -> StageCosts: ...


def are_equal(one: StageCosts, other: StageCosts) -> bool:
    """Whether two ways to deal the layers to stages come to the same."""
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values()))


def is_even(model: CostModel) -> bool:
    """Whether all stages are alike, so that fewer ranks make a pipeline like it."""
    return isinstance(model, Costs) and model.stage_scale is None


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


GAIN = 0.2
"""Part of what lies between a Program and the bound of its placement and split that further search may still gain."""
NOWHERE = empty_schedule(0, 0)
"""Where a list schedule is written of which only the makespan matters."""


@dataclass(frozen=True)
class Problem:
    """What a policy is tried on.

    Args:
        name: what the placement is called.
        placement: which rank holds which stage.
        num_microbatches: of one step, over both directions.
        costs: of every stage.
        memory: `[num_ranks]` the most activations a rank may hold, in micro-batches of one rank's layers.
        pairs: which of PAIRS may overlap.
        split: which of several ways to deal the layers to stages these costs are of.
    """

    name: str
    placement: Placement
    num_microbatches: int
    costs: StageCosts
    memory: np.ndarray
    pairs: tuple[str, ...] = PAIRS
    split: int = 0

    @property
    def num_lanes(self) -> int:
        """Lanes that one rank holds: its chunks, times the copies."""
        return self.placement.num_stages * self.placement.copies // self.placement.num_ranks

    @property
    def num_actions(self) -> int:
        return len(LANE_OPS) * self.placement.num_stages * self.num_microbatches

    @cached_property
    def direction(self) -> tuple[int, ...]:
        """The direction of every micro-batch: with two copies, the first half takes the first."""
        back = self.num_microbatches // 2 if self.placement.copies == 2 else 0
        return (0,) * (self.num_microbatches - back) + (1,) * back

    @cached_property
    def is_folded(self) -> bool:
        """Whether policies are tried on half of the ranks, which stand for all."""
        return can_fold(self.placement, self.num_microbatches, self.memory)

    @cached_property
    def lanes(self) -> Lanes:
        lanes = lanes_of(self.placement, self.costs, self.direction, self.memory, self.pairs)
        return folded_lanes(lanes, self.placement.num_stages) if self.is_folded else lanes

    @cached_property
    def bound(self) -> float:
        """A makespan below which no Program goes."""
        placement, per_step = self.placement, self.costs.compute[[F, B]].sum(axis=0)
        ranks = range(placement.num_ranks)
        work = max(sum(per_step[stage] for _, stage in placement.stages_of(rank)) for rank in ranks)
        idle = lower_bound(placement, self.costs, self.num_microbatches, float(self.memory.max()))
        return float(work) * self.num_microbatches / placement.copies + idle

    def promise(self, makespan: float) -> float:
        """Returns what to expect of a Program when the search goes on with it: one near the bound has little left."""
        return makespan - GAIN * (makespan - self.bound)

    def makespan(self, numbers: np.ndarray) -> float:
        """Returns the makespan under a policy; STUCK or more where the policy gets stuck."""
        return self._run(numbers, NOWHERE)

    def program(self, numbers: np.ndarray) -> Program | None:
        """Returns the Program that a policy makes; None where it gets stuck."""
        slots = int(self.lanes.table["count"][self.lanes.held_by].sum(axis=1).max()) * len(LANE_OPS)
        schedule = empty_schedule(len(self.lanes.cap), slots)
        return self._program(schedule) if self._run(numbers, schedule) < STUCK else None

    def _run(self, numbers: np.ndarray, schedule: np.ndarray) -> float:
        rules = rules_of(policy_of(numbers, self.num_lanes), self.lanes)
        return list_schedule(self.lanes, rules, schedule)

    def _program(self, schedule: np.ndarray) -> Program:
        if self.is_folded:
            schedule = unfolded_schedule(schedule, self.placement.num_stages)
        present = schedule["op"] >= 0
        actions, second = schedule[present], present[..., 1][present[..., 0]]
        first = np.array([0, self.num_microbatches - self.num_microbatches // 2])
        codes = np.array([OPS.index(code) for code in LANE_OPS])
        table = Table(
            rank_start=np.concatenate([[0], np.cumsum(present[..., 0].sum(axis=1))]),
            slot_start=np.concatenate([[0], np.cumsum(1 + second)]),
            op=codes[actions["op"]],
            stage=actions["lane"] % self.placement.num_stages,
            microbatch=actions["microbatch"] + first[actions["lane"] // self.placement.num_stages],
        )
        return program_from_table("auto", self.placement, self.direction, table)


class Contender(NamedTuple):
    """A Program that may become the result."""

    program: Program
    problem: Problem
    makespan: float

    @property
    def promise(self) -> float:
        return self.problem.promise(self.makespan)

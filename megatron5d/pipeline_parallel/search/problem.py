"""One placement with its costs and its memory: what a policy is tried on."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, Placement, Program, Table, program_from_table
from megatron5d.pipeline_parallel.search.fold import can_fold, folded_lanes, unfolded_schedule
from megatron5d.pipeline_parallel.search.lanes import LANE_OPS, PAIRS, Lanes, lanes_of
from megatron5d.pipeline_parallel.search.list_scheduler import STUCK, empty_schedule, list_schedule
from megatron5d.pipeline_parallel.search.policy import policy_of, rules_of
from megatron5d.pipeline_parallel.simulate import B, F, lower_bound

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

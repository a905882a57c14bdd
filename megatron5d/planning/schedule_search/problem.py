"""What the search works on, a placement with its costs and memory, and what it may spend."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import Placement, Program, Table, program_from_table
from megatron5d.planning.schedule_search.list_scheduler import (
    STUCK,
    Policy,
    Streams,
    list_schedule,
    rules_of,
)
from megatron5d.planning.schedule_search.named import PAIRS, called


class Budget:
    """Counts list schedules tried against their number, which repeats exactly, and time, which does
    not; None = any."""

    def __init__(self, seconds: float | None, evaluations: int | None) -> None:
        if seconds is None and evaluations is None:
            raise ValueError(
                "seconds=None and evaluations=None: one of them must end the search; set seconds=10"
            )
        self.seconds, self.limit = (
            np.inf if most is None else max(most, 1e-9) for most in (seconds, evaluations)
        )
        self.used, self._start = 0.0, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def share(self) -> float:
        """Returns how much of the limit is used up, 1 or more where one is reached; of two limits
        it is the number."""
        by_time = self.elapsed_s / self.seconds
        return max(self.used / self.limit, by_time if self.limit == np.inf or by_time >= 1 else 0.0)


@dataclass(frozen=True)
class Problem:
    """What a policy is tried on."""

    placement: Placement  # which rank holds which stage
    num_microbatches: int  # of one step, over both directions
    costs: StageCosts  # of every stage
    # `[num_ranks]` the most activations a rank may hold, in micro-batches of one rank's layers
    memory: np.ndarray
    pairs: Sequence[str] = PAIRS  # which of PAIRS may overlap
    split: int = 0  # which of several ways to deal the layers to stages these costs are of

    @property
    def name(self) -> str:
        return called(self.placement)

    @property
    def num_streams(self) -> int:
        """Of one rank: its chunks, times the copies."""
        return self.placement.num_stages * self.placement.copies // self.placement.num_ranks

    @property
    def num_actions(self) -> int:
        return 3 * self.placement.num_stages * self.num_microbatches

    @cached_property
    def direction(self) -> tuple[int, ...]:
        """The direction of every micro-batch: with two copies, the first half takes the first."""
        back = self.num_microbatches // 2 if self.placement.copies == 2 else 0
        return (0,) * (self.num_microbatches - back) + (1,) * back

    @property
    def is_folded(self) -> bool:
        """Whether rank r of half of the ranks stands for rank p − 1 − r and the other direction,
        too."""
        return self.name == "mirrored" and self.num_microbatches % 2 == 0

    @cached_property
    def streams(self) -> Streams:
        """The same problem as the list scheduler reads it."""
        placement, costs = self.placement, self.costs
        num_stages, num_ranks, copies = placement.num_stages, placement.num_ranks, placement.copies
        stream = np.arange(num_stages * (1 if self.is_folded else copies))
        stage, holder = stream % num_stages, np.array(placement.route).reshape(-1)[stream]
        rank = np.minimum(holder, num_ranks - 1 - holder) if self.is_folded else holder
        above, below = (
            np.where(stage < num_stages - 1, stream + 1, -1),
            np.where(stage > 0, stream - 1, -1),
        )
        neighbour, late = np.stack([above, below], axis=1), np.broadcast_to(costs.comm, num_stages)
        held_by = [
            sorted(np.flatnonzero(rank == r), key=lambda held: held % num_stages)
            for r in range(rank.max() + 1)
        ]
        along = 2 * np.arange(num_ranks) / max(num_ranks - 1, 1) - 1
        compute, a2a = (
            np.ascontiguousarray(times[:3, stage].T) for times in (costs.compute, costs.a2a)
        )
        return Streams(
            rank=rank,
            neighbour=neighbour,
            latency=np.where(
                holder[neighbour] != holder[:, None],
                late[np.stack([stage, stage - 1], axis=1)],
                0.0,
            ),
            num_microbatches=np.bincount(self.direction, minlength=copies)[stream // num_stages],
            compute=compute,
            a2a=a2a,
            size=costs.activation[stage],
            held_by=np.array(held_by),
            position=(1 - 2 * abs(along) if copies > 1 else along)[: len(held_by)],
            cap=(self.memory + 1e-9)[: len(held_by)],
            pairs=np.array([bool(a2a.any()) and pair in self.pairs for pair in PAIRS[:3]]),
            num_ranks=num_ranks,
            unit=float(compute.mean()) or 1.0,
        )

    def makespan(self, policy: Policy) -> float:
        """Returns the makespan under a policy; STUCK or more where the policy gets stuck."""
        return list_schedule(
            self.streams, rules_of(policy, self.streams), np.zeros((0, 5), dtype=np.int64)
        )

    def program(self, policy: Policy) -> Program | None:
        """Returns the Program that a policy makes; None where it gets stuck."""
        num_ranks, num_stages = self.placement.num_ranks, self.placement.num_stages
        actions = np.zeros((3 * self.streams.num_microbatches.sum(), 5), dtype=np.int64)
        if list_schedule(self.streams, rules_of(policy, self.streams), actions) >= STUCK:
            return None
        if self.is_folded:
            back = np.outer(2 * actions[:, 3] // num_stages, (0, 0, 0, num_stages, 0))
            far = actions * (-1, 1, 1, 1, 1) + (num_ranks - 1, 0, 0, num_stages, 0)
            actions = np.concatenate([actions + back, far - back])
        rank, second, op, stream, number = actions[np.argsort(actions[:, 0], kind="stable")].T
        way, stage = np.divmod(stream, num_stages)
        slot_start = np.append(np.flatnonzero(second == 0), len(actions))
        table = Table(
            rank_start=np.searchsorted(rank[slot_start[:-1]], np.arange(num_ranks + 1)),
            slot_start=slot_start,
            op=op,
            stage=stage,
            microbatch=number + way * self.direction.count(0),
        )
        return program_from_table("auto", self.placement, self.direction, table)

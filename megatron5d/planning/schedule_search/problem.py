"""The problem that the search solves, a placement with its costs and memory, and its budget."""

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
from megatron5d.planning.schedule_search.named_schedules import PAIRS, name_of_placement


class Budget:
    """Limits a search by evaluations, whose number repeats exactly, and by time, which does not.

    Args:
        seconds: time limit; None = none.
        evaluations: limit of list schedules; None = none.
    """

    def __init__(self, seconds: float | None, evaluations: int | None) -> None:
        if seconds is None and evaluations is None:
            raise ValueError(
                "seconds=None and evaluations=None: one of them must end the search; set seconds=10"
            )
        self.seconds, self.evaluations = (
            np.inf if limit is None else max(limit, 1e-9) for limit in (seconds, evaluations)
        )
        self.used, self._start = 0.0, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def share(self) -> float:
        """Fraction of the budget that is used up, 1 or more if a limit is reached.

        With two limits it is the fraction of the evaluations.
        """
        by_time = self.elapsed_s / self.seconds
        counts_time = self.evaluations == np.inf or by_time >= 1
        return max(self.used / self.evaluations, by_time if counts_time else 0.0)


@dataclass(frozen=True)
class Problem:
    """A pipeline for which policies and moves are evaluated."""

    placement: Placement  # which rank holds which stage
    num_microbatches: int  # of one step, over both directions
    costs: StageCosts  # of every stage
    # `[num_ranks]` the most activations a rank may hold, in micro-batches of one rank's layers
    memory: np.ndarray
    pairs: Sequence[str] = PAIRS  # which of PAIRS may overlap
    split: int = 0  # index of the division of layers over stages that has these costs

    @property
    def name(self) -> str:
        return name_of_placement(self.placement)

    @property
    def num_streams(self) -> int:
        """Number of streams of one rank: its chunks times the copies."""
        return self.placement.num_stages * self.placement.copies // self.placement.num_ranks

    @property
    def num_actions(self) -> int:
        return 3 * self.placement.num_stages * self.num_microbatches

    @cached_property
    def direction(self) -> tuple[int, ...]:
        """The direction of every micro-batch: with two copies, the first half takes the first."""
        num_second = self.num_microbatches // 2 if self.placement.copies == 2 else 0
        return (0,) * (self.num_microbatches - num_second) + (1,) * num_second

    @property
    def is_folded(self) -> bool:
        """Whether rank r of half of the ranks also represents rank p − 1 − r, mirrored."""
        return self.name == "mirrored" and self.num_microbatches % 2 == 0

    @cached_property
    def streams(self) -> Streams:
        """The same problem as the list scheduler reads it."""
        placement, costs = self.placement, self.costs
        num_stages, num_ranks, copies = placement.num_stages, placement.num_ranks, placement.copies
        stream = np.arange(num_stages * (1 if self.is_folded else copies))
        stage, holder = stream % num_stages, np.array(placement.route).reshape(-1)[stream]
        rank = np.minimum(holder, num_ranks - 1 - holder) if self.is_folded else holder
        # By rank, and on each rank by stage.
        streams_of = np.lexsort((stage, rank)).reshape(rank.max() + 1, -1)
        compute, a2a = (
            np.ascontiguousarray(times[:3, stage].T) for times in (costs.compute, costs.a2a)
        )
        neighbor, latency = self._neighbors(stream, stage, holder)
        return Streams(
            rank=rank,
            neighbor=neighbor,
            latency=latency,
            num_microbatches=np.bincount(self.direction, minlength=copies)[stream // num_stages],
            compute=compute,
            a2a=a2a,
            size=costs.activation[stage],
            streams_of=streams_of,
            position=_position(num_ranks, copies)[: len(streams_of)],
            cap=(self.memory + 1e-9)[: len(streams_of)],
            pairs=np.array([bool(a2a.any()) and pair in self.pairs for pair in PAIRS[:3]]),
            num_ranks=num_ranks,
            unit=float(compute.mean()) or 1.0,
        )

    def _neighbors(
        self, stream: np.ndarray, stage: np.ndarray, holder: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`[streams, 2]` streams of the next and the previous stage, and latency of messages."""
        num_stages = self.placement.num_stages
        above = np.where(stage < num_stages - 1, stream + 1, -1)
        neighbor = np.stack([above, np.where(stage > 0, stream - 1, -1)], axis=1)
        comm = np.broadcast_to(self.costs.comm, num_stages)
        latency = comm[np.stack([stage, stage - 1], axis=1)]
        return neighbor, np.where(holder[neighbor] != holder[:, None], latency, 0.0)

    def makespan(self, policy: Policy) -> float:
        """The makespan under a policy; STUCK or more if the policy gets stuck."""
        no_actions = np.zeros((0, 5), dtype=np.int64)
        return list_schedule(self.streams, rules_of(policy, self.streams), no_actions)

    def program(self, policy: Policy) -> Program | None:
        """The Program that a policy makes; None if it gets stuck."""
        num_ranks, num_stages = self.placement.num_ranks, self.placement.num_stages
        actions = np.zeros((3 * self.streams.num_microbatches.sum(), 5), dtype=np.int64)
        if list_schedule(self.streams, rules_of(policy, self.streams), actions) >= STUCK:
            return None
        if self.is_folded:
            shift = np.outer(2 * actions[:, 3] // num_stages, (0, 0, 0, num_stages, 0))
            mirrored = actions * (-1, 1, 1, 1, 1) + (num_ranks - 1, 0, 0, num_stages, 0)
            actions = np.concatenate([actions + shift, mirrored - shift])
        rank, is_second, op, stream, index = actions[np.argsort(actions[:, 0], kind="stable")].T
        direction, stage = np.divmod(stream, num_stages)
        slot_start = np.append(np.flatnonzero(is_second == 0), len(actions))
        table = Table(
            rank_start=np.searchsorted(rank[slot_start[:-1]], np.arange(num_ranks + 1)),
            slot_start=slot_start,
            op=op,
            stage=stage,
            microbatch=index + direction * self.direction.count(0),
        )
        return program_from_table("auto", self.placement, self.direction, table)


def _position(num_ranks: int, copies: int) -> np.ndarray:
    """`[num_ranks]` position of each rank, see `Streams`."""
    along = 2 * np.arange(num_ranks) / max(num_ranks - 1, 1) - 1
    return 1 - 2 * abs(along) if copies > 1 else along

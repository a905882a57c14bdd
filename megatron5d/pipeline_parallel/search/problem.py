"""What the search works on, a placement with its costs and memory, and what it may spend."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, Placement, Program, Table, program_from_table
from megatron5d.pipeline_parallel.search.list_scheduler import STUCK, Policy, Streams, list_schedule, rules_of
from megatron5d.pipeline_parallel.search.named import PAIRS, called

SPLIT_OPS = [OPS.index(op) for op in "FIW"]
"""What policies schedule; a full backward is an I and its W."""


class Budget:
    """Counts evaluations against two limits: their number, which repeats exactly, and time, which does not.

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


@dataclass(frozen=True)
class Problem:
    """What a policy is tried on.

    Args:
        placement: which rank holds which stage.
        num_microbatches: of one step, over both directions.
        costs: of every stage.
        memory: `[num_ranks]` the most activations a rank may hold, in micro-batches of one rank's layers.
        pairs: which of PAIRS may overlap.
        split: which of several ways to deal the layers to stages these costs are of.
    """

    placement: Placement
    num_microbatches: int
    costs: StageCosts
    memory: np.ndarray
    pairs: Sequence[str] = PAIRS
    split: int = 0

    @property
    def name(self) -> str:
        return called(self.placement)

    @property
    def num_streams(self) -> int:
        """Streams that one rank holds: its chunks, times the copies."""
        return self.placement.num_stages * self.placement.copies // self.placement.num_ranks

    @property
    def num_actions(self) -> int:
        return len(SPLIT_OPS) * self.placement.num_stages * self.num_microbatches

    @cached_property
    def direction(self) -> tuple[int, ...]:
        """The direction of every micro-batch: with two copies, the first half takes the first."""
        back = self.num_microbatches // 2 if self.placement.copies == 2 else 0
        return (0,) * (self.num_microbatches - back) + (1,) * back

    @property
    def is_folded(self) -> bool:
        """Whether policies are tried on half of the ranks: rank r stands for rank p − 1 − r and the other direction.

        A message over the middle returns to its sender, which stands for the rank that sends the same at that time.
        """
        return self.name == "mirrored" and self.num_microbatches % 2 == 0

    @cached_property
    def streams(self) -> Streams:
        """The same problem as the list scheduler reads it."""
        placement, costs = self.placement, self.costs
        num_stages, num_ranks, copies = placement.num_stages, placement.num_ranks, placement.copies
        stream = np.arange(copies * num_stages)
        stage, rank = stream % num_stages, np.array(placement.route).reshape(-1)
        above, below = np.where(stage < num_stages - 1, stream + 1, -1), np.where(stage > 0, stream - 1, -1)
        neighbour, late = np.stack([above, below], axis=1), np.broadcast_to(costs.comm, num_stages)
        held_by = [sorted(np.flatnonzero(rank == r), key=lambda held: held % num_stages) for r in range(num_ranks)]
        along = 2 * np.arange(num_ranks) / max(num_ranks - 1, 1) - 1
        compute, a2a = (np.ascontiguousarray(times[SPLIT_OPS][:, stage].T) for times in (costs.compute, costs.a2a))
        streams = Streams(
            rank=rank,
            neighbour=neighbour,
            latency=np.where(rank[neighbour] != rank[:, None], late[np.stack([stage, stage - 1], axis=1)], 0.0),
            num_microbatches=np.bincount(self.direction, minlength=copies)[stream // num_stages],
            compute=compute,
            a2a=a2a,
            size=costs.activation[stage],
            held_by=np.array(held_by),
            position=1 - 2 * abs(along) if copies > 1 else along,
            cap=self.memory + 1e-9,
            pairs=np.array([bool(a2a.any()) and pair in self.pairs for pair in PAIRS[:3]]),
            num_ranks=num_ranks,
            unit=float(compute.mean()) or 1.0,
        )
        if not self.is_folded:
            return streams
        half, held = num_ranks // 2, np.flatnonzero(rank < num_ranks // 2)  # one stream a stage, in this order
        folded = {
            name: getattr(streams, name)[held]
            for name in ("rank", "latency", "num_microbatches", "compute", "a2a", "size")
        }
        folded |= {name: getattr(streams, name)[:half] for name in ("position", "cap")}
        neighbour = np.where(neighbour < 0, -1, neighbour % num_stages)[held]
        return streams._replace(neighbour=neighbour, held_by=streams.held_by[:half] % num_stages, **folded)

    def makespan(self, policy: Policy) -> float:
        """Returns the makespan under a policy; STUCK or more where the policy gets stuck."""
        return list_schedule(self.streams, rules_of(policy, self.streams), np.zeros((0, 5), dtype=np.int64))

    def program(self, policy: Policy) -> Program | None:
        """Returns the Program that a policy makes; None where it gets stuck."""
        placement, streams = self.placement, self.streams
        actions = np.zeros((3 * streams.num_microbatches.sum(), 5), dtype=np.int64)
        if list_schedule(streams, rules_of(policy, streams), actions) >= STUCK:
            return None
        way, actions[:, 3] = np.divmod(actions[:, 3], placement.num_stages)
        if self.is_folded:
            way = (actions[:, 3] >= placement.num_stages // 2).astype(int)
            far = actions.copy()
            far[:, 0] = placement.num_ranks - 1 - far[:, 0]
            actions, way = np.concatenate([actions, far]), np.concatenate([way, 1 - way])
        order = np.argsort(actions[:, 0], kind="stable")
        rank, second, op, stage, number = actions[order].T
        slot_start = np.append(np.flatnonzero(second == 0), len(order))
        table = Table(
            rank_start=np.searchsorted(rank[slot_start[:-1]], np.arange(placement.num_ranks + 1)),
            slot_start=slot_start,
            op=np.array(SPLIT_OPS)[op],
            stage=stage,
            microbatch=number + np.array([0, self.direction.count(0)])[way[order]],
        )
        return program_from_table("auto", self.placement, self.direction, table)

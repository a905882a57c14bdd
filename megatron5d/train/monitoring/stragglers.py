"""Which rank does its own work more slowly than others that have as much to do: `log.slow_rank`.

One slow machine makes every step of the run longer, for all the others wait for it. What is
compared is therefore a rank's work: the time of its steps, less its waits for other ranks
(`Ledger.take_waits`).
"""

import gc
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from megatron5d.comm.collectives import all_reduce, broadcast_text
from megatron5d.config.schema import Config
from megatron5d.topology.grid import (
    DENSE_GROUPS,
    EXPERT_GROUPS,
    Sizes,
    dense_grid,
    describe_rank,
    expert_grid,
)
from megatron5d.train.build import Run

DEFAULT = 1.2  # on GPUs; on CPUs ranks take turns on cores, and nothing is measured
TURN_S = 0.2  # a CPU rank that is slower by less may have waited for its turn on a core
STALL_S = 5.0  # a single step that is longer by as much than those of the peers is told at once
# between two signs of life; a process that gives none is stopped, swapped out or frozen with its
# machine
BEAT_S = 0.25
RECORDS = 3  # in a row on the other side of the threshold: less is noise
_NAMED = 8  # of the ranks that become slow at once; a node has as many
_SHORTEST_S = 1e-6  # of work: a rank that only waits has none


class SlowRanks:
    """Adds up each step's work, and compares the ranks at every record."""

    def __init__(self, run: Run) -> None:
        on_gpus = run.process.device.type == "cuda"
        chosen = run.config.log.slow_rank
        self.threshold = (DEFAULT if on_gpus else 0.0) if chosen is None else chosen
        self._least_s = 0.0 if on_gpus else TURN_S
        self._run, self._world = run, run.mesh["world"]
        self._peers = torch.tensor(peers(run.mesh.sizes, run.config))  # [roles, ranks]
        self.active = self.threshold > 0 and self._peers.shape[1] > 1
        self._slow = torch.zeros(self._world.size, dtype=torch.bool)  # who was named
        # records that contradict this
        self._in_a_row = torch.zeros(self._world.size, dtype=torch.int64)
        self._gathered: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None  # when they are on the host
        # the first step compiles and connects: it says nothing
        self._work_s, self._num_steps = 0.0, -1
        self._longest_s, self._longest_step = 0.0, 0
        self._collecting_since = self._collected_s = self._frozen_s = 0.0
        self._ended = threading.Event()
        if self.active:
            gc.callbacks.append(self._collecting)
            threading.Thread(target=self._beat, daemon=True).start()

    def start(self) -> None:
        """Starts a step: garbage collected during an evaluation or a save took none of its time."""
        self._collected_s = self._frozen_s = 0.0

    def step(self, seconds: float, waits: Mapping[str, float]) -> None:
        """Ends a step.

        Args:
            seconds: that it took.
            waits: axis -> seconds of these in which this rank waited for others.
        """
        if self._num_steps >= 0:
            # a process that was stopped while it waited was waited for by all others, too
            work = max(seconds - sum(waits.values()) - self._collected_s, self._frozen_s)
            self._work_s += work
            if work > self._longest_s:
                self._longest_s, self._longest_step = work, self._run.progress.step + 1
        self._num_steps += 1

    def compare(self) -> tuple[dict[str, Any], list[str]]:
        """Returns what a record tells, and what is to be said, of the steps between the last two
        calls; on every rank the same.

        Figures of the steps since the last call are on their way until the next one: who read them
        now would wait for the optimizer's work on the device, outside of all clocks.

        Comm: all_reduce over the world of three numbers for every rank, which takes a tree's depth;
            a gather would take a ring's length; for each rank that is named, of its host's name.
        """
        if self._arrived is not None:
            # the steps since may all have been skipped, and have waited for nothing
            self._arrived.synchronize()
        judged = ({}, list[str]()) if self._gathered is None else self.judge(*self._gathered)
        self._gathered = None
        if self.active and self._num_steps > 0:
            figures = torch.zeros(
                3, self._world.size, dtype=torch.float64, device=self._run.process.device
            )
            mean = max(self._work_s / self._num_steps, _SHORTEST_S)
            mine = mean, max(self._longest_s, _SHORTEST_S), float(self._longest_step)
            figures[:, self._world.rank] = torch.tensor(mine, dtype=torch.float64)
            self._gathered = all_reduce(figures, self._world).to("cpu", non_blocking=True)
            if figures.is_cuda:
                self._arrived = torch.cuda.Event()
                self._arrived.record()
            self._work_s, self._num_steps, self._longest_s = 0.0, 0, 0.0
        return judged

    def judge(
        self, work: torch.Tensor, longest: torch.Tensor, step: torch.Tensor
    ) -> tuple[dict[str, Any], list[str]]:
        """Returns what a record tells of each rank's work, and what is to be said: who has become
        slow, who is not, who stood.

        Args:
            work: fp64 `[world]`, on the host: seconds a step.
            longest: fp64 `[world]`: seconds of each rank's longest step.
            step: fp64 `[world]`: which one that was.
        """
        ratios = self.ratios(work)
        slowest = int(ratios.argmax())
        contradicts = (
            (ratios > self.threshold) & (work - work / ratios > self._least_s)
        ) != self._slow
        self._in_a_row = torch.where(contradicts, self._in_a_row + 1, 0)
        turned = self._in_a_row == RECORDS
        self._slow ^= turned
        self._in_a_row[turned] = 0
        told = [
            self._told(torch.where(turned & (self._slow == now))[0].tolist(), ratios, now)
            for now in (True, False)
        ]
        told.append(self._stalled(longest, step))
        return {"slowest_rank": slowest, "slowest_rank_ratio": float(ratios[slowest])}, list(
            filter(None, told)
        )

    def _stalled(self, longest: torch.Tensor, step: torch.Tensor) -> str:
        """Returns one long stop, whose mean over some steps and records is soon forgotten."""
        ratios = self.ratios(longest)
        beyond = longest - longest / ratios  # what the peers took
        ranks = torch.where((ratios > self.threshold) & (beyond > STALL_S) & ~self._slow)[
            0
        ].tolist()
        each = [
            f"{self._who(rank)} took {longest[rank]:.1f} s for step {int(step[rank])}, its peers "
            f"{longest[rank] - beyond[rank]:.1f} s"
            for rank in ranks[:_NAMED]
        ]
        return f"stalled: {'; '.join(each)}" if each else ""

    def ratios(self, work: torch.Tensor) -> torch.Tensor:
        """Returns fp64 `[world]`: each rank's work over the median of its peers', of whom the
        busiest is left out.

        Of a rank in the upper half this is the median of the others; two ranks are compared with
        each other.
        """
        table = work[self._peers]
        others = table.sort(1).values[:, :-1].quantile(0.5, dim=1, keepdim=True)
        ratios = torch.empty_like(work)
        ratios[self._peers] = table / others
        return ratios

    def _told(self, ranks: list[int], ratios: torch.Tensor, slow: bool) -> str:
        if not ranks:
            return ""
        each = [
            f"{self._who(rank)} works {ratios[rank]:.2f} times as long as its peers"
            for rank in ranks[:_NAMED]
        ]
        named = "; ".join(each) + (
            f"; and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        )
        if not slow:
            return f"no longer slow: {named}"
        config = self._run.config
        why = (
            "; hot experts make ranks slow, too (moe/layer_<i>/load)"
            if config.model.num_experts
            else ""
        )
        if config.parallel.tp_overlap == "fused":  # whose GEMMs wait inside, where no clock is read
            why += "; under parallel.tp_overlap=fused the slow one may be a tp neighbour"
        return f"slow rank: {named}, in {RECORDS} records in a row (log.slow_rank = {self.threshold:g}){why}"

    def _who(self, rank: int) -> str:
        device = self._run.process.device
        here = f"{socket.gethostname()} ({device})"
        return f"{describe_rank(self._run.mesh.sizes, rank)} on {broadcast_text(rank, here, self._world, device)}"

    def _beat(self) -> None:
        """Runs as a thread: adds up the time in which this process did not run at all."""
        last = time.monotonic()
        while not self._ended.wait(BEAT_S):
            now = time.monotonic()
            if now - last > 4 * BEAT_S:
                self._frozen_s += now - last - BEAT_S
            last = now

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        """Measures garbage collection, which ranks do at different times."""
        now = time.perf_counter()
        if phase == "start":
            self._collecting_since = now
        else:
            self._collected_s += now - self._collecting_since

    def close(self) -> None:
        self._ended.set()
        if self.active:
            gc.callbacks.remove(self._collecting)


def peers(sizes: Sizes, config: Config) -> list[tuple[int, ...]]:
    """Returns ranks that have as much to do as each other, all of them: those with the same layers,
    and the same experts.

    Where nobody else holds the same experts, those with the same layers.
    """
    dense = dense_grid(sizes)
    if config.model.num_experts and sizes.edp * sizes.etp > 1:
        return list(expert_grid(sizes, dense).groups(*EXPERT_GROUPS["edp"], "etp"))
    return list(dense.groups(*DENSE_GROUPS["stage"]))

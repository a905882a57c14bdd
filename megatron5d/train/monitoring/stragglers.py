"""Finds ranks that work more slowly than others with the same amount of work: `log.slow_rank`.

One slow machine makes every step of the run longer, because all other ranks wait for it. Therefore
a rank's work is compared: the time of its steps, less its waits for other ranks
(`Ledger.take_waits`).
"""

import gc
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from megatron5d.comm.collectives import all_reduce
from megatron5d.config.schema import Config
from megatron5d.topology.all_ranks import broadcast_text
from megatron5d.topology.grid import (
    DENSE_GROUPS,
    EXPERT_GROUPS,
    Sizes,
    dense_grid,
    describe_rank,
    expert_grid,
)
from megatron5d.train.build import Run

DEFAULT = 1.2  # on GPUs; off on CPUs, where ranks share cores
# A CPU rank that is slower by less may have waited for a core.
CORE_WAIT_S = 0.2
STALL_S = 5.0  # a step that is longer than the peers' by this much is reported at once
# Interval of a heartbeat thread: a process without heartbeats is stopped, swapped out, or frozen
# together with its machine.
BEAT_S = 0.25
RECORDS = 3  # in a row beyond the threshold; fewer are noise
_NAMED = 8  # of the ranks that become slow at once: those of one node
_SHORTEST_S = 1e-6  # of work: a rank that only waits has none


class SlowRanks:
    """Sums up the work of each step, and compares the ranks at every record."""

    def __init__(self, run: Run) -> None:
        on_gpus = run.process.device.type == "cuda"
        configured = run.config.log.slow_rank
        self.threshold = (DEFAULT if on_gpus else 0.0) if configured is None else configured
        self._tolerance_s = 0.0 if on_gpus else CORE_WAIT_S
        self._run, self._world = run, run.mesh["world"]
        self._peers = torch.tensor(peers(run.mesh.sizes, run.config))  # [roles, ranks]
        self.active = self.threshold > 0 and self._peers.shape[1] > 1
        self._is_slow = torch.zeros(self._world.size, dtype=torch.bool)  # as reported
        # number of consecutive records that contradict `_is_slow`
        self._in_a_row = torch.zeros(self._world.size, dtype=torch.int64)
        self._gathered: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None  # when `_gathered` is on the host
        # The first step compiles and connects, and does not count.
        self._work_s, self._num_steps = 0.0, -1
        self._longest_s, self._longest_step = 0.0, 0
        self._collecting_since = self._collected_s = self._frozen_s = 0.0
        self._ended = threading.Event()
        if self.active:
            gc.callbacks.append(self._time_collection)
            threading.Thread(target=self._beat, daemon=True).start()

    def start(self) -> None:
        """Starts a step, without the garbage collections of an evaluation or a save before it."""
        self._collected_s = self._frozen_s = 0.0

    def step(self, seconds: float, waits: Mapping[str, float]) -> None:
        """Ends a step.

        Args:
            seconds: duration of the step.
            waits: axis -> seconds of these in which this rank waited for others.
        """
        if self._num_steps >= 0:
            # While a process is stopped in a wait, all other ranks wait for it, too.
            work = max(seconds - sum(waits.values()) - self._collected_s, self._frozen_s)
            self._work_s += work
            if work > self._longest_s:
                self._longest_s, self._longest_step = work, self._run.progress.step + 1
        self._num_steps += 1

    def compare(self) -> tuple[dict[str, Any], list[str]]:
        """Fields for the record and messages about the steps between the last two calls.

        Both are the same on every rank. The figures of the steps since the last call arrive on the
        host until the next call: reading them now would wait for the optimizer's work on the
        device, which no clock would attribute.

        Comm: all_reduce over the world of three numbers for every rank (log n hops, where a gather
            takes n); for each rank in a message, a broadcast of its host's name.
        """
        if self._arrived is not None:
            # Skipped steps since then may not have waited for the device.
            self._arrived.synchronize()
        judged = ({}, list[str]()) if self._gathered is None else self.judge(*self._gathered)
        self._gathered = None
        if self.active and self._num_steps > 0:
            device, shape = self._run.process.device, (3, self._world.size)
            figures = torch.zeros(shape, dtype=torch.float64, device=device)
            mean = max(self._work_s / self._num_steps, _SHORTEST_S)
            my_times = mean, max(self._longest_s, _SHORTEST_S), float(self._longest_step)
            figures[:, self._world.rank] = torch.tensor(my_times, dtype=torch.float64)
            self._gathered = all_reduce(figures, self._world).to("cpu", non_blocking=True)
            if figures.is_cuda:
                self._arrived = torch.cuda.Event()
                self._arrived.record()
            self._work_s, self._num_steps, self._longest_s = 0.0, 0, 0.0
        return judged

    def judge(
        self, work: torch.Tensor, longest: torch.Tensor, step: torch.Tensor
    ) -> tuple[dict[str, Any], list[str]]:
        """Fields for the record and messages: ranks that became slow, recovered, or stalled.

        Args:
            work: fp64 `[world]`, on the host: seconds per step.
            longest: fp64 `[world]`: seconds of each rank's longest step.
            step: fp64 `[world]`: number of that step.
        """
        ratios = self.ratios(work)
        slowest = int(ratios.argmax())
        is_beyond = (ratios > self.threshold) & (work - work / ratios > self._tolerance_s)
        self._in_a_row = torch.where(is_beyond != self._is_slow, self._in_a_row + 1, 0)
        changed = self._in_a_row == RECORDS
        self._is_slow ^= changed
        self._in_a_row[changed] = 0
        messages = [
            self._slow_text(torch.where(changed & self._is_slow)[0].tolist(), ratios, True),
            self._slow_text(torch.where(changed & ~self._is_slow)[0].tolist(), ratios, False),
            self._stalled_text(longest, step),
        ]
        fields = {"slowest_rank": slowest, "slowest_rank_ratio": float(ratios[slowest])}
        return fields, [message for message in messages if message]

    def _stalled_text(self, longest: torch.Tensor, step: torch.Tensor) -> str:
        """Message about single long steps, which would not show in a mean over several steps."""
        ratios = self.ratios(longest)
        peers_s = longest / ratios
        is_stalled = (ratios > self.threshold) & (longest - peers_s > STALL_S) & ~self._is_slow
        stalls = [
            f"{self._describe(rank)} took {longest[rank]:.1f} s for step {int(step[rank])}, "
            f"its peers {peers_s[rank]:.1f} s"
            for rank in torch.where(is_stalled)[0].tolist()[:_NAMED]
        ]
        return f"stalled: {'; '.join(stalls)}" if stalls else ""

    def ratios(self, work: torch.Tensor) -> torch.Tensor:
        """Each rank's work over the median of its peers', fp64 `[world]`.

        The median leaves out the busiest peer. For a rank in the upper half it is the median of the
        other ranks; two ranks are compared with each other.
        """
        table = work[self._peers]
        medians = table.sort(1).values[:, :-1].quantile(0.5, dim=1, keepdim=True)
        ratios = torch.empty_like(work)
        ratios[self._peers] = table / medians
        return ratios

    def _slow_text(self, ranks: list[int], ratios: torch.Tensor, slow: bool) -> str:
        if not ranks:
            return ""
        named = "; ".join(
            f"{self._describe(rank)} works {ratios[rank]:.2f} times as long as its peers"
            for rank in ranks[:_NAMED]
        )
        named += f"; and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        if not slow:
            return f"no longer slow: {named}"
        config, hints = self._run.config, ""
        if config.model.num_experts:
            hints = "; hot experts make ranks slow, too (moe/layer_<i>/load)"
        if config.parallel.tp_overlap == "fused":
            # These GEMMs wait for other ranks in the kernel, where no clock is read.
            hints += "; with parallel.tp_overlap=fused the slow rank may be a tp neighbor"
        records = f"in {RECORDS} records in a row (log.slow_rank = {self.threshold:g})"
        return f"slow rank: {named}, {records}{hints}"

    def _describe(self, rank: int) -> str:
        device = self._run.process.device
        host = f"{socket.gethostname()} ({device})"
        host = broadcast_text(rank, host)
        return f"{describe_rank(self._run.mesh.sizes, rank)} on {host}"

    def _beat(self) -> None:
        """Runs in a thread: sums up the time in which this process did not run at all."""
        last = time.monotonic()
        while not self._ended.wait(BEAT_S):
            now = time.monotonic()
            if now - last > 4 * BEAT_S:
                self._frozen_s += now - last - BEAT_S
            last = now

    def _time_collection(self, phase: str, info: dict[str, int]) -> None:
        """Measures garbage collections, which happen at different times on different ranks."""
        now = time.perf_counter()
        if phase == "start":
            self._collecting_since = now
        else:
            self._collected_s += now - self._collecting_since

    def close(self) -> None:
        self._ended.set()
        if self.active:
            gc.callbacks.remove(self._time_collection)


def peers(sizes: Sizes, config: Config) -> list[tuple[int, ...]]:
    """Groups of all ranks with equal work: the same layers, and the same experts.

    Where no two ranks hold the same experts, those with the same layers.
    """
    dense = dense_grid(sizes)
    if config.model.num_experts and sizes.edp * sizes.etp > 1:
        return list(expert_grid(sizes, dense).groups(*EXPERT_GROUPS["edp"], "etp"))
    return list(dense.groups(*DENSE_GROUPS["stage"]))

"""Data parallelism's part in a step, on the meta device: the Program's walk (plan/peak.py) tells it what runs.

The GradSync that would train gathers, allocates, reduces and frees its buffers as phases begin and end, and its bytes
are counted. So there is no second account of when a unit is whole. The 8-bit copies of gathered weights are made here
when a phase first reads them, and go with the unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.pipeline_parallel.program import Action
from megatron5d.pipeline_parallel.stage import Stage, phase_groups
from megatron5d.plan.watch import MemoryWatch
from megatron5d.precision.fp8 import is_quantized
from megatron5d.precision.fp8_weights import planned_pair, quantized_weight

Move = tuple[nn.Module, str]
"""A phase, and how it is passed (hooks.py)."""


class Replay(MemoryWatch):
    """A context in which data parallelism goes through a step; `live_bytes` are its temporary buffers.

    Args:
        sync: of a rank, with nothing gathered and no gradients.
        phases: of every stage of the rank.
        passes: as in `GradSync.start_step`.
        block: as in MemoryWatch.
    """

    def __init__(
        self, sync: GradSync, phases: Mapping[int, Sequence[nn.Module]], passes: Mapping[nn.Module, int], block: int
    ) -> None:
        super().__init__(block)
        self._sync, self._passes, self._phases = sync, passes, phases
        gathered = [weight for bucket in sync.buckets if bucket.shards_weights for weight in bucket.parameters]
        self._in_copies = set(filter(is_quantized, gathered))  # weights that are gathered, and multiplied in 8 bits
        self._moves: dict[tuple[str, int], list[Move]] = {}
        for stage, own in phases.items():
            Stage(own, sync)  # tells data parallelism the order of its phases
            again: list[Move] = []
            for group, recompute in reversed(phase_groups(own)):
                again += [(phase, "again") for phase in group if recompute]
                again += [(phase, "backward") for phase in group[::-1]]
            self._moves["F", stage] = [(phase, "forward") for phase in own]
            self._moves["B", stage] = self._moves["I", stage] = again
            self._moves["W", stage] = [(phase, "weights") for phase in own[::-1]]

    def __enter__(self):
        entered = super().__enter__()
        self._sync.start_step(self._passes)
        return entered

    def expect(self, actions: Sequence[Action]) -> None:
        """The actions after those that start now read weights, which may be gathered early."""
        for action in actions:
            phases = self._phases[action.stage]
            self._sync.prefetch(phases[0 if action.op == "F" else -1], action.op == "F")

    def before(self, action: Action, step: int) -> None:
        """A step of an action, counted from its first phase, is about to run."""
        self.forget_peak()
        phase, passing = self._moves[action.op, action.stage][step]
        self._sync.before(phase, passing)
        for weight in phase.parameters() if passing != "weights" else ():
            if weight in self._in_copies:
                pair = quantized_weight(weight, partial(planned_pair, weight))
                if passing == "backward":
                    assert pair.transposed is not None  # made when read

    def allocate(self, action: Action, step: int, place: int) -> None:
        """The step's phase makes its first weight gradient for a bucket, given by its place among the phase's."""
        phase, _ = self._moves[action.op, action.stage][step]
        bucket = self._sync.buckets[self._sync.buckets_of(phase)[place]]
        if bucket.shards_grads:
            bucket.allocate_grads()

    def after(self, action: Action, step: int) -> None:
        """The step has run."""
        phase, passing = self._moves[action.op, action.stage][step]
        self._sync.after(phase, passing)
        if action.op == "B" and passing == "backward":
            self._sync.after(phase, "weights")

"""Data parallelism's part in a step, on the meta device: the Program's walk (planning/memory_peak.py) tells it what runs.

The GradSync that would train gathers, allocates, reduces and frees its buffers as phases begin and end, and its bytes
are counted. So there is no second account of when a unit is whole. The 8-bit copies of gathered weights are made here
too, when a phase reads them, and go with the unit; copies of other weights are made once a step, and not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.pipeline_parallel.program import Action
from megatron5d.pipeline_parallel.stage import Stage, phase_groups
from megatron5d.planning.meta_run import MemoryWatch
from megatron5d.precision.fp8_recipes import is_quantized, quantized_copies

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
        # weights that are not gathered, and whose 8-bit copies are still to be made
        staying = [weight for bucket in sync.buckets if not bucket.shards_weights for weight in bucket.parameters]
        self._staying, self._unused = set(staying), set(staying)
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

    def before(self, action: Action, step: int) -> bool:
        """A step of an action, counted from its first phase, is about to run.

        Returns:
            Whether it makes 8-bit copies of its weights.
        """
        self.forget_peak()
        phase, passing = self._moves[action.op, action.stage][step]
        self._sync.before(phase, passing)
        return passing != "weights" and self._make_copies(phase, passing == "backward")

    def _make_copies(self, phase: nn.Module, backward: bool) -> bool:
        """Makes the 8-bit copies that a phase reads, and returns whether some of them were not there."""
        makes = False
        for weight in filter(is_quantized, phase.parameters()):
            if weight in self._staying:
                makes = makes or weight in self._unused
                self._unused.discard(weight)
                continue
            makes = makes or not hasattr(weight, "quantized")
            pair = quantized_copies(weight)
            if backward and not pair.has_transposed:
                makes = pair.transposed is not None  # it is made when it is read
        return makes

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

"""Gathers weights before they are used and, under ZeRO-3, frees them afterwards.

Under ZeRO-3 a unit's weights are gathered before its first phase runs, forward or backward, and
freed after its last. While a unit computes, the next unit of the same action is gathered; while an
action's last unit computes, the first unit of the next action is (`prefetch`). So at most two units
are whole for each action that runs. W needs no weights.

With `per_step` a unit stays whole from its first forward of a step to its last backward; in
evaluations it is freed after each use.

Per step of m micro-batches each rank sends, with n = dp_shard·cp and Ψ elements in the units
(padding included),

    gathers      (2·m·Ψ - T)·(n-1)/n     per_microbatch: before each forward and each backward
                           Ψ·(n-1)/n     per_step
    reductions           m·Ψ·(n-1)/n     parallel.grad_reduce=per_microbatch
                           Ψ·(n-1)/n     parallel.grad_reduce=per_step

so 3Ψ with one micro-batch, and 2Ψ at any m if both are per step. T is what need not be gathered
again because one action ends with the unit with which the next begins: the head between forward and
backward of a micro-batch. Without a pipeline T = m·Ψ(last unit) + (m-1)·Ψ(first unit). A parameter
used by two units (a tied embedding with both uses on one rank) counts once for each of them per
micro-batch. Recomputation gathers nothing more. Weights of FP8 GEMMs are gathered in FP8
(precision.fp8_gather), half the bytes of bf16. Their slices are quantised once a step, for which
one number per 16384 elements is reduced. Below ZeRO-3 the weights stay whole and are gathered once,
after the optimiser (Ψ); phases wait for them here as well.
Source: Rajbhandari et al. 2020 (arXiv:1910.02054), sections 5 and 7.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from megatron5d.comm.collectives import Pending
from megatron5d.comm.ledger import Exposure
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.phases.phase import Phase
from megatron5d.precision.gemm import forget_copies


@dataclass(frozen=True)
class _Entry:
    """The buckets to gather when an action, forward or backward, reaches a unit's first phase."""

    own: tuple[int, ...]  # of the unit
    ahead: tuple[int, ...] | None  # of the next unit; None at the end of the action


class GatheredWeights:
    """Gathers and frees the weights of buckets as phases begin and end.

    Args:
        uses: phase -> indices of the buckets that it reads.
        unit_of: phase -> index of its unit.
        per_step: keep gathered weights until their last backward of the step.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        uses: Mapping[Phase, Sequence[int]],
        unit_of: Mapping[Phase, int],
        per_step: bool,
    ) -> None:
        self._buckets, self._uses, self._unit_of, self._per_step = buckets, uses, unit_of, per_step
        self.exposure = Exposure(buckets[0].weights.device)
        self._entries: dict[tuple[Phase, bool], _Entry] = {}  # (phase, forward)
        # (phase, forward) -> buckets that no earlier phase of the unit uses
        self._opens: dict[tuple[Phase, bool], tuple[int, ...]] = {}
        self._pending: dict[int, Pending] = {}
        self._users: Counter[int] = Counter()  # bucket -> actions that read it or will read it next
        self._reserved: set[tuple[int, bool]] = set()  # (bucket, forward) gathered ahead of its use
        # (bucket, forward) -> actions in its unit now
        self._reading: Counter[tuple[int, bool]] = Counter()
        self._to_prefetch: list[tuple[Phase, bool]] = []
        self._left: Counter[int] = Counter()  # bucket -> backward passes still to come in this step

    def register(self, phases: Sequence[Phase]) -> None:
        """Takes note of the order in which an action passes the phases of a stage."""
        units = [
            list(group) for _, group in groupby(phases, key=lambda phase: self._unit_of[phase])
        ]
        for forward in (True, False):
            ordered = [
                unit if forward else unit[::-1] for unit in (units if forward else units[::-1])
            ]
            needs = [
                tuple(dict.fromkeys(index for phase in unit for index in self._uses[phase]))
                for unit in ordered
            ]
            for unit, own, ahead in zip(ordered, needs, [*needs[1:], None]):
                self._entries[unit[0], forward] = _Entry(own, ahead)
                seen: set[int] = set()
                for phase in unit:
                    self._opens[phase, forward] = tuple(
                        index for index in self._uses[phase] if index not in seen
                    )
                    seen.update(self._uses[phase])

    def start_step(self, passes: Mapping[Phase, int]) -> None:
        """Takes note of how many micro-batches will pass each phase backward."""
        self._left.clear()
        for phase, count in passes.items():
            for index in self._opens[phase, True]:
                self._left[index] += count
        self.exposure.clear()

    def prefetch(self, phase: Phase, forward: bool) -> None:
        """Has the unit of this phase, with which the next action begins, gathered during this
        action's last unit."""
        self._to_prefetch.append((phase, forward))

    def before(self, phase: Phase, forward: bool) -> None:
        """Waits for the weights that the phase reads, and starts gathering those of the next
        unit."""
        entry = self._entries.get((phase, forward))
        if entry is not None:
            self._reserve(entry.own, forward)
            # this action's from here on: another one that overlaps with it gathers for itself
            for index in entry.own:
                self._reserved.discard((index, forward))
                self._reading[index, forward] += 1
        for index in self._opens[phase, forward]:
            self._wait(index)
        if entry is not None and entry.ahead is not None:
            self._reserve(entry.ahead, forward)
        elif entry is not None:
            for first, direction in self._to_prefetch:
                self._reserve(self._entries[first, direction].own, direction)
            self._to_prefetch.clear()

    def before_recompute(self, phase: Phase) -> None:
        """Waits for the weights of a phase that a backward runs forward again; they stay until that
        backward."""
        for index in self._opens[phase, True]:
            if not self._reading[index, False]:
                self._reserve((index,), False)
            self._wait(index)

    def after(self, phase: Phase, forward: bool) -> None:
        """Frees the buckets that no later phase of the unit reads in this action, unless another
        action needs them."""
        for index in self._opens[phase, not forward]:
            self._reading[index, forward] -= 1
            self._left[index] -= not forward
            self._release(index)

    def _reserve(self, indices: Sequence[int], forward: bool) -> None:
        """Gathers buckets for one use ahead, unless that was done before."""
        for index in indices:
            if (index, forward) not in self._reserved:
                self._reserved.add((index, forward))
                self._hold(index)

    def _hold(self, index: int, wide: bool = False) -> None:
        """Adds a user to a bucket, and starts gathering the bucket if it is not whole."""
        self._users[index] += 1
        if not self._buckets[index].holds(wide):
            if not wide:
                self._refresh()
            self._pending[index] = self._buckets[index].start_gather(wide)

    def _refresh(self) -> None:
        """Converts the slices of all units whose weights have changed since; done at the first
        gather of a step."""
        stale = [
            bucket.format
            for bucket in self._buckets
            if bucket.format is not None and bucket.format.is_stale
        ]
        if stale:
            stale[0].refresh(stale, self.exposure)

    def _release(self, index: int) -> None:
        """Removes a user from a bucket, and frees the bucket if nobody needs it."""
        self._users[index] -= 1
        bucket = self._buckets[index]
        kept = self._per_step and self._left[index] > 0
        if bucket.shards_weights and self._users[index] == 0 and not kept:
            bucket.drop_weights()

    def _wait(self, index: int) -> None:
        if index in self._pending:
            self.exposure.time_call(self._pending.pop(index).wait)

    def check_released(self) -> None:
        """Asserts that no bucket is still whole at the end of a step, since the update would make
        it stale."""
        held = [
            i
            for i, bucket in enumerate(self._buckets)
            if bucket.shards_weights and bucket.holds(wide=False)
        ]
        assert not held and not self._reserved, (
            f"buckets {held} are still gathered, {self._reserved} were never used"
        )

    def start_gather(self) -> None:
        """Drops copies of weights after their update, and below ZeRO-3 starts gathering the new
        weights.

        Comm: all_gather over the shard axis of numel/size elements per bucket; none under ZeRO-3.
        """
        for index, bucket in enumerate(self._buckets):
            forget_copies(bucket.parameters)
            if bucket.format is not None:
                bucket.format.is_stale = True
            if bucket.shard.size > 1 and not bucket.shards_weights:
                self._pending[index] = bucket.start_gather()

    def finish_gather(self) -> None:
        """Waits for all gathers that are under way."""
        for index in list(self._pending):
            self._pending.pop(index).wait()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Holds all weights whole, in the model's dtype, so that they can be read outside the
        phases.

        Comm: under ZeRO-3 all_gather over the shard axis of numel/size elements per bucket.
        """
        for index in range(len(self._buckets)):
            self._hold(index, wide=True)
        self.finish_gather()
        try:
            yield
        finally:
            for index in range(len(self._buckets)):
                self._release(index)

"""Gathers weights before they are used and, under ZeRO-3, frees them afterwards.

Under ZeRO-3 a unit's weights are gathered before its first phase runs, forward or backward, and
freed after its last. While a unit computes, the next unit of the same action is gathered. While an
action's last unit computes, the first unit of the next action is gathered (`prefetch`). So at most
two units are gathered for each running action. W needs no weights.

With `per_step` a unit stays gathered from its first forward of a step to its last backward; in
evaluations it is freed after each use.

In a step of m micro-batches each rank sends, with n = dp_shard·cp and Ψ elements in the units
(padding included),

    gathers      (2·m·Ψ - T)·(n-1)/n     per_microbatch: before each forward and each backward
                           Ψ·(n-1)/n     per_step
    reductions           m·Ψ·(n-1)/n     parallel.grad_reduce=per_microbatch
                           Ψ·(n-1)/n     parallel.grad_reduce=per_step

so 3Ψ with one micro-batch, and 2Ψ at any m if both are per step. T counts units that are gathered
already because one action ends with the unit with which the next begins, such as the head between
forward and backward of a micro-batch. Without a pipeline T = m·Ψ(last unit) + (m-1)·Ψ(first unit).
A parameter used by two units (a tied embedding with both uses on one rank) counts once for each of
them per micro-batch. Recomputation gathers nothing more. Weights of FP8 GEMMs are gathered in FP8
(precision.fp8_gather), half the bytes of bf16. Their slices are quantized once a step, which
reduces one number per 16384 elements.

Under ZeRO-1 and 2 the weights stay gathered, and are gathered once, after the optimizer (Ψ). Phases
wait for them here as well.
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

    unit: tuple[int, ...]  # buckets of this unit
    next_unit: tuple[int, ...] | None  # of the next one; None at the end of the action


class GatheredWeights:
    """Gathers and frees the weights of buckets as phases begin and end.

    Args:
        buckets: of the stage.
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
        self._first_uses: dict[tuple[Phase, bool], tuple[int, ...]] = {}
        self._pending: dict[int, Pending] = {}
        self._users: Counter[int] = Counter()  # bucket -> actions that read it or will read it next
        self._reserved: set[tuple[int, bool]] = set()  # (bucket, forward) gathered for a later use
        # (bucket, forward) -> actions in its unit now
        self._reading: Counter[tuple[int, bool]] = Counter()
        self._to_prefetch: list[tuple[Phase, bool]] = []
        self._remaining: Counter[int] = Counter()  # bucket -> this step's remaining backward passes

    def register(self, phases: Sequence[Phase]) -> None:
        """Registers the phases of a stage in forward order."""
        units = [list(unit) for _, unit in groupby(phases, key=self._unit_of.__getitem__)]
        for forward in (True, False):
            # A backward passes the units, and the phases of each, in reverse order.
            ordered = units if forward else [unit[::-1] for unit in reversed(units)]
            indices = [
                tuple(dict.fromkeys(index for phase in unit for index in self._uses[phase]))
                for unit in ordered
            ]
            for i, unit in enumerate(ordered):
                next_unit = indices[i + 1] if i + 1 < len(indices) else None
                self._entries[unit[0], forward] = _Entry(indices[i], next_unit)
                earlier: set[int] = set()
                for phase in unit:
                    self._first_uses[phase, forward] = tuple(
                        index for index in self._uses[phase] if index not in earlier
                    )
                    earlier.update(self._uses[phase])

    def start_step(self, passes: Mapping[Phase, int]) -> None:
        """Counts the step's backward passes: `passes` micro-batches of each phase."""
        self._remaining.clear()
        for phase, count in passes.items():
            for index in self._first_uses[phase, True]:
                self._remaining[index] += count
        self.exposure.clear()

    def prefetch(self, phase: Phase, forward: bool) -> None:
        """Gathers the unit of the next action's first phase during this action's last unit."""
        self._to_prefetch.append((phase, forward))

    def before(self, phase: Phase, forward: bool) -> None:
        """Waits for the weights that the phase reads; starts gathering those of the next unit."""
        entry = self._entries.get((phase, forward))
        if entry is not None:
            self._reserve(entry.unit, forward)
            # The reservation is this action's now: an overlapping action gathers for itself.
            for index in entry.unit:
                self._reserved.discard((index, forward))
                self._reading[index, forward] += 1
        for index in self._first_uses[phase, forward]:
            self._wait(index)
        if entry is not None and entry.next_unit is not None:
            self._reserve(entry.next_unit, forward)
        elif entry is not None:
            for first, direction in self._to_prefetch:
                self._reserve(self._entries[first, direction].unit, direction)
            self._to_prefetch.clear()

    def before_recompute(self, phase: Phase) -> None:
        """Waits for the weights of a phase that is recomputed; they stay until its backward."""
        for index in self._first_uses[phase, True]:
            if not self._reading[index, False]:
                self._reserve((index,), False)
            self._wait(index)

    def after(self, phase: Phase, forward: bool) -> None:
        """Releases the buckets that no later phase of the unit reads in this action."""
        # The first uses of the opposite direction are the last uses of this one.
        for index in self._first_uses[phase, not forward]:
            self._reading[index, forward] -= 1
            self._remaining[index] -= not forward
            self._release(index)

    def _reserve(self, indices: Sequence[int], forward: bool) -> None:
        """Gathers buckets for their next use, unless that is already reserved."""
        for index in indices:
            if (index, forward) not in self._reserved:
                self._reserved.add((index, forward))
                self._acquire(index)

    def _acquire(self, index: int, in_model_dtype: bool = False) -> None:
        """Adds a user to a bucket, and starts gathering the bucket unless it is gathered."""
        self._users[index] += 1
        if not self._buckets[index].is_gathered(in_model_dtype):
            if not in_model_dtype:
                self._refresh_formats()
            self._pending[index] = self._buckets[index].start_gather(in_model_dtype)

    def _refresh_formats(self) -> None:
        """Converts the slices of buckets whose weights have changed, at a step's first gather."""
        formats = [bucket.format for bucket in self._buckets if bucket.format is not None]
        stale = [bucket_format for bucket_format in formats if bucket_format.is_stale]
        if stale:
            stale[0].refresh(stale, self.exposure)

    def _release(self, index: int) -> None:
        """Removes a user from a bucket, and frees the bucket after its last user."""
        self._users[index] -= 1
        bucket = self._buckets[index]
        is_needed = self._users[index] > 0 or (self._per_step and self._remaining[index] > 0)
        if bucket.shards_weights and not is_needed:
            bucket.drop_weights()

    def _wait(self, index: int) -> None:
        if index in self._pending:
            self.exposure.time_call(self._pending.pop(index).wait)

    def check_released(self) -> None:
        """Asserts at the end of a step that no bucket is gathered: the update makes it stale."""
        gathered = [
            index
            for index, bucket in enumerate(self._buckets)
            if bucket.shards_weights and bucket.is_gathered(in_model_dtype=False)
        ]
        assert not gathered and not self._reserved, (
            f"buckets {gathered} are still gathered, {self._reserved} were never used"
        )

    def start_gather(self) -> None:
        """Drops copies of updated weights and, under ZeRO-1 and 2, starts gathering the weights.

        Comm: all_gather over the shard axis of numel/size elements per bucket; none under ZeRO-3.
        """
        for index, bucket in enumerate(self._buckets):
            forget_copies(bucket.parameters)
            if bucket.format is not None:
                bucket.format.is_stale = True
            if bucket.shard.size > 1 and not bucket.shards_weights:
                self._pending[index] = bucket.start_gather()

    def finish_gather(self) -> None:
        """Waits for all gathers in flight."""
        for index in list(self._pending):
            self._pending.pop(index).wait()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keeps all weights gathered in the model's dtype, to be read outside the phases.

        Comm: under ZeRO-3 all_gather over the shard axis of numel/size elements per bucket.
        """
        for index in range(len(self._buckets)):
            self._acquire(index, in_model_dtype=True)
        self.finish_gather()
        try:
            yield
        finally:
            for index in range(len(self._buckets)):
                self._release(index)

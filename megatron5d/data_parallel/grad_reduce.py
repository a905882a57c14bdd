"""Reduces the gradients of one bucket: over its shard axis, then once a step over its replicas.

A reduction over the shard axis is finished when the gradient of the next unit is ready. It has had
time to overlap until then, and its buffer can be freed. A reduction without a buffer to free or a
replica to sum with is finished at the end of the step.
"""

from collections.abc import Mapping, Sequence

from megatron5d.comm.collectives import Pending
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.phases.phase import Phase
from megatron5d.topology.shard_spec import spec_of


class BucketReduction:
    """The reduction of one bucket.

    Args:
        bucket: of the gradients.
        phases: which compute these gradients.
        per_microbatch: ZeRO-2 and 3 reduce after every micro-batch instead of once a step.
    """

    def __init__(self, bucket: Bucket, phases: Sequence[Phase], per_microbatch: bool) -> None:
        self.bucket, self.phases = bucket, phases
        self._per_microbatch = per_microbatch and bucket.shards_grads
        self.remaining = 0  # weight gradients that this step has not computed yet
        self.is_in_flight = False  # the reduction over the shard axis
        self._is_last = False  # the reduction in flight is the step's last
        self._replicas: Pending | None = None

    def start_step(self, passes: Mapping[Phase, int]) -> None:
        """Counts the step's gradients: those of `passes` micro-batches of each phase."""
        self.remaining = sum(passes[phase] for phase in self.phases)

    def add_grad(self, ends_microbatch: bool) -> bool:
        """Counts the weight gradient of a phase; returns whether to reduce the bucket now.

        Args:
            ends_microbatch: it is the bucket's last gradient of a micro-batch.
        """
        self.remaining -= 1
        is_complete = self.remaining == 0 or (self._per_microbatch and ends_microbatch)
        return is_complete and not self.bucket.frozen

    def start(self) -> None:
        """Starts the sum over the shard axis, or over replicas if that has one rank.

        Comm: reduce_scatter over `shard`, (n-1)/n·N elements, or all_reduce over `replicate` of N
            elements.
        """
        if self.bucket.shard.size > 1:
            self._start_shard_sum()
        else:
            self._sum_replicas()

    def _start_shard_sum(self) -> None:
        self.bucket.start_reduce()
        self.is_in_flight, self._is_last = True, self.remaining == 0

    def _sum_replicas(self) -> None:
        self._replicas = self.bucket.start_sum_replicas()

    @property
    def finishes_early(self) -> bool:
        """Whether the sum over the shard axis is finished before the end of the step."""
        return self.bucket.shards_grads or self.bucket.replicate.size > 1

    def finish_shard_sum(self) -> None:
        """Waits for the sum over the shard axis; the step's last starts the sum over replicas."""
        self.bucket.finish_reduce()
        self.is_in_flight = False
        # Not `remaining == 0`, which holds before the step's last sum over the shard axis starts.
        if self._is_last:
            self._sum_replicas()

    def finish(self) -> None:
        """Waits for the sum over replicas."""
        if self._replicas is not None:
            self._replicas.wait()
            self._replicas = None


class BidirectionalReduction(BucketReduction):
    """The reduction of a bucket that the stage of the other direction, on another rank, shares.

    Under ZeRO-1 that rank is on the shard axis, else among the replicas. The two ranks finish their
    phases in different orders, so they start their common sums in one fixed order
    (`start_common_sum`). These are finished at the end of the step, because the other rank may wait
    for this one in another collective before.

    Args:
        bucket, phases, per_microbatch: as in BucketReduction.
        zero: ZeRO stage.
    """

    def __init__(
        self, bucket: Bucket, phases: Sequence[Phase], per_microbatch: bool, zero: int
    ) -> None:
        super().__init__(bucket, phases, per_microbatch)
        self._in_shard = zero == 1 and bucket.shard.size > 1

    def start(self) -> None:
        """Starts the sum over the shard axis if the other rank is not on it."""
        if self.bucket.shard.size > 1 and not self._in_shard:
            self._start_shard_sum()

    @property
    def finishes_early(self) -> bool:
        return super().finishes_early and not self._in_shard

    def finish_shard_sum(self) -> None:
        self._is_last &= self._in_shard
        super().finish_shard_sum()

    @property
    def is_ready(self) -> bool:
        """Whether all gradients of this rank are computed and reduced."""
        return self.remaining == 0 and not self.is_in_flight

    def start_common_sum(self) -> None:
        """Starts the sum with the other rank.

        Comm: as `BucketReduction.start`.
        """
        if self._in_shard:
            self._start_shard_sum()
        else:
            self._sum_replicas()


def make_reduction(
    bucket: Bucket, phases: Sequence[Phase], per_microbatch: bool, zero: int
) -> BucketReduction:
    """Makes the reduction of a bucket; arguments as in the two classes."""
    if spec_of(bucket.parameters[0]).shared and not bucket.frozen:
        return BidirectionalReduction(bucket, phases, per_microbatch, zero)
    return BucketReduction(bucket, phases, per_microbatch)

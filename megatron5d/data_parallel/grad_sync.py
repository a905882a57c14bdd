"""Data parallelism over buckets: reduces gradients in the backward, gathers weights before use.

    zero   weights  grads  optimizer   communication of a step (n = dp_shard·cp, m micro-batches)
    0      full     full   full        all_reduce of the gradients
    1      full     full   1/n         reduce_scatter; all_gather of the weights after the step
    2      full     1/n    1/n         m reduce_scatters; all_gather of the weights after the step
    3      1/n      1/n    1/n         m reduce_scatters; 2·m all_gathers of the weights

One collective handles a bucket: usually all parameters of a block, of the embedding or of the head.
bucket.py describes what stays in memory; weight_gather.py, when weights are gathered and how many
elements are sent.

Gradients under ZeRO-2 and 3. A unit's gradient is accumulated in a buffer of main-gradient dtype,
allocated at the unit's first weight gradient (with a split backward in W). By default it is
reduce-scattered after every micro-batch and added to the owned slice. Then at most two such buffers
exist, one being filled and one being reduced, and m·Ψ elements are sent. With `reduce_per_step` the
buffer stays until the step's last micro-batch, as under ZeRO-1, and Ψ elements are sent.

Bitwise equality. All stages add micro-batches to the main gradient in the same order and reduce the
same buffers in the same slices. So ZeRO-1, 2 and 3 give the same bits if gradients are reduced once
a step (one micro-batch, or `reduce_per_step`) and no stage is bidirectional. Reduced per
micro-batch, the sum over ranks precedes the sum over micro-batches and rounds differently. ZeRO-0
uses all_reduce, which may add in another order on more than two ranks, and its gradient norm sums
full parameters instead of slices. When weights are gathered does not affect any number.
Source: Rajbhandari et al. 2020 (arXiv:1910.02054).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.collectives import start_all_reduce
from megatron5d.data_parallel.bucket import GatherFormat
from megatron5d.data_parallel.bucketing import make_buckets
from megatron5d.data_parallel.grad_reduce import (
    BidirectionalReduction,
    BucketReduction,
    make_reduction,
)
from megatron5d.data_parallel.temporary_buffer import FixedAddresses
from megatron5d.data_parallel.weight_gather import GatheredWeights
from megatron5d.phases.phase import Phase, PhaseHooks
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import ShardSpec


class GradSync(PhaseHooks):
    """The `PhaseHooks` of a stage under data parallelism.

    Args:
        units: phases that are gathered and reduced together. Parameters of several units belong to
            the first.
        mesh: this rank's axes.
        zero: ZeRO stage, 0 ... 3.
        grad_dtype: of main gradients and their reduction.
        reduce_per_step: ZeRO-2 and 3 reduce gradients once a step instead of after every
            micro-batch.
        gather_per_step: ZeRO-3 keeps gathered weights until their last backward of a step.
        gather_format: of weights under ZeRO-3, if it accepts them; they get separate buckets.
        separate: selects parameters that get separate buckets (another optimizer updates them).
        frozen: selects parameters that are never updated; their gradients are not reduced.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Phase]],
        mesh: Mesh,
        zero: int,
        grad_dtype: torch.dtype,
        *,
        reduce_per_step: bool = False,
        gather_per_step: bool = False,
        gather_format: type[GatherFormat] | None = None,
        separate: Callable[[ShardSpec], bool] = lambda spec: False,
        frozen: Callable[[ShardSpec], bool] = lambda spec: False,
    ) -> None:
        self.zero, self._mesh = zero, mesh
        # `uses` maps a phase to the indices of the buckets that hold its parameters.
        self.buckets, self.uses, self._ends = make_buckets(
            units, mesh, zero, grad_dtype, gather_format if zero == 3 else None, separate, frozen
        )
        self._reductions = []
        for index, bucket in enumerate(self.buckets):
            phases = [phase for phase, indices in self.uses.items() if index in indices]
            self._reductions.append(make_reduction(bucket, phases, not reduce_per_step, zero))
        # over the shard axis, in the order in which they started
        self._in_flight: list[BucketReduction] = []
        # common sums of this step that have not started, in the same order on both ranks
        self._common_sums: list[BidirectionalReduction] = []
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL even an asynchronous collective waits until all ranks
        # have called it. Then common sums start after the step's last action, so that two ranks
        # never wait for each other.
        self._starts_early = dist.get_debug_level() != dist.DebugLevel.DETAIL
        self._connect_replicas()
        unit_of = {phase: number for number, unit in enumerate(units) for phase in unit}
        self.weights = GatheredWeights(self.buckets, self.uses, unit_of, gather_per_step)
        self._addresses = FixedAddresses(
            [buffer for bucket in self.buckets for buffer in bucket.temporary_buffers]
        )

    @property
    def _bidirectional(self) -> list[BidirectionalReduction]:
        return [r for r in self._reductions if isinstance(r, BidirectionalReduction)]

    def _connect_replicas(self) -> None:
        """Connects the two ranks of a bidirectional stage before the first step.

        Groups connect at their first collective. In the first step the two ranks could wait for
        each other there.

        Comm: all_reduce of one element per axis on which shared parameters are reduced.
        """
        buckets = [reduction.bucket for reduction in self._bidirectional]
        axes = [axis for bucket in buckets for axis in (bucket.shard, bucket.replicate)]
        for axis in dict.fromkeys(axes):
            start_all_reduce(self.buckets[0].grad_slice.new_zeros(1), axis).wait()

    def start_step(self, passes: Mapping[Phase, int], with_graphs: bool = False) -> None:
        """Clears the gradients and announces the step's micro-batches.

        Args:
            passes: phase -> number of its micro-batches. Its order, the same on both ranks of a
                bidirectional stage, is that in which their common sums start.
            with_graphs: phases are replayed as CUDA graphs. From the second step with the same
                passes on, temporary buffers have fixed addresses; the first gradients are added to
                zeros.
        """
        if with_graphs:
            self._addresses.start_step(passes)
        for reduction in self._reductions:
            reduction.bucket.clear_grads(zeros=with_graphs)
            reduction.start_step(passes)
        order = {phase: index for index, phase in enumerate(passes)}
        self._common_sums = sorted(
            self._bidirectional, key=lambda r: max(order[phase] for phase in r.phases)
        )
        self.weights.start_step(passes)

    def register(self, phases: Sequence[Phase]) -> None:
        """Registers the phases of a stage in forward order."""
        self.weights.register(phases)

    def prefetch(self, phase: Phase, forward: bool) -> None:
        """Prefetches the weights of the next action's first phase during the current action."""
        self.weights.prefetch(phase, forward)

    def before(self, phase: Phase, kind: str) -> None:
        """Waits for the weights that this phase reads; W reads none."""
        if kind == "recompute":
            self.weights.before_recompute(phase)
        elif kind != "wgrad":
            self.weights.before(phase, kind == "forward")

    def after(self, phase: Phase, kind: str) -> None:
        """Releases the weights that this phase has read, or reduces its weight gradients."""
        if kind == "wgrad":
            self._reduce(phase)
        elif kind != "recompute":
            self.weights.after(phase, kind == "forward")

    def _reduce(self, phase: Phase) -> None:
        """Counts a phase's weight gradients, and starts the reductions that they complete."""
        complete = []
        for index in self.uses[phase]:
            reduction = self._reductions[index]
            if reduction.add_grad(ends_microbatch=index in self._ends[phase]):
                complete.append(reduction)
        if not complete:
            return
        self._finish_shard_sums()
        for reduction in complete:
            reduction.start()
        self._in_flight += [reduction for reduction in complete if reduction.is_in_flight]
        if self._starts_early:
            self._start_common_sums()

    def _finish_shard_sums(self, end_of_step: bool = False) -> None:
        """Finishes sums over shard axes; some only at the end of the step."""
        for reduction in self._in_flight:
            if end_of_step or reduction.finishes_early:
                reduction.finish_shard_sum()
        self._in_flight = [reduction for reduction in self._in_flight if reduction.is_in_flight]

    def _start_common_sums(self) -> None:
        """Starts the common sums that are ready, in their order."""
        while self._common_sums and self._common_sums[0].is_ready:
            reduction = self._common_sums.pop(0)
            reduction.start_common_sum()
            if reduction.is_in_flight:
                self._in_flight.append(reduction)

    def finish_reduce(self) -> None:
        """Finishes all reductions, after which every owned slice holds its gradient."""
        missing = {i: r.remaining for i, r in enumerate(self._reductions) if r.remaining}
        assert not missing, f"weight gradients that were not computed, per bucket: {missing}"
        if self.zero != 1:
            self._finish_shard_sums(end_of_step=True)
        self._start_common_sums()
        self._finish_shard_sums(end_of_step=True)
        for reduction in self._reductions:
            reduction.finish()
        self._sum_copies()
        self.weights.check_released()
        self._addresses.finish_step()

    def _sum_copies(self) -> None:
        """Sums the gradients of parameters whose copies see different tokens (norms under sp).

        Comm: one all_reduce per axis of copies, of these gradients' elements in the owned slices.
        """
        views_by_axis: dict[str, list[Tensor]] = {}
        for bucket in self.buckets:
            for name, view in bucket.partial_grads:
                views_by_axis.setdefault(name, []).append(view)
        for name, views in views_by_axis.items():
            flat = torch.cat(views)
            start_all_reduce(flat, self._mesh[name]).wait()
            torch._foreach_copy_(views, list(flat.split([view.numel() for view in views])))

    def start_gather(self) -> None:
        """Starts gathering the updated weights (ZeRO-1 and 2)."""
        self.weights.start_gather()

    def finish_gather(self) -> None:
        """Waits for all gathers of weights."""
        self.weights.finish_gather()

    def drop(self) -> None:
        """Frees the temporary buffers (ZeRO-2 and 3), whatever they hold."""
        for bucket in self.buckets:
            if bucket.shards_weights:
                bucket.drop_weights()
            if bucket.shards_grads:
                bucket.drop_grads()

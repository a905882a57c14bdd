"""Data parallelism over buckets: gradients are reduced during the backward, weights gathered during
the forward.

    zero   weights    gradients   optimiser state       communication of a step (n = dp_shard·cp, m micro-batches)
    0      whole      whole       whole                 all_reduce of the gradients
    1      whole      whole       1/n                   reduce_scatter; all_gather of the weights after the step
    2      whole      1/n         1/n                   m reduce_scatters; all_gather of the weights after the step
    3      1/n        1/n         1/n                   m reduce_scatters; 2·m all_gathers of the weights

The unit is a bucket: usually all parameters of a block, of the embedding or of the head. bucket.py
says what stays in memory, weight_gather.py when weights are gathered and how many elements are
sent.

Gradients under ZeRO-2 and 3. A unit's gradient is accumulated in a buffer of main-gradient dtype,
allocated at the unit's first weight gradient (under a split backward: in W). By default it is
reduce-scattered after every micro-batch and added to the owned slice. Then at most two such buffers
exist, one being filled and one being reduced, and m·Ψ elements are sent. With `reduce_per_step` the
buffer stays until the step's last micro-batch, as under ZeRO-1, and Ψ elements are sent.

Bitwise equality. All stages add micro-batches into the main gradient in the same order and reduce
the same buffers in the same slices. So ZeRO-1, 2 and 3 give the same bits if gradients are reduced
once a step (one micro-batch, or `reduce_per_step`) and no stage is bidirectional. Reduced per
micro-batch, the sum over ranks comes before the sum over micro-batches and rounds differently.
ZeRO-0 uses all_reduce, which on more than two ranks may add in another order, and its gradient norm
adds up whole parameters instead of slices. When weights are gathered changes no number.
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
    reduction_of,
)
from megatron5d.data_parallel.temporary_buffer import FixedPlaces
from megatron5d.data_parallel.weight_gather import GatheredWeights
from megatron5d.phases.phase import Phase
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import ShardSpec


class GradSync:
    """The PhaseHooks of a stage under data parallelism.

    Args:
        units: lists of phases; a unit's parameters of one kind share a bucket, one of several units
            is the first's.
        zero: 0 ... 3.
        grad_dtype: of main gradients and their reduction.
        reduce_per_step: ZeRO-2 and 3 reduce gradients once a step instead of after every
            micro-batch.
        gather_per_step: ZeRO-3 keeps gathered weights until their last backward of a step.
        gather_format: in which ZeRO-3 gathers the parameters that it accepts; they get their own
            buckets.
        separate: parameters for which it is true get their own buckets (those that another
            optimiser updates).
        frozen: the same for parameters that are never updated, and whose gradients are not reduced.

    `uses` has the indices of the buckets that hold a phase's parameters.
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
        made = make_buckets(
            units, mesh, zero, grad_dtype, gather_format if zero == 3 else None, separate, frozen
        )
        self.buckets, self.uses, self._ends = made
        users = (
            [phase for phase, uses in self.uses.items() if index in uses]
            for index in range(len(self.buckets))
        )
        self._reductions = [
            reduction_of(bucket, phases, not reduce_per_step, zero)
            for bucket, phases in zip(self.buckets, users)
        ]
        # over the shard axis, in the order of their start
        self._under_way: list[BucketReduction] = []
        # those that have not started, in the order of both ranks
        self._turns: list[BidirectionalReduction] = []
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL even an asynchronous collective waits until all ranks
        # have called it. Then bidirectional reductions start after the step's last action, so that
        # two ranks never wait for each other.
        self._starts_early = dist.get_debug_level() != dist.DebugLevel.DETAIL
        self._connect_replicas()
        unit_of = {phase: number for number, unit in enumerate(units) for phase in unit}
        self.weights = GatheredWeights(self.buckets, self.uses, unit_of, gather_per_step)
        self._places = FixedPlaces(
            [each for bucket in self.buckets for each in bucket.temporary_buffers]
        )

    @property
    def _bidirectional(self) -> list[BidirectionalReduction]:
        return [each for each in self._reductions if isinstance(each, BidirectionalReduction)]

    def _connect_replicas(self) -> None:
        """Connects the two ranks of a bidirectional stage; in the first step they could wait for
        each other.

        Comm: all_reduce of one element per axis on which shared parameters are reduced.
        """
        axes = [
            axis
            for each in self._bidirectional
            for axis in (each.bucket.shard, each.bucket.replicate)
        ]
        for axis in dict.fromkeys(axes):
            start_all_reduce(self.buckets[0].grad_slice.new_zeros(1), axis).wait()

    def start_step(self, passes: Mapping[Phase, int], with_graphs: bool = False) -> None:
        """Clears the gradients and announces the step's micro-batches.

        Args:
            passes: phase -> number of micro-batches that pass it. Its order, the same on both ranks
                of a bidirectional stage, is that in which their common reductions start.
            with_graphs: phases are replayed as CUDA graphs: from the second step with the same
                passes on temporary buffers have fixed addresses, and the first gradients are added
                to zeros.
        """
        if with_graphs:
            self._places.start_step(passes)
        for reduction in self._reductions:
            reduction.bucket.clear_grads(zeros=with_graphs)
            reduction.start_step(passes)
        place = {phase: index for index, phase in enumerate(passes)}
        self._turns = sorted(
            self._bidirectional, key=lambda each: max(place[phase] for phase in each.phases)
        )
        self.weights.start_step(passes)

    def register(self, phases: Sequence[Phase]) -> None:
        """Takes note of the order in which an action passes the phases of a stage."""
        self.weights.register(phases)

    def prefetch(self, phase: Phase, forward: bool) -> None:
        """Has the weights of this phase, with which the next action begins, gathered during the one
        that starts now."""
        self.weights.prefetch(phase, forward)

    def before(self, phase: Phase, kind: str) -> None:
        """Waits for the weights that this phase reads; W reads none."""
        if kind == "recompute":
            self.weights.before_recompute(phase)
        elif kind != "wgrad":
            self.weights.before(phase, kind == "forward")

    def after(self, phase: Phase, kind: str) -> None:
        """Releases the weights that this phase has read (ZeRO-3), or reduces its weight
        gradients."""
        if kind == "wgrad":
            self._reduce(phase)
        elif kind != "recompute":
            self.weights.after(phase, kind == "forward")

    def _reduce(self, phase: Phase) -> None:
        """Starts to reduce the buckets whose last gradient of the step, or (ZeRO-2, 3) of the
        micro-batch, arrived."""
        ends, both = (
            self._ends[phase],
            [(index, self._reductions[index]) for index in self.uses[phase]],
        )
        due = [reduction for index, reduction in both if reduction.arrived(index in ends)]
        if due:
            self._finish_shard_sums()
            for reduction in due:
                reduction.start()
            self._under_way += [reduction for reduction in due if reduction.is_under_way]
            if self._starts_early:
                self._start_turns()

    def _finish_shard_sums(self, everything: bool = False) -> None:
        """Finishes sums over shard axes and starts those over replicas; with `everything` also
        those that may be left until the end of the step."""
        for reduction in self._under_way:
            if everything or reduction.finishes_early:
                reduction.finish_shard_sum()
        self._under_way = [reduction for reduction in self._under_way if reduction.is_under_way]

    def _start_turns(self) -> None:
        """Starts the bidirectional reductions whose turn it is."""
        while self._turns and self._turns[0].is_ready:
            reduction = self._turns.pop(0)
            reduction.start_turn()
            if reduction.is_under_way:
                self._under_way.append(reduction)

    def finish_reduce(self) -> None:
        """Waits until every owned slice holds the whole gradient."""
        left = {
            index: each.remaining for index, each in enumerate(self._reductions) if each.remaining
        }
        assert not left, f"weight gradients that have not arrived, per bucket: {left}"
        if self.zero != 1:
            self._finish_shard_sums(everything=True)
        self._start_turns()
        self._finish_shard_sums(everything=True)
        for reduction in self._reductions:
            reduction.finish()
        self._sum_copies()
        self.weights.check_released()
        self._places.finish_step()

    def _sum_copies(self) -> None:
        """Sums the gradients of parameters whose copies have each seen only a part of the tokens
        (norms under sp).

        Comm: one all_reduce per axis of copies, of the elements of those gradients in the owned
            slices.
        """
        found: dict[str, list[Tensor]] = {}
        for bucket in self.buckets:
            for name, view in bucket.partial_grads:
                found.setdefault(name, []).append(view)
        for name, views in found.items():
            flat = torch.cat(views)
            start_all_reduce(flat, self._mesh[name]).wait()
            torch._foreach_copy_(views, list(flat.split([view.numel() for view in views])))

    def start_gather(self) -> None:
        """Starts gathering the updated weights, below ZeRO-3."""
        self.weights.start_gather()

    def finish_gather(self) -> None:
        """Waits until all gathers have finished."""
        self.weights.finish_gather()

    def drop(self) -> None:
        """Frees the temporary buffers (ZeRO-2 and 3), whatever they hold."""
        for bucket in self.buckets:
            if bucket.shards_weights:
                bucket.drop_weights()
            if bucket.shards_grads:
                bucket.drop_grads()

"""Data parallelism over buckets: gradients are reduced during the backward, weights gathered during the forward.

    zero   weights    gradients   optimiser state       communication of a step (n = dp_shard·cp, m micro-batches)
    0      whole      whole       whole                 all_reduce of the gradients
    1      whole      whole       1/n                   reduce_scatter; all_gather of the weights after the step
    2      whole      1/n         1/n                   m reduce_scatters; all_gather of the weights after the step
    3      1/n        1/n         1/n                   m reduce_scatters; 2·m all_gathers of the weights

The unit of all of it is a bucket: a block, the embedding, the head. buckets.py says what is resident, zero.py when
weights are gathered and how many elements travel.

Gradients under ZeRO-2 and 3. A unit's gradient is made in a buffer of main-gradient dtype that is there from the unit's
first weight gradient on (under a split backward: in W alone). By default it is reduce-scattered after every micro-batch
and added to the owned slice: at most two such buffers exist, one being filled and one being reduced, and m·Ψ elements
travel. With `reduce_per_step` it stays until the step's last micro-batch and Ψ travel: every unit's buffer is resident
for most of the step, as under ZeRO-1.

With `dp_replicate` (HSDP) the slices are dealt out over dp_shard·cp and summed again over dp_replicate, once a step.
Experts are summed over edp, dealt out over edp_shard. A parameter that the mirrored pipeline rank holds too
(`ShardSpec.shared`) counts that rank as data parallel: slices are dealt out over both ranks' lines under ZeRO-1, and
over each one's own under ZeRO-2 and 3, where the mirror is one more replica: it comes to a unit at other times, so that
the two ranks cannot gather and reduce for each other micro-batch by micro-batch.
Gradients of copies (norms under sp) are added up last, on the slices.

Bits. All stages add a micro-batch's gradients into the main gradient in one order, and reduce the same buffers in the
same slices. So ZeRO-1, 2 and 3 give the same bits where gradients are reduced once a step (one micro-batch, or
`reduce_per_step`) and no mirror takes part. Reduced per micro-batch, the sum over ranks is inside the sum over
micro-batches instead of outside: other roundings. ZeRO-0 reduces by all_reduce, which on more than two ranks may add up
in another order, and its gradient norm adds up whole parameters instead of slices. When weights are gathered changes no
number.
Source: Rajbhandari et al. 2020 (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron5d.comm.collectives import Pending, start_all_reduce
from megatron5d.data_parallel.buckets import Bucket
from megatron5d.data_parallel.zero import GatheredWeights
from megatron5d.precision.fp8 import is_quantized
from megatron5d.topology.axis import Axis, single
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard import ShardSpec, spec_of


def data_axes(mesh: Mesh, zero: int, shared: str = "", expert: bool = False) -> tuple[Axis, Axis]:
    """(shard, replicate): among whom a bucket is dealt out, and who holds the same slice."""
    pair = f"_{shared}" if shared else ""
    whole, shard, replicate = ("edp", "edp_shard", "edp_replicate") if expert else (
        "dp_cp", "dp_shard_cp", "dp_replicate"
    )  # fmt: skip
    if zero == 0:
        return single(shard), mesh[whole + pair]
    if zero == 1:
        return mesh[shard + pair], mesh[replicate]
    return mesh[shard], mesh[replicate + pair]


def _kind(parameter: nn.Parameter, eight_bits: bool) -> tuple[str, bool, bool]:
    """Parameters of one kind are reduced over the same ranks, and gathered alike (`eight_bits`: or not)."""
    spec = spec_of(parameter)
    return spec.shared, spec.expert, eight_bits and is_quantized(parameter)


class GradSync:
    """The PhaseHooks of a stage under data parallelism.

    Args:
        units: lists of phases; each unit's own parameters share a bucket, those with another `shared` or `expert` a
            second one. A parameter used by several units (tied embeddings) belongs to the first.
        mesh: this rank's axes.
        zero: 0 ... 3.
        grad_dtype: of main gradients and their reduction.
        reduce_per_step: ZeRO-2 and 3 reduce gradients once a step instead of after every micro-batch.
        gather_per_step: ZeRO-3 keeps gathered weights until their last backward of a step.
        gather_eight_bits: ZeRO-3 gathers in 8 bits what is multiplied so, in a bucket of its own.
        apart: says of a parameter whether it belongs with those of its unit for which it says the same: what is updated
            by another rule has buckets of its own.
    """

    def __init__(
        self, units: Sequence[Sequence[nn.Module]], mesh: Mesh, zero: int, grad_dtype: torch.dtype, *,
        reduce_per_step: bool = False, gather_per_step: bool = False, gather_eight_bits: bool = False,
        apart: Callable[[ShardSpec], bool] = lambda spec: False,
    ) -> None:  # fmt: skip
        self.zero, self.buckets = zero, list[Bucket]()
        self._mesh = mesh
        self._used_by: dict[int, list[nn.Module]] = {}  # bucket index -> phases whose weight gradients go into it
        self._uses: dict[nn.Module, list[int]] = {}  # phase -> buckets it reads and writes
        self._ends: dict[nn.Module, set[int]] = {}  # phase -> buckets whose gradient of a micro-batch it completes
        home: dict[nn.Parameter, int] = {}
        for unit in units:
            own = {parameter: None for phase in unit for parameter in phase.parameters() if parameter not in home}
            kinds = {
                parameter: (*_kind(parameter, gather_eight_bits and zero == 3), apart(spec_of(parameter)))
                for parameter in own
            }
            for kind in sorted(set(kinds.values())):
                parameters = [parameter for parameter in own if kinds[parameter] == kind]
                home |= dict.fromkeys(parameters, len(self.buckets))
                axes = data_axes(mesh, zero, *kind[:2])
                self.buckets.append(Bucket(parameters, *axes, grad_dtype, zero, eight_bits=kind[2]))
            met: set[int] = set()
            for phase in unit:
                self._uses[phase] = sorted({home[parameter] for parameter in phase.parameters()})
                self._ends[phase] = set(self._uses[phase]) - met  # a backward comes to the unit's first user last
                met |= self._ends[phase]
                for index in self._uses[phase]:
                    self._used_by.setdefault(index, []).append(phase)
        self._per_microbatch = not reduce_per_step
        self._missing: dict[int, int] = {}
        self._queue: list[int] = []  # shared buckets whose sum with the mirror's is to start, in this order
        self._reducing: dict[int, bool] = {}  # sums over the shard axis under way: bucket -> the step's last?
        self._summing: list[Pending] = []  # sums over replicas under way
        self._shared = [i for i, bucket in enumerate(self.buckets) if spec_of(bucket.parameters[0]).shared]
        # torch's DETAIL checks make every collective wait for all ranks to call it, also one that is to run later: then
        # shared reductions start only when the step's last action is done, and nobody waits for a waiting rank
        self._starts_early = dist.get_debug_level() != dist.DebugLevel.DETAIL
        self._meet_mirror()
        unit_of = {phase: number for number, unit in enumerate(units) for phase in unit}
        self.weights = GatheredWeights(self.buckets, self._uses, unit_of, gather_per_step)

    def _meet_mirror(self) -> None:
        """Connects mirrored ranks now: in the first step one would wait here for the other, which needs its gradients.

        Comm: all_reduce of one element per axis on which shared parameters are reduced.
        """
        axes = [axis for i in self._shared for axis in (self.buckets[i].shard, self.buckets[i].replicate)]
        for axis in dict.fromkeys(axes):
            start_all_reduce(self.buckets[0].grad_slice.new_zeros(1), axis).wait()

    def start_step(self, passes: Mapping[nn.Module, int]) -> None:
        """Clears the gradients and says what will come.

        Args:
            passes: phase -> how many micro-batches leave their weight gradients in it, in an order that is the same on
                mirrored ranks: theirs finish in different orders, but reductions that they share must start in one.
        """
        for bucket in self.buckets:
            bucket.clear_grads()
        place = {phase: index for index, phase in enumerate(passes)}
        self._missing = {index: sum(passes[phase] for phase in phases) for index, phases in self._used_by.items()}
        self._queue = sorted(self._shared, key=lambda index: max(place[phase] for phase in self._used_by[index]))
        self.weights.start_step(passes)

    def follow(self, phases: Sequence[nn.Module]) -> None:
        """Learns the order of a stage's phases."""
        self.weights.follow(phases)

    def expect(self, phase: nn.Module, forward: bool) -> None:
        """The action after the one that starts now begins with this phase."""
        self.weights.expect(phase, forward)

    def before_forward(self, phase: nn.Module) -> None:
        """Waits for the weights that this phase reads."""
        self.weights.before(phase, True)

    def after_forward(self, phase: nn.Module) -> None:
        """Lets go of the weights that this phase has read, under ZeRO-3."""
        self.weights.after(phase, True)

    def before_recompute(self, phase: nn.Module) -> None:
        """As before_forward, where a backward runs the phase again: its weights stay until `after_backward`."""
        self.weights.before_recompute(phase)

    def after_recompute(self, phase: nn.Module) -> None:
        """Nothing: they stay."""

    def before_backward(self, phase: nn.Module) -> None:
        """Waits for the weights that the input gradient of this phase reads."""
        self.weights.before(phase, False)

    def after_backward(self, phase: nn.Module) -> None:
        """Lets go of the weights that the input gradient of this phase has read, under ZeRO-3."""
        self.weights.after(phase, False)

    def before_weight_grads(self, phase: nn.Module) -> None:
        """Nothing: W reads no weights."""

    def after_weight_grads(self, phase: nn.Module) -> None:
        """Starts a bucket's reduction when a micro-batch, or under ZeRO-0 and 1 the step, has put its last gradient in.

        A bucket shared with the mirrored rank also waits for its turn.
        """
        due = []
        for index in self._uses[phase]:
            self._missing[index] -= 1
            each = self._per_microbatch and self.buckets[index].shards_grads and index in self._ends[phase]
            if each or self._missing[index] == 0:
                due.append(index)
        if due:
            self._take_in()
            for index in due:
                self._start_reduce(index)
            if self._starts_early:
                self._start_shared()

    def _start_reduce(self, index: int) -> None:
        """The sum over the shard axis; without one, over the replicas at once. Sums with the mirror wait for _queue."""
        bucket, shared = self.buckets[index], index in self._shared
        if bucket.shard.size == 1:
            if not shared:
                self._summing.append(bucket.start_sum_replicas())
        elif not (shared and self.zero == 1):
            bucket.start_reduce()
            self._reducing[index] = self._missing[index] == 0

    def _take_in(self, everything: bool = False) -> None:
        """Waits for sums over shard axes, and starts those over replicas of what is complete.

        Called when the next unit's gradient is ready: the sum has had that long, and its buffer is needed no longer.
        Where nothing is given back and nobody waits for the sum, it is left alone until the end of the step. So is one
        that the mirrored rank takes part in: it may have to come here first for what it still owes.
        """
        left = {}
        for index, is_last in self._reducing.items():
            bucket = self.buckets[index]
            mirrored = index in self._shared and self.zero == 1
            if not (everything or bucket.shards_grads or (bucket.replicate.size > 1 and not mirrored)):
                left[index] = is_last
                continue
            bucket.finish_reduce()
            # The step's last gradient may have come by now, and still wait for its own sum over the shard axis.
            if is_last and not (index in self._shared and self.zero != 1):
                self._summing.append(bucket.start_sum_replicas())
        self._reducing = left

    def _start_shared(self) -> None:
        """Starts the sums with the mirror whose turn it is: over the shard axis under ZeRO-1, else over replicas."""
        while self._queue and self._missing[self._queue[0]] == 0 and self._queue[0] not in self._reducing:
            index = self._queue.pop(0)
            if self.zero == 1 and self.buckets[index].shard.size > 1:
                self.buckets[index].start_reduce()
                self._reducing[index] = True
            else:
                self._summing.append(self.buckets[index].start_sum_replicas())

    def finish_reduce(self) -> None:
        """Waits until every owned slice holds the whole gradient."""
        left = {index: count for index, count in self._missing.items() if count}
        assert not left, f"weight gradients still owed by micro-batch count, per bucket: {left}"
        if self.zero != 1:
            self._take_in(everything=True)
        self._start_shared()
        self._take_in(everything=True)
        for pending in self._summing:
            pending.wait()
        self._summing.clear()
        self._sum_copies()
        self.weights.check_released()

    def _sum_copies(self) -> None:
        """Adds up the gradients of parameters whose copies each saw a part of the work.

        Comm: one all_reduce per axis of copies, of the elements of those gradients in the owned slices.
        """
        found: dict[str, list[Tensor]] = {}
        for bucket in self.buckets:
            for name, view in bucket.copies():
                found.setdefault(name, []).append(view)
        for name, views in found.items():
            if self._mesh[name].size > 1:
                flat = torch.cat(views)
                start_all_reduce(flat, self._mesh[name]).wait()
                torch._foreach_copy_(views, list(flat.split([view.numel() for view in views])))

    def start_gather(self) -> None:
        """After the optimiser: collects everybody's slices of the new weights, where weights stay whole."""
        self.weights.start_gather()

    def finish_gather(self) -> None:
        """Waits for all gathers under way (before slices are saved)."""
        self.weights.finish_gather()

    def buffer_bytes(self) -> int:
        """Bytes of buffers that come and go with the passes, those that are there now (ZeRO-2 and 3)."""
        return sum(bucket.buffer_bytes() for bucket in self.buckets)

    def fetched_bytes(self, phase: nn.Module) -> int:
        """Bytes of the weights that are gathered for the unit of a phase and given back after it (ZeRO-3)."""
        return self.weights.fetched_bytes(phase)

    def whole_weights(self) -> AbstractContextManager[None]:
        """A context in which all parameters can be read, as `GatheredWeights.whole`."""
        return self.weights.whole()

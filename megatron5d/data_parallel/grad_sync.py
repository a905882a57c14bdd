"""Data parallelism over buckets: gradients are reduced during the backward, weights gathered during the forward.

    zero   weights    gradients   optimiser state       reduction
    0      whole      whole       whole                 all_reduce over dp·cp
    1      whole      whole       1/shard               reduce_scatter, all_gather of the weights after the step

With `dp_replicate` (HSDP) the slices are dealt out over dp_shard·cp and reduced again over dp_replicate.
Experts are summed over edp, dealt out over edp_shard. A parameter that the mirrored pipeline rank holds too
(`ShardSpec.shared`) counts that rank as data parallel.
Only the last micro-batch of a step communicates. Source: Rajbhandari et al. 2020 (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron5d.comm.collectives import Pending, start_all_gather, start_all_reduce
from megatron5d.data_parallel.buckets import Bucket, PendingReduce
from megatron5d.precision.fp8 import forget_quantized
from megatron5d.topology.axis import Axis, single
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard import spec_of


def data_axes(mesh: Mesh, zero: int, shared: str = "", expert: bool = False) -> tuple[Axis, Axis]:
    """(shard, replicate): among whom a bucket is dealt out, and who holds the same slice."""
    suffix = f"_{shared}" if shared else ""
    if expert:
        if zero == 0:
            return single("edp_shard"), mesh["edp" + suffix]
        return mesh["edp_shard" + suffix], mesh["edp_replicate"]
    if zero == 0:
        return single("dp_shard_cp"), mesh["dp_cp" + suffix]
    return mesh["dp_shard_cp" + suffix], mesh["dp_replicate"]


def _kind(parameter: nn.Parameter) -> tuple[str, bool]:
    """Parameters of one kind are reduced over the same ranks."""
    spec = spec_of(parameter)
    return spec.shared, spec.expert


class GradSync:
    """The PhaseHooks of a stage under data parallelism.

    Args:
        units: lists of phases; each unit's own parameters share a bucket, those with another `shared` or `expert` a
            second one. A parameter used by several units (tied embeddings) belongs to the first.
        mesh: this rank's axes.
        zero: 0 or 1.
        grad_dtype: of main gradients and their reduction.
    """

    def __init__(self, units: Sequence[Sequence[nn.Module]], mesh: Mesh, zero: int, grad_dtype: torch.dtype) -> None:
        self.buckets: list[Bucket] = []
        self._used_by: dict[int, list[nn.Module]] = {}  # bucket index -> phases whose weight gradients go into it
        self._uses: dict[nn.Module, list[int]] = {}  # phase -> buckets it reads and writes
        home: dict[nn.Parameter, int] = {}
        for unit in units:
            own = {parameter: None for phase in unit for parameter in phase.parameters() if parameter not in home}
            for kind in sorted({_kind(parameter) for parameter in own}):
                parameters = [parameter for parameter in own if _kind(parameter) == kind]
                home |= dict.fromkeys(parameters, len(self.buckets))
                self.buckets.append(Bucket(parameters, *data_axes(mesh, zero, *kind), grad_dtype, dict(mesh)))
            for phase in unit:
                self._uses[phase] = sorted({home[parameter] for parameter in phase.parameters()})
                for index in self._uses[phase]:
                    self._used_by.setdefault(index, []).append(phase)
        self._missing: dict[int, int] = {}
        self._queue: list[int] = []  # shared buckets whose reduction has not started, in the order in which it will
        self._reducing: list[PendingReduce] = []
        self._gathering: dict[int, Pending] = {}
        self._shared = [i for i, bucket in enumerate(self.buckets) if spec_of(bucket.parameters[0]).shared]
        # torch's DETAIL checks make every collective wait for all ranks to call it, also one that is to run later: then
        # shared reductions start only when the step's last action is done, and nobody waits for a waiting rank
        self._starts_early = dist.get_debug_level() != dist.DebugLevel.DETAIL
        self._meet_mirror()

    def _meet_mirror(self) -> None:
        """Connects mirrored ranks now: in the first step one would wait here for the other, which needs its gradients.

        Comm: all_reduce of one element per axis on which shared parameters are reduced.
        """
        axes = [axis for i in self._shared for axis in (self.buckets[i].shard, self.buckets[i].replicate)]
        for axis in dict.fromkeys(axes):
            start_all_reduce(self.buckets[0].grads.new_zeros(1), axis).wait()

    def start_step(self, passes: Mapping[nn.Module, int]) -> None:
        """Clears the gradients and says what will come.

        Args:
            passes: phase -> how many micro-batches leave their weight gradients in it, in an order that is the same on
                mirrored ranks: theirs finish in different orders, but reductions that they share must start in one.
        """
        for bucket in self.buckets:
            bucket.grads.zero_()
        place = {phase: index for index, phase in enumerate(passes)}
        self._missing = {index: sum(passes[phase] for phase in phases) for index, phases in self._used_by.items()}
        self._queue = sorted(self._shared, key=lambda index: max(place[phase] for phase in self._used_by[index]))

    def before_forward(self, phase: nn.Module) -> None:
        """Waits for the weights this phase needs, where they are still being gathered."""
        for index in self._uses[phase]:
            if index in self._gathering:
                self._gathering.pop(index).wait()

    def after_weight_grads(self, phase: nn.Module) -> None:
        """Starts a bucket's reduction when the last micro-batch has put its last gradient into it.

        A bucket shared with the mirrored rank also waits for its turn.
        """
        for index in self._uses[phase]:
            self._missing[index] -= 1
            if self._missing[index] == 0 and index not in self._shared:
                self._reducing.append(self.buckets[index].start_reduce())
        if self._starts_early:
            self._start_shared()

    def _start_shared(self) -> None:
        while self._queue and self._missing[self._queue[0]] == 0:
            self._reducing.append(self.buckets[self._queue.pop(0)].start_reduce())

    def finish_reduce(self) -> None:
        """Waits until every owned slice holds the whole gradient."""
        self._start_shared()
        left = {index: count for index, count in self._missing.items() if count}
        assert not left, f"weight gradients still owed by micro-batch count, per bucket: {left}"
        for pending in self._reducing:
            pending.wait()
        self._reducing.clear()

    def start_gather(self) -> None:
        """The weights are new: collects everybody's slices, in the order the forward needs them.

        What was made of the old ones (8-bit copies) is dropped.

        Comm: all_gather over the shard axis of numel/size elements per bucket.
        """
        for index, bucket in enumerate(self.buckets):
            forget_quantized(bucket.parameters)
            if bucket.shard.size > 1:
                mine = bucket.weights[bucket.owned].clone()
                self._gathering[index] = start_all_gather(mine, bucket.shard, out=bucket.weights)

    def finish_gather(self) -> None:
        """Waits for all weights (before they are saved or looked at)."""
        for index in list(self._gathering):
            self._gathering.pop(index).wait()

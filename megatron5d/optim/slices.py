"""What optimisers share: state on the owned slices of the buckets, its masters, and what of it waits on the host.

An optimiser updates whole buckets, and says by name which moments it keeps of them (`kinds`): a flat tensor each over
the owned slice. Checkpoints, resharding and the memory forecast go by these names alone.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.buckets import Bucket, Segment
from megatron5d.topology.shard import ShardSpec


@dataclass
class SliceState:
    """Optimiser state of one bucket's owned slice, flat."""

    bucket: Bucket
    segments: list[Segment]
    master: Tensor  # the weights themselves where they are wide enough and not on the host
    grads: Tensor  # what the update reads: the reduced gradients, or their copy on the host
    reduced: Tensor  # this slice of the bucket's main gradients
    moments: dict[str, Tensor]  # by kind
    rounded: bool = False  # the weights are narrow and updated in place

    @property
    def on_host(self) -> bool:
        """The update runs on copies in the host's memory."""
        return self.grads is not self.reduced

    @property
    def has_master(self) -> bool:
        """Master weights are a copy of their own, wider than the weights."""
        return self.master.dtype != self.bucket.weights.dtype


def decays(spec: ShardSpec, exclude: Sequence[str]) -> bool:
    """Weight decay applies to parameters of two and more dims that no glob excludes."""
    return spec.decay and len(spec.shape) >= 2 and not any(fnmatch.fnmatch(spec.name, glob) for glob in exclude)


def _host_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a tensor in the host's memory, pinned where a GPU copies to it; nowhere for one on the meta device."""
    device = "meta" if tensor.is_meta else "cpu"
    return torch.empty(tensor.shape, dtype=dtype, device=device, pin_memory=tensor.is_cuda)


class SliceOptimizer(ABC):
    """
    Args:
        buckets: whose owned slices are updated; their gradients must be reduced.
        config: of the update; with offload masters and moments stay on the host: every step the gradients travel
            there, and new weights back.
        rounding_seed: bf16 weights have no masters, and their updates are rounded at random from this seed; None = they
            have.
    """

    kinds: ClassVar[tuple[str, ...]]  # of moments

    def __init__(self, buckets: Sequence[Bucket], config: OptimConfig, rounding_seed: int | None = None) -> None:
        self.config, self.rounding_seed = config, rounding_seed
        self.slices = [self._slice(bucket) for bucket in buckets]
        self.step_count = 0

    def _slice(self, bucket: Bucket) -> SliceState:
        owned, reduced = bucket.weight_slice, bucket.grad_slice
        wide = torch.float64 if owned.dtype == torch.float64 else torch.float32
        rounded = self.rounding_seed is not None and owned.dtype == torch.bfloat16
        grads, master = reduced, owned if owned.dtype == wide or rounded else owned.to(wide)
        if self.config.offload:
            grads, master = _host_like(reduced, wide), _host_like(owned, wide).copy_(owned)
        moments = {kind: torch.zeros_like(master, dtype=wide) for kind in self.kinds}
        return SliceState(bucket, bucket.segments(), master, grads, reduced, moments, rounded)

    @abstractmethod
    def step(self, lr: float, scale: float | None = None) -> None:
        """One update of the owned slices; the weights of other slices are stale until gathered.

        Args:
            lr: rate of this step.
            scale: factor of the gradients (clipping).
        """

    @abstractmethod
    def rehearse(self) -> None:
        """Allocates what a step does for a while, on the meta device, for the memory forecast."""

    def _take_grads(self, scale: float | None) -> None:
        """Clips the gradients in place, and sends those to the host that are read there."""
        for state in self.slices:
            if scale is not None:
                state.reduced.mul_(scale)
            if state.on_host:
                state.grads.copy_(state.reduced)

    def masters_to_weights(self) -> None:
        """Rounds the master weights into the model's owned slices."""
        for state in self.slices:
            if state.has_master or state.on_host:
                state.bucket.weight_slice.copy_(state.master)

    def weights_to_masters(self) -> None:
        """Takes the model's weights as the truth (after an import)."""
        for state in self.slices:
            if state.has_master or state.on_host:
                state.master.copy_(state.bucket.weight_slice)

    def take_unsaved_masters(self) -> None:
        """After a resume: masters that are no wider than the weights are saved once, as the weights."""
        for state in self.slices:
            if state.on_host and not state.has_master:
                state.master.copy_(state.bucket.weight_slice)

    def set_step_count(self, count: int) -> None:
        """How many updates the moments have seen, after a resume."""
        self.step_count = count

    def tensors(self) -> Iterator[tuple[str, Tensor, SliceState]]:
        """(kind, flat tensor over the owned slice, its slice) of everything a checkpoint keeps."""
        for state in self.slices:
            if state.has_master:
                yield "master", state.master, state
            for kind, moment in state.moments.items():
                yield kind, moment, state

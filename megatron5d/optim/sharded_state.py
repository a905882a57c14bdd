"""The base of all optimisers: master weights and moments of the owned slices, on the device or on
the host.

An optimiser updates whole buckets. It names the moments that it keeps (`kinds`), each of which is a
flat tensor over the owned slice. Checkpoints, resharding and the memory forecast need only these
names.

Without master weights, new values are rounded to bfloat16 stochastically. An update w ← bf16(w - u)
is lost whenever u is below half the spacing of bf16 numbers near w. Rounded up or down at random it
happens with the probability u / spacing, and nothing is lost on average (Gupta et al. 2015,
arXiv:1502.02551).

The random bits depend only on seed, step, global name and global index of an element
(topology/init_weights.py), so slices, copies and resumed runs use the same.
"""

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.bucket import Bucket, Segment
from megatron5d.kernels.dispatch import statistics_dtype
from megatron5d.topology.init_weights import hash_bits, stream_key
from megatron5d.topology.shard_spec import Piece, ShardSpec


@dataclass
class SliceState:
    """Optimiser state of one bucket's owned slice, flat."""

    bucket: Bucket
    segments: list[Segment]
    # fp32 (fp64) weights; the model's weights themselves where no wider or other copy is kept
    master: Tensor
    grads: Tensor  # the gradients that the update reads: `reduced`, or its copy on the host
    reduced: Tensor  # this slice of the bucket's main gradients
    moments: dict[str, Tensor]  # by kind
    rounded: bool = False  # bf16 weights without masters, updated in place with stochastic rounding

    @property
    def on_host(self) -> bool:
        """Whether the update runs on copies in the host's memory."""
        return self.grads is not self.reduced

    @property
    def has_wider_master(self) -> bool:
        """Whether master weights are a separate, wider copy."""
        return self.master.dtype != self.bucket.weights.dtype


def decays(spec: ShardSpec, exclude: Sequence[str]) -> bool:
    """Says if weight decay applies to a parameter: to those of two and more dims that no glob of
    `exclude` matches."""
    return (
        spec.decay
        and len(spec.shape) >= 2
        and not any(fnmatch.fnmatch(spec.name, glob) for glob in exclude)
    )


def scale_of(spec: ShardSpec, scales: Sequence[str]) -> float:
    """Returns the factor of a parameter in a list such as ["0.1 *.router.*"]: of the first match,
    else 1."""
    pairs = (entry.split(maxsplit=1) for entry in scales)
    return next((float(factor) for factor, glob in pairs if fnmatch.fnmatch(spec.name, glob)), 1.0)


def decay_of(spec: ShardSpec, config: OptimConfig) -> float:
    """Returns the weight decay of a parameter, before it is multiplied by the rate."""
    return (
        config.weight_decay
        * decays(spec, config.decay_exclude)
        * scale_of(spec, config.decay_scale)
    )


def freezes(spec: ShardSpec, config: OptimConfig) -> bool:
    """Returns whether a parameter is never updated: some glob of optim.freeze matches its name."""
    return any(fnmatch.fnmatch(spec.name, glob) for glob in config.freeze)


def takes_muon(spec: ShardSpec, config: OptimConfig) -> bool:
    """Returns whether Muon updates a parameter: with optim.name=muon, matrices not in
    optim.muon_exclude."""
    excluded = any(fnmatch.fnmatch(spec.name, glob) for glob in config.muon_exclude)
    matrix = len(spec.shape) >= 2 and not spec.name.endswith(".bias")
    return config.name == "muon" and matrix and not excluded


def _host_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor on the host in the shape of another, pinned if that is on a GPU; meta
    if that is meta."""
    device = "meta" if tensor.is_meta else "cpu"
    return torch.empty(tensor.shape, dtype=dtype, device=device, pin_memory=tensor.is_cuda)


class SliceOptimizer(ABC):
    """Updates the owned slices of buckets.

    Args:
        buckets: their owned slices are updated from the reduced gradients.
        config: of the update. With offload, masters and moments stay on the host; every step copies
            the gradients there and the new weights back.
        rounding_seed: for stochastic rounding of bf16 weights without masters; None = they have
            masters.
    """

    kinds: ClassVar[tuple[str, ...]]  # names of the moments

    def __init__(
        self, buckets: Sequence[Bucket], config: OptimConfig, rounding_seed: int | None = None
    ) -> None:
        self.config, self.rounding_seed = config, rounding_seed
        self.slices = [self._slice(bucket) for bucket in buckets]
        self.step_count = 0

    def _slice(self, bucket: Bucket) -> SliceState:
        """Returns the state of a bucket before the first update: moments are zero."""
        owned, reduced = bucket.weight_slice, bucket.grad_slice
        wide = statistics_dtype(owned.dtype)
        rounded = self.rounding_seed is not None and owned.dtype == torch.bfloat16
        if self.config.offload:
            grads, master = _host_like(reduced, wide), _host_like(owned, wide)
            if not owned.is_meta:
                # widened on the host: the device may have no room for another copy
                master.copy_(owned.cpu())
        else:
            grads, master = reduced, owned if owned.dtype == wide or rounded else owned.to(wide)
        moments = {kind: torch.zeros_like(master, dtype=wide) for kind in self.kinds}
        return SliceState(bucket, bucket.segments(), master, grads, reduced, moments, rounded)

    @abstractmethod
    def step(self, lr: float, scale: float | None = None) -> None:
        """Updates the owned slices; the weights of other slices are stale until they are gathered.

        Args:
            lr: learning rate of this step.
            scale: factor to multiply the gradients by (clipping); None = 1.
        """

    @abstractmethod
    def allocate_temporaries(self) -> None:
        """Allocates on the meta device what a step needs temporarily, for the memory forecast."""

    def _take_grads(self, scale: float | None) -> None:
        """Clips the gradients in place, and copies them to the host if the update runs there."""
        for state in self.slices:
            if scale is not None:
                state.reduced.mul_(scale)
            if state.on_host:
                state.grads.copy_(state.reduced)

    def masters_to_weights(self) -> None:
        """Rounds the master weights into the model's owned slices."""
        for state in self.slices:
            if state.has_wider_master or state.on_host:
                state.bucket.weight_slice.copy_(state.master)

    def weights_to_masters(self) -> None:
        """Copies the model's weights into the masters (after an import)."""
        for state in self.slices:
            if state.has_wider_master or state.on_host:
                state.master.copy_(state.bucket.weight_slice)

    def take_unsaved_masters(self) -> None:
        """Copies, after a resume, the weights into masters of the same dtype (offload), which are
        not saved."""
        for state in self.slices:
            if state.on_host and not state.has_wider_master:
                state.master.copy_(state.bucket.weight_slice)

    def set_step_count(self, count: int) -> None:
        """Sets the number of updates made; called after a resume."""
        self.step_count = count

    def tensors(self) -> Iterator[tuple[str, Tensor, SliceState]]:
        """Yields (kind, flat tensor over the owned slice, its slice) of everything that a
        checkpoint saves."""
        for state in self.slices:
            if state.has_wider_master:
                yield "master", state.master, state
            for kind, moment in state.moments.items():
                yield kind, moment, state


_CHUNK = 1 << 22  # elements at a time; index and random bits take 16 bytes for each
_LOST = 0xFFFF  # the low bits of float32, which bfloat16 does not have


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, away from zero where the dropped bits and the random bits carry.

    Args:
        x: float32; values that are not finite are kept.
        bits: uniform random integers of the same shape, of which 16 bits are used.
    """
    raised = (x.view(torch.int32) + (bits & _LOST).to(torch.int32)) & ~_LOST
    return torch.where(x.isfinite(), raised.view(torch.float32), x).to(torch.bfloat16)


def global_index(
    piece: Piece, shape: tuple[int, ...], start: int, stop: int, device: torch.device
) -> Tensor:
    """Returns the flat indices in the global tensor of a flat range of a piece.

    Args:
        piece: a rectangle of the tensor.
        start, stop: flat range within the piece.

    Returns:
        int64 `[stop - start]`.
    """
    rest = torch.arange(start, stop, device=device)
    index = torch.zeros_like(rest)
    for dim in range(len(shape)):
        inner = prod(piece.shape[dim + 1 :])
        index = index * shape[dim] + rest // inner + piece.offset[dim]
        rest = rest % inner
    return index


def store_rounded(wide: Tensor, into: Tensor, segment: Segment, seed: int, step: int) -> None:
    """Rounds the updated values of a segment stochastically and stores them in its weights.

    Args:
        wide: float32 `[n]`, the updated values.
        into: bfloat16 `[n]`, the weights.
        segment: of the bucket; padding between its pieces is rounded to nearest.
        step: the update, from 1.
    """
    key = stream_key(seed, f"{segment.spec.name}/{step}")
    into.copy_(wide)
    for piece, (first, last) in segment.pieces():
        # of the piece's first element, from the segment's
        behind = piece.flat[0] - segment.local[0]
        for start in range(first - segment.owned[0], last - segment.owned[0], _CHUNK):
            stop = min(start + _CHUNK, last - segment.owned[0])
            index = global_index(
                piece, segment.spec.shape, start - behind, stop - behind, wide.device
            )
            into[start:stop] = round_stochastically(wide[start:stop], hash_bits(key, index))

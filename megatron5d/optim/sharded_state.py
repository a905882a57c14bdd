"""The base of all optimizers: master weights and moments of the owned slices, on device or host.

An optimizer updates whole buckets. It names the moments that it keeps (`kinds`), each of which is a
flat tensor over the owned slice. Checkpoints, resharding and the memory forecast need only these
names.

Without master weights, new values are rounded to bfloat16 stochastically. With rounding to nearest,
an update w ← bf16(w - u) is lost whenever u is below half the spacing of bf16 numbers near w.
Rounded up with the probability u / spacing, nothing is lost on average (Gupta et al. 2015,
arXiv:1502.02551).

The random bits depend only on seed, step, global name and global index of an element
(topology/init_weights.py), so slices, replicas and resumed runs use the same bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
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
    """Optimizer state of one bucket's owned slice, flat."""

    bucket: Bucket
    segments: list[Segment]
    master: Tensor  # fp32 (fp64) weights; the model's own if they need no wider or other copy
    grads: Tensor  # the gradients that the update reads: `bucket_grads`, or a copy on the host
    bucket_grads: Tensor  # this slice of the bucket's main gradients
    moments: dict[str, Tensor]  # by kind
    is_rounded: bool = False  # bf16 weights without masters, rounded stochastically in place

    @property
    def on_host(self) -> bool:
        """Whether the update runs on copies in the host's memory."""
        return self.grads is not self.bucket_grads

    @property
    def has_wider_master(self) -> bool:
        """Whether master weights are a separate, wider copy."""
        return self.master.dtype != self.bucket.weights.dtype


def _matches(spec: ShardSpec, globs: Sequence[str]) -> bool:
    return any(fnmatch(spec.name, glob) for glob in globs)


def scale_of(spec: ShardSpec, scales: Sequence[str]) -> float:
    """Factor of a parameter in a list such as ["0.1 *.router.*"]: that of the first match, else
    1."""
    pairs = (entry.split(maxsplit=1) for entry in scales)
    return next((float(factor) for factor, glob in pairs if fnmatch(spec.name, glob)), 1.0)


def decay_of(spec: ShardSpec, config: OptimConfig) -> float:
    """Weight decay of a parameter, before it is multiplied by the rate.

    It is 0 for parameters of fewer than two dims, and for those that match optim.decay_exclude.
    """
    decays = spec.decay and len(spec.shape) >= 2 and not _matches(spec, config.decay_exclude)
    return config.weight_decay * scale_of(spec, config.decay_scale) if decays else 0.0


def is_frozen(spec: ShardSpec, config: OptimConfig) -> bool:
    """Whether a parameter is never updated: a glob of optim.freeze matches its name."""
    return _matches(spec, config.freeze)


def uses_muon(spec: ShardSpec, config: OptimConfig) -> bool:
    """Whether Muon updates a parameter: a matrix not in optim.muon_exclude, if optim.name=muon."""
    is_matrix = len(spec.shape) >= 2 and not spec.name.endswith(".bias")
    return config.name == "muon" and is_matrix and not _matches(spec, config.muon_exclude)


def _host_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor on the host in the shape of another, pinned if that is on a GPU; meta if that
    is meta."""
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
        self.slices = [self._new_state(bucket) for bucket in buckets]
        self.step_count = 0

    def _new_state(self, bucket: Bucket) -> SliceState:
        """State of a bucket before the first update: moments are zero."""
        weights, bucket_grads = bucket.weight_slice, bucket.grad_slice
        wide = statistics_dtype(weights.dtype)
        is_rounded = self.rounding_seed is not None and weights.dtype == torch.bfloat16
        if self.config.offload:
            grads, master = _host_like(bucket_grads, wide), _host_like(weights, wide)
            if not weights.is_meta:
                # Widened on the host: the device may have no memory for a wide copy.
                master.copy_(weights.cpu())
        else:
            grads, master = bucket_grads, weights if is_rounded else weights.to(wide)
        moments = {kind: torch.zeros_like(master, dtype=wide) for kind in self.kinds}
        segments = bucket.segments()
        return SliceState(bucket, segments, master, grads, bucket_grads, moments, is_rounded)

    @abstractmethod
    def step(self, lr: float, scale: float | None = None) -> None:
        """Updates the owned slices; the weights of other slices are stale until they are gathered.

        Args:
            lr: learning rate of this step.
            scale: factor of the gradients (clipping); None = 1.
        """

    @abstractmethod
    def allocate_temporaries(self) -> None:
        """Allocates a step's temporary tensors on the meta device, for the memory forecast."""

    def _prepare_grads(self, scale: float | None) -> None:
        """Clips the gradients in place, and copies them to the host if the update runs there."""
        for state in self.slices:
            if scale is not None:
                state.bucket_grads.mul_(scale)
            if state.on_host:
                state.grads.copy_(state.bucket_grads)

    def masters_to_weights(self) -> None:
        """Rounds the master weights into the model's owned slices."""
        for state in self.slices:
            if state.has_wider_master or state.on_host:
                state.bucket.weight_slice.copy_(state.master)

    def weights_to_masters(self) -> None:
        """Copies the model's weights into the masters, after an import."""
        for state in self.slices:
            if state.has_wider_master or state.on_host:
                state.master.copy_(state.bucket.weight_slice)

    def restore_unsaved_masters(self) -> None:
        """Copies, after a resume, the weights into masters of the same dtype (offload), which
        checkpoints do not contain."""
        for state in self.slices:
            if state.on_host and not state.has_wider_master:
                state.master.copy_(state.bucket.weight_slice)

    def set_step_count(self, count: int) -> None:
        """Sets the number of updates made, after a resume."""
        self.step_count = count

    def tensors(self) -> Iterator[tuple[str, Tensor, SliceState]]:
        """Yields (kind, flat tensor over the owned slice, its state) for all that a checkpoint
        saves."""
        for state in self.slices:
            if state.has_wider_master:
                yield "master", state.master, state
            for kind, moment in state.moments.items():
                yield kind, moment, state


_CHUNK = 1 << 22  # elements rounded at a time; index and random bits take 16 bytes for each
_DROPPED_BITS = 0xFFFF  # low bits of float32 that bfloat16 does not have


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, away from zero if the sum of dropped and random bits carries.

    Args:
        x: float32; values that are not finite are kept.
        bits: uniform random integers of the same shape, of which 16 bits are used.
    """
    random_bits = (bits & _DROPPED_BITS).to(torch.int32)
    rounded = (x.view(torch.int32) + random_bits) & ~_DROPPED_BITS
    return torch.where(x.isfinite(), rounded.view(torch.float32), x).to(torch.bfloat16)


def global_index(
    piece: Piece, shape: tuple[int, ...], start: int, stop: int, device: torch.device
) -> Tensor:
    """Flat indices in the global tensor of a flat range of a piece.

    Args:
        piece: a rectangle of the tensor.
        shape: of the global tensor.
        start, stop: flat range within the piece.

    Returns:
        int64 `[stop - start]`.
    """
    remainder = torch.arange(start, stop, device=device)
    index = torch.zeros_like(remainder)
    for dim in range(len(shape)):
        inner = prod(piece.shape[dim + 1 :])
        index = index * shape[dim] + remainder // inner + piece.offset[dim]
        remainder = remainder % inner
    return index


def store_rounded(wide: Tensor, weights: Tensor, segment: Segment, seed: int, step: int) -> None:
    """Rounds the updated values of a segment stochastically and stores them in its weights.

    Args:
        wide: float32 `[n]`, the updated values.
        weights: bfloat16 `[n]`.
        segment: of the bucket; padding between its pieces is rounded to nearest.
        step: number of the update, from 1.
    """
    key = stream_key(seed, f"{segment.spec.name}/{step}")
    weights.copy_(wide)
    # In chunks, which bound the memory of indices and random bits.
    for piece, (first, last) in segment.pieces():
        shift = piece.flat[0] - segment.local[0]  # from an index in the piece to one in the segment
        for start in range(first - segment.owned[0], last - segment.owned[0], _CHUNK):
            stop = min(start + _CHUNK, last - segment.owned[0])
            index = global_index(
                piece, segment.spec.shape, start - shift, stop - shift, wide.device
            )
            weights[start:stop] = round_stochastically(wide[start:stop], hash_bits(key, index))

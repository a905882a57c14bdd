"""The optimizer of a run: AdamW, or Muon for matrices and AdamW for all others (`optim.name`).

Also the gradient norm, which counts every element once, and clipping by it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.optim.adamw import AdamW
from megatron5d.optim.sharded_state import SliceOptimizer, SliceState, uses_muon
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import spec_of

# Elements that a CPU sums at once in float32, within a millionth; a norm of 10⁷ elements summed at
# once was 0.05 % off.
_BLOCK = 1 << 18


class Optimizer:
    """One or two optimizers, each for some of the buckets.

    Args:
        name: `optim.name`.
        optimizers: together for all buckets of this rank that are not frozen.
    """

    def __init__(self, name: str, optimizers: Sequence[SliceOptimizer]) -> None:
        self.name, self.optimizers = name, list(optimizers)

    @property
    def slices(self) -> list[SliceState]:
        """The state of every bucket."""
        return [state for optimizer in self.optimizers for state in optimizer.slices]

    @property
    def step_count(self) -> int:
        """Number of updates made, including those before a resume."""
        return self.optimizers[0].step_count if self.optimizers else 0

    def step(self, lr: float, scale: float | None = None) -> None:
        """Makes one update, as `SliceOptimizer.step` does.

        Comm: that of the optimizers.
        """
        for optimizer in self.optimizers:
            optimizer.step(lr, scale)

    def allocate_temporaries(self) -> None:
        """Allocates a step's temporary tensors on the meta device, for the memory forecast."""
        for optimizer in self.optimizers:
            optimizer.allocate_temporaries()

    def weights_to_masters(self) -> None:
        """Copies the model's weights into the masters, after an import."""
        for optimizer in self.optimizers:
            optimizer.weights_to_masters()

    def restore_unsaved_masters(self) -> None:
        """Copies, after a resume, the weights into masters of the same dtype, which checkpoints do
        not contain."""
        for optimizer in self.optimizers:
            optimizer.restore_unsaved_masters()

    def set_step_count(self, count: int) -> None:
        """Sets the number of updates made, after a resume."""
        for optimizer in self.optimizers:
            optimizer.set_step_count(count)

    def tensors(self) -> Iterator[tuple[str, Tensor, SliceState]]:
        """Yields (kind, flat tensor over the owned slice, its state) for all that a checkpoint
        saves."""
        for optimizer in self.optimizers:
            yield from optimizer.tensors()


def build_optimizer(
    buckets: Sequence[Bucket], config: OptimConfig, mesh: Mesh, rounding_seed: int | None = None
) -> Optimizer:
    """Builds the optimizer of a run.

    Args:
        buckets: of this rank, at least one; `uses_muon` must be the same for all parameters of a
            bucket.
        config: of the optimizer.
        mesh: its tp and etp axes shard the matrices.
        rounding_seed: as in `SliceOptimizer`.

    Comm: for Muon as in `MatrixGather`, once.
    """
    buckets = [bucket for bucket in buckets if not bucket.frozen]
    muon = [bucket for bucket in buckets if uses_muon(spec_of(bucket.parameters[0]), config)]
    adamw = [bucket for bucket in buckets if bucket not in muon]
    optimizers: list[SliceOptimizer] = [AdamW(adamw, config, rounding_seed)] if adamw else []
    if muon:
        from megatron5d.optim.muon import Muon

        optimizers.append(Muon(muon, config, mesh, rounding_seed))
    return Optimizer(config.name, optimizers)


def global_square_sum(buckets: Sequence[Bucket]) -> Tensor:
    """This rank's share of the squared L2 norm of all gradients, to be summed over the world.

    A rank counts only the pieces that it owns (`Bucket.counted_spans`), and only if it is the first
    of the ranks with the same slice, so that each element counts once.

    Returns:
        fp64 scalar.
    """
    total = torch.zeros((), dtype=torch.float64, device=buckets[0].grads.device)
    for bucket in buckets:
        if bucket.replicate.rank != 0 or not bucket.counted_spans:
            continue
        grads = bucket.grad_slice
        spans = [grads[start:stop] for start, stop in bucket.counted_spans]
        # In bf16 each norm would be rounded to 8 bits.
        wide = torch.promote_types(grads.dtype, torch.float32)
        if grads.is_cpu:
            blocks = (block.to(wide) for span in spans for block in span.split(_BLOCK))
            total += torch.stack([block.dot(block) for block in blocks]).double().sum()
        else:
            total += torch.stack(torch._foreach_norm(spans, dtype=wide)).double().square().sum()
    return total


def clip_coefficient(norm: float, max_norm: float) -> float | None:
    """Factor that reduces the gradient norm to `max_norm`, with the 1e-6 of torch's
    `clip_grad_norm_`.

    Args:
        norm: of the gradients.
        max_norm: 0 = no clipping.

    Returns:
        The factor; None if the gradients are not to be scaled.
    """
    coefficient = max_norm / (norm + 1e-6)
    return coefficient if max_norm > 0 and coefficient < 1 else None

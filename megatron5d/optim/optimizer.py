"""The optimiser of a run: AdamW alone, or Muon for matrices and AdamW for the rest (`optim.name`).

Also the gradient norm, every element counted once, and clipping by it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.optim.adamw import AdamW
from megatron5d.optim.sharded_state import SliceOptimizer, SliceState, takes_muon
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import spec_of

# elements that a CPU adds up at once in float32, within a millionth; a norm of 10⁷ was 0.05 % off
_BLOCK = 1 << 18


class Optimizer:
    """One or two optimisers, each for some of the buckets.

    Args:
        name: `optim.name`.
        parts: the optimisers, together for all buckets of this rank that are not frozen.
    """

    def __init__(self, name: str, parts: Sequence[SliceOptimizer]) -> None:
        self.name, self.parts = name, list(parts)

    @property
    def slices(self) -> list[SliceState]:
        """The state of every bucket."""
        return [state for part in self.parts for state in part.slices]

    @property
    def step_count(self) -> int:
        """Number of updates made, including those before a resume."""
        return self.parts[0].step_count if self.parts else 0

    def step(self, lr: float, scale: float | None = None) -> None:
        """Makes one update, as SliceOptimizer does. Comm: that of the parts."""
        for part in self.parts:
            part.step(lr, scale)

    def allocate_temporaries(self) -> None:
        """Allocates on the meta device what a step needs temporarily, for the memory forecast."""
        for part in self.parts:
            part.allocate_temporaries()

    def weights_to_masters(self) -> None:
        for part in self.parts:
            part.weights_to_masters()

    def take_unsaved_masters(self) -> None:
        """Copies, after a resume, the weights into masters of the same dtype, which are not
        saved."""
        for part in self.parts:
            part.take_unsaved_masters()

    def set_step_count(self, count: int) -> None:
        for part in self.parts:
            part.set_step_count(count)

    def tensors(self) -> Iterator[tuple[str, Tensor, SliceState]]:
        """Yields (kind, flat tensor over the owned slice, its slice) of everything that a
        checkpoint saves."""
        for part in self.parts:
            yield from part.tensors()


def build_optimizer(
    buckets: Sequence[Bucket], config: OptimConfig, mesh: Mesh, rounding_seed: int | None = None
) -> Optimizer:
    """Returns the optimiser of a run.

    Args:
        buckets: of this rank, at least one; `takes_muon` must be the same for all parameters of a
            bucket.
        mesh: its tp and etp axes shard the matrices.

    Comm: for Muon as in `MatrixGather`, once.
    """
    buckets = [bucket for bucket in buckets if not bucket.frozen]
    muon = [bucket for bucket in buckets if takes_muon(spec_of(bucket.parameters[0]), config)]
    adamw = [bucket for bucket in buckets if bucket not in muon]
    parts: list[SliceOptimizer] = [AdamW(adamw, config, rounding_seed)] if adamw else []
    if muon:
        from megatron5d.optim.muon import Muon

        parts.append(Muon(muon, config, mesh, rounding_seed))
    return Optimizer(config.name, parts)


def global_square_sum(buckets: Sequence[Bucket]) -> Tensor:
    """Returns this rank's share of the squared L2 norm of all gradients; the sum over the world is
    the whole.

    To count each element once, a rank adds up only the pieces of which it holds the first copy, and
    only if it is the first of the ranks that own the same slice.

    Returns fp64 scalar.
    """
    total = torch.zeros((), dtype=torch.float64, device=buckets[0].grads.device)
    for bucket in buckets:
        if bucket.replicate.rank != 0:
            continue
        grads = bucket.grad_slice
        if bucket.counted_spans:
            # in bf16 each norm would be rounded to 8 bits
            wide = torch.promote_types(grads.dtype, torch.float32)
            spans = [grads[start:stop] for start, stop in bucket.counted_spans]
            if grads.is_cpu:
                parts = (part.to(wide) for span in spans for part in span.split(_BLOCK))
                total += torch.stack([part.dot(part) for part in parts]).double().sum()
            else:
                total += torch.stack(torch._foreach_norm(spans, dtype=wide)).double().square().sum()
    return total


def clip_coefficient(norm: float, max_norm: float) -> float | None:
    """Returns the factor that brings the gradient norm to `max_norm`, with the 1e-6 of torch's
    `clip_grad_norm_`.

    Args:
        max_norm: 0 = no clipping.

    Returns:
        The factor; None if the gradients are not to be scaled.
    """
    coefficient = max_norm / (norm + 1e-6)
    return coefficient if max_norm > 0 and coefficient < 1 else None

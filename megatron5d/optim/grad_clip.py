"""The global gradient norm, every element counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron5d.data_parallel.bucket import Bucket


def global_square_sum(buckets: Sequence[Bucket]) -> Tensor:
    """Returns this rank's share of the squared L2 norm of all gradients; the sum over the world is the whole.

    To count each element once, a rank adds up only the pieces of which it holds the first copy, and only if it is the
    first of the ranks that own the same slice.

    Args:
        buckets: with reduced gradients.

    Returns:
        fp64 scalar.
    """
    total = torch.zeros((), dtype=torch.float64, device=buckets[0].grads.device)
    for bucket in buckets:
        if bucket.replicate.rank != 0:
            continue
        grads = bucket.grad_slice
        if bucket.counted_spans:
            wide = torch.promote_types(grads.dtype, torch.float32)  # in bf16 each norm would be rounded to 8 bits
            norms = torch._foreach_norm([grads[start:stop] for start, stop in bucket.counted_spans], dtype=wide)
            total += torch.stack(norms).double().square().sum()
    return total


def clip_coefficient(norm: float, max_norm: float) -> float | None:
    """Returns the factor that brings the gradient norm to `max_norm`, with the 1e-6 of torch's `clip_grad_norm_`.

    Args:
        norm: of all gradients.
        max_norm: 0 = no clipping.

    Returns:
        The factor; None if the gradients are not to be scaled.
    """
    coefficient = max_norm / (norm + 1e-6)
    return coefficient if max_norm > 0 and coefficient < 1 else None

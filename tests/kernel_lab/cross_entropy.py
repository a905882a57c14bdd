"""Cross-entropy over vocabulary shards, and by torch in float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d import kernels


def sharded_cross_entropy(
    logits: Tensor, labels: Tensor, dloss: Tensor, valid: int, shards: int, z_coef: float
) -> tuple[Tensor, Tensor]:
    """Losses `[n]` and gradient `[n, v]` from the statistics of shards of equal width.

    Args:
        valid: columns from here on are padding.
    """
    width = logits.shape[1] // shards
    starts = range(0, logits.shape[1], width)
    counts = [max(0, min(width, valid - start)) for start in starts]
    parts = [part.clone() for part in logits.split(width, 1)]
    statistics = [
        kernels.vocab_statistics(part, labels, start, count)
        for part, start, count in zip(parts, starts, counts)
    ]
    maxima, sums, targets = zip(*statistics)
    row_max = torch.stack(maxima).amax(0)
    row_sum = sum(s * (m - row_max).exp() for m, s in zip(maxima, sums))
    lse = row_max + row_sum.log()
    loss = (lse - sum(targets) + z_coef * lse**2).where(labels >= 0, 0)
    for part, start, count in zip(parts, starts, counts):
        inputs = (part, labels, row_max, row_sum, dloss, start, count)
        assert kernels.vocab_cross_entropy_backward(*inputs, z_coef=z_coef) is part
    return loss, torch.cat(parts, 1)


def exact_cross_entropy(
    logits: Tensor, labels: Tensor, dloss: Tensor, valid: int, z_coef: float
) -> tuple[Tensor, Tensor]:
    """The same by torch in float64."""
    leaf = logits.double().requires_grad_()
    z_loss = z_coef * leaf[:, :valid].logsumexp(-1) ** 2
    loss = F.cross_entropy(leaf[:, :valid], labels, reduction="none") + z_loss.where(labels >= 0, 0)
    return loss.detach(), torch.autograd.grad(loss, leaf, dloss.double())[0]

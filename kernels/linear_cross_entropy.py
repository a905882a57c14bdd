"""The last linear layer and the cross-entropy together, without the logits of more than a few tokens at a time.

For a slice of tokens: logits = x Wᵀ, their statistics, the loss, the gradient of the logits in place, and from it the
slice's dx and its share of dW; then the logits' memory serves the next slice. The gradient needs a token's weight in
the loss beforehand, so the token weights are an input and the result is their weighted sum; the backward only scales.
Memory: one slice of logits instead of `[n, v]`; work: three GEMMs, as without fusion (Liger-Kernel, arXiv:2410.10989).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.dispatch import first_order, statistics_dtype
from kernels.gemm import accumulate_weight_grad
from kernels.vocab_cross_entropy import IGNORE_INDEX, vocab_cross_entropy_backward, vocab_statistics

SLICE_BYTES = 256 * 2**20
Merge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor, z_coef: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same with whole logits in plain torch, differentiable by autograd."""
    wide = statistics_dtype(x.dtype)
    logits = (x @ weight.t()).to(wide)
    kept = labels != IGNORE_INDEX
    lse = logits.logsumexp(-1)
    losses = lse - logits.gather(-1, labels.where(kept, 0)[:, None]).squeeze(-1) + z_coef * lse.square()
    losses = losses.where(kept, 0)
    return (losses * token_weights.to(wide)).sum(), losses.detach()


def slice_tokens(vocabulary: int, element_bytes: int) -> int:
    """How many tokens' logits fit `SLICE_BYTES`, at least 16 and a multiple of 16."""
    return max(16, SLICE_BYTES // (vocabulary * element_bytes) // 16 * 16)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, token_weights, vocab_start, num_valid_columns, z_coef, merge):
        wide = statistics_dtype(x.dtype)
        n, v = x.shape[0], weight.shape[0]
        losses = torch.empty(n, dtype=wide, device=x.device)
        dx = torch.empty_like(x)
        dweight = torch.zeros(weight.shape, dtype=wide, device=x.device)
        step = slice_tokens(v, x.element_size())
        for lo in range(0, n, step):
            part = slice(lo, min(lo + step, n))
            logits = x[part] @ weight.t()
            shard = (vocab_start, num_valid_columns)
            row_max, row_sum, target = vocab_statistics(logits, labels[part], *shard)
            if merge is not None:
                row_max, row_sum, target = merge(row_max, row_sum, target)
            lse = row_max + row_sum.log()
            losses[part] = (lse - target + z_coef * lse.square()).where(labels[part] != IGNORE_INDEX, 0)
            row = (labels[part], row_max, row_sum, token_weights[part])
            dlogits = vocab_cross_entropy_backward(logits, *row, *shard, z_coef=z_coef)
            dx[part] = dlogits @ weight
            accumulate_weight_grad(dweight, dlogits, x[part])
        ctx.save_for_backward(dx, dweight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return (losses * token_weights.to(wide)).sum(), losses

    @staticmethod
    @first_order
    def backward(ctx, dloss, _):
        dx, dweight = ctx.saved_tensors
        return dx * dloss.to(dx.dtype), (dweight * dloss).to(ctx.weight_dtype), None, None, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    *,
    vocab_start: int = 0,
    num_valid_columns: int | None = None,
    z_coef: float = 0.0,
    merge: Merge | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of token losses of a linear head, differentiable in x and weight.

    Args:
        x: `[n, h]`, any floating dtype.
        weight: `[v/tp, h]`, this shard of the head, in the dtype of x.
        labels: `[n]` int64 global vocabulary ids; -100 is ignored.
        token_weights: `[n]` float32 (or float64), each token's factor in the sum; not differentiable.
        vocab_start: the global id of this shard's first row.
        num_valid_columns: how many leading rows of this shard are real vocabulary; None means all.
        z_coef: coefficient of the squared log-sum-exp added to each token's loss.
        merge: combines (maximum, sum, target logit) over the vocabulary's shards; dx is then one shard's part of a sum.

    Returns:
        The 0-d sum of weight · loss, and the `[n]` losses (not differentiable), in float32 (float64 for float64).
    """
    columns = weight.shape[0] if num_valid_columns is None else num_valid_columns
    return _LinearCrossEntropy.apply(x, weight, labels, token_weights, vocab_start, columns, z_coef, merge)

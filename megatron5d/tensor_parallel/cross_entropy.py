"""Cross-entropy over a vocabulary cut over tp: three numbers per token are sent, never the logits.

With m = max z and l = Σ exp(z - m) over a token's whole row of logits, loss = m + log l - z_label. Each rank i computes
mᵢ, lᵢ and z_labelᵢ (0 if it does not hold the label) of its columns; then m = max mᵢ, l = Σ lᵢ·exp(mᵢ - m) and
z_label = Σ z_labelᵢ.
Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import vocab_cross_entropy_backward, vocab_statistics
from kernels.dispatch import first_order
from megatron5d.comm.collectives import all_reduce
from megatron5d.tensor_parallel.embedding import VocabRange
from megatron5d.topology.axis import Axis


def merge_statistics(local_max: Tensor, local_sum: Tensor, target: Tensor, tp: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and target logit `[n]` of this rank's columns -> of the whole vocabulary, `[n]`, in their dtype.

    Comm: 2× all_reduce tp, of n and 2·n elements; there is no backward.
    """
    row_max = all_reduce(local_max.clone(), tp, "max")  # [n]
    row_sum, target = all_reduce(torch.stack((local_sum * torch.exp(local_max - row_max), target)), tp)  # [2, n]
    return row_max, row_sum, target


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, vocab: VocabRange, tp: Axis, z_coef: float):
        flat, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)  # [n, v/tp], [n]; n = s/cp·b
        statistics = vocab_statistics(flat, labels, vocab.start, vocab.valid)
        row_max, row_sum, target = merge_statistics(*statistics, tp)  # [n] each  2× all_reduce tp
        ctx.save_for_backward(flat, labels, row_max, row_sum)
        ctx.vocab, ctx.z_coef, ctx.shape = vocab, z_coef, logits.shape
        lse = row_max + torch.log(row_sum)
        loss = torch.where(labels < 0, 0, lse - target).view(logits.shape[:-1])
        lse = lse.view(logits.shape[:-1])
        ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    @first_order
    def backward(ctx, dloss, _):
        flat, labels, row_max, row_sum = ctx.saved_tensors
        vocab = ctx.vocab
        dloss = dloss.reshape(-1)
        dlogits = vocab_cross_entropy_backward(
            flat, labels, row_max, row_sum, dloss, vocab.start, vocab.valid, z_coef=ctx.z_coef
        )
        return dlogits.view(ctx.shape), None, None, None, None  # [s/cp, b, v/tp]


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab: VocabRange, tp: Axis, z_coef: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Loss of each token from vocabulary-sharded logits.

    The gradient that flows back is that of loss + z_coef·lse²; the value returned is the loss alone.

    Args:
        logits: `[s/cp, b, v/tp]`; overwritten by the backward.
        labels: int64 `[s/cp, b]`, global token ids; negative = no loss.
        vocab: which rows of the vocabulary this rank holds; its padding gets neither probability nor gradient.
        tp: axis that cuts the vocabulary.
        z_coef: coefficient of the z-loss.

    Returns:
        loss and log-sum-exp, `[s/cp, b]`, fp32 (fp64 for fp64 logits).

    Comm: all_reduce tp of s/cp·b (max) and 2·s/cp·b (sum) elements / none.
    """
    return _VocabCrossEntropy.apply(logits, labels, vocab, tp, z_coef)

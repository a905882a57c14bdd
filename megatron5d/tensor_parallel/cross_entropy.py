"""Cross-entropy over a vocabulary cut over tp: ranks exchange three numbers per token, not logits.

With m = max z and l = Σ exp(z - m) over a token's full row of logits, loss = m + log l - z_label.
Each rank i computes mᵢ, lᵢ and z_labelᵢ (0 unless it holds the label) over its own columns. Then
m = max mᵢ, l = Σ lᵢ·exp(mᵢ - m) and z_label = Σ z_labelᵢ.
Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.

`SlicedLoss` includes the output matrix and holds the logits of only a few tokens at a time:

    forward    per slice: logits = x·Wᵀ and three numbers per token, merged over tp at the end
    backward   per slice: logits again, their gradient in place, dx = dlogits·W and dW = dlogitsᵀ·x

It saves x and two numbers per token for the backward instead of the logits `[s/cp, b, v/tp]`, and
computes the logits' GEMM twice. F and B hold the logits of one slice at a time. Where a schedule
splits the backward, the gradients of all slices are kept until W, like all operands of weight
gradients.
Source: Liger-Kernel (arXiv:2410.10989), which computes the gradients in the forward instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron5d.comm.collectives import (
    Pending,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron5d.kernels import vocab_cross_entropy_backward, vocab_statistics
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.phases.wgrad import Defer, defer_weight_grad, run_now
from megatron5d.precision.gemm import Operand, gemms_of
from megatron5d.tensor_parallel.embedding import VocabRange
from megatron5d.topology.axis import Axis


def merge_statistics(
    local_max: Tensor, local_sum: Tensor, target: Tensor, tp: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Merges maximum, sum and target logit `[n]` of this rank's columns over the vocabulary.

    Returns:
        The same three for all columns, `[n]`, in their dtypes.

    Comm: 2× all_reduce tp, of n and 2·n elements; there is no backward.
    """
    row_max = all_reduce(local_max.clone(), tp, "max")  # [n]
    # [2, n]
    row_sum, target = all_reduce(
        torch.stack((local_sum * torch.exp(local_max - row_max), target)), tp
    )
    return row_max, row_sum, target


class _VocabCrossEntropy(FirstOrderFunction):
    @staticmethod
    def forward(ctx, logits, labels, vocab: VocabRange, tp: Axis, z_coef: float):
        # [n, v/tp], [n]; n = s/cp·b
        flat, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
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
    """Loss of each token, from logits sharded along the vocabulary.

    The backward computes the gradient of loss + z_coef·lse², although the returned loss leaves out
    the second term.

    Args:
        logits: `[s/cp, b, v/tp]`; the backward overwrites them.
        labels: int64 `[s/cp, b]`, global token ids; negative = no loss.
        vocab: the vocabulary rows that this rank holds; padding has no probability and no gradient.
        tp: axis that cuts the vocabulary.
        z_coef: coefficient of the z-loss.

    Returns:
        Loss and log-sum-exp, `[s/cp, b]`, fp32 (fp64 for fp64 logits).

    Comm: all_reduce tp of s/cp·b (max) and 2·s/cp·b (sum) elements / none.
    """
    return _VocabCrossEntropy.apply(logits, labels, vocab, tp, z_coef)


@dataclass(frozen=True)
class SlicedLoss:
    """Token losses of a linear head that computes its logits slice by slice."""

    vocab: VocabRange  # the vocabulary rows that this rank holds
    tp: Axis  # axis that cuts the vocabulary
    sp: bool  # hidden states arrive cut along the sequence
    # tokens of a slice, rounded down to a multiple of the batch size, at least one position
    tokens: int
    z_coef: float = 0.0  # coefficient of the z-loss
    softcap: float = 0.0  # logits z become softcap·tanh(z/softcap); 0 = no cap

    def __call__(
        self, x: Tensor, weight: Tensor, labels: Tensor, defer: Defer = run_now
    ) -> tuple[Tensor, Tensor]:
        """Losses as `vocab_parallel_cross_entropy` computes them from the logits of x.

        Args:
            x: `[s/cp/tp, b, h]` with sp, else `[s/cp, b, h]`.
            weight: `[v/tp, h]`.
            labels: int64 `[s/cp, b]`, global token ids; negative = no loss.
            defer: takes the weight-gradient half of the backward.

        Returns:
            Loss and log-sum-exp (not differentiable), `[s/cp, b]`, fp32 (fp64 for fp64).

        Comm: all_gather tp with sp, 2× all_reduce tp of s/cp·b and 2·s/cp·b elements / all_gather
            and reduce_scatter tp with sp, else all_reduce tp.
        """
        return _SlicedLoss.apply(x, weight, labels, self, defer)

    def gather(self, operand: Operand) -> list[Pending]:
        """Starts gathering each tensor: with sp `[s/cp/tp, b, h]` -> `[s/cp, b, h]`.

        Comm: all_gather tp of s/cp·b·h elements with sp, else none.
        """
        if not self.sp:
            return [Pending(tensor) for tensor in operand]
        return [start_all_gather(tensor, self.tp) for tensor in operand]

    def slices(self, positions: int, batch: int) -> Iterator[slice]:
        """Slices of sequence positions with `tokens` tokens each."""
        step = max(1, self.tokens // batch)
        return (slice(start, start + step) for start in range(0, positions, step))

    def logits(self, operand: Operand, weight: Tensor) -> Tensor:
        """Logits `[n, v/tp]` of a slice of n tokens."""
        z = gemms_of(weight).forward(operand, weight).flatten(0, 1)
        return self.softcap * torch.tanh(z / self.softcap) if self.softcap else z

    def logit_grads(
        self, z: Tensor, labels: Tensor, row_max: Tensor, row_sum: Tensor, dloss: Tensor
    ) -> Tensor:
        """Gradient of the linear layer's output, from the logits, which it overwrites."""
        slope = 1 - (z / self.softcap).square() if self.softcap else None
        by_token = labels, row_max, row_sum, dloss
        dz = vocab_cross_entropy_backward(
            z, *by_token, self.vocab.start, self.vocab.valid, z_coef=self.z_coef
        )
        return dz if slope is None else dz.mul_(slope)


class _SlicedLoss(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, weight, labels, head: SlicedLoss, defer: Defer):
        ctx.head, ctx.weight, ctx.defer = head, weight, defer
        operand = gemms_of(weight).saved_operand(x)
        # [s/cp/tp, b, h] -> [s/cp, b, h]  all_gather tp
        gathered = tuple(pending.wait() for pending in head.gather(operand))
        statistics = []
        for positions in head.slices(*labels.shape):
            # [n, v/tp] of a slice of n tokens
            logits = head.logits(tuple(tensor[positions] for tensor in gathered), weight)
            slice_labels = labels[positions].reshape(-1)
            statistics.append(
                vocab_statistics(logits, slice_labels, head.vocab.start, head.vocab.valid)
            )
            del logits  # before the next slice allocates its own
        local_max, local_sum, target = map(torch.cat, zip(*statistics))  # [s/cp·b] each
        # 2× all_reduce tp
        row_max, row_sum, target = merge_statistics(local_max, local_sum, target, head.tp)
        ctx.save_for_backward(labels, row_max, row_sum, *operand)
        lse = (row_max + torch.log(row_sum)).view(labels.shape)
        loss = torch.where(labels < 0, 0, lse - target.view(labels.shape))
        ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    def backward(ctx, dloss, _):
        head, weight = ctx.head, ctx.weight
        labels, row_max, row_sum, *operand = ctx.saved_tensors
        gemms, tp = gemms_of(weight), head.tp
        by_token = labels, row_max.view_as(labels), row_sum.view_as(labels), dloss
        # -> [s/cp, b, h]  all_gather tp
        gathered = tuple(pending.wait() for pending in head.gather(tuple(operand)))
        dx = torch.empty(*labels.shape, weight.shape[1], dtype=weight.dtype, device=labels.device)
        for positions in head.slices(*labels.shape):
            x = tuple(tensor[positions] for tensor in gathered)
            dz = head.logit_grads(
                head.logits(x, weight), *(values[positions].reshape(-1) for values in by_token)
            )
            dy = gemms.operand(dz.unflatten(0, (-1, labels.shape[1])), gradient=True)
            dx[positions] = gemms.input_grad(dy, weight)  # partial [positions, b, h]
            defer_weight_grad(weight, ctx.defer, partial(gemms.weight_grad, weight, dy, x))
        # partial [s/cp, b, h] -> [s/cp/tp, b, h]  reduce_scatter tp
        # without sp           -> [s/cp, b, h]     all_reduce tp
        reducing = start_reduce_scatter(dx, tp) if head.sp else start_all_reduce(dx, tp)
        return reducing.wait(), None, None, None, None

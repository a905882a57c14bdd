"""Token embedding cut over tp along the vocabulary.

Each rank looks up the tokens whose rows it holds and uses zeros for the others. The sum over tp is
the embedding.
Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
"""

import torch
from torch import Tensor, nn

from megatron5d.comm.collectives import reduce_from, reduce_scatter_to
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.kernels.embedding import accumulate_rows
from megatron5d.phases.wgrad import Defer, defer_weight_grad, grad_buffer, run_now
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter

_ROW_MULTIPLE = 8  # GEMMs of the head are fastest with 16-byte rows of bf16 logits


class VocabRange:
    """Vocabulary rows that a tp rank holds, padded to the same number on every rank.

    Args:
        vocab_size: number of tokens, without padding.
        tp: axis that cuts the vocabulary.
    """

    def __init__(self, vocab_size: int, tp: Axis) -> None:
        self.vocab_size = vocab_size
        per_rank = -(-vocab_size // tp.size)
        self.rows = -(-per_rank // _ROW_MULTIPLE) * _ROW_MULTIPLE
        self.start = min(tp.rank * self.rows, vocab_size)
        self.valid = min(self.rows, vocab_size - self.start)  # the other rows are padding


def vocab_weight(
    vocab_size: int, hidden_size: int, name: str, tp: Axis, init: float, **factory
) -> nn.Parameter:
    """This rank's rows `[v/tp, h]` of a `[vocab_size, h]` matrix, padding included."""
    vocab = VocabRange(vocab_size, tp)
    pieces = (Piece((vocab.start, 0), (vocab.valid, hidden_size)),) if vocab.valid else ()
    spec = ShardSpec(name, (vocab_size, hidden_size), pieces, init=init)
    return new_parameter((vocab.rows, hidden_size), spec, **factory)


class _Lookup(FirstOrderFunction):
    @staticmethod
    def forward(ctx, weight, ids, start, defer: Defer):
        # [s/cp, b]: local rows; other tp ranks hold the rows of tokens that are outside
        local = ids - start
        outside = (local < 0) | (local >= weight.shape[0])
        ctx.save_for_backward(local)
        ctx.weight, ctx.defer = weight, defer
        # partial [s/cp, b, h]
        return weight[local.masked_fill(outside, 0)].masked_fill(outside.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx, dy):
        (local,) = ctx.saved_tensors
        weight = ctx.weight

        def weight_grad() -> None:
            # dW [v/tp, h]
            accumulate_rows(grad_buffer(weight), local.reshape(-1), dy.flatten(0, -2))

        defer_weight_grad(weight, ctx.defer, weight_grad)
        return None, None, None, None


class VocabParallelEmbedding(nn.Module):
    """Maps token ids to hidden states.

    Args:
        weight: `[v/tp, h]`, made by `vocab_weight`; other modules may share it.
        vocab_size: number of tokens, without padding.
        tp: axis that cuts the vocabulary.
        sp: outputs are cut along the sequence.
        scale: multiplies the outputs; rounded to the weight's dtype, as Gemma was trained.
    """

    def __init__(
        self, weight: nn.Parameter, vocab_size: int, tp: Axis, *, sp: bool, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.scale = torch.tensor(scale, dtype=weight.dtype).item()
        self.tp, self.sp = tp, sp and tp.size > 1
        self.vocab = VocabRange(vocab_size, tp)
        self.weight = weight

    def forward(self, tokens: Tensor, defer: Defer = run_now) -> Tensor:
        """Embeds tokens.

        Args:
            tokens: int64 `[b, s/cp]`, the same on every tp rank.
            defer: takes the weight-gradient half of the backward.

        Returns:
            `[s/cp/tp, b, h]` with sp, else `[s/cp, b, h]`.

        Comm: reduce_scatter (sp) or all_reduce tp of s/cp·b·h elements / all_gather (sp) or none.
        """
        x = _Lookup.apply(self.weight, tokens.t(), self.vocab.start, defer)  # partial [s/cp, b, h]
        # -> [s/cp/tp, b, h]  reduce_scatter tp; without sp -> [s/cp, b, h]  all_reduce tp
        x = reduce_scatter_to(x, self.tp) if self.sp else reduce_from(x, self.tp)
        return x if self.scale == 1.0 else x * self.scale

"""The two ends of the model: tokens to hidden states, and hidden states to loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron5d.comm.collectives import gather_last_dim, local_slice
from megatron5d.config.schema import Config
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.phases.wgrad import Defer, run_now
from megatron5d.tensor_parallel.cross_entropy import SlicedLoss, vocab_parallel_cross_entropy
from megatron5d.tensor_parallel.embedding import VocabRange
from megatron5d.tensor_parallel.linear import column_linear

# global name of the embedding, and of the head's weight where the two are one parameter
TIED = "embedding.weight"


class Embedding(Phase):
    """Phase: tokens `[b, s/cp]` -> hidden states `[s/cp/tp, b, h]`, with any learned positions."""

    def __init__(self, inputs: BlockInputs) -> None:
        super().__init__()
        model, self.tp, self.sp = inputs.model, inputs.tp, inputs.sp and inputs.tp.size > 1
        self.tokens = inputs.embedding(inputs.vocab_weight(TIED))
        self.positions = None
        if model.position == "learned":
            shape = (model.max_positions, model.hidden_size)
            self.positions = inputs.replicated(shape, "position_embedding.weight")

    def forward(self, x: Tensor | None, batch: MicroBatch, defer: Defer) -> Tensor:
        """Maps `batch.tokens` int64 `[b, s/cp]` -> `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`).

        `x` is not read.

        Comm: with sp reduce_scatter tp of s/cp·b·h elements / all_gather tp; without sp all_reduce
            tp / none.
        """
        hidden = self.tokens(batch.tokens, defer)  # [s/cp/tp, b, h]  reduce_scatter tp
        if self.positions is None:
            return hidden
        positions = batch.positions.t()  # [s/cp, b]
        if self.sp:
            positions = local_slice(positions, self.tp)  # [s/cp/tp, b]
        return hidden + self.positions[positions]


class OutputMatrix(nn.Module):
    """Maps normed hidden states to logits and losses, with the vocabulary cut over tp.

    Args:
        inputs: what blocks are built from.
        tied: the embedding's weight, if the head shares it; None = a new weight.
    """

    def __init__(self, inputs: BlockInputs, tied: nn.Parameter | None) -> None:
        super().__init__()
        model, self.tp, self.sp = inputs.model, inputs.tp, inputs.sp
        self.softcap, self.slice_tokens = model.logit_softcap, inputs.config.recompute.logit_tokens
        self.vocab = VocabRange(model.vocab_size, self.tp)
        if tied is None:
            tied = inputs.vocab_weight(TIED if model.tie_embeddings else "head.weight")
        self.weight = tied

    def local_logits(self, normed: Tensor, defer: Defer = run_now) -> Tensor:
        """Maps `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> `[s/cp, b, v/tp]`, with padding.

        Comm: with sp all_gather tp of s/cp·b·h elements / all_gather and reduce_scatter tp of as
            many each; without sp none / all_reduce tp.
        """
        # [s/cp/tp, b, h] -> [s/cp, b, v/tp]  all_gather tp
        logits = column_linear(normed, self.weight, self.tp, self.sp, defer)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def losses(
        self, normed: Tensor, labels: Tensor, mask: Tensor, z_coef: float, defer: Defer
    ) -> Tensor:
        """Sums over the tokens of a micro-batch.

        Args:
            normed: `[s/cp/tp, b, h]`.
            labels: int64 `[b, s/cp]`.
            mask: fp32 `[b, s/cp]`, 1 where a prediction counts.
            z_coef: coefficient of the z-loss (train.z_loss).
            defer: takes the weight-gradient half of the backward.

        Returns:
            `[2]`: Σ loss·mask, and Σ lse²·mask, the z-loss without its coefficient. The second is
            only for the log: the gradient of the first includes that of z_coef times the second.

        Comm: with sp all_gather tp, then 2× all_reduce tp / with sp all_gather and reduce_scatter
            tp, else all_reduce tp.
        """
        if self.slice_tokens is None:
            # [s/cp/tp, b, h] -> [s/cp, b, v/tp]  all_gather tp
            logits = self.local_logits(normed, defer)
            loss, lse = vocab_parallel_cross_entropy(
                logits, labels.t(), self.vocab, self.tp, z_coef
            )
        else:
            sliced = SlicedLoss(
                self.vocab, self.tp, self.sp, self.slice_tokens, z_coef, self.softcap
            )
            loss, lse = sliced(normed, self.weight, labels.t(), defer)
        # loss and lse [s/cp, b], the same on every tp rank -> [2]
        return torch.stack(((loss * mask.t()).sum(), (lse.square() * mask.t()).sum().detach()))

    def losses_ahead(self, depth: int, normed: Tensor, batch: MicroBatch, defer: Defer) -> Tensor:
        """Σ loss·mask of a depth of multi-token prediction, `[1]`; as `losses`."""
        assert batch.ahead_labels is not None and batch.ahead_mask is not None
        labels, mask = batch.ahead_labels[depth], batch.ahead_mask[depth]
        return self.losses(normed, labels, mask, 0.0, defer)[:1]


class Head(Phase):
    """Phase: hidden states -> sums over this micro-batch's tokens, `[2]` as in OutputMatrix.losses.

    If blocks of multi-token prediction follow, it returns (sums, normed hidden states) to them. If
    such blocks are on earlier stages, it receives the normed hidden states h⁰ ... hᵏ and computes
    their losses too.

    Args:
        inputs, tied: as in OutputMatrix.
        depths: k, the number of blocks of multi-token prediction on earlier stages.
    """

    def __init__(self, inputs: BlockInputs, tied: nn.Parameter | None, depths: int = 0) -> None:
        super().__init__()
        self.tp, self.z_coef, self.depths = inputs.tp, inputs.config.train.z_loss, depths
        self.is_last = inputs.model.num_mtp_layers == depths
        self.norm = nn.Identity() if depths else inputs.norm("final_norm")
        self.output = OutputMatrix(inputs, tied)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the entire vocabulary, for tools: `[s/cp/tp, b, h]` -> `[s/cp, b, vocab_size]`.

        Comm: all_gather tp of s/cp·b·h elements with sp, and of s/cp·b·v/tp elements.
        """
        local = self.output.local_logits(self.norm(x))
        return gather_last_dim(local, self.tp)[..., : self.output.vocab.vocab_size]

    def forward(self, x: Tensor, batch: MicroBatch, defer: Defer) -> Tensor | tuple[Tensor, Tensor]:
        """Maps `[(1+k)·s/cp/tp, b, h]` (sp; else `[(1+k)·s/cp, b, h]`) -> sums `[2+k]`.

        Comm: 1 + k times that of OutputMatrix.losses.
        """
        normed = self.norm(x).chunk(1 + self.depths)  # [s/cp/tp, b, h] each
        sums = self.output.losses(normed[0], batch.labels, batch.loss_mask, self.z_coef, defer)
        for depth, hidden in enumerate(normed[1:]):
            sums = torch.cat((sums, self.output.losses_ahead(depth, hidden, batch, defer)))
        return sums if self.is_last else (sums, normed[-1])


@dataclass(frozen=True)
class Term:
    """One entry of the sums that the last stage returns."""

    # of the logged figure; terms of one name are averaged: the mean of their means, without terms
    # that have no targets
    name: str
    count_index: int = 0  # in MicroBatch.target_counts, of the number that divides the sum
    coefficient: float = 0.0  # of the logged figure in the objective


def loss_terms(config: Config) -> list[Term]:
    """The entries of the last stage's output, in order."""
    ahead = [
        Term("mtp_loss", k + 1, config.train.mtp_loss) for k in range(config.model.num_mtp_layers)
    ]
    return [Term("loss", coefficient=1.0), Term("z_loss"), *ahead]

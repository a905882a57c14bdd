"""The two ends of the model: tokens to hidden states, hidden states to loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron5d.comm.collectives import gather_last_dim, local_slice
from megatron5d.config.schema import ModelConfig
from megatron5d.model.norm import Norm
from megatron5d.pipeline_parallel.microbatch import MicroBatch
from megatron5d.precision.gradient import Defer, run_now
from megatron5d.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron5d.tensor_parallel.embedding import VocabParallelEmbedding, VocabRange, vocab_weight
from megatron5d.tensor_parallel.linear import column_linear, replicated_parameter
from megatron5d.topology.mesh import Mesh

TIED = "embedding.weight"  # global name of the embedding, and of the head's weight where the two are one parameter


class Embedding(nn.Module):
    """Phase: tokens `[b, s/cp]` -> hidden states `[s/cp/tp, b, h]`, with learned positions where the model has them."""

    def __init__(self, config: ModelConfig, mesh: Mesh, *, sp: bool, **factory) -> None:
        super().__init__()
        self.tp, self.sp = mesh["tp"], sp and mesh["tp"].size > 1
        h, std = config.hidden_size, config.init_std
        self.tokens = VocabParallelEmbedding(config.vocab_size, h, self.tp, sp=sp, init=std, **factory)
        self.positions = None
        if config.position == "learned":
            self.positions = replicated_parameter(
                (config.max_positions, h), "position_embedding.weight", self.tp, partial=self.sp, init=std, decay=True,
                **factory,
            )  # fmt: skip

    def forward(self, x: Tensor | None, batch: MicroBatch, defer: Defer) -> Tensor:
        hidden = self.tokens(batch.tokens, defer)  # [s/cp/tp, b, h]  reduce_scatter tp
        if self.positions is None:
            return hidden
        positions = batch.positions.t()  # [s/cp, b]
        if self.sp:
            positions = local_slice(positions, self.tp)  # [s/cp/tp, b]
        return hidden + self.positions[positions]


class Head(nn.Module):
    """Phase: hidden states -> sums over this micro-batch's tokens.

    The output is `[2]`: Σ loss·mask, and Σ lse²·mask (the z-loss before its coefficient, not differentiated here: the
    gradient of the first entry already contains the coefficient's share).

    Args:
        config: the architecture.
        mesh: `tp` cuts the vocabulary.
        sp: hidden states arrive cut along the sequence.
        z_loss: coefficient of the z-loss.
        tied: the embedding's weight where the two are one parameter and both are here.
        factory: dtype and device of the parameters.
    """

    sums = ("loss", "z_loss")

    def __init__(
        self, config: ModelConfig, mesh: Mesh, *, sp: bool, z_loss: float, tied: nn.Parameter | None, **factory
    ) -> None:
        super().__init__()
        self.tp, self.sp, self.z_loss, self.softcap = mesh["tp"], sp, z_loss, config.logit_softcap
        h = config.hidden_size
        self.vocab = VocabRange(config.vocab_size, self.tp)
        self.norm = Norm(config.norm, h, "final_norm", self.tp, partial=sp, eps=config.norm_eps, **factory)
        if tied is None:
            name = TIED if config.tie_embeddings else "head.weight"
            self.weight = vocab_weight(config.vocab_size, h, name, self.tp, config.init_std, **factory)
        else:
            self.weight = tied

    def local_logits(self, x: Tensor, defer: Defer = run_now) -> Tensor:
        """`[s/cp/tp, b, h]` -> `[s/cp, b, v/tp]`, padding columns included."""
        logits = column_linear(self.norm(x), self.weight, self.tp, self.sp, defer)  # all_gather tp
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def logits(self, x: Tensor) -> Tensor:
        """The whole vocabulary's logits `[s/cp, b, vocab_size]`, for tools; all_gather tp."""
        return gather_last_dim(self.local_logits(x), self.tp)[..., : self.vocab.vocab_size]

    def forward(self, x: Tensor, batch: MicroBatch, defer: Defer) -> Tensor:
        logits = self.local_logits(x, defer)
        labels, mask = batch.labels.t(), batch.loss_mask.t()  # [s/cp, b]
        loss, lse = vocab_parallel_cross_entropy(logits, labels, self.vocab, self.tp, self.z_loss)
        return torch.stack(((loss * mask).sum(), (lse.square() * mask).sum().detach()))

"""Multi-token prediction (MTP): blocks after the last layer that predict one more token each.

They are used only in training. With h⁰ the normed output of the last layer, for depth k = 1 ... D:

    x   = join·[norm(embedding of token i+k) ; norm(hᵏ⁻¹)]   with the model's embedding
    hᵏ  = norm(block(x))                                     a block like the last layer
    loss of depth k: the model's head predicts token i+k+1 from hᵏ, where that token exists

The objective includes train.mtp_loss times the average of the mean losses of all depths that have
targets. On the last stage the blocks' phases follow the head; with the hidden states they pass on
the sums of losses so far. On a stage before it (`pipeline.layout`) they pass on h⁰ ... hᵏ⁻¹, and
the head computes all losses. If the embedding is on another stage, theirs holds a copy of it, like
that of a tied embedding. The order of the halves and the norm of h⁰ are those of the released
weights.
Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2; Megatron-Core's multi_token_prediction.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron5d.model.block import TransformerBlock
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.embedding_head import OutputMatrix
from megatron5d.phases.phase import MicroBatch, Phase, phases_in
from megatron5d.phases.wgrad import Defer
from megatron5d.tensor_parallel.linear import local_linear


class PassThrough(Phase):
    """A block's phase that also passes on a tensor: `(passed, x)` -> `(passed, phase(x))`."""

    def __init__(self, phase: Phase) -> None:
        super().__init__()
        self.phase, self.kind = phase, phase.kind
        # this and the next for graphs (phase_graphs.py)
        self.capturable = phase.capturable
        self.adds_grads_at_once = phase.adds_grads_at_once

    def forward(
        self, state: tuple[Tensor, Any], batch: MicroBatch, defer: Defer
    ) -> tuple[Tensor, Any]:
        """Runs the phase on x.

        Comm: that of the phase.
        """
        passed, x = state
        return passed, self.phase(x, batch, defer)


class MtpInput(Phase):
    """Phase: (sums, hidden states `[s/cp/tp, b, h]`) -> (sums, the block's input, same shape).

    Before the head: h⁰ ... hᵏ⁻¹ `[k·s/cp/tp, b, h]`, or the last layer's output -> (h⁰ ... hᵏ⁻¹,
    the block's input).

    Args:
        inputs: what blocks are built from.
        depth: k - 1.
        table: the model's embedding, `[v/tp, h]`.
        before_head: the head is on a later stage, and the first block contains the norm of h⁰.
    """

    def __init__(
        self, inputs: BlockInputs, depth: int, table: nn.Parameter, before_head: bool
    ) -> None:
        super().__init__()
        self.before_head = before_head
        self.final_norm = inputs.norm("final_norm") if before_head and depth == 0 else nn.Identity()
        model, name = inputs.model, f"layers.{inputs.model.num_layers + depth}.mtp"
        self.depth, h = depth, model.hidden_size
        self.tokens = inputs.embedding(table)
        self.embedding_norm = inputs.norm(f"{name}.embedding_norm")
        self.hidden_norm = inputs.norm(f"{name}.hidden_norm")
        self.join = inputs.replicated((h, 2 * h), f"{name}.join.weight")

    def forward(self, state: Any, batch: MicroBatch, defer: Defer) -> tuple[Tensor, Tensor]:
        """Joins the last hidden states with the embeddings of the tokens ahead.

        Comm: that of the embedding.
        """
        if self.before_head:
            passed = self.final_norm(state)
            hidden = passed.chunk(self.depth + 1)[-1]
        else:
            passed, hidden = state
        assert batch.ahead_tokens is not None, "look_ahead adds the tokens that MTP blocks read"
        # [s/cp/tp, b, h]  reduce_scatter tp
        embedded = self.tokens(batch.ahead_tokens[self.depth], defer)
        joined = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1)
        return passed, local_linear(joined, self.join, defer)  # [s/cp/tp, b, h]


class MtpHead(Phase):
    """Phase: (sums, hidden states `[s/cp/tp, b, h]`) -> sums, with this depth's Σ loss·mask.

    All depths but the last return their normed hidden states too. Before the head: (h⁰ ... hᵏ⁻¹,
    hidden states) -> h⁰ ... hᵏ `[(k+1)·s/cp/tp, b, h]`.

    Args:
        inputs: what blocks are built from.
        depth: k - 1.
        output: the model's output matrix; None = the head is on a later stage.
    """

    def __init__(self, inputs: BlockInputs, depth: int, output: OutputMatrix | None) -> None:
        super().__init__()
        self.depth, self.last = depth, depth == inputs.model.num_mtp_layers - 1
        self.norm = inputs.norm(f"layers.{inputs.model.num_layers + depth}.mtp.final_norm")
        self.output = output

    def forward(self, state: tuple[Tensor, Tensor], batch: MicroBatch, defer: Defer) -> Any:
        """Appends this depth's loss to sums `[terms]`.

        Comm: that of OutputMatrix.losses.
        """
        passed, x = state
        hidden = self.norm(x)
        if self.output is None:
            return torch.cat((passed, hidden))
        sums = torch.cat((passed, self.output.losses_ahead(self.depth, hidden, batch, defer)))
        return sums if self.last else (sums, hidden)


def mtp_block(
    inputs: BlockInputs, depth: int, table: nn.Parameter, output: OutputMatrix | None
) -> nn.ModuleList:
    """Builds the phases of one depth; arguments as in MtpInput and MtpHead."""
    block = TransformerBlock(inputs, inputs.model.num_layers + depth)
    first, phases = (
        MtpInput(inputs, depth, table, output is None),
        map(PassThrough, phases_in(block)),
    )
    return nn.ModuleList([first, *phases, MtpHead(inputs, depth, output)])

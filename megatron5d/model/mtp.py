"""Multi-token prediction: blocks after the last layer, each of which predicts one token further
ahead; training only.

With h⁰ the normed output of the last layer, for depth k = 1 ... D:

    x   = join·[norm(embedding of token i+k) ; norm(hᵏ⁻¹)]      the model's own embedding
    hᵏ  = norm(block(x))                                        attention and MLP or experts, like the last layer's
    loss of depth k: hᵏ through the model's own head predicts token i+k+1, where that token exists

The objective gets train.mtp_loss times the average of their mean losses over the depths that have
targets. On the last stage the blocks' phases follow the head; beside the hidden states they carry
the sums of losses so far. On a stage before it (`pipeline.layout`) they carry h⁰ ... hᵏ⁻¹, and the
head computes the losses of all. If the embedding is on another stage, theirs holds a copy of it,
like that of a tied one. The order of the halves and the norm of h⁰ are those of the released
weights. Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2; Megatron-Core's
multi_token_prediction.py.
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
from megatron5d.tensor_parallel.embedding import VocabParallelEmbedding
from megatron5d.tensor_parallel.linear import local_linear, replicated_parameter


class Carrying(Phase):
    """A phase of a block that also passes on what it does not read: `(carried, x)` -> `(carried,
    phase(x))`."""

    def __init__(self, phase: Phase) -> None:
        super().__init__()
        self.phase, self.kind = phase, phase.kind
        # this and the next for graphs (phase_graphs.py)
        self.capturable = phase.capturable
        self.adds_grads_at_once = phase.adds_grads_at_once

    def forward(
        self, state: tuple[Tensor, Any], batch: MicroBatch, defer: Defer
    ) -> tuple[Tensor, Any]:
        """Passes what is carried on as it is, x as the phase takes and returns it. Comm: that of
        the phase."""
        carried, x = state
        return carried, self.phase(x, batch, defer)


class MtpInput(Phase):
    """Phase: (sums, hidden states `[s/cp/tp, b, h]`) -> (sums, the block's input, of the same
    shape).

    Before the head: h⁰ ... hᵏ⁻¹ `[k·s/cp/tp, b, h]`, or the last layer's output -> (h⁰ ... hᵏ⁻¹,
    the block's input).

    Args:
        shared: what it is built from.
        depth: k - 1.
        table: the model's embedding, `[v/tp, h]`.
        before_head: the head is on a later stage; the first block has the norm of h⁰.
    """

    def __init__(
        self, shared: BlockInputs, depth: int, table: nn.Parameter, before_head: bool
    ) -> None:
        super().__init__()
        self.before_head = before_head
        self.final_norm = shared.norm("final_norm") if before_head and depth == 0 else nn.Identity()
        model, name = shared.model, f"layers.{shared.model.num_layers + depth}.mtp"
        self.depth, h = depth, model.hidden_size
        scale = model.embedding_scale
        self.tokens = VocabParallelEmbedding(
            table, model.vocab_size, shared.tp, sp=shared.sp, scale=scale
        )
        self.embedding_norm = shared.norm(f"{name}.embedding_norm")
        self.hidden_norm = shared.norm(f"{name}.hidden_norm")
        self.join = replicated_parameter(
            (h, 2 * h),
            f"{name}.join.weight",
            shared.tp,
            partial_grad=shared.sp,
            init=model.init_std,
            decay=True,
            **shared.factory,
        )

    def forward(self, state: Any, batch: MicroBatch, defer: Defer) -> tuple[Tensor, Tensor]:
        """Passes what is carried on as it is, `[s/cp/tp, b, h]` -> `[s/cp/tp, b, h]`. Comm: that of
        the embedding."""
        if self.before_head:
            carried = self.final_norm(state)
            hidden = carried.chunk(self.depth + 1)[-1]
        else:
            carried, hidden = state
        assert batch.ahead_tokens is not None, "look_ahead makes what the prediction blocks read"
        # [s/cp/tp, b, h]  reduce_scatter tp
        embedded = self.tokens(batch.ahead_tokens[self.depth], defer)
        joined = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1)
        return carried, local_linear(joined, self.join, defer)  # [s/cp/tp, b, h]


class MtpHead(Phase):
    """Phase: (sums, hidden states `[s/cp/tp, b, h]`) -> sums with this depth's Σ loss·mask
    appended.

    Before the head: (h⁰ ... hᵏ⁻¹, hidden states) -> h⁰ ... hᵏ `[(k+1)·s/cp/tp, b, h]`.

    Args:
        shared: what it is built from.
        depth: k - 1; all but the last pass their normed hidden states on beside the sums.
        output: the model's own; None = the head is on a later stage.
    """

    def __init__(self, shared: BlockInputs, depth: int, output: OutputMatrix | None) -> None:
        super().__init__()
        self.depth, self.last = depth, depth == shared.model.num_mtp_layers - 1
        self.norm = shared.norm(f"layers.{shared.model.num_layers + depth}.mtp.final_norm")
        self.output = output

    def forward(self, state: tuple[Tensor, Tensor], batch: MicroBatch, defer: Defer) -> Any:
        """Maps sums `[terms]`, `[s/cp/tp, b, h]` -> sums `[terms + 1]`, and but for the last the
        normed x.

        Comm: that of OutputMatrix.losses.
        """
        carried, x = state
        hidden = self.norm(x)
        if self.output is None:
            return torch.cat((carried, hidden))
        sums = torch.cat((carried, self.output.losses_ahead(self.depth, hidden, batch, defer)))
        return sums if self.last else (sums, hidden)


def mtp_block(
    shared: BlockInputs, depth: int, table: nn.Parameter, output: OutputMatrix | None
) -> nn.ModuleList:
    """Builds the phases of one depth; arguments as in MtpInput and MtpHead."""
    block = TransformerBlock(shared, shared.model.num_layers + depth)
    first, phases = MtpInput(shared, depth, table, output is None), map(Carrying, phases_in(block))
    return nn.ModuleList([first, *phases, MtpHead(shared, depth, output)])

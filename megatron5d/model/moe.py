"""The mixture-of-experts branch of a block as three phases: dispatch, experts, combine.

dispatch   norm, router, permute; starts sending tokens to their experts
experts    the shared expert while tokens are sent (with nodes: up between nodes, down inside
           one); then the routed experts, times the router's weights; starts sending outputs
combine    waits, sums each token's outputs, adds the shared expert and the residual
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron5d.comm.all_to_all import Codec
from megatron5d.expert_parallel.dispatcher import DirectDispatch, Dispatcher, SendCapacity
from megatron5d.expert_parallel.experts import Experts
from megatron5d.expert_parallel.replay import NOT_RECORDED
from megatron5d.expert_parallel.router import Router, round_robin, within_capacity
from megatron5d.expert_parallel.token_share import Tokens
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.mlp import FeedForward
from megatron5d.model.norm import NoNorm, branch_input
from megatron5d.phases.activations import KEEP_ALL, Source, recompute_from
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.phases.wgrad import Defer
from megatron5d.tensor_parallel.linear import local_linear
from megatron5d.topology.mesh import Mesh

if TYPE_CHECKING:
    from megatron5d.expert_parallel.hierarchical_dispatcher import (
        HierarchicalDispatcher,
        NodeDispatch,
    )


class MoEState(NamedTuple):
    """What the phases of one layer pass to each other."""

    residual: Tensor  # [s/cp/tp, b, h]
    # async handles (comm/all_to_all.py) of the rows sent to experts, later of their outputs, and of
    # the router's weights
    rows: Tensor
    weights: Tensor | None
    # [s/cp/tp, b, h]: the shared expert's input, then its output; None without one
    shared: Tensor | None
    dispatch: DirectDispatch | NodeDispatch
    source: Source | None  # the tokens, if a recomputed `permute` dispatches them again


def capturable(inputs: BlockInputs) -> bool:
    """Whether CUDA graphs can capture the phases: the host reads neither splits nor files."""
    moe = inputs.config.moe
    planned = inputs.mesh["ep"].size == 1 or moe.exchange == "planned"
    return planned and moe.replay is None and moe.record is None


def dispatcher_of(
    num_experts: int,
    mesh: Mesh,
    codec: Codec | None = None,
    capacity: SendCapacity | None = None,
) -> Dispatcher | HierarchicalDispatcher:
    """Builds a dispatcher that sends tokens directly, or by nodes (parallel.ep_inner)."""
    if mesh["ep_inner"].size > 1 and mesh["ep_outer"].size > 1:
        from megatron5d.expert_parallel.hierarchical_dispatcher import HierarchicalDispatcher

        outer, inner, etp, inner_etp = (
            mesh[name] for name in ("ep_outer", "ep_inner", "etp", "ep_inner_etp")
        )
        return HierarchicalDispatcher(num_experts, outer, inner, etp, inner_etp, codec)
    return Dispatcher(num_experts, mesh["ep"], mesh["etp"], mesh["ep_etp"], codec, capacity)


def _codec(fp8: bool) -> Codec | None:
    """The encoding of rows sent to experts (moe.fp8_dispatch); None = their dtype."""
    if not fp8:
        return None
    from megatron5d.precision.fp8_tensor import Fp8DispatchCodec

    return Fp8DispatchCodec()


class MoEDispatch(Phase):
    """Phase: hidden states `[s/cp/tp, b, h]` -> MoEState, with tokens in flight to experts."""

    kind = "dispatch"
    parts = KEEP_ALL  # `norm` may be recomputed, and `permute`, which ends in the next phase

    def __init__(self, inputs: BlockInputs, layer: int) -> None:
        super().__init__()
        assert inputs.moe is not None
        self.config, self.moe, self.layer = inputs.model, inputs.config.moe, layer
        self.token_share, self.balancer = inputs.moe.token_share, inputs.moe.balancer
        self.jitter, self.routing_file = inputs.moe.jitter, inputs.moe.routing_file
        self.cp_tp, name = inputs.mesh["cp_tp"], f"layers.{layer}"
        self.capturable = capturable(inputs)
        self.norm = (
            NoNorm() if self.config.parallel_block == "one_norm" else inputs.pre_norm(f"{name}.mlp")
        )
        biased = self.config.router_bias or "bias" in self.moe.balance
        owner = self.balancer.stage.rank == 0
        self.router = Router(
            self.config, f"{name}.router", inputs.tp, biased=biased, owner=owner, **inputs.factory
        )
        if self.router.bias is not None:
            self.balancer.biases[layer] = self.router.bias
        codec = _codec(self.moe.fp8_dispatch)
        self.dispatcher = dispatcher_of(
            self.config.num_experts, inputs.mesh, codec, inputs.moe.send_capacity
        )

    def forward(
        self, state: Tensor | tuple[Tensor, Tensor], batch: MicroBatch, defer: Defer
    ) -> MoEState:
        """Maps `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`), in a parallel block two -> MoEState.

        This rank routes n = s/cp/tp·b tokens, with or without sp.

        Comm: none / without sp all_gather tp of n·h elements; with a capacity all_gather cp_tp of
            2k+1 numbers a token; for balancing all_reduce cp_tp of E counts a sequence; the
            dispatcher's `dispatch`.
        """
        normed, residual = branch_input(self.norm, state)  # [s/cp/tp, b, h]
        x = self.token_share.take(normed)  # [n, h]
        tokens = self.token_share.tokens(residual.shape, batch)
        # Choose experts.
        logits = self.router.logits(self._jittered(x, tokens), defer)  # [n, E]
        experts, weights = self.router(logits, self._forced_experts(logits, tokens))  # [n, k]
        in_training = tokens.samples is not None
        if self.moe.record is not None and self.routing_file is not None and in_training:
            self.routing_file.write(self.layer, tokens, experts)
        # Drop padding, and choices beyond the capacity.
        if tokens.real is not None:
            experts = experts.masked_fill(~tokens.real[:, None], self.config.num_experts)
            weights = tokens.masked(weights)
        sent_experts, weights, dropped = self.limit_capacity(experts, weights, tokens)
        # Balance.
        self.balancer.observe(self.layer, logits, experts, dropped, tokens)
        weights = self.balancer.attach(weights, self.layer, logits, experts, tokens)
        # [n, h] -> [n·k, h], [n, k] -> [n·k] in flight  2× all_to_all ep
        rows, weights, dispatch = self.dispatcher.dispatch(x, sent_experts, weights)
        shared = normed if self.config.shared_ffn_hidden_size else None
        return MoEState(residual, rows, weights, shared, dispatch, self.parts.source("permute", x))

    def _forced_experts(self, logits: Tensor, tokens: Tokens) -> Tensor | None:
        """Experts int64 `[n, k]` instead of the router's choices; None = the router chooses."""
        in_training = tokens.samples is not None
        if self.moe.replay is not None and self.routing_file is not None and in_training:
            replayed = self.routing_file.read(self.layer, tokens)
            return torch.where(replayed == NOT_RECORDED, self.router.choose(logits), replayed)
        return (
            round_robin(tokens.round_robin_index, self.config) if self.moe.force_balanced else None
        )

    def _jittered(self, x: Tensor, tokens: Tokens) -> Tensor:
        if self.jitter is None or tokens.samples is None:
            return x
        sample, position = tokens.samples[tokens.sequence], tokens.order // tokens.num_sequences
        return self.jitter(x, f"layers.{self.layer}.router", sample, position)

    def limit_capacity(
        self, experts: Tensor, weights: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Drops choices beyond the experts' capacity.

        Returns:
            Experts, with `num_experts` for dropped choices; weights, with 0 for them; and the
            number of dropped choices, None without a limit.

        Comm: all_gather cp_tp of 2k+1 numbers a token, with a limit.
        """
        if self.moe.capacity_factor is None:
            return experts, weights, None
        num_experts = self.config.num_experts
        keep = within_capacity(
            experts,
            weights,
            tokens.order,
            num_experts,
            self.moe.capacity_factor,
            self.moe.drop_by,
            self.cp_tp,
        )
        dropped = (~keep & (experts < num_experts)).sum()
        return experts.masked_fill(~keep, num_experts), weights * keep.to(weights.dtype), dropped


class MoEExperts(Phase):
    """Phase: MoEState -> MoEState, with the experts' outputs in flight back."""

    kind = "experts"

    def __init__(self, inputs: BlockInputs, layer: int) -> None:
        super().__init__()
        model, mesh, name = inputs.model, inputs.mesh, f"layers.{layer}"
        self.experts = Experts(model, f"{name}.experts", mesh["ep"], mesh["etp"], **inputs.factory)
        self.shared = self.shared_gate = None
        self.capturable = capturable(inputs)
        if model.shared_ffn_hidden_size:
            self.shared = FeedForward(
                inputs, model.shared_ffn_hidden_size, f"{name}.shared_expert", bias=model.mlp_bias
            )
        if model.shared_expert_gate:
            self.shared_gate = inputs.replicated(
                (1, model.hidden_size), f"{name}.shared_expert.gate.weight"
            )

    def forward(self, state: MoEState, batch: MicroBatch, defer: Defer) -> MoEState:
        """Computes the rows `[r, h]` of this rank's experts, and starts sending their outputs.

        Comm: the dispatch state's `enter_node`, `receive` and `start_combine`.
        """
        residual, handle, weights, normed, dispatch, source = state
        assert weights is not None
        # The shared expert overlaps with the all-to-alls.
        shared = None
        if self.shared is not None and normed is not None:
            shared = self.shared.project_up(normed, defer)
        handle, weights, dispatch = dispatch.enter_node(handle, weights)
        if self.shared is not None and shared is not None:
            shared = self.shared.project_down(shared, defer)
            if self.shared_gate is not None and normed is not None:
                shared = shared * torch.sigmoid(local_linear(normed, self.shared_gate, defer))
        rows, weights, dispatch = dispatch.receive(handle, weights)  # [r, h], [r]
        if source is not None:  # in the backward all_to_all ep and all_gather etp again
            recompute_from(source, dispatch.redispatch, rows)
        y = self.experts(rows, weights, dispatch.offsets, defer)  # [r, h], partial over etp
        return MoEState(residual, dispatch.start_combine(y), None, shared, dispatch, None)


class MoECombine(Phase):
    """Phase: MoEState -> hidden states `[s/cp/tp, b, h]`."""

    kind = "combine"

    def __init__(self, inputs: BlockInputs, layer: int) -> None:
        super().__init__()
        assert inputs.moe is not None
        self.token_share = inputs.moe.token_share
        self.post_norm = inputs.post_norm(f"layers.{layer}.mlp")
        self.capturable = capturable(inputs)

    def forward(self, state: MoEState, batch: MicroBatch, defer: Defer) -> Tensor:
        """Maps MoEState -> `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`).

        Comm: without sp all_gather tp of n·h elements / none; the dispatch state's `combine`.
        """
        residual, handle, _, shared, dispatch, _ = state
        # [n, h] -> [s/cp/tp, b, h]
        y = self.token_share.restore(dispatch.combine(handle), residual)
        return residual + self.post_norm(y if shared is None else y + shared)

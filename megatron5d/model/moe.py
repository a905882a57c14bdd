"""The mixture-of-experts half of a block as three phases: dispatch, experts, combine.

    dispatch   norm, router, permute; starts sending tokens to their experts
    experts    the shared expert meanwhile (over nodes: up while tokens travel between nodes, down while inside one);
               then the routed experts, times the router's weights; starts sending outputs back
    combine    waits, sums each token's outputs, adds the shared expert and the residual

With sp each tp rank routes the tokens that it has. Without sp all tp ranks have the same tokens:
each routes its share of them, and the outputs are gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron5d.comm.all_to_all import Codec
from megatron5d.expert_parallel.dispatcher import DirectDispatch, Dispatcher, SendCapacity
from megatron5d.expert_parallel.experts import Experts
from megatron5d.expert_parallel.router import Router, round_robin, within_capacity
from megatron5d.expert_parallel.token_share import Tokens
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.mlp import FeedForward
from megatron5d.model.norm import NoNorm, branch_input
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.phases.recompute import KEEP_ALL, Source, recompute_from
from megatron5d.phases.wgrad import Defer
from megatron5d.tensor_parallel.linear import local_linear, replicated_parameter
from megatron5d.topology.mesh import Mesh

if TYPE_CHECKING:
    from megatron5d.expert_parallel.hierarchical_dispatcher import (
        HierarchicalDispatcher,
        NodeDispatch,
    )


class MoEState(NamedTuple):
    """What the phases of one layer pass on."""

    residual: Tensor  # [s/cp/tp, b, h]
    # async handle (comm/all_to_all.py): tokens on their way to experts, later outputs back
    rows: Tensor
    weights: Tensor | None  # async handle of the router's weights, on their way to experts
    # [s/cp/tp, b, h]: the shared expert's input, then its output; None without one
    shared: Tensor | None
    dispatch: DirectDispatch | NodeDispatch
    source: Source | None  # the tokens, where a recomputed `permute` dispatches them again


def capturable(shared: BlockInputs) -> bool:
    """Says whether the phases can be captured as graphs: neither splits nor files are read on the
    host."""
    moe = shared.config.moe
    planned = shared.mesh["ep"].size == 1 or moe.exchange == "planned"
    return planned and moe.replay is None and moe.record is None


def dispatcher_of(
    num_experts: int,
    mesh: Mesh,
    codec: Codec | None = None,
    capacity: SendCapacity | None = None,
) -> Dispatcher | HierarchicalDispatcher:
    """Builds the dispatcher that sends tokens straight to experts, or first to nodes
    (parallel.ep_inner)."""
    if mesh["ep_inner"].size > 1 and mesh["ep_outer"].size > 1:
        from megatron5d.expert_parallel.hierarchical_dispatcher import HierarchicalDispatcher

        outer, inner, etp, inner_etp = (
            mesh[name] for name in ("ep_outer", "ep_inner", "etp", "ep_inner_etp")
        )
        return HierarchicalDispatcher(num_experts, outer, inner, etp, inner_etp, codec)
    return Dispatcher(num_experts, mesh["ep"], mesh["etp"], mesh["ep_etp"], codec, capacity)


def _codec(fp8: bool) -> Codec | None:
    """Returns how rows travel to the experts: moe.fp8_dispatch, or None for their dtype."""
    if not fp8:
        return None
    from megatron5d.precision.fp8_tensor import Fp8DispatchCodec

    return Fp8DispatchCodec()


class MoEDispatch(Phase):
    """Phase: hidden states `[s/cp/tp, b, h]` -> MoEState, the tokens under way to their experts."""

    kind = "dispatch"
    parts = KEEP_ALL  # `norm` may be recomputed, and `permute`, which ends in the next phase

    def __init__(self, shared: BlockInputs, layer: int) -> None:
        super().__init__()
        assert shared.moe is not None
        self.config, self.moe, self.layer = shared.model, shared.config.moe, layer
        self.share, self.balancer = shared.moe.token_share, shared.moe.balancer
        self.jitter, self.routing = shared.moe.jitter, shared.moe.routing
        self.cp_tp, name = shared.mesh["cp_tp"], f"layers.{layer}"
        self.capturable = capturable(shared)
        self.norm = (
            NoNorm() if self.config.parallel_block == "one_norm" else shared.pre_norm(f"{name}.mlp")
        )
        biased = self.config.router_bias or "bias" in self.moe.balance
        owner = self.balancer.stage.rank == 0
        self.router = Router(
            self.config, f"{name}.router", shared.tp, biased=biased, owner=owner, **shared.factory
        )
        if self.router.bias is not None:
            self.balancer.biases[layer] = self.router.bias
        codec = _codec(self.moe.fp8_dispatch)
        self.dispatcher = dispatcher_of(
            self.config.num_experts, shared.mesh, codec, shared.moe.send_capacity
        )

    def forward(
        self, state: Tensor | tuple[Tensor, Tensor], batch: MicroBatch, defer: Defer
    ) -> MoEState:
        """Maps `[s/cp/tp, b, h]` (without sp `[s/cp, b, h]`), in a parallel block two of them ->
        MoEState.

        n = s/cp/tp·b tokens are routed here, with sp or without.

        Comm: none / without sp all_gather tp of n·h elements; with a capacity all_gather cp_tp of
            2k+1 numbers a token;
        for balancing all_reduce cp_tp of E counts a sequence; the dispatcher's `dispatch`.
        """
        normed, residual = branch_input(self.norm, state)  # [s/cp/tp, b, h]
        mine = self.share.take(normed)  # [n, h]
        tokens = self.share.tokens(residual.shape, batch)
        logits = self.router.logits(self._jittered(mine, tokens), defer)  # [n, E]
        experts, weights = self.router(logits, self._forced(tokens))  # [n, k]
        if self.moe.record is not None and self.routing is not None and tokens.samples is not None:
            self.routing.write(self.layer, tokens, experts)
        if tokens.real is not None:
            experts = experts.masked_fill(~tokens.real[:, None], self.config.num_experts)
            weights = tokens.masked(weights)
        # all_gather cp_tp, if limited
        taken, weights, dropped = self.limit_capacity(experts, weights, tokens)
        self.balancer.observe(self.layer, logits, experts, dropped, tokens)
        weights = self.balancer.attach(weights, self.layer, logits, experts, tokens)
        # [n, h] -> [n·k, h], [n, k] -> [n·k] under way  2× all_to_all ep
        rows, weights, dispatch = self.dispatcher.dispatch(mine, taken, weights)
        shared = normed if self.config.shared_ffn_hidden_size else None
        return MoEState(
            residual, rows, weights, shared, dispatch, self.parts.source("permute", mine)
        )

    def _forced(self, tokens: Tokens) -> Tensor | None:
        """Returns int64 `[n, k]`, the experts that a token takes whatever the router says; None =
        as it says."""
        if self.moe.replay is not None and self.routing is not None and tokens.samples is not None:
            return self.routing.read(self.layer, tokens)
        return (
            round_robin(tokens.round_robin_index, self.config) if self.moe.force_balanced else None
        )

    def _jittered(self, x: Tensor, tokens: Tokens) -> Tensor:
        if self.jitter is None or tokens.samples is None:
            return x
        position = tokens.order // tokens.num_sequences
        return self.jitter(
            x, f"layers.{self.layer}.router", tokens.samples[tokens.sequence], position
        )

    def limit_capacity(
        self, experts: Tensor, weights: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Drops choices beyond the experts' capacity: their expert becomes none, their weight 0;
        and counts them."""
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
    """Phase: MoEState -> MoEState, the experts' outputs under way back."""

    kind = "experts"

    def __init__(self, shared: BlockInputs, layer: int) -> None:
        super().__init__()
        model, mesh, name = shared.model, shared.mesh, f"layers.{layer}"
        self.experts = Experts(model, f"{name}.experts", mesh["ep"], mesh["etp"], **shared.factory)
        self.shared = self.shared_gate = None
        self.capturable = capturable(shared)
        if model.shared_ffn_hidden_size:
            self.shared = FeedForward(
                shared, model.shared_ffn_hidden_size, f"{name}.shared_expert", bias=model.mlp_bias
            )
        if model.shared_expert_gate:
            self.shared_gate = replicated_parameter(
                (1, model.hidden_size),
                f"{name}.shared_expert.gate.weight",
                shared.tp,
                partial_grad=shared.sp,
                init=model.init_std,
                decay=True,
                **shared.factory,
            )

    def forward(self, state: MoEState, batch: MicroBatch, defer: Defer) -> MoEState:
        """Waits for r rows `[r, h]` of this rank's experts, and starts sending their outputs
        back."""
        x, handle, weights, normed, dispatch, source = state
        assert weights is not None
        shared = None
        if self.shared is not None and normed is not None:
            shared = self.shared.project_up(normed, defer)  # while the tokens travel
        handle, weights, dispatch = dispatch.enter_node(handle, weights)
        if self.shared is not None and shared is not None:
            shared = self.shared.project_down(shared, defer)  # while they travel inside the node
            if self.shared_gate is not None and normed is not None:
                shared = shared * torch.sigmoid(local_linear(normed, self.shared_gate, defer))
        rows, weights, dispatch = dispatch.receive(handle, weights)  # [r, h], [r]
        if source is not None:
            # all_to_all ep and all_gather etp once more
            recompute_from(source, dispatch.redispatch, rows)
        y = self.experts(rows, weights, dispatch.offsets, defer)  # [r, h], partial over etp
        return MoEState(x, dispatch.start_combine(y), None, shared, dispatch, None)


class MoECombine(Phase):
    """Phase: MoEState -> hidden states `[s/cp/tp, b, h]`."""

    kind = "combine"

    def __init__(self, shared: BlockInputs, layer: int) -> None:
        super().__init__()
        assert shared.moe is not None
        self.share, self.post_norm = shared.moe.token_share, shared.post_norm(f"layers.{layer}.mlp")
        self.capturable = capturable(shared)

    def forward(self, state: MoEState, batch: MicroBatch, defer: Defer) -> Tensor:
        """Maps MoEState -> `[s/cp/tp, b, h]` (without sp `[s/cp, b, h]`).

        Comm: without sp all_gather tp of n·h elements / none; the dispatch state's `combine`.
        """
        residual, handle, _, shared, dispatch, _ = state
        y = self.share.restore(dispatch.combine(handle), residual)  # [n, h] -> [s/cp/tp, b, h]
        return residual + self.post_norm(y if shared is None else y + shared)

"""The mixture-of-experts half of a block as three phases: dispatch, experts, combine.

    dispatch   norm, router, sort; starts sending tokens to their experts
    experts    the shared expert while tokens travel (over nodes: up while they travel between nodes, down while inside
               one); then the routed experts, times the router's weights; starts sending outputs home
    combine    waits, sums each token's outputs, adds the shared expert and the residual

With sp each tp rank routes the tokens that it has. Without sp all tp ranks have the same tokens: each routes its share
of them, and the outputs are gathered.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron5d.autograd.recompute import KEEP_ALL, RecomputedParts, Source, computed_from
from megatron5d.autograd.wgrad import Defer
from megatron5d.comm.all_to_all import Codec
from megatron5d.comm.collectives import join_from, local_slice, split_to
from megatron5d.config.schema import ModelConfig, MoeConfig
from megatron5d.expert_parallel.dispatcher import Dispatcher, TokenDispatcher, Trip
from megatron5d.expert_parallel.experts import Experts
from megatron5d.expert_parallel.hierarchical_dispatcher import NodeDispatcher
from megatron5d.expert_parallel.load_balancing import Balancer, Tokens
from megatron5d.expert_parallel.router import Jitter, Router, by_turns, within_capacity
from megatron5d.model.mlp import FeedForward
from megatron5d.model.norm import Norm
from megatron5d.pipeline_parallel.phase import MicroBatch
from megatron5d.precision.fp8_tensor import Fp8DispatchCodec
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh

State = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Trip, Source | None]
"""What goes from phase to phase: the residual; the tickets of the exchanges under way (comm/all_to_all.py), of rows
and, to the experts, of their weights; for a shared expert its input, then its output, else None; where the tokens go;
and the tokens, if they are to be sent once more."""


def dispatcher_of(num_experts: int, mesh: Mesh, codec: Codec | None = None) -> TokenDispatcher:
    """Sends tokens straight to their experts, or first to nodes and then inside them (parallel.ep_inner)."""
    if mesh["ep_inner"].size > 1 and mesh["ep_outer"].size > 1:
        outer, inner, etp, inner_etp = (mesh[name] for name in ("ep_outer", "ep_inner", "etp", "ep_inner_etp"))
        return NodeDispatcher(num_experts, outer, inner, etp, inner_etp, codec)
    return Dispatcher(num_experts, mesh["ep"], mesh["etp"], mesh["ep_etp"], codec)


class TokenShare:
    """Which of its tokens a rank routes.

    Args:
        tp: ranks that hold the same sequence positions (sp: neighbouring shares of them).
        sp: tokens arrive cut along the sequence.
    """

    def __init__(self, tp: Axis, sp: bool) -> None:
        self.tp, self.sp = tp, sp and tp.size > 1
        self._tokens_of_whole = cache(self._tokens_at)

    def take(self, x: Tensor) -> Tensor:
        """`[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> `[n, h]`, n = s·b/(cp·tp), without sp rounded up.

        Comm: none / without sp all_gather tp.
        """
        flat = x.flatten(0, 1)
        if self.sp or self.tp.size == 1:
            return flat
        return split_to(F.pad(flat, (0, 0, 0, -flat.shape[0] % self.tp.size)), self.tp)

    def restore(self, y: Tensor, like: Tensor) -> Tensor:
        """`[n, h]` -> what `take` was given, `like`. Comm: without sp all_gather tp / none."""
        if not self.sp and self.tp.size > 1:
            y = join_from(y, self.tp)[: like.shape[0] * like.shape[1]]
        return y.view(like.shape)

    def tokens(self, shape: torch.Size, batch: MicroBatch) -> Tokens:
        """Which tokens those are that `take` takes from hidden states of a shape."""
        if batch.context is None:
            tokens = self._tokens_of_whole(shape[0], shape[1], batch.tokens.device)
        else:
            tokens = self._tokens_at(shape[0], shape[1], batch.tokens.device, batch.context.own_rows)
        tokens = replace(tokens, samples=batch.samples)
        if batch.padding is None:
            return tokens
        real = ~batch.padding.t()  # [s/cp, b]
        if self.sp:
            return replace(tokens, real=local_slice(real, self.tp).flatten())
        real = F.pad(real.flatten(), (0, -real.numel() % self.tp.size))
        return replace(tokens, real=local_slice(real, self.tp))

    def _tokens_at(self, s: int, b: int, device, rows: Tensor | None = None) -> Tokens:
        """The tokens at sequence positions `rows`, those of this cp rank; None = all positions."""
        count = s * self.tp.size if self.sp else s
        rows = torch.arange(count, device=device) if rows is None else rows
        assert rows.numel() == count, f"{count} positions of a sequence, {rows.numel()} expected"
        order = (rows[:, None] * b + torch.arange(b, device=device)).flatten()
        missing = 0 if self.sp else -order.numel() % self.tp.size
        if missing:  # what pads to equal shares comes last
            order = torch.cat((order, order.max() + 1 + torch.arange(missing, device=device)))
        real = torch.arange(order.numel(), device=device) < order.numel() - missing if missing else None
        order = local_slice(order, self.tp)
        return Tokens(order % b, order, None if real is None else local_slice(real, self.tp), b)


class MoeDispatch(nn.Module):
    """Phase: hidden states `[s/cp/tp, b, h]` -> State, the tokens under way to their experts.

    Args:
        config, moe: the architecture and the training of its router.
        layer: global index of the block.
        mesh: `ep`, `etp` of the expert view; `tp` shares or repeats the tokens; `cp_tp` joins a micro-batch.
        sp: tokens arrive cut along the sequence.
        share: which tokens this rank routes.
        balancer: of all MoE layers here.
        jitter: of what routers read in training; None = none.
        parts: `norm` may be recomputed, and `permute`, which ends in the next phase.
        factory: dtype and device of the parameters.
    """

    kind = "dispatch"

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, layer: int, mesh: Mesh, *, sp: bool, share: TokenShare,
        balancer: Balancer, jitter: Jitter | None = None, parts: RecomputedParts = KEEP_ALL, **factory,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.moe, self.layer, self.share, self.balancer = config, moe, layer, share, balancer
        self.jitter, self.parts = jitter, parts
        tp, name = mesh["tp"], f"layers.{layer}"
        self.cp_tp = mesh["cp_tp"]
        norm = {"partial_grad": sp, "eps": config.norm_eps, "parts": parts, **factory}
        self.norm = Norm(config.norm, config.hidden_size, f"{name}.mlp.norm", tp, **norm)
        biased = config.router_bias or "bias" in moe.balance
        owner = balancer.stage.rank == 0
        self.router = Router(config, f"{name}.router", tp, biased=biased, owner=owner, **factory)
        if self.router.bias is not None:
            balancer.biases[layer] = self.router.bias
        self.dispatcher = dispatcher_of(config.num_experts, mesh, Fp8DispatchCodec() if moe.fp8_dispatch else None)

    def forward(self, x: Tensor, batch: MicroBatch, defer: Defer) -> State:
        """`[s/cp/tp, b, h]` (without sp `[s/cp, b, h]`) -> State; n = s/cp/tp·b tokens are routed here either way.

        Comm: none / without sp all_gather tp of n·h elements; with a capacity all_gather cp_tp of 2k+1 numbers a token;
        for balancing all_reduce cp_tp of E counts a sequence; the dispatcher's `send`.
        """
        normed, x = self.norm.branch(x)  # [s/cp/tp, b, h]
        mine = self.share.take(normed)  # [n, h]
        tokens = self.share.tokens(x.shape, batch)
        logits = self.router.logits(self._jittered(mine, tokens), defer)  # [n, E]
        forced = by_turns(tokens.turns, self.config) if self.moe.force_balanced else None
        experts, weights = self.router(logits, forced)  # [n, k]
        if tokens.real is not None:
            experts = experts.masked_fill(~tokens.real[:, None], self.config.num_experts)
            weights = tokens.masked(weights)
        taken, weights, dropped = self.limit_capacity(experts, weights, tokens)  # all_gather cp_tp, if limited
        self.balancer.observe(self.layer, logits, experts, dropped, tokens)
        weights = self.balancer.attach(weights, self.layer, logits, experts, tokens)
        all_sent = tokens.real is None and self.moe.capacity_factor is None
        # [n, h] -> [n·k, h], [n, k] -> [n·k] under way  2× all_to_all ep
        ticket, weights, trip = self.dispatcher.send(mine, taken, weights, all_sent)
        shared = normed if self.config.shared_ffn_hidden_size else None
        return x, ticket, weights, shared, trip, self.parts.source("permute", mine)

    def _jittered(self, x: Tensor, tokens: Tokens) -> Tensor:
        if self.jitter is None or tokens.samples is None:
            return x
        position = tokens.order // tokens.num_sequences
        return self.jitter(x, f"layers.{self.layer}.router", tokens.samples[tokens.sequence], position)

    def limit_capacity(self, experts: Tensor, weights: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        """Drops choices beyond the experts' capacity: their expert becomes none, their weight 0; and counts them."""
        if self.moe.capacity_factor is None:
            return experts, weights, None
        num_experts = self.config.num_experts
        keep = within_capacity(
            experts, weights, tokens.order, num_experts, self.moe.capacity_factor, self.moe.drop_by, self.cp_tp
        )
        dropped = (~keep & (experts < num_experts)).sum()
        return experts.masked_fill(~keep, num_experts), weights * keep.to(weights.dtype), dropped


class MoeExperts(nn.Module):
    """Phase: State -> State, the experts' outputs under way home.

    Args:
        config: the architecture.
        layer: global index of the block.
        mesh: `ep`, `etp`, `tp`.
        sp: tokens are cut along the sequence.
        parts: `experts`, `mlp` (the shared expert) and `activation` may be recomputed.
        factory: dtype and device of the parameters.
    """

    kind = "experts"

    def __init__(
        self, config: ModelConfig, layer: int, mesh: Mesh, *, sp: bool, parts: RecomputedParts = KEEP_ALL, **factory
    ) -> None:
        super().__init__()
        factory = {"parts": parts, **factory}
        self.experts = Experts(config, f"layers.{layer}.experts", mesh["ep"], mesh["etp"], **factory)
        self.shared = None
        if config.shared_ffn_hidden_size:
            name, inner_size = f"layers.{layer}.shared_expert", config.shared_ffn_hidden_size
            self.shared = FeedForward(config, inner_size, name, mesh["tp"], sp=sp, **factory)

    def forward(self, state: State, batch: MicroBatch, defer: Defer) -> State:
        """State -> State: waits for r rows `[r, h]` of this rank's experts, and starts their way home."""
        x, ticket, weights, normed, trip, tokens = state
        assert weights is not None
        shared = None
        if self.shared is not None and normed is not None:
            shared = self.shared.project_up(normed, defer)  # while the tokens travel
        ticket, weights, trip = trip.enter_node(ticket, weights)
        if self.shared is not None and shared is not None:
            shared = self.shared.project_down(shared, defer)  # while they travel inside the node
        rows, weights, trip = trip.receive(ticket, weights)  # [r, h], [r]
        if tokens is not None:
            computed_from(tokens, trip.again, rows)  # all_to_all ep and all_gather etp once more
        y = self.experts(rows, weights, trip.offsets, defer)  # [r, h], partial over etp
        return x, trip.send_back(y), None, shared, trip, None


class MoeCombine(nn.Module):
    """Phase: State -> hidden states `[s/cp/tp, b, h]`.

    Args:
        share: of the same layer.
    """

    kind = "combine"

    def __init__(self, share: TokenShare) -> None:
        super().__init__()
        self.share = share

    def forward(self, state: State, batch: MicroBatch, defer: Defer) -> Tensor:
        """State -> `[s/cp/tp, b, h]` (without sp `[s/cp, b, h]`).

        Comm: without sp all_gather tp of n·h elements / none; the trip's `combine`.
        """
        x, ticket, _, shared, trip, _ = state
        y = self.share.restore(trip.combine(ticket), x)  # [n, h] -> [s/cp/tp, b, h]
        return x + y if shared is None else x + (y + shared)

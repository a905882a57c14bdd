"""Tokens to their experts across nodes: once to each node that holds some of their experts, then on inside the node.

Expert ranks lie on nodes of ep_inner: ep = ep_outer × ep_inner. Rank i of a node talks to rank i of the others:

    there   for each token a row per node it needs, with its weights and its experts there        all_to_all ep_outer
            then inside the node as if that were the whole world (dispatch.py)                     ep_inner, etp
            (`go_on` starts this half, so that other work can run during each half of the way)
    back    weighted and summed inside the node, one row for each that came                        all_to_all ep_outer

If token t needs m_t nodes, a rank sends Σ m_t·h elements to other nodes for dispatch, receives as many for combine, and
the same again backward. The direct way sends k·n·h. Group-limited routing bounds m_t by top_groups, if a group is a
node. Beside each row go k weights and k expert ids.
Source: DeepSeek-V3 (arXiv:2412.19437), section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.moe import Places, permute, places
from megatron5d.comm.all_to_all import start_all_to_all
from megatron5d.comm.collectives import Pending, start_all_gather
from megatron5d.comm.exchange import Codec, Exchange
from megatron5d.expert_parallel.dispatch import DirectTrip, Dispatcher, weighted_sum
from megatron5d.topology.axis import Axis


@dataclass(frozen=True)
class NodeTrip:
    """Where the rows of one micro-batch go, as Trip.

    Args:
        home: the row of each token for each node; choices that need no row of their own come last.
        sent: bool `[n, k]`, the choices that have a row of their own: the first for each node.
        there, back: of hidden states over ep_outer.
        weights: of the weights, there.
        experts: int64 `[rows, k]`, under way: each row's experts among those of its node.
        inside: sends rows on inside the node.
        inner: the trip inside the node, once rows have arrived.
    """

    home: Places
    sent: Tensor
    there: Exchange
    back: Exchange
    weights: Exchange
    experts: Pending
    inside: Dispatcher
    inner: DirectTrip | None = None

    @property
    def offsets(self) -> Tensor:
        """As in Trip."""
        assert self.inner is not None
        return self.inner.offsets

    def go_on(self, ticket: Tensor) -> tuple[Tensor, NodeTrip]:
        """Waits for the rows of this node and starts their way inside it. Comm: that of the inner send."""
        rows, experts = self.there.finish(ticket), self.experts.wait()
        inside, _, inner = self.inside.send(rows, experts, rows[:, :0])
        return inside, replace(self, inner=inner)

    def receive(self, ticket: Tensor) -> tuple[Tensor, NodeTrip]:
        """As in Trip, after `go_on`. Comm: that of the inner receive."""
        assert self.inner is not None
        rows, inner = self.inner.receive(ticket)
        return rows, replace(self, inner=inner)

    def send_back(self, y: Tensor, weights: Tensor) -> Tensor:
        """As in Trip: weighted and added up inside the node, then one row for each that came."""
        assert self.inner is not None
        paid = self.weights.finish(weights)
        inside = self.inner.send_back(y, paid)
        return self.back.start(self.inner.combine(inside, paid))

    def combine(self, ticket: Tensor, weights: Tensor) -> Tensor:
        """As in Trip; the rows are weighted already."""
        rows = self.back.finish(ticket)
        return weighted_sum(rows, self.sent.to(rows.dtype), self.home)


class NodeDispatcher:
    """As Dispatcher, over nodes and then inside them.

    Args:
        num_experts: of the layer.
        ep_outer: ranks at the same place in every node.
        ep_inner, etp: axes inside a node; `ep_inner_etp` both as one line.
        codec: how rows are encoded on their way to the experts; None = as they are.
    """

    def __init__(
        self, num_experts: int, ep_outer: Axis, ep_inner: Axis, etp: Axis, ep_inner_etp: Axis,
        codec: Codec | None = None,
    ) -> None:  # fmt: skip
        self.num_experts, self.ep_outer, self.codec = num_experts, ep_outer, codec
        self.per_node = ep_outer.divide(num_experts, "model.num_experts")
        self.inner = Dispatcher(self.per_node, ep_inner, etp, ep_inner_etp, codec)

    def plan_load(self, load: float, limit: float) -> None:
        """As in TokenDispatcher, of the ranks of a node."""
        self.inner.plan_load(load, limit)

    def send(self, x: Tensor, experts: Tensor, weights: Tensor, every: bool = False) -> tuple[Tensor, Tensor, NodeTrip]:
        """As in TokenDispatcher; what stands for the weights is the ticket of theirs.

        Comm: all_gather ep_outer of as many counts as nodes; all_to_all ep_outer of rows, weights and expert ids.
        """
        nodes, k = self.ep_outer.size, experts.shape[1]
        node = experts // self.per_node  # [n, k]; `nodes` where there is no choice
        earlier = torch.ones(k, k, dtype=torch.bool, device=x.device).tril(-1)
        repeated = ((node[:, :, None] == node[:, None, :]) & earlier).any(-1)
        once = node.masked_fill(repeated, nodes)
        home = places(once, nodes)
        lengths = home.offsets.diff()
        counting = start_all_gather(lengths[None], self.ep_outer)  # [1, nodes] -> [nodes, nodes]
        rows = permute(x, home)
        table = self._planned_counts(*experts.shape) if lengths.is_meta else counting.wait().cpu()
        send, receive = table[self.ep_outer.rank].tolist(), table[:, self.ep_outer.rank].tolist()
        count = sum(send)
        target = torch.repeat_interleave(torch.arange(nodes, device=x.device), lengths, output_size=count)
        wanted = experts[home.token[:count]]  # [rows, k]
        here = wanted // self.per_node == target[:, None]
        local = torch.where(here, wanted - target[:, None] * self.per_node, self.per_node)
        trip = NodeTrip(
            home,
            once < nodes,
            Exchange(self.ep_outer, send, receive, self.codec),
            Exchange(self.ep_outer, receive, send),
            Exchange(self.ep_outer, send, receive),
            start_all_to_all(local, self.ep_outer, send, receive),
            self.inner,
        )
        paid = permute(weights, home)[:count] * here.to(weights.dtype)
        return trip.there.start(rows[:count]), trip.weights.start(paid), trip

    def _planned_counts(self, num_tokens: int, k: int) -> Tensor:
        """int64 `[nodes, nodes]` of tokens that have no values (meta): each needs as many nodes as it can.

        A row then has k choices of which those of other nodes are not sent on.
        """
        nodes = self.ep_outer.size
        self.inner.planned_sent = 1 / min(k, nodes)
        return torch.full((nodes, nodes), num_tokens * min(k, nodes) // nodes)

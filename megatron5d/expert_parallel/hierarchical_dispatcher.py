"""Tokens to their experts across nodes: once to each node that holds some of their experts, then on
inside the node.

Expert ranks lie on nodes of ep_inner: ep = ep_outer × ep_inner. Rank i of a node talks to rank i of the others:

    there   for each token a row per node it needs, with its weights and its experts there        all_to_all ep_outer
            then inside the node as if that were the whole world (dispatcher.py)                     ep_inner, etp
            (`enter_node` starts this half, so that other work can run during each half of the way)
    back    summed inside the node, one row for each that came                                     all_to_all ep_outer

If token t needs m_t nodes, a rank sends Σ m_t·h elements to other nodes for dispatch, receives as
many for combine, and the same again backward. The direct way sends k·n·h. Group-limited routing
bounds m_t by top_groups, if a group is a node. Beside each row go k weights and k expert ids.
Source: DeepSeek-V3 (arXiv:2412.19437), section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron5d.comm.all_to_all import Codec, Exchange, start_all_to_all
from megatron5d.comm.collectives import Pending, start_all_gather
from megatron5d.expert_parallel.dispatcher import DirectDispatch, Dispatcher
from megatron5d.kernels.moe import Permutation, permutation, permute, unpermute
from megatron5d.topology.axis import Axis


@dataclass(frozen=True)
class NodeDispatch:
    """Where the rows of one micro-batch go, as DirectDispatch.

    Args:
        sent_order: the row of each token for each node; choices that need no row of their own come
            last.
        dispatching, combining: of hidden states over ep_outer, to the nodes and back.
        weights: of the router's weights over ep_outer, to the nodes.
        experts: int64 `[rows, k]`, under way: each row's experts among those of its node.
        node_dispatcher: sends rows on inside the node.
        node_dispatch: the state inside the node, once rows have arrived.
    """

    sent_order: Permutation
    dispatching: Exchange
    combining: Exchange
    weights: Exchange
    experts: Pending
    node_dispatcher: Dispatcher
    node_dispatch: DirectDispatch | None = None

    @property
    def offsets(self) -> Tensor:
        """As in DirectDispatch."""
        assert self.node_dispatch is not None
        return self.node_dispatch.offsets

    def enter_node(self, handle: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, NodeDispatch]:
        """Waits for the rows of this node and starts their way inside it. Comm: that of the inner
        dispatch."""
        # [m, h], [m, k]: rows for this node
        rows, experts = self.dispatching.finish(handle), self.experts.wait()
        row_weights = self.weights.finish(weights)  # [m, k]
        # under way  2× all_to_all ep_inner
        handle, weights, node_dispatch = self.node_dispatcher.dispatch(rows, experts, row_weights)
        return handle, weights, replace(self, node_dispatch=node_dispatch)

    def receive(self, handle: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, NodeDispatch]:
        """Receives as DirectDispatch does, after `enter_node`. Comm: that of the inner receive."""
        assert self.node_dispatch is not None
        # [r, h], [r]
        rows, row_weights, node_dispatch = self.node_dispatch.receive(handle, weights)
        return rows, row_weights, replace(self, node_dispatch=node_dispatch)

    def redispatch(self, x: Tensor) -> Tensor:
        """Dispatches again, over nodes, then inside them. Comm: all_to_all ep_outer, and the inner
        `redispatch`."""
        assert self.node_dispatch is not None
        # [n, h] -> [rows, h] sorted by node
        rows = permute(x, self.sent_order)[: sum(self.dispatching.send)]
        return self.node_dispatch.redispatch(self.dispatching.repeat(rows))

    def start_combine(self, y: Tensor) -> Tensor:
        """Adds up outputs inside the node, then sends one row for each that came."""
        assert self.node_dispatch is not None
        handle = self.node_dispatch.start_combine(y)  # [r, h] under way  all_to_all ep_inner
        rows = self.node_dispatch.combine(handle)  # [m, h]: one for each row that came to this node
        return self.combining.start(rows)  # under way  all_to_all ep_outer

    def combine(self, handle: Tensor) -> Tensor:
        """Combines as DirectDispatch does; choices without a row of their own count as zeros."""
        return unpermute(self.combining.finish(handle), self.sent_order)


class HierarchicalDispatcher:
    """As Dispatcher, over nodes and then inside them.

    Args:
        num_experts: of the layer.
        ep_outer: ranks at the same place in every node.
        ep_inner, etp: axes inside a node; `ep_inner_etp` both as one axis.
        codec: how rows are encoded on their way to the experts; None = as they are.
    """

    def __init__(
        self,
        num_experts: int,
        ep_outer: Axis,
        ep_inner: Axis,
        etp: Axis,
        ep_inner_etp: Axis,
        codec: Codec | None = None,
    ) -> None:
        self.num_experts, self.ep_outer, self.codec = num_experts, ep_outer, codec
        self.per_node = ep_outer.divide(num_experts, "model.num_experts")
        self.node_dispatcher = Dispatcher(self.per_node, ep_inner, etp, ep_inner_etp, codec)
        self.planned = self.node_dispatcher.planned

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, NodeDispatch]:
        """Dispatches as Dispatcher does.

        Comm: all_gather ep_outer of as many counts as nodes; all_to_all ep_outer of rows, weights
            and expert ids.
        """
        nodes, k = self.ep_outer.size, experts.shape[1]
        node = experts // self.per_node  # [n, k]; `nodes` where there is no choice
        earlier = torch.ones(k, k, dtype=torch.bool, device=x.device).tril(-1)
        # an earlier choice is on the same node
        repeated = ((node[:, :, None] == node[:, None, :]) & earlier).any(-1)
        # [n, k]; each node of a token once, `nodes` for the rest
        once = node.masked_fill(repeated, nodes)
        sent_order = permutation(once, nodes)
        lengths = sent_order.offsets.diff().long()
        # [1, nodes] -> [nodes, nodes]  all_gather ep_outer
        counting = start_all_gather(lengths[None], self.ep_outer)
        rows = permute(x, sent_order)  # [n, h] -> [n·k, h] sorted by node, while the counts travel
        table = self._planned_counts(*experts.shape) if lengths.is_meta else counting.wait().cpu()
        send, receive = table[self.ep_outer.rank].tolist(), table[:, self.ep_outer.rank].tolist()
        count = sum(send)  # rows that are sent; the others have no node of their own and come last
        # [rows]
        target = torch.repeat_interleave(
            torch.arange(nodes, device=x.device), lengths, output_size=count
        )
        wanted = experts[
            sent_order.token_of_row[:count]
        ]  # [rows, k]: all choices of the row's token
        # [rows, k]: those on the node that the row goes to
        here = wanted // self.per_node == target[:, None]
        local = torch.where(here, wanted - target[:, None] * self.per_node, self.per_node)
        state = NodeDispatch(
            sent_order,
            Exchange(self.ep_outer, send, receive, self.codec),
            Exchange(self.ep_outer, receive, send),
            Exchange(self.ep_outer, send, receive),
            start_all_to_all(local, self.ep_outer, send, receive),  # [rows, k]  all_to_all ep_outer
            self.node_dispatcher,
        )
        row_weights = permute(weights, sent_order)[:count]  # [rows, k], those of other nodes unused
        # [rows, h] and [rows, k] under way  2× all_to_all ep_outer
        return state.dispatching.start(rows[:count]), state.weights.start(row_weights), state

    def _planned_counts(self, num_tokens: int, k: int) -> Tensor:
        """Returns int64 `[nodes, nodes]` of tokens that have no values (meta): each needs as many
        nodes as it can.

        A row then has k choices of which those of other nodes are not sent on.
        """
        nodes = self.ep_outer.size
        self.planned.sent = 1 / min(k, nodes)
        return torch.full((nodes, nodes), num_tokens * min(k, nodes) // nodes)

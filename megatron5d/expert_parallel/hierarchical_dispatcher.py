"""Sends tokens to their experts across nodes: once to each node that holds some of their experts,
then on inside the node.

Expert ranks are on nodes of ep_inner: ep = ep_outer × ep_inner. Rank i of a node exchanges rows
with rank i of the other nodes:

    to nodes      for each token a row per node that it needs, with its weights and its experts
                  there: all_to_all ep_outer
    enter_node    inside the node, as in dispatcher.py: ep_inner, etp; a separate phase, so that
                  other work overlaps with each half
    back          outputs summed inside the node, one row per received row: all_to_all ep_outer

If token t needs m_t nodes, a rank sends Σ m_t·h elements to other nodes for dispatch, receives as
many for combine, and the same again in the backward. A direct dispatch sends k·n·h. Group-limited
routing bounds m_t by top_groups, if a group is a node. With each row go k weights and k expert ids.
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
    """The way of one micro-batch's rows, as DirectDispatch.

    Args:
        sent_order: the rows of this rank's tokens, sorted by node; choices without a row of their
            own come last.
        rows, weights: the all-to-alls over ep_outer to the nodes, of rows and of their weights.
        outputs: the all-to-all back.
        experts: int64 `[rows, k]`, in flight: each row's experts among those of its node.
        node_dispatcher: sends rows on inside the node.
        node_dispatch: the state inside the node, after `enter_node`.
    """

    sent_order: Permutation
    rows: Exchange
    weights: Exchange
    outputs: Exchange
    experts: Pending
    node_dispatcher: Dispatcher
    node_dispatch: DirectDispatch | None = None

    @property
    def _inside(self) -> DirectDispatch:
        assert self.node_dispatch is not None, "call enter_node first"
        return self.node_dispatch

    @property
    def offsets(self) -> Tensor:
        """As in DirectDispatch."""
        return self._inside.offsets

    def enter_node(self, handle: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, NodeDispatch]:
        """Waits for the rows of this node and starts sending them on inside it.

        Comm: that of the inner `dispatch`.
        """
        # [m, h], [m, k]: rows for this node
        rows, experts = self.rows.finish(handle), self.experts.wait()
        row_weights = self.weights.finish(weights)  # [m, k]
        # in flight  2× all_to_all ep_inner
        handle, weights, node_dispatch = self.node_dispatcher.dispatch(rows, experts, row_weights)
        return handle, weights, replace(self, node_dispatch=node_dispatch)

    def receive(self, handle: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, NodeDispatch]:
        """Waits for rows and weights, as DirectDispatch.

        Comm: that of the inner `receive`.
        """
        # [r, h], [r]
        rows, row_weights, node_dispatch = self._inside.receive(handle, weights)
        return rows, row_weights, replace(self, node_dispatch=node_dispatch)

    def redispatch(self, x: Tensor) -> Tensor:
        """Dispatches again, to nodes and inside them.

        Comm: all_to_all ep_outer, and that of the inner `redispatch`.
        """
        # [n, h] -> [rows, h] sorted by node
        rows = permute(x, self.sent_order)[: sum(self.rows.send)]
        return self._inside.redispatch(self.rows.repeat(rows))

    def start_combine(self, y: Tensor) -> Tensor:
        """Sums outputs inside the node, then starts sending one row back for each received row.

        Comm: that of the inner dispatch's `start_combine` and `combine`; all_to_all ep_outer.
        """
        handle = self._inside.start_combine(y)  # [r, h] in flight  all_to_all ep_inner
        rows = self._inside.combine(handle)  # [m, h]: one for each row that this node received
        return self.outputs.start(rows)  # in flight  all_to_all ep_outer

    def combine(self, handle: Tensor) -> Tensor:
        """Combines as DirectDispatch; choices without a row add zeros.

        Comm: none / all_to_all ep_outer.
        """
        return unpermute(self.outputs.finish(handle), self.sent_order)


class HierarchicalDispatcher:
    """Sends tokens to nodes, and inside them to the experts; as Dispatcher.

    Args:
        num_experts: of the layer.
        ep_outer: ranks with the same index in every node.
        ep_inner, etp: axes inside a node.
        ep_inner_etp: both as one axis.
        codec: of rows sent to the experts; None = their dtype.
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
        self.assumed_load = self.node_dispatcher.assumed_load

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, NodeDispatch]:
        """Starts sending tokens to nodes; arguments and results as in Dispatcher.

        Comm: all_gather ep_outer of a count per node; all_to_all ep_outer of rows, weights and
            expert ids.
        """
        # One row per token and node: only the first of its choices on a node gets it.
        nodes, k = self.ep_outer.size, experts.shape[1]
        node = experts // self.per_node  # [n, k]; `nodes` for no choice
        earlier = torch.ones(k, k, dtype=torch.bool, device=x.device).tril(-1)
        is_repeated = ((node[:, :, None] == node[:, None, :]) & earlier).any(-1)
        sent_order = permutation(node.masked_fill(is_repeated, nodes), nodes)
        lengths = sent_order.offsets.diff().long()
        # [1, nodes] -> [nodes, nodes]  all_gather ep_outer
        counting = start_all_gather(lengths[None], self.ep_outer)
        rows = permute(x, sent_order)  # [n, h] -> [n·k, h] sorted by node, during the all_gather
        table = self._assumed_counts(*experts.shape) if lengths.is_meta else counting.wait().cpu()
        send, receive = table[self.ep_outer.rank].tolist(), table[:, self.ep_outer.rank].tolist()
        num_sent = sum(send)  # the other rows belong to repeated choices or to none
        local = self._local_experts(experts, sent_order, num_sent)
        state = NodeDispatch(
            sent_order,
            Exchange(self.ep_outer, send, receive, self.codec),
            Exchange(self.ep_outer, send, receive),
            Exchange(self.ep_outer, receive, send),
            start_all_to_all(local, self.ep_outer, send, receive),  # [rows, k]  all_to_all ep_outer
            self.node_dispatcher,
        )
        # [rows, k]; those of experts on other nodes are unused
        row_weights = permute(weights, sent_order)[:num_sent]
        # [rows, h] and [rows, k] in flight  2× all_to_all ep_outer
        return state.rows.start(rows[:num_sent]), state.weights.start(row_weights), state

    def _local_experts(self, experts: Tensor, sent_order: Permutation, num_rows: int) -> Tensor:
        """The experts of every sent row, `[rows, k]`: the choices of its token on the row's node.

        They are numbered from 0 on every node; choices on other nodes are numbered `per_node`.
        """
        lengths = sent_order.offsets.diff().long()
        node_of_row = torch.repeat_interleave(
            torch.arange(len(lengths), device=lengths.device), lengths, output_size=num_rows
        )[:, None]
        choices = experts[sent_order.token_of_row[:num_rows]]  # [rows, k]: all of the row's token
        is_on_node = choices // self.per_node == node_of_row
        return torch.where(is_on_node, choices - node_of_row * self.per_node, self.per_node)

    def _assumed_counts(self, num_tokens: int, k: int) -> Tensor:
        """Rows int64 `[nodes, nodes]` for a forecast: each token needs the largest number of nodes.

        Each row then has k choices, and those on other nodes are not sent on inside the node.
        """
        nodes = self.ep_outer.size
        self.assumed_load.sent_fraction = 1 / min(k, nodes)
        return torch.full((nodes, nodes), num_tokens * min(k, nodes) // nodes)

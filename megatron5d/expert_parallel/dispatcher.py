"""Sends tokens to their experts and back: permute, all-to-all with uneven splits, unpermute.

    phase          forward                                  collectives forward / backward
    dispatch       [n, h] -> [n·k, h] sorted by expert      all_gather ep_etp, all_to_all ep / –
    enter_node     (only for a hierarchical dispatch)
    receive        rows of this rank's experts -> [r, h]    all_gather etp / reduce_scatter etp,
                                                              all_to_all ep
    start_combine  [r, h], partial over etp                 reduce_scatter etp, all_to_all ep /
                                                              all_gather etp
    combine        [n·k, h] -> sum [n, h]                   – / all_to_all ep

The router's weight of each choice is sent with the row, in a second all-to-all of n·k numbers, and
applied by the expert (experts.py). So no combined row is saved for the gradient of the weights.
Each all-to-all starts in one phase of the layer and is waited for in a later one
(comm/all_to_all.py), so that other work runs in between.

Rows are always ordered by expert, then by source rank, then by token, and a token's outputs are
summed in the order of its choices: the same tokens give the same sums, in the same order, on any
layout.

An all-to-all needs its splits on the host. They are counted, for which the host waits for the
device in every `dispatch`: once per layer and micro-batch, and again where a layer is recomputed.
Or they are planned (`SendCapacity`): every rank sends every other one the same number of rows, some
of them empty, and the host does not wait. With ep 1 no rows are empty. Empty rows come last at the
experts and are zeros after their GEMMs. A forecast on the meta device has no values to count and
assumes a load (`AssumedLoad`).

Memory: a rank receives at most n·min(k, E/ep) rows from each of the ep·etp ranks, which happens if
all tokens choose its experts.
Source: GShard, Lepikhin et al. 2020 (arXiv:2006.16668); dropless: MegaBlocks (arXiv:2211.15841).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.comm.all_to_all import Codec, Exchange, gather_rows, reduce_scatter_rows
from megatron5d.comm.collectives import start_all_gather
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.kernels.moe import Permutation, permutation, permute, permute_weighted, unpermute
from megatron5d.topology.axis import Axis


@dataclass
class AssumedLoad:
    """The rows that a rank receives, for forecasts, as multiples of an even share."""

    load: float = 1.0  # rows that it receives
    limit: float = math.inf  # of the rows that it may receive (the experts' capacity)
    sent_fraction: float = 1.0  # of the choices

    def counts(self, num_choices: int, ep: Axis, etp: Axis, num_local: int) -> Tensor:
        """Counts of rows from every rank to every expert, with `load` for this rank.

        No rank receives more than all choices, or than its experts' capacity; the others receive
        less as this one receives more.

        Args:
            num_choices: n·k of one rank.
            ep, etp: axes of the expert view.
            num_local: E/ep.

        Returns:
            int64 `[ep, etp, ep, E/ep]`: source ep, source etp, target ep, its expert.
        """
        choices = num_choices * self.sent_fraction
        sent = round(choices * min(1.0, self.limit))
        limit = min(sent, math.ceil(choices / ep.size * min(self.limit, ep.size)))
        local = min(limit, round(choices / ep.size * self.load))
        other = min(limit, (sent - local) // max(1, ep.size - 1))
        rows = [local if rank == ep.rank else other for rank in range(ep.size)]
        next_rank = (ep.rank + 1) % ep.size  # receives the remainder
        rows[next_rank] += min(sent - sum(rows), limit - rows[next_rank])
        split = torch.tensor(
            [[n // num_local + (e < n % num_local) for e in range(num_local)] for n in rows]
        )
        return split.expand(ep.size, etp.size, ep.size, num_local)


class SendCapacity:
    """Rows that a rank sends to every other, planned instead of counted (moe.exchange=planned).

    A step in which a rank has more rows to send is run again with counted rows. So are the
    following steps; their number doubles each time that this recurs soon, so that a router that
    stays uneven costs little.

    Args:
        imbalance: capacity of a pair of ranks, as a multiple of an even share.
        device: of the count of exceeded pairs.
    """

    MAX_COUNTED_STEPS = 64

    def __init__(self, imbalance: float, device: torch.device | str) -> None:
        self.imbalance, self.is_planned = imbalance, False
        # pairs of ranks with more rows than capacity, in this step
        self.exceeded = torch.zeros(1, dtype=torch.float64, device=device)
        self._counted_steps = self._last_counted_steps = 0

    def start_step(self) -> None:
        """Plans the step's rows, unless they must be counted."""
        self.is_planned = self._counted_steps == 0
        self._counted_steps = max(0, self._counted_steps - 1)

    def finish_step(self, exceeded: float) -> bool:
        """Whether the step must be run again with counted rows.

        Args:
            exceeded: the sum of `self.exceeded` over all ranks.
        """
        was_planned, self.is_planned = self.is_planned, False
        self.exceeded.zero_()
        if exceeded:
            steps = min(2 * self._last_counted_steps or 1, self.MAX_COUNTED_STEPS)
            self._counted_steps = self._last_counted_steps = steps
        elif was_planned:
            self._last_counted_steps = 0
        return exceeded > 0

    def rows_per_pair(self, num_choices: int, ep: Axis) -> int | None:
        """Rows that a rank with `num_choices` sends to every other; None = the counted number."""
        if not self.is_planned:
            return None
        return min(num_choices, math.ceil(num_choices / ep.size * self.imbalance))


@dataclass(frozen=True)
class DirectDispatch:
    """The way of one micro-batch's rows to the experts and back.

    Args:
        etp: axis of the ranks that share experts.
        sent_order: the choices of this rank's tokens, sorted by expert.
        num_sent: rows that are sent; the others, dropped or padding, come last in `sent_order`.
        rows, weights: the all-to-alls over ep to the experts, of rows and of their weights.
        outputs: the all-to-all back.
        rows_by_etp: number of rows that each etp rank receives for the experts that they share.
        received_order: the rows that arrive, sorted by expert; None = they arrive sorted.
    """

    etp: Axis
    sent_order: Permutation
    num_sent: int
    rows: Exchange
    weights: Exchange
    outputs: Exchange
    rows_by_etp: list[int]
    received_order: Permutation | None

    @property
    def offsets(self) -> Tensor:
        """int32 `[E/ep + 1]`: where the received rows of each local expert begin and end."""
        return (self.received_order or self.sent_order).offsets

    def enter_node(self, handle: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, DirectDispatch]:
        """Passes its arguments on: only a hierarchical dispatch has a second half."""
        return handle, weights, self

    def receive(self, handle: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, DirectDispatch]:
        """Waits for the rows of this rank's experts and their weights.

        Args:
            handle, weights: from `enter_node`.

        Returns:
            `[r, h]` sorted by expert (`offsets`), `[r]`, and the new state.

        Comm: all_gather etp / reduce_scatter etp, all_to_all ep, of rows and of weights.
        """
        rows = self._sort_by_expert(self.rows.finish(handle))
        return rows, self._sort_by_expert(self.weights.finish(weights)), self

    def redispatch(self, x: Tensor) -> Tensor:
        """Dispatches x `[n, h]` again, without a gradient: the rows `[r, h]` of `receive`.

        Comm: all_to_all ep, all_gather etp.
        """
        rows = permute(x, self.sent_order)[: self.num_sent]  # [n, h] -> [n·k, h] sorted by expert
        return self._sort_by_expert(self.rows.repeat(rows))

    def _sort_by_expert(self, rows: Tensor) -> Tensor:
        """Gathers arrived rows over etp and sorts them by expert, `[r, ...]`.

        Comm: all_gather etp / reduce_scatter etp.
        """
        rows = gather_rows(rows, self.etp, self.rows_by_etp)  # -> [r, ...]  all_gather etp
        if self.received_order is None:
            return rows
        arrival, sorted_row = self._reordering(self.received_order)
        return _Reorder.apply(rows, arrival, sorted_row)

    @staticmethod
    def _reordering(order: Permutation) -> tuple[Tensor, Tensor]:
        """The arrived row of each sorted row, and the inverse."""
        return order.token_of_row, order.row_of_choice.flatten()

    def start_combine(self, y: Tensor) -> Tensor:
        """Starts sending back outputs y `[r, h]`, weighted and partial over etp.

        Returns:
            The handle for `combine`.

        Comm: reduce_scatter etp, all_to_all ep / all_gather etp.
        """
        if self.received_order is not None:
            arrival, sorted_row = self._reordering(self.received_order)
            y = _Reorder.apply(y, sorted_row, arrival)  # [r, h] in the order of arrival
        # -> this etp rank's rows  reduce_scatter etp
        local_rows = reduce_scatter_rows(y, self.etp, self.rows_by_etp)
        return self.outputs.start(local_rows)  # in flight  all_to_all ep

    def combine(self, handle: Tensor) -> Tensor:
        """Waits for the outputs and sums those of each token, `[n, h]`; unsent choices add zeros.

        Comm: none / all_to_all ep.
        """
        return unpermute(self.outputs.finish(handle), self.sent_order)


class Dispatcher:
    """Sends tokens directly to the experts of one layer.

    Args:
        num_experts: of the layer.
        ep, etp: axes of the expert view.
        ep_etp: both as one axis, etp fastest.
        codec: of rows sent to the experts (moe.fp8_dispatch); None = their dtype.
        capacity: of the rows for each rank; None = rows are counted.
    """

    def __init__(
        self,
        num_experts: int,
        ep: Axis,
        etp: Axis,
        ep_etp: Axis,
        codec: Codec | None = None,
        capacity: SendCapacity | None = None,
    ) -> None:
        self.codec, self.capacity = codec, capacity
        self.num_experts, self.ep, self.etp, self.ep_etp = num_experts, ep, etp, ep_etp
        self.num_local = ep.divide(num_experts, "model.num_experts")
        self.assumed_load = AssumedLoad()  # for forecasts
        # On one rank exchanges pass rows through and keep no state, so all dispatches share one.
        self._identity = Exchange(ep, [], [])

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, DirectDispatch]:
        """Starts sending tokens to their experts.

        Args:
            x: `[n, h]`.
            experts: int64 `[n, k]`; `num_experts` for a choice that is not sent.
            weights: `[n, k]`.

        Returns:
            The handles of the rows and of their weights for `enter_node`, and the state.

        Comm: all_gather ep_etp of E counts; all_to_all ep of the rows, and of the weights, for
            other ranks.
        """
        order, num_choices = permutation(experts, self.num_experts), experts.numel()
        capacity = self._rows_per_pair(num_choices)
        if self.ep_etp.size == 1:  # no counts of other ranks, and rows are sorted already
            splits = [num_choices]
            state = self._make_state(order, splits, splits, splits, None)
            rows, by_row = permute_weighted(x, weights, order)
        else:
            # [1, E] -> [ep·etp, E]  all_gather ep_etp
            counting = start_all_gather(order.offsets.diff()[None].long(), self.ep_etp)
            if capacity is not None and self.ep.size > 1:
                ends = order.offsets[:: self.num_local].contiguous()
                order = limit_rows(order, experts // self.num_local, ends, capacity)
            # [n, h] -> [n·k, h] sorted by expert, [n, k] -> [n·k], while the counts are gathered
            rows, by_row = permute_weighted(x, weights, order)
            counts = counting.wait()
            if capacity is None:
                state = self._counted_state(order, counts)
            else:
                state = self._planned_state(order, counts, capacity)
            rows, by_row = rows[: state.num_sent], by_row[: state.num_sent]
        # [n·k, h] and [n·k] in flight  2× all_to_all ep
        return state.rows.start(rows), state.weights.start(by_row), state

    def _rows_per_pair(self, num_choices: int) -> int | None:
        """Rows that this rank sends to every other; None = the counted number."""
        if self.ep.size == 1:
            return num_choices
        return None if self.capacity is None else self.capacity.rows_per_pair(num_choices, self.ep)

    def _make_state(
        self,
        order: Permutation,
        send: list[int],
        receive: list[int],
        rows_by_etp: list[int],
        received_order: Permutation | None,
    ) -> DirectDispatch:
        rows = weights = outputs = self._identity
        if self.ep.size > 1 or self.codec is not None:
            rows = Exchange(self.ep, send, receive, self.codec)
            weights = Exchange(self.ep, send, receive)
            outputs = Exchange(self.ep, receive, send)
        return DirectDispatch(
            self.etp, order, sum(send), rows, weights, outputs, rows_by_etp, received_order
        )

    def _planned_state(self, order: Permutation, counts: Tensor, capacity: int) -> DirectDispatch:
        """Computes on the device which expert each arriving row is for, and exceeded capacities.

        Args:
            order: of this rank's choices, with `capacity` rows for each ep rank.
            counts: int64 `[ep·etp, E]`.
            capacity: rows from every rank to every other one.
        """
        ep, etp, num_local = self.ep, self.etp, self.num_local
        # source ep, source etp, target ep, its expert
        by_rank = counts.view(ep.size, etp.size, ep.size, num_local)
        if ep.size > 1 and self.capacity is not None:
            self.capacity.exceeded += (by_rank.sum(-1) > capacity).sum()
        # [etp·ep, E/ep], in the order of arrival
        ends = by_rank[:, :, ep.rank].transpose(0, 1).flatten(0, 1).cumsum(-1)
        row = torch.arange(capacity, device=counts.device).expand(len(ends), capacity)
        # [etp·ep, capacity]: the local expert of each row; E/ep for an empty row
        expert = torch.searchsorted(ends, row.contiguous(), right=True)
        received_order, splits = permutation(expert.view(-1, 1), num_local), [capacity] * ep.size
        rows_by_etp = [capacity * ep.size] * etp.size
        return self._make_state(order, splits, splits, rows_by_etp, received_order)

    def _counted_state(self, order: Permutation, counts: Tensor) -> DirectDispatch:
        """Computes all splits from all ranks' counts.

        Args:
            counts: int64 `[ep·etp, E]`.
        """
        ep, etp, num_local = self.ep, self.etp, self.num_local
        # source ep, source etp, target ep, its expert
        by_rank = counts.view(ep.size, etp.size, ep.size, num_local)
        if counts.is_meta:
            table = self.assumed_load.counts(order.token_of_row.numel(), ep, etp, num_local)
        else:
            # The layer's only host synchronization: an all-to-all needs its splits on the host.
            table = by_rank.cpu()
        send = table[ep.rank, etp.rank].sum(-1).tolist()
        receive = table[:, etp.rank, ep.rank].sum(-1).tolist()
        rows_by_etp = table[:, :, ep.rank].sum((0, 2)).tolist()
        # in the order of arrival: source etp, source ep, expert
        lengths = by_rank[:, :, ep.rank].transpose(0, 1).flatten()
        experts = torch.arange(num_local, device=counts.device).repeat(etp.size * ep.size)
        expert = torch.repeat_interleave(experts, lengths, output_size=sum(rows_by_etp))
        received_order = permutation(expert[:, None], num_local)
        return self._make_state(order, send, receive, rows_by_etp, received_order)


def limit_rows(order: Permutation, groups: Tensor, ends: Tensor, capacity: int) -> Permutation:
    """Gives each group of experts a fixed number of rows, so that sizes need no host sync.

    Args:
        order: the choices, sorted by expert.
        groups: `[n, k]`, each choice's group; the number of groups for no choice.
        ends: int32 `[groups + 1]`, where each group's rows begin and end in `order`.
        capacity: rows of a group; choices beyond it get no row.

    Returns:
        The order with rows `[groups·capacity]`; a group's choices come before its empty rows.
    """
    num_groups = len(ends) - 1
    slot = torch.arange(capacity, device=ends.device)
    row = (ends[:-1, None] + slot).flatten().clamp_(max=order.token_of_row.numel() - 1)
    is_filled = slot < ends.diff()[:, None]
    slot_of_choice = order.row_of_choice - ends[groups]
    has_row = (slot_of_choice < capacity) & (groups < num_groups)
    row_of_choice = torch.where(has_row, groups * capacity + slot_of_choice, num_groups * capacity)
    return Permutation(
        row_of_choice,
        order.token_of_row[row],
        order.offsets,
        order.choice_of_row[row],
        is_filled.flatten(),
    )


class _Reorder(FirstOrderFunction):
    """A permutation of rows; its transpose is the inverse permutation."""

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(inverse)
        return x[index]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None

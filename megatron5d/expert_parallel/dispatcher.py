"""Tokens to their experts and back: permute, all-to-all with uneven splits, unpermute.

                   forward                                    collectives forward / backward
    dispatch       [n, h] -> [n·k, h] sorted by expert, sent      all_gather ep_etp of counts, all_to_all ep / –
    enter_node     nothing; hierarchical: on inside the node
    receive        rows of this rank's experts -> [r, h]          all_gather etp / reduce_scatter etp, all_to_all ep
    start_combine  [r, h], partial over etp, sent back            reduce_scatter etp, all_to_all ep / all_gather etp
    combine        [n·k, h] -> sum [n, h]                         – / all_to_all ep

The router's weight of each choice goes to the expert beside the row, a second all-to-all of n·k
numbers, and is applied there (experts.py), so that no combined row is kept for the gradient of the
weights. Each all-to-all starts in one phase of the layer and is waited for in a later one
(comm/all_to_all.py), so that other work runs in between. Rows are always ordered by expert, then by
source rank, then by token, and a token's outputs are summed in the order of its choices: the same
tokens give the same sums, in the same order, on any layout. Splits of an all-to-all must be on the
host. They are counted, for which the host waits for the device in every `dispatch`, once a layer
and micro-batch, and again where a layer is recomputed; or they are planned (`SendCapacity`): every rank
sends every other one as many rows, some of them empty, and nobody waits. With ep 1 there is always
room for all. Empty rows come last at the experts and are zeros after their GEMMs. A forecast on the
meta device has no values to count and assumes a load (`PlannedLoad`). Memory: a rank receives at
most n·min(k, E/ep) rows from each of the ep·etp ranks, namely if all tokens choose its experts.
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
class PlannedLoad:
    """What is assumed of the rows that a rank receives."""

    load: float = 1.0  # rows that it receives, in even shares
    # rows that it may receive at most, in even shares (the experts' capacity)
    limit: float = math.inf
    sent: float = 1.0  # fraction of the choices that is sent at all

    def counts(self, num_choices: int, ep: Axis, etp: Axis, num_local: int) -> Tensor:
        """Counts of rows from every rank to every expert, in which this rank receives `load` times
        an even share.

        No rank receives more than all choices, or than its experts' capacity; the others receive
        less as this one receives more.

        Args:
            num_choices: n·k of one rank.
            ep, etp: axes of the expert view.
            num_local: E/ep.

        Returns:
            int64 `[ep, etp, ep, E/ep]`: source ep, source etp, target ep, its expert.
        """
        choices = num_choices * self.sent
        sent = round(choices * min(1.0, self.limit))
        most = min(sent, math.ceil(choices / ep.size * min(self.limit, ep.size)))
        mine = min(most, round(choices / ep.size * self.load))
        rows = [
            mine if rank == ep.rank else min(most, (sent - mine) // max(1, ep.size - 1))
            for rank in range(ep.size)
        ]
        after = (ep.rank + 1) % ep.size
        rows[after] += min(sent - sum(rows), most - rows[after])
        split = torch.tensor(
            [[n // num_local + (e < n % num_local) for e in range(num_local)] for n in rows]
        )
        return split.expand(ep.size, etp.size, ep.size, num_local)


class SendCapacity:
    """Rows that a rank sends each other one, planned instead of counted (moe.exchange=planned).

    A step in which a rank has more rows to send is run again with counted rows. So are the
    following steps, twice as many each time that it happens again soon: a router that stays uneven
    costs little.

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
        """Rows that a rank with `num_choices` sends each other one; None = as many as counted."""
        if not self.is_planned:
            return None
        return min(num_choices, math.ceil(num_choices / ep.size * self.imbalance))


@dataclass(frozen=True)
class DirectDispatch:
    """Where the rows of one micro-batch go and how they come back.

    Args:
        etp: axis of the ranks that share experts.
        sent_order: for every choice of this rank's tokens, its row among the choices sorted by
            expert.
        num_sent: rows that are sent; the others are dropped or padding and come last in
            `sent_order`.
        dispatching, weights: the all-to-alls over ep to the experts, of rows and of their weights.
        combining: that of rows back.
        from_etp: how many rows each etp rank receives for the experts that they share.
        received_order: for every row that arrives, its place among the rows sorted by expert; and
            the experts' offsets. None: rows arrive sorted.
    """

    etp: Axis
    sent_order: Permutation
    num_sent: int
    dispatching: Exchange
    weights: Exchange
    combining: Exchange
    from_etp: list[int]
    received_order: Permutation | None

    @property
    def offsets(self) -> Tensor:
        """int32 `[E/ep + 1]`, once rows are received: where those of each of this rank's experts
        begin and end."""
        return (self.received_order or self.sent_order).offsets

    def enter_node(self, handle: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, DirectDispatch]:
        """Returns what it is given: the direct way has no second half."""
        return handle, weights, self

    def receive(self, handle: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, DirectDispatch]:
        """Waits for the rows of this rank's experts and their weights.

        Args:
            handle, weights: from `enter_node`.

        Returns:
            `[r, h]` sorted by expert as `offsets` says, `[r]`, and the new state.

        Comm: all_gather etp / reduce_scatter etp, all_to_all ep, of rows and of weights.
        """
        rows = self._by_expert(self.dispatching.finish(handle))
        return rows, self._by_expert(self.weights.finish(weights)), self

    def redispatch(self, x: Tensor) -> Tensor:
        """Dispatches x `[n, h]` once more: the rows `[r, h]` of `receive`, without a gradient.

        Comm: all_to_all ep, all_gather etp.
        """
        rows = permute(x, self.sent_order)[: self.num_sent]  # [n, h] -> [n·k, h] sorted by expert
        return self._by_expert(self.dispatching.repeat(rows))

    def _by_expert(self, rows: Tensor) -> Tensor:
        """Returns `[r, ...]` sorted by expert, from rows as they arrive. Comm: all_gather etp /
        reduce_scatter etp."""
        rows = gather_rows(rows, self.etp, self.from_etp)  # -> [r, ...]  all_gather etp
        if self.received_order is None:
            return rows
        arrival, sorted_place = (
            self.received_order.token_of_row,
            self.received_order.row_of_choice.flatten(),
        )
        return _Reorder.apply(rows, arrival, sorted_place)

    def start_combine(self, y: Tensor) -> Tensor:
        """Starts sending outputs y `[r, h]`, weighted, partial over etp, back; returns the handle
        for `combine`.

        Comm: reduce_scatter etp, all_to_all ep / all_gather etp.
        """
        rows = y
        if self.received_order is not None:
            arrival, sorted_place = (
                self.received_order.token_of_row,
                self.received_order.row_of_choice.flatten(),
            )
            rows = _Reorder.apply(y, sorted_place, arrival)  # [r, h] in the order of arrival
        # -> [from_etp, h]  reduce_scatter etp
        own = reduce_scatter_rows(rows, self.etp, self.from_etp)
        return self.combining.start(own)  # under way  all_to_all ep

    def combine(self, handle: Tensor) -> Tensor:
        """Waits and adds up each token's outputs, `[n, h]`; choices that were not sent count as
        zeros.

        Comm: none / all_to_all ep.
        """
        return unpermute(self.combining.finish(handle), self.sent_order)


class Dispatcher:
    """Sends tokens straight to the experts of one layer.

    Args:
        num_experts: of the layer.
        ep, etp: axes of the expert view.
        ep_etp: both as one axis, etp fastest.
        codec: how rows are encoded on their way to the experts (moe.fp8_dispatch); None = as they
            are.
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
        self.planned = PlannedLoad()  # what forecasts assume instead of counts
        # on one rank they pass rows on, and keep nothing
        self._at_home = [Exchange(ep, [], [])] * 3

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, DirectDispatch]:
        """Starts sending tokens to their experts.

        Args:
            x: `[n, h]`.
            experts: int64 `[n, k]`; `num_experts` where the choice is not sent.
            weights: `[n, k]`.

        Returns:
            The handles of the rows and of their weights for `enter_node`, and the state.

        Comm: all_gather ep_etp of E counts; all_to_all ep of rows, and of weights, that are not for
            this rank.
        """
        order = permutation(experts, self.num_experts)
        room = self._rows_per_pair(experts.numel())
        if self.ep_etp.size == 1:  # nothing to learn from others, and nothing to sort anew
            state = self._exchanges(
                order, [experts.numel()], [experts.numel()], [experts.numel()], None
            )
            rows, by_row = permute_weighted(x, weights, order)
        else:
            # [1, E] -> [ep·etp, E]  all_gather ep_etp
            counting = start_all_gather(order.offsets.diff()[None].long(), self.ep_etp)
            if room is not None and self.ep.size > 1:
                ends = order.offsets[:: self.num_local].contiguous()
                order = slots(order, experts // self.num_local, ends, room)
            # [n, h] -> [n·k, h] sorted by expert, [n, k] -> [n·k], while the counts travel
            rows, by_row = permute_weighted(x, weights, order)
            counts = counting.wait()
            state = (
                self._state(order, counts)
                if room is None
                else self._planned_state(order, counts, room)
            )
            rows, by_row = rows[: state.num_sent], by_row[: state.num_sent]
        # [n·k, h] and [n·k] under way  2× all_to_all ep
        return state.dispatching.start(rows), state.weights.start(by_row), state

    def _rows_per_pair(self, num_choices: int) -> int | None:
        """Rows that this rank sends each other one; None = as many as counted."""
        if self.ep.size == 1:
            return num_choices
        return None if self.capacity is None else self.capacity.rows_per_pair(num_choices, self.ep)

    def _exchanges(
        self,
        order: Permutation,
        send: list[int],
        receive: list[int],
        from_etp: list[int],
        received: Permutation | None,
    ) -> DirectDispatch:
        there, back, weights = self._at_home
        if self.ep.size > 1 or self.codec is not None:
            there, back = (
                Exchange(self.ep, send, receive, self.codec),
                Exchange(self.ep, receive, send),
            )
            weights = Exchange(self.ep, send, receive)
        return DirectDispatch(self.etp, order, sum(send), there, weights, back, from_etp, received)

    def _planned_state(self, order: Permutation, counts: Tensor, room: int) -> DirectDispatch:
        """Computes on the device which of the rows that arrive are whose, and whether some found no
        room.

        Args:
            order: of this rank's choices, `room` rows for each rank of ep.
            counts: int64 `[ep·etp, E]`.
            room: rows from every rank to every other one.
        """
        ep, etp, local = self.ep, self.etp, self.num_local
        # source ep, source etp, target ep, its expert
        by_rank = counts.view(ep.size, etp.size, ep.size, local)
        if ep.size > 1 and self.capacity is not None:
            self.capacity.exceeded += (by_rank.sum(-1) > room).sum()
        # [etp·ep, E/ep], as rows arrive
        ends = by_rank[:, :, ep.rank].transpose(0, 1).flatten(0, 1).cumsum(-1)
        slot = torch.arange(room, device=counts.device).expand(len(ends), room)
        # [etp·ep, room]; E/ep where a row is empty
        arrived = torch.searchsorted(ends, slot.contiguous(), right=True)
        splits = [room] * ep.size
        received = permutation(arrived.view(-1, 1), local)
        return self._exchanges(order, splits, splits, [room * ep.size] * etp.size, received)

    def _state(self, sent_order: Permutation, counts: Tensor) -> DirectDispatch:
        """Computes all splits from all ranks' counts.

        Args:
            counts: int64 `[ep·etp, E]`.
        """
        ep, etp, local = self.ep, self.etp, self.num_local
        # source ep, source etp, target ep, its expert
        by_rank = counts.view(ep.size, etp.size, ep.size, local)
        here = by_rank[:, :, ep.rank]  # [ep, etp, E/ep] rows for this rank's experts
        if counts.is_meta:
            table = self.planned.counts(sent_order.token_of_row.numel(), ep, etp, local)
        else:
            # the layer's only host synchronisation: an all-to-all needs its splits on the host
            table = by_rank.cpu()
        send = table[ep.rank, etp.rank].sum(-1).tolist()
        receive = table[:, etp.rank, ep.rank].sum(-1).tolist()
        from_etp = table[:, :, ep.rank].sum((0, 2)).tolist()
        # in the order of arrival: source etp, source ep, expert
        lengths = here.transpose(0, 1).flatten()
        expert = (
            torch.arange(local, device=counts.device).expand(etp.size, ep.size, local).flatten()
        )
        arrived = torch.repeat_interleave(expert, lengths, output_size=sum(from_etp))
        return self._exchanges(
            sent_order, send, receive, from_etp, permutation(arrived[:, None], local)
        )


def slots(where: Permutation, experts: Tensor, ends: Tensor, room: int) -> Permutation:
    """Gives each group of experts a fixed number of rows, so that nobody need ask how many there
    are.

    Args:
        where: of all choices, sorted by expert.
        experts: `[n, k]`, each choice's group; as many as there are groups where there is none.
        ends: int32 `[groups + 1]`, where each group's rows begin and end in `where`.
        room: rows of a group; those beyond it have no place.

    Returns:
        The same with rows `[groups·room]`, those of a group first among its slots.
    """
    groups = len(ends) - 1
    slot = torch.arange(room, device=ends.device)
    row = (ends[:-1, None] + slot).flatten().clamp_(max=where.token_of_row.numel() - 1)
    live = slot < ends.diff()[:, None]
    turn = where.row_of_choice - ends[experts]
    fits = (turn < room) & (experts < groups)
    place = torch.where(fits, experts * room + turn, groups * room)
    return Permutation(
        place, where.token_of_row[row], where.offsets, where.choice_of_row[row], live.flatten()
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

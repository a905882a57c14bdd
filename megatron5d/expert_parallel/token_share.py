"""The tokens of a micro-batch that one rank routes to experts (`Tokens`), and how it gets them
(`TokenShare`).

With sp each tp rank routes the tokens that it holds. Without sp all tp ranks hold the same tokens:
each routes an equal share of them, and their outputs are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.comm.collectives import gather_replicated, local_slice, scatter_to
from megatron5d.phases.phase import MicroBatch
from megatron5d.topology.axis import Axis

_AFTER_ALL = 1 << 40  # a position after those of any sequence


@dataclass(frozen=True)
class Tokens:
    """The tokens of a micro-batch that one rank routes."""

    sequence: Tensor  # int64 `[n]`, which sequence of the micro-batch each belongs to
    order: Tensor  # int64 `[n]`, index of each in the whole micro-batch
    real: Tensor | None  # bool `[n]`, False for padding; None = all real
    num_sequences: int  # of the micro-batch
    # int64 `[num_sequences]`, in training: their numbers among all of the run
    samples: Tensor | None = None

    @property
    def round_robin_index(self) -> Tensor:
        """int64 `[n]`: position plus sequence number, which no layout changes."""
        samples = self.sequence if self.samples is None else self.samples[self.sequence]
        return self.order // self.num_sequences + samples

    def masked(self, x: Tensor) -> Tensor:
        """`x` `[n, ...]` with zeros for padding."""
        return x if self.real is None else x * self.real.view(-1, *(1,) * (x.ndim - 1)).to(x.dtype)

    def per_sequence(self, x: Tensor) -> Tensor:
        """Sums of `[n, E]` over each sequence's tokens, `[num_sequences, E]`, in one order on any
        device."""
        member = torch.arange(self.num_sequences, device=x.device)[:, None] == self.sequence
        return member.to(x.dtype) @ self.masked(x)


class TokenShare:
    """Takes the tokens that a rank routes from hidden states, and restores their outputs.

    Args:
        tp: ranks that hold the same sequence positions (sp: adjacent shares of them).
        sp: tokens arrive cut along the sequence.
    """

    def __init__(self, tp: Axis, sp: bool) -> None:
        self.tp, self.sp = tp, sp and tp.size > 1
        self._tokens_of_whole = cache(self._tokens_at)
        # (weak reference to the last micro-batch, its shape, its tokens)
        self._last: tuple[Any, ...] = (lambda: None,)

    def take(self, x: Tensor) -> Tensor:
        """Maps `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> `[n, h]`, n = s·b/(cp·tp), without sp
        rounded up.

        Comm: none / without sp all_gather tp.
        """
        flat = x.flatten(0, 1)
        if self.sp or self.tp.size == 1:
            return flat
        return scatter_to(F.pad(flat, (0, 0, 0, -flat.shape[0] % self.tp.size)), self.tp)

    def restore(self, y: Tensor, like: Tensor) -> Tensor:
        """Maps `[n, h]` -> the shape of `like`, from which `take` took them.

        Comm: without sp all_gather tp / none.
        """
        if not self.sp and self.tp.size > 1:
            y = gather_replicated(y, self.tp)[: like.shape[0] * like.shape[1]]
        return y.view(like.shape)

    def tokens(self, shape: torch.Size, batch: MicroBatch) -> Tokens:
        """The tokens that `take` takes from hidden states of a shape; computed once a
        micro-batch."""
        if self._last[0]() is not batch or self._last[1] != shape:
            self._last = ref(batch), shape, self._of_batch(shape, batch)
        return self._last[2]

    def _of_batch(self, shape: torch.Size, batch: MicroBatch) -> Tokens:
        if batch.context is None:
            tokens = self._tokens_of_whole(shape[0], shape[1], batch.tokens.device)
        else:
            tokens = self._tokens_at(
                shape[0], shape[1], batch.tokens.device, batch.context.local_rows
            )
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
        if missing:  # padding to equal shares comes last, after the tokens of all cp ranks
            order = torch.cat((order, _AFTER_ALL * b + torch.arange(missing, device=device)))
        real = (
            torch.arange(order.numel(), device=device) < order.numel() - missing
            if missing
            else None
        )
        order = local_slice(order, self.tp)
        return Tokens(order % b, order, None if real is None else local_slice(real, self.tp), b)

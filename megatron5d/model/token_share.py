"""Which tokens of a micro-batch each rank routes to experts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.comm.collectives import join_from, local_slice, split_to
from megatron5d.expert_parallel.load_balancing import Tokens
from megatron5d.pipeline_parallel.phase import MicroBatch
from megatron5d.topology.axis import Axis


class TokenShare:
    """Which of its tokens a rank routes.

    Args:
        tp: ranks that hold the same sequence positions (sp: neighbouring shares of them).
        sp: tokens arrive cut along the sequence.
    """

    def __init__(self, tp: Axis, sp: bool) -> None:
        self.tp, self.sp = tp, sp and tp.size > 1
        self._tokens_of_whole = cache(self._tokens_at)
        self._last: tuple[Any, ...] = (lambda: None,)  # a batch, which lives no longer for it; its tokens

    def take(self, x: Tensor) -> Tensor:
        """Maps `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> `[n, h]`, n = s·b/(cp·tp), without sp rounded up.

        Comm: none / without sp all_gather tp.
        """
        flat = x.flatten(0, 1)
        if self.sp or self.tp.size == 1:
            return flat
        return split_to(F.pad(flat, (0, 0, 0, -flat.shape[0] % self.tp.size)), self.tp)

    def restore(self, y: Tensor, like: Tensor) -> Tensor:
        """Maps `[n, h]` -> what `take` was given, `like`. Comm: without sp all_gather tp / none."""
        if not self.sp and self.tp.size > 1:
            y = join_from(y, self.tp)[: like.shape[0] * like.shape[1]]
        return y.view(like.shape)

    def tokens(self, shape: torch.Size, batch: MicroBatch) -> Tokens:
        """Returns which tokens those are that `take` takes from hidden states of a shape; worked out once a batch."""
        if self._last[0]() is not batch or self._last[1] != shape:
            self._last = ref(batch), shape, self._of_batch(shape, batch)
        return self._last[2]

    def _of_batch(self, shape: torch.Size, batch: MicroBatch) -> Tokens:
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
        """Returns the tokens at sequence positions `rows`, those of this cp rank; None = all positions."""
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

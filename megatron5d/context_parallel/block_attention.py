"""Attention of local queries to blocks of keys that arrive one by one. The results merge exactly:

    out = Σᵢ exp(lseᵢ - lse)·outᵢ,   lse = log Σᵢ exp(lseᵢ)        (Liu et al. 2023, arXiv:2310.01889)

In the backward the gradients of each block follow from the merged out and lse alone, so blocks may
come in any order.

A block that travels holds keys and values, or something smaller that they are computed from. What
this rank computes for one micro-batch is planned once, on the CPU, for all layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron5d.context_parallel.zigzag import (
    Call,
    Mask,
    SequenceLayout,
    even_layout,
    num_hops,
    plan_calls,
    visible_pairs,
)
from megatron5d.kernels import attention, attention_backward
from megatron5d.kernels.dispatch import statistics_dtype


@dataclass(frozen=True)
class ContextPlan:
    """Made by `Planner`; travels with the micro-batch (`MicroBatch.context`)."""

    layout: SequenceLayout  # which rows of this micro-batch's sequences each rank holds
    outer_rank: int
    calls: list[list[Call]]  # of the attention kernel, for each outer rank's keys
    hops: int  # how many hops around the outer ranks keys must make; the same on all ranks
    visible_pairs: list[int]  # for each outer rank, how many query-key pairs no mask hides
    outer_rows: list[Tensor]  # int64 `[s/outer]` per outer rank: the global rows it holds
    own_rows: Tensor  # int64 `[s/cp]`: the global rows of this rank
    documents: Tensor | None  # int64 `[b, s]` of whole rows, or None
    causal: bool
    window: int | None
    whole: ContextPlan | None = None  # of layers without a window, where others have one

    def of_window(self, window: int | None) -> ContextPlan:
        """Returns the plan of a layer with this window, or without one."""
        return self.whole if self.whole is not None and window is None else self

    def options(self, call: Call, source: int) -> dict[str, Any]:
        """Returns the mask arguments of one call of the attention kernel, to keys of outer rank
        `source`."""
        if not call.masked:
            return {"causal": call.causal}
        q_rows = self.outer_rows[self.outer_rank][slice(*call.queries)]
        k_rows = self.outer_rows[source][slice(*call.keys)]
        options: dict[str, Any] = {"causal": call.causal, "window": self.window}
        if self.window is not None:
            options |= {"q_positions": q_rows, "k_positions": k_rows, "causal": self.causal}
        if self.documents is not None:
            options |= {
                "documents": self.documents[:, q_rows],
                "k_documents": self.documents[:, k_rows],
            }
        return options


class Planner:
    """Makes the plans of all micro-batches of a run.

    Args:
        layout: how the sequence is cut; the documents of a micro-batch decide anew which rank holds
            which chunk.
        rank: this rank's position on the whole cp axis.
        some_whole: some layers have no window (model.window_layers).
        device: where the plans' index tensors will be used.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        rank: int,
        *,
        causal: bool = True,
        window: int | None = None,
        some_whole: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout, self.rank, self.causal, self.window, self.device = (
            layout,
            rank,
            causal,
            window,
            device,
        )
        self.some_whole = some_whole
        self._undivided = self._plan(None)

    def __call__(self, documents: Tensor | None) -> ContextPlan:
        """Plans a micro-batch. `documents` int64 `[b, s]` must be on the CPU: its values say which
        blocks are empty."""
        return self._undivided if documents is None else self._plan(documents)

    def _plan(self, documents: Tensor | None) -> ContextPlan:
        ids = None if documents is None else documents.numpy()
        windowed, unlimited = Mask(self.causal, self.window, ids), Mask(self.causal, None, ids)
        # all layers share it
        layout = even_layout(self.layout, unlimited if self.some_whole else windowed)
        whole = self._of_mask(layout, unlimited, documents, None) if self.some_whole else None
        return self._of_mask(layout, windowed, documents, whole)

    def _of_mask(
        self,
        layout: SequenceLayout,
        mask: Mask,
        documents: Tensor | None,
        whole: ContextPlan | None,
    ) -> ContextPlan:
        outer_rank = self.rank // layout.inner
        return ContextPlan(
            layout,
            outer_rank,
            plan_calls(layout, outer_rank, mask),
            num_hops(layout, mask),
            visible_pairs(layout, mask),
            [
                torch.from_numpy(layout.outer_rows(outer)).to(self.device)
                for outer in range(layout.outer)
            ],
            torch.from_numpy(layout.rows(self.rank)).to(self.device),
            None if documents is None else documents.to(self.device),
            self.causal,
            mask.window,
            whole,
        )


def imbalance(plans: Iterable[ContextPlan]) -> float:
    """Returns how much longer attention takes than if all cp ranks had equally much to do; 1 =
    even.

    The ranks wait for each other in every layer, so the busiest one decides: the sum over
    micro-batches of the busiest rank's query-key pairs, divided by the sum of the mean.
    """
    plans = list(plans)
    busiest = sum(max(plan.visible_pairs) for plan in plans)
    return busiest / sum(sum(plan.visible_pairs) / len(plan.visible_pairs) for plan in plans)


class Merge:
    """What local queries have collected so far: `out` `[s, b, a, dv]` and `lse` `[b, a, s]`, in
    fp32 (fp64 for fp64).

    Args:
        q: `[s, b, a, d]`.
        sinks: `[a]` logits that every query also sees, without a value; counted once, here.
    """

    def __init__(self, q: Tensor, value_dim: int, sinks: Tensor | None = None) -> None:
        s, b, a, _ = q.shape
        wide = statistics_dtype(q.dtype)
        self.out = torch.zeros(s, b, a, value_dim, dtype=wide, device=q.device)
        self.lse = torch.full((b, a, s), float("-inf"), dtype=wide, device=q.device)
        if sinks is not None:
            self.lse = sinks.to(wide).view(1, -1, 1).expand(b, a, s).clone()

    def add(self, queries: tuple[int, int], out: Tensor, lse: Tensor) -> None:
        """Merges the attention of some queries over further keys."""
        span = slice(*queries)
        old = self.lse[..., span]
        new = torch.logaddexp(old, lse)
        # a query that has seen nothing yet stays at weight 0, not at inf - inf
        finite = new > float("-inf")
        for_old = torch.where(finite, torch.exp(old - new), 0).permute(2, 0, 1).unsqueeze(-1)
        for_new = torch.where(finite, torch.exp(lse - new), 0).permute(2, 0, 1).unsqueeze(-1)
        self.out[span] = self.out[span] * for_old + out * for_new  # [s, b, a, dv]
        self.lse[..., span] = new


def attend_block(
    merge: Merge, plan: ContextPlan, source: int, q: Tensor, k: Tensor, v: Tensor, **score: Any
) -> None:
    """Merges in the attention of local q to the k and v of outer rank `source`; `score` is scale,
    softcap and settings."""
    for call in plan.calls[source]:
        queries, keys = slice(*call.queries), slice(*call.keys)
        out, lse = attention(q[queries], k[keys], v[keys], **score, **plan.options(call, source))
        merge.add(call.queries, out, lse)


def block_gradients(
    plan: ContextPlan,
    source: int,
    saved: tuple[Tensor, ...],
    dout: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    **score: Any,
) -> tuple[Tensor, Tensor]:
    """Adds the share of dq that comes from one block, in place, and returns the block's dk and dv.

    Args:
        source: outer rank of the keys.
        saved: q `[s, b, a, d]`, and the merged out and lse.
        dout: `[s, b, a, dv]`, gradient of the merged out.
        dq: `[s, b, a, d]` fp32 (fp64); added to.
        score: scale, softcap and settings.
    """
    q, out, lse = saved
    dk, dv = torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype)
    for call in plan.calls[source]:
        queries, keys = slice(*call.queries), slice(*call.keys)
        dq_part, dk_part, dv_part = attention_backward(
            dout[queries],
            q[queries],
            k[keys],
            v[keys],
            out[queries],
            lse[..., queries].contiguous(),
            **score,
            **plan.options(call, source),
        )
        dq[queries] += dq_part
        dk[keys] += dk_part
        dv[keys] += dv_part
    return dk, dv


class KVFormat(Protocol):
    """Turns a block into keys and values, and their gradients into that of the block; runs outside
    of autograd."""

    value_dim: int  # dv

    def unpack(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Maps `[t, b, ...]` -> k `[t, b, g, d]`, v `[t, b, g, dv]`."""

    def unpack_backward(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """Maps dk, dv in fp32 (fp64) -> the gradient of the block, in their dtype and the block's
        shape."""

    def for_heads(self, rank: int, size: int) -> KVFormat:
        """Returns the format for the heads of one rank, where `size` ranks hold equal shares of
        them."""


class ConcatenatedKV:
    """A block is keys and values themselves, `[t, b, g, d+dv]`; d is `key_dim`, dv `value_dim`."""

    def __init__(self, key_dim: int, value_dim: int) -> None:
        self.key_dim, self.value_dim = key_dim, value_dim

    def unpack(self, block: Tensor) -> tuple[Tensor, Tensor]:
        k, v = block.split([self.key_dim, self.value_dim], -1)
        return k, v

    def unpack_backward(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        return torch.cat((dk, dv), -1)

    def for_heads(self, rank: int, size: int) -> ConcatenatedKV:
        return self

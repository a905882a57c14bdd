"""Attention of local queries to blocks of keys that arrive one by one. The results merge exactly:

    out = Σᵢ exp(lseᵢ - lse)·outᵢ,   lse = log Σᵢ exp(lseᵢ)     (Liu et al. 2023, arXiv:2310.01889)

In the backward, the gradients of each block follow from the merged out and lse alone, so blocks may
arrive in any order.

A block that is sent holds keys and values, or something smaller from which they are computed. The
attention calls of a rank for one micro-batch are planned once, on the CPU, for all layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
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
    """Attention of one rank for one micro-batch, which carries it (`MicroBatch.context`)."""

    layout: SequenceLayout  # the rows of this micro-batch's sequences that each rank holds
    outer_rank: int
    calls: list[list[Call]]  # of the attention kernel, for each outer rank's keys
    hops: int  # of keys around the outer ranks; the same on all ranks
    visible_pairs: list[int]  # number of query-key pairs that each outer rank sees
    outer_rows: list[Tensor]  # int64 `[s/outer]` per outer rank: the global rows it holds
    local_rows: Tensor  # int64 `[s/cp]`: the global rows of this rank
    documents: Tensor | None  # int64 `[b, s]` of the full sequences, or None
    causal: bool
    window: int | None
    unwindowed: ContextPlan | None = None  # of layers without a window, where others have one

    def of_window(self, window: int | None) -> ContextPlan:
        """The plan of a layer with this window, or without one."""
        return self.unwindowed if self.unwindowed is not None and window is None else self

    def mask_options(self, call: Call, source: int) -> dict[str, Any]:
        """Mask arguments of one attention call, to keys of outer rank `source`."""
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
        layout: how the sequence is cut; which rank holds which chunk depends on the documents of
            each micro-batch.
        rank: this rank's position on the cp axis.
        causal, window: as in Mask.
        some_unwindowed: some layers have no window (model.window_layers).
        device: of the plans' index tensors.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        rank: int,
        *,
        causal: bool = True,
        window: int | None = None,
        some_unwindowed: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout, self.rank, self.causal, self.window = layout, rank, causal, window
        self.some_unwindowed, self.device = some_unwindowed, device
        self._single_document = self._plan(None)

    def __call__(self, documents: Tensor | None) -> ContextPlan:
        """Plans a micro-batch.

        Args:
            documents: int64 `[b, s]` on the CPU, because its values decide which blocks are empty.
        """
        return self._single_document if documents is None else self._plan(documents)

    def _plan(self, documents: Tensor | None) -> ContextPlan:
        numbers = None if documents is None else documents.numpy()
        mask = Mask(self.causal, self.window, numbers)
        if not self.some_unwindowed:
            return self._plan_mask(even_layout(self.layout, mask), mask, documents)
        # All layers share one layout, and those without a window are the most expensive.
        unwindowed = replace(mask, window=None)
        layout = even_layout(self.layout, unwindowed)
        return replace(
            self._plan_mask(layout, mask, documents),
            unwindowed=self._plan_mask(layout, unwindowed, documents),
        )

    def _plan_mask(
        self, layout: SequenceLayout, mask: Mask, documents: Tensor | None
    ) -> ContextPlan:
        def on_device(rows: np.ndarray) -> Tensor:
            return torch.from_numpy(rows).to(self.device)

        outer_rank = self.rank // layout.inner
        return ContextPlan(
            layout,
            outer_rank,
            plan_calls(layout, outer_rank, mask),
            num_hops(layout, mask),
            visible_pairs(layout, mask),
            [on_device(layout.outer_rows(outer)) for outer in range(layout.outer)],
            on_device(layout.rows(self.rank)),
            None if documents is None else documents.to(self.device),
            self.causal,
            mask.window,
        )


def imbalance(plans: Iterable[ContextPlan]) -> float:
    """Time of attention relative to an even distribution over the cp ranks; 1 = even.

    The ranks wait for each other in every layer, so the busiest one decides: the sum over
    micro-batches of the busiest rank's query-key pairs, divided by the sum of their mean.
    """
    plans = list(plans)
    busiest = sum(max(plan.visible_pairs) for plan in plans)
    return busiest / sum(sum(plan.visible_pairs) / len(plan.visible_pairs) for plan in plans)


class MergedAttention:
    """Attention of local queries to the blocks so far, in fp32 (fp64 for fp64).

    `out` is `[s, b, a, dv]`, `lse` `[b, a, s]`.

    Args:
        q: `[s, b, a, d]`.
        value_dim: dv.
        sinks: `[a]` logits that every query also sees, without a value; they count once, here.
    """

    def __init__(self, q: Tensor, value_dim: int, sinks: Tensor | None = None) -> None:
        s, b, a, _ = q.shape
        wide = statistics_dtype(q.dtype)
        self.out = torch.zeros(s, b, a, value_dim, dtype=wide, device=q.device)
        self.lse = torch.full((b, a, s), float("-inf"), dtype=wide, device=q.device)
        if sinks is not None:
            self.lse = sinks.to(wide).view(1, -1, 1).expand(b, a, s).clone()

    def add(self, queries: tuple[int, int], out: Tensor, lse: Tensor) -> None:
        """Merges in the attention of a span of queries to further keys."""
        span = slice(*queries)
        old = self.lse[..., span]
        new = torch.logaddexp(old, lse)
        # A query that has seen no key yet must get weight 0, and inf - inf is NaN.
        finite = new > float("-inf")
        for_old = torch.where(finite, torch.exp(old - new), 0).permute(2, 0, 1).unsqueeze(-1)
        for_new = torch.where(finite, torch.exp(lse - new), 0).permute(2, 0, 1).unsqueeze(-1)
        self.out[span] = self.out[span] * for_old + out * for_new  # [s, b, a, dv]
        self.lse[..., span] = new


def attend_block(
    merged: MergedAttention,
    plan: ContextPlan,
    source: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **score: Any,
) -> None:
    """Merges in the attention of local q to k and v of outer rank `source`.

    `score` is scale, softcap and settings.
    """
    for call in plan.calls[source]:
        queries, keys = slice(*call.queries), slice(*call.keys)
        mask = plan.mask_options(call, source)
        out, lse = attention(q[queries], k[keys], v[keys], **score, **mask)
        merged.add(call.queries, out, lse)


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
    """Adds one block's share of dq in place, and computes the block's dk and dv.

    Args:
        plan: of the micro-batch.
        source: outer rank of the keys.
        saved: q `[s, b, a, d]`, and the merged out and lse.
        dout: `[s, b, a, dv]`, gradient of the merged out.
        k, v: `[t, b, g, d]`, `[t, b, g, dv]`.
        dq: `[s, b, a, d]` fp32 (fp64); added to.
        score: scale, softcap and settings.
    """
    q, out, lse = saved
    dk, dv = torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype)
    for call in plan.calls[source]:
        queries, keys = slice(*call.queries), slice(*call.keys)
        dq_call, dk_call, dv_call = attention_backward(
            dout[queries],
            q[queries],
            k[keys],
            v[keys],
            out[queries],
            lse[..., queries].contiguous(),
            **score,
            **plan.mask_options(call, source),
        )
        dq[queries] += dq_call
        dk[keys] += dk_call
        dv[keys] += dv_call
    return dk, dv


class KVFormat(Protocol):
    """Computes keys and values from a block, and the block's gradient, outside autograd."""

    value_dim: int  # dv

    def unpack(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Maps `[t, b, ...]` -> k `[t, b, g, d]`, v `[t, b, g, dv]`."""

    def unpack_backward(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """Maps dk, dv in fp32 (fp64) -> the block's gradient, in their dtype."""

    def for_heads(self, rank: int, size: int) -> KVFormat:
        """The format for the heads of one of `size` ranks that hold equal shares of them."""


class ConcatenatedKV:
    """KVFormat of blocks of keys and values, `[t, b, g, d+dv]`; d is `key_dim`, dv `value_dim`."""

    def __init__(self, key_dim: int, value_dim: int) -> None:
        self.key_dim, self.value_dim = key_dim, value_dim

    def unpack(self, block: Tensor) -> tuple[Tensor, Tensor]:
        k, v = block.split([self.key_dim, self.value_dim], -1)
        return k, v

    def unpack_backward(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        return torch.cat((dk, dv), -1)

    def for_heads(self, rank: int, size: int) -> ConcatenatedKV:
        return self

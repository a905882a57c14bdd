"""Attention of local queries to blocks of keys that arrive one by one. The results merge exactly:

    out = Σᵢ exp(lseᵢ - lse)·outᵢ,   lse = log Σᵢ exp(lseᵢ)        (Liu et al. 2023, arXiv:2310.01889)

In the backward the gradients of each block follow from the merged out and lse alone, so blocks may come in any order.

The format of a block that travels: keys and values themselves, or something smaller that they are computed from.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megatron5d.context_parallel.block_plan import ContextPlan
from megatron5d.kernels import attention, attention_backward
from megatron5d.kernels.dispatch import statistics_dtype


class Merge:
    """What local queries have collected so far: `out` `[s, b, a, dv]` and `lse` `[b, a, s]`, in fp32 (fp64 for fp64).

    Args:
        q: `[s, b, a, d]`.
        value_dim: of the values.
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
        finite = new > float("-inf")  # a query that has seen nothing yet stays at weight 0, not at inf - inf
        for_old = torch.where(finite, torch.exp(old - new), 0).permute(2, 0, 1).unsqueeze(-1)
        for_new = torch.where(finite, torch.exp(lse - new), 0).permute(2, 0, 1).unsqueeze(-1)
        self.out[span] = self.out[span] * for_old + out * for_new  # [s, b, a, dv]
        self.lse[..., span] = new


def attend_block(merge: Merge, plan: ContextPlan, source: int, q: Tensor, k: Tensor, v: Tensor, **score: Any) -> None:
    """Merges in the attention of local q to the k and v of outer rank `source`; `score` is scale and softcap."""
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
        plan: the micro-batch's.
        source: outer rank of the keys.
        saved: q `[s, b, a, d]`, and the merged out and lse.
        dout: `[s, b, a, dv]`, gradient of the merged out.
        k, v: of the block.
        dq: `[s, b, a, d]` fp32 (fp64); added to.
        score: scale and softcap.
    """
    q, out, lse = saved
    dk, dv = torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype)
    for call in plan.calls[source]:
        queries, keys = slice(*call.queries), slice(*call.keys)
        dq_part, dk_part, dv_part = attention_backward(
            dout[queries], q[queries], k[keys], v[keys], out[queries], lse[..., queries].contiguous(),
            **score, **plan.options(call, source),
        )  # fmt: skip
        dq[queries] += dq_part
        dk[keys] += dk_part
        dv[keys] += dv_part
    return dk, dv


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns a sink has probability exp(sink - lse) and value 0: d sink = -Σ probability·(dout·out)."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).permute(1, 2, 0)  # [b, a, s]
    probability = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)


class KVFormat(Protocol):
    """Turns a block into keys and values, and their gradients into that of the block; runs outside of autograd."""

    value_dim: int  # dv

    def unpack(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Maps `[t, b, ...]` -> k `[t, b, g, d]`, v `[t, b, g, dv]`."""

    def unpack_backward(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """Maps dk, dv in fp32 (fp64) -> the gradient of the block, in their dtype and the block's shape."""

    def for_heads(self, rank: int, size: int) -> KVFormat:
        """Returns the format for the heads of one rank, where `size` ranks hold equal shares of them."""


class ConcatenatedKV:
    """A block is keys and values themselves, `[t, b, g, d+dv]`.

    Args:
        key_dim, value_dim: d and dv.
    """

    def __init__(self, key_dim: int, value_dim: int) -> None:
        self.key_dim, self.value_dim = key_dim, value_dim

    def unpack(self, block: Tensor) -> tuple[Tensor, Tensor]:
        k, v = block.split([self.key_dim, self.value_dim], -1)
        return k, v

    def unpack_backward(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        return torch.cat((dk, dv), -1)

    def for_heads(self, rank: int, size: int) -> ConcatenatedKV:
        return self

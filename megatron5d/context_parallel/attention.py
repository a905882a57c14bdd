"""Attention over a sequence that is cut over cp: the one entry to all four methods.

q, k, v [s/cp, b, heads, d]
  -> [s/outer, b, heads/inner, d]   exchange heads for sequence, all_to_all cp_inner
  -> attention to the keys of all outer ranks: ring.py or all_gather.py
  -> [s/cp, b, a/tp, dv]            exchange sequence for heads, all_to_all cp_inner

ring and allgather have inner = 1, ulysses has outer = 1, two_level has both (layout.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.comm.collectives import gather_from
from megatron5d.context_parallel.all_gather import AllGatherAttention
from megatron5d.context_parallel.block_attention import ConcatenatedKV, KVFormat
from megatron5d.context_parallel.block_plan import ContextPlan
from megatron5d.context_parallel.ring import RingAttention
from megatron5d.context_parallel.ulysses import heads_for_sequence, sequence_for_heads, shared_heads
from megatron5d.topology.axis import Axis


@dataclass(frozen=True)
class ContextAttention:
    """Context-parallel attention of all layers; it has no parameters.

    Args:
        method: parallel.cp_method.
        outer: ranks among which keys and values travel.
        inner: ranks that exchange heads for sequence.
    """

    method: str
    outer: Axis
    inner: Axis

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, *, scale: float, softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """
        Args:
            q: `[s/cp, b, a/tp, d]`.
            k: `[s/cp, b, g/tp, d]`.
            v: `[s/cp, b, g/tp, dv]`.
            plan: the micro-batch's masks.
            scale, softcap: of the scores.
            sinks: `[a/tp]`, or None.

        Returns:
            `[s/cp, b, a/tp, dv]`.

        Comm: see ring.py, all_gather.py, ulysses.py.
        """
        both = shared_heads(torch.cat((k, v), -1), self.inner)  # [s/cp, b, g', d+dv]; g' = g/tp, at least inner
        block = heads_for_sequence(both, self.inner)  # -> [s/outer, b, g'/inner, d+dv]  all_to_all cp_inner
        core = AllGatherAttention if self.method == "allgather" else RingAttention
        return self._attend(core, q, block, ConcatenatedKV(k.shape[-1], v.shape[-1]), plan, sinks, scale, softcap)

    def compressed(
        self, q: Tensor, latents: Tensor, kv_format: KVFormat, plan: ContextPlan, *, scale: float, softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the same where latents travel, from which every rank computes the keys and values of its heads.

        Args:
            q, plan, scale, softcap, sinks: as above.
            latents: `[s/cp, b, r+dr]`.
            kv_format: computes keys and values of a/tp heads from latents.

        Returns:
            `[s/cp, b, a/tp, dv]`.

        Comm: all_gather cp_inner of the latents / reduce_scatter; all_to_all cp_inner of q and of the output / the same
            back; the ring over cp_outer.
        """
        assert self.method != "allgather", "it gathers groups of heads, and latents have no heads"
        block = gather_from(latents, self.inner)  # [s/cp, b, r+dr] -> [s/outer, b, r+dr]  all_gather cp_inner
        kv_format = kv_format.for_heads(self.inner.rank, self.inner.size)
        return self._attend(RingAttention, q, block, kv_format, plan, sinks, scale, softcap)

    def _attend(self, core, q, block, kv_format, plan, sinks, scale, softcap) -> Tensor:
        inner = self.inner
        if sinks is not None and inner.size > 1:
            share = sinks.shape[0] // inner.size
            sinks = sinks[inner.rank * share : (inner.rank + 1) * share]
        q = heads_for_sequence(q, inner)  # [s/cp, b, a/tp, d] -> [s/outer, b, a/tp/inner, d]  all_to_all cp_inner
        score = {"scale": scale, "softcap": softcap}
        out = core.apply(q, block, sinks, kv_format, plan, self.outer, score)  # [s/outer, b, a/tp/inner, dv]
        return sequence_for_heads(out, inner)  # -> [s/cp, b, a/tp, dv]  all_to_all cp_inner

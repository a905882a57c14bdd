"""Attention over a sequence that is cut over cp, by four methods.

q, k, v [s/cp, b, heads, d]
  -> [s/outer, b, heads/inner, d]   exchange heads for sequence, all_to_all cp_inner
  -> attention to the keys of all outer ranks: ring or all-gather
  -> [s/cp, b, a/tp, dv]            exchange sequence for heads, all_to_all cp_inner

ring and allgather have inner = 1, ulysses has outer = 1, two_level has both (zigzag.py).

Ring attention: each rank sends its block of keys and values around the outer ranks. The next block
is received while attention to the current one runs.

forward    each block makes outer-1 hops: (outer-1)·(s/outer)·b·g'·(d+dv) elements per rank
backward   each block makes the same hops again; its gradient (fp32) follows one hop behind, summing
           what every rank adds, until it returns to its owner: twice the transfers of the forward

If a window or document masks hide everything beyond fewer hops, only those are made, and gradients
return to their owner in one hop. Where latents are sent instead (block_attention.py), each
direction takes (outer-1)·(s/outer)·b·(r+dr) elements. a' and g' are the query and KV heads of one
inner rank; without inner ranks outer is cp, a' is a/tp and g' is g/tp.
Source: Liu et al. 2023 (arXiv:2310.01889).

All-gather attention: every outer rank gathers all keys and values, one group of heads at a time.

forward    all_gather of k, v: (cp-1)·(s/cp)·b·(g/tp)·(d+dv) elements per rank
backward   the same all_gather, and a reduce_scatter of dk, dv of the same size

Memory peaks with two groups of heads: the current one and the one being gathered.
Source: Dubey et al. 2024 (arXiv:2407.21783), section 3.3.2.

Ulysses: exchanges a share of the sequence for a share of the heads, and back.

Each exchange sends (s/n)·b·heads·d·(n-1)/n elements per rank; the backward of one is the other.
Source: Jacobs et al. 2023 (arXiv:2309.14509).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron5d.comm.all_to_all import all_to_all
from megatron5d.comm.collectives import (
    Pending,
    gather_from,
    reduce_scatter,
    start_all_gather,
    start_shift,
)
from megatron5d.context_parallel.block_attention import (
    ConcatenatedKV,
    ContextPlan,
    KVFormat,
    MergedAttention,
    attend_block,
    block_gradients,
)
from megatron5d.kernels.choice import AUTO, Settings
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.kernels.flash_attention.attention import sink_gradient
from megatron5d.topology.axis import Axis

_KV, _DKV = 0, 1  # tags: a block and a gradient may be in flight at the same time


class RingAttention(FirstOrderFunction):
    """`apply(q, block, sinks, kv_format, plan, axis, score)`.

    q `[s/outer, b, a', d]`, this rank's block `[s/outer, b, ...]` of keys and values -> `[s/outer,
    b, a', dv]`. `axis` is cp_outer.
    """

    @staticmethod
    def forward(
        ctx,
        q,
        local_block,
        sinks,
        kv_format: KVFormat,
        plan: ContextPlan,
        axis: Axis,
        score: dict[str, Any],
    ):
        merged = MergedAttention(q, kv_format.value_dim, sinks)
        block = local_block
        for step in range(plan.hops + 1):
            # [s/outer, b, ...]  shift cp_outer
            shift = start_shift(block, axis, _KV) if step < plan.hops else None
            # [s/outer, b, g', d], [s/outer, b, g', dv] of the rank `step` positions before this one
            k, v = kv_format.unpack(block)
            attend_block(merged, plan, (axis.rank - step) % axis.size, q, k, v, **score)
            if shift is not None:
                block = shift.wait()
        out = merged.out.to(q.dtype)  # [s/outer, b, a', dv]
        ctx.save_for_backward(q, local_block, sinks, out, merged.lse)
        ctx.kv_format, ctx.plan, ctx.axis, ctx.score = kv_format, plan, axis, score
        return out

    @staticmethod
    def backward(ctx, dout):
        q, block, sinks, out, lse = ctx.saved_tensors
        kv_format, plan, axis, score = ctx.kv_format, ctx.plan, ctx.axis, ctx.score
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dout = dout.contiguous()

        def gradient(block: Tensor, step: int) -> Tensor:
            source = (axis.rank - step) % axis.size
            # [s/outer, b, g', d], [s/outer, b, g', dv] of the rank `step` positions before this one
            k, v = kv_format.unpack(block)
            dk, dv = block_gradients(plan, source, (q, out, lse), dout, k, v, dq, **score)
            return kv_format.unpack_backward(block, dk, dv)  # [s/outer, b, ...] fp32

        hops = plan.hops
        shift = start_shift(block, axis, _KV) if hops else None
        local_grad = gradient(block, 0)
        grad_shift = None
        for step in range(1, hops + 1):
            assert shift is not None
            block = shift.wait()
            # [s/outer, b, ...]  shift cp_outer
            shift = start_shift(block, axis, _KV) if step < hops else None
            grad = gradient(block, step)
            if grad_shift is not None:
                grad += grad_shift.wait()  # the sum of the earlier ranks, for the same block
            distance = 1 if step < hops else -hops  # from the last rank directly to the owner
            # [s/outer, b, ...]  shift cp_outer
            grad_shift = start_shift(grad, axis, _DKV, distance)
        if grad_shift is not None:
            local_grad += grad_shift.wait()
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), local_grad.to(block.dtype), dsinks, None, None, None, None


HEAD_GROUPS = 4  # gathers per layer, of 1/4 of the KV heads each; fewer if there are fewer heads


def _head_groups(num_kv_heads: int) -> list[slice]:
    count = min(HEAD_GROUPS, num_kv_heads)
    edges = [i * num_kv_heads // count for i in range(count + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:])]


def _gather_groups(block: Tensor, axis: Axis) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yields (KV heads, blocks by rank) of each group of heads.

    The next group is gathered while the caller computes the current one. gᵢ is its number of heads.
    """

    def start(heads: slice) -> Pending:
        # [s/cp, b, gᵢ, d+dv] -> [s, b, gᵢ, d+dv]  all_gather cp_outer
        return start_all_gather(block[:, :, heads], axis)

    groups = _head_groups(block.shape[2])
    pending = start(groups[0])
    for i, heads in enumerate(groups):
        blocks = list(pending.wait().chunk(axis.size))
        if i + 1 < len(groups):
            pending = start(groups[i + 1])
        yield heads, blocks


class AllGatherAttention(FirstOrderFunction):
    """`apply(q, block, sinks, kv_format, plan, axis, score)`.

    q `[s/cp, b, a/tp, d]`, block `[s/cp, b, g/tp, d+dv]` -> `[s/cp, b, a/tp, dv]`. `axis` is
    cp_outer, with all ranks of cp.
    """

    @staticmethod
    def forward(
        ctx,
        q,
        block,
        sinks,
        kv_format: KVFormat,
        plan: ContextPlan,
        axis: Axis,
        score: dict[str, Any],
    ):
        queries_per_kv = q.shape[2] // block.shape[2]
        outs, lses = [], []
        for heads, blocks in _gather_groups(block, axis):
            query_heads = slice(heads.start * queries_per_kv, heads.stop * queries_per_kv)
            group_q = q[:, :, query_heads]
            group_sinks = None if sinks is None else sinks[query_heads]
            merged = MergedAttention(group_q, kv_format.value_dim, group_sinks)
            for source, source_block in enumerate(blocks):
                k, v = kv_format.unpack(source_block)
                attend_block(merged, plan, source, group_q, k, v, **score)
            outs.append(merged.out.to(q.dtype))
            lses.append(merged.lse)
        out, lse = torch.cat(outs, 2), torch.cat(lses, 1)
        ctx.save_for_backward(q, block, sinks, out, lse)
        ctx.kv_format, ctx.plan, ctx.axis, ctx.score = kv_format, plan, axis, score
        return out

    @staticmethod
    def backward(ctx, dout):
        q, block, sinks, out, lse = ctx.saved_tensors
        kv_format, plan, axis, score = ctx.kv_format, ctx.plan, ctx.axis, ctx.score
        queries_per_kv = q.shape[2] // block.shape[2]
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dblock = []
        for heads, blocks in _gather_groups(block, axis):
            query_heads = slice(heads.start * queries_per_kv, heads.stop * queries_per_kv)
            saved = q[:, :, query_heads], out[:, :, query_heads], lse[:, query_heads]
            group_dq, group_dout = dq[:, :, query_heads], dout[:, :, query_heads].contiguous()
            block_grads = []
            for source, source_block in enumerate(blocks):
                k, v = kv_format.unpack(source_block)
                dk, dv = block_gradients(plan, source, saved, group_dout, k, v, group_dq, **score)
                block_grads.append(kv_format.unpack_backward(source_block, dk, dv))
                del dk, dv  # before those of the next block are allocated
            # partial [s, b, gᵢ, d+dv] -> [s/cp, b, gᵢ, d+dv]  reduce_scatter cp_outer
            dblock.append(reduce_scatter(torch.cat(block_grads), axis))
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), torch.cat(dblock, 2).to(block.dtype), dsinks, None, None, None, None


def heads_for_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Maps `[s/n, b, a, d]` -> `[s, b, a/n, d]`: all rows, in rank order, of 1/n of the heads.

    Comm: all_to_all / all_to_all.
    """
    n = axis.size
    if n == 1:
        return x
    rows, b, heads, d = x.shape  # s/n, b, a, d
    # [n (heads), s/n, b, a/n, d]
    by_rank = x.view(rows, b, n, heads // n, d).permute(2, 0, 1, 3, 4)
    received = all_to_all(by_rank, axis)  # -> [n (sequence), s/n, b, a/n, d]  all_to_all
    return received.reshape(n * rows, b, heads // n, d)


def sequence_for_heads(x: Tensor, axis: Axis) -> Tensor:
    """Maps `[s, b, a/n, d]` -> `[s/n, b, a, d]`: this rank's rows of all heads.

    Comm: all_to_all / all_to_all.
    """
    n = axis.size
    if n == 1:
        return x
    s, b, heads, d = x.shape  # s, b, a/n, d
    by_rank = x.view(n, s // n, b, heads, d)  # [n (sequence), s/n, b, a/n, d]
    received = all_to_all(by_rank, axis)  # -> [n (heads), s/n, b, a/n, d]  all_to_all
    return received.permute(1, 2, 0, 3, 4).reshape(s // n, b, n * heads, d)


def repeat_heads(x: Tensor, axis: Axis) -> Tensor:
    """Repeats KV heads so that every rank gets one: `[s, b, g, d]` -> `[s, b, max(g, n), d]`."""
    n, g = axis.size, x.shape[2]
    if g >= n:
        return x
    assert n % g == 0, (n, g)
    return x.repeat_interleave(n // g, dim=2)


@dataclass(frozen=True)
class ContextAttention:
    """Context-parallel attention of all layers; it has no parameters."""

    method: str  # parallel.cp_method
    outer: Axis  # ranks that exchange keys and values
    inner: Axis  # ranks that exchange heads for sequence
    settings: Settings = AUTO  # which library may compute a block's attention on a GPU

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: ContextPlan,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends to all keys that the mask shows.

        Args:
            q: `[s/cp, b, a/tp, d]`.
            k: `[s/cp, b, g/tp, d]`.
            v: `[s/cp, b, g/tp, dv]`.
            plan: of the micro-batch.
            scale, softcap: of the scores.
            sinks: `[a/tp]`, or None.

        Returns:
            `[s/cp, b, a/tp, dv]`.

        Comm: that of the method, as described at the top of this file.
        """
        # [s/cp, b, g', d+dv]; g' = g/tp, at least inner
        kv = repeat_heads(torch.cat((k, v), -1), self.inner)
        # -> [s/outer, b, g'/inner, d+dv]  all_to_all cp_inner
        block = heads_for_sequence(kv, self.inner)
        core = AllGatherAttention if self.method == "allgather" else RingAttention
        kv_format = ConcatenatedKV(k.shape[-1], v.shape[-1])
        return self._attend(core, q, block, kv_format, plan, sinks, scale, softcap)

    def compressed(
        self,
        q: Tensor,
        latents: Tensor,
        kv_format: KVFormat,
        plan: ContextPlan,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends as `__call__`, but sends latents, from which each rank computes keys and values.

        Args:
            q, plan, scale, softcap, sinks: as in `__call__`.
            latents: `[s/cp, b, r+dr]`.
            kv_format: computes keys and values of a/tp heads from latents.

        Returns:
            `[s/cp, b, a/tp, dv]`.

        Comm: all_gather cp_inner of the latents / reduce_scatter; all_to_all cp_inner of q and of
            the output / the same back; the ring over cp_outer.
        """
        assert self.method != "allgather", "latents have no heads to gather in groups"
        # [s/cp, b, r+dr] -> [s/outer, b, r+dr]  all_gather cp_inner
        block = gather_from(latents, self.inner)
        kv_format = kv_format.for_heads(self.inner.rank, self.inner.size)
        return self._attend(RingAttention, q, block, kv_format, plan, sinks, scale, softcap)

    def _attend(self, core, q, block, kv_format, plan, sinks, scale, softcap) -> Tensor:
        inner = self.inner
        if sinks is not None and inner.size > 1:
            share = sinks.shape[0] // inner.size
            sinks = sinks[inner.rank * share : (inner.rank + 1) * share]
        # [s/cp, b, a/tp, d] -> [s/outer, b, a/tp/inner, d]  all_to_all cp_inner
        q = heads_for_sequence(q, inner)
        score = {"scale": scale, "softcap": softcap, "settings": self.settings}
        # [s/outer, b, a/tp/inner, dv]
        out = core.apply(q, block, sinks, kv_format, plan, self.outer, score)
        return sequence_for_heads(out, inner)  # -> [s/cp, b, a/tp, dv]  all_to_all cp_inner

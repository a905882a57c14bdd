"""All-gather attention: keys and values of all outer ranks are collected, some heads at a time, and attended to.

forward    all_gather of k, v:               (cp-1)·(s/cp)·b·(g/tp)·(d+dv) elements per rank
backward   the same again, and a reduce_scatter of dk, dv of as many
The peak is that of one group of heads. Source: Dubey et al. 2024 (arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import first_order
from megatron5d.comm.collectives import Pending, reduce_scatter, start_all_gather
from megatron5d.context_parallel.blocks import Merge, attend_block, block_gradients, sink_gradient
from megatron5d.context_parallel.plan import ContextPlan
from megatron5d.context_parallel.travel import Carrier
from megatron5d.topology.axis import Axis

HEAD_GROUPS = 4  # at most so many gathers per layer; each holds 1/4 of the keys and values of the whole sequence


def _groups(num_kv_heads: int) -> list[slice]:
    count = min(HEAD_GROUPS, num_kv_heads)
    edges = [i * num_kv_heads // count for i in range(count + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:])]


def _gathered(own: Tensor, axis: Axis) -> Iterator[tuple[slice, list[Tensor]]]:
    """(KV heads, blocks by rank) group after group; the next group's gather runs under this group's attention."""

    def start(heads: slice) -> Pending:
        return start_all_gather(own[:, :, heads], axis)

    groups = _groups(own.shape[2])
    pending = start(groups[0])
    for i, heads in enumerate(groups):
        blocks = list(pending.wait().chunk(axis.size))
        if i + 1 < len(groups):
            pending = start(groups[i + 1])
        yield heads, blocks


class AllGatherAttention(torch.autograd.Function):
    """`apply(q, block, sinks, carrier, plan, axis, score)`.

    q `[s/cp, b, a/tp, d]`, block `[s/cp, b, g/tp, d+dv]` -> `[s/cp, b, a/tp, dv]`.
    """

    @staticmethod
    def forward(ctx, q, block, sinks, carrier: Carrier, plan: ContextPlan, axis: Axis, score: dict[str, Any]):
        share = q.shape[2] // block.shape[2]
        outs, lses = [], []
        for heads, blocks in _gathered(block, axis):
            own = slice(heads.start * share, heads.stop * share)
            merge = Merge(q[:, :, own], carrier.value_dim, None if sinks is None else sinks[own])
            for other, each in enumerate(blocks):
                k, v = carrier.open(each)
                attend_block(merge, plan, other, q[:, :, own], k, v, **score)
            outs.append(merge.out.to(q.dtype))
            lses.append(merge.lse)
        out, lse = torch.cat(outs, 2), torch.cat(lses, 1)
        ctx.save_for_backward(q, block, sinks, out, lse)
        ctx.carrier, ctx.plan, ctx.axis, ctx.score = carrier, plan, axis, score
        return out

    @staticmethod
    @first_order
    def backward(ctx, dout):
        q, block, sinks, out, lse = ctx.saved_tensors
        carrier, plan, axis, score = ctx.carrier, ctx.plan, ctx.axis, ctx.score
        share = q.shape[2] // block.shape[2]
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dblock = []
        for heads, blocks in _gathered(block, axis):
            own = slice(heads.start * share, heads.stop * share)
            saved = q[:, :, own], out[:, :, own], lse[:, own]
            dq_own, dout_own = dq[:, :, own], dout[:, :, own].contiguous()
            parts = []
            for other, each in enumerate(blocks):
                k, v = carrier.open(each)
                parts.append(carrier.close(each, *block_gradients(plan, other, saved, dout_own, k, v, dq_own, **score)))
            dblock.append(reduce_scatter(torch.cat(parts), axis))  # [s, b, g', d+dv] -> [s/cp, b, g', d+dv]
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), torch.cat(dblock, 2).to(block.dtype), dsinks, None, None, None, None

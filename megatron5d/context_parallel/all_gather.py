"""All-gather attention: every outer rank collects all keys and values, one group of heads at a time.

forward    all_gather of k, v: (cp-1)·(s/cp)·b·(g/tp)·(d+dv) elements per rank
backward   the same all_gather, and a reduce_scatter of dk, dv of the same size
Memory peaks with two groups of heads: the one that is attended to and the one being gathered.
Source: Dubey et al. 2024 (arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron5d.comm.collectives import Pending, reduce_scatter, start_all_gather
from megatron5d.context_parallel.block_attention import KVFormat, Merge, attend_block, block_gradients, sink_gradient
from megatron5d.context_parallel.block_plan import ContextPlan
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.topology.axis import Axis

HEAD_GROUPS = 4  # gathers per layer, each of 1/4 of the heads; fewer where there are fewer heads


def _groups(num_kv_heads: int) -> list[slice]:
    count = min(HEAD_GROUPS, num_kv_heads)
    edges = [i * num_kv_heads // count for i in range(count + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:])]


def _gathered(block: Tensor, axis: Axis) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yields (KV heads, blocks by rank), group after group; one group is gathered while the last is attended to.

    The heads of a group are gᵢ.
    """

    def start(heads: slice) -> Pending:
        # [s/cp, b, gᵢ, d+dv] -> [s, b, gᵢ, d+dv]  all_gather cp_outer
        return start_all_gather(block[:, :, heads], axis)

    groups = _groups(block.shape[2])
    pending = start(groups[0])
    for i, heads in enumerate(groups):
        blocks = list(pending.wait().chunk(axis.size))
        if i + 1 < len(groups):
            pending = start(groups[i + 1])
        yield heads, blocks


class AllGatherAttention(FirstOrderFunction):
    """`apply(q, block, sinks, kv_format, plan, axis, score)`.

    q `[s/cp, b, a/tp, d]`, block `[s/cp, b, g/tp, d+dv]` -> `[s/cp, b, a/tp, dv]`. `axis` is cp_outer, here all of cp.
    """

    @staticmethod
    def forward(ctx, q, block, sinks, kv_format: KVFormat, plan: ContextPlan, axis: Axis, score: dict[str, Any]):
        queries_per_kv = q.shape[2] // block.shape[2]
        outs, lses = [], []
        for heads, blocks in _gathered(block, axis):
            query_heads = slice(heads.start * queries_per_kv, heads.stop * queries_per_kv)
            merge = Merge(q[:, :, query_heads], kv_format.value_dim, None if sinks is None else sinks[query_heads])
            for source, each in enumerate(blocks):
                k, v = kv_format.unpack(each)
                attend_block(merge, plan, source, q[:, :, query_heads], k, v, **score)
            outs.append(merge.out.to(q.dtype))
            lses.append(merge.lse)
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
        for heads, blocks in _gathered(block, axis):
            query_heads = slice(heads.start * queries_per_kv, heads.stop * queries_per_kv)
            saved = q[:, :, query_heads], out[:, :, query_heads], lse[:, query_heads]
            dq_part, dout_part = dq[:, :, query_heads], dout[:, :, query_heads].contiguous()
            parts = []
            for source, each in enumerate(blocks):
                k, v = kv_format.unpack(each)
                dk, dv = block_gradients(plan, source, saved, dout_part, k, v, dq_part, **score)
                parts.append(kv_format.unpack_backward(each, dk, dv))
                del dk, dv  # else they would live until the next block's are there
            # partial [s, b, gᵢ, d+dv] -> [s/cp, b, gᵢ, d+dv]  reduce_scatter cp_outer
            dblock.append(reduce_scatter(torch.cat(parts), axis))
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), torch.cat(dblock, 2).to(block.dtype), dsinks, None, None, None, None

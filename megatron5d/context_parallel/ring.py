"""Ring attention: blocks of keys and values travel around the outer ranks while attention to the block at hand runs.

forward    each block makes outer-1 hops: (outer-1)·(s/outer)·b·g'·(d+dv) elements per rank
backward   each block makes the same hops again, and its gradient (fp32) follows one hop behind, collecting what every
           rank adds, until it is back at its owner: twice as many transfers as forward
If a window or document masks hide everything beyond fewer hops, no more are made, and gradients go straight home.
Where latents travel instead (block_attention.py), each way takes (outer-1)·(s/outer)·b·(r+dr) elements.
a' and g' are the query and KV heads of one inner rank; without inner ranks outer is cp, a' is a/tp and g' is g/tp.
Source: Liu et al. 2023 (arXiv:2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron5d.comm.collectives import start_shift
from megatron5d.context_parallel.block_attention import KVFormat, Merge, attend_block, block_gradients, sink_gradient
from megatron5d.context_parallel.block_plan import ContextPlan
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.topology.axis import Axis

_KV, _DKV = 0, 1  # tags: a block and a gradient may be on their way at once


class RingAttention(FirstOrderFunction):
    """`apply(q, block, sinks, kv_format, plan, axis, score)`.

    q `[s/outer, b, a', d]`, this rank's block `[s/outer, b, ...]` of keys and values -> `[s/outer, b, a', dv]`.
    `axis` is cp_outer, which is all of cp unless inner ranks have exchanged heads for sequence.
    """

    @staticmethod
    def forward(ctx, q, own, sinks, kv_format: KVFormat, plan: ContextPlan, axis: Axis, score: dict[str, Any]):
        merge = Merge(q, kv_format.value_dim, sinks)
        block = own
        for step in range(plan.hops + 1):
            shift = start_shift(block, axis, _KV) if step < plan.hops else None  # [s/outer, b, ...]  shift cp_outer
            k, v = kv_format.unpack(block)  # [s/outer, b, g', d], [s/outer, b, g', dv] of the rank `step` behind
            attend_block(merge, plan, (axis.rank - step) % axis.size, q, k, v, **score)
            if shift is not None:
                block = shift.wait()
        out = merge.out.to(q.dtype)  # [s/outer, b, a', dv]
        ctx.save_for_backward(q, own, sinks, out, merge.lse)
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
            k, v = kv_format.unpack(block)  # [s/outer, b, g', d], [s/outer, b, g', dv] of the rank `step` behind
            dk, dv = block_gradients(plan, source, (q, out, lse), dout, k, v, dq, **score)
            return kv_format.unpack_backward(block, dk, dv)  # [s/outer, b, ...] fp32

        hops = plan.hops
        shift = start_shift(block, axis, _KV) if hops else None
        own = gradient(block, 0)
        travelling = None
        for step in range(1, hops + 1):
            assert shift is not None
            block = shift.wait()
            shift = start_shift(block, axis, _KV) if step < hops else None  # [s/outer, b, ...]  shift cp_outer
            grad = gradient(block, step)
            if travelling is not None:
                grad += travelling.wait()  # what the ranks before this one have added for the same block
            distance = 1 if step < hops else -hops  # after the last hop, straight home
            travelling = start_shift(grad, axis, _DKV, distance)  # [s/outer, b, ...]  shift cp_outer
        if travelling is not None:
            own += travelling.wait()
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), own.to(block.dtype), dsinks, None, None, None, None

"""Ring attention: keys and values travel around the outer ranks, each hop under the previous block's attention.

forward    blocks make cp-1 hops:                (cp-1)·(s/cp)·b·(g/tp)·(d+dv) elements per rank
backward   they make them again, and their gradients travel one block behind, from the first rank that adds to them
           home: the same twice, gradients in fp32
Where a window or documents let nobody see beyond fewer hops, no more are made, and gradients go straight home.
Latents that travel instead (travel.py) are (cp-1)·(s/cp)·b·(r+dr) elements a way. Source: Liu et al. 2023
(arXiv:2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import first_order
from megatron5d.comm.ring import start_shift
from megatron5d.context_parallel.blocks import Merge, attend_block, block_gradients, sink_gradient
from megatron5d.context_parallel.plan import ContextPlan
from megatron5d.context_parallel.travel import Carrier
from megatron5d.topology.axis import Axis

_KV, _DKV = 0, 1  # tags


class RingAttention(torch.autograd.Function):
    """`apply(q, block, sinks, carrier, plan, axis, score)`.

    q `[s/cp, b, a/tp, d]`, block `[s/cp, b, ...]` that `carrier` opens -> `[s/cp, b, a/tp, dv]`. cp is `axis`: where an
    inner line has exchanged heads for sequence, s/cp is s/outer here, and a/tp a/tp/inner.
    """

    @staticmethod
    def forward(ctx, q, own, sinks, carrier: Carrier, plan: ContextPlan, axis: Axis, score: dict[str, Any]):
        merge = Merge(q, carrier.value_dim, sinks)
        block = own
        for step in range(plan.hops + 1):
            shift = start_shift(block, axis, _KV) if step < plan.hops else None  # shift cp_outer, under the attention
            k, v = carrier.open(block)  # [s/cp, b, g/tp, d], [s/cp, b, g/tp, dv] of the rank `step` behind
            attend_block(merge, plan, (axis.rank - step) % axis.size, q, k, v, **score)
            if shift is not None:
                block = shift.wait()
        out = merge.out.to(q.dtype)  # [s/cp, b, a/tp, dv]
        ctx.save_for_backward(q, own, sinks, out, merge.lse)
        ctx.carrier, ctx.plan, ctx.axis, ctx.score = carrier, plan, axis, score
        return out

    @staticmethod
    @first_order
    def backward(ctx, dout):
        q, block, sinks, out, lse = ctx.saved_tensors
        carrier, plan, axis, score = ctx.carrier, ctx.plan, ctx.axis, ctx.score
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dout = dout.contiguous()

        def gradient(block: Tensor, step: int) -> Tensor:
            other = (axis.rank - step) % axis.size
            k, v = carrier.open(block)
            return carrier.close(block, *block_gradients(plan, other, (q, out, lse), dout, k, v, dq, **score))

        hops = plan.hops
        shift = start_shift(block, axis, _KV) if hops else None
        own = gradient(block, 0)
        travelling = None
        for step in range(1, hops + 1):
            assert shift is not None
            block = shift.wait()
            shift = start_shift(block, axis, _KV) if step < hops else None
            grad = gradient(block, step)
            if travelling is not None:
                grad += travelling.wait()  # what earlier ranks found for this very block
            travelling = start_shift(grad, axis, _DKV, 1 if step < hops else -hops)  # at the end straight home
        if travelling is not None:
            own += travelling.wait()
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), own.to(block.dtype), dsinks, None, None, None, None

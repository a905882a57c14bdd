"""Self-attention of one block: MHA, GQA or MQA, heads cut over tp.

The part of attention between the projections, the same for GQA and MLA: scores, masks, softmax, values.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor, nn

from kernels import apply_rope, apply_rope_to_projection, attention
from megatron5d.autograd.recompute import KEEP_ALL
from megatron5d.autograd.wgrad import Defer
from megatron5d.context_parallel.block_attention import KVFormat
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.pipeline_parallel.phase import MicroBatch
from megatron5d.precision.gemm import gemms_of
from megatron5d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter


class AttentionCore(nn.Module):
    """softmax(mask(scale·q·kᵀ))·v; with attention sinks every softmax also has a learned logit per head, of value 0.

    Args:
        shared: what it is built from.
        name: global name of the layer.
        scale: of the scores.
    """

    def __init__(self, shared: BlockInputs, name: str, scale: float) -> None:
        super().__init__()
        config, self.context = shared.model, shared.context
        self.causal, self.window = config.attention_causal, config.attention_window
        self.score: dict[str, Any] = {"scale": scale, "softcap": config.attention_softcap}
        self.sinks = None
        if config.attention_sinks:
            tp, a = shared.tp, config.num_heads
            piece = Piece((tp.rank * (a // tp.size),), (a // tp.size,))
            spec = ShardSpec(f"{name}.sinks", (a,), (piece,), decay=False)
            self.sinks = new_parameter(piece.shape, spec, **shared.factory)  # [a/tp]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: MicroBatch) -> Tensor:
        """q `[s/cp, b, a/tp, d]`, k `[s/cp, b, g/tp, d]`, v `[s/cp, b, g/tp, dv]` -> `[s/cp, b, a·dv/tp]`."""
        if self.context is not None:  # ring, all-gather or Ulysses over cp
            return self.context(q, k, v, batch.context, sinks=self.sinks, **self.score).flatten(2)
        core, _ = attention(
            q, k, v, documents=batch.documents, window=self.window, sinks=self.sinks, causal=self.causal, **self.score
        )
        return core.flatten(2)

    def compressed(self, q: Tensor, latents: Tensor, kv_format: KVFormat, batch: MicroBatch) -> Tensor:
        """The same over cp where latents travel, from which `kv_format` computes keys and values as they arrive."""
        assert self.context is not None
        return self.context.compressed(q, latents, kv_format, batch.context, sinks=self.sinks, **self.score).flatten(2)


class SelfAttention(nn.Module):
    """Phase: x + out(attention(qkv(norm(x)))).

    Args:
        shared: what it is built from.
        layer: global index of the block.
    """

    kind = "attention"
    parts = KEEP_ALL  # `qkv` and `attention` may be recomputed

    def __init__(self, shared: BlockInputs, layer: int) -> None:
        super().__init__()
        config, tp, name = shared.model, shared.tp, f"layers.{layer}.attention"
        h, a, g, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.config, self.rope = config, shared.rope
        self.num_heads = tp.divide(a, "model.num_heads")  # a/tp
        self.num_kv_heads = max(1, g // tp.size)  # g/tp, at least one
        self.norm = shared.norm(f"{name}.norm")
        linear = {"sp": shared.sp, **shared.factory}
        self.qkv = ColumnParallelLinear(
            h, [(a, d), (g, d), (g, d)], f"{name}.qkv", tp, bias=config.qkv_bias, init=config.init_std,
            copies=shared.mesh["tp_kv"], **linear,
        )  # fmt: skip
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = shared.norm(f"{name}.q_norm", d, "rmsnorm", partial_grad=True)
            self.k_norm = shared.norm(f"{name}.k_norm", d, "rmsnorm", partial_grad=True)
        # Not with q and k norms, whose outputs are new tensors anyway. Not over cp, where keys and values are copied to
        # be sent: q, as a view, would keep the whole projection in memory.
        self.rotates_in_place = not config.qk_norm and shared.context is None
        self.core = AttentionCore(shared, name, 1 / math.sqrt(d))
        self.out = RowParallelLinear(
            a * d, h, f"{name}.out", tp, bias=config.attention_out_bias, init=config.output_init_std, **linear
        )

    def forward(self, x: Tensor, batch: MicroBatch, defer: Defer) -> Tensor:
        """`[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> the same."""
        normed, x = self.norm.branch(x, gemms_of(self.qkv.weight))  # [s/cp/tp, b, h]
        # a part that recompute.parts names is recomputed in the backward
        q, k, v = self.parts.run("qkv", partial(self._heads, batch=batch, defer=defer), normed)
        core = self.parts.run("attention", partial(self.core, batch=batch), q, k, v)  # [s/cp, b, a·d/tp]
        return x + self.out(core, defer)  # [s/cp/tp, b, h]  reduce_scatter tp

    def _heads(self, x: Tensor, batch: MicroBatch, defer: Defer) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q `[s/cp, b, a/tp, d]` and k, v `[s/cp, b, g/tp, d]` from normalised hidden states."""
        d, a, g = self.config.head_dim, self.num_heads, self.num_kv_heads
        qkv = self.qkv(x, defer)  # [s/cp/tp, b, h] -> [s/cp, b, (a+2g)·d/tp]  all_gather tp
        qkv = qkv.unflatten(-1, (a + 2 * g, d))  # [s/cp, b, (a+2g)/tp, d]
        if self.rotates_in_place and self.rope is not None:
            tables = self.rope(batch.positions)
            return apply_rope_to_projection(qkv, (a, g), *tables, interleaved=self.config.rope_interleaved)
        q, k, v = qkv.split([a, g, g], dim=2)  # [s/cp, b, a/tp, d], 2× [s/cp, b, g/tp, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = apply_rope(q, k, *self.rope(batch.positions), interleaved=self.config.rope_interleaved)
            v = v.contiguous()  # a view would keep the whole projection alive for the backward
        return q, k, v

"""Self-attention of one block with its heads cut over tp: MHA, GQA or MQA.

`AttentionBranch` and `AttentionCore` (scores, masks, softmax and values) are shared with MLA
(mla.py).
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron5d.config.derived import window_of
from megatron5d.context_parallel.block_attention import KVFormat
from megatron5d.kernels import apply_rope, apply_rope_to_projection, attention
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.norm import AllHeadsNorm
from megatron5d.phases.activations import KEEP_ALL
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.phases.wgrad import Defer
from megatron5d.precision.gemm import PLAIN, Gemms, gemms_of
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter


class AttentionCore(nn.Module):
    """softmax(mask(scale·q·kᵀ))·v, optionally with a learned logit of value 0 per head (a sink).

    Args:
        inputs: what blocks are built from.
        layer: global index of the block.
        scale: of the scores.
    """

    def __init__(self, inputs: BlockInputs, layer: int, scale: float) -> None:
        super().__init__()
        config, self.context, self.settings = inputs.model, inputs.context, inputs.kernels
        self.causal, self.window = config.attention_causal, window_of(config, layer)
        self.score: dict[str, Any] = {"scale": scale, "softcap": config.attention_softcap}
        self.sinks = None
        if config.attention_sinks:
            tp, a = inputs.tp, config.num_heads
            piece = Piece((tp.rank * (a // tp.size),), (a // tp.size,))
            spec = ShardSpec(f"layers.{layer}.attention.sinks", (a,), (piece,), decay=False)
            self.sinks = new_parameter(piece.shape, spec, **inputs.factory)  # [a/tp]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: MicroBatch) -> Tensor:
        """Attends to all keys that the masks show.

        Args:
            q: `[s/cp, b, a/tp, d]`.
            k: `[s/cp, b, g/tp, d]`.
            v: `[s/cp, b, g/tp, dv]`.
            batch: its documents and, with cp > 1, its plan.

        Returns:
            `[s/cp, b, a·dv/tp]`.

        Comm: with cp > 1 that of ContextAttention.
        """
        if self.context is not None:
            plan = batch.context.of_window(self.window)
            return self.context(q, k, v, plan, sinks=self.sinks, **self.score).flatten(2)
        core, _ = attention(
            q,
            k,
            v,
            documents=batch.documents,
            window=self.window,
            sinks=self.sinks,
            causal=self.causal,
            settings=self.settings,
            **self.score,
        )
        return core.flatten(2)

    def compressed(
        self, q: Tensor, latents: Tensor, kv_format: KVFormat, batch: MicroBatch
    ) -> Tensor:
        """Attends as `forward` over cp, but the ranks exchange latents."""
        assert self.context is not None
        plan = batch.context.of_window(self.window)
        return self.context.compressed(
            q, latents, kv_format, plan, sinks=self.sinks, **self.score
        ).flatten(2)


class AttentionBranch(Phase):
    """Phase: x + post_norm(attend(norm(x))), the first branch of a block, for every attention."""

    kind = "attention"
    parts = KEEP_ALL  # `qkv` and `attention` may be recomputed

    def __init__(self, inputs: BlockInputs, layer: int) -> None:
        super().__init__()
        name, self.parallel_block = f"layers.{layer}.attention", inputs.model.parallel_block
        self.window = window_of(inputs.model, layer)
        self.norm, self.post_norm = inputs.pre_norm(name), inputs.post_norm(name)

    def input_gemms(self) -> Gemms:
        """The GEMMs that read the normed input; `PLAIN` where anything else reads it too."""
        raise NotImplementedError

    def attend(self, normed: Tensor, batch: MicroBatch, defer: Defer) -> Tensor:
        """Maps the normed input `[s/cp/tp, b, h]` -> the branch's output, of the same shape."""
        raise NotImplementedError

    def forward(self, x: Tensor, batch: MicroBatch, defer: Defer) -> Tensor | tuple[Tensor, Tensor]:
        """Maps `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> the same.

        In a parallel block it returns a pair: the sum, and what the second branch reads.
        """
        # With one norm the second branch reads the normed input too.
        gemms = PLAIN if self.parallel_block == "one_norm" else self.input_gemms()
        normed, residual = self.norm.branch(x, gemms)
        y = residual + self.post_norm(self.attend(normed, batch, defer))
        if self.parallel_block == "none":
            return y
        return y, residual if self.parallel_block == "two_norms" else normed


class SelfAttention(AttentionBranch):
    """Phase: x + out(attention(qkv(norm(x))))."""

    def __init__(self, inputs: BlockInputs, layer: int) -> None:
        super().__init__(inputs, layer)
        config, tp, name = inputs.model, inputs.tp, f"layers.{layer}.attention"
        a, g, d = config.num_heads, config.num_kv_heads, config.head_dim
        self.config, self.rope, copies = config, inputs.rope(layer), inputs.mesh["tp_kv"]
        self.num_heads = tp.divide(a, "model.num_heads")  # a/tp
        self.num_kv_heads = max(1, g // tp.size)  # g/tp, at least one
        heads = [(a, d), (g, d), (g, d), *([(a, d)] if config.attention_gate else [])]
        self.qkv = inputs.column_linear(
            config.hidden_size, heads, f"{name}.qkv", bias=config.qkv_bias, copies=copies
        )
        self.q_norm = self._head_norm(inputs, f"{name}.q_norm", a)
        self.k_norm = self._head_norm(inputs, f"{name}.k_norm", g)
        # Not with q and k norms, whose outputs are new tensors anyway. Not over cp, where keys and
        # values are copied to be sent: q, as a view, would keep the entire projection in memory.
        self.rotates_in_place = (
            not (config.qk_norm or config.attention_gate) and inputs.context is None
        )
        self.core = AttentionCore(inputs, layer, 1 / math.sqrt(config.query_pre_attn_scalar or d))
        self.out = inputs.row_linear(a * d, f"{name}.out", config.attention_out_bias)

    @staticmethod
    def _head_norm(inputs: BlockInputs, name: str, num_heads: int) -> nn.Module | None:
        """The norm of queries or keys, of each head or over all heads of all ranks."""
        config, d = inputs.model, inputs.model.head_dim
        if config.qk_norm_all_heads:
            return AllHeadsNorm(
                num_heads,
                d,
                name,
                inputs.tp,
                copies=inputs.mesh["tp_kv"],
                eps=config.norm_eps,
                zero_centered=config.norm_zero_centered,
                **inputs.factory,
            )
        return inputs.norm(name, d, "rmsnorm", partial_grad=True) if config.qk_norm else None

    def input_gemms(self) -> Gemms:
        return gemms_of(self.qkv.weight)

    def attend(self, normed: Tensor, batch: MicroBatch, defer: Defer) -> Tensor:
        # Sections in `recompute.parts` are recomputed in the backward.
        heads = partial(self._heads, batch=batch, defer=defer)
        q, k, v, *gate = self.parts.run("qkv", heads, normed)
        # [s/cp, b, a·d/tp]
        core = self.parts.run("attention", partial(self.core, batch=batch), q, k, v)
        core = core * torch.sigmoid(gate[0]) if gate else core
        return self.out(core, defer)  # [s/cp/tp, b, h]  reduce_scatter tp

    def _heads(self, x: Tensor, batch: MicroBatch, defer: Defer) -> tuple[Tensor, ...]:
        """Rotated q `[s/cp, b, a/tp, d]` and k, v `[s/cp, b, g/tp, d]`; gate `[s/cp, b, a·d/tp]`.

        The gate is left out if the model has none.
        """
        d, a, g = self.config.head_dim, self.num_heads, self.num_kv_heads
        qkv = self.qkv(x, defer)  # [s/cp/tp, b, h] -> [s/cp, b, (a+2g)·d/tp]  all_gather tp
        qkv = qkv.unflatten(-1, (-1, d))  # [s/cp, b, (a+2g)/tp, d]; with a gate 2a+2g heads
        if self.rotates_in_place and self.rope is not None:
            tables = self.rope(batch)
            return apply_rope_to_projection(
                qkv, (a, g), *tables, interleaved=self.config.rope_interleaved
            )
        sizes = [a, g, g, *([a] if self.config.attention_gate else [])]
        q, k, v, *gate = qkv.split(sizes, dim=2)  # [s/cp, b, a/tp, d], 2× [s/cp, b, g/tp, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = apply_rope(q, k, *self.rope(batch), interleaved=self.config.rope_interleaved)
            v = v.contiguous()  # a view would keep the entire projection for the backward
        return q, k, v, *(tensor.flatten(2) for tensor in gate)

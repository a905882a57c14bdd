"""The part of attention between the projections, the same for GQA and MLA: scores, masks, softmax, values."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kernels import attention
from megatron5d.config.schema import ModelConfig
from megatron5d.context_parallel.attention import ContextAttention
from megatron5d.context_parallel.kv_format import KVFormat
from megatron5d.pipeline_parallel.microbatch import MicroBatch
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter


class AttentionCore(nn.Module):
    """softmax(mask(scale·q·kᵀ))·v; with attention sinks every softmax also has a learned logit per head, of value 0.

    Args:
        config: the architecture: masks, softcap, sinks.
        name: global name of the layer.
        mesh: `tp` cuts the heads.
        scale: of the scores.
        context: attention over cp, None where sequences are whole.
        factory: dtype and device of the sinks.
    """

    def __init__(
        self, config: ModelConfig, name: str, mesh: Mesh, *, scale: float, context: ContextAttention | None, **factory
    ) -> None:
        super().__init__()
        self.context, self.causal, self.window = context, config.attention_causal, config.attention_window
        self.score: dict[str, Any] = {"scale": scale, "softcap": config.attention_softcap}
        self.sinks = None
        if config.attention_sinks:
            tp, a = mesh["tp"], config.num_heads
            piece = Piece((tp.rank * (a // tp.size),), (a // tp.size,))
            spec = ShardSpec(f"{name}.sinks", (a,), (piece,), decay=False)
            self.sinks = new_parameter(piece.shape, spec, **factory)  # [a/tp]

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

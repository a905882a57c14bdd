"""What the layers of one rank are built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron5d.config.derived import window_of
from megatron5d.config.schema import Config, ModelConfig, RopeScaling
from megatron5d.kernels.choice import Settings
from megatron5d.model.norm import NoNorm, Norm
from megatron5d.model.rope import RotaryTables
from megatron5d.tensor_parallel.embedding import VocabParallelEmbedding, vocab_weight
from megatron5d.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    replicated_parameter,
)
from megatron5d.topology.mesh import Mesh

if TYPE_CHECKING:
    from megatron5d.context_parallel.attention import ContextAttention
    from megatron5d.model.moe_inputs import MoEInputs

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


class BlockInputs:
    """The configuration, this rank's axes, and what its layers share.

    Args:
        config: of the run.
        mesh: this rank's axes.
        device: of the parameters.
        moe: what the MoE layers share; None for a dense model.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device | str,
        moe: MoEInputs | None = None,
    ) -> None:
        self.config, self.mesh, self.moe = config, mesh, moe
        self.model: ModelConfig = config.model
        self.tp = mesh["tp"]  # cuts heads, features and the vocabulary
        self.sp = config.parallel.sp  # activations between tp regions are cut along the sequence
        self.factory: dict[str, Any] = {
            "dtype": DTYPES[config.precision.dtype],
            "device": device,
        }
        # libraries that may compute the layers' operations on a GPU
        self.kernels = Settings(**asdict(config.kernels))
        self.context = self._context_attention()
        # One object per base, so that all layers share the tables of a micro-batch.
        self._rotary = self._window_rotary = self._rotary_tables(
            self.model.rope_theta, self.model.rope_scaling
        )
        if self.model.window_rope_theta is not None:
            self._window_rotary = self._rotary_tables(self.model.window_rope_theta, RopeScaling())

    def _context_attention(self) -> ContextAttention | None:
        """The attention over cp; None where sequences are not cut."""
        if self.mesh["cp"].size == 1:
            return None
        from megatron5d.context_parallel.attention import ContextAttention

        return ContextAttention(
            self.config.parallel.cp_method,
            self.mesh["cp_outer"],
            self.mesh["cp_inner"],
            self.kernels,
        )

    def _rotary_tables(self, theta: float, scaling: RopeScaling) -> RotaryTables | None:
        if self.model.position != "rope":
            return None
        return RotaryTables(self.model.rotary_dim, theta, scaling, **self.factory)

    def rope(self, layer: int) -> RotaryTables | None:
        """Tables of cos and sin for a layer; None without rotary positions."""
        return self._rotary if window_of(self.model, layer) is None else self._window_rotary

    def column_linear(
        self, in_features: int, blocks: Sequence[tuple[int, int]], name: str, **options
    ) -> ColumnParallelLinear:
        """Builds a linear layer with its outputs cut over tp; `options` replace the defaults."""
        options = {"sp": self.sp, "init": self.model.init_std, **self.factory} | options
        return ColumnParallelLinear(in_features, blocks, name, self.tp, **options)

    def row_linear(self, in_features: int, name: str, bias: bool) -> RowParallelLinear:
        """Builds the last linear layer of a branch, with its inputs cut over tp."""
        h, init = self.model.hidden_size, self.model.output_init_std
        options = {"sp": self.sp, "bias": bias, "init": init, **self.factory}
        return RowParallelLinear(in_features, h, name, self.tp, **options)

    def replicated(self, shape: tuple[int, ...], name: str, **options) -> nn.Parameter:
        """Builds a weight that every tp rank holds; `options` replace the defaults."""
        defaults = {"partial_grad": self.sp, "init": self.model.init_std, "decay": True}
        return replicated_parameter(shape, name, self.tp, **defaults | self.factory | options)

    def vocab_weight(self, name: str) -> nn.Parameter:
        """Builds a weight `[v/tp, h]` of the embedding or the head."""
        model = self.model
        size = model.vocab_size, model.hidden_size
        return vocab_weight(*size, name, self.tp, model.init_std, **self.factory)

    def embedding(self, weight: nn.Parameter) -> VocabParallelEmbedding:
        """Builds an embedding with a weight from `vocab_weight`."""
        model = self.model
        return VocabParallelEmbedding(
            weight, model.vocab_size, self.tp, sp=self.sp, scale=model.embedding_scale
        )

    def pre_norm(self, name: str) -> Norm | NoNorm:
        """Builds the norm before a residual branch (model.block_norm)."""
        return NoNorm() if self.model.block_norm == "post" else self.norm(f"{name}.norm")

    def post_norm(self, name: str) -> Norm | NoNorm:
        """Builds the norm after a residual branch (model.block_norm)."""
        return NoNorm() if self.model.block_norm == "pre" else self.norm(f"{name}.post_norm")

    def norm(
        self,
        name: str,
        size: int | None = None,
        kind: str | None = None,
        partial_grad: bool | None = None,
        eps: float | None = None,
    ) -> Norm:
        """Builds a norm.

        Args:
            name: global name.
            size: of the last dim; None = the hidden size.
            kind: None = `model.norm`.
            partial_grad: as in Norm; None = with sp.
            eps: None = `model.norm_eps`.
        """
        return Norm(
            kind or self.model.norm,
            size or self.model.hidden_size,
            name,
            self.tp,
            partial_grad=self.sp if partial_grad is None else partial_grad,
            eps=eps or self.model.norm_eps,
            zero_centered=self.model.norm_zero_centered,
            settings=self.kernels,
            **self.factory,
        )

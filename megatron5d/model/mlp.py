"""The feed-forward half of a dense block, its inner dim cut over tp."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn

from megatron5d.config.schema import ModelConfig
from megatron5d.model.norm import Norm
from megatron5d.pipeline_parallel.microbatch import MicroBatch
from megatron5d.precision.gemms import gemms_of
from megatron5d.precision.gradient import Defer
from megatron5d.precision.kept import KEEP_ALL, Parts
from megatron5d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron5d.topology.mesh import Mesh


class Mlp(nn.Module):
    """Phase: x + down(activation(up(norm(x)))); with swiglu, `up` holds the gate rows, then the up rows.

    Args:
        config: the architecture.
        layer: global index of the block.
        mesh: `tp` cuts the inner dim.
        sp: activations between tp regions are cut along the sequence.
        parts: `norm`, `mlp` and `activation` may be computed again.
        factory: dtype and device of the parameters.
    """

    kind = "mlp"

    def __init__(
        self, config: ModelConfig, layer: int, mesh: Mesh, *, sp: bool, parts: Parts = KEEP_ALL, **factory
    ) -> None:
        super().__init__()
        tp, h, f = mesh["tp"], config.hidden_size, config.ffn_hidden_size
        name = f"layers.{layer}.mlp"
        self.activation, self.parts = config.activation, parts
        norm = {"partial": sp, "eps": config.norm_eps, "parts": parts, **factory}
        self.norm = Norm(config.norm, h, f"{name}.norm", tp, **norm)
        blocks = [(f, 1), (f, 1)] if config.activation == "swiglu" else [(f, 1)]
        linear = {"sp": sp, "bias": config.mlp_bias, **factory}
        self.up = ColumnParallelLinear(h, blocks, f"{name}.up", tp, init=config.init_std, **linear)
        out_std = config.init_std / math.sqrt(2 * config.num_layers) if config.init_scale_output else config.init_std
        self.down = RowParallelLinear(f, h, f"{name}.down", tp, init=out_std, **linear)

    def forward(self, x: Tensor, batch: MicroBatch, defer: Defer) -> Tensor:
        """`[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> the same."""
        normed, x = self.norm.branch(x, gemms_of(self.up.weight))  # [s/cp/tp, b, h]
        inner = self.parts("mlp", partial(self._inner, defer=defer), normed)  # [s/cp, b, f/tp]
        return x + self.down(inner, defer)  # [s/cp/tp, b, h]  reduce_scatter tp

    def _inner(self, x: Tensor, defer: Defer) -> Tensor:
        inner = self.up(x, defer)  # [s/cp, b, 2f/tp] or [s/cp, b, f/tp]  all_gather tp
        # its backward writes over what `up` made, which nobody else keeps
        gemms, alone = gemms_of(self.down.weight), self.parts.keeps("activation")
        act = partial(gemms.activate, kind=self.activation, overwrite=alone)
        return self.parts("activation", act, inner)  # [s/cp, b, f/tp]

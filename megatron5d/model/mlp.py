"""The feed-forward half of a dense block; its two matrices also make the shared expert of a MoE block."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megatron5d.autograd.recompute import KEEP_ALL, RecomputedParts
from megatron5d.autograd.wgrad import Defer
from megatron5d.config.schema import ModelConfig
from megatron5d.model.norm import Norm
from megatron5d.pipeline_parallel.phase import MicroBatch
from megatron5d.precision.gemm import gemms_of
from megatron5d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh


class FeedForward(nn.Module):
    """down(activation(up(x))), the inner dim cut over tp; with swiglu, `up` holds the gate rows, then the up rows.

    Args:
        config: the architecture.
        inner_size: f, features between the two matrices.
        name: global name.
        tp: axis that cuts the inner dim.
        sp: x arrives, and y leaves, cut along the sequence.
        bias: add one to both products.
        parts: `mlp` and `activation` may be recomputed.
        factory: dtype and device of the parameters.
    """

    def __init__(
        self, config: ModelConfig, inner_size: int, name: str, tp: Axis, *, sp: bool, bias: bool = False,
        parts: RecomputedParts = KEEP_ALL, **factory,
    ) -> None:  # fmt: skip
        super().__init__()
        h, f, self.activation, self.parts = config.hidden_size, inner_size, config.activation, parts
        blocks = [(f, 1), (f, 1)] if config.activation == "swiglu" else [(f, 1)]
        linear = {"sp": sp, "bias": bias, **factory}
        self.up = ColumnParallelLinear(h, blocks, f"{name}.up", tp, init=config.init_std, **linear)
        self.down = RowParallelLinear(f, h, f"{name}.down", tp, init=config.output_init_std, **linear)

    def project_up(self, x: Tensor, defer: Defer) -> Tensor:
        """`[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> what `project_down` takes, `[s/cp, b, f/tp]`."""
        return self.parts.run("mlp", partial(self._up_and_activation, defer=defer), x)

    def project_down(self, inner: Tensor, defer: Defer) -> Tensor:
        """-> `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`)."""
        return self.down(inner, defer)  # [s/cp, b, f/tp] -> [s/cp/tp, b, h]  reduce_scatter tp

    def _up_and_activation(self, x: Tensor, defer: Defer) -> Tensor:
        inner = self.up(x, defer)  # [s/cp, b, 2f/tp] or [s/cp, b, f/tp]  all_gather tp
        # The activation's backward may write over the output of `up`, which no other operation saves.
        gemms, overwrite = gemms_of(self.down.weight), self.parts.keeps("activation")
        activate = partial(gemms.activate, kind=self.activation, overwrite=overwrite)
        return self.parts.run("activation", activate, inner)  # [s/cp, b, f/tp]


class Mlp(nn.Module):
    """Phase: x + feed_forward(norm(x)).

    Args:
        config: the architecture.
        layer: global index of the block.
        mesh: `tp` cuts the inner dim.
        sp: activations between tp regions are cut along the sequence.
        parts: `norm`, `mlp` and `activation` may be recomputed.
        factory: dtype and device of the parameters.
    """

    kind = "mlp"

    def __init__(
        self, config: ModelConfig, layer: int, mesh: Mesh, *, sp: bool, parts: RecomputedParts = KEEP_ALL, **factory
    ) -> None:
        super().__init__()
        tp, name = mesh["tp"], f"layers.{layer}.mlp"
        factory = {"parts": parts, **factory}
        self.norm = Norm(
            config.norm, config.hidden_size, f"{name}.norm", tp, partial_grad=sp, eps=config.norm_eps, **factory
        )
        self.feed_forward = FeedForward(
            config, config.ffn_hidden_size, name, tp, sp=sp, bias=config.mlp_bias, **factory
        )

    def forward(self, x: Tensor, batch: MicroBatch, defer: Defer) -> Tensor:
        """`[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> the same."""
        normed, x = self.norm.branch(x, gemms_of(self.feed_forward.up.weight))  # [s/cp/tp, b, h]
        inner = self.feed_forward.project_up(normed, defer)  # [s/cp, b, f/tp]  all_gather tp
        return x + self.feed_forward.project_down(inner, defer)  # [s/cp/tp, b, h]  reduce_scatter tp

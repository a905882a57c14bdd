"""The feed-forward branch of a dense block, and the shared expert of a MoE block."""

from functools import partial

from torch import Tensor, nn

from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.norm import NoNorm, branch_input
from megatron5d.phases.activations import KEEP_ALL
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.phases.wgrad import Defer
from megatron5d.precision.gemm import gemms_of


class FeedForward(nn.Module):
    """down(activation(up(x))), with the inner dim cut over tp.

    With a gated activation `up` holds the gate rows, then the up rows.

    Args:
        inputs: what blocks are built from.
        inner_size: f, features between the two matrices.
        name: global name.
        bias: whether both matrices have a bias.
    """

    parts = KEEP_ALL  # `mlp` and `activation` may be recomputed

    def __init__(self, inputs: BlockInputs, inner_size: int, name: str, bias: bool = False) -> None:
        super().__init__()
        model, blocks = inputs.model, [(inner_size, 1)] * (1 + inputs.model.gated)
        self.activation = model.activation
        self.up = inputs.column_linear(model.hidden_size, blocks, f"{name}.up", bias=bias)
        self.down = inputs.row_linear(inner_size, f"{name}.down", bias)

    def project_up(self, x: Tensor, defer: Defer) -> Tensor:
        """Maps `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> `[s/cp, b, f/tp]`."""
        return self.parts.run("mlp", partial(self._up_and_activation, defer=defer), x)

    def project_down(self, inner: Tensor, defer: Defer) -> Tensor:
        """Maps `[s/cp, b, f/tp]` -> `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`)."""
        return self.down(inner, defer)  # [s/cp, b, f/tp] -> [s/cp/tp, b, h]  reduce_scatter tp

    def _up_and_activation(self, x: Tensor, defer: Defer) -> Tensor:
        inner = self.up(x, defer)  # [s/cp, b, 2f/tp] or [s/cp, b, f/tp]  all_gather tp
        # The activation's backward may overwrite the output of `up`, which nothing else saves.
        gemms, overwrite = gemms_of(self.down.weight), self.parts.keeps("activation")
        reader = gemms_of(self.up.weight) if overwrite and self.up.bias is None else None
        activate = partial(gemms.activate, kind=self.activation, overwrite=overwrite, reader=reader)
        return self.parts.run("activation", activate, inner)  # [s/cp, b, f/tp]


class MLP(Phase):
    """Phase: x + feed_forward(norm(x))."""

    kind = "mlp"

    def __init__(self, inputs: BlockInputs, layer: int) -> None:
        super().__init__()
        model, name = inputs.model, f"layers.{layer}.mlp"
        self.norm = NoNorm() if model.parallel_block == "one_norm" else inputs.pre_norm(name)
        self.post_norm = inputs.post_norm(name)
        self.feed_forward = FeedForward(inputs, model.ffn_hidden_size, name, bias=model.mlp_bias)

    def forward(
        self, state: Tensor | tuple[Tensor, Tensor], batch: MicroBatch, defer: Defer
    ) -> Tensor:
        """Maps `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`), in a parallel block two -> the same."""
        gemms = gemms_of(self.feed_forward.up.weight)
        normed, residual = branch_input(self.norm, state, gemms)  # [s/cp/tp, b, h]
        inner = self.feed_forward.project_up(normed, defer)  # [s/cp, b, f/tp]  all_gather tp
        y = self.feed_forward.project_down(inner, defer)  # [s/cp/tp, b, h]  reduce_scatter tp
        return residual + self.post_norm(y)

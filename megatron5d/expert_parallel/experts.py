"""The experts' matrices: grouped GEMMs for all experts of a rank, with a split backward.

    up    [E, 2f, h]   E cut over ep, f over etp; of each expert with a gated activation the gate
                       rows, then the up rows
    down  [E, h, f]    E cut over ep, f over etp; the output is a partial sum over etp

The router's weights are applied between the two GEMMs (kernels/activation.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron5d.config.schema import ModelConfig
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.phases.activations import KEEP_ALL
from megatron5d.phases.wgrad import Defer, defer_weight_grad
from megatron5d.precision.gemm import expert_gemms_of
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter, spec_of


class _GroupedLinear(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, parameter, offsets, num_local: int, defer: Defer):
        gemms = expert_gemms_of(parameter)
        operand = gemms.saved_operand(x, offsets)
        ctx.save_for_backward(offsets, *operand)
        ctx.parameter, ctx.num_local, ctx.defer = parameter, num_local, defer
        return gemms.forward(operand, parameter, num_local, offsets)

    @staticmethod
    def backward(ctx, dy):
        offsets, *x = ctx.saved_tensors
        parameter, num_local = ctx.parameter, ctx.num_local
        gemms = expert_gemms_of(parameter)
        dy = gemms.operand(dy, offsets, gradient=True)
        dx = gemms.input_grad(dy, parameter, num_local, offsets)
        defer_weight_grad(
            parameter,
            ctx.defer,
            lambda: gemms.weight_grad(parameter, dy, tuple(x), num_local, offsets),
        )
        return dx, None, None, None, None


class Experts(nn.Module):
    """This rank's experts of one layer, each cut over etp.

    Args:
        config: of the model.
        name: global name, `layers.{i}.experts`.
        ep: axis over which the experts are distributed.
        etp: axis that cuts the inner dim of each.
        factory: dtype and device of the parameters.
    """

    parts = KEEP_ALL  # `experts` and `activation` may be recomputed

    def __init__(self, config: ModelConfig, name: str, ep: Axis, etp: Axis, **factory) -> None:
        super().__init__()
        h, f = config.hidden_size, config.expert_hidden_size
        self.activation, self.ep, self.etp = config.activation, ep, etp
        self.num_local = ep.divide(config.num_experts, "model.num_experts")  # E/ep
        inner = etp.divide(f, "model.moe_ffn_hidden_size")  # f/etp
        self.up = self._up(config, name, inner, factory)
        piece = Piece((ep.rank * self.num_local, 0, etp.rank * inner), (self.num_local, h, inner))
        shape, init = (config.num_experts, h, f), config.output_init_std
        spec = ShardSpec(f"{name}.down.weight", shape, (piece,), expert=True, init=init)
        self.down = new_parameter(piece.shape, spec, **factory)
        self.up_bias = self.down_bias = None
        if config.mlp_bias:
            self.up_bias = self._up_bias(name, factory)
            self.down_bias = self._down_bias(name, factory)

    def _up(
        self, config: ModelConfig, name: str, inner: int, factory: dict[str, Any]
    ) -> nn.Parameter:
        h, f = config.hidden_size, config.expert_hidden_size
        first, num_local, halves = self.ep.rank * self.num_local, self.num_local, 1 + config.gated
        local_shape: tuple[int, ...] = (num_local, halves * f, h)
        pieces: tuple[Piece, ...] = (Piece((first, 0, 0), local_shape),)
        if self.etp.size > 1:
            # The gate rows and the up rows of an expert are two rectangles of the global tensor,
            # so dim 0 stacks both of all experts.
            local_shape = (num_local * halves, inner, h)
            pieces = tuple(
                Piece(
                    (first + expert, half * f + self.etp.rank * inner, 0),
                    (1, inner, h),
                    row=expert * halves + half,
                )
                for expert in range(num_local)
                for half in range(halves)
            )
        shape, stack = (config.num_experts, halves * f, h), (f,) * halves
        spec = ShardSpec(
            f"{name}.up.weight", shape, pieces, expert=True, init=config.init_std, stack=stack
        )
        return new_parameter(local_shape, spec, **factory)

    def _up_bias(self, name: str, factory: dict[str, Any]) -> nn.Parameter:
        weight = spec_of(self.up)
        pieces = tuple(Piece(p.offset[:-1], p.shape[:-1], p.row) for p in weight.pieces)
        spec = ShardSpec(f"{name}.up.bias", weight.shape[:-1], pieces, expert=True, decay=False)
        return new_parameter(tuple(self.up.shape[:-1]), spec, **factory)

    def _down_bias(self, name: str, factory: dict[str, Any]) -> nn.Parameter:
        num_experts, h, _ = spec_of(self.down).shape
        # Only the first etp rank adds the bias to its partial sum.
        copies, owner = (self.etp.name,) if self.etp.size > 1 else (), self.etp.rank == 0
        offset, shape = (self.ep.rank * self.num_local, 0), (self.num_local, h)
        piece = Piece(offset, shape, summed=copies, owner=owner)
        spec = ShardSpec(f"{name}.down.bias", (num_experts, h), (piece,), expert=True, decay=False)
        return new_parameter(piece.shape, spec, **factory)

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor, defer: Defer) -> Tensor:
        """Computes the experts' outputs.

        Args:
            x: `[r, h]`, rows sorted by expert.
            weights: `[r]`, the router's.
            offsets: int32 `[E/ep + 1]`, where each expert's rows begin and end.
            defer: takes the weight-gradient half of the backward.

        Returns:
            `[r, h]`, weighted, partial over etp.
        """
        # [r, f/etp]
        inner = self.parts.run(
            "experts", partial(self._inner, offsets=offsets, defer=defer), x, weights
        )
        y = _GroupedLinear.apply(inner, self.down, offsets, self.num_local, defer)  # partial [r, h]
        if self.down_bias is None or self.etp.rank > 0:
            return y
        return y + (weights[:, None] * self.down_bias[self._expert_of(y, offsets)]).to(y.dtype)

    def _expert_of(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Local expert of each row, int64 `[r]`; the last one for rows past the last offset."""
        row = torch.arange(rows.shape[0], dtype=offsets.dtype, device=offsets.device)
        return torch.searchsorted(offsets[1:-1].contiguous(), row, right=True)

    def _inner(self, x: Tensor, weights: Tensor, offsets: Tensor, defer: Defer) -> Tensor:
        # [r, 2f/etp] or [r, f/etp]
        inner = _GroupedLinear.apply(x, self.up, offsets, self.num_local, defer)
        if self.up_bias is not None:
            inner = inner + self.up_bias.view(self.num_local, -1)[self._expert_of(inner, offsets)]
        # The activation's backward may overwrite the output of `up`, which nothing else saves.
        gemms, overwrite = expert_gemms_of(self.down), self.parts.keeps("activation")
        activate = partial(gemms.activate, kind=self.activation, overwrite=overwrite)
        return self.parts.run("activation", activate, inner, weights)  # [r, f/etp]

    def extra_repr(self) -> str:
        num_experts = spec_of(self.up).shape[0]
        return (
            f"{self.num_local} of {num_experts} experts over {self.ep}, inner dim over {self.etp}"
        )

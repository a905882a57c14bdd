"""The experts' own matrices: one grouped GEMM for all experts of this rank, backward split into
input and weights.

up    [E, 2f, h]   of a gated activation the gate rows, then the up rows, of each expert; E cut over ep, f over etp
down  [E, h, f]    E cut over ep, f over etp: the output is a partial sum over etp

The router's weights are applied between the two (kernels/activation.py).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megatron5d.config.schema import ModelConfig
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.phases.recompute import KEEP_ALL
from megatron5d.phases.wgrad import Defer, defer_weight_grad
from megatron5d.precision.gemm import expert_gemms_of
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter, spec_of


class _GroupedLinear(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, parameter, offsets, num_local: int, defer: Defer):
        gemms = expert_gemms_of(parameter)
        operand = gemms.kept(x, offsets)
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
    """The experts of one layer that this rank holds, each cut over etp.

    Args:
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
        first, inner = ep.rank * self.num_local, etp.divide(f, "model.moe_ffn_hidden_size")  # f/etp
        halves = 2 if config.gated else 1
        if etp.size == 1:
            local_shape: tuple[int, ...] = (self.num_local, halves * f, h)
            pieces: tuple[Piece, ...] = (Piece((first, 0, 0), local_shape),)
        else:  # gate rows and up rows of an expert are two rectangles of the whole, so dim 0 stacks both of all experts
            local_shape = (self.num_local * halves, inner, h)
            pieces = tuple(
                Piece(
                    (first + e, part * f + etp.rank * inner, 0),
                    (1, inner, h),
                    row=e * halves + part,
                )
                for e in range(self.num_local)
                for part in range(halves)
            )
        shape, stack = (config.num_experts, halves * f, h), (f,) * halves
        up = ShardSpec(
            f"{name}.up.weight", shape, pieces, expert=True, init=config.init_std, stack=stack
        )
        self.up = new_parameter(local_shape, up, **factory)
        local_shape = (self.num_local, h, inner)
        pieces = (Piece((first, 0, etp.rank * inner), local_shape),)
        whole = (config.num_experts, h, f)
        down = ShardSpec(
            f"{name}.down.weight", whole, pieces, expert=True, init=config.output_init_std
        )
        self.down = new_parameter(local_shape, down, **factory)
        self.up_bias = self.down_bias = None
        if config.mlp_bias:
            pieces = tuple(Piece(each.offset[:-1], each.shape[:-1], each.row) for each in up.pieces)
            bias = ShardSpec(f"{name}.up.bias", shape[:-1], pieces, expert=True, decay=False)
            self.up_bias = new_parameter(tuple(self.up.shape[:-1]), bias, **factory)
            # the first alone adds it
            copies, owner = ((etp.name,) if etp.size > 1 else ()), etp.rank == 0
            piece = Piece((first, 0), (self.num_local, h), summed=copies, owner=owner)
            bias = ShardSpec(
                f"{name}.down.bias", (config.num_experts, h), (piece,), expert=True, decay=False
            )
            self.down_bias = new_parameter(piece.shape, bias, **factory)

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor, defer: Defer) -> Tensor:
        """
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
        """Returns int64 `[r]`: the local expert of each row; the last for rows past the last
        offset."""
        row = torch.arange(rows.shape[0], dtype=offsets.dtype, device=offsets.device)
        return torch.searchsorted(offsets[1:-1].contiguous(), row, right=True)

    def _inner(self, x: Tensor, weights: Tensor, offsets: Tensor, defer: Defer) -> Tensor:
        # [r, 2f/etp] or [r, f/etp]
        inner = _GroupedLinear.apply(x, self.up, offsets, self.num_local, defer)
        if self.up_bias is not None:
            inner = inner + self.up_bias.view(self.num_local, -1)[self._expert_of(inner, offsets)]
        # The activation's backward may write over the output of `up`, which no other operation
        # saves.
        gemms, overwrite = expert_gemms_of(self.down), self.parts.keeps("activation")
        activate = partial(gemms.activate, kind=self.activation, overwrite=overwrite)
        return self.parts.run("activation", activate, inner, weights)  # [r, f/etp]

    def extra_repr(self) -> str:
        shape = spec_of(self.up).shape
        return f"{self.num_local} of {shape[0]} experts cut over {self.ep}, inner dim cut over {self.etp}"

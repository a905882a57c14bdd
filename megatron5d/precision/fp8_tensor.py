"""Results that exist only in 8 bits: of SwiGLU before a down-projection, of a norm before an up-projection.

A result that only 8-bit products read is never written in its wide dtype (kernels/fp8/norm_swiglu.py). A stand-in takes
its place in autograd's graph: a tensor with the shape and dtype of the wide result but without its memory, whose
storage carries the operand (gemm.py). It gets gradients like any tensor, and recomputation and views find the operand.
All its values read as NaN, so a mistake makes the step fail instead of being wrong.

Encodes rows of activations as bytes to send them over the network: half the bytes of bfloat16.

A row becomes its values in e4m3, in groups of 128 whose scales are powers of two, and one byte per group with the
exponent of the scale. A blockwise product with such scales would quantise the row to the same numbers, so nothing is
lost where the experts are multiplied that way. Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import layer_norm_backward, rms_norm_backward, swiglu_backward
from kernels.activation import weighted_activation_backward
from kernels.dispatch import first_order
from kernels.fp8.norm_swiglu import layer_norm_quantized, rms_norm_quantized, swiglu_quantized
from kernels.fp8.quantize import E4M3, GROUP, Quantized, quantize_rows
from megatron5d.precision.gemm import Operand


def stand_in(shape: torch.Size, dtype: torch.dtype, operand: Operand) -> Tensor:
    """A stand-in for an operand: a single NaN expanded to a shape.

    Args:
        shape, dtype: of the wide result.
        operand: 8-bit values and scales.
    """
    nan = torch.full((1,), torch.nan, dtype=dtype, device=operand[0].device)
    nan.untyped_storage().operand = operand  # type: ignore[attr-defined]
    return nan.as_strided(shape, (0,) * len(shape))


def carried_by(x: Tensor) -> Operand | None:
    """The operand that x stands in for; None if x is an ordinary tensor."""
    return getattr(x.untyped_storage(), "operand", None)


def _carrying(q: Quantized, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return stand_in(shape, dtype, (q.values.view(shape), q.scales.view(*shape[:-1], q.scales.shape[-1])))


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, powers_of_two: bool, overwrite: bool):
        ctx.overwrite = overwrite
        ctx.save_for_backward(gate_up)
        shape = torch.Size((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        return _carrying(swiglu_quantized(gate_up, powers_of_two=powers_of_two), shape, gate_up.dtype)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward(dy, gate_up, ctx.overwrite), None, None


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weights, powers_of_two: bool, overwrite: bool):
        ctx.overwrite = overwrite
        ctx.save_for_backward(gate_up, weights)
        shape = torch.Size((gate_up.shape[0], gate_up.shape[1] // 2))
        eight = swiglu_quantized(gate_up, weights=weights, powers_of_two=powers_of_two)
        return _carrying(eight, shape, gate_up.dtype)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        gate_up, weights = ctx.saved_tensors
        return *weighted_activation_backward(dy, gate_up, weights, "swiglu", ctx.overwrite), None, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps: float, powers_of_two: bool):
        q, inverse = rms_norm_quantized(x, weight, eps, powers_of_two=powers_of_two)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, inverse)
        ctx.set_materialize_grads(False)
        return _carrying(q, x.shape, x.dtype), x

    @staticmethod
    @first_order
    def backward(ctx, dy, dx):
        if dy is None:
            return dx, None, None, None
        x, weight, inverse = ctx.saved_tensors
        return *rms_norm_backward(dy, x, weight, ctx.eps, inverse, dx), None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps: float, powers_of_two: bool):
        q, statistics = layer_norm_quantized(x, weight, bias, eps, powers_of_two=powers_of_two)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.set_materialize_grads(False)
        return _carrying(q, x.shape, x.dtype), x

    @staticmethod
    @first_order
    def backward(ctx, dy, dx):
        if dy is None:
            return dx, None, None, None, None
        x, weight, bias, *statistics = ctx.saved_tensors
        return *layer_norm_backward(dy, x, weight, bias, ctx.eps, statistics, dx), None, None


def eight_bit_swiglu(gate_up: Tensor, powers_of_two: bool, overwrite: bool = False) -> Tensor:
    """`swiglu` whose result only blockwise products read.

    Args:
        gate_up: `[..., 2f]`.
        powers_of_two: scales are powers of two.
        overwrite: as in `swiglu`.

    Returns:
        A stand-in `[..., f]` that carries e4m3 in 1×128 groups.
    """
    return _Swiglu.apply(gate_up, powers_of_two, overwrite)


def eight_bit_weighted_swiglu(gate_up: Tensor, weights: Tensor, powers_of_two: bool, overwrite: bool = False) -> Tensor:
    """`weighted_activation` of swiglu, whose result only blockwise products read: as `eight_bit_swiglu`.

    Args:
        weights: `[r]`, for rows `[r, 2f]`.
    """
    return _WeightedSwiglu.apply(gate_up, weights, powers_of_two, overwrite)


def eight_bit_rms_norm(x: Tensor, weight: Tensor, eps: float, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` without a residual, whose result only blockwise products read.

    Args:
        x: `[..., h]`.
        weight: `[h]`.
        eps: added to the mean of squares.
        powers_of_two: scales are powers of two.

    Returns:
        A stand-in `[..., h]` that carries e4m3 in 1×128 groups, and x.
    """
    return _RmsNorm.apply(x, weight, eps, powers_of_two)


def eight_bit_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, powers_of_two: bool
) -> tuple[Tensor, Tensor]:
    """The same with `add_layer_norm`; bias `[h]`."""
    return _LayerNorm.apply(x, weight, bias, eps, powers_of_two)


_MANTISSA_BITS = 23  # of float32; the bits above them are the exponent


class EightBitRows:
    """The codec: `[n, h]` <-> uint8 `[n, h + ceil(h/128)]`."""

    def encode(self, rows: Tensor) -> Tensor:
        """`[n, h]` of any floating dtype -> bytes."""
        q = quantize_rows(rows, powers_of_two=True)
        exponents = (q.scales.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
        return torch.cat((q.values.view(torch.uint8), exponents), 1)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes -> `[n, h]` in `dtype`."""
        groups = -(-wire.shape[1] // (GROUP + 1))  # h + ceil(h/128) bytes hold as many groups
        values, exponents = wire.split([wire.shape[1] - groups, groups], 1)
        scales = (exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
        return Quantized(values.contiguous().view(E4M3), scales, 1).dequantize(dtype)

"""FP8 recipes: the products of gemms.py with both operands in 8 bits.

                 inputs x           gradients dy       weights W          formats
    blockwise    1×128 of features  1×128 of features  128×128            e4m3 everywhere
    tensorwise   one scale          one scale          one scale          e4m3; gradients e5m2

Blockwise contracts the tokens of a weight gradient in groups of 128 tokens, whose scales are made from the 8-bit
values that forward and input gradient have used (kernels/fp8_turn.py): those are all that is kept. Every product is
accumulated in float32 after at most 128 terms; it leaves in the dtype of the weights (a weight gradient: of the main
gradient). On the CPU the same scales and blocks are multiplied in float32, or in float64 for a model in float64.

An operand is (values, scales), both with the tokens leading: sequence shards are quantised first and gathered in 8
bits, which gives the same numbers as the other order. Blockwise, what SwiGLU and norms make for these products alone
is made an operand at once (stand_in.py): the same bits in one pass over memory. Weights are quantised when they are
first used after a change, both ways, and kept until `forget_quantized`; under ZeRO-3 they arrive so, gathered in slices
(fp8_weights.py).

Tensorwise scales are maxima over all ranks that hold a part of the tensor, so they do not depend on tp or cp; those of
experts are taken expert by expert over the rows that have come to this rank, so they depend on how many came (ep).

Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3; current scaling: Micikevicius et al. 2022 (arXiv:2209.05433).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.fp8_grouped import grouped_matmul_fp8, grouped_weight_grad_fp8
from kernels.fp8_matmul import fp8_matmul
from kernels.fp8_quantize import (
    E4M3,
    E5M2,
    GROUP,
    Quantized,
    amax_of,
    cast_scaled,
    magnitude_of,
    quantize_blocks,
    quantize_rows,
    quantize_tensor,
    scales_of,
)
from kernels.fp8_turn import turn
from megatron5d.precision.fp8_weights import Pair, quantized_weight
from megatron5d.precision.gemms import ExpertGemms, Gemms, Operand, by_expert
from megatron5d.precision.gradient import grad_buffer
from megatron5d.precision.stand_in import carried_by, eight_bit_layer_norm, eight_bit_rms_norm, eight_bit_swiglu

Reduce = Callable[[Tensor], Tensor]
"""The maximum, over some ranks, of a float32 tensor."""


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight's products are made in 8 bits."""
    return isinstance(getattr(weight, "gemms", None), (BlockwiseGemms, TensorwiseGemms, BlockwiseExpertGemms))


def copies_bytes(weight: Tensor) -> int:
    """What a weight's 8-bit copies take, values and scales; 0 where it has none."""
    if not is_quantized(weight):
        return 0
    *stack, out_features, in_features = weight.shape
    blocks = math.prod(stack) * -(-out_features // GROUP) * -(-in_features // GROUP)
    scales = 1 if isinstance(weight.gemms, TensorwiseGemms) else 2 * blocks  # type: ignore[attr-defined]
    return 2 * weight.numel() + 4 * scales


def _flat(x: Operand) -> tuple[Tensor, Tensor]:
    """values `[rows, features]` and scales `[rows, c]`."""
    values, scales = x
    return values.flatten(0, -2), scales.flatten(0, -2)


def _rows(x: Tensor, powers_of_two: bool) -> Operand:
    """x `[..., features]` in 1×128 groups, as which it may have come."""
    carried = carried_by(x)
    if carried is not None:
        return carried
    q = quantize_rows(x.reshape(-1, x.shape[-1]), E4M3, powers_of_two=powers_of_two)
    return q.values.view(x.shape), q.scales.view(*x.shape[:-1], q.scales.shape[-1])  # of no rows, -1 could be anything


class BlockwiseGemms(Gemms):
    """
    Args:
        powers_of_two: scales are powers of two.
    """

    def __init__(self, powers_of_two: bool) -> None:
        self.powers_of_two = powers_of_two

    def operand(self, x: Tensor, gradient: bool = False) -> Operand:
        return _rows(x, self.powers_of_two)

    def activate(self, x: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        if kind != "swiglu":
            return super().activate(x, kind, overwrite)
        return eight_bit_swiglu(x, self.powers_of_two, overwrite)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return eight_bit_rms_norm(x, weight, eps, self.powers_of_two)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return eight_bit_layer_norm(x, weight, bias, eps, self.powers_of_two)

    def forward(self, x: Operand, weight: Tensor) -> Tensor:
        return self._product(x, self._weight(weight).straight, weight.dtype)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        return self._product(dy, self._weight(weight).turned, weight.dtype)

    def weight_grad(self, weight: Tensor, dy: Operand, x: Operand) -> None:
        a, b = (turn(Quantized(*_flat(each), 1), powers_of_two=self.powers_of_two) for each in (dy, x))
        fp8_matmul(a, b, accumulate_into=grad_buffer(weight))

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        """Largest magnitudes of 128×128 blocks `[1, down, across]` -> those that scales are made from (broadcast)."""
        return blocks

    def over_ranks(self, maxima: Tensor) -> Tensor:
        """Maxima of this rank -> maxima over all ranks that hold parts of the same weights."""
        return maxima

    def stored(self, values: Tensor, scales: Tensor) -> Quantized:
        """`[out, in]` in e4m3 and the scale of each block `[1, down, across]`, as the products read them."""
        return Quantized(values, scales[0], GROUP)

    def _product(self, x: Operand, weight: Quantized, dtype: torch.dtype) -> Tensor:
        y = fp8_matmul(Quantized(*_flat(x), 1), weight, out_dtype=dtype)
        return y.view(*x[0].shape[:-1], -1)

    def _weight(self, weight: Tensor) -> Pair:
        return quantized_weight(
            weight, lambda: Pair(*quantize_blocks(weight.detach(), powers_of_two=self.powers_of_two))
        )


class TensorwiseGemms(Gemms):
    """
    Args:
        powers_of_two: scales are powers of two.
        of_tokens: maximum over the ranks that hold other tokens, or other features, of an input or a gradient.
        of_weight: maximum over the ranks that hold other parts of a weight.
    """

    def __init__(self, powers_of_two: bool, of_tokens: Reduce, of_weight: Reduce) -> None:
        self.powers_of_two, self.of_tokens, self.of_weight = powers_of_two, of_tokens, of_weight

    def operand(self, x: Tensor, gradient: bool = False) -> Operand:
        amax = self.of_tokens(amax_of(x))
        q = quantize_tensor(x, E5M2 if gradient else E4M3, powers_of_two=self.powers_of_two, amax=amax)
        return q.values, q.scales.expand(*x.shape[:-1], 1).contiguous()

    def forward(self, x: Operand, weight: Tensor) -> Tensor:
        return self._product(x, self._weight(weight).straight, weight.dtype)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        return self._product(dy, self._weight(weight).turned, weight.dtype)

    def weight_grad(self, weight: Tensor, dy: Operand, x: Operand) -> None:
        a, b = (Quantized(values.t().contiguous(), scales[:1], 0) for values, scales in map(_flat, (dy, x)))
        fp8_matmul(a, b, accumulate_into=grad_buffer(weight))

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        """As of BlockwiseGemms."""
        return blocks.amax().view(1, 1, 1)

    def over_ranks(self, maxima: Tensor) -> Tensor:
        """As of BlockwiseGemms."""
        return self.of_weight(maxima)

    def stored(self, values: Tensor, scales: Tensor) -> Quantized:
        """As of BlockwiseGemms."""
        return Quantized(values, scales[0, :1, :1], 0)

    def _product(self, x: Operand, weight: Quantized, dtype: torch.dtype) -> Tensor:
        values, scales = _flat(x)
        return fp8_matmul(Quantized(values, scales[:1], 0), weight, out_dtype=dtype).view(*x[0].shape[:-1], -1)

    def _weight(self, weight: Tensor) -> Pair:
        def make() -> Pair:
            amax = self.of_weight(amax_of(weight.detach()))
            q = quantize_tensor(weight.detach(), powers_of_two=self.powers_of_two, amax=amax)
            return Pair(q, Quantized(q.values.t().contiguous(), q.scales, 0))

        return quantized_weight(weight, make)


class BlockwiseExpertGemms(ExpertGemms):
    """As BlockwiseGemms; the groups of a weight gradient's tokens do not straddle experts."""

    def __init__(self, powers_of_two: bool) -> None:
        self.powers_of_two = powers_of_two

    def operand(self, x: Tensor, offsets: Tensor, gradient: bool = False) -> Operand:
        return _rows(x, self.powers_of_two)

    def activate(self, x: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        if kind != "swiglu":
            return super().activate(x, kind, overwrite)
        return eight_bit_swiglu(x, self.powers_of_two, overwrite)

    def forward(self, x: Operand, parameter: Tensor, experts: int, offsets: Tensor) -> Tensor:
        weight = self._weight(parameter, experts).straight
        return grouped_matmul_fp8(self._grouped(x), weight, offsets, parameter.dtype)

    def input_grad(self, dy: Operand, parameter: Tensor, experts: int, offsets: Tensor) -> Tensor:
        weight = self._weight(parameter, experts).turned
        return grouped_matmul_fp8(self._grouped(dy), weight, offsets, parameter.dtype)

    def weight_grad(self, parameter: Tensor, dy: Operand, x: Operand, experts: int, offsets: Tensor) -> None:
        a, b = (self._turned(self._grouped(each), offsets) for each in (dy, x))
        grouped_weight_grad_fp8(a, b, offsets, by_expert(grad_buffer(parameter), experts))

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        """As of BlockwiseGemms, `[E, down, across]`."""
        return blocks

    def over_ranks(self, maxima: Tensor) -> Tensor:
        """As of BlockwiseGemms."""
        return maxima

    def stored(self, values: Tensor, scales: Tensor) -> Quantized:
        """As of BlockwiseGemms, `[E, out, in]`."""
        return Quantized(values, scales, GROUP)

    def _grouped(self, x: Operand) -> Quantized:
        values, scales = x
        return Quantized(values, scales, 1)

    def _turned(self, x: Quantized, offsets: Tensor) -> Quantized:
        return turn(x, offsets, powers_of_two=self.powers_of_two)

    def _weight(self, parameter: Tensor, experts: int) -> Pair:
        def make() -> Pair:
            return Pair(*quantize_blocks(by_expert(parameter.detach(), experts), powers_of_two=self.powers_of_two))

        return quantized_weight(parameter, make)


class TensorwiseExpertGemms(BlockwiseExpertGemms):
    """One scale for each expert's weight and for each expert's rows, in the form in which blockwise products read it.

    Args:
        powers_of_two: scales are powers of two.
        over_parts: maximum over the ranks that hold other parts of the same experts.
    """

    def __init__(self, powers_of_two: bool, over_parts: Reduce) -> None:
        super().__init__(powers_of_two)
        self.over_parts = over_parts

    def activate(self, x: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        # wide: the scale of an expert's rows is not known before all of them are
        return ExpertGemms.activate(self, x, kind, overwrite)

    def operand(self, x: Tensor, offsets: Tensor, gradient: bool = False) -> Operand:
        rows, experts, wide = x.shape[0], offsets.numel() - 1, x.float()
        expert = torch.searchsorted(offsets[1:].contiguous(), torch.arange(rows, device=x.device), right=True)
        expert = expert.clamp(max=experts - 1)  # rows past the last offset are padding
        amax = torch.zeros(experts, device=x.device)
        if rows:
            amax = amax.scatter_reduce(0, expert, magnitude_of(wide).amax(-1), "amax")
        amax = self.over_parts(amax)[expert][:, None]
        dtype = E5M2 if gradient else E4M3
        scales = scales_of(amax, dtype, self.powers_of_two)
        return cast_scaled(wide, amax, scales, dtype), scales

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        return blocks.amax((1, 2), keepdim=True)

    def over_ranks(self, maxima: Tensor) -> Tensor:
        return self.over_parts(maxima)

    def _grouped(self, x: Operand) -> Quantized:
        values, scales = x
        return Quantized(values, scales.expand(-1, -(-values.shape[1] // GROUP)).contiguous(), 1)

    def _turned(self, x: Quantized, offsets: Tensor) -> Quantized:
        return turn(x, offsets, keep=True)

    def _weight(self, parameter: Tensor, experts: int) -> Pair:
        def make() -> Pair:
            stack = by_expert(parameter.detach(), experts).float()
            amax = self.over_parts(magnitude_of(stack).amax((1, 2)))[:, None, None]
            scales = scales_of(amax, E4M3, self.powers_of_two)
            values = cast_scaled(stack, amax, scales, E4M3)
            blocks = scales.expand(-1, *(-(-n // GROUP) for n in stack.shape[1:])).contiguous()
            turned = Quantized(values.mT.contiguous(), blocks.mT.contiguous(), GROUP)
            return Pair(Quantized(values, blocks, GROUP), turned)

        return quantized_weight(parameter, make)

"""FP8 recipes: the GEMMs of gemm.py with both operands in FP8.

                 inputs x           gradients dy       weights W          formats
    blockwise    1×128 of features  1×128 of features  128×128            e4m3 everywhere
    tensorwise   one scale          one scale          one scale          e4m3; gradients e5m2

A weight gradient sums over tokens, so a blockwise one needs groups of 128 tokens. They are made
from the FP8 values of forward and input gradient (kernels/fp8/quantize.py), so only those are kept.
Every GEMM is accumulated in float32 after at most 128 terms; the result has the dtype of the
weights (a weight gradient that of the main gradient). On the CPU the same scales and blocks are
multiplied in float32, or in float64 for a model in float64.

An operand is (values, scales), both with the tokens in the leading dims: sequence shards are
quantised first and gathered in FP8, which gives the same numbers as the other order. With
blockwise, SwiGLU and norms whose result only these GEMMs read write it in FP8 (fp8_tensor.py): the
same bits with one pass over memory. On a GPU so does the gradient of SwiGLU between two linear
layers without a bias, and its transpose in the same pass. Weights and their transposes are
quantised at the first use after a change and kept until `forget_copies`; under ZeRO-3 slices are
quantised and gathered in FP8 (fp8_tensor.py).

Tensorwise scales are maxima over all ranks that hold a part of the tensor, so they do not depend on
tp or cp. Experts have a scale each, over the rows of this rank, so it depends on ep.

Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3; current scaling: Micikevicius et al. 2022
    (arXiv:2209.05433).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron5d.kernels.choice import AUTO, Settings
from megatron5d.kernels.fp8.gemm import fp8_matmul, grouped_matmul_fp8, grouped_weight_grad_fp8
from megatron5d.kernels.fp8.quantize import (
    E4M3,
    E5M2,
    GROUP,
    Quantized,
    quantize_blocks,
    quantize_rows,
)
from megatron5d.kernels.fp8.quantize_tensor import (
    amax_of,
    amax_of_rows,
    quantize_by_row,
    quantize_tensor,
    quantize_tensor_both_ways,
)
from megatron5d.kernels.fp8.transpose import fp8_transpose, transpose_values
from megatron5d.phases.recompute import recomputable
from megatron5d.phases.wgrad import grad_target
from megatron5d.precision.fp8_tensor import (
    Fp8Tensor,
    NormFp8,
    QuantizedPair,
    SwigluFp8,
    Turned,
    quantized_weight,
    stack_of,
)
from megatron5d.precision.gemm import ExpertGemms, Gemms, Operand, by_expert
from megatron5d.topology.shard_spec import spec_of, state_of

Reduce = Callable[[Tensor], Tensor]
"""Reduces a float32 tensor to its maximum over some ranks."""


def is_quantized(weight: Tensor) -> bool:
    """Says whether a weight is multiplied in FP8."""
    return isinstance(state_of(weight).gemms, Fp8Recipe)


def quantized_copies(weight: Tensor) -> QuantizedPair:
    """Returns the FP8 copies of a weight for which `is_quantized`, made if they are missing."""
    experts = (stack_of(weight)[0],) if spec_of(weight).expert else ()
    return state_of(weight).gemms.copies(weight, *experts)


def _flat(x: Operand) -> tuple[Tensor, Tensor]:
    """Flattens the tokens of an operand into one dim: values `[rows, features]`, scales `[rows,
    c]`."""
    values, scales = x
    return values.flatten(0, -2), scales.flatten(0, -2)


def _rows(x: Tensor, powers_of_two: bool) -> Operand:
    """Quantises x `[..., features]` in 1×128 groups, unless it is an Fp8Tensor."""
    if isinstance(x, Fp8Tensor):
        return x.qdata, x.scales
    q = quantize_rows(x.reshape(-1, x.shape[-1]), E4M3, powers_of_two=powers_of_two)
    num_scales = q.scales.shape[-1]  # not -1, which is ambiguous where there are no rows
    return q.values.view(x.shape), q.scales.view(*x.shape[:-1], num_scales)


class Fp8Recipe:
    """Quantises weights with a scale for each 128×128 block; a subclass may reduce the blocks'
    maxima further."""

    def __init__(self, powers_of_two: bool, settings: Settings = AUTO) -> None:
        self.powers_of_two, self.settings = powers_of_two, settings

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        """Maps maxima of blocks `[matrices, down, across]` to those of the scales, which broadcast
        over blocks."""
        return blocks

    def over_ranks(self, maxima: Tensor) -> Tensor:
        """Maps maxima of this rank to maxima over all ranks that hold parts of the same weights."""
        return maxima

    def kept(self, x: Tensor, *rows: Tensor) -> Operand:
        """Makes the operand of an input x; `rows` are offsets of experts."""
        return recomputable(x, lambda x: self.operand(x, *rows))  # type: ignore[attr-defined]

    def stored(self, values: Tensor, scales: Tensor) -> Quantized:
        """Joins `[..., out, in]` in e4m3 and the scales of its blocks `[matrices, down, across]`
        for the GEMMs."""
        return Quantized(values, scales.view(*values.shape[:-2], *scales.shape[1:]), GROUP)


class BlockwiseGemms(Fp8Recipe, Gemms):
    """GEMMs of a linear layer with the blockwise recipe."""

    def operand(self, x: Tensor, gradient: bool = False) -> Operand:
        return _rows(x, self.powers_of_two)

    def activate(
        self, x: Tensor, kind: str, overwrite: bool = False, *, reader: Gemms | None = None
    ) -> Tensor:
        if kind != "swiglu":
            return super().activate(x, kind, overwrite)
        return SwigluFp8.apply(x, None, self.powers_of_two, overwrite, reader is self)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, settings: Settings = AUTO
    ) -> tuple[Tensor, Tensor]:
        return NormFp8.apply(x, weight, None, eps, False, self.powers_of_two, settings)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, settings: Settings = AUTO
    ) -> tuple[Tensor, Tensor]:
        return NormFp8.apply(x, weight, bias, eps, True, self.powers_of_two, settings)

    def forward(self, x: Operand, weight: Tensor) -> Tensor:
        return self._gemm(x, self.copies(weight).plain, weight.dtype)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        return self._gemm(dy, self.copies(weight).transposed, weight.dtype)

    def for_weight_grad(self, dy: Operand) -> Operand:
        return getattr(dy[0], "turned", dy)  # SwigluFp8 has made both at once

    def weight_grad(self, weight: Tensor, dy: Operand, x: Operand) -> None:
        a, b = (
            Quantized(*each, 1)
            if isinstance(each, Turned)
            else fp8_transpose(Quantized(*_flat(each), 1), powers_of_two=self.powers_of_two)
            for each in (dy, x)
        )
        main_grad, accumulate = grad_target(weight)
        fp8_matmul(a, b, into=main_grad, accumulate=accumulate, settings=self.settings)

    def _gemm(self, x: Operand, weight: Quantized, dtype: torch.dtype) -> Tensor:
        rows = Quantized(*_flat(x), 1)
        y = fp8_matmul(rows, weight, out_dtype=dtype, settings=self.settings)
        return y.view(*x[0].shape[:-1], -1)

    def copies(self, weight: Tensor) -> QuantizedPair:
        """Returns the FP8 copies of a weight, made if they are missing."""
        return quantized_weight(
            weight,
            lambda: QuantizedPair(
                *quantize_blocks(weight.detach(), powers_of_two=self.powers_of_two)
            ),
        )


class TensorwiseGemms(Fp8Recipe, Gemms):
    """GEMMs of a linear layer with the tensorwise recipe.

    Args:
        powers_of_two: scales are powers of two.
        of_tokens: the maximum over the ranks that hold parts of the same input or gradient (tokens
            or features).
        of_weight: the maximum over the ranks that hold parts of the same weight.
    """

    def __init__(
        self, powers_of_two: bool, of_tokens: Reduce, of_weight: Reduce, settings: Settings = AUTO
    ) -> None:
        super().__init__(powers_of_two, settings)
        self.of_tokens, self.of_weight = of_tokens, of_weight

    def operand(self, x: Tensor, gradient: bool = False) -> Operand:
        amax = self.of_tokens(amax_of(x))
        q = quantize_tensor(
            x, E5M2 if gradient else E4M3, powers_of_two=self.powers_of_two, amax=amax
        )
        return q.values, q.scales.expand(*x.shape[:-1], 1).contiguous()

    def forward(self, x: Operand, weight: Tensor) -> Tensor:
        return self._gemm(x, self.copies(weight).plain, weight.dtype)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        return self._gemm(dy, self.copies(weight).transposed, weight.dtype)

    def weight_grad(self, weight: Tensor, dy: Operand, x: Operand) -> None:
        a, b = (
            Quantized(transpose_values(values), scales[:1], 0)
            for values, scales in map(_flat, (dy, x))
        )
        main_grad, accumulate = grad_target(weight)
        fp8_matmul(a, b, into=main_grad, accumulate=accumulate, settings=self.settings)

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        return blocks.amax().view(1, 1, 1)

    def over_ranks(self, maxima: Tensor) -> Tensor:
        return self.of_weight(maxima)

    def stored(self, values: Tensor, scales: Tensor) -> Quantized:
        return Quantized(values, scales[0, :1, :1], 0)

    def _gemm(self, x: Operand, weight: Quantized, dtype: torch.dtype) -> Tensor:
        values, scales = _flat(x)
        matrix = Quantized(values, scales[:1], 0)
        y = fp8_matmul(matrix, weight, out_dtype=dtype, settings=self.settings)
        return y.view(*x[0].shape[:-1], -1)

    def copies(self, weight: Tensor) -> QuantizedPair:

        def make() -> QuantizedPair:
            amax = self.of_weight(amax_of(weight.detach()))
            both = quantize_tensor_both_ways(
                weight.detach(), powers_of_two=self.powers_of_two, amax=amax
            )
            return QuantizedPair(*both)

        return quantized_weight(weight, make)


class BlockwiseExpertGemms(Fp8Recipe, ExpertGemms):
    """GEMMs of experts with the blockwise recipe; no group of 128 tokens has tokens of two
    experts."""

    def operand(self, x: Tensor, offsets: Tensor, gradient: bool = False) -> Operand:
        return _rows(x, self.powers_of_two)

    def activate(self, x: Tensor, weights: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        if kind != "swiglu":
            return super().activate(x, weights, kind, overwrite)
        return SwigluFp8.apply(x, weights, self.powers_of_two, overwrite, False)

    def forward(self, x: Operand, parameter: Tensor, num_local: int, offsets: Tensor) -> Tensor:
        weight = self.copies(parameter, num_local).plain
        return grouped_matmul_fp8(self._grouped(x), weight, offsets, parameter.dtype)

    def input_grad(self, dy: Operand, parameter: Tensor, num_local: int, offsets: Tensor) -> Tensor:
        weight = self.copies(parameter, num_local).transposed
        return grouped_matmul_fp8(self._grouped(dy), weight, offsets, parameter.dtype)

    def weight_grad(
        self, parameter: Tensor, dy: Operand, x: Operand, num_local: int, offsets: Tensor
    ) -> None:
        a, b = (self._transposed(self._grouped(each), offsets) for each in (dy, x))
        main_grad, accumulate = grad_target(parameter)
        grouped_weight_grad_fp8(
            a, b, offsets, by_expert(main_grad, num_local), accumulate=accumulate
        )

    def _grouped(self, x: Operand) -> Quantized:
        values, scales = x
        return Quantized(values, scales, 1)

    def _transposed(self, x: Quantized, offsets: Tensor) -> Quantized:
        return fp8_transpose(x, offsets, powers_of_two=self.powers_of_two)

    def copies(self, parameter: Tensor, num_local: int) -> QuantizedPair:

        def make() -> QuantizedPair:
            return QuantizedPair(
                *quantize_blocks(
                    by_expert(parameter.detach(), num_local), powers_of_two=self.powers_of_two
                )
            )

        return quantized_weight(parameter, make)


class TensorwiseExpertGemms(BlockwiseExpertGemms):
    """GEMMs of experts with one scale for each expert's weight and for each expert's rows.

    The scales are repeated for each block, so that the kernels of blockwise GEMMs can read them.

    Args:
        powers_of_two: scales are powers of two.
        over_parts: the maximum over the ranks that hold parts of the same experts.
    """

    def __init__(self, powers_of_two: bool, over_parts: Reduce) -> None:
        super().__init__(powers_of_two)
        self.over_parts = over_parts

    def activate(self, x: Tensor, weights: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        # not in FP8: the scale of an expert's rows is known only when all of them are
        return ExpertGemms.activate(self, x, weights, kind, overwrite)

    def operand(self, x: Tensor, offsets: Tensor, gradient: bool = False) -> Operand:
        rows, num_local = x.shape[0], offsets.numel() - 1
        row = torch.arange(rows, dtype=offsets.dtype, device=x.device)
        expert = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
        # rows past the last offset are padding, of no expert
        amax = torch.zeros(num_local + 1, device=x.device)
        if rows:
            amax = amax.scatter_reduce(0, expert, amax_of_rows(x), "amax")
        amax = self.over_parts(amax[:-1])[expert.clamp(max=num_local - 1)]
        return quantize_by_row(
            x, amax, E5M2 if gradient else E4M3, powers_of_two=self.powers_of_two
        )

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        return blocks.amax((1, 2), keepdim=True)

    def over_ranks(self, maxima: Tensor) -> Tensor:
        return self.over_parts(maxima)

    def _grouped(self, x: Operand) -> Quantized:
        values, scales = x
        return Quantized(values, scales.expand(-1, -(-values.shape[1] // GROUP)).contiguous(), 1)

    def _transposed(self, x: Quantized, offsets: Tensor) -> Quantized:
        return fp8_transpose(x, offsets, keep_scales=True)

    def copies(self, parameter: Tensor, num_local: int) -> QuantizedPair:
        def make() -> QuantizedPair:
            stack = by_expert(parameter.detach(), num_local)
            rows, height = stack.flatten(0, 1), stack.shape[1]
            amax = self.over_parts(
                amax_of_rows(rows).view(num_local, height).amax(1)
            ).repeat_interleave(height)
            values, each = quantize_by_row(rows, amax, powers_of_two=self.powers_of_two)
            values, scales = values.view(stack.shape), each.view(num_local, height, 1)[:, :1]
            blocks = scales.expand(-1, *(-(-n // GROUP) for n in stack.shape[1:])).contiguous()
            other = Quantized(transpose_values(values), blocks.mT.contiguous(), GROUP)
            return QuantizedPair(Quantized(values, blocks, GROUP), other)

        return quantized_weight(parameter, make)

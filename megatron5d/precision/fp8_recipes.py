"""FP8 recipes: the GEMMs of gemm.py with both operands in FP8.

                 inputs x           gradients dy       weights W          formats
    blockwise    1×128 of features  1×128 of features  128×128            e4m3 everywhere
    tensorwise   one scale          one scale          one scale          e4m3; gradients e5m2

A weight gradient sums over tokens, so a blockwise one needs groups of 128 tokens. They are computed
from the FP8 values of forward and input gradient (kernels/fp8/transpose.py), so only those are
saved. Every GEMM is accumulated in float32 after at most 128 terms; the result has the dtype of the
weights (a weight gradient that of the main gradient). On the CPU the same scales and blocks are
multiplied in float32, or in float64 for a model in float64.

An operand is (values, scales), both with the tokens in the leading dims: sequence shards are
quantized first and gathered in FP8, which gives the same numbers as the other order. With
blockwise, SwiGLU and norms whose result only these GEMMs read store it in FP8 (fp8_tensor.py): the
same bits with one pass over memory. So does, on a GPU, the gradient of SwiGLU between two linear
layers without a bias, together with its transpose. Weights and their transposes are quantized at
the first use after a change and kept until `forget_copies`; under ZeRO-3 slices are quantized and
gathered in FP8 (fp8_weights.py).

Tensorwise scales derive from maxima over all ranks that hold a part of the tensor, so they do not
depend on tp or cp. Each expert has one scale for its rows on this rank, which depends on ep.

Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3; current scaling: Micikevicius et al. 2022
    (arXiv:2209.05433).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron5d.kernels.choice import AUTO, Settings
from megatron5d.kernels.dispatch import cdiv
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
from megatron5d.phases.activations import recomputable
from megatron5d.phases.wgrad import grad_target
from megatron5d.precision.fp8_tensor import Fp8Tensor, NormFp8, SwigluFp8
from megatron5d.precision.fp8_weights import QuantizedPair, quantized_weight, stack_shape
from megatron5d.precision.gemm import ExpertGemms, Gemms, Operand, by_expert
from megatron5d.topology.shard_spec import spec_of, state_of

Reduce = Callable[[Tensor], Tensor]
"""Reduces a float32 tensor to its maximum over some ranks."""


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is multiplied in FP8."""
    return isinstance(state_of(weight).gemms, Fp8Recipe)


def quantized_copies(weight: Tensor) -> QuantizedPair:
    """The FP8 copies of a weight for which `is_quantized`, computed if they are missing."""
    num_local = stack_shape(weight)[0] if spec_of(weight).expert else None
    return state_of(weight).gemms.copies(weight, num_local)


class TransposedOperand(tuple[Tensor, ...]):
    """A weight gradient's operand that is already transposed: values `[features, G·128]`, scales
    `[features, G]`."""


class GradientOperand(tuple[Tensor, ...]):
    """The operand of a gradient whose transpose is already computed."""

    transposed: TransposedOperand


def _flatten(x: Operand) -> tuple[Tensor, Tensor]:
    """Flattens the tokens of an operand into one dim: values `[rows, features]`, scales
    `[rows, c]`."""
    values, scales = x
    return values.flatten(0, -2), scales.flatten(0, -2)


def _quantize_groups(x: Tensor, powers_of_two: bool) -> Operand:
    """Quantizes x `[..., features]` in 1×128 groups, unless it is an Fp8Tensor."""
    if not isinstance(x, Fp8Tensor):
        q = quantize_rows(x.reshape(-1, x.shape[-1]), E4M3, powers_of_two=powers_of_two)
        num_scales = q.scales.shape[-1]  # -1 would be ambiguous without rows
        return q.values.view(x.shape), q.scales.view(*x.shape[:-1], num_scales)
    if x.transposed is None:
        return x.qdata, x.scales
    operand = GradientOperand((x.qdata, x.scales))
    operand.transposed = TransposedOperand((x.transposed.values, x.transposed.scales))
    return operand


class Fp8Recipe:
    """Quantizes weights with a scale for each 128×128 block; a subclass may reduce the maxima of
    blocks further."""

    def __init__(self, powers_of_two: bool, settings: Settings = AUTO) -> None:
        self.powers_of_two, self.settings = powers_of_two, settings

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        """Reduces maxima of blocks `[matrices, down, across]` to those that have a scale each;
        broadcasts over blocks."""
        return blocks

    def max_over_ranks(self, maxima: Tensor) -> Tensor:
        """Reduces maxima to those over all ranks that hold parts of the same weights."""
        return maxima

    def gathered(self, values: Tensor, scales: Tensor) -> Quantized:
        """Combines gathered values `[..., out, in]` in e4m3 with the scales of their blocks
        `[matrices, down, across]`."""
        return Quantized(values, scales.view(*values.shape[:-2], *scales.shape[1:]), GROUP)

    def quantize_weight(self, matrices: Tensor) -> tuple[Quantized, Quantized]:
        """Quantizes a weight `[out, in]`, or experts `[E/ep, out, in]`, and its transpose."""
        return quantize_blocks(matrices, powers_of_two=self.powers_of_two)

    def copies(self, weight: Tensor, num_local: int | None = None) -> QuantizedPair:
        """The FP8 copies of a weight, computed if they are missing.

        Args:
            num_local: number of experts in the weight; None = it is one matrix.
        """

        def quantize() -> QuantizedPair:
            matrices = weight.detach()
            if num_local is not None:
                matrices = by_expert(matrices, num_local)
            return QuantizedPair(*self.quantize_weight(matrices))

        return quantized_weight(weight, quantize)


class LinearRecipe(Fp8Recipe, Gemms):
    """GEMMs of a linear layer in FP8; a subclass defines the operands."""

    def saved_operand(self, x: Tensor) -> Operand:
        return recomputable(x, self.operand)

    def forward(self, x: Operand, weight: Tensor) -> Tensor:
        return self._matmul(x, self.copies(weight).plain, weight.dtype)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        return self._matmul(dy, self.copies(weight).transposed, weight.dtype)

    def weight_grad(self, weight: Tensor, dy: Operand, x: Operand) -> None:
        a, b = self._transposed(dy), self._transposed(x)
        main_grad, accumulate = grad_target(weight)
        fp8_matmul(a, b, into=main_grad, accumulate=accumulate, settings=self.settings)

    def _matmul(self, x: Operand, weight: Quantized, dtype: torch.dtype) -> Tensor:
        y = fp8_matmul(self._matrix(x), weight, out_dtype=dtype, settings=self.settings)
        return y.view(*x[0].shape[:-1], -1)

    def _matrix(self, x: Operand) -> Quantized:
        """Views an operand as a matrix `[tokens, features]`."""
        raise NotImplementedError

    def _transposed(self, x: Operand) -> Quantized:
        """Transposes an operand to `[features, tokens]`."""
        raise NotImplementedError


class BlockwiseGemms(LinearRecipe):
    """GEMMs of a linear layer with the blockwise recipe."""

    def operand(self, x: Tensor, gradient: bool = False) -> Operand:
        return _quantize_groups(x, self.powers_of_two)

    def activate(
        self, x: Tensor, kind: str, overwrite: bool = False, *, reader: Gemms | None = None
    ) -> Tensor:
        if kind != "swiglu":
            return super().activate(x, kind, overwrite)
        return SwigluFp8.apply(x, None, self.powers_of_two, overwrite, reader is self)

    def norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, settings: Settings = AUTO
    ) -> tuple[Tensor, Tensor]:
        return NormFp8.apply(x, weight, bias, eps, self.powers_of_two, settings)

    def for_weight_grad(self, dy: Operand) -> Operand:
        return dy.transposed if isinstance(dy, GradientOperand) else dy

    def _matrix(self, x: Operand) -> Quantized:
        return Quantized(*_flatten(x), 1)

    def _transposed(self, x: Operand) -> Quantized:
        if isinstance(x, TransposedOperand):
            values, scales = x
            return Quantized(values, scales, 1)
        return fp8_transpose(self._matrix(x), powers_of_two=self.powers_of_two)


class TensorwiseGemms(LinearRecipe):
    """GEMMs of a linear layer with the tensorwise recipe.

    Args:
        powers_of_two: scales are powers of two.
        max_over_tokens: the maximum over the ranks that hold parts of the same input or gradient
            (tokens or features).
        max_over_weight: the maximum over the ranks that hold parts of the same weight.
    """

    def __init__(
        self,
        powers_of_two: bool,
        max_over_tokens: Reduce,
        max_over_weight: Reduce,
        settings: Settings = AUTO,
    ) -> None:
        super().__init__(powers_of_two, settings)
        self.max_over_tokens, self.max_over_weight = max_over_tokens, max_over_weight

    def operand(self, x: Tensor, gradient: bool = False) -> Operand:
        dtype, amax = E5M2 if gradient else E4M3, self.max_over_tokens(amax_of(x))
        q = quantize_tensor(x, dtype, powers_of_two=self.powers_of_two, amax=amax)
        return q.values, q.scales.expand(*x.shape[:-1], 1).contiguous()

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        return blocks.amax().view(1, 1, 1)

    def max_over_ranks(self, maxima: Tensor) -> Tensor:
        return self.max_over_weight(maxima)

    def gathered(self, values: Tensor, scales: Tensor) -> Quantized:
        return Quantized(values, scales[0, :1, :1], 0)

    def quantize_weight(self, matrices: Tensor) -> tuple[Quantized, Quantized]:
        amax = self.max_over_weight(amax_of(matrices))
        return quantize_tensor_both_ways(matrices, powers_of_two=self.powers_of_two, amax=amax)

    def _matrix(self, x: Operand) -> Quantized:
        values, scales = _flatten(x)
        return Quantized(values, scales[:1], 0)

    def _transposed(self, x: Operand) -> Quantized:
        matrix = self._matrix(x)
        return Quantized(transpose_values(matrix.values), matrix.scales, 0)


class BlockwiseExpertGemms(Fp8Recipe, ExpertGemms):
    """GEMMs of experts with the blockwise recipe; no group of 128 tokens mixes two experts."""

    def operand(self, x: Tensor, offsets: Tensor, gradient: bool = False) -> Operand:
        return _quantize_groups(x, self.powers_of_two)

    def saved_operand(self, x: Tensor, offsets: Tensor) -> Operand:
        return recomputable(x, lambda x: self.operand(x, offsets))

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
        a, b = (self._transposed(self._grouped(operand), offsets) for operand in (dy, x))
        main_grad, accumulate = grad_target(parameter)
        stack = by_expert(main_grad, num_local)
        grouped_weight_grad_fp8(a, b, offsets, stack, accumulate=accumulate)

    def _grouped(self, x: Operand) -> Quantized:
        """Views an operand as rows with a scale for each 1×128 group."""
        values, scales = x
        return Quantized(values, scales, 1)

    def _transposed(self, x: Quantized, offsets: Tensor) -> Quantized:
        return fp8_transpose(x, offsets, powers_of_two=self.powers_of_two)


class TensorwiseExpertGemms(BlockwiseExpertGemms):
    """GEMMs of experts with one scale for each expert's weight and for each expert's rows.

    The scales are repeated for each block, so that the kernels of blockwise GEMMs can read them.

    Args:
        powers_of_two: scales are powers of two.
        max_over_experts: the maximum over the ranks that hold parts of the same experts.
    """

    def __init__(self, powers_of_two: bool, max_over_experts: Reduce) -> None:
        super().__init__(powers_of_two)
        self.max_over_experts = max_over_experts

    def activate(self, x: Tensor, weights: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        # Not in FP8: the scale of an expert's rows depends on all of them.
        return ExpertGemms.activate(self, x, weights, kind, overwrite)

    def operand(self, x: Tensor, offsets: Tensor, gradient: bool = False) -> Operand:
        num_rows, num_local = x.shape[0], offsets.numel() - 1
        row = torch.arange(num_rows, dtype=offsets.dtype, device=x.device)
        # Rows past the last offset are padding, and belong to expert `num_local`.
        expert = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
        # The maximum of each expert, over its rows.
        amax = torch.zeros(num_local + 1, device=x.device)
        if num_rows:
            amax = amax.scatter_reduce(0, expert, amax_of_rows(x), "amax")
        row_amax = self.max_over_experts(amax[:-1])[expert.clamp(max=num_local - 1)]
        dtype = E5M2 if gradient else E4M3
        return quantize_by_row(x, row_amax, dtype, powers_of_two=self.powers_of_two)

    def weight_maxima(self, blocks: Tensor) -> Tensor:
        return blocks.amax((1, 2), keepdim=True)

    def max_over_ranks(self, maxima: Tensor) -> Tensor:
        return self.max_over_experts(maxima)

    def quantize_weight(self, matrices: Tensor) -> tuple[Quantized, Quantized]:
        num_local, height, width = matrices.shape
        rows = matrices.flatten(0, 1)
        amax = self.max_over_experts(amax_of_rows(rows).view(num_local, height).amax(1))
        # All rows of an expert get its scale.
        row_values, row_scales = quantize_by_row(
            rows, amax.repeat_interleave(height), powers_of_two=self.powers_of_two
        )
        values = row_values.view(matrices.shape)
        scales = row_scales.view(num_local, height, 1)[:, :1]
        # The blockwise kernels read a scale per block.
        blocks = scales.expand(-1, cdiv(height, GROUP), cdiv(width, GROUP)).contiguous()
        transposed = Quantized(transpose_values(values), blocks.mT.contiguous(), GROUP)
        return Quantized(values, blocks, GROUP), transposed

    def _grouped(self, x: Operand) -> Quantized:
        values, scales = x
        return Quantized(values, scales.expand(-1, cdiv(values.shape[1], GROUP)).contiguous(), 1)

    def _transposed(self, x: Quantized, offsets: Tensor) -> Quantized:
        return fp8_transpose(x, offsets, keep_scales=True)

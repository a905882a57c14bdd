"""Activations that exist in FP8 only, and the FP8 codec of the MoE dispatch.

The result of SwiGLU or a norm that only FP8 GEMMs read is never stored in its wide dtype
(kernels/fp8/norm_swiglu.py). Autograd sees an `Fp8Tensor` with the shape and dtype of the wide
result, which receives a gradient like any tensor.

The codec encodes rows of activations as bytes to send them over the network: half the bytes of
bfloat16. A row becomes its values in e4m3, in groups of 128 whose scales are powers of two, and one
byte per group with the exponent of the scale. A blockwise GEMM with such scales quantizes the row
to the same numbers, so nothing is lost where the experts are multiplied that way. Source:
DeepSeek-V3 (arXiv:2412.19437), section 3.3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron5d.kernels import activation_backward, norm_backward
from megatron5d.kernels.dispatch import FirstOrderFunction, runs_triton
from megatron5d.kernels.fp8.norm_swiglu import (
    norm_quantized,
    swiglu_backward_quantized,
    swiglu_quantized,
)
from megatron5d.kernels.fp8.quantize import E4M3, GROUP, Quantized, quantize_rows

_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)


class Fp8Tensor(Tensor):
    """A tensor `[..., features]` of FP8 values with scales: the operand of an FP8 GEMM.

    It can be detached, and viewed with other leading dims. Any other operation raises, so nothing
    reads it by mistake.

    Args:
        qdata: `[..., features]` in FP8.
        scales: `[..., c]` float32, those of 1×128 groups.
        dtype: that autograd sees.
    """

    qdata: Tensor
    scales: Tensor
    transposed: Quantized | None = None  # for a weight gradient, if already computed

    @staticmethod
    def __new__(cls, qdata: Tensor, scales: Tensor, dtype: torch.dtype) -> Fp8Tensor:
        x = Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)
        x.qdata, x.scales = qdata, scales
        return x

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["qdata", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, size, stride
    ) -> Fp8Tensor:
        return Fp8Tensor(inner["qdata"], inner["scales"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        x = next(arg for arg in args if isinstance(arg, Fp8Tensor))
        qdata = x.qdata.view(args[1] if len(args) > 1 else x.shape) if func in _VIEWS else None
        if qdata is None or qdata.shape[-1] != x.shape[-1]:
            raise RuntimeError(f"{func} on an Fp8Tensor {tuple(x.shape)}: only FP8 GEMMs read it")
        return Fp8Tensor(qdata, x.scales.view(*qdata.shape[:-1], x.scales.shape[-1]), x.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fp8Tensor({tuple(self.shape)}, {self.dtype})"


def _fp8_tensor(q: Quantized, shape: tuple[int, ...], dtype: torch.dtype) -> Fp8Tensor:
    return Fp8Tensor(q.values.view(shape), q.scales.view(*shape[:-1], q.scales.shape[-1]), dtype)


class SwigluFp8(FirstOrderFunction):
    """SwiGLU, optionally times a weight per row, as an Fp8Tensor in 1×128 groups of e4m3.

    With `grad_in_fp8` the gradient is an Fp8Tensor with its transpose as well, where a kernel
    computes both.
    """

    @staticmethod
    def forward(ctx, gate_up, weights, powers_of_two: bool, overwrite: bool, grad_in_fp8: bool):
        ctx.overwrite, ctx.powers_of_two, ctx.grad_in_fp8 = overwrite, powers_of_two, grad_in_fp8
        ctx.save_for_backward(gate_up, weights)
        shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        q = swiglu_quantized(gate_up, weights=weights, powers_of_two=powers_of_two)
        return _fp8_tensor(q, shape, gate_up.dtype)

    @staticmethod
    def backward(ctx, dy):
        gate_up, weights = ctx.saved_tensors
        if ctx.grad_in_fp8 and runs_triton(gate_up) and dy.shape[-1] % GROUP == 0:
            q, transposed = swiglu_backward_quantized(dy, gate_up, powers_of_two=ctx.powers_of_two)
            grad = _fp8_tensor(q, gate_up.shape, gate_up.dtype)
            grad.transposed = transposed
            return grad, *[None] * 4
        options = {"overwrite": ctx.overwrite}
        return *activation_backward(dy, gate_up, "swiglu", weights, **options), *[None] * 3


class NormFp8(FirstOrderFunction):
    """(RMSNorm of x, x), or with a bias (LayerNorm of x, x), the norm as an Fp8Tensor in 1×128
    groups of e4m3."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps: float, powers_of_two: bool, settings):
        options = {"centered": bias is not None, "settings": settings}
        q, statistics = norm_quantized(x, weight, bias, eps, powers_of_two=powers_of_two, **options)
        ctx.eps, ctx.options = eps, options
        ctx.save_for_backward(x, weight, bias, *statistics)
        # An unused output must not cost a tensor of zeros.
        ctx.set_materialize_grads(False)
        return _fp8_tensor(q, x.shape, x.dtype), x

    @staticmethod
    def backward(ctx, dy, dstream):
        if dy is None:
            return dstream, *[None] * 5
        x, weight, bias, *statistics = ctx.saved_tensors
        grads = norm_backward(dy, x, weight, bias, ctx.eps, statistics, dstream, **ctx.options)
        return *grads, *[None] * 3


_MANTISSA_BITS = 23  # of float32; the bits above them are the exponent


class Fp8DispatchCodec:
    """Encodes rows `[n, h]` as uint8 `[n, h + ceil(h/128)]`."""

    def encode(self, rows: Tensor) -> Tensor:
        """Encodes `[n, h]` of any floating dtype as bytes."""
        q = quantize_rows(rows, powers_of_two=True)
        exponents = (q.scales.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
        return torch.cat((q.values.view(torch.uint8), exponents), 1)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decodes bytes to `[n, h]` in `dtype`."""
        # h + ceil(h/128) bytes contain ceil(h/128) groups
        groups = -(-encoded.shape[1] // (GROUP + 1))
        values, exponents = encoded.split([encoded.shape[1] - groups, groups], 1)
        scales = (exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
        return Quantized(values.contiguous().view(E4M3), scales, 1).dequantize(dtype)

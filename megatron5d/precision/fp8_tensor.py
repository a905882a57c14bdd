"""Activations that exist in FP8 alone, and the FP8 codec of the MoE dispatch.

The result of SwiGLU or a norm that only FP8 GEMMs read is never written in its wide dtype (kernels/fp8/norm_swiglu.py).
Autograd sees an `Fp8Tensor` with the shape and dtype of the wide result, which gets a gradient like any tensor.

The codec encodes rows of activations as bytes to send them over the network: half the bytes of bfloat16. A row becomes
its values in e4m3, in groups of 128 whose scales are powers of two, and one byte per group with the exponent of the
scale. A blockwise GEMM with such scales quantises the row to the same numbers, so nothing is lost where the experts are
multiplied that way. Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron5d.kernels import activation_backward, norm_backward
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.kernels.fp8.norm_swiglu import norm_quantized, swiglu_quantized
from megatron5d.kernels.fp8.quantize import E4M3, GROUP, Quantized, quantize_rows

_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)


class Fp8Tensor(Tensor):
    """A tensor `[..., features]` whose elements are FP8 values with scales: the operand of an FP8 GEMM.

    It can be detached and viewed with other leading dims. Any other operation raises, so nothing reads it by mistake.

    Args:
        qdata: `[..., features]` in FP8.
        scales: `[..., c]` float32, those of 1×128 groups.
        dtype: that autograd sees.
    """

    qdata: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scales: Tensor, dtype: torch.dtype) -> Fp8Tensor:
        made = Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)
        made.qdata, made.scales = qdata, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["qdata", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size, stride) -> Fp8Tensor:
        return Fp8Tensor(inner["qdata"], inner["scales"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        x = next(each for each in args if isinstance(each, Fp8Tensor))
        qdata = x.qdata.view(args[1] if len(args) > 1 else x.shape) if func in _VIEWS else None
        if qdata is None or qdata.shape[-1] != x.shape[-1]:
            raise RuntimeError(f"{func} on an Fp8Tensor {tuple(x.shape)}: only FP8 GEMMs read it")
        return Fp8Tensor(qdata, x.scales.view(*qdata.shape[:-1], x.scales.shape[-1]), x.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fp8Tensor({tuple(self.shape)}, {self.dtype})"


def _fp8_tensor(q: Quantized, shape: torch.Size, dtype: torch.dtype) -> Fp8Tensor:
    return Fp8Tensor(q.values.view(shape), q.scales.view(*shape[:-1], q.scales.shape[-1]), dtype)


class SwigluFp8(FirstOrderFunction):
    """`swiglu`, or with weights `weighted_activation` of rows, as an Fp8Tensor in 1×128 groups of e4m3."""

    @staticmethod
    def forward(ctx, gate_up, weights, powers_of_two: bool, overwrite: bool):
        ctx.overwrite = overwrite
        ctx.save_for_backward(gate_up, weights)
        shape = torch.Size((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        q = swiglu_quantized(gate_up, weights=weights, powers_of_two=powers_of_two)
        return _fp8_tensor(q, shape, gate_up.dtype)

    @staticmethod
    def backward(ctx, dy):
        gate_up, weights = ctx.saved_tensors
        return *activation_backward(dy, gate_up, weights, "swiglu", ctx.overwrite), None, None


class NormFp8(FirstOrderFunction):
    """`add_rms_norm`, or with `centred` `add_layer_norm`, of x alone: the norm as such an Fp8Tensor, and x."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps: float, centred: bool, powers_of_two: bool):
        q, statistics = norm_quantized(x, weight, bias, eps, centred=centred, powers_of_two=powers_of_two)
        ctx.eps, ctx.centred = eps, centred
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.set_materialize_grads(False)
        return _fp8_tensor(q, x.shape, x.dtype), x

    @staticmethod
    def backward(ctx, dy, dx):
        if dy is None:
            return dx, None, None, None, None, None
        x, weight, bias, *statistics = ctx.saved_tensors
        grads = norm_backward(dy, x, weight, bias, ctx.eps, statistics, dx, centred=ctx.centred)
        return *grads, None, None, None


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
        groups = -(-encoded.shape[1] // (GROUP + 1))  # h + ceil(h/128) bytes hold as many groups
        values, exponents = encoded.split([encoded.shape[1] - groups, groups], 1)
        scales = (exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
        return Quantized(values.contiguous().view(E4M3), scales, 1).dequantize(dtype)

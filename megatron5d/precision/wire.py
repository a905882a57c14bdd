"""Encodes rows of activations as bytes to send them over the network: half the bytes of bfloat16.

A row becomes its values in e4m3, in groups of 128 whose scales are powers of two, and one byte per group with the
exponent of the scale. A blockwise product with such scales would quantise the row to the same numbers, so nothing is
lost where the experts are multiplied that way. Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.fp8.quantize import E4M3, GROUP, Quantized, quantize_rows

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

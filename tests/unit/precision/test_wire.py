"""Rows of activations as bytes and back."""

import pytest
import torch

from kernels.fp8_quantize import quantize_rows
from megatron5d.precision.wire import EightBitRows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 1), (3, 128), (2, 129), (4, 300), (0, 256)])
def test_a_row_is_its_values_and_a_byte_a_group(shape, dtype):
    rows = (torch.randn(shape) * torch.logspace(-20, 20, shape[1])).to(dtype)
    rows[:1, :1] = 0
    codec = EightBitRows()
    wire = codec.encode(rows)
    assert wire.dtype == torch.uint8 and wire.shape == (shape[0], shape[1] + -(-shape[1] // 128))
    back = codec.decode(wire, dtype)
    assert back.dtype == dtype
    assert torch.equal(back, quantize_rows(rows, powers_of_two=True).dequantize(dtype))
    assert torch.equal(codec.decode(codec.encode(back), dtype), back)  # a second hop loses nothing


def test_what_is_not_finite_arrives_so():
    rows = torch.ones(2, 256)
    rows[1, 200] = torch.inf
    back = EightBitRows().decode(EightBitRows().encode(rows), torch.float32)
    assert back[1, 128:].isnan().all() and torch.equal(back[0], rows[0]) and torch.equal(back[1, :128], rows[1, :128])

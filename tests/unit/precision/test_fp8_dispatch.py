"""The codec that sends rows of activations as bytes."""

import pytest
import torch
from ranks import run_ranks

from megatron5d.comm.all_to_all import Exchange
from megatron5d.comm.ledger import Ledger
from megatron5d.kernels.fp8.quantize import quantize_rows
from megatron5d.precision.fp8_tensor import Fp8DispatchCodec
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

CODEC = Fp8DispatchCodec()


def dequantized(rows):
    return quantize_rows(rows, powers_of_two=True).dequantize(rows.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 1), (3, 128), (2, 129), (4, 300), (0, 256)])
def test_a_row_is_its_values_and_a_byte_per_group(shape, dtype):
    rows = (torch.randn(shape) * torch.logspace(-20, 20, shape[1])).to(dtype)
    rows[:1, :1] = 0
    encoded = CODEC.encode(rows)
    num_bytes = shape[1] + -(-shape[1] // 128)
    assert encoded.dtype == torch.uint8 and encoded.shape == (shape[0], num_bytes)
    decoded = CODEC.decode(encoded, dtype)
    assert decoded.dtype == dtype and torch.equal(decoded, dequantized(rows))
    assert torch.equal(CODEC.decode(CODEC.encode(decoded), dtype), decoded)  # no loss at later hops


def test_values_that_are_not_finite_spoil_their_group():
    rows = torch.ones(2, 256)
    rows[1, 200] = torch.inf
    decoded = CODEC.decode(CODEC.encode(rows), torch.float32)
    assert decoded[1, 128:].isnan().all()
    assert torch.equal(decoded[0], rows[0]) and torch.equal(decoded[1, :128], rows[1, :128])


def test_an_exchange_sends_bytes_and_wide_gradients():
    def run(rank, world):
        ledger = Ledger()
        ep = build_mesh(resolve(world, ep=world), rank, recorder=ledger)["ep"]
        generator = torch.Generator().manual_seed(rank)
        rows = torch.randn(5, 256, generator=generator).bfloat16().requires_grad_()
        sent, received = ([2, 3], [2, 1]) if rank == 0 else ([1, 4], [3, 4])
        exchange = Exchange(ep, sent, received, CODEC)
        arrived = exchange.finish(exchange.start(rows))
        num_bytes = ledger.totals["ep", "all_to_all"].num_bytes
        arrived.backward(arrived.detach())
        return rows.detach(), arrived.detach(), rows.grad, num_bytes

    (rows0, arrived0, grad0, num_bytes), (rows1, arrived1, grad1, _) = run_ranks(run, 2)
    rows0, rows1 = dequantized(rows0), dequantized(rows1)
    assert torch.equal(arrived0, torch.cat((rows0[:2], rows1[:1])))
    assert torch.equal(arrived1, torch.cat((rows0[2:], rows1[1:])))
    assert torch.equal(grad0, rows0) and torch.equal(grad1, rows1)
    assert num_bytes == 3 * (256 + 2)  # three rows; bfloat16 would be twice that

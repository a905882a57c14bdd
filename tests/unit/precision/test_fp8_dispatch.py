"""Rows of activations as bytes and back."""

import pytest
import torch
from ranks import run_ranks

from megatron5d.comm.all_to_all import Exchange
from megatron5d.comm.ledger import Ledger
from megatron5d.kernels.fp8.quantize import quantize_rows
from megatron5d.precision.fp8_tensor import Fp8DispatchCodec
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 1), (3, 128), (2, 129), (4, 300), (0, 256)])
def test_a_row_is_its_values_and_a_byte_a_group(shape, dtype):
    rows = (torch.randn(shape) * torch.logspace(-20, 20, shape[1])).to(dtype)
    rows[:1, :1] = 0
    codec = Fp8DispatchCodec()
    encoded = codec.encode(rows)
    assert encoded.dtype == torch.uint8 and encoded.shape == (
        shape[0],
        shape[1] + -(-shape[1] // 128),
    )
    back = codec.decode(encoded, dtype)
    assert back.dtype == dtype
    assert torch.equal(back, quantize_rows(rows, powers_of_two=True).dequantize(dtype))
    assert torch.equal(codec.decode(codec.encode(back), dtype), back)  # a second hop loses nothing


def test_what_is_not_finite_arrives_so():
    rows = torch.ones(2, 256)
    rows[1, 200] = torch.inf
    back = Fp8DispatchCodec().decode(Fp8DispatchCodec().encode(rows), torch.float32)
    assert (
        back[1, 128:].isnan().all()
        and torch.equal(back[0], rows[0])
        and torch.equal(back[1, :128], rows[1, :128])
    )


def test_an_exchange_sends_the_bytes_and_gives_gradients_as_they_are():
    def run(rank, world):
        ledger = Ledger()
        ep = build_mesh(resolve(world, ep=world), rank, recorder=ledger)["ep"]
        rows = (
            torch.randn(5, 256, generator=torch.Generator().manual_seed(rank))
            .bfloat16()
            .requires_grad_()
        )
        exchange = Exchange(
            ep, [2, 3] if rank == 0 else [1, 4], [2, 1] if rank == 0 else [3, 4], Fp8DispatchCodec()
        )
        arrived = exchange.finish(exchange.start(rows))
        there = ledger.totals["ep", "all_to_all"].num_bytes
        arrived.backward(arrived.detach())
        return rows.detach(), arrived.detach(), rows.grad, there

    (first, at_first, back_first, sent), (second, at_second, back_second, _) = run_ranks(run, 2)
    whole = [
        quantize_rows(rows, powers_of_two=True).dequantize(torch.bfloat16)
        for rows in (first, second)
    ]
    assert torch.equal(at_first, torch.cat((whole[0][:2], whole[1][:1])))
    assert torch.equal(at_second, torch.cat((whole[0][2:], whole[1][1:])))
    assert torch.equal(back_first, whole[0]) and torch.equal(back_second, whole[1])
    assert sent == 3 * (256 + 2)  # three rows; bfloat16 would be twice that

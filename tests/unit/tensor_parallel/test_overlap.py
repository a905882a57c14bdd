"""Products and collectives in chunks: the same numbers, as many elements sent, one chunk at a time."""

import pytest
import torch
from ranks import run_ranks

from megatron5d.comm.ledger import Ledger
from megatron5d.precision.fp8 import BlockwiseGemms, TensorwiseGemms
from megatron5d.precision.gemms import PLAIN
from megatron5d.tensor_parallel.overlap import gather_product, product_scatter
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

S, H, F = 12, 128, 256
GEMMS = {
    "plain": PLAIN,
    "blockwise": BlockwiseGemms(True),
    "tensorwise": TensorwiseGemms(True, lambda amax: amax, lambda amax: amax),
}


def both_ways(rank: int, world: int, recipe: str):
    """Per mode: gathered product, gathered operand, scattered product, rows of the largest product, bytes sent."""
    ledger = Ledger()
    tp = build_mesh(resolve(world, tp=world), rank, recorder=ledger)["tp"]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(F, H, dtype=torch.float64, generator=generator)
    x = torch.randn(S, 2, H, dtype=torch.float64, generator=generator)
    gemms, found = GEMMS[recipe], []
    for chunked in (False, True):
        rows: list[int] = []

        def product(operand, rows=rows):
            rows.append(operand[0].shape[0])
            return gemms.forward(operand, weight)

        ledger.clear()
        y, whole = gather_product(gemms.operand(x.chunk(world)[rank]), product, tp, chunked)
        part = product_scatter(gemms.operand(x * (rank + 1)), product, tp, chunked)
        found.append((y, [each.double() for each in whole], part, max(rows), ledger.bytes_by_axis()["tp"]))
    return found


@pytest.mark.parametrize("recipe", GEMMS)
def test_chunks_give_what_the_whole_gives(recipe):
    for plain, chunked in run_ranks(both_ways, 3, recipe):
        torch.testing.assert_close(chunked[0], plain[0], rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(chunked[1], plain[1], strict=True):
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(chunked[2], plain[2], rtol=1e-12, atol=1e-12)
        assert (plain[3], chunked[3]) == (S, S // 3)
        assert chunked[4] == plain[4]

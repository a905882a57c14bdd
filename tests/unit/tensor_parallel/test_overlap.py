"""Products and collectives laid over each other: the same numbers, as many elements sent, one chunk
at a time."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from megatron5d.comm.ledger import Ledger
from megatron5d.precision.fp8_recipes import BlockwiseGemms, TensorwiseGemms
from megatron5d.precision.gemm import PLAIN
from megatron5d.tensor_parallel.fused_overlap import Fused
from megatron5d.tensor_parallel.overlap import Chunked, Gemm, Overlap
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import state_of

S, H, F = 12, 128, 256
GEMMS = {
    "plain": PLAIN,
    "blockwise": BlockwiseGemms(True),
    # the same on all ranks
    "tensorwise": TensorwiseGemms(True, lambda amax: amax * 0 + 16, lambda amax: amax),
}


def every_way(rank: int, world: int, recipe: str):
    """Per mode and direction: gathered gemm, gathered operand, scattered gemm, bytes sent."""
    ledger = Ledger()
    tp = build_mesh(resolve(world, tp=world), rank, recorder=ledger)["tp"]
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(F, H, dtype=torch.float64, generator=generator))
    gemms, found = GEMMS[recipe], []
    state_of(weight).gemms = gemms
    fused = Fused(tp, torch.device("cpu"), 120.0)
    for overlap in (Overlap(), Chunked(), fused, fused):
        ledger.clear()
        for backward, width in ((False, H), (True, F)):
            x = torch.randn(
                S, 2, width, dtype=torch.float64, generator=generator.manual_seed(width)
            )
            gemm = Gemm(weight, backward)
            mine, terms = (
                gemms.operand(x.chunk(world)[rank], backward),
                gemms.operand(x * (rank + 1), backward),
            )
            y, whole = overlap.all_gather_gemm(mine, gemm, tp, keep=True)
            alone, nothing = overlap.all_gather_gemm(mine, gemm, tp, keep=False)
            assert nothing == () and torch.equal(alone, y)
            found.append(
                [
                    y,
                    *(each.double() for each in whole),
                    overlap.gemm_reduce_scatter(terms, gemm, tp),
                ]
            )
        found[-1].append(torch.tensor(ledger.bytes_by_axis()["tp"]))
    return [[each.detach() for each in one] for one in found]


@pytest.mark.parametrize("recipe", GEMMS)
def test_every_mode_gives_what_the_whole_gives(recipe):
    for whole, whole_back, *others in run_ranks(every_way, 3, recipe):
        for i, other in enumerate(others):
            for ours, theirs in zip(other, whole_back if i % 2 else whole, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_fused_gemms_name_the_rank_that_stopped():
    def until_one_stops(rank, world):
        tp = build_mesh(resolve(world, tp=world), rank)["tp"]
        fused, gemm, x = (
            Fused(tp, torch.device("cpu"), 4.0),
            Gemm(nn.Parameter(torch.ones(6, 6))),
            torch.ones(4, 1, 6),
        )
        fused.all_gather_gemm((x,), gemm, tp, keep=False)
        fused.gemm_reduce_scatter((x,), gemm, tp)
        if rank == 0:
            fused.check()
            for run in (
                lambda: fused.all_gather_gemm((x,), gemm, tp, keep=False),
                lambda: fused.gemm_reduce_scatter((x,), gemm, tp),
            ):
                with pytest.raises(
                    TimeoutError, match=r"rank 0 .* waited 2 s for chunk 1 .* rank 1 .* not sent"
                ):
                    run()

    run_ranks(until_one_stops, 2)

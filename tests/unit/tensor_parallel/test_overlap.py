"""GEMMs in chunks that overlap with their collective: the same numbers, the same bytes sent."""

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
    # the same maximum on all ranks
    "tensorwise": TensorwiseGemms(True, lambda amax: amax * 0 + 16, lambda amax: amax),
}


def outputs_of_every_mode(rank: int, world: int, recipe: str):
    """Per mode and direction: output and operand of all_gather_gemm, gemm_reduce_scatter, bytes."""
    ledger = Ledger()
    tp = build_mesh(resolve(world, tp=world), rank, recorder=ledger)["tp"]
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(F, H, dtype=torch.float64, generator=generator))
    gemms = state_of(weight).gemms = GEMMS[recipe]
    fused, modes = Fused(tp, torch.device("cpu"), 120.0), []
    for overlap in (Overlap(), Chunked(), fused, fused):
        ledger.clear()
        for backward, width in ((False, H), (True, F)):
            generator.manual_seed(width)
            x = torch.randn(S, 2, width, dtype=torch.float64, generator=generator)
            gemm = Gemm(weight, backward)
            chunk = gemms.operand(x.chunk(world)[rank], backward)
            y, gathered = overlap.all_gather_gemm(chunk, gemm, tp, keep=True)
            y_alone, nothing = overlap.all_gather_gemm(chunk, gemm, tp, keep=False)
            assert nothing == () and torch.equal(y_alone, y)
            terms = gemms.operand(x * (rank + 1), backward)
            scattered = overlap.gemm_reduce_scatter(terms, gemm, tp)
            modes.append([y, *(tensor.double() for tensor in gathered), scattered])
        modes[-1].append(torch.tensor(ledger.bytes_by_axis()["tp"]))
    return [[tensor.detach() for tensor in outputs] for outputs in modes]


@pytest.mark.parametrize("recipe", GEMMS)
def test_every_mode_computes_the_same(recipe):
    for forward, backward, *others in run_ranks(outputs_of_every_mode, 3, recipe):
        for i, outputs in enumerate(others):
            for output, expected in zip(outputs, backward if i % 2 else forward, strict=True):
                torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_fused_gemms_name_the_rank_that_stopped():
    def stop_one_rank(rank, world):
        tp = build_mesh(resolve(world, tp=world), rank)["tp"]
        fused, gemm = Fused(tp, torch.device("cpu"), 4.0), Gemm(nn.Parameter(torch.ones(6, 6)))
        x = torch.ones(4, 1, 6)
        fused.all_gather_gemm((x,), gemm, tp, keep=False)
        fused.gemm_reduce_scatter((x,), gemm, tp)
        if rank == 0:
            fused.check()
            message = r"rank 0 .* waited 2 s for chunk 1 .* rank 1 .* not sent"
            with pytest.raises(TimeoutError, match=message):
                fused.all_gather_gemm((x,), gemm, tp, keep=False)
            with pytest.raises(TimeoutError, match=message):
                fused.gemm_reduce_scatter((x,), gemm, tp)

    run_ranks(stop_one_rank, 2)

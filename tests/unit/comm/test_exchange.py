"""An all-to-all whose halves lie in different phases, and uneven gathers: values, gradients, and
what is sent twice."""

import pytest
import torch
from ranks import run_ranks
from whole_stage import WholeStage

from megatron5d.comm.all_to_all import Exchange, gather_rows, reduce_scatter_rows
from megatron5d.comm.ledger import Ledger
from megatron5d.phases.phase import Phase
from megatron5d.phases.recompute import ActivationPolicy
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

pytestmark = pytest.mark.usefixtures("over_gloo")

WORLD = 3
SENDS = [[2, 0, 1], [1, 3, 0], [0, 2, 2]]  # rows from rank (line) to rank (column)


def rows_of(rank):
    return torch.randn(
        sum(SENDS[rank]), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    )


def arrivals(rank, rows):
    """What a rank gets, cut out of everybody's rows by hand."""
    cuts = [list(rows[source].split(SENDS[source])) for source in range(WORLD)]
    return torch.cat([cuts[source][rank] for source in range(WORLD)])


class Send(Phase):
    def __init__(self, rank, ep):
        super().__init__()
        self.rank, self.ep = rank, ep

    def forward(self, x, batch, defer):
        exchange = Exchange(self.ep, SENDS[self.rank], [line[self.rank] for line in SENDS])
        return x, exchange.start(x * 2), exchange


class Use(Phase):
    def forward(self, state, batch, defer):
        x, handle, exchange = state
        y = exchange.finish(handle).square().sum() + x.sum()
        self.held = exchange._rows is not None
        return y


@pytest.mark.parametrize("recompute", [False, True])
def test_two_phases(recompute):
    def run(rank, world):
        ledger = Ledger()
        ep = build_mesh(resolve(world, ep=world), rank, recorder=ledger)["ep"]
        use = Use()
        use.activation_policy = ActivationPolicy(group=0 if recompute else None)
        stage = WholeStage([Send(rank, ep), use])
        y = stage.forward(0, rows_of(rank), None)
        return (
            y,
            stage.backward(0, torch.ones_like(y)),
            ledger.totals["ep", "all_to_all"].elements,
            use.held,
        )

    rows = [rows_of(rank).requires_grad_() for rank in range(WORLD)]
    outputs = [
        arrivals(rank, [2 * r for r in rows]).square().sum() + rows[rank].sum()
        for rank in range(WORLD)
    ]
    sum(outputs).backward()
    for rank, (y, dx, elements, held) in enumerate(run_ranks(run, WORLD)):
        assert not held, "rows stay until the exchange ends, not only where the backward needs them"
        torch.testing.assert_close(y, outputs[rank].detach())
        torch.testing.assert_close(dx, rows[rank].grad)
        away = sum(SENDS[rank]) - SENDS[rank][rank]
        back = sum(line[rank] for line in SENDS) - SENDS[rank][rank]
        assert elements == 4 * (away + back), "there once and back once, recomputed or not"


def test_evaluation_leaves_nothing_behind():
    def run(rank, world):
        ep = build_mesh(resolve(world, ep=world), rank)["ep"]
        return WholeStage([Send(rank, ep), Use()]).evaluate(rows_of(rank), None)

    rows = [rows_of(rank) for rank in range(WORLD)]
    for rank, y in enumerate(run_ranks(run, WORLD)):
        torch.testing.assert_close(
            y, arrivals(rank, [2 * r for r in rows]).square().sum() + rows[rank].sum()
        )


@pytest.mark.parametrize("counts", [[2, 2, 2], [3, 0, 1], [0, 0, 0], [0, 5, 0]])
def test_uneven_gather_and_its_transpose(counts):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in counts]
    total = sum(counts)
    terms = [torch.randn(total, 3, dtype=torch.float64, generator=generator) for _ in counts]

    def run(rank, world):
        etp = build_mesh(resolve(world, etp=world), rank)["etp"]
        x, t = parts[rank].clone().requires_grad_(), terms[rank].clone().requires_grad_()
        gathered, reduced = gather_rows(x, etp, counts), reduce_scatter_rows(t, etp, counts)
        gathered.backward(terms[rank])
        reduced.backward(parts[rank])
        return gathered.detach(), x.grad, reduced.detach(), t.grad

    summed = sum(terms).split(counts)
    for rank, (gathered, dx, reduced, dt) in enumerate(run_ranks(run, len(counts))):
        assert torch.equal(gathered, torch.cat(parts)) and torch.equal(dt, torch.cat(parts))
        torch.testing.assert_close(dx, summed[rank])
        torch.testing.assert_close(reduced, summed[rank])

"""An all-to-all between two phases, and uneven gathers: values, gradients, and elements sent."""

import pytest
import torch
from ranks import run_ranks
from whole_stage import WholeStage

from megatron5d.comm.all_to_all import Exchange, gather_rows, reduce_scatter_rows
from megatron5d.comm.ledger import Ledger
from megatron5d.phases.activations import ActivationPolicy
from megatron5d.phases.phase import Phase
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

pytestmark = pytest.mark.usefixtures("over_gloo")

WORLD = 3
SENDS = [[2, 0, 1], [1, 3, 0], [0, 2, 2]]  # rows from rank (row) to rank (column)
RECEIVES = [list(column) for column in zip(*SENDS)]


def tensor_of(rank, *shape):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def input_of(rank):
    return tensor_of(rank, sum(SENDS[rank]), 4)


def expected_outputs(inputs):
    """Output of each rank's stage, with the rows of all ranks cut and joined by hand."""
    cuts = [(2 * x).split(sends) for x, sends in zip(inputs, SENDS)]
    received = [torch.cat(rows) for rows in zip(*cuts)]
    return [rows.square().sum() + x.sum() for rows, x in zip(received, inputs)]


class Send(Phase):
    def __init__(self, rank, ep):
        super().__init__()
        self.rank, self.ep = rank, ep

    def forward(self, x, batch, defer):
        exchange = Exchange(self.ep, SENDS[self.rank], RECEIVES[self.rank])
        return x, exchange.start(x * 2), exchange


class Use(Phase):
    def forward(self, state, batch, defer):
        x, handle, exchange = state
        y = exchange.finish(handle).square().sum() + x.sum()
        self.keeps_rows = exchange._rows is not None
        return y


@pytest.mark.parametrize("recompute", [False, True])
def test_two_phases(recompute):
    def on_rank(rank, world):
        ledger = Ledger()
        ep = build_mesh(resolve(world, ep=world), rank, recorder=ledger)["ep"]
        use = Use()
        use.activation_policy = ActivationPolicy(group=0 if recompute else None)
        stage = WholeStage([Send(rank, ep), use])
        y = stage.forward(0, input_of(rank), None)
        dx = stage.backward(0, torch.ones_like(y))
        return y, dx, ledger.totals["ep", "all_to_all"].elements, use.keeps_rows

    inputs = [input_of(rank).requires_grad_() for rank in range(WORLD)]
    outputs = expected_outputs(inputs)
    sum(outputs).backward()
    for rank, (y, dx, num_elements, keeps_rows) in enumerate(run_ranks(on_rank, WORLD)):
        assert not keeps_rows, "rows outlive the phase whose backward needs them"
        torch.testing.assert_close(y, outputs[rank].detach())
        torch.testing.assert_close(dx, inputs[rank].grad)
        num_rows = sum(SENDS[rank]) + sum(RECEIVES[rank]) - 2 * SENDS[rank][rank]
        assert num_elements == 4 * num_rows, "sent once forward and once back, recomputed or not"


def test_evaluation():
    def on_rank(rank, world):
        ep = build_mesh(resolve(world, ep=world), rank)["ep"]
        return WholeStage([Send(rank, ep), Use()]).evaluate(input_of(rank), None)

    outputs = run_ranks(on_rank, WORLD)
    torch.testing.assert_close(outputs, expected_outputs([input_of(rank) for rank in range(WORLD)]))


@pytest.mark.parametrize("counts", [[2, 2, 2], [3, 0, 1], [0, 0, 0], [0, 5, 0]])
def test_uneven_gather_and_its_transpose(counts):
    shards = [tensor_of(rank, count, 3) for rank, count in enumerate(counts)]
    terms = [tensor_of(10 + rank, sum(counts), 3) for rank in range(WORLD)]

    def on_rank(rank, world):
        etp = build_mesh(resolve(world, etp=world), rank)["etp"]
        shard, term = shards[rank].clone().requires_grad_(), terms[rank].clone().requires_grad_()
        gathered = gather_rows(shard, etp, counts)
        reduced = reduce_scatter_rows(term, etp, counts)
        gathered.backward(terms[rank])
        reduced.backward(shards[rank])
        return gathered.detach(), shard.grad, reduced.detach(), term.grad

    sums = sum(terms).split(counts)
    for rank, (gathered, shard_grad, reduced, term_grad) in enumerate(run_ranks(on_rank, WORLD)):
        assert torch.equal(gathered, torch.cat(shards))
        assert torch.equal(term_grad, torch.cat(shards))
        torch.testing.assert_close(shard_grad, sums[rank])
        torch.testing.assert_close(reduced, sums[rank])

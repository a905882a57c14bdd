"""Each collective against arithmetic by hand, its backward against its transpose, its bytes against
the ring's."""

import weakref

import pytest
import torch
from ranks import run_ranks

from megatron5d.comm import collectives as c
from megatron5d.comm.ledger import Ledger
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

pytestmark = pytest.mark.usefixtures("over_gloo")

WORLD = 4


def tensor_of(rank, rows=8):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 3, dtype=torch.float64, generator=generator)


def on_axis(fn, *args):
    def run(rank, world):
        ledger = Ledger()
        axis = build_mesh(resolve(world, tp=world), rank, recorder=ledger)["tp"]
        return fn(rank, axis, *args), dict(ledger.totals)

    return run_ranks(run, WORLD)


def test_plain_collectives():
    everyone = [tensor_of(r) for r in range(WORLD)]
    total = sum(everyone)

    def run(rank, axis):
        x = tensor_of(rank)
        return (
            c.all_reduce(x.clone(), axis),
            c.all_reduce(x.clone(), axis, "max"),
            c.all_gather(x, axis),
            c.reduce_scatter(x, axis),
            c.gather_last_dim(x, axis),
        )

    for rank, ((summed, largest, gathered, scattered, columns), totals) in enumerate(on_axis(run)):
        torch.testing.assert_close(summed, total)
        assert torch.equal(largest, torch.stack(everyone).amax(0))
        assert torch.equal(gathered, torch.cat(everyone))
        torch.testing.assert_close(scattered, total[rank * 2 : rank * 2 + 2])
        assert torch.equal(columns, torch.cat(everyone, -1))
        # (size-1) shards of 2·3 doubles
        assert totals["tp", "reduce_scatter"].num_bytes == 3 * 2 * 3 * 8
        assert totals["tp", "all_gather"].num_bytes == 2 * 3 * 24 * 8
        assert totals["tp", "all_reduce"].num_bytes == 2 * (2 * 3 * 24 // 4) * 8


@pytest.mark.parametrize(
    "name", ["copy_to", "reduce_from", "gather_from", "reduce_scatter_to", "scatter_to"]
)
def test_the_backward_is_the_transpose(name):
    """<forward(x), y> summed over ranks equals <x, backward(y)> summed over ranks, where inputs
    count as they act."""

    def run(rank, axis):
        x = tensor_of(rank if name not in ("copy_to", "scatter_to") else 0).requires_grad_()
        y = getattr(c, name)(x, axis)
        replicated = name == "reduce_from"
        g = torch.randn(
            y.shape,
            dtype=y.dtype,
            generator=torch.Generator().manual_seed(99 if replicated else 99 + rank),
        )
        (dx,) = torch.autograd.grad(y, x, g)
        share = 1 / axis.size if replicated else 1  # the same output stands on every rank
        # the same input stands on every rank
        inner = 1 / axis.size if name in ("copy_to", "scatter_to") else 1
        return (y.detach() * g).sum().item() * share, (x.detach() * dx).sum().item() * inner

    results = [value for value, _ in on_axis(run)]
    assert sum(left for left, _ in results) == pytest.approx(
        sum(right for _, right in results), rel=1e-12
    )


def test_pending_results_can_be_waited_for_in_any_order():
    def run(rank, axis):
        first = c.start_all_gather(tensor_of(rank), axis)
        second = c.start_reduce_scatter(tensor_of(rank), axis)
        second_value = second.wait()
        return first.wait(), second_value, torch.equal(first.wait(), first.wait())

    for (gathered, _, again), _ in on_axis(run):
        assert again and gathered.shape == (32, 3)


def test_inputs_are_let_go_of():
    """Of a gather once it has ended, of a split at once."""

    def run(rank, axis):
        x = tensor_of(rank)
        alive, pending = weakref.ref(x), c.start_all_gather(x, axis)
        del x
        pending.wait()
        return alive() is None, c.scatter_to(tensor_of(0), axis).untyped_storage().nbytes()

    assert [found for found, _ in on_axis(run)] == [(True, 8 // WORLD * 3 * 8)] * WORLD


def test_a_text_is_cut_to_what_fits():
    text = "ü" * c.TEXT_BYTES
    told = on_axis(
        lambda rank, axis: c.broadcast_text(1, text if rank == 1 else "", axis, torch.device("cpu"))
    )
    assert [found for found, _ in told] == [text[: c.TEXT_BYTES // 2]] * WORLD


def test_an_axis_of_one_needs_no_process_group():
    axis = build_mesh(resolve(1))["tp"]
    x = tensor_of(0)
    for name in ("copy_to", "reduce_from", "gather_from", "reduce_scatter_to", "scatter_to"):
        assert getattr(c, name)(x, axis) is x
    assert c.all_reduce(x, axis) is x

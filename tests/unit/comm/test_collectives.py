"""Each collective against arithmetic by hand, its backward against its transpose, its bytes against
the ring's."""

import weakref

import pytest
import torch
from ranks import run_ranks

from megatron5d.comm import collectives
from megatron5d.comm.ledger import Ledger
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

pytestmark = pytest.mark.usefixtures("over_gloo")

WORLD = 4
DIFFERENTIABLE = ("copy_to", "reduce_from", "gather_from", "reduce_scatter_to", "scatter_to")


def tensor_of(rank, shape=(8, 3)):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def on_axis(fn):
    """(value of fn(rank, axis), ledger totals) of each rank."""

    def on_rank(rank, world):
        ledger = Ledger()
        axis = build_mesh(resolve(world, tp=world), rank, recorder=ledger)["tp"]
        return fn(rank, axis), dict(ledger.totals)

    return run_ranks(on_rank, WORLD)


def test_plain_collectives():
    inputs = [tensor_of(rank) for rank in range(WORLD)]
    total = sum(inputs)

    def on_rank(rank, axis):
        x = tensor_of(rank)
        return (
            collectives.all_reduce(x.clone(), axis),
            collectives.all_reduce(x.clone(), axis, "max"),
            collectives.all_gather(x, axis),
            collectives.reduce_scatter(x, axis),
            collectives.gather_last_dim(x, axis),
        )

    for rank, ((summed, maximum, gathered, scattered, columns), totals) in enumerate(
        on_axis(on_rank)
    ):
        torch.testing.assert_close(summed, total)
        assert torch.equal(maximum, torch.stack(inputs).amax(0))
        assert torch.equal(gathered, torch.cat(inputs))
        torch.testing.assert_close(scattered, total[rank * 2 : rank * 2 + 2])
        assert torch.equal(columns, torch.cat(inputs, -1))
        # (size-1) shards of 2·3 doubles
        assert totals["tp", "reduce_scatter"].num_bytes == 3 * 2 * 3 * 8
        assert totals["tp", "all_gather"].num_bytes == 2 * 3 * 24 * 8
        assert totals["tp", "all_reduce"].num_bytes == 2 * (2 * 3 * 24 // 4) * 8


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_backward_is_the_transpose(name):
    """<forward(x), y> summed over ranks equals <x, backward(y)> summed over ranks, where a
    replicated tensor counts once."""

    def on_rank(rank, axis):
        is_input_replicated = name in ("copy_to", "scatter_to")
        is_output_replicated = name == "reduce_from"
        x = tensor_of(0 if is_input_replicated else rank).requires_grad_()
        y = getattr(collectives, name)(x, axis)
        dy = tensor_of(99 + (0 if is_output_replicated else rank), y.shape)
        (dx,) = torch.autograd.grad(y, x, dy)
        outputs, inputs = (y.detach() * dy).sum().item(), (x.detach() * dx).sum().item()
        return (
            outputs / (axis.size if is_output_replicated else 1),
            inputs / (axis.size if is_input_replicated else 1),
        )

    outputs, inputs = zip(*(value for value, _ in on_axis(on_rank)))
    assert sum(outputs) == pytest.approx(sum(inputs), rel=1e-12)


def test_pending_results_can_be_waited_for_in_any_order_and_twice():
    def on_rank(rank, axis):
        gathering = collectives.start_all_gather(tensor_of(rank), axis)
        collectives.start_reduce_scatter(tensor_of(rank), axis).wait()
        return gathering.wait().shape, torch.equal(gathering.wait(), gathering.wait())

    assert [value for value, _ in on_axis(on_rank)] == [((32, 3), True)] * WORLD


def test_inputs_are_released():
    """That of a gather at its end, that of a split at once."""

    def on_rank(rank, axis):
        x = tensor_of(rank)
        reference, gathering = weakref.ref(x), collectives.start_all_gather(x, axis)
        del x
        gathering.wait()
        piece = collectives.scatter_to(tensor_of(0), axis)
        return reference() is None, piece.untyped_storage().nbytes()

    assert [value for value, _ in on_axis(on_rank)] == [(True, 8 // WORLD * 3 * 8)] * WORLD


def test_an_axis_of_one_needs_no_process_group():
    axis, x = build_mesh(resolve(1))["tp"], tensor_of(0)
    for name in (*DIFFERENTIABLE, "all_reduce"):
        assert getattr(collectives, name)(x, axis) is x

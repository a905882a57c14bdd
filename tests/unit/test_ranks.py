"""Forked ranks: their values return, and every failure is reported with its cause first."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from pipe_group import Pipes
from ranks import RankFailure, run_ranks

from megatron5d.parity import local_ranks
from megatron5d.parity.local_ranks import Gloo


@pytest.fixture(params=[Gloo, Pipes], ids=lambda kind: kind.__name__.lower())
def transport(request, monkeypatch):
    monkeypatch.setattr(local_ranks, "transport", request.param)


@pytest.fixture
def over_pipes(monkeypatch):
    monkeypatch.setattr(local_ranks, "transport", Pipes)


def test_values_return_in_rank_order(transport):
    offset = 10  # a closure: only the value is pickled

    def on_rank(rank, world, factor):
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
        return rank * factor + offset, x.tolist()

    assert run_ranks(on_rank, 4, 3) == [(number, [6.0, 6.0]) for number in (10, 13, 16, 19)]


def test_one_rank_needs_no_process_group():
    assert run_ranks(lambda rank, world: (rank, world, dist.is_initialized()), 1) == [(0, 1, False)]


def test_a_large_value_does_not_block():
    values = run_ranks(lambda rank, world: bytes([rank]) * (8 << 20), 2)
    assert [len(value) for value in values] == [8 << 20] * 2


def test_the_raising_rank_precedes_the_ranks_that_lost_it(transport):
    def on_rank(rank, world):
        if rank == 2:
            raise ValueError("the cause")
        dist.barrier()

    # not after a time limit: pytest's own is shorter
    with pytest.raises(RankFailure, match=r"\Arank 2: Traceback(?s:.*)ValueError: the cause"):
        run_ranks(on_rank, 4, timeout=1000)


def test_a_killed_rank_is_named_with_its_signal(transport):
    def on_rank(rank, world):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailure, match=r"\Arank 1: died without a report: killed by SIGKILL"):
        run_ranks(on_rank, 3)


def test_a_silent_rank_is_named_with_its_stack(transport):
    def sleeps_forever(rank):
        while rank == 1:
            time.sleep(1)

    message = r"\Ano report from rank\(s\) 1 within 4 s(?s:.*)sleeps_forever"
    with pytest.raises(RankFailure, match=message):
        run_ranks(lambda rank, world: sleeps_forever(rank), 3, timeout=4)


def shapes(rank):
    dist.all_reduce(torch.ones(2 + rank))


def types(rank):
    dist.all_reduce(torch.ones(4, dtype=torch.int64 if rank else torch.float64))


def operations(rank):
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


def roots(rank):
    dist.broadcast(torch.ones(2), src=rank)


def order(rank):
    out, x = torch.empty(4), torch.ones(2)
    calls = [lambda: dist.broadcast(x, src=0), lambda: dist.all_gather(list(out.chunk(2)), x)]
    for call in calls if rank else calls[::-1]:
        call()


def splits(rank):
    receive = [1, 1] if rank == 0 else [2, 1]
    dist.all_to_all_single(torch.empty(sum(receive), 3), torch.ones(2, 3), receive, [1, 1])


def number_of_calls(rank):
    if rank == 0:
        dist.broadcast(torch.ones(2), src=0, async_op=True)


@pytest.mark.parametrize(
    "difference", [shapes, types, operations, roots, order, splits, number_of_calls]
)
def test_collectives_that_differ_between_ranks_are_an_error(difference, over_pipes):
    message = r"collectives mismatch, call 0 of group .* of ranks \[0, 1\]: rank 0: "
    with pytest.raises(RankFailure, match=message):
        run_ranks(lambda rank, world: difference(rank), 2, timeout=20)


def reads_early(rank):
    out = torch.zeros(4)
    work = dist.all_gather_into_tensor(out, torch.ones(2), async_op=True)
    assert not out.isnan().any(), "garbage"
    work.wait()


def writes_early(rank):
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    x += 1
    work.wait()


def sends_another_shape(rank):
    if rank == 0:
        dist.send(torch.ones(2, 3), 1)
    else:
        dist.recv(torch.ones(3, 2), 0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (reads_early, "garbage"),
        (writes_early, "changed before its end"),
        (sends_another_shape, "rank 0 sends"),
    ],
)
def test_faults_that_gloo_accepts_are_errors(fault, message, over_pipes):
    with pytest.raises(RankFailure, match=message):
        run_ranks(lambda rank, world: fault(rank), 2, timeout=4)


def all_operations(rank, world):
    """Results of all operations that the code calls, on small, large and empty tensors."""
    results = []
    for rows in (1, 3000, 0):
        x = torch.arange(4.0 * rows).view(rows * 2, 2) + rank
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            dist.all_reduce(total := x.clone(), op)
            results.append(total)
        dist.all_gather_into_tensor(joined := x.new_empty(world * len(x), 2), x)
        dist.reduce_scatter_tensor(scattered := x.new_empty(len(x), 2), joined)
        dist.all_gather(gathered := [torch.empty_like(x) for _ in range(world)], x)
        # rank r sends r rows to rank 0 and a row to rank 1
        send = [rank, 1, 0] if rows else [0, 0, 0]
        receive = [[source, 1, 0][rank] if rows else 0 for source in range(world)]
        exchanged = x.new_empty(sum(receive), 2)
        dist.all_to_all_single(exchanged, joined[: sum(send)], receive, send)
        dist.broadcast(copied := x.clone(), src=1)
        sending, received = dist.isend(x, (rank + 1) % world, tag=5), torch.empty_like(x)
        dist.irecv(received, (rank - 1) % world, tag=5).wait()
        sending.wait()
        dist.barrier()
        results += [joined, scattered, *gathered, exchanged, copied, received]
    return results


def test_pipes_and_gloo_give_the_same_results(monkeypatch):
    results = []
    for kind in (Gloo, Pipes):
        monkeypatch.setattr(local_ranks, "transport", kind)
        results.append(run_ranks(all_operations, 3))
    for over_gloo, over_pipes in zip(*results):
        assert len(over_gloo) == len(over_pipes) == 33
        assert all(map(torch.equal, over_gloo, over_pipes))


def test_collectives_of_subgroups_are_compared_within_them():
    def on_rank(rank, world):
        number, index = divmod(rank, 2)
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][number]
        for _ in range(1 + number):
            dist.all_reduce(torch.ones(2 + number), group=group)
        sends = [[1, 0], [2, 3]]  # rows from rank (row) to rank (column)
        send, receive = sends[index], [row[index] for row in sends]
        out, x = torch.empty(sum(receive)), torch.ones(sum(send))
        dist.all_to_all_single(out, x, receive, send, group)

    run_ranks(on_rank, 4)


def test_torchs_own_checks_can_be_enabled(monkeypatch, over_gloo):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(RankFailure, match="Detected mismatch between collectives on ranks"):
        run_ranks(lambda rank, world: shapes(rank), 2)


def test_an_unpicklable_value_is_an_error():
    with pytest.raises(RankFailure, match="cannot be pickled"):
        run_ranks(lambda rank, world: lambda: None, 2)


def test_no_process_remains(transport):
    for pid in run_ranks(lambda rank, world: os.getpid(), 3):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

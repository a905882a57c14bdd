"""The harness itself: values come back, and every way to fail is told with its cause first."""

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


def test_values_come_back_in_rank_order(transport):
    offset = 10  # a closure: nothing but the value is pickled

    def fn(rank, world, factor):
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
        return rank * factor + offset, x

    values = run_ranks(fn, 4, 3)
    assert [v for v, _ in values] == [10, 13, 16, 19]
    assert all(torch.equal(x, torch.tensor([6.0, 6.0])) for _, x in values)


def test_one_rank_needs_no_process_group():
    assert run_ranks(lambda rank, world: (rank, world, dist.is_initialized()), 1) == [(0, 1, False)]


def test_a_large_value_does_not_block():
    values = run_ranks(lambda rank, world: bytes([rank]) * (8 << 20), 2)
    assert [len(v) for v in values] == [8 << 20] * 2


def test_the_raising_rank_comes_before_the_ranks_that_lost_it(transport):
    def fn(rank, world):
        if rank == 2:
            raise ValueError("the cause")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"\Arank 2: Traceback(?s:.*)ValueError: the cause"):
        run_ranks(fn, 4)
    assert time.monotonic() - start < 40


def test_a_killed_rank_is_named_with_its_signal(transport):
    def fn(rank, world):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailure, match=r"\Arank 1: died without a report: killed by SIGKILL"):
        run_ranks(fn, 3)


def test_a_silent_rank_is_named_with_its_stack(transport):
    def sleeps_for_ever(rank):
        while rank == 1:
            time.sleep(1)

    with pytest.raises(
        RankFailure, match=r"\Ano report from rank\(s\) 1 within 4 s(?s:.*)sleeps_for_ever"
    ):
        run_ranks(lambda rank, world: sleeps_for_ever(rank), 3, timeout=4)


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
    expected = [1, 1] if rank == 0 else [2, 1]
    dist.all_to_all_single(torch.empty(sum(expected), 3), torch.ones(2, 3), expected, [1, 1])


def one_call_more(rank):
    if rank == 0:
        dist.broadcast(torch.ones(2), src=0, async_op=True)


@pytest.mark.parametrize("differ", [shapes, types, operations, roots, order, splits, one_call_more])
def test_collectives_that_differ_between_ranks_are_an_error(differ, monkeypatch):
    monkeypatch.setattr(local_ranks, "transport", Pipes)
    with pytest.raises(
        RankFailure, match=r"collectives mismatch, call 0 of group .* of ranks \[0, 1\]: rank 0: "
    ):
        run_ranks(lambda rank, world: differ(rank), 2, timeout=1)


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


def sends_another_form(rank):
    if rank == 0:
        dist.send(torch.ones(2, 3), 1)
    else:
        dist.recv(torch.ones(3, 2), 0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (reads_early, "garbage"),
        (writes_early, "changed before its end"),
        (sends_another_form, "rank 0 sends"),
    ],
)
def test_what_gloo_lets_pass_is_an_error(wrong, told, monkeypatch):
    monkeypatch.setattr(local_ranks, "transport", Pipes)
    with pytest.raises(RankFailure, match=told):
        run_ranks(lambda rank, world: wrong(rank), 2, timeout=4)


def everything(rank, world):
    """All that the code calls, with small messages, large ones, and none."""
    found = []
    for rows in (1, 3000, 0):
        x = torch.arange(4.0 * rows).view(rows * 2, 2) + rank
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            dist.all_reduce(total := x.clone(), op)
            found.append(total)
        dist.all_gather_into_tensor(joined := x.new_empty(world * len(x), 2), x)
        dist.reduce_scatter_tensor(own := x.new_empty(len(x), 2), joined)
        dist.all_gather(parts := [torch.empty_like(x) for _ in range(world)], x)
        to_each, from_each = (
            ([0] * world, [0] * world) if not rows else ([rank, 1, 0][:world], [0, 0, 0])
        )
        if rows:
            from_each = [[sender, 1, 0][rank] for sender in range(world)]
        dist.all_to_all_single(
            mixed := x.new_empty(sum(from_each), 2), joined[: sum(to_each)], from_each, to_each
        )
        dist.broadcast(told := x.clone(), src=1)
        sent, got = dist.isend(x, (rank + 1) % world, tag=5), torch.empty_like(x)
        dist.irecv(got, (rank - 1) % world, tag=5).wait()
        sent.wait()
        dist.barrier()
        found += [joined, own, *parts, mixed, told, got]
    return found


def test_both_ways_to_join_ranks_give_the_same(monkeypatch):
    outcomes = []
    for kind in (Gloo, Pipes):
        monkeypatch.setattr(local_ranks, "transport", kind)
        outcomes.append(run_ranks(everything, 3))
    for mine, theirs in zip(*outcomes):
        assert len(mine) == len(theirs) == 33
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def test_collectives_of_subgroups_are_compared_within_them():
    def fn(rank, world):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for _ in range(1 + rank // 2):
            dist.all_reduce(torch.ones(2 + rank // 2), group=groups[rank // 2])
        uneven = [[1, 0], [2, 3]]
        out = torch.empty(sum(row[rank % 2] for row in uneven))
        sent = uneven[rank % 2]
        dist.all_to_all_single(
            out, torch.ones(sum(sent)), [row[rank % 2] for row in uneven], sent, groups[rank // 2]
        )

    run_ranks(fn, 4)


def test_torchs_own_checks_can_be_had(monkeypatch, over_gloo):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(RankFailure, match="Detected mismatch between collectives on ranks"):
        run_ranks(lambda rank, world: shapes(rank), 2)


def test_an_unpicklable_value_is_an_error():
    with pytest.raises(RankFailure, match="cannot be pickled"):
        run_ranks(lambda rank, world: lambda: None, 2)


def test_nothing_is_left_running(transport):
    pids = run_ranks(lambda rank, world: os.getpid(), 3)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

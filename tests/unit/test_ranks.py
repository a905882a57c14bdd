"""The harness itself: values come back, and every way to fail is told with its cause first."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks


def test_values_come_back_in_rank_order():
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


def test_the_raising_rank_comes_before_the_ranks_that_lost_it():
    def fn(rank, world):
        if rank == 2:
            raise ValueError("the cause")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"\Arank 2: Traceback(?s:.*)ValueError: the cause"):
        run_ranks(fn, 4)
    assert time.monotonic() - start < 40


def test_a_killed_rank_is_named_with_its_signal():
    def fn(rank, world):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailure, match=r"\Arank 1: died without a report: killed by SIGKILL"):
        run_ranks(fn, 3)


def test_a_silent_rank_is_named_with_its_stack():
    def sleeps_for_ever(rank):
        while rank == 1:
            time.sleep(1)

    with pytest.raises(RankFailure, match=r"\Ano report from rank\(s\) 1 within 4 s(?s:.*)sleeps_for_ever"):
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
def test_collectives_that_differ_between_ranks_are_an_error(differ):
    with pytest.raises(RankFailure, match=r"\Acollectives mismatch, call 0 of group .* of ranks \[0, 1\]: rank 0: "):
        run_ranks(lambda rank, world: differ(rank), 2, timeout=1)


def test_collectives_of_subgroups_are_compared_within_them():
    def fn(rank, world):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for _ in range(1 + rank // 2):
            dist.all_reduce(torch.ones(2 + rank // 2), group=groups[rank // 2])
        uneven = [[1, 0], [2, 3]]
        out = torch.empty(sum(row[rank % 2] for row in uneven))
        sent = uneven[rank % 2]
        dist.all_to_all_single(out, torch.ones(sum(sent)), [row[rank % 2] for row in uneven], sent, groups[rank // 2])

    run_ranks(fn, 4)


def test_torchs_own_checks_can_be_had(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(RankFailure, match="Detected mismatch between collectives on ranks"):
        run_ranks(lambda rank, world: shapes(rank), 2)


def test_an_unpicklable_value_is_an_error():
    with pytest.raises(RankFailure, match="cannot be pickled"):
        run_ranks(lambda rank, world: lambda: None, 2)


def test_nothing_is_left_running():
    pids = run_ranks(lambda rank, world: os.getpid(), 3)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

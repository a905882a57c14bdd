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


def test_mismatched_shapes_are_an_error():
    def fn(rank, world):
        dist.all_reduce(torch.ones(2 + rank))

    with pytest.raises(RankFailure, match="mismatch"):
        run_ranks(fn, 2)


def test_an_unpicklable_value_is_an_error():
    with pytest.raises(RankFailure, match="cannot be pickled"):
        run_ranks(lambda rank, world: lambda: None, 2)


def test_nothing_is_left_running():
    pids = run_ranks(lambda rank, world: os.getpid(), 3)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

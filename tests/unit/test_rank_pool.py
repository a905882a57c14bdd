"""Ranks of the pool: each run has the group, the random numbers and the failures of newly forked
ranks."""

import os
import signal

import pytest
import rank_pool
import torch
import torch.distributed as dist
from rank_pool import run_on_pool
from ranks import RankFailure, run_ranks


def pid_sum_and_draw(rank, world, factor):
    x = torch.full((2000,), float(rank) * factor)  # more than a pipe takes at once
    dist.all_reduce(x)
    return os.getpid(), x[-1].item(), torch.rand(1).item()


def test_the_same_processes_run_again():
    pids, sums, draws = zip(*run_on_pool(pid_sum_and_draw, 3, 1))
    pids_again, sums_again, draws_again = zip(*run_on_pool(pid_sum_and_draw, 3, 10))
    assert (sums, sums_again) == ((3.0,) * 3, (30.0,) * 3)
    assert pids == pids_again
    assert {pid for pid, _, _ in run_on_pool(pid_sum_and_draw, 5, 1)} > set(pids)
    forked_draws = {draw for _, _, draw in run_ranks(pid_sum_and_draw, 3, 1)}
    assert {*draws, *draws_again} == forked_draws


def raises(rank):
    if rank == 1:
        raise ValueError("the cause")


def dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def calls_more(rank):
    if rank == 1:
        dist.all_reduce(torch.ones(1), async_op=True)


def on_rank(rank, world, fault):
    fault(rank)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raises, r"\Arank 1: Traceback(?s:.*)ValueError: the cause"),
        (dies, "rank 1: died without a report: killed by SIGKILL"),
        (calls_more, "rank 0: nothing; rank 1: all_reduce"),
    ],
)
def test_a_failure_replaces_the_pool(fault, message):
    pids_before = {pid for pid, _, _ in run_on_pool(pid_sum_and_draw, 2, 1)}
    with pytest.raises(RankFailure, match=message):
        run_on_pool(on_rank, 2, fault, timeout=20)
    pids, sums, _ = zip(*run_on_pool(pid_sum_and_draw, 2, 1))
    assert sums == (1.0, 1.0)
    assert not pids_before.intersection(pids)


def send_without_receive(rank, world, value):
    if rank == 1:
        dist.send(torch.tensor(value), 0)


def send_and_receive(rank, world, value):
    x = torch.tensor(value)
    if rank == 0:
        dist.recv(x.zero_(), 1)
        return x.item()
    return dist.send(x, 0)


def test_a_message_of_an_earlier_run_is_not_received():
    run_on_pool(send_without_receive, 2, 1.0)
    assert run_on_pool(send_and_receive, 2, 2.0) == [2.0, None]


def has_group(rank, world):
    return dist.is_initialized()


def test_one_rank_has_no_group():
    assert run_on_pool(has_group, 1) == [False]


def own_pid(rank, world):
    return os.getpid()


@pytest.mark.patches
def test_a_test_that_patches_forks_its_own_ranks():
    assert rank_pool.test_patches
    assert not {*run_on_pool(own_pid, 2)} & {*run_on_pool(own_pid, 2)}


def test_a_test_with_monkeypatch_does_too(monkeypatch):
    assert rank_pool.test_patches

"""Ranks that stay: each run has the group, the random numbers and the failures that ranks forked
for it would have."""

import os
import signal

import pytest
import standing_ranks
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks
from standing_ranks import run_on_standing_ranks


def pid_and_sum(rank, world, factor):
    x = torch.full((2000,), float(rank) * factor)  # more than a pipe takes at once
    dist.all_reduce(x)
    return os.getpid(), x[-1].item(), torch.rand(1).item()


def one_differs(rank, world, way):
    if way == "raises" and rank == 1:
        raise ValueError("the cause")
    if way == "dies" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "calls more" and rank == 1:
        dist.all_reduce(torch.ones(1), async_op=True)
    elif way == "calls another":
        dist.all_reduce(torch.ones(1 + rank))


def test_the_same_processes_run_again():
    runs = [run_on_standing_ranks(pid_and_sum, 3, factor) for factor in (1, 10)]
    assert [value for run in runs for _, value, _ in run] == [3.0] * 3 + [30.0] * 3
    assert [pid for pid, _, _ in runs[0]] == [pid for pid, _, _ in runs[1]]
    assert {pid for pid, _, _ in run_on_standing_ranks(pid_and_sum, 5, 1)} > {
        pid for pid, _, _ in runs[0]
    }
    assert {drawn for run in runs for _, _, drawn in run} == {
        draw for _, _, draw in run_ranks(pid_and_sum, 3, 1)
    }


@pytest.mark.parametrize(
    "way, told",
    [
        ("raises", r"\Arank 1: Traceback(?s:.*)ValueError: the cause"),
        ("dies", "rank 1: died without a report: killed by SIGKILL"),
        ("calls another", "collectives mismatch, call 0"),
        ("calls more", "rank 0: nothing; rank 1: all_reduce"),
    ],
)
def test_after_a_failure_others_take_their_place(way, told):
    before = [pid for pid, _, _ in run_on_standing_ranks(pid_and_sum, 2, 1)]
    with pytest.raises(RankFailure, match=told):
        run_on_standing_ranks(one_differs, 2, way, timeout=20)
    after = run_on_standing_ranks(pid_and_sum, 2, 1)
    assert [value for _, value, _ in after] == [1.0, 1.0]
    assert not {pid for pid, _, _ in after} & {*before}


def test_a_message_that_nobody_took_is_not_of_the_next_run():
    assert run_on_standing_ranks(sent_unasked, 2, 1.0) == [None, None]
    assert run_on_standing_ranks(received, 2, 2.0) == [2.0, None]


def sent_unasked(rank, world, value):
    if rank == 1:
        dist.send(torch.tensor(value), 0)


def received(rank, world, value):
    x = torch.zeros(())
    if rank == 0:
        dist.recv(x, 1)
        return x.item()
    dist.send(torch.tensor(value), 0)
    return None


def test_one_rank_has_no_group():
    assert run_on_standing_ranks(no_group, 1) == [True]


def no_group(rank, world):
    return not dist.is_initialized()


def own_pid(rank, world):
    return os.getpid()


@pytest.mark.patches
def test_who_patches_has_ranks_of_its_own():
    assert standing_ranks.alone
    assert not {*run_on_standing_ranks(own_pid, 2)} & {*run_on_standing_ranks(own_pid, 2)}


def test_who_takes_monkeypatch_does_too(monkeypatch):
    assert standing_ranks.alone

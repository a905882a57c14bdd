"""Meeting the other ranks, and leaving them."""

import errno
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron5d.topology import process, rendezvous
from megatron5d.topology.process import start_process, stop_process, use_batch_scheduling
from megatron5d.topology.rendezvous import Environment, num_registered, register, wait_until


def test_one_process_initialises_nothing():
    me = start_process(5.0, Environment())
    assert (me.rank, me.world, me.device.type) == (0, 1, "cpu")
    assert not dist.is_initialized()
    stop_process()


def forked_without_group(fn, world):
    """Ranks as a launcher starts them: alone, before any meeting."""

    def start(rank, _):
        dist.barrier()  # nobody is late because of a slow start
        dist.destroy_process_group()
        del os.environ["MEGATRON5D_MEETING"]
        return fn(rank)

    return run_ranks(start, world)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_ranks_meet_by_file_and_part(tmp_path):
    meeting = f"file://{tmp_path}/meeting"

    def fn(rank):
        policies = []  # asked for, each with whether gloo's threads are there
        # what a launcher starts; this rank was forked as another
        os.sched_getscheduler = lambda pid: os.SCHED_OTHER
        os.sched_setscheduler = lambda pid, policy, _: policies.append(
            (policy, dist.is_initialized())
        )
        me = start_process(30.0, Environment(rank, 3, rank, meeting))
        x = torch.tensor(float(me.rank))
        dist.all_reduce(x)
        stop_process()
        return x.item(), dist.is_initialized(), policies

    # no rank preempts another
    assert forked_without_group(fn, 3) == [(3.0, False, [(os.SCHED_BATCH, False)])] * 3


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has this policy alone")
def test_another_policy_is_kept_and_a_sandbox_without_policies_is_no_obstacle(monkeypatch):
    def refuse(*args):
        raise OSError(errno.EINVAL, "Invalid argument")  # as gVisor does

    changes = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda *args: changes.append(args))
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_IDLE)
    use_batch_scheduling()
    assert not changes
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    use_batch_scheduling()
    assert [policy for _, policy, _ in changes] == [os.SCHED_BATCH]
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    use_batch_scheduling()


def test_a_group_that_exists_is_used_and_left_alone():
    def fn(rank, world):
        me = start_process(30.0)
        stop_process()
        return me.rank, me.world, dist.is_initialized()

    assert run_ranks(fn, 2) == [(0, 2, True), (1, 2, True)]


def test_a_failing_rank_does_not_say_goodbye(tmp_path):
    meeting = f"file://{tmp_path}/meeting"

    def fn(rank):
        start_process(30.0, Environment(rank, 2, rank, meeting))
        try:
            raise ValueError
        except ValueError:
            stop_process()
        return dist.is_initialized()

    assert forked_without_group(fn, 2) == [True, True]


def test_an_unknown_host_fails_at_once_and_is_named():
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"no-such-host\.invalid.*MASTER_ADDR"):
        start_process(600.0, Environment(0, 2, 0, "tcp://no-such-host.invalid:12345"))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("by", ["file", "address", "variables"])
def test_absent_ranks_are_named(tmp_path, monkeypatch, capfd, by):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 3.0)
    monkeypatch.setattr(rendezvous, "SAY_WAITING_S", 1.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
    meeting = {
        "file": f"file://{tmp_path}/meeting",
        "address": f"tcp://127.0.0.1:{port}",
        "variables": "env://",
    }[by]

    def fn(rank):
        if rank == 1:
            return "absent"
        with pytest.raises(TimeoutError, match="of 3 ranks these did not appear within 3 s: 1$"):
            start_process(600.0, Environment(rank, 3, rank, meeting))
        return "told"

    assert forked_without_group(fn, 3) == ["told", "absent", "told"]
    assert "rank 0 of 3 waits for ranks 1\n" in capfd.readouterr().err


def test_nobody_at_the_address_is_told(monkeypatch):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 1.0)
    with pytest.raises(
        TimeoutError, match=r"rank 1 could not reach rank 0 at tcp://127\.0\.0\.1:9"
    ):
        start_process(600.0, Environment(1, 2, 1, "tcp://127.0.0.1:9"))


def test_a_port_that_another_process_has_is_told():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            OSError, match=f"cannot open tcp://127.0.0.1:{port} for the others: .* set MASTER_PORT"
        ):
            start_process(600.0, Environment(0, 2, 0, f"tcp://127.0.0.1:{port}"))


def test_too_many_local_ranks_for_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="local rank 4 has no GPU: this node shows 4"):
        start_process(5.0, Environment(4, 8, 4, "env://"))


def test_a_single_visible_gpu_is_every_local_ranks_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    me = start_process(5.0, Environment(0, 1, 3, ""))
    assert me.device == torch.device("cuda", 0)
    assert chosen == [me.device]


def test_rank_0_has_room_for_a_connection_to_each_of_the_others(monkeypatch):
    """Where it has not, the system turns late ranks away and tells nobody."""
    asked = []
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(process.resource, "setrlimit", lambda _, limits: asked.append(limits))
    process.check_connections(Environment(0, 3000, 0, "env://"))
    process.check_connections(Environment(7, 16384, 7, "env://"))
    assert asked == [(4096, 4096)] * 2
    with pytest.raises(
        ValueError, match="each of 16384 ranks, .* open 4096 files .*nearest that fit: 16640 files"
    ):
        process.check_connections(Environment(0, 16384, 0, "env://"))


def test_rank_0_leaves_last():
    """Its process keeps the store, at which others may still look for the end of a save."""

    def fn(rank):
        start_process(30.0, Environment(rank, 3, rank, f"tcp://127.0.0.1:{port}"))
        time.sleep(0.5 * rank)
        at_end = time.monotonic()
        stop_process()
        return at_end, time.monotonic()

    port = free_port()
    times = forked_without_group(fn, 3)
    assert times[0][1] >= times[2][0]


def test_ranks_that_are_started_again_do_not_take_the_dead_for_present():
    """torchrun's agent keeps its store when it starts the ranks again."""

    def start(rank, num_joined):
        started = rendezvous._wait_for_all(store, rank, 3, 20.0).store
        register(started, "in the same start", rank)
        wait_until(lambda: num_registered(started, "in the same start") >= num_joined, 10.0)
        return num_registered(started, "in the same start")

    store = dist.HashStore()
    with ThreadPoolExecutor(3) as at_once:
        assert list(at_once.map(start, range(3), [3] * 3)) == [3, 3, 3]
        half = [at_once.submit(rendezvous._wait_for_all, store, rank, 3, 0.5) for rank in (0, 1)]
        for each in half:  # the third has died before it came
            with pytest.raises(TimeoutError, match="did not appear within 0.5 s: 2$"):
                each.result()
        late = [at_once.submit(start, rank, 3) for rank in (1, 2)]
        time.sleep(0.1)
        assert start(0, 3) == 3 and [each.result() for each in late] == [3, 3]

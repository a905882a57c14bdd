"""Ranks meet and leave each other."""

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


def test_one_process_initializes_nothing():
    this = start_process(5.0, Environment())
    assert (this.rank, this.world, this.device.type) == (0, 1, "cpu")
    assert not dist.is_initialized()
    stop_process()


def launched(fn, world):
    """Calls `fn(rank)` on ranks as a launcher starts them: alone, before any rendezvous."""

    def on_rank(rank, _):
        dist.barrier()  # so that none is late because of a slow start
        dist.destroy_process_group()
        del os.environ["MEGATRON5D_MEETING"]
        return fn(rank)

    return run_ranks(on_rank, world)


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_ranks_meet_at_a_file_and_leave(tmp_path):
    def on_rank(rank):
        policies = []  # each with whether gloo's threads have started
        os.sched_getscheduler = lambda pid: os.SCHED_OTHER
        os.sched_setscheduler = lambda pid, policy, _: policies.append(
            (policy, dist.is_initialized())
        )
        this = start_process(30.0, Environment(rank, 3, rank, f"file://{tmp_path}/store"))
        x = torch.tensor(float(this.rank))
        dist.all_reduce(x)
        stop_process()
        return x.item(), dist.is_initialized(), policies

    assert launched(on_rank, 3) == [(3.0, False, [(os.SCHED_BATCH, False)])] * 3


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has this policy")
def test_other_policies_are_kept_and_a_sandbox_may_forbid_changes(monkeypatch):
    def forbid(*args):
        raise OSError(errno.EINVAL, "Invalid argument")  # as gVisor does

    changes = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda *args: changes.append(args))
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_IDLE)
    use_batch_scheduling()
    assert not changes
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    use_batch_scheduling()
    assert [policy for _, policy, _ in changes] == [os.SCHED_BATCH]
    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    use_batch_scheduling()


def test_an_existing_group_is_used_and_kept():
    def on_rank(rank, world):
        this = start_process(30.0)
        stop_process()
        return this.rank, this.world, dist.is_initialized()

    assert run_ranks(on_rank, 2) == [(0, 2, True), (1, 2, True)]


def test_a_failing_rank_keeps_its_group_until_it_has_printed_the_error(tmp_path):
    def on_rank(rank):
        start_process(30.0, Environment(rank, 2, rank, f"file://{tmp_path}/store"))
        try:
            raise ValueError
        except ValueError:
            stop_process()
        return dist.is_initialized()

    assert launched(on_rank, 2) == [True, True]


def test_an_unknown_host_fails_at_once_and_is_named():
    # not after a time limit: pytest's own is shorter
    with pytest.raises(ValueError, match=r"no-such-host\.invalid.*MASTER_ADDR"):
        start_process(600.0, Environment(0, 2, 0, "tcp://no-such-host.invalid:12345"))


@pytest.mark.parametrize("scheme", ["file", "tcp", "env"])
def test_absent_ranks_are_named(tmp_path, monkeypatch, capfd, port, scheme):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 3.0)
    monkeypatch.setattr(rendezvous, "REPORT_INTERVAL_S", 1.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    path = {"file": f"{tmp_path}/store", "tcp": f"127.0.0.1:{port}", "env": ""}[scheme]

    def on_rank(rank):
        if rank != 1:
            message = "of 3 ranks these did not appear within 3 s: 1$"
            with pytest.raises(TimeoutError, match=message):
                start_process(600.0, Environment(rank, 3, rank, f"{scheme}://{path}"))

    launched(on_rank, 3)
    assert "rank 0 of 3 waits for ranks 1\n" in capfd.readouterr().err


def test_an_address_without_a_listener_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 1.0)
    message = r"rank 1 could not reach rank 0 at tcp://127\.0\.0\.1:9"
    with pytest.raises(TimeoutError, match=message):
        start_process(600.0, Environment(1, 2, 1, "tcp://127.0.0.1:9"))


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot open {url} for the others: .* set MASTER_PORT"):
            start_process(600.0, Environment(0, 2, 0, url))


def test_too_many_local_ranks_for_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="local rank 4 has no GPU: this node shows 4"):
        start_process(5.0, Environment(4, 8, 4, "env://"))


def test_every_local_rank_uses_the_only_visible_gpu(monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    device = start_process(5.0, Environment(0, 1, 3, "")).device
    assert [device] == devices == [torch.device("cuda", 0)]


def test_rank_0_requires_a_connection_to_every_other_rank(monkeypatch):
    """Beyond its limit the system turns late ranks away without a message."""
    limits = []
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(process.resource, "setrlimit", lambda _, limit: limits.append(limit))
    process.check_connections(Environment(0, 3000, 0, "env://"))
    process.check_connections(Environment(7, 16384, 7, "env://"))
    assert limits == [(4096, 4096)] * 2
    message = r"to 16384 ranks require 16640 open files \(got 4096,"
    with pytest.raises(ValueError, match=message):
        process.check_connections(Environment(0, 16384, 0, "env://"))


def test_rank_0_leaves_last(port):
    """Its process hosts the store, where others may still look for the end of a save."""

    def on_rank(rank):
        start_process(30.0, Environment(rank, 3, rank, f"tcp://127.0.0.1:{port}"))
        time.sleep(0.5 * rank)
        leaving = time.monotonic()
        stop_process()
        return leaving, time.monotonic()

    times = launched(on_rank, 3)
    assert times[0][1] >= times[2][0]


def test_restarted_ranks_do_not_count_the_dead():
    """torchrun's agent keeps its store when it restarts the ranks."""
    store, name = dist.HashStore(), "a register of this start"

    def join(rank):
        start = rendezvous._wait_for_all(store, rank, 3, 20.0).store
        register(start, name, rank)
        wait_until(lambda: num_registered(start, name) >= 3, 10.0)
        return num_registered(start, name)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(join, range(3))) == [3, 3, 3]
        # the third rank has died before it came
        failed = [threads.submit(rendezvous._wait_for_all, store, rank, 3, 0.5) for rank in (0, 1)]
        for future in failed:
            with pytest.raises(TimeoutError, match="did not appear within 0.5 s: 2$"):
                future.result()
        late = [threads.submit(join, rank) for rank in (1, 2)]
        time.sleep(0.1)
        assert join(0) == 3
        assert [future.result() for future in late] == [3, 3]

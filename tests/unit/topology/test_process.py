"""Reading the launchers' variables, and meeting the other ranks."""

import errno
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron5d.topology import process
from megatron5d.topology.process import (
    Environment,
    first_host,
    preempt_nobody,
    read_environment,
    start_process,
    stop_process,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-11,20],login1",
}


def test_no_launcher_is_one_process():
    assert read_environment({"PATH": "/bin"}) == Environment(0, 1, 0, "")


def test_torchrun():
    assert read_environment(TORCHRUN) == Environment(3, 8, 1, "env://")


def test_the_fork_launcher_brings_its_own_meeting_point():
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MEGATRON5D_MEETING": "file:///tmp/x"}
    assert read_environment(variables) == Environment(1, 2, 1, "file:///tmp/x")


def test_slurm_step():
    assert read_environment(SLURM) == Environment(5, 8, 1, "tcp://gpu07:13234")


def test_steps_of_one_job_do_not_share_a_port():
    other = read_environment(SLURM | {"SLURM_STEP_ID": "1"})
    assert other.meeting == "tcp://gpu07:13235"


def test_slurm_meeting_point_can_be_overridden():
    assert read_environment(SLURM | {"MASTER_ADDR": "ib7", "MASTER_PORT": "5000"}).meeting == "tcp://ib7:5000"


def test_torchrun_inside_a_slurm_step_wins():
    assert read_environment(SLURM | TORCHRUN).rank == 3


def test_a_batch_script_or_salloc_shell_is_one_process():
    variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "node[1-4]"}
    assert read_environment(variables).world == 1


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node1", "node1"),
        ("node[1-4]", "node1"),
        ("gpu[007-011,020]", "gpu007"),
        ("a-3,b-4", "a-3"),
        ("rack[2-3]n[5,7-9],x", "rack2n5"),
        ("n[4].cluster.org,m", "n4.cluster.org"),
    ],
)
def test_first_host(node_list, host):
    assert first_host(node_list) == host


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "rank 2 of a world of 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        ({"SLURM_STEP_ID": "0"}, "SLURM_PROCID is not set"),
        (SLURM | {"SLURM_STEP_NODELIST": ","}, "no host in it"),
    ],
)
def test_incomplete_variables_are_named(variables, message):
    with pytest.raises(ValueError, match=message):
        read_environment(variables)


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
        os.sched_getscheduler = lambda pid: os.SCHED_OTHER  # what a launcher starts; this rank was forked as another
        os.sched_setscheduler = lambda pid, policy, _: policies.append((policy, dist.is_initialized()))
        me = start_process(30.0, Environment(rank, 3, rank, meeting))
        x = torch.tensor(float(me.rank))
        dist.all_reduce(x)
        stop_process()
        return x.item(), dist.is_initialized(), policies

    # no rank pushes another off its core
    assert forked_without_group(fn, 3) == [(3.0, False, [(os.SCHED_BATCH, False)])] * 3


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has this policy alone")
def test_another_policy_is_kept_and_a_sandbox_without_policies_is_no_obstacle(monkeypatch):
    def refuse(*args):
        raise OSError(errno.EINVAL, "Invalid argument")  # as gVisor does

    changes = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda *args: changes.append(args))
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_IDLE)
    preempt_nobody()
    assert not changes
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    preempt_nobody()
    assert [policy for _, policy, _ in changes] == [os.SCHED_BATCH]
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    preempt_nobody()


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


def test_a_rank_of_the_harness_reads_its_place_from_the_variables():
    def fn(rank, world):
        found = read_environment(os.environ)
        return found.rank, found.world, found.local_rank

    assert run_ranks(fn, 2) == [(0, 2, 0), (1, 2, 1)]


def test_an_unknown_host_fails_at_once_and_is_named():
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"no-such-host\.invalid.*MASTER_ADDR"):
        start_process(600.0, Environment(0, 2, 0, "tcp://no-such-host.invalid:12345"))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("by", ["file", "address", "variables"])
def test_absent_ranks_are_named(tmp_path, monkeypatch, capfd, by):
    monkeypatch.setattr(process, "RENDEZVOUS_TIMEOUT_S", 3.0)
    monkeypatch.setattr(process, "SAY_WAITING_S", 1.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
    meeting = {"file": f"file://{tmp_path}/meeting", "address": f"tcp://127.0.0.1:{port}", "variables": "env://"}[by]

    def fn(rank):
        if rank == 1:
            return "absent"
        with pytest.raises(TimeoutError, match="of 3 ranks these did not appear within 3 s: 1$"):
            start_process(600.0, Environment(rank, 3, rank, meeting))
        return "told"

    assert forked_without_group(fn, 3) == ["told", "absent", "told"]
    assert "rank 0 of 3 waits for ranks 1\n" in capfd.readouterr().err


def test_nobody_at_the_address_is_told(monkeypatch):
    monkeypatch.setattr(process, "RENDEZVOUS_TIMEOUT_S", 1.0)
    with pytest.raises(TimeoutError, match=r"rank 1 could not reach rank 0 at tcp://127\.0\.0\.1:9"):
        start_process(600.0, Environment(1, 2, 1, "tcp://127.0.0.1:9"))


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
    process._allow_connections(Environment(0, 3000, 0, "env://"))
    process._allow_connections(Environment(7, 16384, 7, "env://"))
    assert asked == [(4096, 4096)] * 2
    with pytest.raises(ValueError, match="each of 16384 ranks, .* open 4096 files .*nearest that fit: 16640 files"):
        process._allow_connections(Environment(0, 16384, 0, "env://"))


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
        roll_call = process._roll_call(store, rank, 3, 20.0)
        process.sign(roll_call, "roll", rank)
        process.wait_until(lambda: process.num_signed(roll_call, "roll") >= num_joined, 10.0)
        return process.num_signed(roll_call, "roll")

    store = dist.HashStore()
    with ThreadPoolExecutor(3) as at_once:
        assert list(at_once.map(start, range(3), [3] * 3)) == [3, 3, 3]
        half = [at_once.submit(process._roll_call, store, rank, 3, 0.5) for rank in (0, 1)]
        for each in half:  # the third has died before it came
            with pytest.raises(TimeoutError, match="did not appear within 0.5 s: 2$"):
                each.result()
        late = [at_once.submit(start, rank, 3) for rank in (1, 2)]
        time.sleep(0.1)
        assert start(0, 3) == 3 and [each.result() for each in late] == [3, 3]

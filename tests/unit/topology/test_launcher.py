"""Reading rank, world size and meeting point from the launchers' variables."""

import os

import pytest
from ranks import run_ranks

from megatron5d.topology.rendezvous import Environment, first_host, read_environment, restarted_job

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


def test_whether_the_job_was_started_again():
    assert restarted_job({"SLURM_JOB_ID": "7"}) == restarted_job({}) == ""
    assert restarted_job({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == "7"
    assert restarted_job({"SLURM_JOB_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1"}) == "7"
    assert restarted_job({"SLURM_JOB_ID": "7", "TORCHELASTIC_RESTART_COUNT": "0"}) == ""


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


def test_a_rank_of_the_harness_reads_its_place_from_the_variables():
    def fn(rank, world):
        found = read_environment(os.environ)
        return found.rank, found.world, found.local_rank

    assert run_ranks(fn, 2) == [(0, 2, 0), (1, 2, 1)]

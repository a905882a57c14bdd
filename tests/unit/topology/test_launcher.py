"""Reading rank, world size and meeting point from the launchers' variables."""

import os

import pytest
from ranks import run_ranks

from megatron5d.topology.launcher import Environment, first_host, read_environment, restarted_job

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
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
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MEGATRON5D_MEETING": "file:///tmp/x",
    }
    assert read_environment(variables) == Environment(1, 2, 1, "file:///tmp/x")


def test_slurm_step():
    assert read_environment(SLURM) == Environment(5, 8, 1, "tcp://gpu07:13234")


def test_steps_of_one_job_do_not_share_a_port():
    other = read_environment(SLURM | {"SLURM_STEP_ID": "1"})
    assert other.meeting == "tcp://gpu07:13235"


def test_slurm_meeting_point_can_be_overridden():
    assert (
        read_environment(SLURM | {"MASTER_ADDR": "ib7", "MASTER_PORT": "5000"}).meeting
        == "tcp://ib7:5000"
    )


MARKED = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
PLACE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
MPI = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}


@pytest.mark.parametrize("variables", MPI.values(), ids=MPI)
def test_mpi_launchers(variables):
    said = dict(zip(variables, ("5", "8", "1"), strict=True))
    assert read_environment(said | PLACE) == Environment(5, 8, 1, "tcp://node1:29500")
    assert read_environment(said | PLACE | {"PMIX_RANK": "5"}).rank == 5
    with pytest.raises(
        ValueError, match="8 ranks, and MASTER_ADDR is not set.*mpirun -x MASTER_ADDR"
    ):
        read_environment(said)
    with pytest.raises(
        ValueError,
        match=f"RANK=0 WORLD_SIZE=1 .* and {variables[0]}=5 .* disagree.*unset RANK WORL",
    ):
        read_environment({"RANK": "0", "WORLD_SIZE": "1"} | said | PLACE)
    # whose daemons srun has started
    assert read_environment(SLURM | DAEMON | said | PLACE).rank == 5


@pytest.mark.parametrize("name", ["PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE"])
def test_a_rank_without_a_number_of_ranks_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match=f"{name}=1 is set"):
        read_environment({name: "1"})


def test_launchers_that_agree_and_those_that_started_the_other():
    assert read_environment(SLURM | MARKED).rank == 3
    assert read_environment(
        SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMIX_RANK": "5"}
    ) == read_environment(SLURM)
    assert read_environment(SLURM | {"WORLD_SIZE": "8"}) == read_environment(SLURM)
    assert read_environment(SLURM | {"RANK": "5", "WORLD_SIZE": "8"}).meeting == "tcp://gpu07:13234"


@pytest.mark.parametrize(
    "left",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "5", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0"},
    ],
)
def test_what_is_left_in_the_shell_does_not_win_over_slurm(left):
    shown = " ".join(f"{name}={value}" for name, value in left.items())
    with pytest.raises(
        ValueError,
        match=f"{shown} .torchrun. and SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 .srun. disagr",
    ):
        read_environment(SLURM | left)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", "99999"),
        ("MASTER_PORT", "0"),
        ("RANK", "9" * 5000),
        ("WORLD_SIZE", "1e3"),
        ("RANK", "\u0663"),
        ("WORLD_SIZE", "9" * 12),
        ("LOCAL_RANK", "-1"),
        ("LOCAL_RANK", "8"),
    ],
)
def test_numbers_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=name if value != "8" else "local rank 8"):
        read_environment(TORCHRUN | {name: value})


def test_whether_the_job_was_started_again():
    assert restarted_job({"SLURM_JOB_ID": "7"}) == restarted_job({}) == ""
    assert restarted_job({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == "7"
    assert restarted_job({"SLURM_JOB_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1"}) == "7"
    assert restarted_job({"SLURM_JOB_ID": "7", "TORCHELASTIC_RESTART_COUNT": "0"}) == ""


def test_a_batch_script_or_salloc_shell_is_one_process():
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "0",
        "SLURM_JOB_NODELIST": "node[1-4]",
    }
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
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "rank 2 of a world of 2",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4 is set .torchrun., and RANK is not set; for one process: unset WORLD_SIZE",
        ),
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

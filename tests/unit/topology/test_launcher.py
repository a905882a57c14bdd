"""Reads rank, world size and rendezvous from the variables of launchers."""

import os

import pytest
from ranks import run_ranks

from megatron5d.topology.launcher import Environment, first_host, read_environment, restarted_job

ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **ADDRESS}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-11,20],login1",
}
# launch/fork.py brings its own rendezvous
FORK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MEGATRON5D_MEETING": "file:///tmp/x"}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "node[1-4]",
}


@pytest.mark.parametrize(
    ("variables", "environment"),
    [
        ({"PATH": "/bin"}, (0, 1, 0, "")),
        (BATCH_SCRIPT, (0, 1, 0, "")),
        (TORCHRUN, (3, 8, 1, "env://")),
        (FORK, (1, 2, 1, "file:///tmp/x")),
        (SLURM, (5, 8, 1, "tcp://gpu07:13234")),
        # steps of one job do not share a port
        (SLURM | {"SLURM_STEP_ID": "1"}, (5, 8, 1, "tcp://gpu07:13235")),
        (SLURM | {"MASTER_ADDR": "ib7", "MASTER_PORT": "5000"}, (5, 8, 1, "tcp://ib7:5000")),
        # launchers that agree
        (
            SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMIX_RANK": "5"},
            (5, 8, 1, "tcp://gpu07:13234"),
        ),
        (SLURM | {"WORLD_SIZE": "8"}, (5, 8, 1, "tcp://gpu07:13234")),
        (SLURM | {"RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 1, "tcp://gpu07:13234")),
        # srun that only started torchrun's agent
        (SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, (3, 8, 1, "env://")),
    ],
)
def test_launchers_are_understood(variables, environment):
    assert read_environment(variables) == Environment(*environment)


MPI = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}


@pytest.mark.parametrize("names", MPI.values(), ids=MPI)
def test_mpi_launchers(names):
    mpi = dict(zip(names, ("5", "8", "1"), strict=True))
    assert read_environment(mpi | ADDRESS) == Environment(5, 8, 1, "tcp://node1:29500")
    assert read_environment(mpi | ADDRESS | {"PMIX_RANK": "5"}).rank == 5
    with pytest.raises(ValueError, match="8 ranks .* MASTER_ADDR is not set.*mpirun -x MASTER_ADD"):
        read_environment(mpi)
    disagreement = f"RANK=0 WORLD_SIZE=1 .* and {names[0]}=5 .* disagree.*unset RANK WORL"
    with pytest.raises(ValueError, match=disagreement):
        read_environment({"RANK": "0", "WORLD_SIZE": "1"} | mpi | ADDRESS)
    # mpirun starts a daemon on each of two nodes through srun
    daemon = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    assert read_environment(SLURM | daemon | mpi | ADDRESS).rank == 5


@pytest.mark.parametrize(
    "stale",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "5", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0"},
    ],
)
def test_stale_variables_of_the_shell_do_not_override_slurm(stale):
    shown = " ".join(f"{name}={value}" for name, value in stale.items())
    slurm = "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 .srun. disagree"
    with pytest.raises(ValueError, match=f"{shown} .torchrun. and {slurm}"):
        read_environment(SLURM | stale)


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


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, r"RANK must be a whole number \(got 'x'\)"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "rank 2 of a world of 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4 is set .torchrun., but RANK is not set; for one process: unset WORLD_SI",
        ),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is set"),
        ({"PALS_RANKID": "1"}, "PALS_RANKID=1 is set"),
        ({"ALPS_APP_PE": "1"}, "ALPS_APP_PE=1 is set"),
        ({"SLURM_STEP_ID": "0"}, "SLURM_PROCID is not set"),
        (SLURM | {"SLURM_STEP_NODELIST": ","}, "names no host"),
    ],
)
def test_incomplete_variables_are_named(variables, message):
    with pytest.raises(ValueError, match=message):
        read_environment(variables)


@pytest.mark.parametrize(
    ("restarts", "job"),
    [
        ({}, ""),
        ({"SLURM_RESTART_COUNT": "2"}, "7"),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, "7"),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, ""),
    ],
)
def test_a_restarted_job_is_known(restarts, job):
    assert restarted_job({"SLURM_JOB_ID": "7"} | restarts) == job
    assert restarted_job({}) == ""


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


def test_a_rank_of_the_test_ranks_reads_its_place_from_the_variables():
    environments = run_ranks(lambda rank, world: read_environment(os.environ), 2)
    assert environments == [Environment(rank, 2, rank, "met") for rank in range(2)]

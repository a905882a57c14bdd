"""Which jobs launch/slurm.sbatch requeues, with scripts in place of SLURM's commands."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOON, LATE = 200, 3600  # seconds until the time limit


@pytest.mark.parametrize(
    ("ranks", "seconds_run", "limit", "code", "requeued"),
    [
        ("exit 75", 300, SOON, 75, True),  # stopped by the time limit
        ("exit 75", 300, LATE, 75, False),  # stopped by scancel --signal
        ("kill -TERM $PPID; exit 75", 300, SOON, 75, False),  # stopped by scancel
        ("exit 75", 300, "N/A", 75, False),  # the job has no limit
        ("exit 75", 300, "", 75, False),  # the controller does not answer
        ("exit 0", 300, SOON, 0, False),
        ("exit 75", 5, SOON, 75, False),  # the limit leaves no start enough time for a step
        ("exit 1", 300, SOON, 1, False),
    ],
)
def test_only_a_job_that_ran_out_of_time_is_requeued(
    tmp_path, ranks, seconds_run, limit, code, requeued
):
    end = limit
    if not isinstance(limit, str):
        end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + limit))
    calls = tmp_path / "calls"
    commands = {"srun": ranks, "squeue": f"echo {end}", "scontrol": f'echo "$@" > {calls}'}
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "node1",
        "SECONDS": str(seconds_run),  # bash counts on from it
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
    }
    # a shell around it, because $PPID of srun would otherwise be this process
    command = ["bash", "-c", "bash launch/slurm.sbatch; exit $?"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (calls.read_text() if calls.exists() else "") == ("requeue 7\n" if requeued else "")

"""launch/slurm.sbatch without SLURM: which jobs it requeues. Its commands are replaced by scripts
that tell of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOON, LATE = 200, 3600  # seconds until the time limit
RAN = 300  # seconds since the start


@pytest.mark.parametrize(
    ("ranks", "ran", "left", "code", "requeued"),
    [
        ("exit 75", RAN, SOON, 75, True),  # told to stop by the time limit
        ("exit 75", RAN, LATE, 75, False),  # by scancel --signal
        ("kill -TERM $PPID; exit 75", RAN, SOON, 75, False),  # by scancel
        ("exit 75", RAN, "N/A", 75, False),  # the job has no limit
        ("exit 75", RAN, "", 75, False),  # nobody tells: the controller does not answer
        ("exit 0", RAN, SOON, 0, False),
        ("exit 75", 5, SOON, 75, False),  # the limit leaves no time for a step, in no start
        ("exit 1", RAN, SOON, 1, False),
    ],
)
def test_only_a_job_that_ran_out_of_time_is_requeued(tmp_path, ranks, ran, left, code, requeued):
    end = (
        left
        if isinstance(left, str)
        else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + left))
    )
    for name, body in {
        "srun": ranks,
        "squeue": f"echo {end}",
        "scontrol": f'echo "$@" > {tmp_path}/said',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "node1",
    }
    job["SECONDS"] = str(ran)  # bash counts on from it
    environment = (
        os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    )
    # not bash alone: its parent would be this process
    command = ["bash", "-c", "bash launch/slurm.sbatch; exit $?"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    said = tmp_path / "said"
    assert (said.read_text() if said.exists() else None) == ("requeue 7\n" if requeued else None)

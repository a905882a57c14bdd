"""Run the files of `interpreted/` in processes whose Triton is the (repaired) interpreter, and on a GPU where one is.

Several files share a process: to start one takes longer than some of them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
HERE = Path(__file__).parent
FILES = sorted(str(p) for p in (HERE / "interpreted").glob("test_*.py"))
PROCESSES = 3
# the interpreter itself; faults that a GPU would not survive; processes that share the host's memory
NOT_ON_GPU = ("test_interpreter_repair.py", "test_planted_faults.py", "test_overlap.py")
ENVIRONMENTS = {"interpreter": {"TRITON_INTERPRET": "1"}, "gpu": {"MEGATRON5D_KERNELS": "gpu"}}


def shares(place: str, files: list[str]) -> list:
    named = ("+".join(Path(file).stem for file in share) for share in (files[i::PROCESSES] for i in range(PROCESSES)))
    return [pytest.param(place, files[i::PROCESSES], id=f"{place}-{name}") for i, name in enumerate(named)]


SHARES = shares("interpreter", FILES)
if torch.cuda.is_available():
    SHARES += shares("gpu", [file for file in FILES if not file.endswith(NOT_ON_GPU)])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place, files", SHARES)
def test_passes(place, files):
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ENVIRONMENTS[place]
    run = subprocess.run(
        [*command, *files], cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

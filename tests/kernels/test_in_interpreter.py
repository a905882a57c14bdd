"""Run each file of `interpreted/` in a process whose Triton is the (repaired) interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
FILES = sorted(p.name for p in (HERE / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_passes_in_the_interpreter(name):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--import-mode=importlib", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    path = str(HERE / "interpreted" / name)
    run = subprocess.run(
        [*command, path], cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

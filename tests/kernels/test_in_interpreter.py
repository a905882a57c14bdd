"""Run the files of `interpreted/` in processes whose Triton is the (repaired) interpreter.

Several files share a process: to start one takes longer than some of them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
FILES = sorted(str(p) for p in (HERE / "interpreted").glob("test_*.py"))
PROCESSES = 3
SHARES = [FILES[first::PROCESSES] for first in range(PROCESSES)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("files", SHARES, ids=["+".join(Path(file).stem for file in share) for share in SHARES])
def test_passes_in_the_interpreter(files):
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, *files], cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

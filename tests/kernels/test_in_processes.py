"""Run the files of `interpreted/` where kernels can run: interpreted, compiled for a GPU that is emulated, on a GPU.

Several files share a process: to start one takes longer than some of them.
"""

import os
import shutil
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
NOT_COMPILED = ("test_interpreter_repair.py", "test_planted_faults.py", "test_overlap.py")
NOT_EMULATED = (*NOT_COMPILED, "test_benchmarks.py")
ONLY_EMULATED = ("test_emulated_gpu.py", "test_emulated_random.py")


def shares(place: str, left_out: tuple[str, ...], marks=()) -> list:
    files = [file for file in FILES if not file.endswith(left_out)]
    parts = [files[i::PROCESSES] for i in range(PROCESSES)]
    names = ["+".join(Path(file).stem for file in part) for part in parts]
    return [pytest.param(place, part, id=f"{place}-{name}", marks=marks) for part, name in zip(parts, names)]


SHARES = shares("interpreter", ONLY_EMULATED)
EMULATED = ["sm_90", "sm_100"] + ["sm_80", "sm_120"] * (os.environ.get("MEGATRON5D_ALL_KERNELS") == "1")
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulated GPU is built by g++")
for emulated in EMULATED:
    SHARES += shares(emulated, NOT_EMULATED, COMPILER)
if torch.cuda.is_available():
    SHARES += shares("gpu", NOT_COMPILED + ONLY_EMULATED)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place, files", SHARES)
def test_passes(place, files):
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if place == "interpreter" else {"MEGATRON5D_KERNELS": place}
    run = subprocess.run(
        [*command, *files], cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

"""Runs the files of `interpreted/` wherever kernels can run: in the interpreter, compiled for an
emulated GPU, on a GPU.

Several files share a process, because starting one takes longer than some of them. Most of the time
is Triton's compiler, for which a fresh clone waits. So unless MEGATRON5D_TESTS=nightly
- sm_100 leaves out the tests marked `alike`, whose kernels differ from those of sm_90 in packed
  arithmetic alone, and `hopper`, of masks and shapes that every GPU treats alike;
- all cases of tests marked `interpreted` are interpreted and the last one is emulated; of other
  tests all cases are emulated and the last one is interpreted;
- kernels are compiled without line numbers, which only messages of faults need.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
import torch

pytest.importorskip("triton")
HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))
SECONDS_PER_PROCESS = 150
# Seconds of a core: interpreted, and emulated with an empty cache. Files not listed take a few.
LAST = {"benchmarks": 30, "planted_faults": 15, "overlap": 10, "flash_attention": 10, "fp8": 10}
INTERPRETED = LAST | {"fp8": 55, "moe": 40, "flash_attention": 45, "pointwise": 13}
INTERPRETED |= {"activation": 15, "layers": 20, "normalization": 10, "closeness": 10}
EMULATED = {
    "flash_attention": 80,
    "fp8": 65,
    "emulated_gpu": 35,
    "normalization": 30,
    "moe": 25,
    "pointwise": 15,
    "activation": 15,
}
EMULATED |= {"layers": 20, "fp8_tensor": 15, "closeness": 10, "emulated_random": 10}
LAST_EMULATED = EMULATED | {"normalization": 5, "fp8_tensor": 5}
# Files whose tests are all `alike` or `hopper`.
SPARED = (
    "normalization",
    "pointwise",
    "activation",
    "fp8_tensor",
    "shares",
    "multi_tensor",
    "layers",
    "closeness",
)
NOT_ALIKE = EMULATED | {"fp8": 20, "moe": 15, "flash_attention": 15} | dict.fromkeys(SPARED, 0)
# The interpreter itself, faults that a GPU would not survive, processes that share host memory.
NOT_COMPILED = ("interpreter_repair", "planted_faults", "overlap")
NOT_EMULATED = (*NOT_COMPILED, "benchmarks")
ONLY_EMULATED = ("emulated_gpu", "emulated_random")


def processes(place: str, left_out: tuple[str, ...], seconds: dict[str, int], marks=()) -> list:
    """Groups of files that take about the same time, the longest first."""
    names = {file: file.stem.removeprefix("test_") for file in FILES}
    costs = {file: seconds.get(name, 3) for file, name in names.items() if name not in left_out}

    def cost(group: list[Path]) -> int:
        return sum(costs[file] for file in group)

    groups: list[list[Path]] = [[] for _ in range(-(-cost(list(costs)) // SECONDS_PER_PROCESS))]
    for file in sorted(costs, key=lambda file: -costs[file]):
        min(groups, key=cost).append(file)
    return [
        pytest.param(
            place, group, id=f"{place}-{'+'.join(file.stem for file in group)}", marks=marks
        )
        for group in sorted(groups, key=lambda group: -cost(group))
    ]


EMULATES = shutil.which("g++") is not None
LAST_ALONE = EMULATES and not tiers.NIGHTLY
# In the sample, too: the interpreter compiles nothing.
SLOW = [] if tiers.SAMPLE else pytest.mark.slow
PROCESSES = processes("interpreter", ONLY_EMULATED, LAST if LAST_ALONE else INTERPRETED, SLOW)
COMPILER = (
    pytest.mark.skipif(not EMULATES, reason="g++ builds the emulated GPU"),
    pytest.mark.slow,
)
for emulated in ["sm_90", "sm_100"] + ["sm_80", "sm_120"] * tiers.NIGHTLY:
    seconds = EMULATED if tiers.NIGHTLY else LAST_EMULATED if emulated == "sm_90" else NOT_ALIKE
    PROCESSES += processes(emulated, NOT_EMULATED, seconds, COMPILER)
if torch.cuda.is_available():
    PROCESSES += processes("gpu", NOT_COMPILED + ONLY_EMULATED, EMULATED, pytest.mark.slow)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place, files", PROCESSES)
def test_passes(place, files):
    options = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options]
    if place == "sm_100" and not tiers.NIGHTLY:
        command += ["-m", "not alike and not hopper"]
    environment, hint = os.environ | {"OMP_NUM_THREADS": "1"}, ""
    environment |= (
        {"TRITON_INTERPRET": "1"} if place == "interpreter" else {"MEGATRON5D_KERNELS": place}
    )
    if place.startswith("sm_"):
        environment["TRITON_DISABLE_LINE_INFO"] = "1"
        hint = f"MEGATRON5D_KERNELS={place} python -m pytest FILE names the lines of faults\n"
    if LAST_ALONE and place != "gpu":
        environment["MEGATRON5D_LAST_CASES"] = "1"
    run = subprocess.run(
        [*command, *files],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, hint + run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

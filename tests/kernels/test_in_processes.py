"""Run the files of `interpreted/` where kernels can run: interpreted, compiled for a GPU that is
emulated, on a GPU.

Several files share a process: to start one takes longer than some of them. Most of the time is
Triton's compiler, which an empty cache makes a fresh clone wait for: unless
MEGATRON5D_TESTS=nightly, sm_100 is spared the tests marked `alike`, whose kernels differ from those
of sm_90 in packed arithmetic alone, and `hopper`, of masks and shapes that every GPU treats alike;
tests marked `interpreted` have all cases interpreted and the last one emulated, others the other
way round; and lines, which only the message of a fault would name, are not compiled in.
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
EVERYTHING = tiers.NIGHTLY
SECONDS_A_PROCESS = 150
# of a core: interpreted, and emulated with an empty cache; files that are not here take a few
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
# every test
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
# the interpreter itself; faults that a GPU would not survive; processes that share the host's
# memory
NOT_COMPILED = ("interpreter_repair", "planted_faults", "overlap")
NOT_EMULATED = (*NOT_COMPILED, "benchmarks")
ONLY_EMULATED = ("emulated_gpu", "emulated_random")


def shares(place: str, left_out: tuple[str, ...], seconds: dict[str, int], marks=()) -> list:
    """Cases of the same length, more or less; the longest first."""
    costs = {file: seconds.get(file.stem.removeprefix("test_"), 3) for file in FILES}
    costs = {
        file: cost
        for file, cost in costs.items()
        if file.stem.removeprefix("test_") not in left_out
    }
    parts: list[list[Path]] = [[] for _ in range(-(-sum(costs.values()) // SECONDS_A_PROCESS))]
    for file in sorted(costs, key=lambda file: -costs[file]):
        min(parts, key=lambda part: sum(costs[each] for each in part)).append(file)
    parts.sort(key=lambda part: -sum(costs[file] for file in part))
    names = ["+".join(file.stem for file in part) for part in parts]
    return [
        pytest.param(place, part, id=f"{place}-{name}", marks=marks)
        for part, name in zip(parts, names)
    ]


EMULATES = shutil.which("g++") is not None
LAST_ALONE = EMULATES and not EVERYTHING
SHARES = shares("interpreter", ONLY_EMULATED, LAST if LAST_ALONE else INTERPRETED)
COMPILER = pytest.mark.skipif(not EMULATES, reason="the emulated GPU is built by g++")
for emulated in ["sm_90", "sm_100"] + ["sm_80", "sm_120"] * EVERYTHING:
    seconds = EMULATED if EVERYTHING else LAST_EMULATED if emulated == "sm_90" else NOT_ALIKE
    SHARES += shares(emulated, NOT_EMULATED, seconds, COMPILER)
if torch.cuda.is_available():
    SHARES += shares("gpu", NOT_COMPILED + ONLY_EMULATED, EMULATED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place, files", SHARES)
def test_passes(place, files):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-m", "not alike and not hopper"] if place == "sm_100" and not EVERYTHING else []
    lines = {} if place in ("interpreter", "gpu") else {"TRITON_DISABLE_LINE_INFO": "1"}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | lines
    where = {"TRITON_INTERPRET": "1"} if place == "interpreter" else {"MEGATRON5D_KERNELS": place}
    where |= {"MEGATRON5D_LAST_CASES": "1"} if LAST_ALONE and place != "gpu" else {}
    run = subprocess.run(
        [*command, *files],
        cwd=HERE.parents[1],
        env=environment | where,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    again = (
        f"MEGATRON5D_KERNELS={place} python -m pytest FILE names the lines of faults\n"
        if lines
        else ""
    )
    assert run.returncode == 0, again + run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

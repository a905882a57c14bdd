"""Without Triton, as on a laptop, everything takes its plain path."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron5d.kernels.without_triton import jit

ROOT = Path(__file__).parents[2]
ABSENT = "import sys; sys.modules['triton'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"


def test_plain_paths_need_no_triton():
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    files = ["tests/kernels/test_references.py", "tests/unit/precision"]
    command = [sys.executable, "-c", ABSENT, *options, *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


def test_a_kernel_that_cannot_be_compiled_says_so():
    @jit(do_not_specialize=["n"])
    def _halve_kernel(x_ptr, n): ...

    with pytest.raises(RuntimeError, match=r"_halve_kernel needs Triton.*pip install triton"):
        _halve_kernel[(1,)]

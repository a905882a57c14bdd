"""Without Triton, as on a laptop, every operation takes its plain path."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron5d.kernels.without_triton import jit

ROOT = Path(__file__).parents[2]
ABSENT = (
    "import sys; sys.modules['triton'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


def test_plain_paths_need_no_triton():
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    files = ["tests/kernels/test_references.py", "tests/unit/precision"]
    command = [sys.executable, "-c", ABSENT, *options, *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


def test_every_file_of_kernels_can_be_imported():
    """Also those that a run or a forecast imports late."""
    paths = sorted((ROOT / "kernels").rglob("*.py"))
    assert len(paths) > 20
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)
    imports = (f"import megatron5d.{name.removesuffix('.__init__')}" for name in names)
    script = "\n".join(("import sys; sys.modules['triton'] = None", *imports))
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_kernel_that_cannot_be_compiled_says_so():
    @jit(do_not_specialize=["n"])
    def _halve_kernel(x_ptr, n): ...

    with pytest.raises(RuntimeError, match=r"_halve_kernel needs Triton.*pip install triton"):
        _halve_kernel[(1,)]

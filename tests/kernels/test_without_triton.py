"""Without Triton, as on a laptop, everything takes its plain path."""

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
    """Also those that are first imported in the middle of a run, or of a forecast."""
    names = [
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for path in (ROOT / "kernels").rglob("*.py")
    ]
    assert len(names) > 20
    imports = "".join(
        f"import megatron5d.{name.removesuffix('.__init__')}\n" for name in sorted(names)
    )
    command = [sys.executable, "-c", f"import sys; sys.modules['triton'] = None\n{imports}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_kernel_that_cannot_be_compiled_says_so():
    @jit(do_not_specialize=["n"])
    def _halve_kernel(x_ptr, n): ...

    with pytest.raises(RuntimeError, match=r"_halve_kernel needs Triton.*pip install triton"):
        _halve_kernel[(1,)]

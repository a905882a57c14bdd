"""The package refuses to run on somebody else's `kernels`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported(path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", "import megatron5d; print(megatron5d.__version__)"],
        capture_output=True, text=True, env=environment, cwd="/", check=False,
    )  # fmt: skip


def test_ours_is_found():
    assert imported([ROOT]).returncode == 0


def test_another_kernels_is_named(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    run = imported([tmp_path, ROOT])
    assert run.returncode != 0
    assert str(tmp_path / "kernels" / "__init__.py") in run.stderr and "any other package called kernels" in run.stderr

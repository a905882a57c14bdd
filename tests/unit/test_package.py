"""The package works beside another package called `kernels`, and its links lead to the top
level."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["kernels", "tools", "conf"])
def test_links_lead_to_the_top_level(name):
    assert (ROOT / "megatron5d" / name).resolve() == ROOT / name


def test_another_package_called_kernels_is_ignored(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise ImportError('another one')")
    script = "import megatron5d.train.loop, megatron5d.kernels; print(megatron5d.kernels.OWNER)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd="/",
    )
    assert (done.returncode, done.stdout) == (0, "megatron5d\n"), done.stderr

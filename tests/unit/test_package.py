"""The package stands beside somebody else's `kernels`, and its links lead to what the top level
keeps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["kernels", "tools", "conf"])
def test_links_lead_to_the_top_level(name):
    assert (ROOT / "megatron5d" / name).resolve() == ROOT / name


def test_another_package_called_kernels_does_no_harm(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise ImportError('another one')")
    script = "import megatron5d.train.loop, megatron5d.kernels; print(megatron5d.kernels.OWNER)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [tmp_path, ROOT]))}
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        cwd="/",
        check=False,
    )
    assert run.returncode == 0 and run.stdout.strip() == "megatron5d", run.stderr

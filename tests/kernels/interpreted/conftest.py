"""These kernels run in Triton's interpreter, which needs a process of its own, or on a GPU where there is one."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = not INTERPRETED and torch.cuda.is_available()

if INTERPRETED:
    from kernels.testing.interpreter_checks import install_checks
    from kernels.testing.interpreter_numbers import repair_numbers
    from kernels.testing.interpreter_types import make_types_once

    make_types_once()
    repair_numbers()
    install_checks()
elif ON_GPU:  # faults are planted where they can do no harm, and processes that fork share no GPU
    collect_ignore = ["test_interpreter_repair.py", "test_planted_faults.py", "test_overlap.py"]
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def on_gpu():
    """On a GPU, where there is one, tensors are made that name no device."""
    with torch.device("cuda" if ON_GPU else "cpu"):
        yield

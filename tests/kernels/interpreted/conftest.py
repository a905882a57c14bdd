"""Kernels run interpreted, emulated or on a GPU, each in processes of its own
(`../test_in_processes.py`)."""

import os
import re

import pytest
import torch

from megatron5d.kernels import choice, tuning

PLACE = os.environ.get(
    "MEGATRON5D_KERNELS", "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else ""
)
collect_ignore = []
if PLACE == "interpreter":
    from kernel_lab.interpreter_checks import install_checks
    from kernel_lab.interpreter_numbers import repair_numbers
    from kernel_lab.interpreter_types import make_types_once

    make_types_once()
    repair_numbers()
    install_checks()
elif PLACE == "gpu":
    torch.set_default_device("cuda")
    choice.provider = lambda request, settings: None  # Triton, whatever the settings
elif PLACE:
    from kernel_lab.emulated_gpu import install

    install(PLACE, int(os.environ.get("MEGATRON5D_SEED", "0")))
else:
    collect_ignore_glob = ["test_*.py"]
if not PLACE.startswith("sm_"):
    collect_ignore += ["test_emulated_gpu.py", "test_emulated_random.py"]


NOT_ALIKE = re.compile(rb"mma|cp\.async\.bulk|tcgen05|tensormap|redux\.sync\.[\w.]+\.f32")


@pytest.fixture(autouse=True)
def check_marker_alike(request, monkeypatch):
    """Asserts that kernels of tests marked `alike` use instructions that every GPU has."""
    if PLACE.startswith("sm_") and request.node.get_closest_marker("alike"):
        from triton.runtime import driver

        load = driver.active.utils.load_binary

        def checked(name, text, *rest):
            assert not NOT_ALIKE.search(text), (
                f"{name} differs between GPUs: do not mark it `alike`"
            )
            return load(name, text, *rest)

        monkeypatch.setattr(driver.active.utils, "load_binary", checked)


def pytest_collection_modifyitems(config, items):
    """Keeps FP8's tests where a table has its kernels, and the last case of tests whose other cases
    run in another place."""
    selected = list(items)
    if os.environ.get("MEGATRON5D_LAST_CASES") == "1":
        last = set({(item.path, item.originalname): item for item in items}.values())
        interprets = PLACE == "interpreter"
        selected = [
            item
            for item in items
            if item in last or interprets == bool(item.get_closest_marker("interpreted"))
        ]
    if PLACE and "fp8_matmul" not in tuning.table(tuning.architecture(torch.empty(0).device)):
        selected = [item for item in selected if not item.get_closest_marker("fp8")]
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = selected

"""Kernels run interpreted, emulated or on a GPU; each place has processes of its own
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
    choice.provider = lambda request, settings: None  # whatever the settings, Triton
elif PLACE:
    from kernel_lab.emulated_gpu import install

    install(PLACE, int(os.environ.get("MEGATRON5D_SEED", "0")))
else:
    collect_ignore_glob = ["test_*.py"]
if not PLACE.startswith("sm_"):
    collect_ignore += ["test_emulated_gpu.py", "test_emulated_random.py"]


OF_ONE_GPU = re.compile(rb"mma|cp\.async\.bulk|tcgen05|tensormap|redux\.sync\.[\w.]+\.f32")


@pytest.fixture(autouse=True)
def checked_to_be_alike(request, monkeypatch):
    """What a test marked `alike` compiles for an emulated GPU, another one has the instructions
    for, too."""
    if PLACE.startswith("sm_") and request.node.get_closest_marker("alike"):
        from triton.runtime import driver

        load = driver.active.utils.load_binary

        def checked(name, text, *rest):
            assert not OF_ONE_GPU.search(text), (
                f"{name} differs from GPU to GPU: this test is not `alike`"
            )
            return load(name, text, *rest)

        monkeypatch.setattr(driver.active.utils, "load_binary", checked)


def pytest_collection_modifyitems(config, items):
    """Kernels for FP8 are tested where there is a table for them, and one case of a test that is
    run elsewhere, too."""
    if os.environ.get("MEGATRON5D_LAST_CASES") == "1":
        last = set({(item.path, item.originalname): item for item in items}.values())
        here = PLACE == "interpreter"
        taken = [
            item
            for item in items
            if item in last or here == bool(item.get_closest_marker("interpreted"))
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = taken
    if PLACE and "fp8_matmul" not in tuning.table(tuning.architecture(torch.empty(0).device)):
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("fp8")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("fp8")]

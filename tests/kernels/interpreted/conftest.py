"""These kernels run in the interpreter or on a GPU; each needs a process of its own (`../test_in_processes.py`)."""

import os

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from kernels.testing.interpreter_checks import install_checks
    from kernels.testing.interpreter_numbers import repair_numbers
    from kernels.testing.interpreter_types import make_types_once

    make_types_once()
    repair_numbers()
    install_checks()
elif os.environ.get("MEGATRON5D_KERNELS") == "gpu":
    torch.set_default_device("cuda")
else:
    collect_ignore_glob = ["test_*.py"]

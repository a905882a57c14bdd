"""Kernels in Triton's interpreter, which is chosen before Triton is imported: these tests have their own process."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from kernels.testing.interpreter_checks import install_checks
    from kernels.testing.interpreter_numbers import repair_numbers
    from kernels.testing.interpreter_types import make_types_once

    make_types_once()
    repair_numbers()
    install_checks()
else:
    collect_ignore_glob = ["test_*.py"]

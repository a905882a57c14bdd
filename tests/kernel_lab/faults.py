"""Modules with one planted fault."""

import importlib.util
from pathlib import Path
from types import ModuleType

from megatron5d import kernels

ROOT = Path(kernels.__file__).parent


def load_with_fault(folder: Path, name: str, right: str, wrong: str) -> ModuleType:
    """A copy of kernels/{name}.py in which `right` is replaced by `wrong`.

    Args:
        folder: where the copy is written; Triton reads a kernel's source from its file.
    """
    source = (ROOT / f"{name}.py").read_text()
    assert right in source, f"{name}.py does not contain {right!r}: update the planted fault"
    path = folder / "planted.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(f"planted_{name.replace('/', '_')}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""Plugins: Python files of a user that register attentions, activations and schedules.

`plugins=[FILE.py]` loads them in every process that reads the configuration: ranks and tools.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable

from megatron5d.config.errors import Fault

CHOICES: dict[str, list[str]] = {}  # key -> legal values that plugins add
GATED: set[str] = set()  # activations of plugins whose first matrix has a gate
LOADED: dict[str, str] = {}  # path as resolved -> source


def add_choice(key: str, value: str) -> None:
    """Makes a value of a key legal."""
    values = CHOICES.setdefault(key, [])
    if value not in values:
        values.append(value)


def load_plugins(files: Iterable[str]) -> list[Fault]:
    """Runs each file once in this process; gives the faults of those that cannot be run."""
    faults = []
    for file in files:
        path = os.path.realpath(file)
        if path in LOADED:
            continue
        if not os.path.isfile(path):
            reason = f"plugins: there is no {file} (seen from {os.getcwd()})"
            faults.append(Fault("plugin", ("plugins",), reason, "plugins=[FILE.py]", True))
            continue
        try:
            with open(path, encoding="utf-8") as stream:
                source = stream.read()
            name = f"megatron5d_plugin_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise ImportError("it is not a Python file")
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except Exception as error:  # whatever the user's code raises
            reason = f"plugins: {file} cannot be loaded: {type(error).__name__}: {error}"
            faults.append(Fault("plugin", ("plugins",), reason, "plugins=[FILE.py]", True))
        else:
            LOADED[path] = source
    return faults

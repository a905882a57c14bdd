"""Compiles kernels through their ordinary launchers, for a GPU that is not there.

Meta tensors go through the public operations. Every launch is compiled for the target with the
specialization that the JIT would choose, recorded, and not run: the gate sees the signatures,
constants and configurations of production.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron5d.kernels import dispatch, tuning

# Line info takes a sixth of the compiler's time, and nothing is run.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Launch:
    """One compiled launch: the kernel's name, its compile options and Triton's compiled kernel."""

    name: str
    num_warps: int
    compiled: Any


class _AbsentDriver:
    """Answers what the JIT asks before a launch, for a target without a device."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("meta")

    def get_device_interface(self):
        return torch.cpu


def assert_launchable(kernel: str, signature: dict) -> None:
    """Asserts that no descriptor is inside a tuple, which compiles but cannot be launched."""
    for name, kind in signature.items():
        assert not (isinstance(kind, tuple) and "tensordesc" in str(kind)), (
            f"{kernel} compiles, but no launcher accepts its argument {name}: "
            "a descriptor inside a tuple"
        )


@contextlib.contextmanager
def capture(architecture: str):
    """Makes launches compile for `architecture`, one per process, without running.

    Args:
        architecture: a key of `TARGETS`.

    Yields:
        A list to which each `Launch` is appended, and the set of (operation, entry index) that
        launches selected from the configuration table.
    """
    launches: list[Launch] = []
    selected: set[tuple[str, int]] = set()
    original_run, table = JITFunction.run, tuning.table(tuning.nearest(architecture))

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled = original_run(self, *args, grid=grid, warmup=True, **kwargs)
        assert_launchable(self.__name__, compiled.src.signature)
        launches.append(Launch(self.__name__, compiled.metadata.num_warps, compiled))
        return compiled

    def select(operation, device, **key):
        for index, entry in enumerate(table[operation]):
            if all(key[name] <= bound for name, bound in entry.get("up_to", {}).items()):
                selected.add((operation, index))
                return dict(entry["config"])
        raise ValueError(f"no configuration of {operation} on {architecture} fits {key}")

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(dispatch, "runs_triton", lambda x: True),
        mock.patch.object(dispatch, "_NUM_PROCESSORS_WITHOUT_GPU", 132),
        mock.patch.object(tuning, "select", select),
        mock.patch.object(tuning, "architecture", lambda device: tuning.nearest(architecture)),
    ):
        previous = driver._active
        driver.set_active(_AbsentDriver(TARGETS[architecture]))
        try:
            yield launches, selected
        finally:
            driver._active = previous

"""Runs compiled kernels on tensors of the CPU: Triton's compiler makes PTX, which a machine in
`emulator/` executes.

The interpreter runs a kernel's Python. Here runs what the compiler made of it for one architecture,
with that architecture's tiles: pipelined copies, bulk copies by descriptor, GEMMs of warp groups,
barriers. Every access is checked against the tensors of the launch, and asynchronous work completes
early or late at random. It requires g++. It ends at PTX: only a GPU has the assembler's code, real
memory and time.
"""

import ctypes
import fcntl
import hashlib
import struct
import subprocess
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from kernel_lab.binary import SHARED_LIMIT
from kernel_lab.bounds import allowed, storages
from kernel_lab.interpreter_types import translate_faster
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.runtime import driver

from megatron5d.kernels import dispatch, tuning

SOURCES = Path(__file__).parent / "emulator"
BUILD = Path(__file__).parents[2] / ".cache" / "emulator"
_SWIZZLES = (0, 32, 64, 128)
# Triton 3.8 also passes the launcher's arguments, which only AMD's reads.
_LAUNCHER_ARGUMENTS = (None,) * (len(signature(make_tensordesc_arg).parameters) - 2)
_MESSAGE_BYTES = 4096


def library() -> ctypes.CDLL:
    """The machine, compiled if its sources have changed."""
    sources = sorted(SOURCES.glob("*.cpp"))
    text = b"".join(path.read_bytes() for path in [*sources, *SOURCES.glob("*.h")])
    path = BUILD / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several processes compiles, for half a minute
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            command = ["g++", "-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-o"]
            subprocess.run([*command, str(unfinished), *map(str, sources)], check=True)
            unfinished.rename(path)
    machine = ctypes.CDLL(str(path))
    machine.ptx_load.restype = ctypes.c_void_p
    return machine


class _Descriptor(NamedTuple):
    """A tensor descriptor, with the fields that Triton passes to CUDA."""

    base: int
    swizzle: int
    element_bytes: int
    kind: int
    box: list[int]
    shape: list[int]
    strides: list[int]
    fills_nan: int

    def packed(self) -> bytes:
        """As the machine reads it (`Map` in machine.h): the innermost dim first."""
        rank = len(self.shape)
        fill = [0] * (5 - rank)
        byte_strides = [
            self.element_bytes,
            *(stride * self.element_bytes for stride in reversed(self.strides[:-1])),
        ]
        lists = (*reversed(self.shape), *fill, *byte_strides, *fill, *reversed(self.box), *fill)
        kinds = (rank, self.element_bytes, _SWIZZLES[self.swizzle], self.fills_nan)
        return struct.pack("Q5Q5Q5I4I", self.base, *lists, *kinds)


class _Utils:
    """The functions of a driver's C module that Triton calls."""

    def __init__(self, machine: "_Driver"):
        self.machine = machine

    def get_device_properties(self, device: int) -> dict:
        return {
            "max_shared_mem": SHARED_LIMIT[self.machine.name] * 1024,
            "multiprocessor_count": 4,
            "warpSize": 32,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        program = self.machine.library.ptx_load(binary, message, _MESSAGE_BYTES)
        if not program:
            raise RuntimeError(f"{name}: {message.value.decode()}")
        return None, program, 0, 0, 1024

    def fill_tma_descriptor(self, *parts) -> _Descriptor:
        return _Descriptor(*parts)

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name since Triton 3.8


class _Launcher:
    """Lays the arguments of a launch out as its PTX declares them, and runs the grid."""

    def __init__(self, source, metadata):
        if metadata.global_scratch_size or metadata.num_ctas != 1:
            raise NotImplementedError("the emulator has no scratch memory and no clusters")
        self.signature, self.metadata = source.signature, metadata
        self.descriptors = getattr(metadata, "tensordesc_meta", None)

    def flat(self, kinds, arguments, descriptors: list) -> list:
        values: list[Any] = []
        for kind, argument in zip(kinds, arguments, strict=True):
            if isinstance(kind, tuple):
                values += self.flat(kind, argument, descriptors)
            elif kind.startswith("tensordesc"):
                descriptor = descriptors.pop(0) if descriptors else None
                values += make_tensordesc_arg(argument, descriptor, *_LAUNCHER_ARGUMENTS)
            elif kind != "constexpr":
                values.append(
                    (kind, argument) if kind.startswith(("fp", "bf", "f32")) else argument
                )
        return values

    # Arguments: the grid, the stream, the program, four for hooks, then the kernel's.
    def __call__(self, *args):
        grid, program, arguments = args[:3], args[4], args[9:]
        machine = driver.active
        values = self.flat(self.signature.values(), arguments, list(self.descriptors or ()))
        values += [None, None]  # scratch memory for the kernel and for a profiler
        block = _parameter_block(machine.library, program, values)
        ranges = sorted({(a, b) for a, b in [*allowed, *storages(arguments)] if b > a})
        flat_ranges = [edge for bounds in _merged(ranges) for edge in bounds]
        message, steps = ctypes.create_string_buffer(_MESSAGE_BYTES), ctypes.c_uint64()
        failed = machine.library.ptx_launch(
            ctypes.c_void_p(program),
            (ctypes.c_uint32 * 3)(*grid),
            32 * self.metadata.num_warps,
            self.metadata.shared,
            machine.next_seed(),
            block,
            (ctypes.c_uint64 * len(flat_ranges))(*flat_ranges),
            len(flat_ranges) // 2,
            ctypes.byref(steps),
            message,
            _MESSAGE_BYTES,
        )
        if failed:
            raise EmulationFault(
                f"{self.metadata.name} on {machine.name}: {message.value.decode()}"
            )
        machine.steps += steps.value


class EmulationFault(RuntimeError):
    """A kernel did what a GPU would refuse, or silently get wrong."""


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges ranges that overlap, not those that only touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _parameter_block(library: ctypes.CDLL, program: int, values: list):
    """The kernel's parameters in memory, each at its offset."""
    pairs = (ctypes.c_int * 512)()
    count = library.ptx_parameters(ctypes.c_void_p(program), pairs, 256)
    assert count == len(values), f"{count} parameters for {len(values)} arguments"
    block = ctypes.create_string_buffer(pairs[2 * count - 2] + pairs[2 * count - 1])
    for n, value in enumerate(values):
        offset, size = pairs[2 * n], pairs[2 * n + 1]
        block[offset : offset + size] = _bytes(value, size)  # type: ignore[call-overload]
    return block


def _bytes(value, size: int) -> bytes:
    if isinstance(value, _Descriptor):
        return value.packed().ljust(size, b"\0")
    if isinstance(value, tuple):  # the type of a float, and the number
        kind, number = value
        if kind == "bf16":
            return struct.pack("<f", number)[2:]
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], number)
    if hasattr(value, "data_ptr"):
        value = value.data_ptr()
    return (int(value or 0) % (1 << (8 * size))).to_bytes(size, "little")


class _Driver:
    """Triton's driver of an emulated GPU."""

    launcher_cls = _Launcher

    def __init__(self, name: str, seed: int):
        self.name, self.target = name, GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
        self.library, self.utils, self.steps = library(), _Utils(self), 0
        self.seed = seed << 16

    def next_seed(self) -> int:
        """Seed of a launch's order of blocks and warps, and of what completes late."""
        self.seed += 1
        return self.seed

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu


def install(name: str, seed: int = 0) -> _Driver:
    """Makes operations on tensors of the CPU run their kernels, compiled and emulated.

    Args:
        name: the architecture: sm_80, sm_90, sm_100 or sm_120.
        seed: of the order of blocks and warps, and of what completes late.
    """
    translate_faster()
    emulated = _Driver(name, seed)
    driver.set_active(emulated)
    original_hash = CUDABackend.hash
    for target, attribute, replacement in (
        (CUDABackend, "make_cubin", lambda self, text, *_: text.encode()),
        (CUDABackend, "hash", lambda self: original_hash(self) + "-emulated"),
        (dispatch, "INTERPRETED", True),
        (tuning, "architecture", lambda device: name),
    ):
        mock.patch.object(target, attribute, replacement).start()
    return emulated

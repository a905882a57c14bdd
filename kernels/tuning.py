"""How kernels are launched on each architecture: tile shapes, warps, stages, and how they load a
matrix.

Tile shapes, warps and stages are data in `configs/<architecture>.json`, which
`tools/tune_kernels.py` writes on a GPU. A file maps an operation to a list of entries, of which the
first that fits is taken:
    {"attention_forward": [{"up_to": {"head_dim": 64}, "config": {"BLOCK_M": 128, ...}},
                           {"config": {...}}]}
`up_to` gives upper bounds of shape keys; an entry without it fits everything. With `"triton":
"3.8"` an entry is for that version of the compiler and newer ones. An architecture without a file
uses the file of the newest older one of its vendor.

GEMMs load tiles of a matrix by a descriptor for the copy engine or, before Hopper, by aligned
pointers. Without a copy engine Triton lowers a descriptor without knowing its shape and stride:
every element would be loaded by itself, and none in advance. A descriptor made in the kernel, from
arguments that are known to be multiples of 16, becomes wide asynchronous loads.

Within `planned`, operations on meta tensors follow the paths of a GPU: each allocates its outputs,
saves what the backward needs, and launches nothing.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron5d.kernels.dispatch import (
    PLANNED,
    TRITON_VERSION,
    KernelInterface,
    TensorDescriptor,
    jit,
    tl,
)

DIRECTORY = Path(__file__).parent / "configs"
_WITHOUT_COPY_ENGINE = ("sm_80", "gfx942")


@functools.cache
def table(architecture: str) -> dict[str, list[dict]]:
    """Entries of an architecture for the compiler's version, by operation."""
    every = json.loads((DIRECTORY / f"{architecture}.json").read_text())
    return {operation: _of_version(entries) for operation, entries in every.items()}


def _of_version(entries: list[dict]) -> list[dict]:
    """Entries for the compiler's version, without those that one of a newer version replaces."""
    selected: list[dict] = []
    replaced = []
    for entry in entries:
        bounds = entry.get("up_to")
        if is_since(entry.get("triton", "0")) and bounds not in replaced:
            selected.append(entry)
            if "triton" in entry:
                replaced.append(bounds)
    return selected


@functools.cache
def is_since(version: str) -> bool:
    """Whether Triton has this version, such as 3.8, or a newer one."""
    return tuple(map(int, version.split("."))) <= TRITON_VERSION


@functools.cache
def nearest(architecture: str) -> str:
    """Architecture whose file serves this one.

    Raises:
        ValueError: no file of the vendor is old enough.
    """
    names = sorted(path.stem for path in DIRECTORY.glob("*.json"))
    if architecture in names:
        return architecture
    versions: dict[int, str] = {}
    if match := re.fullmatch(r"(sm_|gfx)(\w+)", architecture):
        vendor, version = match.groups()
        same_vendor = [name for name in names if name.startswith(vendor)]
        versions = {int(name.removeprefix(vendor), 16): name for name in same_vendor}
        versions = {v: name for v, name in versions.items() if v <= int(version, 16)}
    if not versions:
        raise ValueError(
            f"no kernel configurations for {architecture}; there are {', '.join(names)}"
        )
    return versions[max(versions)]


@functools.cache
def architecture(device: torch.device) -> str:
    """Name of the table that serves a device."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return nearest(torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return nearest(f"sm_{major}{minor}")


def first_fitting(entries: Sequence[dict], key: dict[str, int]) -> dict | None:
    """Config of the first entry whose bounds hold for these shape keys."""
    for entry in entries:
        if all(key[name] <= bound for name, bound in entry.get("up_to", {}).items()):
            return entry["config"]
    return None


def select(operation: str, device: torch.device, **key: int) -> dict:
    """Launch configuration of an operation on a device for these shape keys.

    Args:
        operation: a name in the tables.
        device: where the tensors are; anything but a GPU means the interpreter's small tiles.
        **key: the shape keys that the entries bound.

    Returns:
        Keyword arguments of the launch: the kernel's tile constants, num_warps, num_stages.
    """
    planned = PLANNED.get() if device.type == "meta" else None
    config = first_fitting(table(planned or architecture(device))[operation], key)
    if config is None:
        raise ValueError(f"no configuration of {operation} on {architecture(device)} fits {key}")
    return dict(config)


def by_pointers(device: torch.device) -> bool:
    """Whether the device has no copy engine."""
    return architecture(device) in _WITHOUT_COPY_ENGINE


def readable(x: Tensor) -> bool:
    """Whether the copy engine can read matrix x: unit stride in rows, which are 16 bytes apart."""
    return x.stride(-1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def tiles_of(x: Tensor, tile: list[int]) -> TensorDescriptor | tuple[Tensor, int]:
    """Argument of `matrix` for x `[rows, columns]`, which is `readable`."""
    return (x, x.stride(0)) if by_pointers(x.device) else TensorDescriptor.from_tensor(x, tile)


@jit
def matrix(tiles, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POINTERS: tl.constexpr):
    """Matrix behind `tiles_of`, whose `load` gives a tile; zeros beyond its rows and columns."""
    if POINTERS:
        tiles = tl.make_tensor_descriptor(
            tiles[0], [rows, columns], [tiles[1].to(tl.int64), 1], [ROWS, COLUMNS]
        )
    return tiles


@contextlib.contextmanager
def planned(architecture: str) -> Iterator[None]:
    """Makes meta tensors follow the paths of a GPU with Triton, which need not be installed.

    Args:
        architecture: for example sm_90; if it has no table, the newest older one's is used.

    Raises:
        ValueError: no table is old enough.
    """
    token = PLANNED.set(nearest(architecture))
    try:
        with _no_launches():
            yield
    finally:
        PLANNED.reset(token)


@contextlib.contextmanager
def _no_launches() -> Iterator[None]:
    original = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda self, grid: lambda *args, **kwargs: None
    try:
        yield
    finally:
        KernelInterface.__getitem__ = original


@jit
def swizzled(program, tiles_m, tiles_n, BAND: tl.constexpr):
    """Tile coordinates in bands of `BAND` rows of tiles, so that programs share operands in
    cache."""
    band = program // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    index = program % (BAND * tiles_n)
    return band * BAND + index % height, index // height


def needs_mma_barrier(device: torch.device) -> bool:
    """Whether the result of each MMA must be read behind a barrier before the next: on Blackwell.

    There one thread starts an MMA, whose sums are in memory of the whole program. Triton 3.6 and
    3.7 let the next MMA overwrite sums that other warps have not read (triton-lang/triton, pull
    request 10263, adds these barriers to 3.8). The price is that copies no longer run ahead.
    """
    return architecture(device) == "sm_100" and not is_since("3.8")


@jit
def read_by_all_warps(product, SETTLE: tl.constexpr):
    """An MMA's result; if SETTLE, after every warp has read it (`needs_mma_barrier`)."""
    if SETTLE:
        tl.debug_barrier()
    return product

"""How kernels are launched on each architecture: their tile shapes, warps and stages, and how they
reach a matrix.

Tile shapes, warps and stages are data in `configs/<architecture>.json`, which
`tools/tune_kernels.py` writes on a GPU. A file maps an operation to a list of entries, the first
that fits wins:
    {"attention_forward": [{"up_to": {"head_dim": 64}, "config": {"BLOCK_M": 128, ...}}, {"config":
    {...}}]}
`up_to` gives upper bounds of shape keys; an entry without it fits everything. An architecture
without a file takes the newest older one of its vendor.

GEMMs reach tiles of a matrix by a descriptor for the copy engine, or, before Hopper, by aligned
pointers. Without a copy engine Triton takes a descriptor apart and knows nothing of its shape and
stride: every element would be loaded by itself, and nothing ahead of time. Made in the kernel, from
arguments that are known to be multiples of 16, the same descriptor becomes wide asynchronous loads.

Within `planned`, operations on tensors of the meta device take the paths of a GPU: each allocates
its outputs, keeps what it keeps for the backward, and launches nothing.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron5d.kernels.dispatch import PLANNED, KernelInterface, TensorDescriptor, jit, tl

DIRECTORY = Path(__file__).parent / "configs"


@functools.cache
def table(architecture: str) -> dict[str, list[dict]]:
    """Returns all entries of an architecture, by operation."""
    return json.loads((DIRECTORY / f"{architecture}.json").read_text())


@functools.cache
def nearest(architecture: str) -> str:
    """Returns the architecture whose file serves this one. Raises ValueError: no file of the vendor
    is old enough."""
    known = sorted(p.stem for p in DIRECTORY.glob("*.json"))
    if architecture in known:
        return architecture
    parts = re.fullmatch(r"(sm_|gfx)(\w+)", architecture)
    if parts is None:
        raise ValueError(
            f"no kernel configurations for {architecture}; there are {', '.join(known)}"
        )
    vendor, version = parts.groups()
    older = [
        k
        for k in known
        if k.startswith(vendor) and int(k.removeprefix(vendor), 16) <= int(version, 16)
    ]
    if not older:
        raise ValueError(
            f"no kernel configurations for {architecture}; there are {', '.join(known)}"
        )
    return max(older, key=lambda k: int(k.removeprefix(vendor), 16))


@functools.cache
def architecture(device: torch.device) -> str:
    """Returns the name of the table that serves a device."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return nearest(torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return nearest(f"sm_{major}{minor}")


def select(operation: str, device: torch.device, **key: int) -> dict:
    """Returns the launch configuration of an operation on a device for these shape keys.

    Args:
        operation: a name in the tables.
        device: where the tensors live; anything but a GPU means the interpreter's small tiles.
        **key: the shape keys that the entries bound.

    Returns:
        Keyword arguments of the launch: the kernel's tile constants, num_warps, num_stages.
    """
    planned = PLANNED.get() if device.type == "meta" else None
    for entry in table(planned or architecture(device))[operation]:
        if all(key[name] <= bound for name, bound in entry.get("up_to", {}).items()):
            return dict(entry["config"])
    raise ValueError(f"no configuration of {operation} on {architecture(device)} fits {key}")


_WITHOUT_COPY_ENGINE = ("sm_80", "gfx942")


def by_pointers(device: torch.device) -> bool:
    """Says whether the device has no copy engine."""
    return architecture(device) in _WITHOUT_COPY_ENGINE


def readable(x: Tensor) -> bool:
    """Says whether the copy engine can read matrix x: neighbours in memory, rows 16 bytes apart."""
    return x.stride(-1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def tiles_of(x: Tensor, tile: list[int]) -> TensorDescriptor | tuple[Tensor, int]:
    """Returns what a kernel gives to `matrix`: x `[rows, columns]`, which is `readable`."""
    return (x, x.stride(0)) if by_pointers(x.device) else TensorDescriptor.from_tensor(x, tile)


@jit
def matrix(tiles, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POINTERS: tl.constexpr):
    """Returns the matrix behind `tiles_of`, of which `load` takes a tile; zeros beyond its rows and
    columns."""
    if POINTERS:
        tiles = tl.make_tensor_descriptor(
            tiles[0], [rows, columns], [tiles[1].to(tl.int64), 1], [ROWS, COLUMNS]
        )
    return tiles


@contextlib.contextmanager
def planned(architecture: str) -> Iterator[None]:
    """Makes tensors on the meta device take the paths of a GPU with Triton, which need not be
    installed.

    Args:
        architecture: for example sm_90; the newest older one with a table of tiles stands for it.

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
    on_grid = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda self, grid: lambda *args, **kwargs: None
    try:
        yield
    finally:
        KernelInterface.__getitem__ = on_grid


@jit
def swizzled(program, tiles_m, tiles_n, BAND: tl.constexpr):
    """Returns tile coordinates in bands of `BAND` rows of tiles, so that programs share operands in
    cache."""
    band = program // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = program % (BAND * tiles_n)
    return band * BAND + within % height, within // height


def settles(device: torch.device) -> bool:
    """Says whether MMAs that are scaled one by one are read behind a barrier: on Blackwell.

    There one thread starts an MMA, and its sums lie in memory of the whole program. Triton 3.6 and
    3.7 let the next MMA overwrite what other warps have not read (triton-lang/triton, pull request
    10263, puts barriers there). The price is that copies no longer run ahead.
    """
    return architecture(device) == "sm_100"


@jit
def taken_out(part, SETTLE: tl.constexpr):
    """Returns an MMA's sums, read by every warp before one of them starts the next (`settles`)."""
    if SETTLE:
        tl.debug_barrier()
    return part

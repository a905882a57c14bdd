"""Tile shapes, warps and stages per architecture: data in `configs/<architecture>.json`.

`tools/tune_kernels.py` writes them on a GPU.

A file maps an operation to a list of entries, the first that fits wins:
    {"attention_forward": [{"up_to": {"head_dim": 64}, "config": {"BLOCK_M": 128, ...}}, {"config": {...}}]}
`up_to` gives upper bounds of shape keys; an entry without it fits everything.
An architecture without a file takes the newest older one of its vendor.
"""

import functools
import json
import re
from pathlib import Path

import torch

from kernels.dispatch import PLANNED

DIRECTORY = Path(__file__).parent / "configs"


@functools.cache
def table(architecture: str) -> dict[str, list[dict]]:
    """All entries of an architecture, by operation."""
    return json.loads((DIRECTORY / f"{architecture}.json").read_text())


@functools.cache
def nearest(architecture: str) -> str:
    """The architecture whose file serves this one.

    Raises:
        ValueError: no file of the vendor is old enough.
    """
    known = sorted(p.stem for p in DIRECTORY.glob("*.json"))
    if architecture in known:
        return architecture
    parts = re.fullmatch(r"(sm_|gfx)(\w+)", architecture)
    if parts is None:
        raise ValueError(f"no kernel configurations for {architecture}; there are {', '.join(known)}")
    vendor, version = parts.groups()
    older = [k for k in known if k.startswith(vendor) and int(k.removeprefix(vendor), 16) <= int(version, 16)]
    if not older:
        raise ValueError(f"no kernel configurations for {architecture}; there are {', '.join(known)}")
    return max(older, key=lambda k: int(k.removeprefix(vendor), 16))


@functools.cache
def architecture(device: torch.device) -> str:
    """The name of the table that serves a device."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return nearest(torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return nearest(f"sm_{major}{minor}")


def select(operation: str, device: torch.device, **key: int) -> dict:
    """The launch configuration of an operation on a device for these shape keys.

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

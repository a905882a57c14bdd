"""Memory of every rank of an axis that all its ranks can write: files in shared memory, or symmetric memory of GPUs."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.language import HAS_TRITON
from megatron5d.comm.collectives import gather_objects
from megatron5d.topology.axis import Axis

_KNOB = "parallel.tp_overlap=fused"


def open_segments(axis: Axis, num_bytes: int, device: torch.device) -> list[Tensor]:
    """Allocates a segment on each rank and maps those of all.

    Args:
        axis: its ranks call this together.
        num_bytes: of one segment, the same on every rank.
        device: cpu, cuda, or meta (this rank's own segment alone is counted).

    Returns:
        The segments in the order of the axis, uint8, zero.

    Comm: all_gather_object of names, once.

    Raises:
        ValueError: on every rank, where the ranks cannot reach each other's memory.
    """
    if device.type == "meta":
        return [torch.empty(num_bytes, dtype=torch.uint8, device=device)] * axis.size
    return _in_files(axis, num_bytes) if device.type == "cpu" else _on_gpus(axis, num_bytes, device)


def _refuse(axis: Axis, reasons: list[str]) -> None:
    """Raises on every rank if any rank has a reason."""
    given = sorted({reason for reason in gather_objects(reasons, axis) for reason in reason})
    if given:
        raise ValueError(
            f"{_KNOB} writes into the memory of all {axis.size} ranks of {axis.name}, which cannot be done here: "
            f"{'; '.join(given)}. Use parallel.tp_overlap=chunked"
        )


def _in_files(axis: Axis, num_bytes: int) -> list[Tensor]:
    """Files in memory, mapped by every rank and unlinked at once: the kernel frees them with the last process."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, name = tempfile.mkstemp(prefix="megatron5d-segment-", dir=folder)
    try:
        reasons = _without_room(handle, name, num_bytes)
        places = gather_objects((socket.gethostname(), name), axis)
        hosts = sorted({host for host, _ in places})
        lost = [path for _, path in places if not Path(path).exists()]
        if len(hosts) > 1:
            reasons.append(f"its ranks run on {len(hosts)} hosts ({', '.join(hosts)})")
        elif lost:
            reasons.append(f"{', '.join(lost)} is not seen from every rank")
        _refuse(axis, reasons)
        segments = [torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8) for _, path in places]
        dist.barrier(group=axis.group)
    finally:
        os.unlink(name)
    return segments


def _without_room(handle: int, name: str, num_bytes: int) -> list[str]:
    """Gives a new file its memory and closes it; the reason why it has none, if so."""
    try:
        os.posix_fallocate(handle, 0, num_bytes) if hasattr(os, "posix_fallocate") else os.truncate(handle, num_bytes)
    except OSError as error:
        return [f"{os.path.dirname(name)} gives no {num_bytes} bytes a rank ({error.strerror})"]
    finally:
        os.close(handle)
    return []


def _on_gpus(axis: Axis, num_bytes: int, device: torch.device) -> list[Tensor]:
    """Symmetric memory: one allocation a rank, mapped by all over NVLink or PCIe."""
    import torch.distributed._symmetric_memory as symmetric_memory

    mine, own = torch.empty(0), torch.cuda.current_device() if device.index is None else device.index
    peers = gather_objects((socket.gethostname(), own), axis)
    reasons = [] if HAS_TRITON else ["triton, whose kernels raise and await flags, is not installed"]
    if len({host for host, _ in peers}) == 1:
        blind = [peer for _, peer in peers if peer != own and not _sees(own, peer)]
        reasons += [f"GPUs {own} and {peer} cannot reach each other" for peer in blind]
    try:
        mine = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
    except RuntimeError as error:
        reasons.append(str(error))
    _refuse(axis, reasons)
    handle: Any = None
    try:
        handle = symmetric_memory.rendezvous(mine, group=axis.group)
    except RuntimeError as error:
        reasons.append(str(error))
    _refuse(axis, reasons)
    torch.cuda.synchronize(device)
    dist.barrier(group=axis.group, device_ids=[own])
    others = {
        rank: handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(axis.size) if rank != axis.rank
    }
    return [others.get(rank, mine) for rank in range(axis.size)]  # `mine` owns the mapping of all


def _sees(device: int, peer: int) -> bool:
    """A peer that this process does not see at all is left to the rendezvous."""
    return peer >= torch.cuda.device_count() or torch.cuda.can_device_access_peer(device, peer)

"""Symmetric-memory buffers of an axis: a rank writes into another's memory, and a flag signals that
the data arrived.

In an exchange every rank fills a buffer at every rank and reads the buffers that were filled for
it.
    sender r, to p      write p's buffer r; p: arrived[r] = epoch
    receiver p          wait until arrived[r] >= epoch; read buffer r
Epochs count the exchanges from 1, and flags are never reset: one of an earlier exchange does not
count.

Odd and even exchanges use different buffers, so no rank has to acknowledge that it has read one: r
writes for exchange e + 2 after it has received the buffers of e + 1, which p sent after it had read
those of e.

The memory is that of GPUs' symmetric memory, or on the CPU files in shared memory.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.collectives import gather_objects
from megatron5d.kernels.dispatch import HAS_TRITON
from megatron5d.kernels.symm_mem_flags import (
    Arrivals,
    Patience,
    addresses_of,
    raise_flags,
    wait_flag,
)
from megatron5d.topology.axis import Axis

_KNOB = "parallel.tp_overlap=fused"


def open_segments(axis: Axis, num_bytes: int, device: torch.device) -> list[Tensor]:
    """Allocates a segment on each rank and maps those of all ranks.

    Args:
        axis: all its ranks call this.
        num_bytes: of one segment, the same on every rank.
        device: cpu, cuda, or meta (only this rank's segment is counted).

    Returns:
        The segments in the order of the axis, uint8, zero.

    Comm: all_gather of names, once.

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
    """Maps files in shared memory on every rank and unlinks them at once: they are freed with the
    last process."""
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
        segments = [
            torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
            for _, path in places
        ]
        dist.barrier(group=axis.group)
    finally:
        os.unlink(name)
    return segments


def _without_room(handle: int, name: str, num_bytes: int) -> list[str]:
    """Allocates a new file and closes it; returns the reason if there is no room."""
    try:
        os.posix_fallocate(handle, 0, num_bytes) if hasattr(os, "posix_fallocate") else os.truncate(
            handle, num_bytes
        )
    except OSError as error:
        return [f"{os.path.dirname(name)} gives no {num_bytes} bytes a rank ({error.strerror})"]
    finally:
        os.close(handle)
    return []


def _on_gpus(axis: Axis, num_bytes: int, device: torch.device) -> list[Tensor]:
    """Maps one symmetric-memory allocation a rank on all of them, over NVLink or PCIe."""
    import torch.distributed._symmetric_memory as symmetric_memory

    mine, own = (
        torch.empty(0),
        torch.cuda.current_device() if device.index is None else device.index,
    )
    peers = gather_objects((socket.gethostname(), own), axis)
    reasons = (
        [] if HAS_TRITON else ["triton, whose kernels raise and await flags, is not installed"]
    )
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
        rank: handle.get_buffer(rank, (num_bytes,), torch.uint8)
        for rank in range(axis.size)
        if rank != axis.rank
    }
    return [others.get(rank, mine) for rank in range(axis.size)]  # `mine` owns the mapping of all


def _sees(device: int, peer: int) -> bool:
    """Says whether a peer can be accessed; one that this process does not see is left to the
    rendezvous."""
    return peer >= torch.cuda.device_count() or torch.cuda.can_device_access_peer(device, peer)


_LISTEN_S, _GRACE_S = 1.0, 10.0
# of each tensor in a buffer: alignment of the widest loads, and a cache line of any device
_ALIGNED_BYTES = 256
Layout = Sequence[tuple[torch.Size, torch.dtype]]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


class SymmetricBuffers:
    """The buffers of one axis; they grow to the largest exchange.

    Args:
        axis: its ranks make the same exchanges in the same order.
        timeout_s: `parallel.timeout_s`. A wait for a buffer ends after half of it: torch's
            collectives that are stuck behind it end after the whole, and would not name the rank
            that has not sent.

    Memory: 2·size buffers.
    """

    def __init__(self, axis: Axis, device: torch.device, timeout_s: float) -> None:
        self.axis, self.device = axis, device
        self.patience = Patience(timeout_s / 2, device, partial(_complaint, axis, timeout_s))
        if device.type == "cuda":
            threading.Thread(target=end_if_stuck, args=(self.patience,), daemon=True).start()
        self._open(0)

    def _open(self, buffer_bytes: int) -> None:
        self.epoch, self.buffer_bytes = 0, buffer_bytes
        self._flag_bytes = _padded(4 * 2 * self.axis.size)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no rank writes into the old segments any more
        self._segments = open_segments(self.axis, self.num_bytes, self.device)
        self._addresses: dict[object, Tensor] = {}
        self.finished = torch.zeros(self.axis.size, dtype=torch.int32, device=self.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's segment: flags and buffers."""
        return self._flag_bytes + 2 * self.axis.size * self.buffer_bytes

    def exchange(self, layout: Layout) -> BufferExchange:
        """Begins the next exchange, of buffers with one tensor per entry of the layout.

        Comm: none, except for a buffer larger than all before: then `open_segments`.

        Raises TimeoutError: a kernel of an earlier exchange has timed out; names the rank that has
        not sent.
        """
        self.patience.check()
        wanted = sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in layout)
        if wanted > self.buffer_bytes:
            self._open(wanted)
        self.epoch += 1
        return BufferExchange(self, layout)

    def flags(self, holder: int, slot: int) -> Tensor:
        """Views `[size]` int32 in a rank's memory: the last exchange for which each rank filled its
        buffer there."""
        every = self._segments[holder][: self._flag_bytes].view(torch.int32)
        return every.narrow(0, slot * self.axis.size, self.axis.size)

    def tensor(
        self,
        holder: int,
        slot: int,
        writer: int,
        offset: int,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Tensor:
        """Views one tensor in the buffer that `writer` fills at `holder`."""
        start = self._flag_bytes + (slot * self.axis.size + writer) * self.buffer_bytes + offset
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._segments[holder].narrow(0, start, num_bytes).view(dtype).view(shape)

    def addresses(self, key: object, tensors: Sequence[Tensor]) -> Tensor:
        """Returns `addresses_of(tensors)`, made once for a key."""
        if key not in self._addresses:
            self._addresses[key] = addresses_of(tensors)
        return self._addresses[key]

    @cached_property
    def copy_stream(self) -> torch.cuda.Stream | None:
        """On a GPU the stream on which chunks are copied, under the GEMMs of the current one."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None


class BufferExchange:
    """One use of the buffers: fill one at every rank, and read those here before the next
    exchange."""

    def __init__(self, buffers: SymmetricBuffers, layout: Layout) -> None:
        self._buffers, self._layout, self.epoch = buffers, layout, buffers.epoch
        axis, self._slot = buffers.axis, buffers.epoch % 2
        sizes = [_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in layout]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.arrivals = Arrivals(buffers.flags(axis.rank, self._slot), self.epoch, buffers.patience)

    def _others(self) -> list[int]:
        """Returns the other ranks in the order of sending: the next one reads this rank's chunk
        first after its own."""
        axis = self._buffers.axis
        return [(axis.rank + step) % axis.size for step in range(1, axis.size)]

    def send_buffers(self, part: int) -> list[Tensor]:
        """Returns the memory at each rank into which this rank writes a part."""
        buffers, (shape, dtype) = self._buffers, self._layout[part]
        place = buffers.axis.rank, self._offsets[part], shape, dtype
        return [buffers.tensor(holder, self._slot, *place) for holder in range(buffers.axis.size)]

    def send_buffer_addresses(self, part: int) -> Tensor:
        """Returns `[size]` int64: the addresses of `send_buffers`."""
        return self._buffers.addresses((self._slot, self._offsets[part]), self.send_buffers(part))

    def signals(self) -> list[Tensor]:
        """Views `[1]` each: this rank's flag at each rank."""
        buffers = self._buffers
        rank = buffers.axis.rank
        return [
            buffers.flags(holder, self._slot)[rank : rank + 1]
            for holder in range(buffers.axis.size)
        ]

    def signal_addresses(self) -> Tensor:
        """Returns `[size]` int64: the addresses of `signals`."""
        return self._buffers.addresses((self._slot, "flags"), self.signals())

    def receive_buffer(self, part: int) -> Tensor:
        """Views `[size, *shape]`: a part of every rank's buffer here; readable once the source's
        flag is raised."""
        buffers, (shape, dtype) = self._buffers, self._layout[part]
        rank = buffers.axis.rank
        first = buffers.tensor(rank, self._slot, 0, self._offsets[part], shape, dtype)
        size, stride = (
            (buffers.axis.size, *shape),
            (buffers.buffer_bytes // dtype.itemsize, *first.stride()),
        )
        return first.as_strided(size, stride, first.storage_offset())

    def send_to_all(self, operand: Sequence[Tensor]) -> None:
        """Sends the same tensors to every rank, this one included, without holding up the current
        stream.

        Comm: point to point, (size-1)·numel elements of each tensor.
        """
        rank, copy_stream = self._buffers.axis.rank, self._buffers.copy_stream
        for part in range(len(operand)):
            self.record_put(part)
        self._write(operand, rank)
        raise_flags([self.signals()[rank]], self.signal_addresses()[rank : rank + 1], self.epoch)
        if copy_stream is None:
            for holder in self._others():
                self._send(operand, holder)
            return
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            for holder in self._others():
                self._write(operand, holder)
                # Not by a kernel: GEMMs that wait for a flag may hold every processor.
                flag = self.signals()[holder].view(torch.uint32)
                torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(
                    flag, 0, self.epoch
                )
        for tensor in operand:
            tensor.record_stream(copy_stream)

    def record_put(self, part: int) -> None:
        """Records in the ledger that a part is sent to every other rank."""
        axis, (shape, dtype) = self._buffers.axis, self._layout[part]
        axis.record("put", (axis.size - 1) * math.prod(shape), dtype.itemsize)

    def send(self, tensors: Sequence[Tensor], holder: int) -> None:
        """Sends tensors to one rank, in the order of the current stream.

        Comm: point to point, numel elements of each tensor; none to this rank itself.
        """
        axis = self._buffers.axis
        for tensor in tensors if holder != axis.rank else ():
            axis.record("put", tensor.numel(), tensor.element_size())
        self._send(tensors, holder)

    def _send(self, tensors: Sequence[Tensor], holder: int) -> None:
        self._write(tensors, holder)
        raise_flags(
            [self.signals()[holder]], self.signal_addresses()[holder : holder + 1], self.epoch
        )

    def _write(self, tensors: Sequence[Tensor], holder: int) -> None:
        for part, tensor in enumerate(tensors):
            self.send_buffers(part)[holder].copy_(tensor)

    def wait(self, source: int) -> tuple[Tensor, ...]:
        """Waits for the tensors of one rank; they may change after the next exchange has begun.
        Raises TimeoutError: as in `wait_flag`."""
        self._buffers.axis.wait(partial(wait_flag, self.arrivals, source))
        return tuple(self.receive_buffer(part)[source] for part in range(len(self._layout)))


def _complaint(axis: Axis, timeout_s: float, source: int, epoch: int) -> str:
    return (
        f"rank {axis.ranks[axis.rank]} ({axis}) has waited {timeout_s / 2:g} s for chunk {source} of exchange {epoch} "
        f"over {axis.name}, which rank {axis.ranks[source]} ({axis.name}[{source}/{axis.size}]) has not sent: it has "
        f"ended, hangs, or is that far behind. parallel.tp_overlap=fused waits for half of parallel.timeout_s = "
        f"{timeout_s:g}"
    )


def end_if_stuck(patience: Patience) -> None:
    """Ends this process with the message of a kernel that has timed out, if the host does not raise
    it.

    It cannot where it waits for the device itself, and the device for a collective with the rank
    that is gone.
    """
    while (complaint := patience.given_up()) is None:
        time.sleep(_LISTEN_S)
    # raised where the host has come by, it ends the process with a trace and before this does
    time.sleep(_GRACE_S)
    os.write(2, f"TimeoutError: {complaint}\n".encode())
    os._exit(1)

"""Symmetric-memory buffers of an axis: a rank writes into another's memory, and a flag signals that
the data arrived.

In an exchange every rank fills a buffer at every rank and reads the buffers that were filled for
it.
    source r, to p      write p's buffer r; p: arrived[r] = epoch
    destination p       wait until arrived[r] >= epoch; read buffer r
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
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.collectives import gather_objects
from megatron5d.kernels.dispatch import HAS_TRITON
from megatron5d.kernels.symm_mem_flags import (
    Arrivals,
    WaitTimeout,
    addresses_of,
    raise_flags,
    wait_flag,
)
from megatron5d.topology.axis import Axis

_POLL_S, _GRACE_S = 1.0, 10.0  # of `end_if_stuck`
# of each tensor in a buffer: alignment of the widest loads, and a cache line of any device
_ALIGNED_BYTES = 256
Layout = Sequence[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each tensor in a buffer."""


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
    """Raises ValueError on every rank if any rank has a reason."""
    all_reasons = sorted({reason for rank in gather_objects(reasons, axis) for reason in rank})
    if all_reasons:
        raise ValueError(
            f"parallel.tp_overlap=fused requires access to the memory of all {axis.size} ranks of "
            f"{axis.name}: {'; '.join(all_reasons)}. Use parallel.tp_overlap=chunked"
        )


def _in_files(axis: Axis, num_bytes: int) -> list[Tensor]:
    """Maps files in shared memory on every rank and unlinks them at once, so that they are freed
    with the last process."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, name = tempfile.mkstemp(prefix="megatron5d-segment-", dir=folder)
    try:
        reasons = _allocate(handle, name, num_bytes)
        host = socket.gethostname()
        files = gather_objects((host, name), axis)
        reasons += [
            f"{path} of {owner} is not visible on {host}"
            for owner, path in files
            if not Path(path).exists()
        ]
        _refuse(axis, reasons)
        segments = [
            torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
            for _, path in files
        ]
        dist.barrier(group=axis.group)
    finally:
        os.unlink(name)
    return segments


def _allocate(handle: int, name: str, num_bytes: int) -> list[str]:
    """Allocates a new file and closes it; gives the reason if there is not enough memory."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, num_bytes)
        else:
            os.truncate(handle, num_bytes)
    except OSError as error:
        folder = os.path.dirname(name)
        return [f"{folder} lacks {num_bytes} bytes per rank ({error.strerror})"]
    finally:
        os.close(handle)
    return []


def _on_gpus(axis: Axis, num_bytes: int, device: torch.device) -> list[Tensor]:
    """Maps one symmetric-memory allocation per rank on all of them, over NVLink or PCIe."""
    import torch.distributed._symmetric_memory as symmetric_memory

    gpu = torch.cuda.current_device() if device.index is None else device.index
    ranks = gather_objects((socket.gethostname(), gpu), axis)
    reasons = [] if HAS_TRITON else ["triton, whose kernels handle the flags, is not installed"]
    if len({host for host, _ in ranks}) == 1:
        reasons += [
            f"GPUs {gpu} and {peer} cannot reach each other"
            for _, peer in ranks
            if peer != gpu and not _can_access(gpu, peer)
        ]
    segment = torch.empty(0)
    try:
        segment = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
    except RuntimeError as error:
        reasons.append(str(error))
    _refuse(axis, reasons)
    try:
        handle = symmetric_memory.rendezvous(segment, group=axis.group)
    except RuntimeError as error:
        reasons.append(str(error))
    _refuse(axis, reasons)
    torch.cuda.synchronize(device)
    dist.barrier(group=axis.group, device_ids=[gpu])
    return [
        # `segment` owns the mapping of all
        segment if rank == axis.rank else handle.get_buffer(rank, (num_bytes,), torch.uint8)
        for rank in range(axis.size)
    ]


def _can_access(gpu: int, peer: int) -> bool:
    """Whether a GPU can access a peer's memory; True for a peer hidden from this process, which
    the rendezvous checks."""
    return peer >= torch.cuda.device_count() or torch.cuda.can_device_access_peer(gpu, peer)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _offsets(layout: Layout) -> list[int]:
    """Start of each tensor in a buffer, in bytes, and the end of the last one."""
    sizes = (_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in layout)
    return list(accumulate(sizes, initial=0))


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
        self.timeout = WaitTimeout(
            timeout_s / 2, device, partial(_timeout_message, axis, timeout_s)
        )
        if device.type == "cuda":
            threading.Thread(target=end_if_stuck, args=(self.timeout,), daemon=True).start()
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

        Raises:
            TimeoutError: a kernel of an earlier exchange has timed out; names the rank that has
                not sent.
        """
        self.timeout.check()
        required = _offsets(layout)[-1]
        if required > self.buffer_bytes:
            self._open(required)
        self.epoch += 1
        return BufferExchange(self, layout)

    def flags(self, destination: int, parity: int) -> Tensor:
        """`[size]` int32 at a rank: the last exchange for which each source filled its buffer
        there."""
        flags = self._segments[destination][: self._flag_bytes].view(torch.int32)
        return flags.narrow(0, parity * self.axis.size, self.axis.size)

    def buffer(self, destination: int, parity: int, source: int) -> Tensor:
        """The buffer that `source` fills at `destination`, uint8."""
        start = self._flag_bytes + (parity * self.axis.size + source) * self.buffer_bytes
        return self._segments[destination].narrow(0, start, self.buffer_bytes)

    def addresses(self, key: object, tensors: Sequence[Tensor]) -> Tensor:
        """`addresses_of(tensors)`, made once for a key."""
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
        self._axis, self._parity = buffers.axis, buffers.epoch % 2
        self._offsets = _offsets(layout)
        flags = buffers.flags(self._axis.rank, self._parity)
        self.arrivals = Arrivals(flags, self.epoch, buffers.timeout)

    def _tensor(self, destination: int, source: int, index: int) -> Tensor:
        """A tensor of the layout in the buffer that `source` fills at `destination`."""
        shape, dtype = self._layout[index]
        buffer = self._buffers.buffer(destination, self._parity, source)
        num_bytes = math.prod(shape) * dtype.itemsize
        return buffer.narrow(0, self._offsets[index], num_bytes).view(dtype).view(shape)

    def send_buffers(self, index: int) -> list[Tensor]:
        """The memory at each rank into which this rank writes a tensor of the layout."""
        ranks = range(self._axis.size)
        return [self._tensor(destination, self._axis.rank, index) for destination in ranks]

    def send_buffer_addresses(self, index: int) -> Tensor:
        """`[size]` int64: the addresses of `send_buffers`."""
        key = self._parity, self._offsets[index]
        return self._buffers.addresses(key, self.send_buffers(index))

    def signals(self) -> list[Tensor]:
        """`[1]` each: this rank's flag at each rank."""
        rank = self._axis.rank
        return [
            self._buffers.flags(destination, self._parity)[rank : rank + 1]
            for destination in range(self._axis.size)
        ]

    def signal_addresses(self) -> Tensor:
        """`[size]` int64: the addresses of `signals`."""
        return self._buffers.addresses((self._parity, "flags"), self.signals())

    def receive_buffer(self, index: int) -> Tensor:
        """`[size, *shape]`: a tensor of the layout from every rank; readable once the source's flag
        is raised."""
        shape, dtype = self._layout[index]
        first = self._tensor(self._axis.rank, 0, index)
        size = self._axis.size, *shape
        stride = self._buffers.buffer_bytes // dtype.itemsize, *first.stride()
        return first.as_strided(size, stride, first.storage_offset())

    def send_to_all(self, tensors: Sequence[Tensor]) -> None:
        """Sends the same tensors to every rank, this one included, without delaying the current
        stream.

        Comm: point to point, (size-1)·numel elements of each tensor.
        """
        rank, size, copy_stream = self._axis.rank, self._axis.size, self._buffers.copy_stream
        for index in range(len(tensors)):
            self.record_put(index)
        self._send(tensors, rank)
        # the next rank first: it reads this rank's chunk directly after its own
        destinations = [(rank + step) % size for step in range(1, size)]
        if copy_stream is None:
            for destination in destinations:
                self._send(tensors, destination)
            return
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            for destination in destinations:
                self._write(tensors, destination)
                # not by a kernel, because GEMMs that wait for a flag may occupy every processor
                flag = self.signals()[destination].view(torch.uint32)
                torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(
                    flag, 0, self.epoch
                )
        for tensor in tensors:
            tensor.record_stream(copy_stream)

    def record_put(self, index: int) -> None:
        """Records in the ledger that a tensor of the layout is sent to every other rank."""
        shape, dtype = self._layout[index]
        self._axis.record("put", (self._axis.size - 1) * math.prod(shape), dtype.itemsize)

    def send(self, tensors: Sequence[Tensor], destination: int) -> None:
        """Sends tensors to one rank, in the order of the current stream.

        Comm: point to point, numel elements of each tensor; none to this rank itself.
        """
        for tensor in tensors if destination != self._axis.rank else ():
            self._axis.record("put", tensor.numel(), tensor.element_size())
        self._send(tensors, destination)

    def _send(self, tensors: Sequence[Tensor], destination: int) -> None:
        self._write(tensors, destination)
        address = self.signal_addresses()[destination : destination + 1]
        raise_flags([self.signals()[destination]], address, self.epoch)

    def _write(self, tensors: Sequence[Tensor], destination: int) -> None:
        for index, tensor in enumerate(tensors):
            self.send_buffers(index)[destination].copy_(tensor)

    def wait(self, source: int) -> tuple[Tensor, ...]:
        """Waits for the tensors of one rank; they may change after the next exchange has begun.

        Raises:
            TimeoutError: as in `wait_flag`.
        """
        self._axis.wait(partial(wait_flag, self.arrivals, source))
        return tuple(self.receive_buffer(index)[source] for index in range(len(self._layout)))


def _timeout_message(axis: Axis, timeout_s: float, source: int, epoch: int) -> str:
    return (
        f"rank {axis.ranks[axis.rank]} ({axis}) has waited {timeout_s / 2:g} s for chunk {source} "
        f"of exchange {epoch} over {axis.name}, which rank {axis.ranks[source]} "
        f"({axis.name}[{source}/{axis.size}]) has not sent: it has ended, hangs, or is that late. "
        "parallel.tp_overlap=fused waits for half of parallel.timeout_s = "
        f"{timeout_s:g}"
    )


def end_if_stuck(timeout: WaitTimeout) -> None:
    """Ends this process with the message of a kernel that has timed out, if the host does not raise
    it.

    The host cannot where it waits for the device itself, and the device for a collective with the
    rank that is gone.
    """
    while (message := timeout.error()) is None:
        time.sleep(_POLL_S)
    # where the host does raise it, the process ends with a traceback before this thread continues
    time.sleep(_GRACE_S)
    os.write(2, f"TimeoutError: {message}\n".encode())
    os._exit(1)

"""A process group for ranks that are forked from one process: messages travel through pipes and
shared memory.

gloo passes every collective to threads and sockets, which takes about half a millisecond of a core
on each rank, a fifth of the time of a layout's test. Here a rank that calls a collective writes its
data into shared memory and notifies each peer through a pipe, and it reads theirs when it waits:
without threads or sockets, and terms are added in the order of the ranks.

Every message contains the sender's call, so a rank whose peers call something else fails at once,
where gloo would return garbage or wait forever. A result is garbage until its `wait`, and an input
that changes before it is an error. `MEGATRON5D_GLOO=1` runs the suite on gloo instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import math
import mmap
import os
import select
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.parity.local_ranks import Transport
from megatron5d.topology.process import use_batch_scheduling

_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # of Linux
_MEMORY_BYTES = 1 << 30  # for messages of a rank; unused pages cost nothing
_NO_RESERVE = 0x4000  # of Linux
# Of a message in a pipe: its bytes, sender, group, tag, number, offset in the sender's memory,
# bytes of data. Header and call are shorter than the 4096 bytes that a pipe keeps together.
_HEADER = struct.Struct("<HHQiIQI")
NAME = "pipes"
_COLLECTIVE = -1  # in place of a tag
_OPS: dict[str, Callable] = {"SUM": torch.add, "MAX": torch.maximum, "MIN": torch.minimum}

Key = tuple[int, int, int, int]  # sender, group, tag, number
Data = bytes | memoryview
Message = tuple[str, Data]  # the sender's call, its data


class CollectiveMismatch(AssertionError):
    """Ranks of a group called different collectives, or one with arguments that do not match."""


class Pipes(Transport):
    """A pipe and a memory for each rank, made before the fork; in a rank, its messages."""

    def __init__(self, world: int, folder: Path, timeout: float) -> None:
        super().__init__(world, folder, timeout)
        self.pipes = [os.pipe() for _ in range(world)]
        for _, writer in self.pipes:
            fcntl.fcntl(writer, _SET_PIPE_SIZE, _PIPE_BYTES)
            os.set_blocking(writer, False)
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self.memories = [mmap.mmap(-1, _MEMORY_BYTES, flags=flags) for _ in range(world)]
        self.rank = -1
        self._used = 0
        self._unread = b""
        self._arrived: dict[Key, Message] = {}
        self.groups: list[Group] = []

    def connect(self, rank: int) -> None:
        """Makes this process, newly forked, a rank of the world's group."""
        if self.rank < 0:
            use_batch_scheduling()
            dist.Backend.register_backend(
                NAME, self._make_group, extended_api=True, devices=["cpu"]
            )
        self.rank, self.groups, self._used = rank, [], 0
        store = dist.FileStore(str(self.folder / "store"), self.world)
        dist.init_process_group(NAME, rank=rank, world_size=self.world, store=store)

    def _make_group(self, options, _) -> Group:
        ranks = options.global_ranks_in_group or list(range(self.world))
        self.groups.append(Group(self, options.group_id, ranks))
        return self.groups[-1]

    def finish(self) -> None:
        """Writes this rank's calls to a file, for `mismatch`."""
        calls = [(group.name, group.ranks, group.calls) for group in self.groups]
        (self.folder / f"calls{self.rank}").write_text(json.dumps(calls))
        self._arrived.clear()

    def mismatch(self) -> str | None:
        """The first call that some ranks of a group have not made, once all ranks have ended."""
        calls_of: dict[tuple, dict[int, list[str]]] = defaultdict(dict)
        for rank in range(self.world):
            for name, ranks, calls in json.loads((self.folder / f"calls{rank}").read_text()):
                calls_of[name, tuple(ranks)][rank] = calls
        for (name, ranks), by_rank in calls_of.items():
            lists = {rank: by_rank.get(rank, []) for rank in ranks}
            number = min(map(len, lists.values()))
            if number < max(map(len, lists.values())):
                calls = {rank: (*calls, "nothing")[number] for rank, calls in lists.items()}
                return difference(name, list(ranks), number, calls)
        return None

    def close(self) -> None:
        """Closes pipes and memories in the parent."""
        for ends in self.pipes:
            for end in ends:
                os.close(end)
        for memory in self.memories:
            memory.close()

    def send(
        self, peers: Sequence[int], address: tuple[int, int, int], call: str, data: bytes
    ) -> None:
        """Puts a message into the pipe of each peer.

        Args:
            address: group, tag and number.
        """
        offset, self._used = self._used, self._used + len(data)
        assert self._used <= _MEMORY_BYTES, "more than 1 GiB of messages: run this on gloo"
        self.memories[self.rank][offset : self._used] = data
        text = call.encode()
        size = _HEADER.size + len(text)
        header = _HEADER.pack(size, self.rank, *address, offset, len(data))
        for peer in peers:
            self._write(self.pipes[peer][1], header + text)

    def _write(self, writer: int, message: bytes) -> None:
        while True:
            # a full pipe: its rank may be waiting until this one reads
            with suppress(BlockingIOError):
                os.write(writer, message)
                return
            reader = self.pipes[self.rank][0]
            if reader in select.select([reader], [writer], [])[0]:
                self._read()

    def receive(self, key: Key) -> Message:
        """Waits for a message."""
        while key not in self._arrived:
            self._read()
        return self._arrived.pop(key)

    def _read(self) -> None:
        received = self._unread + os.read(self.pipes[self.rank][0], _PIPE_BYTES)
        start = 0
        while start + _HEADER.size <= len(received):
            length, *key, offset, size = _HEADER.unpack_from(received, start)
            if start + length > len(received):
                break
            call = received[start + _HEADER.size : start + length].decode()
            data = memoryview(self.memories[key[0]])[offset : offset + size]
            self._arrived[tuple(key)] = call, data
            start += length
        self._unread = received[start:]


def _bytes(x: Tensor) -> bytes:
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _concatenate(out: Tensor, received: Sequence[Data]) -> None:
    """Writes the data of the ranks into `out`, one after the other."""
    data = b"".join(received)
    assert len(data) == out.nbytes, f"{len(data)} bytes arrive for {_meta(out)}"
    if out.is_contiguous():
        ctypes.memmove(out.data_ptr(), data, len(data))
    else:
        out.detach().copy_(torch.frombuffer(bytearray(data), dtype=out.dtype).view(out.shape))


def _reduce(out: Tensor, received: Sequence[Data], op: str) -> None:
    """Reduces the terms in the order of the ranks."""
    if out.numel():
        total, *terms = (torch.frombuffer(bytearray(data), dtype=out.dtype) for data in received)
        for term in terms:
            _OPS[op](total, term, out=total)
        out.detach().copy_(total.view(out.shape))


def _spoil(out: Tensor) -> None:
    """Fills the output of a collective with NaN, so that reading it too early is an error."""
    if out.is_contiguous():
        ctypes.memset(out.data_ptr(), 255, out.nbytes)


def _meta(x: Tensor) -> str:
    return f"{x.dtype}{[*x.shape]}"


def difference(name: str, ranks: list[int], number: int, calls: dict[int, str]) -> str:
    """Message about a call in which ranks of a group differ."""
    text = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
    return f"collectives mismatch, call {number} of group {name} of ranks {ranks}: {text}"


class _Work(dist.Work):
    """A collective or message in progress; it ends in `wait`."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end: Callable[[], None] | None = end

    def wait(self, timeout=None) -> bool:
        if self._end is not None:
            end, self._end = self._end, None
            end()
        return True


class Group(dist.ProcessGroup):
    """A process group whose collectives are messages through pipes."""

    def __init__(self, pipes: Pipes, name: str, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(pipes.rank), len(ranks))
        self.pipes, self.name, self.ranks = pipes, name, list(ranks)
        self.peers = [index for index, rank in enumerate(ranks) if rank != pipes.rank]
        # with the folder, which differs between runs of these ranks, like their messages
        text = f"{name}{self.ranks}{pipes.folder}"
        self.id = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        self.calls: list[str] = []
        # of messages, by peer, tag and direction
        self._numbers: dict[tuple[int, int, str], Iterator[int]] = defaultdict(count)

    def getBackendName(self) -> str:  # noqa: N802 (c10d calls it)
        return NAME

    @property
    def group_name(self) -> str:
        """Name by which torch 2.15 sorts the messages of a schedule."""
        return f"{self.name}{self.ranks}"

    def _get_backend(self, device: torch.device) -> Group:
        return self  # `batch_isend_irecv` asks it whether messages coalesce

    def _start(
        self,
        call: str,
        x: Tensor,
        use: Callable[[list[Data]], None],
        send_bytes: Sequence[int] = (),
        receive_bytes: Sequence[int] = (),
    ) -> _Work:
        """Starts a collective.

        Args:
            call: of this rank; the same on all ranks.
            x: its input; not to be changed until the end.
            use: takes, at the end, the data of every rank, in their order.
            send_bytes: of x, for each rank; empty = each receives all of x.
            receive_bytes: from each rank; empty = determined by `call`.
        """
        address, before = (self.id, _COLLECTIVE, len(self.calls)), _bytes(x)
        self.calls.append(call)
        if send_bytes:
            ends = accumulate(send_bytes)
            slices = [before[end - size : end] for size, end in zip(send_bytes, ends)]
            for peer in self.peers:
                self.pipes.send([self.ranks[peer]], address, call, slices[peer])
        else:
            slices = [before] * self.size()
            self.pipes.send([self.ranks[peer] for peer in self.peers], address, call, before)

        def end() -> None:
            received: list[Data] = list(slices)
            for peer in self.peers:
                rank = self.ranks[peer]
                peer_call, data = self.pipes.receive((rank, *address))
                size = receive_bytes[peer] if receive_bytes else len(data)
                if (peer_call, len(data)) != (call, size):
                    calls = {rank: f"{peer_call}, {len(data)} bytes"}
                    calls[self.pipes.rank] = f"{call}, {size} bytes"
                    raise CollectiveMismatch(difference(self.name, self.ranks, address[2], calls))
                received[peer] = data
            assert _bytes(x) == before, f"the input of {call} changed before its end"
            use(received)

        return _Work(end)

    def allreduce(self, tensors: list[Tensor], opts) -> _Work:
        (x,), op = tensors, opts.reduceOp.op.name
        return self._start(
            f"all_reduce {op} {_meta(x)}", x, lambda received: _reduce(x, received, op)
        )

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts) -> _Work:
        op, sizes = opts.reduceOp.op.name, [out.nbytes] * self.size()
        call = f"reduce_scatter {op} {_meta(x)}"
        work = self._start(call, x, lambda received: _reduce(out, received, op), sizes)
        _spoil(out)
        return work

    def all_gather_single(self, out: Tensor, x: Tensor, opts=None) -> _Work:
        work = self._start(
            f"all_gather {_meta(x)}", x, lambda received: _concatenate(out, received)
        )
        for index, row in enumerate(out.view(self.size(), -1).unbind()):
            if index != self.rank():  # its own row may be x itself
                _spoil(row)
        return work

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts=None) -> _Work:
        def use(received: list[Data]) -> None:
            for out, data in zip(outs[0], received, strict=True):
                _concatenate(out, [data])

        return self._start(f"all_gather of tensors {_meta(tensors[0])}", tensors[0], use)

    def all_to_all_single(self, out: Tensor, x: Tensor, receive, send, opts=None) -> _Work:
        sizes = [
            [rows * math.prod(x.shape[1:]) * x.itemsize for rows in counts]
            or [tensor.nbytes // self.size()] * self.size()
            for counts, tensor in ((send, x), (receive, out))
        ]
        call = f"all_to_all {x.dtype}[:, {x.shape[1:]}]"
        work = self._start(call, x, lambda received: _concatenate(out, received), *sizes)
        _spoil(out)
        return work

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def broadcast(self, tensors: list[Tensor], opts) -> _Work:
        (x,), root = tensors, opts.rootRank
        sent = x if self.rank() == root else x.new_empty(0)
        call = f"broadcast from {root} {_meta(x)}"
        return self._start(call, sent, lambda received: _concatenate(x, [received[root]]))

    def barrier(self, opts=None) -> _Work:
        return self._start("barrier", torch.empty(0), lambda received: None)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        (x,), number, before = tensors, next(self._numbers[peer, tag, "sent"]), _bytes(tensors[0])
        self.pipes.send([self.ranks[peer]], (self.id, tag, number), _meta(x), before)

        def end() -> None:
            assert _bytes(x) == before, f"a message {_meta(x)} changed before it was sent"

        return _Work(end)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        (x,), number, rank = tensors, next(self._numbers[peer, tag, "received"]), self.ranks[peer]
        _spoil(x)

        def end() -> None:
            sent, data = self.pipes.receive((rank, self.id, tag, number))
            if sent != _meta(x):
                raise CollectiveMismatch(
                    f"rank {rank} sends {sent}, rank {self.pipes.rank} receives {_meta(x)}"
                )
            _concatenate(x, [data])

        return _Work(end)

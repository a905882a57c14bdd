"""A process group for ranks that are forked from one process: messages travel through pipes and
shared memory.

gloo hands every collective to threads and sockets, which takes about half a millisecond of a core
on each rank, a fifth of what a layout's test took. Here a rank writes its part into the pipe of
each peer when it calls a collective, and reads theirs when it waits: no thread, no socket, and
terms are added in the order of the ranks.

Every message says what its sender called, so a rank whose peers call something else fails at once,
where gloo would return garbage or wait for ever. A result is garbage until its `wait`, and an input
that changes before it is an error. `MEGATRON5D_GLOO=1` runs the suite on gloo instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import select
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.parity.local_ranks import Transport
from megatron5d.topology.process import use_batch_scheduling

_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # of Linux
_ATOMIC_BYTES = 4096  # what several processes may write into one pipe without mixing it
_MEMORY_BYTES = 1 << 30  # for large messages of a rank; pages that are not used cost nothing
_NO_RESERVE = 0x4000  # of Linux
# bytes in the pipe, sender, group, tag, number, place in its memory, size
_HEADER = struct.Struct("<HHQiIQI")
_INLINE = 1 << 62
NAME = "pipes"
_COLLECTIVE = -1  # in place of a tag
_OPERATIONS: dict[str, Callable] = {"SUM": torch.add, "MAX": torch.maximum, "MIN": torch.minimum}

Key = tuple[int, int, int, int]  # sender, group, tag, number
Data = bytes | memoryview
Message = tuple[str, Data]  # what its sender called, its data


class CollectiveMismatch(AssertionError):
    """Ranks of a group called different collectives, or one with arguments that do not match."""


class Pipes(Transport):
    """A pipe and a memory for each rank, made before they are forked; in a rank, what it has sent
    and received."""

    def __init__(self, world: int, folder: Path, timeout: float) -> None:
        super().__init__(world, folder, timeout)
        self.pipes = [os.pipe() for _ in range(world)]
        for _, end in self.pipes:
            fcntl.fcntl(end, _SET_PIPE_SIZE, _PIPE_BYTES)
            os.set_blocking(end, False)
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

    def _make_group(self, given, _) -> Group:
        self.groups.append(
            Group(self, given.group_id, given.global_ranks_in_group or list(range(self.world)))
        )
        return self.groups[-1]

    def finish(self) -> None:
        """Notes what this rank has called, once it has ended."""
        calls = [(group.name, group.ranks, group.called) for group in self.groups]
        (self.folder / f"calls{self.rank}").write_text(json.dumps(calls))
        self._arrived.clear()

    def mismatch(self) -> str | None:
        """Compares, once all ranks have ended, what they have called: the first that some have not,
        or None."""
        found: dict[tuple, dict[int, list[str]]] = {}
        for rank in range(self.world):
            for name, ranks, called in json.loads((self.folder / f"calls{rank}").read_text()):
                found.setdefault((name, tuple(ranks)), {each: [] for each in ranks})[rank] = called
        for (name, ranks), lists in found.items():
            number = min(map(len, lists.values()))
            if any(len(each) > number for each in lists.values()):
                calls = {rank: (*each, "nothing")[number] for rank, each in lists.items()}
                return difference(name, list(ranks), number, calls)
        return None

    def close(self) -> None:
        """Ends in the parent."""
        for ends in self.pipes:
            for end in ends:
                os.close(end)
        for memory in self.memories:
            memory.close()

    def send(
        self, peers: Sequence[int], where: tuple[int, int, int], text: str, data: bytes
    ) -> None:
        """Puts a message into the pipe of each peer; `where`: its group, tag and number."""
        said, place = text.encode() + b"\0", _INLINE
        if _HEADER.size + len(said) + len(data) > _ATOMIC_BYTES:
            place, self._used = self._used, self._used + len(data)
            assert self._used <= _MEMORY_BYTES, "more than 1 GiB of messages: run this on gloo"
            self.memories[self.rank][place : self._used] = data
        size = _HEADER.size + len(said) + (len(data) if place == _INLINE else 0)
        message = _HEADER.pack(size, self.rank, *where, place, len(data)) + said
        message += data if place == _INLINE else b""
        for peer in peers:
            self._write(self.pipes[peer][1], message)

    def _write(self, end: int, message: bytes) -> None:
        while True:
            with suppress(BlockingIOError):  # full: its rank may wait in turn until this one reads
                os.write(end, message)
                return
            own = self.pipes[self.rank][0]
            if own in select.select([own], [end], [])[0]:
                self._read()

    def receive(self, key: Key) -> Message:
        """Waits for a message."""
        while key not in self._arrived:
            self._read()
        return self._arrived.pop(key)

    def _read(self) -> None:
        received = self._unread + os.read(self.pipes[self.rank][0], _PIPE_BYTES)
        at = 0
        while at + _HEADER.size <= len(received):
            length, sender, group, tag, number, place, size = _HEADER.unpack_from(received, at)
            if at + length > len(received):
                break
            said, _, data = received[at + _HEADER.size : at + length].partition(b"\0")
            if place != _INLINE:
                data = memoryview(self.memories[sender])[place : place + size]
            self._arrived[sender, group, tag, number] = said.decode(), data
            at += length
        self._unread = received[at:]


def _bytes(x: Tensor) -> bytes:
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _fill(out: Tensor, got: Sequence[Data]) -> None:
    """Writes what the ranks have sent into `out`, one after the other."""
    data = b"".join(got)
    assert len(data) == out.nbytes, f"{len(data)} bytes arrive for {_form(out)}"
    if out.is_contiguous():
        ctypes.memmove(out.data_ptr(), data, len(data))
    else:
        out.detach().copy_(torch.frombuffer(bytearray(data), dtype=out.dtype).view(out.shape))


def _reduce(out: Tensor, got: Sequence[Data], op: str) -> None:
    """Joins the terms in the order of the ranks."""
    if out.numel():
        total, *terms = (torch.frombuffer(bytearray(data), dtype=out.dtype) for data in got)
        for term in terms:
            _OPERATIONS[op](total, term, out=total)
        out.detach().copy_(total.view(out.shape))


def _spoil(out: Tensor) -> None:
    """Fills what a collective will overwrite with NaN, so that nobody reads it too early."""
    if out.is_contiguous():
        ctypes.memset(out.data_ptr(), 255, out.nbytes)


def _form(x: Tensor) -> str:
    return f"{x.dtype}{[*x.shape]}"


def difference(name: str, ranks: list[int], number: int, calls: dict[int, str]) -> str:
    """The message about a call in which ranks of a group differ."""
    told = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
    return f"collectives mismatch, call {number} of group {name} of ranks {ranks}: {told}"


class _Work(dist.Work):
    """Under way; it ends in `wait`."""

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
        self.others = [place for place, rank in enumerate(ranks) if rank != pipes.rank]
        # no message of an earlier run of these ranks is one of this run
        text = f"{name}{self.ranks}{pipes.folder}"
        self.id = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        self.called: list[str] = []
        # of messages, by peer and tag
        self._numbers: dict[tuple[int, int, str], Iterator[int]] = defaultdict(count)

    def getBackendName(self) -> str:  # noqa: N802 (c10d asks it)
        return NAME

    def _start(
        self,
        text: str,
        x: Tensor,
        use: Callable[[list[Data]], None],
        ends: Sequence[int] = (),
        rows: Any = None,
    ) -> _Work:
        """Starts a collective.

        Args:
            text: what this rank calls; the same on all ranks.
            x: its input; not to be changed until the end.
            use: takes, at the end, what every rank has sent, in their order.
            ends: where in x, in bytes, the part for each rank ends; none = all of it for each.
            rows: for each rank and from each, which may differ.
        """
        number, before = len(self.called), _bytes(x)
        self.called.append(text)
        says, hears = (
            ([f"{text}, {n} rows" for n in each] for each in rows)
            if rows
            else [[text] * self.size()] * 2
        )
        if ends:
            parts = [before[first:last] for first, last in pairwise((0, *ends))]
            for place in self.others:
                self.pipes.send(
                    [self.ranks[place]], (self.id, _COLLECTIVE, number), says[place], parts[place]
                )
        else:
            parts = [before] * self.size()
            self.pipes.send(
                [self.ranks[place] for place in self.others],
                (self.id, _COLLECTIVE, number),
                text,
                before,
            )

        def end() -> None:
            got: list[Data] = list(parts)
            for place in self.others:
                got[place] = self._take(place, number, hears[place])
            assert _bytes(x) == before, f"the input of {text} changed before its end"
            use(got)

        return _Work(end)

    def _take(self, place: int, number: int, mine: str) -> Data:
        rank = self.ranks[place]
        theirs, data = self.pipes.receive((rank, self.id, _COLLECTIVE, number))
        if theirs != mine:
            raise CollectiveMismatch(
                difference(self.name, self.ranks, number, {self.pipes.rank: mine, rank: theirs})
            )
        return data

    def allreduce(self, tensors: list[Tensor], opts) -> _Work:
        (x,), op = tensors, opts.reduceOp.op.name
        return self._start(f"all_reduce {op} {_form(x)}", x, lambda got: _reduce(x, got, op))

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts) -> _Work:
        op, ends = (
            opts.reduceOp.op.name,
            [out.nbytes * place for place in range(1, self.size() + 1)],
        )
        work = self._start(
            f"reduce_scatter {op} {_form(x)}", x, lambda got: _reduce(out, got, op), ends
        )
        _spoil(out)
        return work

    def all_gather_single(self, out: Tensor, x: Tensor, opts=None) -> _Work:
        work = self._start(f"all_gather {_form(x)}", x, lambda got: _fill(out, got))
        for place, part in enumerate(out.view(self.size(), -1).unbind()):
            if place != self.rank():  # its own is there already where x is a view or a copy of it
                _spoil(part)
        return work

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts=None) -> _Work:
        def use(got: list[Data]) -> None:
            for out, data in zip(outs[0], got, strict=True):
                _fill(out, [data])

        return self._start(f"all_gather of tensors {_form(tensors[0])}", tensors[0], use)

    def all_to_all_single(self, out: Tensor, x: Tensor, from_each, to_each, opts=None) -> _Work:
        to_each = list(to_each) or [len(x) // self.size()] * self.size()
        from_each = list(from_each) or [len(out) // self.size()] * self.size()
        ends = [rows * (x.nbytes // max(len(x), 1)) for rows in accumulate(to_each)]
        work = self._start(
            f"all_to_all {x.dtype}[:, {x.shape[1:]}]",
            x,
            lambda got: _fill(out, got),
            ends,
            (to_each, from_each),
        )
        _spoil(out)
        return work

    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )

    def broadcast(self, tensors: list[Tensor], opts) -> _Work:
        (x,), root = tensors, opts.rootRank
        sent = x if self.rank() == root else x.new_empty(0)
        return self._start(
            f"broadcast from {root} {_form(x)}", sent, lambda got: _fill(x, [got[root]])
        )

    def barrier(self, opts=None) -> _Work:
        return self._start("barrier", torch.empty(0), lambda got: None)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        (x,), number, before = tensors, next(self._numbers[peer, tag, "sent"]), _bytes(tensors[0])
        self.pipes.send([self.ranks[peer]], (self.id, tag, number), _form(x), before)

        def end() -> None:
            assert _bytes(x) == before, f"a message {_form(x)} changed before it was sent"

        return _Work(end)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        (x,), number, rank = tensors, next(self._numbers[peer, tag, "received"]), self.ranks[peer]
        _spoil(x)

        def end() -> None:
            theirs, data = self.pipes.receive((rank, self.id, tag, number))
            if theirs != _form(x):
                raise CollectiveMismatch(
                    f"rank {rank} sends {theirs}, rank {self.pipes.rank} receives {_form(x)}"
                )
            _fill(x, [data])

        return _Work(end)

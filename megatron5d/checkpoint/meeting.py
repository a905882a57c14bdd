"""How ranks agree on a save: each leaves a note in the store that all met at, rank 0 reads them and answers; and how
they learn whether something went wrong on one of them.

No process group settles a save: a thread behind the training's back may not share the training's groups; gloo, for one
of its own, by default asks the store twice for each other rank on each rank (5·10⁸ questions of 16,384 ranks) and opens
as many connections; and a gather of objects takes the size of the longest note times the number of ranks, in GPU memory
under NCCL. Here a rank sends its note once, and asks one question now and then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from megatron5d.topology.store import listed, met_at, wait_until

_PART_BYTES = 4 << 20  # of a note in one message: TCPStore takes no more than 8 MiB
_AT_ONCE = 1024  # notes in one question
_HEARD_S = 3.0  # for the others to read what went wrong: they ask once a second
_names = itertools.count()  # of meetings, which all ranks open in the same order


class Meeting:
    """All ranks, or this one by itself where there is no process group. Every rank makes the same calls in one order.

    Args:
        timeout_s: seconds in which every rank must have left its note, and in twice which rank 0 must have answered.
    """

    def __init__(self, timeout_s: float) -> None:
        alone = not dist.is_initialized()
        self.rank, self.world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self._store: dist.Store = dist.HashStore() if alone else met_at()
        self._name, self._timeout_s = f"megatron5d/meeting/{next(_names)}", timeout_s
        self._round = self._answers = self._forgotten = 0

    def leave(self, note: bytes) -> None:
        """Puts down what rank 0 will read, in the place of the last note. Comm: the store; the note, once.

        Raises:
            OSError: the store is gone.
        """
        self._round += 1
        key = self._note(self.rank)
        parts = [note[at : at + _PART_BYTES] for at in range(0, len(note), _PART_BYTES)] or [b""]
        with _losing_rank_0():
            for number, part in enumerate(parts[1:], 1):
                self._put(f"{key}/{number}", part)
            self._put(key, b"%d %d " % (self._round, len(parts)) + parts[0])
            self._store.add(f"{self._name}/count", 1)

    def notes(self) -> list[bytes]:
        """What every rank has left since it was asked last, in their order; on rank 0, inside of what `first` calls.

        Raises:
            OSError: some ranks have left none in time; names them.
        """
        if not wait_until(self._all_left, self._timeout_s):
            missing = [rank for rank in range(self.world) if not self._has_left(rank)]
            raise OSError(f"ranks {listed(missing)} of {self.world} were not ready within {self._timeout_s:g} s")
        found = []
        for at in range(0, self.world, _AT_ONCE):
            ranks = range(at, min(at + _AT_ONCE, self.world))
            for rank, written in zip(ranks, self._store.multi_get([self._note(rank) for rank in ranks])):
                _, num_parts, note = written.split(b" ", 2)
                more = [self._store.get(f"{self._note(rank)}/{number}") for number in range(1, int(num_parts))]
                found.append(b"".join([note, *more]))
        for answer in range(self._forgotten + 1, self._answers):  # read by all, who else had left no note
            self._store.delete_key(self._answer(answer))
        self._forgotten = self._answers - 1
        return found

    def _all_left(self) -> bool:
        return self._store.add(f"{self._name}/count", 0) == self._round * self.world

    def _has_left(self, rank: int) -> bool:
        key = self._note(rank)
        return self._store.check([key]) and int(self._store.get(key).split(b" ", 1)[0]) == self._round

    def _put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes it takes, too

    def _note(self, rank: int) -> str:
        return f"{self._name}/note/{rank}"

    def _answer(self, number: int) -> str:
        return f"{self._name}/answer/{number}"

    def first(self, act: Callable[[], object]) -> None:
        """Rank 0 acts while the others wait.

        What went wrong rank 0 does not raise before the others have read it: its process may be the store's, and ends.

        Raises:
            OSError: what went wrong there, on every rank; or rank 0 has not answered.
        """
        self._answers += 1
        key = self._answer(self._answers)
        if self.rank == 0:
            fault = b"?"  # another error than those that a file system has: a fault of ours
            try:
                act()
                fault = b""
            except OSError as error:
                fault = str(error).encode()
                raise
            finally:
                self._put(key, fault)
                if fault:
                    wait_until(lambda: self._store.add(f"{key}/heard", 0) >= self.world - 1, _HEARD_S)
            return
        with _losing_rank_0():
            there = wait_until(lambda: self._store.check([key]), 2 * self._timeout_s)
            fault = self._store.get(key) if there else b"rank 0 has not answered in time"
        if fault:
            with suppress(RuntimeError):  # rank 0 waits for its readers no longer
                self._store.add(f"{key}/heard", 1)
            raise OSError("rank 0 was stopped by a fault of its own" if fault == b"?" else fault.decode())


@contextmanager
def _losing_rank_0() -> Iterator[None]:
    """Tells torch's errors of a store that is gone as what they are."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"rank 0, where all ranks met, does not answer: {error}") from error

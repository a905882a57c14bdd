"""Coordinates a save over all ranks by messages in the default store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron5d.topology.rendezvous import default_store, ranks_text, wait_until

_CHUNK_BYTES = 4 << 20  # of a message in one request: TCPStore takes no more than 8 MiB
_MESSAGES_PER_REQUEST = 1024
_READ_WITHIN_S = 3.0  # for the other ranks to read rank 0's error: they poll once a second
_UNKNOWN_ERROR = b"?"  # any error but an OSError: a bug of ours
# numbers of the groups of each store, whose ranks all create them in the same order
_numbers: WeakKeyDictionary[dist.Store, Iterator[int]] = WeakKeyDictionary()


class StoreGroup:
    """All ranks of the world: each sends messages to rank 0 through the default store, and rank 0
    answers.

    Every rank makes the same calls in the same order; one process without a process group forms a
    group by itself.

    A save does not use a process group, for three reasons. A thread that saves in the background
    must not use the groups of the training. A gloo group for saves would make every rank query the
    store twice for every other rank (5·10⁸ requests for 16,384 ranks) and open one connection each.
    And a gather of objects needs the size of the longest message times the number of ranks, under
    NCCL in GPU memory. Here each rank sends its message once and polls for the answer.

    Args:
        timeout_s: rank 0 waits this many seconds for messages, and the others twice as long for its
            answer.
    """

    def __init__(self, timeout_s: float) -> None:
        distributed = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self._store: dist.Store = default_store() if distributed else dist.HashStore()
        number = next(_numbers.setdefault(self._store, itertools.count()))
        self._name, self._timeout_s = f"megatron5d/store_group/{number}", timeout_s
        self._round = self._answers = self._deleted_answers = 0

    def send(self, message: bytes) -> None:
        """Sends a message to rank 0, which replaces this rank's last one.

        Raises:
            OSError: the store is gone.

        Comm:
            The store; the message, once.
        """
        self._round += 1
        key = self._message_key(self.rank)
        starts = range(0, max(len(message), 1), _CHUNK_BYTES)
        chunks = [message[start : start + _CHUNK_BYTES] for start in starts]
        with _store_errors():
            for number, chunk in enumerate(chunks[1:], 1):
                self._set(f"{key}/{number}", chunk)
            self._set(key, b"%d %d " % (self._round, len(chunks)) + chunks[0])
            self._store.add(f"{self._name}/count", 1)

    def receive_all(self) -> list[bytes]:
        """Receives the messages that all ranks have sent since the last call, by rank. Called
        inside `on_rank_0`.

        Raises:
            OSError: some ranks have sent none in time; names them.

        Comm:
            The store; a request for every 1,024 ranks, and one for each further chunk of a long
            message.
        """
        total, store = self._round * self.world, self._store
        if not wait_until(lambda: store.add(f"{self._name}/count", 0) == total, self._timeout_s):
            missing = [rank for rank in range(self.world) if not self._has_sent(rank)]
            raise OSError(
                f"ranks {ranks_text(missing)} of {self.world} were not ready within "
                f"{self._timeout_s:g} s"
            )
        messages = []
        for start in range(0, self.world, _MESSAGES_PER_REQUEST):
            ranks = range(start, min(start + _MESSAGES_PER_REQUEST, self.world))
            keys = [self._message_key(rank) for rank in ranks]
            for key, value in zip(keys, store.multi_get(keys)):
                _, num_chunks, first = value.split(b" ", 2)
                chunks = [store.get(f"{key}/{number}") for number in range(1, int(num_chunks))]
                messages.append(b"".join([first, *chunks]))
        # every rank has read the earlier answers, because it has sent a message since
        for answer in range(self._deleted_answers + 1, self._answers):
            store.delete_key(self._answer_key(answer))
        self._deleted_answers = self._answers - 1
        return messages

    def _has_sent(self, rank: int) -> bool:
        key = self._message_key(rank)
        if not self._store.check([key]):
            return False
        return int(self._store.get(key).split(b" ", 1)[0]) == self._round

    def _set(self, key: str, value: bytes) -> None:
        cast(Any, self._store).set(key, value)  # torch's stub declares only str

    def _message_key(self, rank: int) -> str:
        return f"{self._name}/message/{rank}"

    def _answer_key(self, number: int) -> str:
        return f"{self._name}/answer/{number}"

    def on_rank_0(self, act: Callable[[], object]) -> None:
        """Calls `act` on rank 0, for which the others wait.

        If it raises, rank 0 raises only after the others have read the error: its process may serve
        the store, and it is about to end.

        Raises:
            OSError: on every rank, if `act` raised one; on the others also if rank 0 has not
                answered in time, or failed with another error.

        Comm:
            The store; an answer of rank 0, for which each other rank polls.
        """
        self._answers += 1
        key = self._answer_key(self._answers)
        if self.rank != 0:
            self._await_answer(key)
            return
        answer = _UNKNOWN_ERROR
        try:
            act()
            answer = b""
        except OSError as error:
            answer = str(error).encode() or _UNKNOWN_ERROR
            raise
        finally:
            self._set(key, answer)
            if answer:
                num_readers = self.world - 1
                wait_until(lambda: self._store.add(f"{key}/read", 0) >= num_readers, _READ_WITHIN_S)

    def _await_answer(self, key: str) -> None:
        with _store_errors():
            answered = wait_until(lambda: self._store.check([key]), 2 * self._timeout_s)
            answer = self._store.get(key) if answered else b"rank 0 has not answered in time"
        if answer:
            with suppress(RuntimeError):  # the store is gone if rank 0 has stopped waiting
                self._store.add(f"{key}/read", 1)
            unknown = answer == _UNKNOWN_ERROR
            raise OSError("rank 0 was stopped by an internal error" if unknown else answer.decode())


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turns torch's errors about a store that is gone into an OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"rank 0, which serves the store, does not answer: {error}") from error

"""How all ranks coordinate a save: through messages to rank 0 in the default store, and its answers.

A save does not use a process group, for three reasons. A thread that saves in the background must not use the groups of
the training. A gloo group of its own would make every rank ask the store twice for every other rank (5·10⁸ requests for
16,384 ranks) and open as many connections. And a gather of objects needs the size of the longest message times the
number of ranks, under NCCL in GPU memory. Here each rank sends its message once and polls for the answer.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from megatron5d.topology.rendezvous import default_store, ranks_text, wait_until

_PART_BYTES = 4 << 20  # of a message in one request: TCPStore takes no more than 8 MiB
_MESSAGES_PER_REQUEST = 1024
_READ_WITHIN_S = 3.0  # for the others to read a failure of rank 0: they poll once a second
_numbers = itertools.count()  # of groups, which all ranks create in the same order


class StoreGroup:
    """All ranks of the world; one process without a process group forms a group by itself.

    Every rank makes the same calls in the same order.

    Args:
        timeout_s: rank 0 waits this many seconds for messages, and the others twice as long for its answer.
    """

    def __init__(self, timeout_s: float) -> None:
        alone = not dist.is_initialized()
        self.rank, self.world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self._store: dist.Store = dist.HashStore() if alone else default_store()
        self._name, self._timeout_s = f"megatron5d/store_group/{next(_numbers)}", timeout_s
        self._round = self._answers = self._deleted_answers = 0

    def send(self, message: bytes) -> None:
        """Sends a message to rank 0. It replaces this rank's last one. Comm: the store; the message, once.

        Raises OSError: the store is gone.
        """
        self._round += 1
        key = self._message_key(self.rank)
        parts = [message[at : at + _PART_BYTES] for at in range(0, len(message), _PART_BYTES)] or [b""]
        with _store_errors_named():
            for number, part in enumerate(parts[1:], 1):
                self._set(f"{key}/{number}", part)
            self._set(key, b"%d %d " % (self._round, len(parts)) + parts[0])
            self._store.add(f"{self._name}/count", 1)

    def receive_all(self) -> list[bytes]:
        """Returns the messages that all ranks have sent since the last call, by rank. Called inside `on_rank_0`.

        Comm: the store; one request for every 1,024 ranks, and one for each further part of a long message.

        Raises OSError: some ranks have sent none in time; names them.
        """
        if not wait_until(self._all_sent, self._timeout_s):
            missing = [rank for rank in range(self.world) if not self._has_sent(rank)]
            raise OSError(f"ranks {ranks_text(missing)} of {self.world} were not ready within {self._timeout_s:g} s")
        messages = []
        for at in range(0, self.world, _MESSAGES_PER_REQUEST):
            ranks = range(at, min(at + _MESSAGES_PER_REQUEST, self.world))
            for rank, value in zip(ranks, self._store.multi_get([self._message_key(rank) for rank in ranks])):
                _, num_parts, first = value.split(b" ", 2)
                more = [self._store.get(f"{self._message_key(rank)}/{number}") for number in range(1, int(num_parts))]
                messages.append(b"".join([first, *more]))
        for answer in range(self._deleted_answers + 1, self._answers):  # all have read these: they sent a message since
            self._store.delete_key(self._answer_key(answer))
        self._deleted_answers = self._answers - 1
        return messages

    def _all_sent(self) -> bool:
        return self._store.add(f"{self._name}/count", 0) == self._round * self.world

    def _has_sent(self, rank: int) -> bool:
        key = self._message_key(rank)
        return self._store.check([key]) and int(self._store.get(key).split(b" ", 1)[0]) == self._round

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # it also takes bytes

    def _message_key(self, rank: int) -> str:
        return f"{self._name}/message/{rank}"

    def _answer_key(self, number: int) -> str:
        return f"{self._name}/answer/{number}"

    def on_rank_0(self, act: Callable[[], object]) -> None:
        """Calls `act` on rank 0, for which the others wait.

        If it raises, rank 0 raises only after the others have read why: its process may be the one that serves the
        store, and it is about to end.

        Comm: the store; an answer of rank 0, for which each other rank polls.

        Raises OSError: on every rank, if `act` raised one; on the others also if rank 0 has not answered in time, or
        has failed in another way.
        """
        self._answers += 1
        key = self._answer_key(self._answers)
        if self.rank == 0:
            fault = b"?"  # any error but an OSError: a mistake of ours
            try:
                act()
                fault = b""
            except OSError as error:
                fault = str(error).encode() or b"?"
                raise
            finally:
                self._set(key, fault)
                if fault:
                    wait_until(lambda: self._store.add(f"{key}/read", 0) >= self.world - 1, _READ_WITHIN_S)
            return
        with _store_errors_named():
            answered = wait_until(lambda: self._store.check([key]), 2 * self._timeout_s)
            fault = self._store.get(key) if answered else b"rank 0 has not answered in time"
        if fault:
            with suppress(RuntimeError):  # rank 0 no longer waits, and the store is gone with it
                self._store.add(f"{key}/read", 1)
            raise OSError("rank 0 was stopped by a fault of its own" if fault == b"?" else fault.decode())


@contextmanager
def _store_errors_named() -> Iterator[None]:
    """Turns torch's errors of a store that is gone into an OSError that says so."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"rank 0, where all ranks met, does not answer: {error}") from error

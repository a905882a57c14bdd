"""Saves a run: every rank writes its rectangles, then one rename makes the checkpoint exist."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron5d.checkpoint.folder import RUN_FILE, Keep, commit, set_aside_later, step_folder
from megatron5d.checkpoint.layout import HostCopies, ShardedTensor
from megatron5d.checkpoint.tensor_file import Save, write_rank_file
from megatron5d.topology.all_ranks import first_failure, first_failure_in, on_rank_0
from megatron5d.topology.lock_file import LockFile
from megatron5d.topology.rendezvous import default_store, ranks_text, wait_until

if TYPE_CHECKING:
    from megatron5d.checkpoint.index_writer import IndexWriter

# How long a network file system may take to show a new file on other nodes. The checks have looked
# for the folder before it was made, and NFS may answer from its cache for a minute.
VISIBLE_S = 90.0
# first byte of a message that its rank has written its file; any other message is an error
_DONE = b"\0"


class Exporter(Protocol):
    """Writes a checkpoint in another form, by all ranks."""

    def begin(self, checkpoint: Path) -> None: ...

    def write(self, checkpoint: Path, rank: int, world: int) -> bytes: ...

    def finish(self, checkpoint: Path, messages: list[bytes]) -> None: ...


class SaveFailed(OSError):
    """A checkpoint could not be written; those before it are whole."""


class Saver:
    """Writes checkpoints of one run, at once or in the background.

    Args:
        keep: which ones stay; a number keeps that many of the newest, 0 = all.
        background: `save` returns as soon as the tensors are copied, and a thread writes the files.
        timeout_s: seconds after which a save fails because a rank has not written its file.
        lock: of the directory, on rank 0; None where nobody else can be writing there.
        pinned: a checkpoint that is kept whatever `keep` says: the one that the command line names.
        began: the step at which the run starts. Checkpoints of later steps are another run's, or of
            this one before it went back: the first save renames them, so that it neither replaces
            nor counts them.
        exporter: writes a checkpoint in another form too, where `save` is told so.

    Raises:
        OSError: on every rank, if the directory cannot be written, or a rank sees another one under
            its name. So this is known when the run starts, not at its first save hours later.

    Comm: a broadcast of a name over the world, and `first_failure`'s.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: Keep | int,
        background: bool = False,
        timeout_s: float = 1800.0,
        lock: LockFile | None = None,
        pinned: Path | None = None,
        began: int | None = None,
        *,
        exporter: Exporter | None = None,
    ) -> None:
        self.directory, self.background, self._lock = Path(directory), background, lock
        self.keep = Keep(last=keep) if isinstance(keep, int) else keep
        self._pinned, self._began, self._exporter = pinned, began, exporter
        self._id, self._num_saves = _check_shared(self.directory), 0
        self._group = StoreGroup(timeout_s)
        self._index: IndexWriter | None = None
        if self._group.rank == 0:
            # at the start of the run, not hours later
            from megatron5d.checkpoint.index_writer import IndexWriter

            self._index = IndexWriter()
        self._copies = HostCopies()
        self._written = b""  # what this rank wrote at its last save, as in `storage.write`
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: dict[str, ShardedTensor],
        run: dict[str, Any],
        exported: bool = False,
    ) -> None:
        """Saves one step.

        Args:
            run: what run.json will hold (the same on every rank).
            exported: write it in the exporter's form, too.

        Raises:
            SaveFailed: on every rank, if a rank could not write its files.
            OSError: on every rank, if another run has taken over the directory.
                Either error of a save in the background is raised by the next `save` or `wait`.

        Comm: the store (checkpoint/save.py): a message of each rank, and three answers of rank 0.
        """
        self.wait()
        if not self.background:
            self._write(step, tensors, run, exported)
            return
        copies = self._copies.copy(tensors)
        self._thread = threading.Thread(
            target=self._write_noting_errors, args=(step, copies, run, exported)
        )
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a background save is running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the save in the background has ended, and raises its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_noting_errors(self, *args) -> None:
        try:
            self._write(*args)
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error

    def _write(
        self, step: int, tensors: dict[str, ShardedTensor], run: dict[str, Any], exported: bool
    ) -> None:
        temporary = step_folder(self.directory, step).with_suffix(".tmp")
        group = self._group
        self._num_saves += 1  # as on every other rank
        save = Save(f"{self._id}-{self._num_saves}", step)
        group.on_rank_0(self._lock.check if self._lock else lambda: None)
        known, self._written = self._written, b""
        written = b""

        def write_own() -> bytes:
            nonlocal written
            written = write_rank_file(temporary, tensors, group.rank, save)
            return b"" if written == known else written

        try:
            self._together(
                lambda: self._begin(temporary, run),
                write_own,
                lambda told: self._finish(temporary, told, save),
            )
        except OSError as error:
            if group.rank == 0:
                # what is half written may be what fills the disk
                shutil.rmtree(temporary, ignore_errors=True)
            told = f"the checkpoint of step {step} could not be written: {error}. {self._room()}"
            raise SaveFailed(told) from error
        self._written = written
        if exported and self._exporter is not None:
            self._export(step_folder(self.directory, step), self._exporter)

    def _export(self, checkpoint: Path, exporter: Exporter) -> None:
        """Writes a checkpoint in the exporter's form; raises as `save`."""
        try:
            self._together(
                lambda: exporter.begin(checkpoint),
                lambda: exporter.write(checkpoint, self._group.rank, self._group.world),
                lambda told: exporter.finish(checkpoint, told),
            )
        except OSError as error:
            raise SaveFailed(
                f"{checkpoint} could not be exported: {error}. {self._room()}"
            ) from error

    def _together(
        self,
        begin: Callable[[], None],
        write_own: Callable[[], bytes],
        finish: Callable[[list[bytes]], None],
    ) -> None:
        """Begins on rank 0, writes on all ranks, and finishes on rank 0 with what each rank
        returned.

        Raises OSError: on every rank, if one of them fails.

        Comm: the store; a message of each rank, and two answers of rank 0.
        """
        self._group.on_rank_0(begin)
        try:
            message = _DONE + write_own()
        except Exception as error:  # noqa: BLE001 - rank 0 raises it on all ranks
            message = _described(error).encode()
        self._group.send(message)

        def finish_all() -> None:
            messages = self._group.receive_all()
            failed = first_failure_in(
                [None if each.startswith(_DONE) else each.decode() for each in messages]
            )
            if failed:
                raise OSError(str(failed))
            finish([each.removeprefix(_DONE) for each in messages])

        self._group.on_rank_0(finish_all)

    def _begin(self, temporary: Path, run: dict[str, Any]) -> None:
        """Makes the folder that all ranks write to, on rank 0."""
        if self._began is not None:
            set_aside_later(self.directory, self._began)
            self._began = None
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        (temporary / RUN_FILE).write_text(json.dumps(run, indent=1))

    def _finish(self, temporary: Path, messages: list[bytes], save: Save) -> None:
        """Writes the index and makes the folder a checkpoint, on rank 0."""
        assert self._index is not None
        self._index.write(temporary, messages, save)
        commit(temporary, self.keep, self._pinned)

    def _room(self) -> str:
        """Says in an error how much space is free, and that older checkpoints are not affected."""
        there = next(
            (folder for folder in (self.directory, *self.directory.parents) if folder.is_dir()),
            Path(),
        )
        return (
            f"{there} has {shutil.disk_usage(there).free / 1e9:.3f} GB left; checkpoints before this one are whole, "
            "and the same command continues from them"
        )


def _check_shared(directory: Path) -> str:
    """Makes the directory, and makes sure that every rank sees the files that rank 0 writes there.

    Otherwise each node would write to a folder of its own, and the one with the manifest, which
    lists the files beside it, would pass for a whole checkpoint.

    Returns a text that no other run has, the same on every rank. Raises OSError: on every rank, if
    rank 0 cannot write there, or some ranks do not see what it has written.

    Comm: a broadcast of a name over the world, and `first_failure`'s.
    """
    probe = Path(on_rank_0(lambda: str(_make_probe(directory))))
    failed = first_failure(_unseen(probe))
    if not dist.is_initialized() or dist.get_rank() == 0:
        with suppress(OSError):
            probe.unlink()
    if failed:
        raise OSError(
            f"rank {failed.rank} {failed.text}{failed.more}: checkpoint.dir must be on a file system that all nodes "
            "share, for all ranks write a checkpoint"
        )
    return probe.name.rpartition("-")[2]


def _make_probe(directory: Path) -> Path:
    """Makes the directory and an empty file in it."""
    probe = directory / f".seen-by-all-{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        raise OSError(f"no checkpoint can be saved in {directory}: {error}") from error
    return probe


def _unseen(probe: Path) -> str | None:
    """Returns why this rank does not see a file of rank 0, in words; None where it does, after
    `VISIBLE_S` at most."""
    deadline = time.monotonic() + VISIBLE_S
    try:
        while not probe.exists():
            if time.monotonic() > deadline:
                return f"on {socket.gethostname()} does not find in {probe.parent} what rank 0 writes there"
            time.sleep(0.1)
    except OSError as error:
        return f"on {socket.gethostname()} cannot look for what rank 0 writes in {probe.parent}: {error}"
    return None


def _described(error: BaseException) -> str:
    """Returns an error in words: the file system's own where torch has raised another one because
    of it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    cause = cause or error
    return f"{type(cause).__name__}: {cause}"


_PART_BYTES = 4 << 20  # of a message in one request: TCPStore takes no more than 8 MiB
_MESSAGES_PER_REQUEST = 1024
_READ_WITHIN_S = 3.0  # for the others to read a failure of rank 0: they poll once a second
# Of the groups of each store: all ranks that share it create them in the same order.
_numbers: WeakKeyDictionary[dist.Store, Iterator[int]] = WeakKeyDictionary()


class StoreGroup:
    """All ranks of the world as they coordinate a save: by messages to rank 0 in the default store,
    and its answers.

    Every rank makes the same calls in the same order; one process without a process group forms a
    group by itself.

    A save does not use a process group, for three reasons. A thread that saves in the background
    must not use the groups of the training. A gloo group of its own would make every rank ask the
    store twice for every other rank (5·10⁸ requests for 16,384 ranks) and open as many connections.
    And a gather of objects needs the size of the longest message times the number of ranks, under
    NCCL in GPU memory. Here each rank sends its message once and polls for the answer.

    Args:
        timeout_s: rank 0 waits this many seconds for messages, and the others twice as long for its
            answer.
    """

    def __init__(self, timeout_s: float) -> None:
        alone = not dist.is_initialized()
        self.rank, self.world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self._store: dist.Store = dist.HashStore() if alone else default_store()
        number = next(_numbers.setdefault(self._store, itertools.count()))
        self._name, self._timeout_s = f"megatron5d/store_group/{number}", timeout_s
        self._round = self._answers = self._deleted_answers = 0

    def send(self, message: bytes) -> None:
        """Sends a message to rank 0. It replaces this rank's last one. Comm: the store; the
        message, once. Raises
        OSError: the store is gone."""
        self._round += 1
        key = self._message_key(self.rank)
        parts = [message[at : at + _PART_BYTES] for at in range(0, len(message), _PART_BYTES)] or [
            b""
        ]
        with _store_errors_named():
            for number, part in enumerate(parts[1:], 1):
                self._set(f"{key}/{number}", part)
            self._set(key, b"%d %d " % (self._round, len(parts)) + parts[0])
            self._store.add(f"{self._name}/count", 1)

    def receive_all(self) -> list[bytes]:
        """Returns the messages that all ranks have sent since the last call, by rank. Called inside
        `on_rank_0`.

        Comm: the store; one request for every 1,024 ranks, and one for each further part of a long
            message.

        Raises OSError: some ranks have sent none in time; names them.
        """
        total = self._round * self.world
        if not wait_until(
            lambda: self._store.add(f"{self._name}/count", 0) == total, self._timeout_s
        ):
            missing = [rank for rank in range(self.world) if not self._has_sent(rank)]
            raise OSError(
                f"ranks {ranks_text(missing)} of {self.world} were not ready within {self._timeout_s:g} s"
            )
        messages = []
        for at in range(0, self.world, _MESSAGES_PER_REQUEST):
            ranks = range(at, min(at + _MESSAGES_PER_REQUEST, self.world))
            for rank, value in zip(
                ranks, self._store.multi_get([self._message_key(rank) for rank in ranks])
            ):
                _, num_parts, first = value.split(b" ", 2)
                more = [
                    self._store.get(f"{self._message_key(rank)}/{number}")
                    for number in range(1, int(num_parts))
                ]
                messages.append(b"".join([first, *more]))
        # all have read these: they sent a message since
        for answer in range(self._deleted_answers + 1, self._answers):
            self._store.delete_key(self._answer_key(answer))
        self._deleted_answers = self._answers - 1
        return messages

    def _has_sent(self, rank: int) -> bool:
        key = self._message_key(rank)
        return (
            self._store.check([key]) and int(self._store.get(key).split(b" ", 1)[0]) == self._round
        )

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # it also takes bytes

    def _message_key(self, rank: int) -> str:
        return f"{self._name}/message/{rank}"

    def _answer_key(self, number: int) -> str:
        return f"{self._name}/answer/{number}"

    def on_rank_0(self, act: Callable[[], object]) -> None:
        """Calls `act` on rank 0, for which the others wait.

        If it raises, rank 0 raises only after the others have read why: its process may be the one
        that serves the store, and it is about to end.

        Comm: the store; an answer of rank 0, for which each other rank polls.

        Raises OSError: on every rank, if `act` raised one; on the others also if rank 0 has not
        answered in time, or has failed in another way.
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
                    wait_until(
                        lambda: self._store.add(f"{key}/read", 0) >= self.world - 1, _READ_WITHIN_S
                    )
            return
        with _store_errors_named():
            answered = wait_until(lambda: self._store.check([key]), 2 * self._timeout_s)
            fault = self._store.get(key) if answered else b"rank 0 has not answered in time"
        if fault:
            with suppress(RuntimeError):  # rank 0 no longer waits, and the store is gone with it
                self._store.add(f"{key}/read", 1)
            raise OSError(
                "rank 0 was stopped by a fault of its own" if fault == b"?" else fault.decode()
            )


@contextmanager
def _store_errors_named() -> Iterator[None]:
    """Turns torch's errors of a store that is gone into an OSError that says so."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"rank 0, where all ranks met, does not answer: {error}") from error

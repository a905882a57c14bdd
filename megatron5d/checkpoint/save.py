"""Saves a run: every rank writes its rectangles, then one rename makes the checkpoint exist."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from megatron5d.checkpoint.folder import RUN_FILE, Keep, commit, set_aside_later, step_folder
from megatron5d.checkpoint.layout import HostCopies, ShardedTensors
from megatron5d.checkpoint.store_group import StoreGroup
from megatron5d.checkpoint.tensor_file import Save, write_rank_file
from megatron5d.topology.all_ranks import first_failure, first_failure_in, on_rank_0
from megatron5d.topology.lock_file import LockFile

if TYPE_CHECKING:
    from megatron5d.checkpoint.index_writer import IndexWriter

# How long a network file system may take to show a new file on other nodes. The checks have looked
# for the folder before it was made, and NFS may answer from its cache for a minute.
VISIBLE_S = 90.0
# first byte of a message whose rank has written its file; any other message is an error
_DONE = b"\0"


class Exporter(Protocol):
    """Writes a checkpoint in another form, by all ranks."""

    def begin(self, checkpoint: Path) -> None: ...

    def write(self, checkpoint: Path, rank: int, world: int) -> bytes: ...

    def finish(self, checkpoint: Path, messages: list[bytes]) -> None: ...

    def end(self) -> None: ...

    def is_interrupted(self, checkpoint: Path) -> bool: ...


class SaveFailed(OSError):
    """A checkpoint could not be written; those before it are complete."""


class Saver:
    """Writes checkpoints of one run, at once or in the background.

    Args:
        keep: which ones are kept; a number keeps that many of the newest, 0 = all.
        background: `save` returns as soon as the tensors are copied, and a thread writes the files.
        timeout_s: seconds after which a save fails because a rank has not written its file.
        lock: of the directory, on rank 0; None where no other run can be writing there.
        pinned: a checkpoint that is kept whatever `keep` says: the one that the command line names.
        start_step: the step at which the run starts. Checkpoints of later steps are another run's,
            or of this one before it went back: the first save renames them, so that it neither
            replaces nor counts them.
        exporter: also writes checkpoints in another form, where `save` requests it.

    Raises:
        OSError: on every rank, if the directory cannot be written, or a rank sees another one under
            its name. This is known when the run starts, not at its first save hours later.

    Comm:
        A broadcast of a name over the world, and that of `first_failure`.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: Keep | int,
        background: bool = False,
        timeout_s: float = 1800.0,
        lock: LockFile | None = None,
        pinned: Path | None = None,
        start_step: int | None = None,
        *,
        exporter: Exporter | None = None,
    ) -> None:
        self.directory, self.background, self._lock = Path(directory), background, lock
        self.keep = Keep(last=keep) if isinstance(keep, int) else keep
        self._pinned, self._start_step, self._exporter = pinned, start_step, exporter
        self._id, self._num_saves = _check_shared(self.directory), 0
        self._group = StoreGroup(timeout_s)
        self._index: IndexWriter | None = None
        if self._group.rank == 0:
            # imported when the run starts, where an error costs least
            from megatron5d.checkpoint.index_writer import IndexWriter

            self._index = IndexWriter()
        self._copies = HostCopies()
        self._last_message = b""  # of this rank, at its last save that succeeded
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: ShardedTensors,
        run: dict[str, Any],
        export: bool = False,
    ) -> None:
        """Saves one step.

        Args:
            run: content of run.json, the same on every rank.
            export: also write the checkpoint in the exporter's form.

        Raises:
            SaveFailed: on every rank, if a rank could not write its files.
            OSError: on every rank, if another run has taken over the directory.
                Either error of a save in the background is raised by the next `save` or `wait`.

        Comm:
            The store (checkpoint/store_group.py): a message of each rank, and three answers of
            rank 0.
        """
        self.wait()
        if not self.background:
            self._write(step, tensors, run, export)
            return
        copies = self._copies.copy(tensors)
        arguments = (step, copies, run, export)
        self._thread = threading.Thread(target=self._write_and_keep_error, args=arguments)
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

    def _write_and_keep_error(self, *args) -> None:
        try:
            self._write(*args)
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error

    def _write(self, step: int, tensors: ShardedTensors, run: dict[str, Any], export: bool) -> None:
        temporary = step_folder(self.directory, step).with_suffix(".tmp")
        group = self._group
        self._num_saves += 1  # as on every other rank
        save = Save(f"{self._id}-{self._num_saves}", step)
        group.on_rank_0(self._lock.check if self._lock else lambda: None)
        last_message, self._last_message = self._last_message, b""
        message = b""

        def write_own() -> bytes:
            nonlocal message
            message = write_rank_file(temporary, tensors, group.rank, save)
            return b"" if message == last_message else message

        try:
            self._on_all_ranks(
                lambda: self._begin(temporary, run),
                write_own,
                lambda messages: self._finish(temporary, messages, save),
            )
        except OSError as error:
            if group.rank == 0:
                # the unfinished files may be what fills the disk
                shutil.rmtree(temporary, ignore_errors=True)
            raise SaveFailed(
                f"the checkpoint of step {step} could not be written: {error}. {self._free_space()}"
            ) from error
        self._last_message = message
        if export and self._exporter is not None:
            self._export(step_folder(self.directory, step), self._exporter)

    def finish_export(self, step: int) -> None:
        """Exports the checkpoint of a step again if an earlier process was killed during it.

        Raises:
            SaveFailed: as `save`.

        Comm:
            A broadcast over the world; then as `save`.
        """
        exporter, checkpoint = self._exporter, step_folder(self.directory, step)
        if exporter and on_rank_0(lambda: exporter.is_interrupted(checkpoint)):
            self._export(checkpoint, exporter)

    def _export(self, checkpoint: Path, exporter: Exporter) -> None:
        """Writes a checkpoint in the exporter's form; raises as `save`."""
        try:
            self._on_all_ranks(
                lambda: exporter.begin(checkpoint),
                lambda: exporter.write(checkpoint, self._group.rank, self._group.world),
                lambda messages: exporter.finish(checkpoint, messages),
            )
        except OSError as error:
            raise SaveFailed(
                f"{checkpoint} could not be exported: {error}. {self._free_space()}"
            ) from error
        finally:
            exporter.end()

    def _on_all_ranks(
        self,
        begin: Callable[[], None],
        write_own: Callable[[], bytes],
        finish: Callable[[list[bytes]], None],
    ) -> None:
        """Begins on rank 0, writes on all ranks, and finishes on rank 0 with the messages that the
        ranks returned.

        Raises:
            OSError: on every rank, if one of them fails.

        Comm:
            The store; a message of each rank, and two answers of rank 0.
        """
        self._group.on_rank_0(begin)
        try:
            message = _DONE + write_own()
        except Exception as error:  # noqa: BLE001 - rank 0 raises it on all ranks
            message = f"{type(error).__name__}: {error}".encode()
        self._group.send(message)

        def finish_all() -> None:
            messages = self._group.receive_all()
            errors = [None if text.startswith(_DONE) else text.decode() for text in messages]
            if failed := first_failure_in(errors):
                raise OSError(str(failed))
            finish([message.removeprefix(_DONE) for message in messages])

        self._group.on_rank_0(finish_all)

    def _begin(self, temporary: Path, run: dict[str, Any]) -> None:
        """Makes the folder that all ranks write to, on rank 0."""
        if self._start_step is not None:
            set_aside_later(self.directory, self._start_step)
            self._start_step = None
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        (temporary / RUN_FILE).write_text(json.dumps(run, indent=1))

    def _finish(self, temporary: Path, messages: list[bytes], save: Save) -> None:
        """Writes the index and makes the folder a checkpoint, on rank 0."""
        assert self._index is not None
        self._index.write(temporary, messages, save)
        commit(temporary, self.keep, self._pinned)

    def _free_space(self) -> str:
        """For an error: how much space is free, and that older checkpoints are not affected."""
        folders = (self.directory, *self.directory.parents)
        folder = next((folder for folder in folders if folder.is_dir()), Path())
        return (
            f"{folder} has {shutil.disk_usage(folder).free / 1e9:.3f} GB left; earlier checkpoints "
            "are complete, and the same command continues from them"
        )


def _check_shared(directory: Path) -> str:
    """Makes the directory, and makes sure that every rank sees the files that rank 0 writes there.

    Otherwise each node would write to a different folder, and the one with the manifest, which
    lists only files of that folder, would look like a complete checkpoint.

    Returns:
        A unique text, the same on every rank.

    Raises:
        OSError: on every rank, if rank 0 cannot write there, or some ranks do not see its file.

    Comm:
        A broadcast of a name over the world, and that of `first_failure`.
    """
    probe = Path(on_rank_0(lambda: str(_make_probe(directory))))
    failed = first_failure(_invisible_reason(probe))
    if not dist.is_initialized() or dist.get_rank() == 0:
        with suppress(OSError):
            probe.unlink()
    if failed:
        raise OSError(
            f"rank {failed.rank} {failed.text}{failed.more}: checkpoint.dir must be on a file "
            "system that all nodes share, because all ranks write a checkpoint"
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


def _invisible_reason(probe: Path) -> str | None:
    """Why this rank does not see a file of rank 0 after `VISIBLE_S`; None where it does."""
    deadline = time.monotonic() + VISIBLE_S
    host = socket.gethostname()
    try:
        while not probe.exists():
            if time.monotonic() > deadline:
                return f"on {host} does not find in {probe.parent} what rank 0 writes there"
            time.sleep(0.1)
    except OSError as error:
        return f"on {host} cannot look for what rank 0 writes in {probe.parent}: {error}"
    return None

"""Writes the tensors of one rank to its file, and reads what a rank holds from the files of all;
reports damage."""

from __future__ import annotations

import gc
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron5d.checkpoint.folder import METADATA, TENSOR_SUFFIX, checkpoint_before, checksum_error
from megatron5d.checkpoint.index import INDEX, SavedTensor, read_index, read_pickled_index
from megatron5d.checkpoint.layout import ShardedTensor, overlap
from megatron5d.checkpoint.tensor_file import (
    HEADER_BYTES,
    About,
    DamagedFile,
    FileWriter,
    Part,
    Save,
    SavedItem,
    TensorFile,
)
from megatron5d.topology.all_ranks import first_failure, on_rank_0


class RankWriter(FileWriter):
    """Writes a rank's parts of tensors to its own file. No communication.

    No two ranks hold the same part (`writing` in train/state.py), so each rank's plan is final.
    Rank 0 checks in `IndexWriter.write` that all plans together make whole tensors.

    Args:
        rank: part of the file's name. A rank with nothing to write makes no file.
        save: what the file is part of, the same on every rank.
    """

    def __init__(self, folder: Path, rank: int, save: Save) -> None:
        self._name, self._rows = f"__{rank}_0{TENSOR_SUFFIX}", list[list[Any]]()
        super().__init__(folder / self._name, save)

    def add_tensor(self, key: str, tensor: ShardedTensor) -> None:
        """Writes the parts of a tensor that the rank holds; raises OSError."""
        for offset, view in tensor.shards.items():
            extent = tuple(view.shape)
            place = self.add(Part(key, offset, extent, view.dtype, tensor.values))
            whole = [key, str(view.dtype).removeprefix("torch."), list(tensor.shape)]
            self._rows.append([whole, [offset, extent, self._name, *place]])

    def told(self) -> bytes:
        """Ends the file; returns where each part lies, as compressed JSON for `IndexWriter.write`.
        Raises OSError."""
        self.finish()
        return zlib.compress(json.dumps(self._rows, separators=(",", ":")).encode(), 1)


def write_rank_file(
    folder: Path, tensors: dict[str, ShardedTensor], rank: int, save: Save
) -> bytes:
    """Writes the file of a rank; arguments as of `RankWriter`, returns as `told`. No communication.
    Raises OSError: the file cannot be written; names it."""
    with RankWriter(folder, rank, save) as file:
        for key, tensor in tensors.items():
            file.add_tensor(key, tensor)
        return file.told()


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Switches Python's garbage collector off: with a million objects that all stay alive it takes
    most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_tensors(reader: Reader, parts: Sequence[dict[str, ShardedTensor]]) -> None:
    """Fills the parts of tensors, all of which the checkpoint must hold.

    Args:
        parts: tensors by key. A key that is read into two tensors is in two of the dicts.

    Raises:
        ValueError: on every rank, if a file is damaged or cannot be read; names the first such
            rank, and the file.

    Comm: as `first_failure` unless the reader is alone.
    """
    fault = None
    try:
        reader.fill(parts)
    except (OSError, ValueError) as error:
        fault = str(error) or type(error).__name__
    if failed := first_failure(fault, alone=reader.alone):
        raise ValueError(f"a checkpoint cannot be read: {failed}. {reader.advice()}")


class _Request(NamedTuple):
    """A rectangle of an archive, and where its values go."""

    item: SavedItem
    key: str
    offset: tuple[int, ...]  # within the archive
    target: Tensor


class Reader:
    """Reads a checkpoint; checks what it reads, and reads the index only once.

    A file names the save that wrote it, which must be that of the index: an archive of another save
    is sound by itself. Damage in what is not read is not noticed.

    Args:
        alone: this process reads for itself; False = every rank of the world reads this checkpoint.
    """

    def __init__(self, folder: Path, *, alone: bool = True) -> None:
        self._folder, self.alone = folder, alone
        self._tensors: dict[str, SavedTensor] | None = None
        self._about = dict[str, About]()  # by name of the file
        self.save: Save | None = None  # which the index names, once it is read

    def tensors(self) -> dict[str, SavedTensor]:
        """Returns shape, dtype and places of every tensor, by key. Rank 0 reads the file once, for
        all ranks.

        Raises ValueError: on every rank, if the file cannot be read, its checksum is wrong, or it
        is no index.

        Comm: unless alone, a broadcast of the file over the world, once.
        """
        if self._tensors is None:
            told, _, content = (
                self._content() if self.alone else on_rank_0(self._content)
            ).partition(b"\n")
            name = told.decode()
            with gc_disabled():
                try:
                    if name == INDEX:
                        self.save, self._tensors = read_index(content)
                    else:
                        self._tensors = read_pickled_index(content)
                except ValueError as error:
                    raise ValueError(
                        f"{self._folder / name} is refused: {error}. {self.advice()}"
                    ) from error
        return self._tensors

    def _content(self) -> bytes:
        """Returns a line with the name of the index, ours or DCP's, and its content; raises as
        `tensors`."""
        name = INDEX if (self._folder / INDEX).exists() else METADATA
        try:
            fault = checksum_error(self._folder, name)
            if not fault:
                return name.encode() + b"\n" + (self._folder / name).read_bytes()
        except OSError as error:
            fault = f"{self._folder / name} cannot be read: {error}"
        raise ValueError(f"{fault}. {self.advice()}")

    def advice(self) -> str:
        """Finds, for the error of a damaged checkpoint, an older one that is whole."""
        try:
            earlier = checkpoint_before(self._folder)
        except OSError as error:
            return f"Whether there is a whole checkpoint before it cannot be told: {error}"
        if earlier is None:
            return "There is no whole checkpoint before it"
        return (
            f"The newest whole one before it: checkpoint.resume={earlier}; auto takes it once {self._folder.name} is "
            "moved away"
        )

    def fill(self, parts: Sequence[dict[str, ShardedTensor]]) -> None:
        """Reads parts of tensors, file by file in the order of their bytes. No communication.
        Raises OSError: a file cannot be read; names it. Raises ValueError: a file is damaged; names
        it."""
        wanted: dict[str, list[_Request]] = {}
        for tensors in parts:
            for key, tensor in tensors.items():
                for request in self._requests(key, tensor):
                    wanted.setdefault(request.item.file, []).append(request)
        for name, requests in wanted.items():
            path = self._folder / name
            try:
                with TensorFile(path, self._about.get(name)) as file:
                    self._check_save(file.about.save)
                    self._about[name] = file.about
                    for item, key, offset, target in sorted(
                        requests, key=lambda request: request.item.start
                    ):
                        file.fill(key, self.tensors()[key].dtype, item, offset, target)
            except DamagedFile as error:
                raise ValueError(f"{path} {error}") from error
            except OSError as error:
                raise OSError(f"{path}: {error}") from error
            except Exception as error:  # torch's own words, of a file that it wrote
                where = f"bytes {item.start} to {item.start + item.length}, part of {key}"
                raise ValueError(f"{path} cannot be read: {where}: {error}") from error

    def _requests(self, key: str, tensor: ShardedTensor) -> Iterator[_Request]:
        """Yields what to read for the parts of a tensor; raises ValueError where some are
        missing."""
        saved = self.tensors()[key]
        for offset, view in tensor.shards.items():
            same = saved.items.get(offset)
            if same is not None and same.extent == view.shape:  # as the same layout has saved it
                yield _Request(same, key, (0,) * view.dim(), view)
                continue
            found = 0
            for item in saved.items.values():
                if shared := overlap(offset, view.shape, item.offset, item.extent):
                    begin, end = shared
                    target = view[
                        tuple(slice(a - at, b - at) for a, b, at in zip(begin, end, offset))
                    ]
                    found += target.numel()
                    yield _Request(
                        item, key, tuple(a - at for a, at in zip(begin, item.offset)), target
                    )
            if found != view.numel():
                raise ValueError(
                    f"{self._folder} holds {found} of {view.numel()} elements of {key} at {offset}"
                )

    def _check_save(self, found: Save | None) -> None:
        """Makes sure that a file of tensors was written by the save that the index describes."""
        if found != self.save:
            of, rest = (
                str(save) if save else "a save of an earlier version" for save in (found, self.save)
            )
            raise DamagedFile(
                f"is of another checkpoint, or its first {HEADER_BYTES} bytes are damaged: it is of {of}, and "
                f"the folder of {rest}. Was the folder copied only in part? Copy all of it again"
            )

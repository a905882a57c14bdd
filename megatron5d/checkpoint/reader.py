"""Reads what a rank holds of a checkpoint from the files of all ranks, and reports damage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import METADATA, checkpoint_before, checksum_error
from megatron5d.checkpoint.index import (
    INDEX,
    SavedTensor,
    gc_disabled,
    read_index,
    read_pickled_index,
)
from megatron5d.checkpoint.layout import Dims, ShardedTensor, ShardedTensors, overlap, slices
from megatron5d.checkpoint.tensor_file import (
    HEADER_BYTES,
    DamagedFile,
    Header,
    Save,
    SavedItem,
    TensorFile,
)
from megatron5d.topology.all_ranks import first_failure, on_rank_0


class _Request(NamedTuple):
    """A rectangle of an archive, and where its values go."""

    item: SavedItem
    key: str
    offset: Dims  # within the archive
    target: Tensor


class Reader:
    """Reads a checkpoint, checks what it reads, and reads the index only once.

    Each file names the save that wrote it, which must be that of the index, because an archive of
    another save is intact by itself. Damage in bytes that are not read is not noticed.

    Args:
        local_only: this process reads for itself; False = every rank of the world reads this
            checkpoint.
    """

    def __init__(self, folder: Path, *, local_only: bool = True) -> None:
        self._folder, self.local_only = folder, local_only
        self._tensors: dict[str, SavedTensor] | None = None
        self._headers = dict[str, Header]()  # by name of the file
        self.save: Save | None = None  # of the index, once it is read

    def tensors(self) -> dict[str, SavedTensor]:
        """Shape, dtype and items of every tensor, by key; rank 0 reads the index for all ranks.

        Raises:
            ValueError: on every rank, if the file cannot be read, its checksum is wrong, or it is
                no index.

        Comm:
            With several ranks, a broadcast of the file over the world, once.
        """
        if self._tensors is None:
            message = self._index_content() if self.local_only else on_rank_0(self._index_content)
            first_line, _, content = message.partition(b"\n")
            name = first_line.decode()
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

    def _index_content(self) -> bytes:
        """A line with the name of the index, ours or DCP's, then its content; raises as
        `tensors`."""
        name = INDEX if (self._folder / INDEX).exists() else METADATA
        try:
            error = checksum_error(self._folder, name)
            if not error:
                return name.encode() + b"\n" + (self._folder / name).read_bytes()
        except OSError as failure:
            error = f"{self._folder / name} cannot be read: {failure}"
        raise ValueError(f"{error}. {self.advice()}")

    def advice(self) -> str:
        """For the message about a damaged checkpoint: an older one that is complete."""
        try:
            earlier = checkpoint_before(self._folder)
        except OSError as error:
            return f"The folder cannot be searched for an earlier checkpoint: {error}"
        if earlier is None:
            return "There is no complete checkpoint before it"
        return (
            f"The newest complete one before it: checkpoint.resume={earlier}; auto takes it once "
            f"{self._folder.name} is moved away"
        )

    def fill(self, groups: Sequence[ShardedTensors]) -> None:
        """Fills the shards of tensors, all of which the checkpoint must hold.

        Args:
            groups: tensors by key. A key that is read into two tensors is in two of the dicts.

        Raises:
            ValueError: on every rank, if a file is damaged or cannot be read; names the first such
                rank, and the file.

        Comm:
            With several ranks, that of `first_failure`.
        """
        message = None
        try:
            self._fill(groups)
        except (OSError, ValueError) as error:
            message = str(error) or type(error).__name__
        if failed := first_failure(message, local_only=self.local_only):
            raise ValueError(f"a checkpoint cannot be read: {failed}. {self.advice()}")

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset` of a global tensor, in the dtype in which it
        is saved; raises as `fill`."""
        saved = self.tensors()[key]
        values = torch.empty(tuple(shape), dtype=saved.dtype)
        self.fill([{key: ShardedTensor(saved.size, [(tuple(offset), values)], saved.dtype)}])
        return values

    def _fill(self, groups: Sequence[ShardedTensors]) -> None:
        """Fills shards file by file, in the order of their bytes.

        Raises:
            OSError: a file cannot be read; names it.
            ValueError: a file is damaged; names it.
        """
        requests: dict[str, list[_Request]] = {}  # by file
        for tensors in groups:
            for key, tensor in tensors.items():
                for request in self._requests(key, tensor):
                    requests.setdefault(request.item.file, []).append(request)
        for name, of_file in requests.items():
            path = self._folder / name
            try:
                with TensorFile(path, self._headers.get(name)) as file:
                    self._check_save(file.header.save)
                    self._headers[name] = file.header
                    for item, key, offset, target in sorted(of_file, key=lambda r: r.item.start):
                        file.fill(key, self.tensors()[key].dtype, item, offset, target)
            except DamagedFile as error:
                raise ValueError(f"{path} {error}") from error
            except OSError as error:
                raise OSError(f"{path}: {error}") from error
            except Exception as error:  # torch's, about an archive that torch.save wrote
                byte_range = f"bytes {item.start} to {item.start + item.length}, shard of {key}"
                raise ValueError(f"{path} cannot be read: {byte_range}: {error}") from error

    def _requests(self, key: str, tensor: ShardedTensor) -> Iterator[_Request]:
        """Yields what to read for the shards of a tensor; raises ValueError if some elements are
        missing."""
        saved = self.tensors()[key]
        for offset, view in tensor.shards.items():
            same = saved.items.get(offset)
            if same is not None and same.extent == view.shape:  # saved by the same layout
                yield _Request(same, key, (0,) * view.dim(), view)
                continue
            covered = 0
            for item in saved.items.values():
                if shared := overlap(offset, view.shape, item.offset, item.extent):
                    in_view, in_item, extent = shared
                    target = view[slices(in_view, extent)]
                    covered += target.numel()
                    yield _Request(item, key, in_item, target)
            if covered != view.numel():
                raise ValueError(
                    f"{self._folder} holds {covered} of {view.numel()} elements of {key} at "
                    f"{offset}"
                )

    def _check_save(self, save: Save | None) -> None:
        """Makes sure that a file of tensors was written by the save that the index describes."""
        if save != self.save:
            of_file, of_folder = (
                str(s or "a save of an earlier version") for s in (save, self.save)
            )
            raise DamagedFile(
                f"is of another checkpoint, or its first {HEADER_BYTES} bytes are damaged: it is "
                f"of {of_file}, and the folder of {of_folder}. If the folder was copied only in "
                "part, copy all of it again"
            )

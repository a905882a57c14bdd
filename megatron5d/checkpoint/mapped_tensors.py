"""The tensors of a whole checkpoint mapped into memory, for tools that read slices of it, check it or compare it.

A rectangle is read without the rest of the items that it lies in, so their checksums are not compared; `check_file`
does that for all items of a file.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron5d.checkpoint.folder import MANIFEST, TENSORS, changed, read_manifest
from megatron5d.checkpoint.storage import Reader
from megatron5d.checkpoint.tensor_file import HEADER_BYTES, Save, Window, check_item, header, save_of

Offset = tuple[int, ...]
VALUES = "data/0"  # the record of an archive that holds them
_STORAGES = {  # as pickles of torch name dtypes
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
}


def open_checkpoint(folder: Path) -> MappedTensors:
    """The tensors of a whole checkpoint.

    Raises:
        ValueError: its index is damaged; names the file.
    """
    reader = Reader(folder)
    metadata = reader.read_metadata()
    return MappedTensors(folder, reader.save, metadata)


class MappedTensors:
    """Tensors in the files of a folder, read a rectangle at a time.

    Args:
        folder: with the files of tensors.
        save: which they are part of; None = a save of an earlier version.
        metadata: which tensors there are, and where.
    """

    def __init__(self, folder: Path, save: Save | None, metadata: Metadata) -> None:
        self.folder, self.save = folder, save
        entries = metadata.state_dict_metadata.items()
        self.entries = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self._places = metadata.storage_data
        self._files: dict[str, tuple[io.BufferedReader, mmap.mmap]] = {}
        self._items: dict[MetadataIndex, Tensor] = {}

    def files(self) -> dict[str, list[tuple[str, Offset, Offset]]]:
        """By file of tensors, in the order of its bytes: key, offset and shape of each item."""
        found: defaultdict[str, list] = defaultdict(list)
        for key, entry in self.entries.items():
            for chunk in entry.chunks:
                place = self._places[MetadataIndex(key, chunk.offsets)]
                found[place.relative_path].append((place.offset, (key, tuple(chunk.offsets), tuple(chunk.sizes))))
        return {name: [item for _, item in sorted(items)] for name, items in sorted(found.items())}

    def item(self, key: str, offset: Offset) -> Tensor:
        """An item of a file as it lies there: a view that is not to be written to.

        Raises:
            OSError: its file cannot be opened.
            ValueError: its file is damaged; names it.
        """
        index = MetadataIndex(key, torch.Size(offset))
        if index not in self._items:
            place, entry = self._places[index], self.entries[key]
            shape = next(chunk.sizes for chunk in entry.chunks if tuple(chunk.offsets) == offset)
            file, mapped = self._open(place.relative_path)
            try:
                self._items[index] = _view(Window(file, place.offset, place.length), mapped, place.offset)
            except Exception as error:  # a damaged archive may raise anything
                raise ValueError(f"{self.folder / place.relative_path} is damaged: {key} at {list(offset)}") from error
            found = self._items[index]
            if (found.shape, found.dtype) != (shape, entry.properties.dtype):
                raise ValueError(
                    f"{self.folder / place.relative_path} holds {key} at {list(offset)} as {found.dtype} "
                    f"{list(found.shape)}, and the index says {entry.properties.dtype} {list(shape)}"
                )
        return self._items[index]

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset` of a global tensor, in the dtype in which it is saved.

        Returns:
            A view of the file where the rectangle is one item, else a copy. It is not to be written to.

        Raises:
            ValueError: a file is damaged, or the items do not fill the rectangle.
        """
        entry, values, filled = self.entries[key], None, 0
        for chunk in entry.chunks:
            first = [max(a, b) for a, b in zip(offset, chunk.offsets)]
            last = [min(a + m, b + n) for a, m, b, n in zip(offset, shape, chunk.offsets, chunk.sizes)]
            if any(a >= b for a, b in zip(first, last)):
                continue
            item = self.item(key, tuple(chunk.offsets))
            if (tuple(chunk.offsets), tuple(chunk.sizes)) == (tuple(offset), tuple(shape)):
                return item
            values = torch.empty(tuple(shape), dtype=entry.properties.dtype) if values is None else values
            here, there = (
                [slice(a - c, b - c) for a, b, c in zip(first, last, start)] for start in (offset, chunk.offsets)
            )
            values[tuple(here)] = item[tuple(there)]
            filled += prod(b - a for a, b in zip(first, last))
        if values is None or filled != prod(shape):
            raise ValueError(
                f"{self.folder}: no file holds all of {key} from {list(offset)} on, {list(shape)} elements"
            )
        return values

    def check_file(self, name: str, items: Sequence[tuple[str, Offset, Offset]], finite: bool = True) -> str | None:
        """A message if a file of tensors is not what was saved, or a value in it is not finite; None if it is sound.

        Args:
            name: of the file.
            items: of it, as in `files`.
            finite: look for values that are not finite.
        """
        try:
            file, mapped = self._open(name)
            if save_of(mapped[:HEADER_BYTES]) != self.save:
                return f"{self.folder / name} is of another checkpoint, or its first {HEADER_BYTES} bytes are damaged"
            if self.save is not None and mapped[:HEADER_BYTES] != header(self.save):
                return f"{self.folder / name} is damaged: its first {HEADER_BYTES} bytes"
            for key, offset, _ in items:
                place, values = self._places[MetadataIndex(key, torch.Size(offset))], self.item(key, offset)
                try:
                    check_item(Window(file, place.offset, place.length), values)
                except Exception:  # as above
                    return f"{self.folder / name} is damaged: {key} at {list(offset)} is not what was saved (checksum)"
                if finite and values.is_floating_point() and not bool(values.isfinite().all()):
                    return (
                        f"{self.folder / name} holds a value of {key} that is not finite, in the part at {list(offset)}"
                    )
        except (ValueError, OSError) as error:
            return str(error)
        return None

    def faults_outside(self) -> list[str]:
        """What is wrong besides the files of tensors: other files that changed or do not belong here, missing parts."""
        manifest, held = read_manifest(self.folder), set(self.files())
        there = {path.name for path in self.folder.iterdir()}
        faults = [f"{self.folder / name} is not a file of this checkpoint" for name in there - {*manifest, MANIFEST}]
        faults += [fault for name in manifest if not name.endswith(TENSORS) and (fault := changed(self.folder, name))]
        faults += [
            f"{self.folder / name} is not in the index"
            for name in manifest
            if name.endswith(TENSORS) and name not in held
        ]
        for key, entry in self.entries.items():
            if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
                faults.append(f"{self.folder}: the parts of {key} are not {list(entry.size)} elements together")
        return sorted(faults)

    def _open(self, name: str) -> tuple[io.BufferedReader, mmap.mmap]:
        """A file of tensors, open and mapped; nothing that is changed in memory reaches it."""
        if name not in self._files:
            file = (self.folder / name).open("rb")
            try:
                self._files[name] = file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError as error:
                raise ValueError(f"{self.folder / name} is empty") from error
        return self._files[name]


def _view(window: Window, mapped: mmap.mmap, start: int) -> Tensor:
    """The tensor of an archive of torch.save, in the mapped memory of its file. Nothing that it names is called.

    Raises:
        ValueError, RuntimeError: torch.load would not read the archive.
    """
    archive: Any = torch._C.PyTorchFileReader(cast(IO[bytes], window))
    records = {name: archive.get_record(name) for name in archive.get_all_records() if name != VALUES}
    dtype, offset, shape, stride = _Described(io.BytesIO(records["data.pkl"])).load()
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    first = _name_and_content(mapped, start)[0]
    name, values = _name_and_content(mapped, start + archive.get_record_header_offset(VALUES))
    if name != first.replace(b"data.pkl", VALUES.encode()) or values != start + archive.get_record_offset(VALUES):
        raise ValueError("the header of the values is damaged")
    count = archive.get_record_size(VALUES) // dtype.itemsize
    flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=values)
    return flat.as_strided(shape, stride, offset)


def _name_and_content(mapped: mmap.mmap, header: int) -> tuple[bytes, int]:
    """The name of a record of a zip archive, and where its content begins, by the record's own header."""
    name, padding = struct.unpack("<HH", mapped[header + 26 : header + 30])
    if mapped[header : header + 4] != b"PK\3\4":
        raise ValueError("the header of a record is damaged")
    return mapped[header + 30 : header + 30 + name], header + 30 + name + padding


class _Described(pickle.Unpickler):
    """Unpickles what torch.save says of one tensor: its dtype, its first element in the storage, shape and stride."""

    def find_class(self, module: str, name: str) -> Any:
        """Stands for the names that belong to a tensor.

        Raises:
            ValueError: another name.
        """
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda dtype, offset, shape, stride, *rest: (dtype, offset, shape, stride)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise ValueError(f"{module}.{name} is no part of a tensor")

    def persistent_load(self, pid: Any) -> torch.dtype:
        """The dtype of the storage that is named."""
        return pid[1]

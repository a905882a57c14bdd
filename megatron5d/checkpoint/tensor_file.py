"""A file of tensors: the save that wrote it, an archive of torch.save for each shard, and their
checksums.

torch.load reads each archive, and so does torch.distributed.checkpoint (DCP). Archives are built
here rather than by torch.save, which copies the values twice. The checksum of a block is computed
while the block is in the processor's cache, before it is written and after it is read, so no byte
is read twice. It is the CRC-32 of an archive's values up to the end of the block: the last one is
that of the archive, and a block can be checked without reading those before it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from struct import pack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import TENSOR_SUFFIX
from megatron5d.checkpoint.layout import Dims, ShardedTensor, ShardedTensors, slices
from megatron5d.config.json_file import parse_json

try:
    from isal.isal_zlib import crc32
except ImportError:  # isal has no wheel here: zlib computes the same at a fifth of the speed
    from zlib import crc32

HEADER_BYTES = 256  # at the start of the file: JSON, then spaces
# bytes of one read or write, which have one checksum; a multiple of every element's size
BLOCK = 1 << 19
_FORMAT = 2  # 1: without a table of checksums


class SavedItem(NamedTuple):
    """A rectangle of a saved tensor: its place in the tensor, and its archive's place in a file."""

    offset: Dims
    extent: Dims
    file: str
    start: int  # byte
    length: int  # bytes


class Save(NamedTuple):
    """One save of a run, which each of its files names."""

    id: str  # unique to the save
    step: int

    def __str__(self) -> str:
        return f"step {self.step}, save {self.id}"


def _header(save: Save, *table: int) -> bytes:
    """The first bytes of a file; `table`: first byte, length and CRC-32 of the table of
    checksums."""
    text = json.dumps({"megatron5d": _FORMAT, "save": save.id, "step": save.step, "table": table})
    return text.encode().ljust(HEADER_BYTES - 1) + b"\n"


class RankWriter:
    """Writes a rank's shards to its own file. A context manager, which closes it.

    No two ranks hold the same shard (`writing` in train/state.py), so each rank's plan is final.
    `IndexWriter.write` checks on rank 0 that all plans together make complete tensors.

    Args:
        rank: part of the file's name. A rank with nothing to write makes no file.
        save: that the file belongs to, the same on every rank.

    Raises:
        OSError: from every method, if the file cannot be written; names it.
    """

    def __init__(self, folder: Path, rank: int, save: Save) -> None:
        self._path, self._save = folder / f"__{rank}_0{TENSOR_SUFFIX}", save
        self._file = -1
        self._position = HEADER_BYTES
        self._table: list[list[Any]] = []  # of checksums, by archive
        self._index: list[list[Any]] = []

    def __enter__(self) -> RankWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def add(self, key: str, tensor: ShardedTensor) -> None:
        """Writes the shards of a tensor."""
        for offset, view in tensor.shards.items():
            extent, dtype = tuple(view.shape), view.dtype
            archive = self._add_archive(key, offset, extent, dtype, tensor.values(offset))
            of_tensor = [key, str(dtype).removeprefix("torch."), list(tensor.shape)]
            self._index.append([of_tensor, [offset, extent, self._path.name, *archive]])

    def _add_archive(
        self,
        key: str,
        offset: Dims,
        extent: Dims,
        dtype: torch.dtype,
        values: Tensor,
    ) -> tuple[int, int]:
        """Writes a shard; returns first byte and length of its archive."""
        start, content, pickled = self._position, as_bytes(values), _pickled(dtype, extent)
        data = start + len(_archive_around(pickled, len(content), 0)[0])
        with self._file_named():
            if self._file < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                self._file = os.open(self._path, flags, 0o666)
            checksums = write_blocks(self._file, content, data)
            checksum = checksums[-1] if checksums else 0
            before, after = _archive_around(pickled, len(content), checksum)
            _write_at(self._file, before, start)
            _write_at(self._file, after, data + len(content))
        self._table.append([key, offset, start, data, len(content), checksums])
        self._position = data + len(content) + len(after)
        return start, self._position - start

    def finish(self) -> bytes:
        """Writes the table of checksums and the header, and waits until all is on disk.

        Returns:
            Where each shard lies, as compressed JSON for `IndexWriter.write`.
        """
        if self._file >= 0:
            content = memoryview(json.dumps(self._table, separators=(",", ":")).encode())
            header = _header(self._save, self._position, len(content), crc32(content))
            with self._file_named():
                _write_at(self._file, content, self._position)
                _write_at(self._file, header, 0)
                os.fsync(self._file)
        return zlib.compress(json.dumps(self._index, separators=(",", ":")).encode(), 1)

    @contextmanager
    def _file_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.filename:
                raise
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def write_rank_file(folder: Path, tensors: ShardedTensors, rank: int, save: Save) -> bytes:
    """Writes the file of a rank; arguments and errors as of `RankWriter`, returns as its
    `finish`."""
    with RankWriter(folder, rank, save) as file:
        for key, tensor in tensors.items():
            file.add(key, tensor)
        return file.finish()


def as_bytes(values: Tensor) -> memoryview:
    """Memory of a tensor; of a copy only where it is not contiguous on the CPU."""
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def write_blocks(file: int, content: memoryview, position: int) -> list[int]:
    """Writes bytes at a position of an open file; returns the CRC-32 of all bytes up to the end of
    each block."""
    checksums, running = [], 0
    for start in range(0, len(content), BLOCK):
        block = content[start : start + BLOCK]
        running = crc32(block, running)
        _write_at(file, block, position + start)
        checksums.append(running)
    return checksums


def _write_at(file: int, content: memoryview | bytes, position: int) -> None:
    written = 0
    # a disk that is almost full writes a part, and raises at the rest
    while written < len(content):
        written += os.pwrite(file, content[written:] if written else content, position + written)


class _Rebuilt:
    """Pickled as torch pickles a contiguous tensor that fills its storage."""

    def __init__(self, dtype: torch.dtype, shape: Dims) -> None:
        self.dtype, self.shape = dtype, shape
        self.num_bytes = torch.Size(shape).numel() * dtype.itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        strides = _strides(self.shape)
        return torch._utils._rebuild_tensor_v3, (
            *(_Storage(self.num_bytes), 0, self.shape, strides, False, OrderedDict(), self.dtype),
        )


class _Storage(NamedTuple):
    num_bytes: int


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        return ("storage", torch.UntypedStorage, "0", "cpu", obj.num_bytes)


def _strides(shape: Sequence[int]) -> Dims:
    """Strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


@lru_cache(1024)
def _pickled(dtype: torch.dtype, shape: Dims) -> bytes:
    """What torch.save writes about a tensor, without its values."""
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(_Rebuilt(dtype, shape))
    return file.getvalue()


def _archive_around(pickled: bytes, num_bytes: int, checksum: int) -> tuple[bytes, bytes]:
    """What lies before and after the values in an archive of torch.save: an uncompressed zip64."""
    small = [("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")]
    records = [
        (f"archive/{name}".encode(), len(content), zlib.crc32(content), content)
        for name, content in small
    ]
    records.append((b"archive/data/0", num_bytes, checksum, b""))

    # a local header for each record, and its copy in the central directory
    before, directory, in_zip64 = b"", b"", 0xFFFFFFFF
    for name, size, crc, content in records:
        # version, flags, method, time, date (1 January 1980), CRC-32, sizes
        common = pack("<5HI2I", 45, 0, 0, 0, 33, crc, in_zip64, in_zip64)
        extra = pack("<2H3Q", 1, 24, size, size, len(before))
        lengths = pack("<5H2I", len(name), len(extra), 0, 0, 0, 0, in_zip64)
        directory += b"PK\1\2" + pack("<H", 45) + common + lengths + name + extra
        before += b"PK\3\4" + common + pack("<2H", len(name), 20) + name
        before += pack("<2H2Q", 1, 16, size, size) + content

    # end of the central directory, in zip64's form and in the old one
    start, count, length = len(before) + num_bytes, len(records), len(directory)
    end = b"PK\6\6" + pack("<Q2H2I4Q", 44, 45, 45, 0, 0, count, count, length, start)
    end += b"PK\6\7" + pack("<IQI", 0, start + length, 1)
    end += b"PK\5\6" + pack("<4H2IH", 0, 0, count, count, length, in_zip64, 0)
    return before, directory + end


class DamagedFile(ValueError):
    """A file is not what was saved."""


@dataclass
class Header:
    """What a file of tensors says about itself."""

    # that wrote it; None where the file does not say, as DCP's and those of early versions
    save: Save | None = None
    table_place: list[int] | None = None  # first byte, length and CRC-32 of the table of checksums
    table: dict[int, list[Any]] | None = None  # by first byte of the archive; read when needed


class TensorFile:
    """A file of tensors, open for reading. A context manager, which closes it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, header: Header | None = None) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.header = header or Header()
        # first byte and values of the last archive that was read from a file without a table
        self._last_archive: tuple[int, Tensor] | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        try:
            if header is None:
                record = parse_json(bytes(self._read(0, HEADER_BYTES)))
                save = Save(str(record["save"]), int(record["step"]))
                self.header = Header(save, record.get("table"))
        except (ValueError, KeyError, TypeError):
            pass

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def fill(
        self, key: str, dtype: torch.dtype, item: SavedItem, offset: Sequence[int], target: Tensor
    ) -> None:
        """Reads the rectangle at `offset` of an archive into a tensor of its shape, and no block
        beyond.

        Args:
            key: of the tensor that the archive belongs to.
            dtype: in which it is saved.
            item: the archive.
            offset: first index within the archive.
            target: any dtype, device and strides.

        Raises:
            DamagedFile: the bytes are not those that were saved.
            OSError: the file cannot be read.
        """
        try:
            if self.header.table_place is None:
                self._fill_from_torch(item, offset, target)
            else:
                row = self._row(key, item)
                if not self._fill(row, dtype, item.extent, offset, target.detach()):
                    raise DamagedFile
        except DamagedFile:
            byte_range = f"bytes {item.start} to {item.start + item.length}, shard of {key}"
            raise DamagedFile(
                f"is damaged: {byte_range}, are not what was saved (CRC-32)"
            ) from None

    def check_around(self, key: str, dtype: torch.dtype, item: SavedItem) -> None:
        """Checks every byte of the file's header and of an archive except its values, which `fill`
        checks.

        Args:
            key, dtype, item: as in `fill`.

        Raises:
            DamagedFile: they are not those that were saved.
        """
        if self.header.table_place is None:
            return  # `fill` has checked the archive
        *_, data, num_bytes, checksums = self._row(key, item)
        pickled = _pickled(dtype, item.extent)
        before, after = _archive_around(pickled, num_bytes, checksums[-1] if checksums else 0)
        around = self._read(item.start, len(before)) + self._read(data + num_bytes, len(after))
        assert self.header.save is not None
        header = _header(self.header.save, *self.header.table_place)
        if around != before + after or self._read(0, HEADER_BYTES) != header:
            raise DamagedFile(
                f"is damaged: its header, or the archive of {key} from byte {item.start} on"
            )

    def _row(self, key: str, item: SavedItem) -> list[Any]:
        """An archive's row of the table: key, offset, first byte, first byte and number of bytes of
        the values, checksums."""
        if self.header.table is None:
            start, length, checksum = self.header.table_place or (0, 0, 0)
            content = self._read(start, length)
            if crc32(content) != checksum:
                raise DamagedFile
            self.header.table = {row[2]: row for row in parse_json(bytes(content), list)}
        row = self.header.table.get(item.start)
        if row is None or (row[0], tuple(row[1])) != (key, item.offset):
            raise DamagedFile
        return row

    def _fill(
        self,
        row: list[Any],
        dtype: torch.dtype,
        extent: Sequence[int],
        offset: Sequence[int],
        target: Tensor,
    ) -> bool:
        """`fill` for a file with a table; False where the file is damaged."""
        *_, data, num_bytes, checksums = row
        strides, itemsize = _strides(extent), dtype.itemsize
        if num_bytes != prod(extent) * itemsize:
            return False
        direct = target.is_cpu and target.dtype == dtype and target.is_contiguous()
        if direct and target.nbytes == num_bytes:
            return self._read_blocks(data, 0, checksums, as_bytes(target))

        # read all blocks from the rectangle's first element to its last, then pick its elements
        first = sum(index * stride for index, stride in zip(offset, strides))
        last = first + sum((size - 1) * stride for size, stride in zip(target.shape, strides))
        begin = first * itemsize // BLOCK * BLOCK
        end = min(num_bytes, -(-(last + 1) * itemsize // BLOCK) * BLOCK)
        if self._scratch.numel() < end - begin:
            self._scratch = torch.empty(end - begin, dtype=torch.uint8)
        scratch = self._scratch[: end - begin]
        intact = self._read_blocks(data, begin, checksums, as_bytes(scratch))
        start = first - begin // itemsize
        target.copy_(scratch.view(dtype).as_strided(target.shape, strides, start))
        return intact

    def _read_blocks(
        self, data: int, begin: int, checksums: Sequence[int], target: memoryview
    ) -> bool:
        """Reads complete blocks of values, starting `begin` bytes after `data`; False where one is
        damaged."""
        number = begin // BLOCK
        running = checksums[number - 1] if number else 0
        for start in range(0, len(target), BLOCK):
            block = target[start : start + BLOCK]
            self._read_into(block, data + begin + start)
            running = crc32(block, running)
            if running != checksums[number]:
                return False
            number += 1
        return True

    def _fill_from_torch(self, item: SavedItem, offset: Sequence[int], target: Tensor) -> None:
        """`fill` for a file whose archives torch.save wrote: checks their own checksums."""
        if self._last_archive is None or self._last_archive[0] != item.start:
            content = self._read(item.start, item.length)
            try:
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    intact = archive.testzip() is None
            except Exception:  # a damaged directory may raise anything
                intact = False
            if not intact:
                raise DamagedFile
            values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            self._last_archive = item.start, values
        values = self._last_archive[1]
        if values.shape != item.extent:
            raise ValueError(f"its shape is {tuple(values.shape)}, in the index {item.extent}")
        target.copy_(values[slices(offset, target.shape)])

    def _read(self, position: int, length: int) -> bytearray:
        content = bytearray(length)
        return content[: self._read_into(memoryview(content), position)]

    def _read_into(self, target: memoryview, position: int) -> int:
        total = 0
        while total < len(target):
            count = os.preadv(self._file, [target[total:]], position + total)
            if not count:
                break
            total += count
        return total

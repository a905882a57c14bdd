"""A file of tensors: the save that wrote it, an archive of torch.save for each part of a tensor,
and their checksums.

Each archive is one that torch.load reads, so that torch.distributed.checkpoint (DCP) does, too. It
is written here rather than by torch.save, which copies the values twice. The checksum of every
block is computed while the block is in the processor's cache, before it is written and after it is
read: no byte is read twice. Checksums are CRC-32 over all bytes of the archive's values up to the
end of the block, so that the last one is that of the archive, and a block can be checked without
those before it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from struct import pack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron5d.config.json_file import parse_json

try:
    from isal.isal_zlib import crc32
except ImportError:  # where it has no wheel: the same checksum at a fifth of the speed
    from zlib import crc32

HEADER_BYTES = 256  # at the start of the file: JSON, then spaces
# bytes that are read or written at once, and have a checksum; a multiple of every element's size
BLOCK = 1 << 19
_FORMAT = 2  # 1: without a table of checksums


class SavedItem(NamedTuple):
    """A rectangle of a saved tensor: its place in the tensor, and the place of its archive in a
    file."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    file: str
    start: int  # byte
    length: int  # bytes


class Save(NamedTuple):
    """One save of a run; each of its files says so."""

    id: str  # unique to the save
    step: int

    def __str__(self) -> str:
        return f"step {self.step}, save {self.id}"


class Part(NamedTuple):
    """A part of a tensor to be written."""

    key: str
    offset: tuple[int, ...]  # first index in the global tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Callable[[tuple[int, ...]], Tensor]  # returns the part at an offset, when it is written


def _header(save: Save, *table: int) -> bytes:
    """Returns the first bytes of a file; `table`: first byte, length and CRC-32 of the table of
    checksums."""
    text = json.dumps({"megatron5d": _FORMAT, "save": save.id, "step": save.step, "table": table})
    return text.encode().ljust(HEADER_BYTES - 1) + b"\n"


W = TypeVar("W", bound="FileWriter")


class FileWriter:
    """Writes a file of tensors part by part; a context manager, which closes it.

    Args:
        path: of the file. It is made with the first part.

    Raises:
        OSError: from every method, if it cannot be written; names the file.
    """

    def __init__(self, path: Path, save: Save) -> None:
        self._path, self._save, self._file = path, save, -1
        self._table: list[list[Any]] = []
        self._at = HEADER_BYTES

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def add(self, part: Part) -> tuple[int, int]:
        """Writes a part; returns first byte and length of its archive."""
        start, content = self._at, as_bytes(part.values(part.offset))
        pickled = _pickled(part.dtype, part.shape)
        data = start + len(_archive(pickled, len(content), 0)[0])
        with self._named():
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            checksums = write_blocks(self._file, content, data)
            before, after = _archive(pickled, len(content), checksums[-1] if checksums else 0)
            _write_at(self._file, before, start)
            _write_at(self._file, after, data + len(content))
        self._table.append([part.key, part.offset, start, data, len(content), checksums])
        self._at = data + len(content) + len(after)
        return start, self._at - start

    def finish(self) -> None:
        """Writes the table of checksums and the header, and waits until all is on disk."""
        content = memoryview(json.dumps(self._table, separators=(",", ":")).encode())
        if self._file >= 0:
            with self._named():
                _write_at(self._file, content, self._at)
                _write_at(
                    self._file, _header(self._save, self._at, len(content), crc32(content)), 0
                )
                os.fsync(self._file)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise (
                error if error.filename else OSError(error.errno, error.strerror, str(self._path))
            ) from error


def as_bytes(values: Tensor) -> memoryview:
    """Returns the memory of a tensor, of which a copy is made only where it is not contiguous on
    the CPU."""
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def write_blocks(file: int, content: memoryview, at: int) -> list[int]:
    """Writes bytes at a place of an open file; returns the CRC-32 of all bytes up to the end of
    each block."""
    checksums, running = [], 0
    for start in range(0, len(content), BLOCK):
        block = content[start : start + BLOCK]
        running = crc32(block, running)
        _write_at(file, block, at + start)
        checksums.append(running)
    return checksums


def _write_at(file: int, content: memoryview | bytes, at: int) -> None:
    done = 0
    while done < len(content):  # a disk that is getting full takes a part, and raises at the rest
        done += os.pwrite(file, content[done:] if done else content, at + done)


class _Rebuilt:
    """Pickled as torch pickles a contiguous tensor that fills its storage."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
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
        return (
            ("storage", torch.UntypedStorage, "0", "cpu", obj.num_bytes)
            if isinstance(obj, _Storage)
            else None
        )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


@lru_cache(1024)
def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns what torch.save writes about a tensor, without its values."""
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(_Rebuilt(dtype, shape))
    return file.getvalue()


def _archive(pickled: bytes, num_bytes: int, checksum: int) -> tuple[bytes, bytes]:
    """Returns what is before and after the values in an archive of torch.save (a zip without
    compression, in zip64)."""
    small = [("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")]
    records = [
        (f"archive/{name}".encode(), len(content), zlib.crc32(content), content)
        for name, content in small
    ]
    records.append((b"archive/data/0", num_bytes, checksum, b""))
    before, directory, full = b"", b"", 0xFFFFFFFF
    for name, size, crc, content in records:
        # version, flags, method, time, date (1 January 1980), CRC-32; then sizes, which stand in
        # the zip64 field
        about = pack("<5HI2I", 45, 0, 0, 0, 33, crc, full, full)
        extra = pack("<2H3Q", 1, 24, size, size, len(before))
        directory += (
            b"PK\1\2"
            + pack("<H", 45)
            + about
            + pack("<5H2I", len(name), len(extra), 0, 0, 0, 0, full)
        )
        directory += name + extra
        before += (
            b"PK\3\4"
            + about
            + pack("<2H", len(name), 20)
            + name
            + pack("<2H2Q", 1, 16, size, size)
            + content
        )
    at, num = len(before) + num_bytes, len(records)
    end = b"PK\6\6" + pack("<Q2H2I4Q", 44, 45, 45, 0, 0, num, num, len(directory), at)
    end += b"PK\6\7" + pack("<IQI", 0, at + len(directory), 1)
    return before, directory + end + b"PK\5\6" + pack(
        "<4H2IH", 0, 0, num, num, len(directory), full, 0
    )


class DamagedFile(ValueError):
    """A file is not what was saved."""


@dataclass
class About:
    """What a file of tensors says about itself."""

    # which wrote it; None where the file does not say, as DCP's and those of early versions
    save: Save | None = None
    where: list[int] | None = None  # the table of checksums: first byte, length, CRC-32
    # by first byte of the archive; read when it is needed
    table: dict[int, list[Any]] | None = None


class TensorFile:
    """A file of tensors, open for reading; a context manager. Raises OSError: it cannot be
    opened."""

    def __init__(self, path: Path, about: About | None = None) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.about = about or About()
        self._old: tuple[int, Tensor] | None = None  # the last archive of a file without a table
        self._scratch = torch.empty(0, dtype=torch.uint8)
        try:
            if about is None:
                found = parse_json(bytes(self._read(0, HEADER_BYTES)))
                self.about = About(Save(str(found["save"]), int(found["step"])), found.get("table"))
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
            key: of the tensor that the archive is part of.
            offset: first index within the archive.
            target: any dtype, device and strides.

        Raises:
            Damaged: the bytes are not those that were saved.
            OSError: the file cannot be read.
        """
        try:
            if self.about.where is None:
                self._fill_from_old(item, offset, target)
            elif not self._fill(self._row(key, item), dtype, item.extent, offset, target.detach()):
                raise DamagedFile
        except DamagedFile:
            where = f"bytes {item.start} to {item.start + item.length}, part of {key}"
            raise DamagedFile(f"is damaged: {where}, are not what was saved (CRC-32)") from None

    def check_around(self, key: str, dtype: torch.dtype, item: SavedItem) -> None:
        """Compares every byte of the file's header and of an archive but its values, which `fill`
        checks.

        Args:
            key, dtype, item: as in `fill`.

        Raises:
            Damaged: they are not those that were saved.
        """
        if self.about.where is None:
            return  # `fill` has checked the archive
        *_, data, num_bytes, checksums = self._row(key, item)
        before, after = _archive(
            _pickled(dtype, item.extent), num_bytes, checksums[-1] if checksums else 0
        )
        assert self.about.save is not None
        around = self._read(item.start, len(before)) + self._read(data + num_bytes, len(after))
        if around != before + after or self._read(0, HEADER_BYTES) != _header(
            self.about.save, *self.about.where
        ):
            raise DamagedFile(
                f"is damaged: its header, or the archive of {key} from byte {item.start} on"
            )

    def _row(self, key: str, item: SavedItem) -> list[Any]:
        """Returns an archive's row of the table: key, offset, first byte, the values' place,
        checksums."""
        if self.about.table is None:
            at, length, checksum = self.about.where or (0, 0, 0)
            content = self._read(at, length)
            if crc32(content) != checksum:
                raise DamagedFile
            self.about.table = {row[2]: row for row in parse_json(bytes(content), list)}
        row = self.about.table.get(item.start)
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
        """Returns `fill` for a file with a table; False where the file is damaged."""
        *_, data, num_bytes, checksums = row
        strides, itemsize = _strides(extent), dtype.itemsize
        if num_bytes != prod(extent) * itemsize:
            return False
        first = sum(at * stride for at, stride in zip(offset, strides))
        last = first + sum((size - 1) * stride for size, stride in zip(target.shape, strides))
        begin, end = (
            first * itemsize // BLOCK * BLOCK,
            min(num_bytes, -(-(last + 1) * itemsize // BLOCK) * BLOCK),
        )
        direct = target.is_cpu and target.dtype == dtype and target.is_contiguous()
        if direct and target.nbytes == num_bytes:
            return self._read_blocks(data, 0, checksums, as_bytes(target))
        if self._scratch.numel() < end - begin:
            self._scratch = torch.empty(end - begin, dtype=torch.uint8)
        scratch = self._scratch[: end - begin]
        intact = self._read_blocks(data, begin, checksums, as_bytes(scratch))
        target.copy_(
            scratch.view(dtype).as_strided(target.shape, strides, first - begin // itemsize)
        )
        return intact

    def _read_blocks(
        self, data: int, begin: int, checksums: Sequence[int], target: memoryview
    ) -> bool:
        """Reads whole blocks of values, beginning `begin` bytes after `data`; False where one is
        damaged."""
        number = begin // BLOCK
        running = checksums[number - 1] if number else 0
        for at in range(0, len(target), BLOCK):
            block = target[at : at + BLOCK]
            self._read_into(block, data + begin + at)
            running = crc32(block, running)
            if running != checksums[number]:
                return False
            number += 1
        return True

    def _fill_from_old(self, item: SavedItem, offset: Sequence[int], target: Tensor) -> None:
        """Does `fill` for a file whose archives torch.save has written: checks their own
        checksums."""
        if self._old is None or self._old[0] != item.start:
            content = self._read(item.start, item.length)
            try:
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    intact = archive.testzip() is None
            except Exception:  # whatever a damaged directory leads to
                intact = False
            if not intact:
                raise DamagedFile
            self._old = (
                item.start,
                torch.load(io.BytesIO(content), map_location="cpu", weights_only=True),
            )
        values = self._old[1]
        if values.shape != item.extent:
            raise ValueError(f"{tuple(values.shape)} where {item.extent} is described")
        target.copy_(values[tuple(slice(at, at + size) for at, size in zip(offset, target.shape))])

    def _read(self, at: int, length: int) -> bytearray:
        content = bytearray(length)
        return content[: self._read_into(memoryview(content), at)]

    def _read_into(self, target: memoryview, at: int) -> int:
        done = 0
        while done < len(target) and (found := os.preadv(self._file, [target[done:]], at + done)):
            done += found
        return done

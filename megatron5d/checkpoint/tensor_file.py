"""A file of tensors: the name of the save that wrote it, then an archive of torch.save for each part of a tensor."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron5d.config.json_file import parse_json

HEADER_BYTES = 256  # at the start of the file: JSON, then spaces
_FORMAT = 1


class Save(NamedTuple):
    """One save of a run; each of its files says so.

    Args:
        id: unique to the save.
        step: optimiser steps done.
    """

    id: str
    step: int

    def __str__(self) -> str:
        return f"step {self.step}, save {self.id}"


def header(save: Save) -> bytes:
    """What a tensor file begins with. DCP reads items by their places, so that it passes over it."""
    text = json.dumps({"megatron5d": _FORMAT, "save": save.id, "step": save.step})
    return text.encode().ljust(HEADER_BYTES - 1) + b"\n"


def save_of(start: bytes) -> Save | None:
    """The save that the first bytes of a tensor file name; None where they are no header."""
    try:
        found = parse_json(start[:HEADER_BYTES])
        return Save(str(found["save"]), int(found["step"]))
    except (ValueError, KeyError, TypeError):
        return None


def check_item(item: Window, values: Tensor | None) -> None:
    """Compares an item with the checksums in it.

    Args:
        item: an archive of torch.save.
        values: what was read from it, which is not read again; None = unknown.

    Raises:
        ValueError, zipfile.BadZipFile: it is damaged.
    """
    with zipfile.ZipFile(item) as archive:
        for record in archive.infolist():
            if values is None or not record.filename.endswith("/data/0"):
                archive.read(record)  # raises where the checksum is another
                continue
            storage = values.untyped_storage()
            content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            if record.file_size != storage.nbytes() or zlib.crc32(content.data) != record.CRC:
                raise ValueError(f"the CRC-32 of {record.filename} is another")


class Window(io.RawIOBase):
    """A stretch of an open file as a file of its own. It is not copied, because an item may be large.

    Args:
        file: open for reading.
        start: first byte.
        length: bytes.
    """

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:  # where a damaged archive may point
            raise ValueError(f"byte {at} is before the window")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        found = self._file.readinto(view)
        self._at += found
        return found

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        found = self._file.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found

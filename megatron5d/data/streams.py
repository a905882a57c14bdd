"""Reads plain and compressed files in pieces of whole lines, from any offset in their content."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20


class LineStream:
    """The uncompressed content of a file; made by `open_stream`."""

    def __init__(self, path: Path, disk: BinaryIO, content: io.BufferedIOBase | BinaryIO) -> None:
        self.path, self._disk, self._content = path, disk, content

    def read_lines(self, num_bytes: int) -> bytes:
        """About `num_bytes` of whole lines; b"" at the end.

        Raises:
            ValueError: the compressed file is damaged or ends early.
        """
        try:
            return self._content.read(num_bytes) + self._content.readline()
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{self.path}: byte {self._disk.tell()}: cannot be decompressed: {error}") from error

    def read_all(self) -> bytes:
        """The rest of the content.

        Raises:
            ValueError: the compressed file is damaged or ends early.
        """
        return b"".join(iter(lambda: self.read_lines(CHUNK), b""))

    def disk_position(self) -> int:
        """Bytes of the file on disk that have been read."""
        return self._disk.tell()


@contextmanager
def open_stream(path: Path, offset: int = 0) -> Iterator[LineStream]:
    """Opens a plain, `.gz` or `.zst` file.

    Args:
        path: of the file.
        offset: bytes of its uncompressed content to skip; compressed files are decompressed up to there.

    Yields:
        The stream.

    Raises:
        ValueError: the package for `.zst` files is not installed, or a compressed file has no bytes at all.
    """
    with path.open("rb") as disk:
        name = path.name.lower()
        if name.endswith((".gz", ".zst")) and not os.fstat(disk.fileno()).st_size:
            raise ValueError(f"{path} is empty: a compressed file of nothing has a header still")
        content: io.BufferedIOBase | BinaryIO
        if name.endswith(".gz"):
            content = gzip.GzipFile(fileobj=disk)
        elif name.endswith(".zst"):
            content = io.BufferedReader(_ZstdReader(path, disk), CHUNK)
        else:
            content = disk
            disk.seek(offset)
            offset = 0
        stream = LineStream(path, disk, content)
        while offset > 0:
            offset -= len(content.read(min(offset, CHUNK)))
        yield stream


class _ZstdReader(io.RawIOBase):
    """The content of all frames of a `.zst` file; unlike zstandard's own reader it notices a frame that is cut off."""

    def __init__(self, path: Path, disk: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(f"{path} needs the package zstandard: pip install 'megatron5d[data]'") from error
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._frame = self._new_frame()
        self._inside = False  # a frame has begun and not ended
        self._disk, self._ready = disk, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            if self._inside and self._frame.eof:
                raw = self._frame.unused_data
                self._frame, self._inside = self._new_frame(), False
            else:
                raw = b""
            raw = raw or self._disk.read(CHUNK)
            if not raw:
                if self._inside:
                    raise EOFError("the last zstd frame is cut off")
                return 0
            self._inside = True
            try:
                self._ready = self._frame.decompress(raw)
            except self._error as error:
                raise OSError(str(error)) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

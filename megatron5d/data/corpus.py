"""The files of a corpus (jsonl, parquet, text; plain, gz or zst), divided into units of work in one fixed order.

A unit is cheap to make and expensive to process: raw lines, names of text files, or the number of a row group. One
process makes units, and many parse and tokenise them. Each unit has the position behind it, where a run can resume.

Reads plain and compressed files in pieces of whole lines, from any offset in their content.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


UNIT_BYTES = 1 << 20  # of lines or text files in a unit, about
UNIT_FILES = 256  # text files in a unit, at most
JSONL = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
PARQUET = (".parquet",)
TEXT = (".txt", ".md", ".txt.gz", ".txt.zst")
JOURNALS = ("*.preprocess.json", "*.preprocess.partial.json*")  # of preprocessing itself (preprocess.py)


@dataclass(frozen=True)
class Cursor:
    """A position between two units."""

    file: int = 0  # index of the file; all before it are done
    offset: int = 0  # of this file: uncompressed bytes that are done, or row groups
    line: int = 0  # of this file: lines or rows that are done


@dataclass(frozen=True)
class Unit:
    """A part of the corpus; exactly one of `files`, `lines` and `row_group` is set."""

    after: Cursor  # the position behind it
    done_bytes: int  # bytes on disk of all files up to here, for progress
    files: tuple[str, ...] = ()  # text files, one document each
    path: str = ""  # the file of `lines` or `row_group`
    lines: bytes = b""  # whole lines
    row_group: int | None = None  # index in a parquet file
    first_line: int = 1  # number of the first line or row in the file, from 1


def kind_of(path: Path) -> str:
    """ "jsonl", "parquet" or "text", by the file name; unknown names are text."""
    name = path.name.lower()
    return "jsonl" if name.endswith(JSONL) else "parquet" if name.endswith(PARQUET) else "text"


def list_files(inputs: Sequence[str], globs: Sequence[str] = (), excludes: Sequence[str] = ()) -> list[Path]:
    """The files of a corpus, in the order of the inputs and sorted inside each folder.

    Args:
        inputs: files and folders (searched recursively).
        globs: patterns of the file names to take from folders; empty = the known suffixes of jsonl, parquet and text.
        excludes: patterns; a file is left out if its path below the input, or any part of that path, matches. So are
            the journals and summaries of preprocessing, which may be written among the texts.

    Returns:
        Files in the order in which documents will be written.

    Raises:
        ValueError: an input does not exist, or no file is left.
    """
    files: list[Path] = []
    for each in inputs:
        path = Path(each)
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            found = sorted((f.relative_to(path).as_posix(), f) for f in path.rglob("*") if f.is_file())
            excluded = [*excludes, *JOURNALS]
            files += [f for name, f in found if _taken(name, globs) and not _excluded(name, excluded)]
        else:
            raise ValueError(f"--input {each}: no such file or folder")
    if not files:
        wanted = f"match --glob {' '.join(globs)}" if globs else f"end in {', '.join(JSONL + PARQUET + TEXT)}"
        raise ValueError(f"--input {' '.join(inputs)}: no files that {wanted}; --glob says which names to take")
    return list(dict.fromkeys(files))


def _taken(name: str, globs: Sequence[str]) -> bool:
    if globs:
        return any(fnmatch.fnmatch(name, g) or fnmatch.fnmatch(name.rpartition("/")[2], g) for g in globs)
    return name.lower().endswith(JSONL + PARQUET + TEXT)


def _excluded(name: str, excludes: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(part, e) for e in excludes for part in (name, *name.split("/")))


def units(files: Sequence[Path], text_per: str = "file", start: Cursor | None = None) -> Iterator[Unit]:
    """Divides a corpus into units.

    Args:
        files: from `list_files`.
        text_per: a text file is one document (`file`), or each of its lines is one (`line`).
        start: the `after` of the last unit that is done; None = the beginning.

    Yields:
        Units in order; their borders depend only on the files, not on `start`.
    """
    start = start or Cursor()
    sizes = [path.stat().st_size for path in files]
    done = sum(sizes[: start.file])
    batch: list[str] = []  # text files of the next unit
    batch_bytes = 0
    for i, path in enumerate(files[start.file :], start.file):
        kind = kind_of(path)
        if kind == "text" and text_per == "file":
            batch.append(str(path))
            batch_bytes += sizes[i]
        is_last = i + 1 == len(files) or kind_of(files[i + 1]) != "text"
        if batch and (batch_bytes >= UNIT_BYTES or len(batch) == UNIT_FILES or is_last):
            yield Unit(Cursor(i + 1), done + sizes[i], files=tuple(batch))
            batch, batch_bytes = [], 0
        at = start if i == start.file else Cursor(i)
        if kind == "parquet":
            yield from _row_groups(path, at, done, sizes[i])
        elif kind == "jsonl" or text_per == "line":
            yield from _line_units(path, at, done)
        done += sizes[i]


def _line_units(path: Path, at: Cursor, done_before: int) -> Iterator[Unit]:
    offset, line = at.offset, at.line
    with open_stream(path, offset) as stream:
        while data := stream.read_lines(UNIT_BYTES):
            offset += len(data)
            first, line = line + 1, line + data.count(b"\n") + (not data.endswith(b"\n"))
            yield Unit(
                Cursor(at.file, offset, line),
                done_before + stream.disk_position(),
                path=str(path),
                lines=data,
                first_line=first,
            )


def _row_groups(path: Path, at: Cursor, done_before: int, size: int) -> Iterator[Unit]:
    with open_parquet(path) as parquet:
        num_groups, row = parquet.num_row_groups, at.line
        for group in range(at.offset, num_groups):
            first, row = row + 1, row + parquet.metadata.row_group(group).num_rows
            done = done_before + size * (group + 1) // num_groups
            yield Unit(Cursor(at.file, group + 1, row), done, path=str(path), row_group=group, first_line=first)


def open_parquet(path: Path):
    """Opens a parquet file as a `pyarrow.parquet.ParquetFile`.

    Raises:
        ValueError: it is no parquet file, or pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path} needs the package pyarrow: pip install 'megatron5d[data]'") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole parquet file ({error})") from error

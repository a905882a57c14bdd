"""The files of a corpus (jsonl, parquet, text; plain or compressed), divided into units of work in
one fixed order.

A unit is cheap to make and expensive to process: raw lines, names of text files, or the number of a
row group. One process makes units, and many parse and tokenize them. Each unit has the position
behind it, where a run can resume: files, plain or compressed, are read in pieces of whole lines
from any offset in their content (`open_stream`).
"""

import bz2
import fnmatch
import gzip
import io
import json
import lzma
import os
import re
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
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(
                f"{self.path}: byte {self._disk.tell()}: cannot be decompressed: {error}"
            ) from error

    def read_all(self) -> bytes:
        """Rest of the content.

        Raises:
            ValueError: the compressed file is damaged or ends early.
        """
        return b"".join(iter(lambda: self.read_lines(CHUNK), b""))

    def disk_position(self) -> int:
        """Bytes of the file on disk that have been read."""
        return self._disk.tell()


@contextmanager
def open_stream(path: Path, offset: int = 0) -> Iterator[LineStream]:
    """Opens a file; one that is compressed (gzip, zstd, xz, bzip2) is recognized by its first
    bytes.

    Args:
        offset: bytes of its uncompressed content to skip; compressed files are decompressed up to
            there.

    Yields:
        The stream.

    Raises:
        ValueError: the package for zstd is not installed, or the content is not compressed as the
            name says.
    """
    with path.open("rb") as disk:
        head = disk.read(_MAGIC_BYTES)
        disk.seek(0)
        if not head and path.name.lower().endswith(COMPRESSED):
            raise ValueError(f"{path} is empty: a compressed file of nothing has a header still")
        content: io.BufferedIOBase | BinaryIO
        if head.startswith(b"\x1f\x8b"):
            content = gzip.GzipFile(fileobj=disk)
        elif head.startswith(b"\xfd7zXZ\0"):
            content = lzma.LZMAFile(disk)  # noqa: SIM115 (closed with the disk's file)
        elif re.match(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", head):
            content = bz2.BZ2File(disk)
        elif re.match(
            rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", head
        ):  # a frame, or one to skip
            content = io.BufferedReader(_ZstdReader(path, disk), CHUNK)
        elif path.name.lower().endswith(COMPRESSED):
            raise ValueError(
                f"{path}: byte 0: neither gzip nor zstd nor xz nor bzip2, though its name says so"
            )
        else:
            content = disk
            disk.seek(offset)
            offset = 0
        stream = LineStream(path, disk, content)
        while offset > 0:
            offset -= len(content.read(min(offset, CHUNK)))
        yield stream


class _ZstdReader(io.RawIOBase):
    """The content of all frames of a `.zst` file; unlike zstandard's own reader it notices a frame
    that is cut off."""

    def __init__(self, path: Path, disk: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(
                f"{path} needs the package zstandard: pip install 'megatron5d[data]'"
            ) from error
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
COMPRESSED = (".gz", ".gzip", ".zst", ".zstd", ".xz", ".bz2")
_MAGIC_BYTES = 10  # that identify the compression of a file
JSONL = (".jsonl", ".ndjson", ".jsonlines", ".json")
PARQUET = (".parquet", ".pq")
TEXT = (".txt", ".text", ".md")
KINDS = ("jsonl", "parquet", "text")
HEAD_BYTES = 1 << 16  # in which the lines are that tell text from jsonl
NO_TEXT = re.compile(  # tables, arrays and archives: as text they would be trained on byte by byte
    r"\.(csv|tsv|arrow|feather|orc|avro|npy|npz|pkl|bin|idx|tar|tgz|zip|7z|rar|pdf|docx|safetensors|pt)$"
)
NO_TEXT_MAGIC = (b"ARRO", b"PK\3\4", b"\x93NUM", b"MMID")
# files that describe a dataset: taken only by --glob or where they are named themselves
ABOUT_DATA = re.compile(
    r"(readme(_[a-z]{2})?|licen[sc]e|notice|changelog|citation|dataset_?(card|infos?)|state)(\W.*)?"
)
# of preprocessing itself (preprocess.py)
JOURNALS = ("*.preprocess.json", "*.preprocess.partial.json*")


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
    as_json: bool = False  # each of them is a JSON object, not a text
    row_group: int | None = None  # index in a parquet file
    first_line: int = 1  # number of the first line or row in the file, from 1


def kind_of(path: Path) -> str:
    """Kind of a file by its name: "jsonl" or "parquet"; else by its lines: "jsonl" or "text".

    Raises:
        ValueError: it is a table, an array or an archive that is not read here.
    """
    name = _plain_name(path.name)
    with path.open("rb") as file:
        magic = file.read(4)
    if name.endswith(PARQUET) or magic == b"PAR1":
        return "parquet"
    if NO_TEXT.search(name) or magic in NO_TEXT_MAGIC:
        raise ValueError(
            f"{path} is no text by its name or first bytes: write it as jsonl or parquet, or "
            "--kind text"
        )
    if name.endswith(JSONL):
        return "jsonl"
    with open_stream(path) as stream:
        lines = [line for line in stream.read_lines(HEAD_BYTES).split(b"\n") if line.strip()][:2]
    return "jsonl" if lines and all(map(_is_object, lines)) else "text"


def kinds_of(
    files: Sequence[Path], kind: str | None = None, keys: Sequence[str] = ("text",)
) -> list[str]:
    """Kind of each file.

    Args:
        files: from `list_files`.
        kind: of all of them; None = `kind_of` each.
        keys: fields to read; others than "text" alone need files that have fields.

    Raises:
        ValueError: a file is of a kind that is not read, or a text although fields are named.
    """
    kinds = [kind or kind_of(path) for path in files]
    if list(keys) != ["text"] and "text" in kinds:
        raise ValueError(
            f"{files[kinds.index('text')]} is text, which has no field that --json-keys "
            f"{' '.join(keys)} could name; "
            "leave it out with --exclude, or say --kind jsonl"
        )
    return kinds


def _is_object(line: bytes) -> bool:
    try:
        return line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") and isinstance(
            json.loads(line), dict
        )
    except (ValueError, RecursionError):
        return False


def _plain_name(name: str) -> str:
    """File name in lower case, without the suffixes of compression and of parts
    (`.jsonl.1`, `.zst`)."""
    return re.sub(r"(\.(gz|gzip|zst|zstd|xz|bz2|\d+))+$", "", name.lower())


def list_files(
    inputs: Sequence[str],
    globs: Sequence[str] = (),
    excludes: Sequence[str] = (),
    passed_over: list[Path] | None = None,
) -> list[Path]:
    """Files of a corpus, in the order of the inputs and sorted inside each folder, each
    once.

    Args:
        inputs: files and folders (searched recursively, through symbolic links too).
        globs: patterns of the file names to take from folders; empty = the known suffixes of jsonl
            and parquet, and of text where there is neither, without the files that describe a
            dataset and without hidden ones.
        excludes: patterns; a file is left out if its path below the input, or any part of that
            path, matches. So are the journals and summaries of preprocessing, which may be written
            among the texts.
        passed_over: to which the files are added that are neither taken nor excluded.

    Returns:
        Files in the order in which documents will be written.

    Raises:
        ValueError: an input does not exist, a glob matches nothing, or no file is left.
    """
    files: list[Path] = []
    unused = set(globs)
    for entry in inputs:
        path = Path(entry)
        if path.is_dir():
            named = [
                (n, f) for n, f in _files_below(path) if not _excluded(n, [*excludes, *JOURNALS])
            ]
            unused -= {g for g in unused if any(_matches(name, g) for name, _ in named)}
            selected = _taken([name for name, _ in named], globs)
            if lost := [f for name, f in named if name in selected and not f.exists()]:
                raise ValueError(
                    f"--input {entry}: {lost[0]} is a link to nothing; --exclude leaves it out"
                )
            files += [f for name, f in named if name in selected]
            if passed_over is not None:
                passed_over += [f for name, f in named if name not in selected]
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"--input {entry}: no such file or folder")
    if unused and any(Path(entry).is_dir() for entry in inputs):
        raise ValueError(
            f"--input {' '.join(inputs)}: no files that match --glob {' '.join(sorted(unused))}"
        )
    if not files:
        raise ValueError(
            f"--input {' '.join(inputs)}: no files that end in "
            f"{', '.join(JSONL + PARQUET + TEXT)}, compressed or not; "
            "--glob says which names to take"
        )
    unique: dict[tuple[int, int], Path] = {}
    for path in files:  # also behind links and under other names
        unique.setdefault((path.stat().st_dev, path.stat().st_ino), path)
    return list(unique.values())


def _files_below(folder: Path) -> list[tuple[str, Path]]:
    """(path below it, path) of all files in a folder, sorted; links are followed, a folder
    once on a way."""
    paths, trail = [], {os.fspath(folder): {folder.resolve()}}
    for directory, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        entered = trail.pop(directory)
        below = {name: Path(directory, name).resolve() for name in folders}
        # a link to a folder above has no end
        folders[:] = [name for name in folders if below[name] not in entered]
        trail |= {os.path.join(directory, name): entered | {below[name]} for name in folders}
        files = [Path(directory, name) for name in names]
        # No pipes; broken links are kept, for the message.
        paths += [file for file in files if file.is_file() or not file.exists()]
    return sorted((file.relative_to(folder).as_posix(), file) for file in paths)


def _refuse(error: OSError) -> None:
    raise ValueError(f"--input: {error.filename} cannot be read: {error.strerror}") from error


def _matches(name: str, glob: str) -> bool:
    return fnmatch.fnmatch(name, glob) or fnmatch.fnmatch(name.rpartition("/")[2], glob)


def _taken(names: Sequence[str], globs: Sequence[str]) -> set[str]:
    """Files of a folder that are read; text beside jsonl or parquet describes them and
    is left out, and hidden files and folders hold what programs keep for themselves, copies of the
    others too."""
    if globs:
        return {name for name in names if any(_matches(name, glob) for glob in globs)}
    plain = {name: _plain_name(name.rpartition("/")[2]) for name in names if "/." not in f"/{name}"}
    about = {
        n for n, p in plain.items() if p.endswith((".json", *TEXT)) and ABOUT_DATA.fullmatch(p)
    }
    records = {name for name, end in plain.items() if end.endswith(JSONL + PARQUET)} - about
    return records or {name for name, end in plain.items() if end.endswith(TEXT)} - about


def _excluded(name: str, excludes: Sequence[str]) -> bool:
    return any(
        fnmatch.fnmatch(component, e) for e in excludes for component in (name, *name.split("/"))
    )


def units(
    files: Sequence[Path],
    text_per: str = "file",
    start: Cursor | None = None,
    kinds: Sequence[str] | None = None,
) -> Iterator[Unit]:
    """Divides a corpus into units.

    Args:
        files: from `list_files`.
        text_per: a text file is one document (`file`), or each of its lines is one (`line`).
        start: the `after` of the last unit that is done; None = the beginning.
        kinds: of the files; None = `kinds_of` them.

    Yields:
        Units in order; their borders depend only on the files, not on `start`.
    """
    start, kinds = start or Cursor(), kinds_of(files) if kinds is None else kinds
    sizes = [path.stat().st_size for path in files]
    done = sum(sizes[: start.file])
    batch: list[str] = []  # text files of the next unit
    batch_bytes = 0
    for i, path in enumerate(files[start.file :], start.file):
        kind = kinds[i]
        if kind == "text" and text_per == "file":
            batch.append(str(path))
            batch_bytes += sizes[i]
        is_last = i + 1 == len(files) or kinds[i + 1] != "text"
        if batch and (batch_bytes >= UNIT_BYTES or len(batch) == UNIT_FILES or is_last):
            yield Unit(Cursor(i + 1), done + sizes[i], files=tuple(batch))
            batch, batch_bytes = [], 0
        at = start if i == start.file else Cursor(i)
        if kind == "parquet":
            yield from _row_groups(path, at, done, sizes[i])
        elif kind == "jsonl" or text_per == "line":
            yield from _line_units(path, at, done, kind == "jsonl")
        done += sizes[i]


def _line_units(path: Path, at: Cursor, done_before: int, as_json: bool) -> Iterator[Unit]:
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
                as_json=as_json,
                first_line=first,
            )


def _row_groups(path: Path, at: Cursor, done_before: int, size: int) -> Iterator[Unit]:
    with open_parquet(path) as parquet:
        num_groups, row = parquet.num_row_groups, at.line
        for group in range(at.offset, num_groups):
            first, row = row + 1, row + parquet.metadata.row_group(group).num_rows
            done = done_before + size * (group + 1) // num_groups
            yield Unit(
                Cursor(at.file, group + 1, row),
                done,
                path=str(path),
                row_group=group,
                first_line=first,
            )


def open_parquet(path: Path):
    """Opens a parquet file as a `pyarrow.parquet.ParquetFile`, which checks the checksum of each
    page that has one.

    Raises:
        ValueError: it is no parquet file, or pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package pyarrow: pip install 'megatron5d[data]'"
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole parquet file ({error})") from error

"""The texts in a unit of a corpus. What is not a text is reported with file and line, never repaired."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron5d.data.corpus import Unit, kind_of, open_parquet
from megatron5d.data.streams import open_stream


@dataclass(frozen=True)
class BadLine:
    """A line, row or file that is not a document: where it is, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


Document = tuple[str, ...]  # one text per json key


def documents(unit: Unit, keys: Sequence[str]) -> Iterator[Document | BadLine]:
    """Reads the documents of a unit.

    Args:
        unit: from `units`.
        keys: fields of a jsonl line or columns of a parquet file that hold text.

    Yields:
        For each document one text per key (text files: one text), or a BadLine. Blank lines are skipped.
    """
    if unit.files:
        for path in unit.files:
            with open_stream(Path(path)) as stream:
                yield _text(path, 1, stream.read_all())
    elif unit.row_group is not None:
        yield from _rows(unit, keys)
    else:
        as_json = kind_of(Path(unit.path)) == "jsonl"
        for number, raw in enumerate(unit.lines.split(b"\n"), unit.first_line):
            if raw.strip():
                line = raw.removesuffix(b"\r")
                yield (_json_texts(unit.path, number, line, keys) if as_json else _text(unit.path, number, line))


def _text(path: str, line: int, raw: bytes) -> Document | BadLine:
    """The document of a text file or of a line, whose first line has the number `line`."""
    try:
        return (raw.decode("utf-8"),)
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        return BadLine(path, line, f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8")


def _json_texts(path: str, line: int, raw: bytes, keys: Sequence[str]) -> Document | BadLine:
    """The document of one jsonl line."""
    try:
        record = json.loads(raw)
    except UnicodeDecodeError as error:
        return BadLine(path, line, f"byte 0x{raw[error.start]:02x} at column {error.start + 1} is not UTF-8")
    except json.JSONDecodeError as error:
        return BadLine(path, line, f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return BadLine(path, line, f"not readable as JSON: {error}")
    if not isinstance(record, dict):
        return BadLine(path, line, f"a JSON {type(record).__name__}, not an object")
    return _checked_texts(path, line, [record.get(key, _MISSING) for key in keys], keys, list(record))


_MISSING = object()


def _checked_texts(
    path: str, line: int, texts: list, keys: Sequence[str], present: Sequence[str] = ()
) -> Document | BadLine:
    """The values of the keys as a document, if all are strings that UTF-8 can encode; `present` is for the message."""
    for key, text in zip(keys, texts):
        if text is _MISSING:
            return BadLine(
                path, line, f"no field {key!r} (--json-keys); it has {', '.join(map(repr, present)) or 'none'}"
            )
        if not isinstance(text, str):
            return BadLine(path, line, f"field {key!r} is a {type(text).__name__}, not a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return BadLine(path, line, f"field {key!r} has half a surrogate pair at character {error.start + 1}")
    return tuple(texts)


def _rows(unit: Unit, keys: Sequence[str]) -> Iterator[Document | BadLine]:
    """The documents of a parquet row group."""
    with open_parquet(Path(unit.path)) as parquet:
        columns = parquet.schema_arrow.names
        if twice := [key for key in keys if columns.count(key) > 1]:
            raise ValueError(f"{unit.path}: {columns.count(twice[0])} columns are called {twice[0]!r}")
        if missing := [key for key in keys if key not in columns]:
            raise ValueError(f"{unit.path}: no column {missing[0]!r} (--json-keys); it has {', '.join(columns)}")
        number = unit.first_line
        try:
            for batch in parquet.iter_batches(1024, row_groups=[unit.row_group], columns=list(keys)):
                for texts in zip(*(batch.column(key).to_pylist() for key in keys)):
                    yield _checked_texts(unit.path, number, list(texts), keys)
                    number += 1
        except (OSError, ValueError) as error:  # pyarrow's own names no file
            raise ValueError(f"{unit.path}: row group {unit.row_group} cannot be read: {error}") from error

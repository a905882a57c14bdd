"""The texts in the units of a corpus, and their tokens, made by many processes in the order of the
units.

What is not a text is reported with file and line, never repaired.
"""

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from megatron5d.data.corpus import Unit, open_parquet, open_stream
from megatron5d.data.tokenizer import Tokenizer, load_tokenizer


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
        For each document one text per key (text files: one text), or a BadLine. Blank lines are
        skipped.
    """
    if unit.files:
        for path in unit.files:
            with open_stream(Path(path)) as stream:
                yield _text(path, 1, stream.read_all())
    elif unit.row_group is not None:
        yield from _rows(unit, keys)
    else:
        for number, raw in enumerate(unit.lines.split(b"\n"), unit.first_line):
            if raw.strip():
                line = raw.removesuffix(b"\r")
                yield (
                    _json_texts(unit.path, number, line, keys)
                    if unit.as_json
                    else _text(unit.path, number, line)
                )


def _text(path: str, line: int, raw: bytes) -> Document | BadLine:
    """Document of a text file or of a line, whose first line has the number `line`."""
    try:
        # a file may begin with a byte-order mark
        return (raw.decode("utf-8-sig" if line == 1 else "utf-8"),)
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        return BadLine(
            path, line, f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8"
        )


def _json_texts(path: str, line: int, raw: bytes, keys: Sequence[str]) -> Document | BadLine:
    """Document of one jsonl line."""
    try:
        record = _parsed(raw)
    except UnicodeDecodeError as error:
        return BadLine(
            path, line, f"byte 0x{raw[error.start]:02x} at column {error.start + 1} is not UTF-8"
        )
    except json.JSONDecodeError as error:
        hint = (
            ""
            if raw.strip()[:-1]
            else "; a file holds one object a line, with no list or object around them"
        )
        return BadLine(path, line, f"not JSON: {error.msg} at column {error.colno}{hint}")
    except (ValueError, RecursionError) as error:
        return BadLine(path, line, f"not readable as JSON: {error}")
    if not isinstance(record, dict):
        return BadLine(
            path,
            line,
            f"a JSON {type(record).__name__}, not an object; a file holds one object a line",
        )
    return _checked_texts(path, line, [_field(record, key) for key in keys], keys, list(record))


_MISSING = object()


def _parsed(raw: bytes) -> Any:
    """Value of a JSON line; integers of any length, which no text needs, are read as such."""
    try:
        return json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # over the digits that Python converts (sys.set_int_max_str_digits)
        return json.loads(raw, parse_int=float)


def _field(record: dict[str, Any], key: str) -> Any:
    """Value of a field; `metadata.text` is that of the field itself, else one within another."""
    if key in record:
        return record[key]
    # the first name may have dots, too
    for at in (i for i, letter in enumerate(key) if letter == "."):
        inner = record.get(key[:at])
        if isinstance(inner, dict) and (value := _field(inner, key[at + 1 :])) is not _MISSING:
            return value
    return _MISSING


def _checked_texts(
    path: str, line: int, texts: list, keys: Sequence[str], present: Sequence[str] = ()
) -> Document | BadLine:
    """Values of the keys, if all are strings that UTF-8 can encode; `present` is for
    the message."""
    for key, text in zip(keys, texts):
        if text is _MISSING:
            return BadLine(
                path,
                line,
                f"no field {key!r} (--json-keys); it has {', '.join(map(repr, present)) or 'none'}",
            )
        if isinstance(text, UnicodeDecodeError):
            byte = text.object[text.start]
            return BadLine(
                path, line, f"field {key!r}: byte 0x{byte:02x} at offset {text.start} is not UTF-8"
            )
        if not isinstance(text, str):
            return BadLine(path, line, f"field {key!r} is a {type(text).__name__}, not a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return BadLine(
                path,
                line,
                f"field {key!r} has half a surrogate pair at character {error.start + 1}",
            )
    return tuple(texts)


def _rows(unit: Unit, keys: Sequence[str]) -> Iterator[Document | BadLine]:
    """Yields the documents of a parquet row group."""
    with open_parquet(Path(unit.path)) as parquet:
        columns = parquet.schema_arrow.names
        if twice := [key for key in keys if columns.count(key) > 1]:
            raise ValueError(
                f"{unit.path}: {columns.count(twice[0])} columns are called {twice[0]!r}"
            )
        within = [_column_of(key, parquet.schema_arrow) for key in keys]
        if None in within:
            missing = keys[within.index(None)]
            raise ValueError(
                f"{unit.path}: no column {missing!r} (--json-keys); it has {', '.join(columns)}"
            )
        paths = [path for path in within if path is not None]
        number = unit.first_line
        try:
            for batch in parquet.iter_batches(
                1024, row_groups=[unit.row_group], columns=[".".join(path) for path in paths]
            ):
                for texts in zip(*(_values(_inner(batch, path)) for path in paths)):
                    yield _checked_texts(unit.path, number, list(texts), keys)
                    number += 1
        except (OSError, ValueError) as error:  # pyarrow's own names no file
            raise ValueError(
                f"{unit.path}: row group {unit.row_group} cannot be read: {error}"
            ) from error


def _column_of(key: str, schema) -> tuple[str, ...] | None:
    """Names that lead to a column, or to a field within columns of structs; None = no such one."""
    fields = {schema.field(i).name: schema.field(i).type for i in range(len(schema.names))}
    if key in fields:
        return (key,)
    for name, kind in fields.items():
        if key.startswith(f"{name}.") and (inner := _within(kind, key[len(name) + 1 :])):
            return (name, *inner)
    return None


def _within(kind, key: str) -> tuple[str, ...] | None:
    """Names that lead to a field of a struct type."""
    for i in range(kind.num_fields if str(kind).startswith("struct") else 0):
        field = kind.field(i)
        if key == field.name:
            return (key,)
        if key.startswith(f"{field.name}.") and (
            inner := _within(field.type, key[len(field.name) + 1 :])
        ):
            return (field.name, *inner)
    return None


def _inner(batch, path: tuple[str, ...]):
    """Column of a batch, or the field within it; of a missing struct it is missing, too."""
    from pyarrow import compute

    column = batch.column(path[0])
    return compute.struct_field(column, list(path[1:])) if path[1:] else column


def _values(column) -> list:
    """Values of a column; a UnicodeDecodeError stands for a string that is not
    UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar):
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


# per process: enough that no process waits for the writer, few enough to limit memory
UNITS_IN_FLIGHT = 4


@dataclass(frozen=True)
class Recipe:
    """How documents are tokenized."""

    tokenizer: str  # file or folder
    eod: str | int | None = None  # end-of-document token; None = the tokenizer's own
    append_eod: bool = False  # after each document that is not empty
    json_keys: tuple[str, ...] = ("text",)  # fields or columns with text
    skip_bad: bool = False  # bad lines do not end the job
    bos: str | int | None = None  # begin-of-text token; None = the tokenizer's own
    prepend_bos: bool = False  # before each document that is not empty


@dataclass(frozen=True)
class Tokenized:
    """The ids of a unit; an empty document has length 0."""

    lengths: list[np.ndarray]  # one int64 [documents] per json key
    ids: list[np.ndarray]  # one int32 [sum of lengths] per json key
    bad: list[BadLine]  # lines without a document


def tokenize_unit(unit: Unit, recipe: Recipe) -> Tokenized:
    """Tokenizes the documents of one unit."""
    tokenizer = _tokenizer(recipe.tokenizer, recipe.eod, recipe.bos)
    begin = [tokenizer.bos] if recipe.prepend_bos and tokenizer.bos is not None else []
    end = [tokenizer.eod] if recipe.append_eod and tokenizer.eod is not None else []
    read: list[Document] = []
    bad: list[BadLine] = []
    for document in documents(unit, recipe.json_keys):
        if isinstance(document, BadLine):
            bad.append(document)
            if not recipe.skip_bad:
                break  # the writer refuses the whole job at this line
            continue
        read.append(document)
    lengths, ids = [], []
    for k in range(len(recipe.json_keys)):
        encoded = tokenizer.encode_all([document[k] for document in read])
        if begin or end:
            encoded = [[*begin, *text, *end] if text else [] for text in encoded]
        lengths.append(np.array(list(map(len, encoded)), dtype=np.int64))
        ids.append(np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths[-1].sum())))
    return Tokenized(lengths, ids, bad)


@lru_cache(maxsize=1)
def _tokenizer(path: str, eod: str | int | None, bos: str | int | None) -> Tokenizer:
    """Tokenizer, loaded once in each process: loading takes longer than tokenizing many
    units."""
    return load_tokenizer(path, eod, bos)


def ordered_map(
    todo: Iterable[Unit], recipe: Recipe, workers: int
) -> Iterator[tuple[Unit, Tokenized]]:
    """Tokenizes units on several processes and yields the results in the order of the units.

    The processes are spawned, not forked: they inherit no threads, locks or open files of the
    caller, and importing what they need takes a third of a second.

    Yields:
        (unit, its tokens).

    Raises:
        ValueError: a process died, or a file is broken.
    """
    if workers <= 1:
        for unit in todo:
            yield unit, tokenize_unit(unit, recipe)
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(recipe,)
    )
    waiting: deque[tuple[Unit, Future[Tokenized]]] = deque()
    # else its start, within that of the first process, lets interrupts in again
    resource_tracker.ensure_running()
    try:
        for unit in todo:
            with _held_interrupts():
                future = pool.submit(tokenize_unit, unit, recipe)
            waiting.append((unit, future))
            if len(waiting) >= workers * UNITS_IN_FLIGHT:
                unit, future = waiting.popleft()
                yield unit, future.result()
        while waiting:
            unit, future = waiting.popleft()
            yield unit, future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a tokenizing process died (killed, or out of memory: try fewer --workers); the same "
            "command continues"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _held_interrupts() -> Iterator[None]:
    """Keeps SIGINT from processes that are started, for good: their parent handles it. To this one
    it comes later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(recipe: Recipe) -> None:
    """Loads the tokenizer, and exits when the parent dies."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _tokenizer(recipe.tokenizer, recipe.eod, recipe.bos).encode_all([])

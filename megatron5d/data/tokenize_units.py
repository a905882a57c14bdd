"""Tokenises the units of a corpus with many processes; the results come in the order of the units."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import wait

import numpy as np

from megatron5d.data.corpus import Unit
from megatron5d.data.documents import BadLine, documents
from megatron5d.data.tokenizer import Tokenizer, load_tokenizer

UNITS_IN_FLIGHT = 4  # per process: enough that no process waits for the writer, few enough to limit memory


@dataclass(frozen=True)
class Recipe:
    """How documents are tokenised."""

    tokenizer: str  # file or folder
    eod: str | int | None = None  # end-of-document token; None = the tokenizer's own
    append_eod: bool = False  # after each document that is not empty
    json_keys: tuple[str, ...] = ("text",)  # fields or columns with text
    skip_bad: bool = False  # bad lines do not end the job


@dataclass(frozen=True)
class Tokenized:
    """The ids of a unit; an empty document has length 0."""

    lengths: list[np.ndarray]  # one int64 [documents] per json key
    ids: list[np.ndarray]  # one int32 [sum of lengths] per json key
    bad: list[BadLine]  # lines without a document


def tokenize_unit(unit: Unit, recipe: Recipe) -> Tokenized:
    """Tokenises the documents of one unit.

    Args:
        unit: from `units`.
        recipe: how to tokenise it.
    """
    tokenizer = _tokenizer(recipe.tokenizer, recipe.eod)
    end = [tokenizer.eod] if recipe.append_eod and tokenizer.eod is not None else []
    lengths: list[list[int]] = [[] for _ in recipe.json_keys]
    ids: list[list[np.ndarray]] = [[] for _ in recipe.json_keys]
    bad: list[BadLine] = []
    for document in documents(unit, recipe.json_keys):
        if isinstance(document, BadLine):
            bad.append(document)
            if not recipe.skip_bad:
                break  # the writer refuses the whole job at this line
            continue
        for k, text in enumerate(document):
            found = tokenizer.encode(text)
            encoded = np.array(found + end if found else [], dtype=np.int32)
            lengths[k].append(len(encoded))
            ids[k].append(encoded)
    empty = np.empty(0, dtype=np.int32)
    return Tokenized(
        [np.array(each, dtype=np.int64) for each in lengths], [np.concatenate([empty, *e]) for e in ids], bad
    )


@lru_cache(maxsize=1)
def _tokenizer(path: str, eod: str | int | None) -> Tokenizer:
    """The tokenizer, loaded once in each process: loading takes longer than tokenising many units."""
    return load_tokenizer(path, eod)


def ordered_map(todo: Iterable[Unit], recipe: Recipe, workers: int) -> Iterator[tuple[Unit, Tokenized]]:
    """Tokenises units on several processes and yields the results in the order of the units.

    The processes are spawned, not forked: they inherit no threads, locks or open files of the caller, and importing
    what they need takes a third of a second.

    Args:
        todo: units.
        recipe: how to tokenise them.
        workers: processes; 1 = only this one.

    Yields:
        (unit, its tokens).

    Raises:
        ValueError: a process died, or a file is broken.
    """
    if workers <= 1:
        for unit in todo:
            yield unit, tokenize_unit(unit, recipe)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_follow_parent)
    waiting: deque[tuple[Unit, Future[Tokenized]]] = deque()
    try:
        for unit in todo:
            waiting.append((unit, pool.submit(tokenize_unit, unit, recipe)))
            if len(waiting) >= workers * UNITS_IN_FLIGHT:
                unit, future = waiting.popleft()
                yield unit, future.result()
        while waiting:
            unit, future = waiting.popleft()
            yield unit, future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a tokenising process died (killed, or out of memory: fewer --workers need less); the same command goes on"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow_parent() -> None:
    """Ignores interrupts, which the parent handles, and exits when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""Makes Megatron token files from a corpus of texts, with many processes; can be killed and resumed
at any moment.

One process reads units and writes tokens in the order of the units; the others parse and tokenize.
Every few seconds everything written is flushed to disk and a journal records the position in the
corpus. A run that was killed continues from there and ends with the same bytes as an uninterrupted
one.

When it is done, a summary takes the journal's place. Both contain a fingerprint of the inputs and
settings. Only a run with the same fingerprint continues where another has stopped, and a finished
job is recognized instead of repeated.
"""

import dataclasses
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron5d.config.json_file import parse_json
from megatron5d.data.corpus import Cursor, kinds_of, units
from megatron5d.data.documents import BadLine, Recipe, Tokenized, ordered_map
from megatron5d.data.index_format import dtype_for_vocab
from megatron5d.data.indexed_dataset import IndexedWriter, finish_partial, token_files, with_suffix
from megatron5d.data.sample_order import hash_key
from megatron5d.data.special_tokens import EOD_NAMES, ends_turn
from megatron5d.data.tokenizer import (
    Tokenizer,
    changes_text,
    load_tokenizer,
    text_may_hold,
    tokenizer_digest,
)
from megatron5d.topology.owned_output import check_not_read, owned


@dataclass
class Progress:
    """How far a job has come."""

    fingerprint: str
    cursor: Cursor = field(default_factory=Cursor)
    # output prefix -> (documents, tokens)
    written: dict[str, tuple[int, int]] = field(default_factory=dict)
    documents: int = 0  # taken from the corpus, empty ones included
    empty: int = 0
    bad_lines: int = 0
    complete: bool = False  # everything is written; only the files must get their final names
    # fraction with which documents are drawn, where it is not --valid-fraction
    draw: float | None = None


class Journal:
    """The journal and the summary of one output prefix.

    Args:
        prefix: of the job; both files are named after it.
        outputs: prefixes of the token files that the job writes.
    """

    def __init__(self, prefix: str, fingerprint: str, outputs: Sequence[str]) -> None:
        self.prefix, self.fingerprint, self.outputs = prefix, fingerprint, outputs
        self.path = with_suffix(prefix, ".preprocess.partial.json")
        self.summary_path = with_suffix(prefix, ".preprocess.json")

    def discard(self) -> None:
        """Removes everything at the prefix, finished or not."""
        self.path.unlink(missing_ok=True)
        self.summary_path.unlink(missing_ok=True)
        for output in self.outputs:
            for suffix in (".idx", ".bin", ".bin.partial", ".lengths.partial", ".idx.partial"):
                with_suffix(output, suffix).unlink(missing_ok=True)

    def finished(self) -> dict | None:
        """Summary if this job is done and its token files are whole, else None.

        Raises:
            ValueError: another job has written its output here.
        """
        if self.path.exists():
            return None
        summary = _read(self.summary_path) if self.summary_path.exists() else {}
        # with another --valid-fraction the same prefix has other outputs
        known = dict.fromkeys([*self.outputs, *summary.get("outputs", {})])
        present = [path for output in known for path in token_files(output) if path.exists()]
        if not present:
            return None
        complete = all(with_suffix(output, ".idx").exists() for output in self.outputs)
        if summary.get("fingerprint") != self.fingerprint or not complete:
            raise ValueError(
                f"{present[0]} is there already, from other inputs or settings; --overwrite "
                "replaces it"
            )
        item_bytes = np.dtype(summary["dtype"]).itemsize
        for output in self.outputs:
            path = with_suffix(output, ".bin")
            if (
                not path.is_file()
                or path.stat().st_size != summary["outputs"][output]["tokens"] * item_bytes
            ):
                return None
        return summary

    def resume(self) -> Progress:
        """Progress of this job: what the journal says, or nothing done where there is no journal.

        Raises:
            ValueError: an unfinished run of another job is at the prefix.
        """
        if not self.path.exists():
            return Progress(self.fingerprint)
        values = _read(self.path)
        if values["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"{self.path}: an unfinished run with other inputs or settings wrote "
                f"{values['documents']} documents; "
                f"repeat its command to finish it, or --overwrite to start over"
            )
        values["cursor"] = Cursor(**values["cursor"])
        values["written"] = {output: tuple(counts) for output, counts in values["written"].items()}
        return Progress(**values)

    def save(self, progress: Progress) -> None:
        """Replaces the journal, all or nothing."""
        temporary = self.path.with_name(self.path.name + ".new")
        with temporary.open("w") as file:
            json.dump(dataclasses.asdict(progress), file)
            file.flush()
            # otherwise the rename could survive a loss of power and the content not
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def close(self, summary: dict) -> None:
        """Writes the summary and removes the journal."""
        self.summary_path.write_text(
            json.dumps({"fingerprint": self.fingerprint, **summary}, indent=1) + "\n"
        )
        self.path.unlink(missing_ok=True)


def _read(path: Path) -> dict:
    """Content of a journal or summary.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); --overwrite starts over") from error


SAVE_EVERY_S = 2.0
VALID_KEY = 0x76616C69  # hashed with a document's number to choose the held-out ones
UNLUCKY = 0.2  # relative error of the held-out share that is still taken
NEVER_UNLUCKY = 1000  # held-out documents with which no such error occurs


@dataclass(frozen=True)
class Job:
    """Everything that determines the bytes of the result."""

    files: tuple[Path, ...]
    prefix: str
    recipe: Recipe
    text_per: str = "file"  # file | line: what is a document in text files
    # of the documents, to PREFIX_valid, and the rest to PREFIX_train; 0 = all to PREFIX
    valid_fraction: float = 0.0
    # jsonl | parquet | text, of all files; None = as each one's name or content says
    kind: str | None = None

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of each file."""
        return kinds_of(self.files, self.kind, self.recipe.json_keys)

    def outputs(self) -> list[list[str]]:
        """Prefixes to write: for each json key [all], or [train, valid]."""
        keys = self.recipe.json_keys
        names = [self.prefix] if len(keys) == 1 else [f"{self.prefix}_{key}" for key in keys]
        return [
            [
                name + suffix
                for suffix in (["_train", "_valid"] if self.valid_fraction > 0 else [""])
            ]
            for name in names
        ]

    def fingerprint(self, eod: int | None, bos: int | None) -> str:
        """Hash of the inputs and settings that change the result; `eod`, `bos` as the
        tokenizer has them."""
        files = [
            (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
            for path in self.files
        ]
        # skip_bad is left out, so that a run that stopped at a bad line can continue with it
        recipe = dataclasses.asdict(dataclasses.replace(self.recipe, tokenizer="", skip_bad=False))
        # nothing is added to the hash of a job without it
        first = [bos] if recipe.pop("prepend_bos") else []
        del recipe["bos"]
        tokenizer = tokenizer_digest(self.recipe.tokenizer)
        settings = [files, recipe, tokenizer, eod, self.text_per, self.valid_fraction, *first]
        # files whose kind their name did not tell older versions, which took them for text
        known = re.compile(r".*\.(jsonl?(\.gz|\.zst)?|parquet)", re.IGNORECASE)
        files_as_text = [
            str(p)
            for p, kind in zip(self.files, self.kinds)
            if kind != "text" and not known.fullmatch(p.name)
        ]
        text = json.dumps([*settings, files_as_text] if files_as_text else settings)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Reporting:
    """Functions that a run calls while it works."""

    progress: Callable[[int, Progress], None] = lambda done_bytes, progress: None  # after each unit
    bad_line: Callable[[BadLine], None] = lambda bad: None  # for each line that is skipped
    warning: Callable[[str], None] = lambda text: None  # before the first unit


def preprocess(
    job: Job,
    workers: int,
    reporting: Reporting = Reporting(),
    overwrite: bool = False,
    save_every_s: float = SAVE_EVERY_S,
) -> dict:
    """Writes the token files of a job, or continues an earlier run of it.

    Args:
        workers: processes that tokenize; 1 = only this one.
        reporting: functions to call meanwhile.
        overwrite: discard what is at the prefix, finished or not.
        save_every_s: seconds between two flushes.

    Returns:
        The summary, which is also written to `PREFIX.preprocess.json`; `up_to_date` says if the job
        was done already.

    Raises:
        ValueError: a bad line (unless they are skipped), a broken file, or another job's files at
            the prefix.
    """
    started = time.monotonic()
    tokenizer = _opened(job.recipe, reporting)
    outputs = [prefix for prefixes in job.outputs() for prefix in prefixes]
    check_not_read((path for output in outputs for path in token_files(output)), job.files)
    journal = Journal(job.prefix, job.fingerprint(tokenizer.eod, tokenizer.bos), outputs)
    # a finished job needs no lock: its folder may be read-only
    if not overwrite and (summary := journal.finished()) is not None:
        return {**summary, "up_to_date": True}
    with owned(job.prefix, *outputs):
        if overwrite:
            journal.discard()
        elif (summary := journal.finished()) is not None:
            return {**summary, "up_to_date": True}
        progress = journal.resume()
        resumed = progress.documents
        dtype = dtype_for_vocab(tokenizer.vocab_size)
        while not progress.complete:
            progress = _write(job, workers, journal, progress, dtype, reporting, save_every_s)
        for prefix in progress.written:
            finish_partial(prefix, dtype)
        summary = _summary(job, progress, tokenizer, dtype) | {
            "resumed_documents": resumed,
            "seconds": round(time.monotonic() - started, 3),
        }
        journal.close(summary)
    return {**summary, "up_to_date": False}


def _opened(recipe: Recipe, reporting: Reporting) -> Tokenizer:
    """Opens the tokenizer; warns of what it does not keep of a text, and of tokens that may stand
    inside documents."""
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.eod, recipe.bos)
    if recipe.prepend_bos and tokenizer.bos is None:
        raise ValueError(
            f"--prepend-bos: {recipe.tokenizer} has no begin-of-text token; name one with --bos"
        )
    if recipe.append_eod and tokenizer.eod is None:
        raise ValueError(
            f"--append-eod: {recipe.tokenizer} has no end-of-document token; name one with --eod"
        )
    if recipe.append_eod and recipe.eod is None:
        _warn_of_turns(tokenizer, reporting)
    for number in [tokenizer.eod] * recipe.append_eod + [tokenizer.bos] * recipe.prepend_bos:
        if number is not None and text_may_hold(tokenizer, number):
            name = tokenizer.token(number)
            reporting.warning(
                f"token {number} ({name!r}) is in every document that spells it, not only where it "
                "is put"
            )
    if tokenizer.switched_off:
        reporting.warning(
            f"{recipe.tokenizer}: {tokenizer.switched_off} is off, so that a text has the same ids "
            "each time"
        )
    if lost := changes_text(tokenizer):
        reporting.warning(
            f"{recipe.tokenizer} does not keep {', '.join(lost)}: decoding its tokens gives "
            "another text"
        )
    return tokenizer


def _warn_of_turns(tokenizer: Tokenizer, reporting: Reporting) -> None:
    """Warns where documents would end with a chat's end of turn, as folders of instruct models
    name it."""
    assert tokenizer.eod is not None
    name = tokenizer.token(tokenizer.eod)
    if not ends_turn(name):
        return
    others = [n for n in EOD_NAMES if tokenizer.has_token(n) and not ends_turn(n)]
    example = f"--eod '{others[0]}'" if others else "--eod TOKEN"
    reporting.warning(
        f"documents end with {name!r}, which ends a turn of a chat; base models are trained with "
        f"another end ({example} names it, --eod '{name}' keeps this one)"
    )


def _summary(job: Job, progress: Progress, tokenizer: Tokenizer, dtype: np.dtype) -> dict:
    return {
        "outputs": {
            p: {"documents": docs, "tokens": tokens}
            for p, (docs, tokens) in progress.written.items()
        },
        "documents": progress.documents - progress.empty,
        "tokens": sum(tokens for _, tokens in progress.written.values()),
        "empty": progress.empty,
        "bad_lines": progress.bad_lines,
        "files": len(job.files),
        "kinds": dict(Counter(job.kinds)),
        "bytes": sum(path.stat().st_size for path in job.files),
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "eod_token": None if tokenizer.eod is None else tokenizer.token(tokenizer.eod),
        "bos": tokenizer.bos if job.recipe.prepend_bos else None,
    }


def _write(
    job: Job,
    workers: int,
    journal: Journal,
    progress: Progress,
    dtype: np.dtype,
    reporting: Reporting,
    save_every_s: float,
) -> Progress:
    """Tokenizes the rest of the corpus into partial files, and saves the journal every
    `save_every_s`.

    Returns:
        `progress`, complete; or that of a job to start over, with a fraction that draws what
        --valid-fraction means.
    """
    writers = [
        [
            IndexedWriter(prefix, dtype, resume_at=progress.written.get(prefix))
            for prefix in prefixes
        ]
        for prefixes in job.outputs()
    ]
    all_writers = [writer for prefixes in writers for writer in prefixes]
    last_save, fraction = time.monotonic(), progress.draw or job.valid_fraction

    def save() -> None:
        for writer in all_writers:
            writer.flush()
        progress.written = {
            writer.prefix: (writer.num_documents, writer.num_tokens) for writer in all_writers
        }
        journal.save(progress)

    try:
        todo = units(job.files, job.text_per, progress.cursor, job.kinds)
        for unit, result in ordered_map(todo, job.recipe, workers):
            _count(progress, result, job.recipe.skip_bad, reporting)
            _append(
                writers, result, _held_out(progress.documents, len(result.lengths[0]), fraction)
            )
            progress.documents += len(result.lengths[0])
            progress.cursor = unit.after
            if time.monotonic() - last_save >= save_every_s:
                save()
                last_save = time.monotonic()
            reporting.progress(unit.done_bytes, progress)
        draw = (
            better_fraction(progress.documents, job.valid_fraction)
            if progress.draw is None
            else None
        )
        progress.complete = draw is None
        save()
    finally:
        for writer in all_writers:
            writer.close()
    if draw is not None:
        progress = Progress(progress.fingerprint, draw=draw)
        journal.save(progress)  # before the next writers empty the files
    return progress


def _count(progress: Progress, result: Tokenized, skip_bad: bool, reporting: Reporting) -> None:
    """Counts the bad lines and empty documents of a unit; raises at a bad line unless they are
    skipped."""
    if result.bad and not skip_bad:
        raise ValueError(f"{result.bad[0]} (--skip-bad counts such lines and continues)")
    for bad in result.bad:
        reporting.bad_line(bad)
    progress.bad_lines += len(result.bad)
    # with several json keys a document is empty when nothing of it is written
    progress.empty += (
        int(np.count_nonzero(sum(result.lengths) == 0)) if len(result.lengths[0]) else 0
    )


def _held_out(first: int, count: int, fraction: float) -> np.ndarray:
    """Whether each of the documents first … first+count−1 belongs to the validation part,
    bool `[count]`."""
    if fraction <= 0:
        return np.zeros(count, dtype=bool)
    threshold = int(fraction * 2**64)
    return np.array(
        [hash_key(VALID_KEY, number) < threshold for number in range(first, first + count)],
        dtype=bool,
    )


def better_fraction(documents: int, fraction: float) -> float | None:
    """Fraction that holds out the share of the documents that `fraction` means, where
    that is far from it.

    Documents are drawn by their running number, while their total is unknown. Of few documents that
    may be far from the share: none of the first 220 is drawn by 0.01. A corpus so small is gone
    through once more.

    Returns:
        A fraction; None where no better one is needed, or there are no two documents.
    """
    num_valid = min(max(1, round(fraction * documents)), documents - 1)
    if not fraction or documents < 2 or documents > NEVER_UNLUCKY / fraction:
        return None
    drawn = sorted(hash_key(VALID_KEY, number) / 2**64 for number in range(documents))
    if abs(sum(share < fraction for share in drawn) - num_valid) <= num_valid * UNLUCKY:
        return None
    low, high = drawn[num_valid - 1], drawn[num_valid]
    return (low + high) / 2


def _append(writers: list[list[IndexedWriter]], result: Tokenized, held_out: np.ndarray) -> None:
    """Appends the documents of a unit that are not empty, each to the writer of its json key and
    part."""
    for split_writers, ids, lengths in zip(writers, result.ids, result.lengths):
        for index, writer in enumerate(split_writers):
            is_mine = held_out == bool(index)
            my_lengths = lengths[is_mine]
            writer.add_documents(ids[np.repeat(is_mine, lengths)], my_lengths[my_lengths > 0])

"""The files in which a preprocessing run records its progress: a journal while it runs, a summary when it is done.

Both contain a fingerprint of the inputs and settings. Only a run with the same fingerprint continues where another has
stopped, and a finished job is recognised instead of repeated.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron5d.data.corpus import Cursor
from megatron5d.data.indexed_dataset import with_suffix


@dataclass
class Progress:
    """How far a job has come."""

    fingerprint: str
    cursor: Cursor = field(default_factory=Cursor)
    written: dict[str, tuple[int, int]] = field(default_factory=dict)  # output prefix -> (documents, tokens)
    documents: int = 0  # taken from the corpus, empty ones included
    empty: int = 0
    bad_lines: int = 0
    complete: bool = False  # everything is written; only the files must get their final names


class Journal:
    """The journal and the summary of one output prefix.

    Args:
        prefix: of the job; both files are named after it.
        fingerprint: of the job.
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
        """The summary if this job is done and its token files are whole, else None.

        Raises:
            ValueError: another job has written its output here.
        """
        if self.path.exists():
            return None
        summary = _read(self.summary_path) if self.summary_path.exists() else {}
        # with another --valid-fraction the same prefix has other outputs
        known = dict.fromkeys([*self.outputs, *summary.get("outputs", {})])
        present = [path for output in known if (path := with_suffix(output, ".idx")).exists()]
        if not present:
            return None
        if summary.get("fingerprint") != self.fingerprint or len(present) < len(self.outputs):
            raise ValueError(f"{present[0]} is there already, from other inputs or settings; --overwrite replaces it")
        item_bytes = np.dtype(summary["dtype"]).itemsize
        for output in self.outputs:
            path = with_suffix(output, ".bin")
            if not path.is_file() or path.stat().st_size != summary["outputs"][output]["tokens"] * item_bytes:
                return None
        return summary

    def resume(self) -> Progress:
        """The progress of this job: what the journal says, or nothing done where there is no journal.

        Raises:
            ValueError: an unfinished run of another job is at the prefix.
        """
        if not self.path.exists():
            return Progress(self.fingerprint)
        values = _read(self.path)
        if values["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"{self.path}: an unfinished run with other inputs or settings wrote {values['documents']} documents; "
                f"repeat its command to finish it, or --overwrite to begin anew"
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
            os.fsync(file.fileno())  # otherwise the rename could survive a loss of power and the content not
        os.replace(temporary, self.path)

    def close(self, summary: dict) -> None:
        """Writes the summary and removes the journal."""
        self.summary_path.write_text(json.dumps({"fingerprint": self.fingerprint, **summary}, indent=1) + "\n")
        self.path.unlink(missing_ok=True)


def _read(path: Path) -> dict:
    """The content of a journal or summary.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); --overwrite begins anew") from error

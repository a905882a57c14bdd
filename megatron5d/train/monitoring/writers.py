"""What a run tells about itself: JSON lines and its progress, and how no writer can end it. Rank 0
alone writes."""

import json
import math
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from tqdm import tqdm

from megatron5d.config.json_file import parse_json

MOST_WAITING = 256  # records that a tracker has not taken
CLOSE_S = 60.0  # a tracker has so long to send what it has
LINE_EVERY_S = 10.0  # or somewhat more, where progress goes to a file


def memory_gb(device: torch.device) -> float:
    """Returns peak memory of this rank in 10⁹ bytes: on the device, or resident where that is the
    CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class JsonLines:
    """One JSON object a step. Records of steps that a resumed run will do again are taken out
    first.

    Args:
        path: of the file; one that is there already is renamed where the run is new, or where it is
            no log.
        done: steps already done; later records are dropped, and so is what is no record: a line cut
            off by a kill, or the zeros that a loss of power leaves.
    """

    def __init__(self, path: str | Path, done: int) -> None:
        self._path = path = Path(path)
        if path.is_dir():
            raise IsADirectoryError(f"log.jsonl = {path} shall be a file, and a folder is there")
        if (
            path.exists()
            and path.stat().st_size
            and (not done or not any(map(self._is_record, self._lines(path))))
        ):
            self._set_aside(path)
        found = self._lines(path)
        kept = [line for line in found if self._step_of(line) <= done]
        path.parent.mkdir(parents=True, exist_ok=True)
        if found[: len(kept)] == kept and found:  # needs no room on a disk that may be full
            os.truncate(path, sum(map(len, kept)))
        elif found:
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_bytes(b"".join(kept))
            os.replace(temporary, path)
        self._file: BinaryIO = self._open()
        self._unwritten: list[bytes] = []  # lines for which there was no room

    @staticmethod
    def _set_aside(path: Path) -> None:
        """Renames the log of another run, or of this one before it started anew, to an unused
        name."""
        aside, number = path.with_name(f"{path.name}.left"), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}.left{number}")
        path.rename(aside)
        print(f"{path} begins anew; what was there is {aside}", file=sys.stderr, flush=True)

    def _open(self) -> BinaryIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._path.open("a+b", buffering=0)

    @staticmethod
    def _lines(path: Path) -> list[bytes]:
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []

    @staticmethod
    def _step_of(line: bytes) -> float:
        """Returns infinite where the line is no record."""
        try:
            step = parse_json(line)["step"] if line.endswith(b"}\n") else math.inf
        except (ValueError, KeyError, TypeError):
            return math.inf
        return step if isinstance(step, (int, float)) else math.inf

    @classmethod
    def _is_record(cls, line: bytes) -> bool:
        return cls._step_of(line) < math.inf

    def write(self, record: dict[str, Any]) -> None:
        """Writes one line; NaN and infinity, which JSON lacks, become null. Raises OSError: it
        cannot be written; the file ends with a whole line, and the next call writes this one
        too."""
        told = {
            key: None if isinstance(v, float) and not math.isfinite(v) else v
            for key, v in record.items()
        }
        self._unwritten.append(json.dumps(told, allow_nan=False).encode() + b"\n")
        self._flush()

    def _flush(self) -> None:
        try:
            removed = os.fstat(self._file.fileno()).st_nlink == 0
        except OSError:  # a file server that has forgotten the file
            self._file = self._open()
            removed = False
        if removed:
            self._restore()
        if self._unwritten:
            self._append(self._file, b"".join(self._unwritten))
            self._unwritten.clear()

    @staticmethod
    def _append(file: BinaryIO, data: bytes) -> None:
        """Writes all or nothing."""
        end = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]  # as much as there is room for
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise

    def _restore(self) -> None:
        """Writes the file again, which is still open here though it was removed; one in its place
        is continued."""
        replaced = self._path.exists() and self._path.stat().st_size
        file = self._open()
        if not replaced:
            self._file.seek(0)
            self._append(file, self._file.read())
        with self._file:
            self._file = file
        print(
            f"{self._path} was {'replaced' if replaced else 'removed'} under way",
            file=sys.stderr,
            flush=True,
        )

    def close(self, code: int = 0) -> None:
        """Raises OSError where there is no room for the last records."""
        with self._file:
            self._flush()

    def abandon(self) -> None:
        """Does nothing: its file is closed already."""


class Writer(Protocol):
    """Where records go."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self, code: int) -> None: ...

    def abandon(self) -> None: ...


@contextmanager
def harmless(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Reports what fails in logging, and lets training continue."""
    try:
        yield
    except Exception as error:
        say(f"WARNING: {what}: {type(error).__name__}: {error}; the training continues")


class InBackground:
    """Hands records to a tracker on a thread of its own, so that one that hangs cannot hold up the
    training.

    Args:
        tracker: whose `write` and `close` may take any time.
        patience_s: seconds that `close` waits for it.
    """

    def __init__(self, tracker: Writer, patience_s: float = CLOSE_S) -> None:
        self._tracker, self._patience_s = tracker, patience_s
        self._calls = queue.Queue[Callable[[], None] | None](MOST_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while self._error is None and (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - raised by the next call on the main thread
                self._error = error

    def write(self, record: dict[str, Any]) -> None:
        """Raises the tracker's own error of an earlier record; TimeoutError where it does not take
        any."""
        self._pass_on(lambda: self._tracker.write(record))

    def close(self, code: int) -> None:
        """Raises as `write`; TimeoutError where the tracker does not end in time."""
        self._pass_on(lambda: self._tracker.close(code))
        with suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(self._patience_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"it has not ended within {self._patience_s:g} s")

    def _pass_on(self, call: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"it hangs, and {MOST_WAITING} records wait for it") from None

    def abandon(self) -> None:
        self._tracker.abandon()


class Writers:
    """All writers of a run. None of them ends it: what a writer meets is told once.

    A file of records is tried again with every record, for a disk that is full today has room
    tomorrow; a tracker that has failed gets nothing more.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._writers: dict[str, Writer] = {}
        self._failing: set[str] = set()

    def add(self, name: str, writer: Writer) -> None:
        """Adds a writer; a config key and its value are its name in messages."""
        self._writers[name] = writer

    def write(self, record: dict[str, Any]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                writer.write(record)
            except Exception as error:
                self._failed(name, writer, record["step"], error)
            else:
                if name in self._failing:
                    self._say(f"{name} is written again, with all steps")
                self._failing.discard(name)

    def _failed(self, name: str, writer: Writer, step: int, error: Exception) -> None:
        again = isinstance(writer, JsonLines)
        what = (
            "its records are kept and tried again at the next step"
            if again
            else "it gets no more records"
        )
        if name not in self._failing:
            self._say(
                f"WARNING: {name}, step {step}: {type(error).__name__}: {error}; the training continues, {what}"
            )
        self._failing.add(name)
        if not again:
            del self._writers[name]
            writer.abandon()

    def close(self, code: int) -> None:
        """Closes the writers of a process that is going to exit with a code."""
        for name, writer in self._writers.items():
            try:
                writer.close(code)
            except Exception as error:
                self._say(f"WARNING: {name} is not complete: {type(error).__name__}: {error}")
                writer.abandon()
        self._writers.clear()


class ProgressDisplay:
    """How far the steps are, on stderr: a bar on a terminal, and a line every 1, 2, 5, 10, 20 ...
    steps in a job's log.

    Args:
        total: steps of the run.
        done: of these, before this process began.
        enabled: False shows nothing, and `say` still speaks.
    """

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not (enabled and on_terminal),
            unit="step",
            desc="train",
            mininterval=0.5,
        )
        self._lines = enabled and not on_terminal
        self._total, self._done = total, done
        # the first step here, slower than others, and when it was over
        self._first: tuple[int, float] | None = None
        self._unsaid: str | None = None  # the line of the last step, where there was none

    def update(self, loss: float, grad_norm: float, tokens_per_s: float) -> None:
        """Counts one more step."""
        self._done += 1
        told = f"loss {readable(loss, 4)}, grad norm {readable(grad_norm, 3)}, {tokens_per_s:,.0f} tokens/s"
        with suppress(OSError):
            self._bar.set_postfix_str(told, refresh=False)
            self._bar.update()
        if not self._lines:
            return
        now = time.perf_counter()
        self._unsaid = f"step {self._done}/{self._total}: {told}"
        every = 1
        if self._first is None:
            self._first = self._done, now
        else:
            step_s = (now - self._first[1]) / (self._done - self._first[0])
            self._unsaid += f", {tqdm.format_interval((self._total - self._done) * step_s)} left"
            every = round_steps(LINE_EVERY_S / max(step_s, 1e-9))
        if self._done == self._total or self._done % every == 0 or self._done == self._first[0]:
            self._say_progress()

    def _say_progress(self) -> None:
        if self._unsaid is not None:
            self.say(self._unsaid)
            self._unsaid = None

    def say(self, text: str) -> None:
        """Prints a line above the bar, or plainly without a bar; drops it where stderr is gone or
        its disk full."""
        with suppress(OSError):
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Shows the last step, also where a signal or train.stop_after made it the last."""
        self._say_progress()
        with suppress(OSError):
            self._bar.close()


def round_steps(steps: float) -> int:
    """Returns the least of 1, 2, 5, 10, 20, 50, ... that is not below a number: the steps between
    two lines.

    Steps of two runs can then be compared, which those of a clock cannot.
    """
    power = 10 ** max(math.ceil(math.log10(max(steps, 1))) - 1, 0)
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= steps)


def readable(value: float, digits: int) -> str:
    """Returns a number with some digits behind the point; in powers of ten where a diverged run
    would fill the line."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.{digits}e}"

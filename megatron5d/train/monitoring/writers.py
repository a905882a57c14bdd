"""Writers of a run's records on rank 0: JSON lines and progress. No writer can end the run."""

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

MAX_QUEUED = 256  # records that a tracker has not taken
CLOSE_S = 60.0  # for a tracker to send its last records
LINE_EVERY_S = 10.0  # at least, where progress goes to a file


def memory_gb(device: torch.device) -> float:
    """Peak memory of this rank in 10⁹ bytes: on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class JsonLines:
    """One JSON object per step, without records of steps that a resumed run repeats.

    Args:
        path: of the file; an existing one is renamed if the run is new, or if it is not a log.
        done: steps already done. Later records are dropped, and so are lines that are no records: a
            line truncated by a kill, or zeros after a loss of power.
    """

    def __init__(self, path: str | Path, done: int) -> None:
        self._path = path = Path(path)
        if path.is_dir():
            raise IsADirectoryError(f"log.jsonl requires a file (got the folder {path})")
        has_content = path.exists() and path.stat().st_size
        if has_content and not (done and any(map(self._is_record, self._lines(path)))):
            self._rename(path)
        lines = self._lines(path)
        written = [line for line in lines if self._step_of(line) <= done]
        path.parent.mkdir(parents=True, exist_ok=True)
        # Truncating needs no space on a disk that may be full.
        if lines[: len(written)] == written and lines:
            os.truncate(path, sum(map(len, written)))
        elif lines:
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_bytes(b"".join(written))
            os.replace(temporary, path)
        self._file: BinaryIO = self._open()
        self._unwritten: list[bytes] = []  # lines for which there was no space

    @staticmethod
    def _rename(path: Path) -> None:
        """Renames the log of another run, or of an earlier start of this one, to an unused name."""
        target, number = path.with_name(f"{path.name}.left"), 1
        while target.exists():
            number += 1
            target = path.with_name(f"{path.name}.left{number}")
        path.rename(target)
        print(f"{path} is a new file; the old one is {target}", file=sys.stderr, flush=True)

    def _open(self) -> BinaryIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._path.open("a+b", buffering=0)

    @staticmethod
    def _lines(path: Path) -> list[bytes]:
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []

    @staticmethod
    def _step_of(line: bytes) -> float:
        """Step of a record; infinite if the line is not a record."""
        try:
            step = parse_json(line)["step"] if line.endswith(b"}\n") else math.inf
        except (ValueError, KeyError, TypeError):
            return math.inf
        return step if isinstance(step, (int, float)) else math.inf

    @classmethod
    def _is_record(cls, line: bytes) -> bool:
        return cls._step_of(line) < math.inf

    def write(self, record: dict[str, Any]) -> None:
        """Writes one line; NaN and infinity, which JSON lacks, become null.

        Raises:
            OSError: it cannot be written. The file ends with a complete line, and the next call
                writes this one, too.
        """
        values = {
            key: None if isinstance(v, float) and not math.isfinite(v) else v
            for key, v in record.items()
        }
        self._unwritten.append(json.dumps(values, allow_nan=False).encode() + b"\n")
        self._flush()

    def _flush(self) -> None:
        try:
            is_removed = os.fstat(self._file.fileno()).st_nlink == 0
        except OSError:  # the handle is stale on a network file system
            self._file = self._open()
            is_removed = False
        if is_removed:
            self._restore()
        if self._unwritten:
            self._append(self._file, b"".join(self._unwritten))
            self._unwritten.clear()

    @staticmethod
    def _append(file: BinaryIO, data: bytes) -> None:
        """Appends all of the data, or nothing."""
        end = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]  # may be short on a full disk
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise

    def _restore(self) -> None:
        """Recreates a removed file, which is still open here; appends to a file in its place."""
        is_replaced = self._path.exists() and self._path.stat().st_size
        file = self._open()
        if not is_replaced:
            self._file.seek(0)
            self._append(file, self._file.read())
        with self._file:
            self._file = file
        event = "replaced" if is_replaced else "removed"
        print(f"{self._path} was {event} during the run", file=sys.stderr, flush=True)

    def close(self, code: int = 0) -> None:
        """Closes the file.

        Raises:
            OSError: there is no space for the last records.
        """
        with self._file:
            self._flush()

    def abandon(self) -> None:
        """Does nothing: the file is already closed."""


class Writer(Protocol):
    """A destination of records."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self, code: int) -> None: ...

    def abandon(self) -> None: ...


@contextmanager
def harmless(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Reports an error of logging and lets training continue."""
    try:
        yield
    except Exception as error:
        say(f"WARNING: {what}: {type(error).__name__}: {error}; training continues")


class InBackground:
    """Passes records to a tracker in a thread, so that a tracker that hangs does not stop training.

    Args:
        tracker: its `write` and `close` may take any time.
        close_s: seconds that `close` waits for it.
    """

    def __init__(self, tracker: Writer, close_s: float = CLOSE_S) -> None:
        self._tracker, self._close_s = tracker, close_s
        self._calls = queue.Queue[Callable[[], None] | None](MAX_QUEUED)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while self._error is None and (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # the next call on the main thread raises it
                self._error = error

    def write(self, record: dict[str, Any]) -> None:
        """Queues a record.

        Raises:
            Exception: the tracker's own error about an earlier record.
            TimeoutError: the tracker does not take records.
        """
        self._enqueue(lambda: self._tracker.write(record))

    def close(self, code: int) -> None:
        """Closes the tracker; errors as of `write`, and TimeoutError if it does not end in time."""
        self._enqueue(lambda: self._tracker.close(code))
        with suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(self._close_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"it did not end within {self._close_s:g} s")

    def _enqueue(self, call: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"it hangs, with {MAX_QUEUED} records in its queue") from None

    def abandon(self) -> None:
        self._tracker.abandon()


class Writers:
    """All writers of a run; their errors are reported once and do not end it.

    A file of records is retried with every record, because a full disk may get space again; a
    tracker that has failed gets no more records.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._writers: dict[str, Writer] = {}
        self._failing: set[str] = set()

    def add(self, name: str, writer: Writer) -> None:
        """Adds a writer; its name in messages is a key and its value."""
        self._writers[name] = writer

    def write(self, record: dict[str, Any]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                writer.write(record)
            except Exception as error:
                self._failed(name, writer, record["step"], error)
            else:
                if name in self._failing:
                    self._say(f"{name} is written again, including the missing steps")
                self._failing.discard(name)

    def _failed(self, name: str, writer: Writer, step: int, error: Exception) -> None:
        retries, effect = isinstance(writer, JsonLines), "it gets no more records"
        if retries:
            effect = "its records are kept, and written once that is possible"
        if name not in self._failing:
            message = f"{name}, step {step}: {type(error).__name__}: {error}"
            self._say(f"WARNING: {message}; training continues, {effect}")
        self._failing.add(name)
        if not retries:
            del self._writers[name]
            writer.abandon()

    def close(self, code: int) -> None:
        """Closes the writers of a process that will exit with this code."""
        for name, writer in self._writers.items():
            try:
                writer.close(code)
            except Exception as error:
                self._say(f"WARNING: {name} is incomplete: {type(error).__name__}: {error}")
                writer.abandon()
        self._writers.clear()


class ProgressDisplay:
    """Progress on stderr: a bar on a terminal; in a log a line every 1, 2, 5, 10, 20 ... steps.

    Args:
        total: steps of the run.
        done: of these, before this process began.
        enabled: False shows no progress; `say` still prints.
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
        # first step of this process, which is slower than others, and its end
        self._first: tuple[int, float] | None = None
        self._unprinted: str | None = None  # line of the last step, if it was not printed

    def update(self, loss: float, grad_norm: float, tokens_per_s: float) -> None:
        """Counts one more step."""
        self._done += 1
        figures = f"loss {readable(loss, 4)}, grad norm {readable(grad_norm, 3)}"
        figures += f", {tokens_per_s:,.0f} tokens/s"
        with suppress(OSError):
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update()
        if not self._lines:
            return
        now, interval = time.perf_counter(), 1
        self._unprinted = f"step {self._done}/{self._total}: {figures}"
        if self._first is None:
            self._first = self._done, now
        else:
            step_s = (now - self._first[1]) / (self._done - self._first[0])
            remaining = tqdm.format_interval((self._total - self._done) * step_s)
            self._unprinted += f", {remaining} left"
            interval = round_steps(LINE_EVERY_S / max(step_s, 1e-9))
        if self._done in (self._total, self._first[0]) or self._done % interval == 0:
            self._print_line()

    def _print_line(self) -> None:
        if self._unprinted is not None:
            self.say(self._unprinted)
            self._unprinted = None

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one; drops it if stderr is not writable."""
        with suppress(OSError):
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Prints the last step, also after a signal or train.stop_after."""
        self._print_line()
        with suppress(OSError):
            self._bar.close()


def round_steps(steps: float) -> int:
    """Smallest of 1, 2, 5, 10, 20, 50, ... that is at least `steps`: the interval of lines.

    Lines of two runs are then about the same steps, which lines by the clock are not.
    """
    power = 10 ** max(math.ceil(math.log10(max(steps, 1))) - 1, 0)
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= steps)


def readable(value: float, digits: int) -> str:
    """A number with decimals; in powers of ten where a diverged run would fill the line."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.{digits}e}"

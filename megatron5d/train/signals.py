"""Signals become a flag that the loop looks at between steps: the run is left in order, with a
checkpoint.

pretrain.py imports this before anything that takes seconds, so it needs neither torch nor what
trains.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ContextDecorator, suppress
from types import FrameType

from megatron5d.topology.launcher import read_environment

END_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_SIGNALS = (*END_SIGNALS, signal.SIGINT)
REQUEUE = 75  # exit code: stopped on a signal with all steps saved (EX_TEMPFAIL)


class EndOnSignals(ContextDecorator):
    """Inside this context SIGTERM and SIGUSR1 end the process at once, to be requeued: there is
    nothing to save yet.

    A thread ends it: a rank that waits for others inside of a library does not come to a Python
    handler.
    """

    def __enter__(self) -> EndOnSignals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=_end_when_told, args=(self._read,), daemon=True)
        self._thread.start()
        # in this order, here and below, a signal in between ends the process, too, and is not lost
        self._outer = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before: dict[int, object] = {
            n: signal.signal(n, lambda *_: None) for n in END_SIGNALS
        }
        return self

    def __exit__(self, *_) -> None:
        _restore(self._before)
        signal.set_wakeup_fd(self._outer)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)


def _end_when_told(pipe: int) -> None:
    """Runs as a thread: the numbers of signals come through the pipe, until its other end is
    closed."""
    while told := os.read(pipe, 1):
        if told[0] in END_SIGNALS:
            with suppress(ValueError):
                if read_environment().rank == 0:
                    os.write(
                        2,
                        f"ended by {signal.Signals(told[0]).name}: no step was under way\n".encode(),
                    )
            os._exit(REQUEUE)


def _restore(handlers: Mapping[int, object]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


class StopFlag:
    """Set by the first of SIGTERM, SIGUSR1, SIGINT; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopFlag:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        self._outer = signal.set_wakeup_fd(-1)  # no longer that of EndOnSignals
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(self._outer)
        _restore(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.received is not None

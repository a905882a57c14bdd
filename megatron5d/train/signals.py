"""Signals become a flag that the loop reads between steps, so that a run ends with a checkpoint.

pretrain.py imports this before anything that takes seconds, so it needs neither torch nor the
training code.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ContextDecorator, suppress
from types import FrameType
from typing import Any

from megatron5d.topology.launcher import read_environment

END_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_SIGNALS = (*END_SIGNALS, signal.SIGINT)
REQUEUE = 75  # exit code: stopped on a signal with all steps saved (EX_TEMPFAIL)


class EndOnSignals(ContextDecorator):
    """Makes SIGTERM and SIGUSR1 end the process at once, to be requeued: nothing needs saving yet.

    A thread ends it, because Python runs no handler while a rank waits inside of a library.
    """

    def __enter__(self) -> EndOnSignals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=_end_on_signal, args=(self._read,), daemon=True)
        self._thread.start()
        # the descriptor before the handlers, and after them on exit: a signal in between ends the
        # process, too, and is not lost
        self._outer_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._outer_handlers = {
            number: signal.signal(number, lambda *_: None) for number in END_SIGNALS
        }
        return self

    def __exit__(self, *_) -> None:
        _restore(self._outer_handlers)
        signal.set_wakeup_fd(self._outer_fd)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)


def _end_on_signal(pipe: int) -> None:
    """Runs as a thread: reads the numbers of signals from a pipe until its other end is closed."""
    while number := os.read(pipe, 1):
        if number[0] in END_SIGNALS:
            with suppress(ValueError):
                if read_environment().rank == 0:
                    name = signal.Signals(number[0]).name
                    os.write(2, f"ended by {name}: no step was in progress\n".encode())
            os._exit(REQUEUE)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class StopFlag:
    """Set by the first of SIGTERM, SIGUSR1, SIGINT; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> StopFlag:
        self._outer_handlers = {
            number: signal.signal(number, self._receive) for number in STOP_SIGNALS
        }
        self._outer_fd = signal.set_wakeup_fd(-1)  # no longer that of EndOnSignals
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(self._outer_fd)
        _restore(self._outer_handlers)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.received is not None

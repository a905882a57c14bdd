"""Signals become a flag that the loop looks at between steps: the run is left in order, with a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from megatron5d.topology.launcher import read_environment

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE = 75  # exit code: stopped on a signal with all steps saved (EX_TEMPFAIL)


def end_on_signals() -> dict[int, object]:
    """Before the loop there is nothing to save: SIGTERM and SIGUSR1 end the process at once, to be requeued.

    Returns:
        signal -> what was to happen before.
    """
    return {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGUSR1)}


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """`end_on_signals` inside this context."""
    before = end_on_signals()
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: Mapping[int, object]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(ValueError):
        if read_environment().rank == 0:
            os.write(2, f"ended by {signal.Signals(number).name}: no step was under way\n".encode())
    sys.exit(REQUEUE)


class StopFlag:
    """Set by the first of SIGTERM, SIGUSR1, SIGINT; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopFlag:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        _restore(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.received is not None

"""Signals become a flag that the loop looks at between steps: the run is left in order, with a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE = 75  # exit code: stopped on a signal with a checkpoint saved (EX_TEMPFAIL)


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
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.received is not None

"""How long something takes on the device's clock, such as waits for what others send."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Exposure:
    """Adds up how long its calls take: on a GPU the time of the stream, by events, elsewhere that of the host.

    Args:
        device: where the calls do their work.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._host_s = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # used again: making one costs the host time

    def during(self, act: Callable[[], T]) -> T:
        """`act()`, timed."""
        if not self._cuda:
            since = time.perf_counter()
            result = act()
            self._host_s += time.perf_counter() - since
            return result
        begin, end = self._free.pop() if self._free else (_event(), _event())
        begin.record()
        result = act()
        end.record()
        self._events.append((begin, end))
        return result

    def clear(self) -> None:
        """Forgets all that was measured."""
        self._host_s = 0.0
        self._free += self._events
        self._events.clear()

    def take(self) -> float:
        """Seconds since the last call or `clear`; on a GPU what the stream has not done yet counts in the next call."""
        seconds, self._host_s = self._host_s, 0.0
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            seconds += begin.elapsed_time(end) / 1e3
            self._free.append((begin, end))
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)

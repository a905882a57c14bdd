"""How long something takes on the device's clock, such as waits for what others send."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Exposure:
    """Adds up how long it takes what it is given. On a GPU the stream's time is measured, by events, not the host's.

    Args:
        device: on which it happens.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._host_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def during(self, act: Callable[[], T]) -> T:
        """`act()`, timed."""
        if not self._cuda:
            begin = time.perf_counter()
            result = act()
            self._host_s += time.perf_counter() - begin
            return result
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        result = act()
        events[1].record()
        self._events.append(events)
        return result

    def clear(self) -> None:
        """Forgets all that was measured."""
        self._host_s = 0.0
        self._events.clear()

    def take(self) -> float:
        """Seconds since the last call or `clear`; on a GPU to be called when the host has waited for the stream."""
        seconds = self._host_s + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self.clear()
        return seconds

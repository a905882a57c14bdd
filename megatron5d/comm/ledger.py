"""The ledger: counts what every collective sends, per axis and operation, and measures how long
this rank waits for the others."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
Totals = dict[tuple[str, str], "Traffic"]
"""(axis, operation) -> what this rank has sent."""


class Exposure:
    """Adds up how long its calls take: on a GPU the stream's time, by events; elsewhere the
    host's."""

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._host_s = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        # events are reused, because making one costs host time
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measures the work inside the context."""
        if not self._cuda:
            start_s = time.perf_counter()
            yield
            self._host_s += time.perf_counter() - start_s
            return
        begin, end = self._free.pop() if self._free else (_event(), _event())
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def time_call(self, act: Callable[[], T]) -> T:
        """Calls `act()` and returns its result; adds up its time."""
        with self.timed():
            return act()

    def clear(self) -> None:
        self._host_s = 0.0
        self._free += self._events
        self._events.clear()

    def take(self) -> float:
        """Seconds since the last call or `clear`; a GPU's unfinished work counts in the next
        call."""
        seconds, self._host_s = self._host_s, 0.0
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            seconds += begin.elapsed_time(end) / 1e3
            self._free.append((begin, end))
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@dataclass
class Traffic:
    """Totals of one (axis, operation) on this rank."""

    calls: int = 0
    elements: int = 0  # sent by this rank, under the ring algorithm
    num_bytes: int = 0


class Ledger:
    """The recorder that axes are built with.

    Attributes:
        totals: Traffic by (axis, operation).
        timing: whether waits are measured, on `device`.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.totals: Totals = defaultdict(Traffic)
        self.timing = False
        self._waits: defaultdict[str, Exposure] = defaultdict(lambda: Exposure(device))

    def record(self, axis: str, op: str, num_elements: int, element_bytes: int) -> None:
        self._add((axis, op), 1, num_elements, num_elements * element_bytes)

    @contextmanager
    def recording(self) -> Iterator[Totals]:
        """Yields what is recorded inside the context, which is not counted; nothing is timed."""
        totals, timing = self.totals, self.timing
        self.totals, self.timing = defaultdict(Traffic), False
        try:
            yield self.totals
        finally:
            self.totals, self.timing = totals, timing

    def add(self, recorded: Totals) -> None:
        """Counts what `recording` has yielded."""
        for key, traffic in recorded.items():
            self._add(key, traffic.calls, traffic.elements, traffic.num_bytes)

    def _add(self, key: tuple[str, str], calls: int, elements: int, num_bytes: int) -> None:
        traffic = self.totals[key]
        traffic.calls += calls
        traffic.elements += elements
        traffic.num_bytes += num_bytes

    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes sent per axis since the last `clear`."""
        sums: defaultdict[str, int] = defaultdict(int)
        for (axis, _), traffic in self.totals.items():
            sums[axis] += traffic.num_bytes
        return dict(sums)

    def wait(self, axis: str, act: Callable[[], T]) -> T:
        """Calls `act()`, which waits for other ranks of an axis; times it while `timing` is set."""
        return self._waits[axis].time_call(act) if self.timing else act()

    def take_waits(self) -> dict[str, float]:
        """Seconds waited on each axis since the last call, as `Exposure.take`."""
        return {axis: exposure.take() for axis, exposure in self._waits.items()}

    def clear(self) -> None:
        self.totals.clear()

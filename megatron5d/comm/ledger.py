"""Counts what every collective sends, per axis and operation, and how long this rank waits for the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from megatron5d.comm.exposure import Exposure

T = TypeVar("T")


@dataclass
class Traffic:
    """Totals of one (axis, operation) on this rank."""

    calls: int = 0
    elements: int = 0  # sent by this rank, under the ring algorithm
    num_bytes: int = 0


class Ledger:
    """The recorder that axes are built with; `totals[axis, op]` is a Traffic.

    Args:
        device: on which waits are measured, while `timing` is set.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.totals: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)
        self.timing = False
        self._waits: defaultdict[str, Exposure] = defaultdict(lambda: Exposure(device))

    def record(self, axis: str, op: str, num_elements: int, element_bytes: int) -> None:
        traffic = self.totals[axis, op]
        traffic.calls += 1
        traffic.elements += num_elements
        traffic.num_bytes += num_elements * element_bytes

    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes sent per axis since the last `clear`."""
        sums: defaultdict[str, int] = defaultdict(int)
        for (axis, _), traffic in self.totals.items():
            sums[axis] += traffic.num_bytes
        return dict(sums)

    def wait(self, axis: str, act: Callable[[], T]) -> T:
        """`act()`, which waits for other ranks of an axis."""
        return self._waits[axis].during(act) if self.timing else act()

    def take_waits(self) -> dict[str, float]:
        """Seconds waited on each axis since the last call, where `timing` was set; see `Exposure.take`."""
        return {axis: exposure.take() for axis, exposure in self._waits.items()}

    def clear(self) -> None:
        """Forgets what was sent."""
        self.totals.clear()

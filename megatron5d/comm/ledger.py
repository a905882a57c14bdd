"""Counts what every collective sends, per axis and operation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass
class Traffic:
    """Totals of one (axis, operation) on this rank."""

    calls: int = 0
    elements: int = 0  # sent by this rank, under the ring algorithm
    num_bytes: int = 0


class Ledger:
    """The recorder that axes are built with; `totals[axis, op]` is a Traffic."""

    def __init__(self) -> None:
        self.totals: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)

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

    def clear(self) -> None:
        self.totals.clear()

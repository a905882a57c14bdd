"""An axis: the ranks that share the work of one parallel dimension, as seen by a layer on one
rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Recorder(Protocol):
    """Counts the communication of an axis (implemented by `comm/ledger.py`)."""

    def record(self, axis: str, op: str, num_elements: int, element_bytes: int) -> None:
        """Counts a collective: the elements that this rank contributes, and the bytes of each."""

    def wait(self, axis: str, act: Callable[[], T]) -> T:
        """Calls `act`, which waits for other ranks, and returns its value; may measure the time."""


@dataclass(frozen=True, eq=False)
class Axis:
    """This process's position in a process group.

    `Axis("tp")` has a single rank: nothing is sent, and torch.distributed is not needed.
    """

    name: str  # the dimension ("tp", "dp", ...), used in messages and in the ledger
    ranks: tuple[int, ...] = (0,)  # global ranks of the group, in the order of their position
    rank: int = 0  # this process's position, 0 ... size-1
    group: Any = None  # process group over `ranks`; None at size 1, where nothing is sent
    recorder: Recorder | None = None  # counts every collective on this axis; None = no counting

    @property
    def size(self) -> int:
        return len(self.ranks)

    def divide(self, n: int, what: str) -> int:
        """Each rank's equal share, n / size.

        Args:
            n: number to be divided.
            what: its name, for the message.

        Raises:
            ValueError: size does not divide n; names both, the axis, and the nearest valid n.
        """
        if n % self.size:
            low = n // self.size * self.size
            nearest = f"{low} or {low + self.size}" if low else f"{self.size}"
            raise ValueError(
                f"{what} = {n} is not divisible by {self.name} = {self.size} "
                f"(parallel.{self.name}); nearest that fit: {nearest}"
            )
        return n // self.size

    def record(self, op: str, num_elements: int, element_bytes: int) -> None:
        """Counts a collective, as in Recorder."""
        if self.recorder is not None:
            self.recorder.record(self.name, op, num_elements, element_bytes)

    def wait(self, act: Callable[[], T]) -> T:
        """Calls `act`, which waits for other ranks of this axis; all such waits are measured
        here."""
        return act() if self.recorder is None else self.recorder.wait(self.name, act)

    def __repr__(self) -> str:
        return f"{self.name}[{self.rank}/{self.size}]"

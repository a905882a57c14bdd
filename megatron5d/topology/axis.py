"""One line of ranks, as a layer sees it: how many, which one am I, and the group to talk to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Recorder(Protocol):
    """What an axis tells about each collective (the ledger of `comm/` is one)."""

    def record(self, axis: str, op: str, num_elements: int, element_bytes: int) -> None: ...

    def wait(self, axis: str, act: Callable[[], T]) -> T: ...


@dataclass(frozen=True, eq=False)
class Axis:
    """Ranks that share the work of one parallel dimension.

    Args:
        name: the dimension ("tp", "dp", ...), used in messages and in the ledger.
        ranks: global ranks on this line, in the order of their position.
        rank: this process's position, 0 ... size-1.
        group: process group over `ranks`; None at size 1, where nothing is ever sent.
        recorder: told about every collective on this axis; None = nobody listens.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: Any = None
    recorder: Recorder | None = None

    @property
    def size(self) -> int:
        """Number of ranks; 1 where this dimension cuts nothing."""
        return len(self.ranks)

    def divide(self, n: int, what: str) -> int:
        """n / size, for a `what` that this axis cuts into equal shares.

        Raises:
            ValueError: size does not divide n; names both numbers, the axis, and the nearest values of n that fit.
        """
        if n % self.size:
            low = n // self.size * self.size
            fits = f"{low} or {low + self.size}" if low else f"{self.size}"
            raise ValueError(
                f"{what} = {n} is not divisible by {self.name} = {self.size} (parallel.{self.name}); "
                f"nearest that fit: {fits}"
            )
        return n // self.size

    def wait(self, act: Callable[[], T]) -> T:
        """`act()`, which waits for other ranks of this axis: every such wait goes through here."""
        return act() if self.recorder is None else self.recorder.wait(self.name, act)

    def __repr__(self) -> str:
        return f"{self.name}[{self.rank}/{self.size}]"


def single(name: str) -> Axis:
    """An axis of one rank: the same code paths, no communication, no torch.distributed."""
    return Axis(name)

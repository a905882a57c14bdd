"""How all ranks learn that something went wrong on one of them, before they wait for it in a collective.

A rank that raises alone leaves the others in their next collective until `parallel.timeout_s`. What may fail on one
rank alone (files, above all) therefore runs inside `on_every_rank` or `on_rank_0`, and then every rank raises at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
Fault = tuple[type[Exception], str]  # what other ranks raise, and its message


class Failure(NamedTuple):
    """What went wrong on one rank, and on how many others something did."""

    rank: int
    text: str
    others: int

    @property
    def more(self) -> str:
        """How many other ranks failed, to be appended to a message; "" where none did."""
        return f" (and {self.others} more rank{'s' if self.others > 1 else ''})" if self.others else ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}{self.more}"


def on_every_rank(act: Callable[[], T]) -> T:
    """Calls `act`, which must not communicate, on every rank; if it raises on some ranks, every rank raises.

    Returns:
        This rank's value.

    Raises:
        Exception: the rank's own error where `act` raised.
        OSError, ValueError: on other ranks, with the first such rank and its message. For any other error a
            RuntimeError with that rank's call stack.

    Comm: as `first_failure`.
    """
    value, error = None, None
    try:
        value = act()
    except Exception as raised:  # noqa: BLE001 - raised again below
        error = raised
    found = _first(None if error is None else _told(error))
    if error is not None:
        raise error
    if found is not None:
        rank, (kind, text), others = found
        raise kind(str(Failure(rank, text, others)))
    return cast(T, value)


def on_rank_0(act: Callable[[], T]) -> T:
    """Calls `act`, which must not communicate, on rank 0 alone.

    Returns:
        Its value, which must be picklable, on every rank.

    Raises:
        Exception: on every rank, as in `on_every_rank`.

    Comm: a broadcast of the value over the world.
    """
    if not dist.is_initialized():
        return act()
    said, error = list[Any]([None, None]), None
    if dist.get_rank() == 0:
        try:
            said[0] = act()
        except Exception as raised:  # noqa: BLE001 - raised again below
            error, said[1] = raised, _told(raised)
    dist.broadcast_object_list(said, src=0)
    if error is not None:
        raise error
    if said[1] is not None:
        kind, text = said[1]
        raise kind(str(Failure(0, text, 0)))
    return said[0]


def first_failure(fault: str | None, *, alone: bool = False) -> Failure | None:
    """Returns the failure of the first rank on which something went wrong, the same on every rank; None where all
    went well.

    Args:
        fault: of this rank, in words; None = none.
        alone: this process asks for itself, without communication.

    Comm: unless alone an all_reduce of one number over the world. Where something went wrong one more, and a broadcast
        of the words. (After an all_gather of objects each rank would read every other's answer back from its GPU one by
        one, which takes seconds for thousands of them.)
    """
    found = _first(fault, alone)
    return None if found is None else Failure(*found)


def failure_among(faults: Sequence[str | None]) -> Failure | None:
    """Finds the `first_failure` without communication, where rank 0 knows the faults of all ranks, in their order."""
    failed = [rank for rank, fault in enumerate(faults) if fault]
    return Failure(failed[0], faults[failed[0]] or "", len(failed) - 1) if failed else None


def of_any_rank(value: T | None) -> T | None:
    """Returns the value of the first rank that has one, the same on every rank; None where none has.

    Comm: as `first_failure`.
    """
    found = _first(value)
    return None if found is None else found[1]


def _first(fault: T | None, alone: bool = False) -> tuple[int, T, int] | None:
    """Returns (rank, fault, number of others) of the first rank with a fault; communicates as `first_failure`."""
    if alone or not dist.is_initialized():
        return None if fault is None else (0, fault, 0)
    rank, device = dist.get_rank(), "cuda" if dist.get_backend() == "nccl" else "cpu"
    count = torch.tensor(int(fault is not None), device=device)
    dist.all_reduce(count)
    if not count:
        return None
    first = torch.tensor(dist.get_world_size() if fault is None else rank, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    said = [fault]
    dist.broadcast_object_list(said, src=int(first))
    return int(first), cast(T, said[0]), int(count) - 1


def _told(error: Exception) -> Fault:
    """Returns what the other ranks raise for this rank's error: the message, or the call stack of what is our
    mistake."""
    for kind in (OSError, ValueError):
        if isinstance(error, kind):
            return kind, str(error)
    return RuntimeError, "".join(traceback.format_exception(error))

"""How all ranks learn that something went wrong on one of them, before they wait for it in a
collective.

A rank that raises alone leaves the others in their next collective until `parallel.timeout_s`. What
may fail on one rank alone (files, above all) therefore runs inside `on_every_rank` or `on_rank_0`,
and then every rank raises at once.

Ranks send each other JSON, or bytes: nothing that arrives is unpickled.
"""

import json
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from megatron5d.config.errors import Refused

T = TypeVar("T")
_RAISED: dict[str, type[Exception]] = {
    "OSError": OSError,
    "Refused": Refused,
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
}
_BYTES, _FAULT = b"\0", b"\1"  # before what is not JSON, which begins with neither


class Failure(NamedTuple):
    """What went wrong on one rank, and on how many others something did."""

    rank: int
    text: str
    others: int

    @property
    def more(self) -> str:
        """How many other ranks failed, to be appended to a message; "" where none did."""
        return (
            f" (and {self.others} more rank{'s' if self.others > 1 else ''})" if self.others else ""
        )

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}{self.more}"


def on_every_rank(act: Callable[[], T]) -> T:
    """Calls `act`, which must not communicate, on every rank; if it raises on some ranks, every
    rank raises.

    Returns this rank's value. Raises Exception: the rank's own error where `act` raised. Raises
    OSError, ValueError: on other ranks, with the first such rank and its message. For any other
    error a RuntimeError with that rank's call stack.

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
        raise _RAISED[kind](str(Failure(rank, text, others)))
    return cast(T, value)


def on_rank_0(act: Callable[[], T]) -> T:
    """Calls `act`, which must not communicate, on rank 0 alone.

    Returns its value on every rank: bytes, or what JSON holds. Where there are several ranks,
    tuples become lists. Raises Exception: on every rank, as in `on_every_rank`.

    Comm: a broadcast of the value over the world.
    """
    if not dist.is_initialized():
        return act()
    message, error = None, None
    if dist.get_rank() == 0:
        try:
            message = _encoded(act())
        except Exception as raised:  # noqa: BLE001 - raised again below
            error, message = raised, _FAULT + _encoded(_told(raised))
    message = broadcast_bytes(message, 0)
    if error is not None:
        raise error
    if message.startswith(_FAULT):
        kind, text = json.loads(message[1:])
        raise _RAISED[kind](str(Failure(0, text, 0)))
    return cast(T, _decoded(message))


def broadcast_bytes(message: bytes | None, source: int) -> bytes:
    """Broadcasts a message of one rank, at least one byte; None on the others. Comm: its length,
    and its bytes."""
    device = _device()
    size = torch.tensor(len(message or b""), device=device)
    dist.broadcast(size, source)
    content = torch.empty(int(size), dtype=torch.uint8, device=device)
    if message is not None:
        content.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(content, source)
    return content.cpu().numpy().tobytes()


def gather_json(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gathers a value that JSON holds from each rank of a group, in their order.

    Comm: all_gather of their lengths, and of as many bytes as the longest has.
    """
    message, device = _encoded(mine), _device(group)
    sizes = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor(len(message), device=device), group=group)
    longest = max(int(size) for size in sizes)
    content = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(content) for _ in sizes]
    dist.all_gather(gathered, content, group=group)
    # blanks at the end are no fault of JSON
    return [json.loads(each.cpu().numpy().tobytes()) for each in gathered]


def _device(group: dist.ProcessGroup | None = None) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _encoded(value: object) -> bytes:
    return _BYTES + value if isinstance(value, bytes) else json.dumps(value).encode()


def _decoded(message: bytes) -> Any:
    return message[1:] if message.startswith(_BYTES) else json.loads(message)


def first_failure(fault: str | None, *, alone: bool = False) -> Failure | None:
    """Returns the failure of the first rank on which something went wrong, the same on every rank;
    None where all went well.

    Args:
        fault: of this rank, in words; None = none.
        alone: this process asks for itself, without communication.

    Comm: unless alone an all_reduce of one number over the world. Where something went wrong one
        more, and a broadcast of the words. (After an all_gather of objects each rank would read
        every other's answer back from its GPU one by one, which takes seconds for thousands of
        them.)
    """
    found = _first(fault, alone)
    return None if found is None else Failure(*found)


def first_failure_in(faults: Sequence[str | None]) -> Failure | None:
    """Finds the `first_failure` without communication, where rank 0 knows the faults of all ranks,
    in their order."""
    failed = [rank for rank, fault in enumerate(faults) if fault]
    return Failure(failed[0], faults[failed[0]] or "", len(failed) - 1) if failed else None


def first_value(value: T | None) -> T | None:
    """Returns the value of the first rank that has one, the same on every rank; None where none
    has.

    Comm: as `first_failure`.
    """
    found = _first(value)
    return None if found is None else found[1]


def _first(fault: T | None, alone: bool = False) -> tuple[int, T, int] | None:
    """Returns (rank, fault, number of others) of the first rank with a fault; communicates as
    `first_failure`."""
    if alone or not dist.is_initialized():
        return None if fault is None else (0, fault, 0)
    rank, device = dist.get_rank(), _device()
    count = torch.tensor(int(fault is not None), device=device)
    dist.all_reduce(count)
    if not count:
        return None
    first = torch.tensor(dist.get_world_size() if fault is None else rank, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    said = broadcast_bytes(_encoded(fault) if rank == int(first) else None, int(first))
    return int(first), cast(T, _decoded(said)), int(count) - 1


def _told(error: Exception) -> tuple[str, str]:
    """Returns what the other ranks raise for this rank's error: its kind and message, or our call
    stack."""
    for kind in ("OSError", "Refused", "ValueError"):
        if isinstance(error, _RAISED[kind]):
            return kind, str(error)
    return "RuntimeError", "".join(traceback.format_exception(error))

"""Errors of one rank that every rank learns of, before the others wait for it in a collective.

A rank that raises alone leaves the others in their next collective until `parallel.timeout_s`. An
action that may fail on one rank alone (reading files, above all) therefore runs inside
`on_every_rank` or `on_rank_0`, and then every rank raises at once.

Ranks send each other JSON or bytes: nothing that arrives is unpickled.
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
# Prefixes of bytes and of errors; no JSON begins with them.
_BYTES, _ERROR = b"\0", b"\1"


class Failure(NamedTuple):
    """The error of the first rank that failed."""

    rank: int
    text: str
    num_others: int  # ranks that failed as well

    @property
    def more(self) -> str:
        """How many other ranks failed, to be appended to a message; "" where none did."""
        plural = "s" if self.num_others > 1 else ""
        return f" (and {self.num_others} more rank{plural})" if self.num_others else ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}{self.more}"


def on_every_rank(act: Callable[[], T]) -> T:
    """Calls `act`, which must not communicate, on every rank; if some raise, all of them raise.

    Returns:
        This rank's value.

    Raises:
        Exception: this rank's own error, where `act` raised.
        OSError, Refused, ValueError: on the other ranks, with the first such rank and its message.
        RuntimeError: on the other ranks, for any other error, with its call stack.

    Comm: as `first_failure`.
    """
    value, error = None, None
    try:
        value = act()
    except Exception as raised:  # noqa: BLE001 - raised again below
        error = raised
    first = _first(None if error is None else _kind_and_text(error))
    if error is not None:
        raise error
    if first is not None:
        rank, (kind, text), num_others = first
        raise _RAISED[kind](str(Failure(rank, text, num_others)))
    return cast(T, value)


def on_rank_0(act: Callable[[], T]) -> T:
    """Calls `act`, which must not communicate, on rank 0 alone.

    Returns:
        Its value, on every rank: bytes or any JSON value. Where there are several ranks, tuples
        become lists.

    Raises:
        Exception: on every rank, as in `on_every_rank`.

    Comm: a broadcast over the world of the value, or of the error.
    """
    if not dist.is_initialized():
        return act()
    message, error = None, None
    if dist.get_rank() == 0:
        try:
            message = _encoded(act())
        except Exception as raised:  # noqa: BLE001 - raised again below
            error, message = raised, _ERROR + _encoded(_kind_and_text(raised))
    message = broadcast_bytes(message, 0)
    if error is not None:
        raise error
    if message.startswith(_ERROR):
        kind, text = json.loads(message[1:])
        raise _RAISED[kind](str(Failure(0, text, 0)))
    return cast(T, _decoded(message))


def broadcast_bytes(message: bytes | None, source: int) -> bytes:
    """Broadcasts a message of at least one byte; it is None on all ranks but the source.

    Comm: broadcasts of its length and of its bytes.
    """
    device = _device()
    size = torch.tensor(len(message or b""), device=device)
    dist.broadcast(size, source)
    content = torch.empty(int(size), dtype=torch.uint8, device=device)
    if message is not None:
        content.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(content, source)
    return content.cpu().numpy().tobytes()


def broadcast_text(source: int, text: str) -> str:
    """Broadcasts a text of at least one character; only the source's is sent.

    Comm: as `broadcast_bytes`.
    """
    if not dist.is_initialized():
        return text
    message = text.encode() if dist.get_rank() == source else None
    return broadcast_bytes(message, source).decode()


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gathers a JSON value from each rank of a group, in their order.

    Comm: all_gather of their lengths, and of messages padded to the longest.
    """
    message, device = _encoded(value), _device(group)
    sizes = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor(len(message), device=device), group=group)
    longest = max(int(size) for size in sizes)
    # JSON may end in blanks
    content = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(content) for _ in sizes]
    dist.all_gather(gathered, content, group=group)
    return [json.loads(content.cpu().numpy().tobytes()) for content in gathered]


def _device(group: dist.ProcessGroup | None = None) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _encoded(value: object) -> bytes:
    return _BYTES + value if isinstance(value, bytes) else json.dumps(value).encode()


def _decoded(message: bytes) -> Any:
    return message[1:] if message.startswith(_BYTES) else json.loads(message)


def first_failure(error: str | None, *, local_only: bool = False) -> Failure | None:
    """The failure of the first rank that has an error, the same on every rank; None without errors.

    Args:
        error: of this rank, in words; None = none.
        local_only: considers this rank only, without communication.

    Comm: unless local_only, an all_reduce of one number over the world; after an error another one,
        and a broadcast of the words. (An all_gather of objects takes seconds for thousands of
        ranks, because each rank reads every answer back from its GPU one by one.)
    """
    first = _first(error, local_only)
    return None if first is None else Failure(*first)


def first_failure_in(errors: Sequence[str | None]) -> Failure | None:
    """The `first_failure` of the errors of all ranks, in their order, without communication."""
    failed = [rank for rank, error in enumerate(errors) if error]
    return Failure(failed[0], errors[failed[0]] or "", len(failed) - 1) if failed else None


def first_value(value: T | None) -> T | None:
    """The value of the first rank that has one, the same on every rank; None where none has.

    Comm: as `first_failure`.
    """
    first = _first(value)
    return None if first is None else first[1]


def _first(value: T | None, local_only: bool = False) -> tuple[int, T, int] | None:
    """(rank, value, number of others) of the first rank with a value.

    Comm: as `first_failure`.
    """
    if local_only or not dist.is_initialized():
        return None if value is None else (0, value, 0)
    rank, device = dist.get_rank(), _device()
    count = torch.tensor(int(value is not None), device=device)
    dist.all_reduce(count)
    if not count:
        return None
    first = torch.tensor(dist.get_world_size() if value is None else rank, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    message = broadcast_bytes(_encoded(value) if rank == int(first) else None, int(first))
    return int(first), cast(T, _decoded(message)), int(count) - 1


def _kind_and_text(error: Exception) -> tuple[str, str]:
    """The other ranks' error in place of this rank's: its kind and message, or the call stack."""
    for kind in ("OSError", "Refused", "ValueError"):
        if isinstance(error, _RAISED[kind]):
            return kind, str(error)
    return "RuntimeError", "".join(traceback.format_exception(error))

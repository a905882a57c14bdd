"""Failures of collectives and P2P messages, which name the ranks that do not answer: dead ones and
those that hang."""

import zlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron5d.topology.axis import Axis
from megatron5d.topology.rendezvous import default_store, missing_ranks, ranks_text, wait_until

_KEY = "megatron5d/lost"  # in the store
_ANSWERS = f"{_KEY}/answers"
# for other ranks to notice the same: they began to wait within a step of each other
PATIENCE_S = 10.0


class CollectiveError(ConnectionError):
    """A collective failed, or did not end within `parallel.timeout_s`."""

    def __init__(self, op: str, axis: Axis, error: BaseException) -> None:
        who = _described(silent_ranks(axis.ranks))
        where = f"{axis.name} (ranks {ranks_text(axis.ranks)})"
        super().__init__(f"{op} over {where} failed: {who}. The backend says: {_first_line(error)}")


class P2PError(ConnectionError):
    """A message failed, or did not arrive within `parallel.timeout_s`.

    Args:
        doing: "receiving from" or "sending to".
    """

    def __init__(self, doing: str, rank: int, error: BaseException) -> None:
        said = _first_line(error)
        if "timed out" in said.lower():
            who = _described(silent_ranks((rank,)))
        else:  # a connection breaks when the peer's process ends, and the first one to end matters
            first = _first_gone(rank)
            who = f"rank {first} is gone" + ("" if first == rank else f", and rank {rank} after it")
        super().__init__(f"{doing} rank {rank} failed: {who}. The backend says: {said}")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _described(silent: list[int] | None) -> str:
    if silent is None:
        return "rank 0, where all ranks met, does not answer either"
    if not silent:
        return "yet all of them answer, and nobody has missed another rank"
    ranks = f"ranks {ranks_text(silent)} do" if len(silent) > 1 else f"rank {silent[0]} does"
    return f"{ranks} not answer within {PATIENCE_S:g} s: dead, or hanging"


def _first_gone(rank: int) -> int:
    """Returns the rank that was missed first by any rank, if the default store is still alive, else
    this one."""
    try:
        store = default_store()
        store.set_timeout(timedelta(seconds=5))
        return int(store.compare_set(f"{_KEY}/first_gone", "", str(rank)))
    except (RuntimeError, ValueError, AttributeError):  # the store's rank is dead
        return rank


def wait_for_work(work: Any, op: str, axis: Axis) -> None:
    """Waits for a collective. Raises CollectiveError: it failed."""
    try:
        axis.wait(work.wait)
    except RuntimeError as error:
        raise CollectiveError(op, axis, error) from error


def silent_ranks(ranks: tuple[int, ...]) -> list[int] | None:
    """Finds the ranks that do not report within `PATIENCE_S` that they miss a rank, too.

    Args:
        ranks: global ranks of a process group.

    Returns:
        Those of this group; if all of it answer, because they wait for other ranks in turn, those
        that another group has found. None if the default store is gone.

    Comm: the store; the first rank of the group that arrives checks all of it, the others wait for
        its result.
    """
    try:
        store, rank = default_store(), dist.get_rank()
        store.set_timeout(timedelta(seconds=PATIENCE_S))
        store.set(f"{_ANSWERS}/{rank}", "")
        found = f"{_KEY}/group/{zlib.crc32(repr(ranks).encode())}"
        seeker = int(store.compare_set(f"{found}/seeker", "", str(rank)))
        if seeker == rank:
            wait_until(lambda: not missing_ranks(store, _ANSWERS, ranks), PATIENCE_S)
            missing = missing_ranks(store, _ANSWERS, ranks)
            if missing:
                store.set(f"{_KEY}/silent", _written(missing))
            store.set(found, _written(missing))
        elif not wait_until(lambda: store.check([found]), 2 * PATIENCE_S):
            return [seeker]  # it answered once, and nothing since
        missing = _ranks(store.get(found))
        # another group's wait may have begun as late as this one's has ended
        if not missing and wait_until(lambda: store.check([f"{_KEY}/silent"]), 2 * PATIENCE_S):
            missing = _ranks(store.get(f"{_KEY}/silent"))
        return missing
    except (RuntimeError, ValueError, AttributeError):
        return None


def _written(ranks: list[int]) -> str:
    return ",".join(map(str, ranks))


def _ranks(written: bytes) -> list[int]:
    return [int(rank) for rank in written.decode().split(",") if rank]

"""A collective or message that fails names the ranks that do not answer: the dead, and those that hang."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron5d.topology.axis import Axis
from megatron5d.topology.rendezvous import default_store, missing_ranks, ranks_text, wait_until

_KEY = "megatron5d/lost"  # in the store
_ANSWERS = f"{_KEY}/answers"
PATIENCE_S = 10.0  # for other ranks to notice the same: they began to wait within a step of each other


class LineLost(ConnectionError):
    """A collective has failed, or not ended within `parallel.timeout_s`.

    Args:
        op: what was to be done.
        axis: its line of ranks.
        error: what the backend said.
    """

    def __init__(self, op: str, axis: Axis, error: BaseException) -> None:
        who = _told(silent_ranks(axis.ranks))
        super().__init__(
            f"{op} over {axis.name} (ranks {ranks_text(axis.ranks)}) failed: {who}. The backend says: {_said(error)}"
        )


class PeerLost(ConnectionError):
    """A message has failed, or not come within `parallel.timeout_s`.

    Args:
        doing: what was to be done with the other end, in the form "receiving from".
        rank: the other end's global rank.
        error: what the backend said.
    """

    def __init__(self, doing: str, rank: int, error: BaseException) -> None:
        said = _said(error)
        if "timed out" in said.lower():
            who = _told(silent_ranks((rank,)))
        else:  # a connection breaks when its other end's process ends, and the first one's end is what matters
            first = _first_gone(rank)
            who = f"rank {first} is gone" + ("" if first == rank else f", and rank {rank} after it")
        super().__init__(f"{doing} rank {rank} failed: {who}. The backend says: {said}")


def _said(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _told(silent: list[int] | None) -> str:
    if silent is None:
        return "rank 0, where all ranks met, does not answer either"
    if not silent:
        return "yet all of them answer, and nobody has missed another rank"
    ranks = f"ranks {ranks_text(silent)} do" if len(silent) > 1 else f"rank {silent[0]} does"
    return f"{ranks} not answer within {PATIENCE_S:g} s: dead, or hanging"


def _first_gone(rank: int) -> int:
    """The rank that anybody was first to miss, as far as the store that all ranks met at can still tell."""
    try:
        store = default_store()
        store.set_timeout(timedelta(seconds=5))
        return int(store.compare_set(f"{_KEY}/first_gone", "", str(rank)))
    except (RuntimeError, ValueError, AttributeError):  # the store died with its rank
        return rank


def finish(work: Any, op: str, axis: Axis) -> None:
    """Waits for a collective.

    Raises:
        LineLost: it failed.
    """
    try:
        axis.wait(work.wait)
    except RuntimeError as error:
        raise LineLost(op, axis, error) from error


def silent_ranks(line: tuple[int, ...]) -> list[int] | None:
    """Global ranks that do not say within `PATIENCE_S` that they have lost somebody, too.

    Those of this line; where all of it answers, because they wait for others in turn, those that another line has
    found. None where the store that all ranks met at is gone.

    Comm: the store; the first rank of the line that comes looks for all of it, the others wait for what it finds.
    """
    try:
        store, rank = default_store(), dist.get_rank()
        store.set_timeout(timedelta(seconds=PATIENCE_S))
        store.set(f"{_ANSWERS}/{rank}", "")
        found = f"{_KEY}/line/{zlib.crc32(repr(line).encode())}"
        seeker = int(store.compare_set(f"{found}/seeker", "", str(rank)))
        if seeker == rank:
            wait_until(lambda: not missing_ranks(store, _ANSWERS, line), PATIENCE_S)
            missing = missing_ranks(store, _ANSWERS, line)
            if missing:
                store.set(f"{_KEY}/silent", _written(missing))
            store.set(found, _written(missing))
        elif not wait_until(lambda: store.check([found]), 2 * PATIENCE_S):
            return [seeker]  # it answered once, and nothing since
        missing = _ranks(store.get(found))
        # another line's patience may have begun as late as this one's has ended
        if not missing and wait_until(lambda: store.check([f"{_KEY}/silent"]), 2 * PATIENCE_S):
            missing = _ranks(store.get(f"{_KEY}/silent"))
        return missing
    except (RuntimeError, ValueError, AttributeError):
        return None


def _written(ranks: list[int]) -> str:
    return ",".join(map(str, ranks))


def _ranks(written: bytes) -> list[int]:
    return [int(rank) for rank in written.decode().split(",") if rank]

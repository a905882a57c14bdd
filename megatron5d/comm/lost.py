"""A collective or message that fails names the ranks that do not answer: the dead, and those that hang."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron5d.topology.axis import Axis

_KEY = "megatron5d/lost"  # in the store
PATIENCE_S = 10.0  # for other ranks to notice the same: they began to wait within a step of each other


class LineLost(ConnectionError):
    """A collective has failed, or not ended within `parallel.timeout_s`.

    Args:
        op: what was to be done.
        axis: its line of ranks.
        error: what the backend said.
    """

    def __init__(self, op: str, axis: Axis, error: BaseException) -> None:
        ranks = ", ".join(map(str, axis.ranks[:16])) + (", ..." if axis.size > 16 else "")
        who = _told(silent_ranks(axis.ranks))
        super().__init__(f"{op} over {axis.name} (ranks {ranks}) failed: {who}. The backend says: {_said(error)}")


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
        return "and rank 0, where all ranks met, does not answer"
    if not silent:
        return "yet all of them answer, and nobody has missed another rank"
    shown = ", ".join(map(str, silent[:16])) + (", ..." if len(silent) > 16 else "")
    ranks = f"ranks {shown} do" if len(silent) > 1 else f"rank {shown} does"
    return f"{ranks} not answer within {PATIENCE_S:g} s: dead, or hanging"


def _first_gone(rank: int) -> int:
    """The rank that anybody was first to miss, as far as the store that all ranks met at can still tell."""
    try:
        store = dist.distributed_c10d._get_default_store()
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

    Comm: the store, a few messages a rank.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=PATIENCE_S))
        store.set(f"{_KEY}/answers/{dist.get_rank()}", "")
        missing, deadline = list(line), time.monotonic() + PATIENCE_S
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([f"{_KEY}/answers/{rank}"])]
            time.sleep(0.1)
        if missing:
            store.set(f"{_KEY}/silent", ",".join(map(str, missing)))
            return missing
        deadline += PATIENCE_S  # that line's patience may have begun as late as this one's has ended
        while not store.check([f"{_KEY}/silent"]):
            if time.monotonic() > deadline:
                return []
            time.sleep(0.1)
        return [int(rank) for rank in store.get(f"{_KEY}/silent").decode().split(",")]
    except (RuntimeError, ValueError, AttributeError):
        return None

"""Errors of collectives and messages, which name the ranks that do not answer: dead ones and those
that hang."""

import json
import zlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron5d.topology.axis import Axis
from megatron5d.topology.rendezvous import default_store, missing_ranks, ranks_text, wait_until

# keys in the default store
_KEY = "megatron5d/lost"
_ANSWERS = f"{_KEY}/answers"
_SILENT = f"{_KEY}/silent"
# for other ranks to notice the same: they began to wait within a step of each other
PATIENCE_S = 10.0


class CollectiveError(ConnectionError):
    """A collective failed, or did not end within `parallel.timeout_s`."""

    def __init__(self, op: str, axis: Axis, error: BaseException) -> None:
        cause = _described(silent_ranks(axis.ranks))
        group = f"{axis.name} (ranks {ranks_text(axis.ranks)})"
        super().__init__(f"{op} over {group} failed: {cause}. The backend says: {_line_1(error)}")


class P2PError(ConnectionError):
    """A message failed, or did not arrive within `parallel.timeout_s`.

    Args:
        action: "receiving from" or "sending to".
    """

    def __init__(self, action: str, rank: int, error: BaseException) -> None:
        text = _line_1(error)
        if "timed out" in text.lower():
            cause = _described(silent_ranks((rank,)))
        else:  # a connection breaks when the peer's process ends, and the first one to end matters
            first = _first_gone(rank)
            cause = f"rank {first} is gone" + ("" if first == rank else f", then rank {rank}")
        super().__init__(f"{action} rank {rank} failed: {cause}. The backend says: {text}")


def _line_1(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _described(silent: list[int] | None) -> str:
    if silent is None:
        return "rank 0, where all ranks met, does not answer either"
    if not silent:
        return "yet all of them answer, and no rank has reported another one missing"
    ranks = f"ranks {ranks_text(silent)} do" if len(silent) > 1 else f"rank {silent[0]} does"
    return f"{ranks} not answer within {PATIENCE_S:g} s: dead, or hanging"


def _first_gone(rank: int) -> int:
    """The rank that any rank reported missing first; `rank` if the default store is gone."""
    try:
        store = default_store()
        store.set_timeout(timedelta(seconds=5))
        return int(store.compare_set(f"{_KEY}/first_gone", "", str(rank)))
    except (RuntimeError, ValueError, AttributeError):  # the store's rank is dead
        return rank


def wait_for_work(work: Any, op: str, axis: Axis) -> None:
    """Waits for a collective.

    Raises:
        CollectiveError: it failed.
    """
    try:
        axis.wait(work.wait)
    except RuntimeError as error:
        raise CollectiveError(op, axis, error) from error


def silent_ranks(ranks: tuple[int, ...]) -> list[int] | None:
    """Finds the ranks that do not report within `PATIENCE_S` that they miss a rank, too.

    Args:
        ranks: global ranks of a process group.

    Returns:
        The silent ranks of this group; if all of it answer, because they wait for other ranks in
        turn, the silent ranks of another group. None if the default store is gone.

    Comm: the store; the first rank of the group that arrives checks all of it, the others wait for
        its result.
    """
    try:
        store, rank = default_store(), dist.get_rank()
        store.set_timeout(timedelta(seconds=PATIENCE_S))
        store.set(f"{_ANSWERS}/{rank}", "")
        result_key = f"{_KEY}/group/{zlib.crc32(repr(ranks).encode())}"
        seeker = int(store.compare_set(f"{result_key}/seeker", "", str(rank)))
        if seeker == rank:
            wait_until(lambda: not missing_ranks(store, _ANSWERS, ranks), PATIENCE_S)
            missing = missing_ranks(store, _ANSWERS, ranks)
            if missing:
                store.set(_SILENT, json.dumps(missing))
            store.set(result_key, json.dumps(missing))
        elif not wait_until(lambda: store.check([result_key]), 2 * PATIENCE_S):
            return [seeker]  # it answered once, but not since
        missing = json.loads(store.get(result_key))
        # another group's wait may have begun only when this one's ended
        if not missing and wait_until(lambda: store.check([_SILENT]), 2 * PATIENCE_S):
            missing = json.loads(store.get(_SILENT))
        return missing
    except (RuntimeError, ValueError, AttributeError):
        return None

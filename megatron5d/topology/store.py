"""The key-value store through which the ranks found each other, and registers in it: named sets of ranks.

One process serves it, rank 0 or the launcher. So that its load does not grow with the square of the world, every rank
may send a constant number of requests, and only one rank may send a request for each other rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch.distributed as dist

_POLL_S = 1.0  # longest pause between two requests: thousands of ranks may ask for minutes
_KEYS_PER_REQUEST = 256
_AFTER_MAIN_S = 10.0  # a thread waits at most so long once the main thread of its process has ended


def default_store() -> dist.Store:
    """torch's default store: the one through which all ranks made the world's process group."""
    return dist.distributed_c10d._get_default_store()


def wait_until(there: Callable[[], bool], patience_s: float) -> bool:
    """Calls `there` until it is true, at first often, then once a second.

    Unlike the store's own `wait`, this does not lock the store's client between two requests, so other threads of this
    process can use it.

    Args:
        there: asks the store.
        patience_s: seconds after which to give up.

    Returns:
        False where it did not become true in time.
    """
    deadline, pause = time.monotonic() + patience_s, 0.001
    main_has_ended = False
    while not there():
        if not main_has_ended and not threading.main_thread().is_alive():
            main_has_ended, deadline = True, min(deadline, time.monotonic() + _AFTER_MAIN_S)
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.1 * pause, _POLL_S)  # a tenth of the time waited so far
    return True


def register(store: dist.Store, name: str, rank: int) -> None:
    """Adds a rank to a register; each rank is added at most once. Comm: two requests."""
    store.set(f"{name}/{rank}", "")
    store.add(f"{name}/count", 1)


def num_registered(store: dist.Store, name: str) -> int:
    """The number of ranks in a register. Comm: one request."""
    return store.add(f"{name}/count", 0)


def missing_ranks(store: dist.Store, name: str, ranks: Sequence[int]) -> list[int]:
    """Those of some ranks that are not in a register.

    Comm: one request for every 256 ranks; where one of these is missing, one for each of the 256.
    """
    missing, left = [], iter(ranks)
    while several := list(islice(left, _KEYS_PER_REQUEST)):
        if not store.check([f"{name}/{rank}" for rank in several]):
            missing += [rank for rank in several if not store.check([f"{name}/{rank}"])]
    return missing


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text for a message: at most the first 16, and how many more there are."""
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown} and {len(ranks) - 16} more" if len(ranks) > 16 else shown

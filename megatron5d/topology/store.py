"""The store that all ranks met at, asked so that its load does not grow with the square of the world.

It is one process, rank 0's or the launcher's. What every rank asks must be one question; what takes a question for
every rank, one rank asks for all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch.distributed as dist

_POLL_S = 1.0  # at most between two questions: thousands of ranks may ask for minutes
_AT_ONCE = 256  # names in one question
_LEFT_S = 10.0  # a thread goes on waiting after its process's main thread has ended


def met_at() -> dist.Store:
    """The store of the process group."""
    return dist.distributed_c10d._get_default_store()


def wait_until(there: Callable[[], bool], patience_s: float) -> bool:
    """Asks at first often, then once a second; False where it did not become true in time.

    Asking holds no lock of the store between two questions, as its own waiting does: another thread of this process may
    need it meanwhile.
    """
    deadline, pause = time.monotonic() + patience_s, 0.001
    bereaved = False
    while not there():
        if not bereaved and not threading.main_thread().is_alive():
            bereaved, deadline = True, min(deadline, time.monotonic() + _LEFT_S)
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.1 * pause, _POLL_S)  # a tenth of what has been waited
    return True


def sign(store: dist.Store, roll: str, rank: int) -> None:
    """Puts a rank on a roll, once."""
    store.set(f"{roll}/{rank}", "")
    store.add(f"{roll}/count", 1)


def num_signed(store: dist.Store, roll: str) -> int:
    """How many are on a roll: one question."""
    return store.add(f"{roll}/count", 0)


def absent(store: dist.Store, roll: str, ranks: Sequence[int]) -> list[int]:
    """Who of some ranks is not on a roll: a question for many of them where all are there, one for each where not."""
    missing, left = [], iter(ranks)
    while several := list(islice(left, _AT_ONCE)):
        if not store.check([f"{roll}/{rank}" for rank in several]):
            missing += [rank for rank in several if not store.check([f"{roll}/{rank}"])]
    return missing


def listed(ranks: Sequence[int]) -> str:
    """Some ranks for a message: the first of them."""
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown} and {len(ranks) - 16} more" if len(ranks) > 16 else shown

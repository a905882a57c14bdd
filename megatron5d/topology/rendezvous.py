"""The ranks find each other: one key-value store that all of them can reach, and the names of those
that do not come.

Registers in the store are named sets of ranks. One process serves it, rank 0 or the launcher. So
that its load does not grow with the square of the world, every rank may send a constant number of
requests, and only one rank may send a request for each other rank.
"""

import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import NamedTuple

import torch.distributed as dist

from megatron5d.topology.launcher import Environment

_POLL_S = 1.0  # longest pause between two requests: thousands of ranks may ask for minutes
_KEYS_PER_REQUEST = 256
_AFTER_MAIN_S = 10.0  # a thread waits at most so long once the main thread of its process has ended


def default_store() -> dist.Store:
    """Returns torch's default store: the one through which all ranks made the world's process
    group."""
    return dist.distributed_c10d._get_default_store()


def wait_until(there: Callable[[], bool], patience_s: float) -> bool:
    """Calls `there` until it is true, at first often, then once a second.

    Unlike the store's own `wait`, this does not lock the store's client between two requests, so
    other threads of this process can use it.

    Returns False where it did not become true in time.
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
    """Returns the number of ranks in a register. Comm: one request."""
    return store.add(f"{name}/count", 0)


def missing_ranks(store: dist.Store, name: str, ranks: Sequence[int]) -> list[int]:
    """Returns those of some ranks that are not in a register.

    Comm: one request for every 256 ranks; where one of these is missing, one for each of the 256.
    """
    missing, left = [], iter(ranks)
    while several := list(islice(left, _KEYS_PER_REQUEST)):
        if not store.check([f"{name}/{rank}" for rank in several]):
            missing += [rank for rank in several if not store.check([f"{name}/{rank}"])]
    return missing


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks as text for a message: at most the first 16, and how many more there are."""
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown} and {len(ranks) - 16} more" if len(ranks) > 16 else shown


class Troubled(Exception):
    """Some ranks cannot continue and have said so when they came; raised on every rank.

    Args:
        troubles: what they said, at most 256 of them, the first that came first.
    """

    def __init__(self, troubles: Sequence[str]) -> None:
        super().__init__("\n".join(troubles))
        self.troubles = list(troubles)


@dataclass
class Hello:
    """What a rank says when it comes to the meeting."""

    word: str = ""  # should be the same on all ranks; "" where there is none
    # called with rank 0's word where this rank's is another; returns (trouble, remark), each "" for
    # none
    review: Callable[[str], tuple[str, str]] | None = None
    trouble: str = ""  # why this rank cannot continue; "" where it can


class Met(NamedTuple):
    """All ranks have come: the store that they share, and the first remark of a review ("" =
    none)."""

    store: dist.Store
    remark: str


# for the last rank to appear; nodes of one job boot minutes apart, not half hours
RENDEZVOUS_TIMEOUT_S = 300.0
SAY_WAITING_S = 20.0  # rank 0 names the ranks it waits for, at this interval
_STARTS = "starts"  # in the store: how often the ranks were started
TROUBLED_S = 30.0  # so long, once some rank has said that it cannot continue, others are waited for
# of each start, set by rank 0 at its end: [ranks that did not come in time, troubles, remark]
_VERDICT = "verdict"
_WORD = "word"  # of each start, set by rank 0 at its beginning: what rank 0 said
_DIGEST = "digest"  # of that
_TROUBLE, _REMARK = "trouble", "remark"  # of each start: numbered texts, and their count
_MOST_TROUBLES = 256  # that are read
_HERE = "here"  # the register of the ranks that have come, one for each start


def meet(environment: Environment, hello: Hello | None = None) -> Met:
    """Waits until all ranks have connected to the store that they share, and tells each what ails
    any of them.

    Comm: a few requests to the store per rank.

    Raises Troubled: on every rank, if some rank has come with a trouble. Raises ValueError: the
    host name of the meeting point does not resolve. Raises OSError: another process has the port of
    the meeting point. Raises
    TimeoutError: rank 0 cannot be reached, or some ranks did not appear in time; names them.
    """
    where, hello = environment.meeting, hello or Hello()
    patience_s = 2 * TROUBLED_S if hello.trouble and environment.rank else RENDEZVOUS_TIMEOUT_S
    if where == "env://":
        where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _connect(environment, where, patience_s)
    except RuntimeError as error:  # torch's network and store errors
        if environment.rank == 0 and "EADDRINUSE" in str(error):
            raise OSError(
                f"rank 0 on {socket.gethostname()} cannot open {where} for the others: another process has this port, "
                "perhaps one that an earlier run has left behind; end it, or set MASTER_PORT to another port"
            ) from error
        raise TimeoutError(
            f"rank {environment.rank} could not reach rank 0 at {where} "
            f"within {patience_s:g} s (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error
    return _wait_for_all(store, environment.rank, environment.world, patience_s, hello)


def _connect(environment: Environment, where: str, patience_s: float) -> dist.Store:
    """Connects to a TCP store, which rank 0 hosts, or to a file store or the store of torchrun's
    agent.

    The TCP store is made here because torch's rendezvous lets rank 0 wait inside of it for all
    ranks; when one is absent, it reports how many came and not which one is missing.
    """
    timeout = timedelta(seconds=patience_s)
    if where.startswith("tcp://"):
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        _check_resolves(host)
        if (
            environment.meeting != "env://"
            or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        ):
            return dist.TCPStore(
                host, int(port), None, environment.rank == 0, timeout, wait_for_workers=False
            )
    return next(
        dist.rendezvous(environment.meeting, environment.rank, environment.world, timeout=timeout)
    )[0]


def _check_resolves(host: str) -> None:
    """Refuses a host name that does not resolve: torch would retry it for minutes and print
    nothing."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"the ranks are to meet on host {host!r}, whose name {socket.gethostname()!r} cannot resolve ({error}): "
            "set MASTER_ADDR to a name or address that all nodes know"
        ) from error


def _wait_for_all(
    store: dist.Store, rank: int, world: int, timeout_s: float, hello: Hello | None = None
) -> Met:
    """Waits until all ranks have registered in the store; rank 0 tells the others the result.

    Returns the part of the store that belongs to this start of the ranks. torchrun keeps one store
    when it starts them again, and without a part of its own a new start would count ranks of dead
    processes.
    """
    hello = hello or Hello()
    if rank:
        # rank 0 gives up first, and says why
        started = _join_newest_start(store, rank, timeout_s + 10, hello)
    else:
        number = store.add(_STARTS, 0) + 1
        started = _store_of_start(store, number)
        started.set(_WORD, hello.word)
        started.set(_DIGEST, _digest(hello.word))
        store.add(_STARTS, 1)
        _come(started, 0, hello.trouble, "")
        missing = _wait_for_registrations(started, world, timeout_s)
        troubles, remarks = _numbered(started, _TROUBLE), _numbered(started, _REMARK)
        started.set(_VERDICT, json.dumps([missing, troubles, remarks[0] if remarks else ""]))
        if missing or troubles:
            time.sleep(
                1.5
            )  # the others, who ask once a second, read the verdict before the store ends with this process
    missing, troubles, remark = json.loads(started.get(_VERDICT))
    if troubles:
        raise Troubled(troubles)
    if missing:
        raise TimeoutError(
            f"of {world} ranks these did not appear within {timeout_s:g} s: {missing}"
        )
    return Met(started, remark)


def _digest(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()


def _come(started: dist.Store, rank: int, trouble: str, remark: str) -> None:
    """Registers a rank in a start, after what it has to say."""
    for name, text in ((_TROUBLE, trouble), (_REMARK, remark)):
        if text:
            started.set(f"{name}/{started.add(name, 1)}", text)
    register(started, _HERE, rank)


def _numbered(started: dist.Store, name: str) -> list[str]:
    """Returns the texts of one kind that ranks have brought to a start."""
    return [
        started.get(f"{name}/{n + 1}").decode()
        for n in range(min(started.add(name, 0), _MOST_TROUBLES))
    ]


def _store_of_start(store: dist.Store, number: int) -> dist.Store:
    """Returns the part of the store that belongs to one start of the ranks."""
    return dist.PrefixStore(f"start/{number}", store)


def _join_newest_start(store: dist.Store, rank: int, timeout_s: float, hello: Hello) -> dist.Store:
    """Registers in the newest start and waits for rank 0's verdict on it.

    A start is over if an earlier process of this rank has joined it, or if rank 0 has already given
    its verdict. The start that this rank joins may be an old one as well; rank 0 then opens a newer
    one, which this rank joins instead.

    Returns the part of the store that belongs to the start.
    """
    known = f"joined/{rank}"
    joined = store.add(known, 0)
    started: dist.Store | None = None

    def rank_0_has_answered() -> bool:
        nonlocal joined, started
        newest = store.add(_STARTS, 0)
        if newest > joined and not _store_of_start(store, newest).check([_VERDICT]):
            store.add(known, newest - joined)
            joined, started = newest, _store_of_start(store, newest)
            trouble, remark = hello.trouble, ""
            if (
                not trouble
                and hello.review
                and started.get(_DIGEST).decode() not in (_digest(""), _digest(hello.word))
            ):
                trouble, remark = hello.review(started.get(_WORD).decode())
            _come(started, rank, trouble, remark)
        return started is not None and started.check([_VERDICT])

    if not wait_until(rank_0_has_answered, timeout_s) or started is None:
        raise TimeoutError(f"rank {rank} met the store within {timeout_s:g} s, but not rank 0")
    return started


def _wait_for_registrations(started: dist.Store, world: int, timeout_s: float) -> str:
    """Returns the ranks that have not registered in time, as text; "" where all have.

    One or two requests count the ranks and the troubles; only after `SAY_WAITING_S` is each rank
    looked up. Once some rank cannot continue, the others are given `TROUBLED_S`, as they may have
    ended by themselves.
    """
    deadline = time.monotonic() + timeout_s
    troubled = False

    def come() -> bool:
        nonlocal deadline, troubled
        if not troubled and started.add(_TROUBLE, 0):
            deadline, troubled = min(deadline, time.monotonic() + TROUBLED_S), True
        return num_registered(started, _HERE) >= world or time.monotonic() >= deadline

    while not wait_until(come, SAY_WAITING_S) or num_registered(started, _HERE) < world:
        missing = ranks_text(missing_ranks(started, _HERE, range(world)))
        if time.monotonic() >= deadline:
            return missing
        print(f"rank 0 of {world} waits for ranks {missing}", file=sys.stderr, flush=True)
    return ""

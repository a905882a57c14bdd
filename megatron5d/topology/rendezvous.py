"""Rendezvous of all ranks: one key-value store that every rank can reach, with absent ranks named.

A register is a named set of ranks in the store. One process serves the store, rank 0 or the
launcher. So that its load does not grow with the square of the world size, each rank may send a
constant number of requests, and only one rank may send a request for every other rank.
"""

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
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron5d.topology.launcher import Environment, store_url

_POLL_S = 1.0  # longest pause between two requests: thousands of ranks may poll for minutes
_KEYS_PER_REQUEST = 256
_AFTER_MAIN_S = 10.0  # how long a thread keeps waiting once its process's main thread has ended
# for the last rank to appear: nodes of one job boot minutes apart, not half hours
RENDEZVOUS_TIMEOUT_S = 300.0
REPORT_INTERVAL_S = 20.0  # at which rank 0 names the ranks that it waits for
AFTER_ERROR_S = 30.0  # how long others are awaited once some rank has reported an error

_NUM_STARTS = "starts"  # key: how often the ranks were started
# keys of each start; rank 0 sets the payload first, the verdict last
_PAYLOAD = "payload"
_ERROR, _WARNING = "error", "warning"  # numbered JSON values and their count
_VERDICT = "verdict"  # [ranks that did not come in time, errors, first warning]
_PRESENT = "present"  # register of the ranks that have come
_MAX_VALUES = 256  # errors that are read


class RanksFailed(Exception):
    """Some ranks reported that they cannot continue; raised on every rank.

    Args:
        errors: of their reports, at most 256, in order of arrival.
    """

    def __init__(self, errors: Sequence[Any]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = list(errors)


@dataclass(frozen=True)
class RankReport:
    """What a rank reports when it reaches the store."""

    payload: str = ""  # should be the same on all ranks; "" where there is none
    # called with rank 0's payload if this rank's differs; gives (error or None, warning)
    on_mismatch: Callable[[str], tuple[Any, str]] | None = None
    error: Any = None  # a JSON value that says why this rank cannot continue; None where it can


NO_REPORT = RankReport()


class Rendezvous(NamedTuple):
    """The store that all ranks share, and the first warning of a mismatch ("" = none)."""

    store: dist.Store
    warning: str


def default_store() -> dist.Store:
    """torch's default store, through which all ranks made the world's process group."""
    return dist.distributed_c10d._get_default_store()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Calls `condition` until it is true, at first often, then once a second.

    Unlike the store's own `wait`, this does not lock the store's client between two requests, so
    other threads of this process can use it.

    Returns:
        False where it did not become true in time.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    main_has_ended = False
    while not condition():
        if not main_has_ended and not threading.main_thread().is_alive():
            main_has_ended, deadline = True, min(deadline, time.monotonic() + _AFTER_MAIN_S)
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, _POLL_S)  # a tenth of the time waited so far
    return True


def register(store: dist.Store, name: str, rank: int) -> None:
    """Adds a rank to a register; each rank is added at most once.

    Comm: two requests.
    """
    store.set(f"{name}/{rank}", "")
    store.add(f"{name}/count", 1)


def num_registered(store: dist.Store, name: str) -> int:
    """Number of ranks in a register.

    Comm: one request.
    """
    return store.add(f"{name}/count", 0)


def missing_ranks(store: dist.Store, name: str, ranks: Sequence[int]) -> list[int]:
    """Those of the given ranks that are not in a register.

    Comm: one request for every 256 ranks; if one of these is missing, one for each of the 256.
    """
    missing, unchecked = [], iter(ranks)
    while batch := list(islice(unchecked, _KEYS_PER_REQUEST)):
        if not store.check([f"{name}/{rank}" for rank in batch]):
            missing += [rank for rank in batch if not store.check([f"{name}/{rank}"])]
    return missing


def ranks_text(ranks: Sequence[int]) -> str:
    """The first 16 ranks, and how many more there are, for a message."""
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown} and {len(ranks) - 16} more" if len(ranks) > 16 else shown


def meet(environment: Environment, report: RankReport = NO_REPORT) -> Rendezvous:
    """Waits until all ranks have connected to the shared store and exchanges their errors.

    Comm: a few requests to the store per rank.

    Raises:
        RanksFailed: on every rank, if some rank has reported an error.
        ValueError: the host name of the store does not resolve.
        OSError: another process has the store's port.
        TimeoutError: rank 0 cannot be reached, or some ranks, which it names, came too late.
    """
    url = store_url(environment)
    timeout_s = 2 * AFTER_ERROR_S if report.error and environment.rank else RENDEZVOUS_TIMEOUT_S
    try:
        store = _connect(environment, url, timeout_s)
    except RuntimeError as error:  # torch's network and store errors
        if environment.rank == 0 and "EADDRINUSE" in str(error):
            raise OSError(
                f"rank 0 on {socket.gethostname()} cannot open {url} for the others: another "
                "process uses this port, perhaps one left behind by an earlier run; end it, or set "
                "MASTER_PORT to another port"
            ) from error
        raise TimeoutError(
            f"rank {environment.rank} could not reach rank 0 at {url} "
            f"within {timeout_s:g} s (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error
    return _wait_for_all(store, environment.rank, environment.world, timeout_s, report)


def _connect(environment: Environment, url: str, timeout_s: float) -> dist.Store:
    """Connects to a file store, or to a TCP store of torchrun's agent or of rank 0.

    torch's own rendezvous is not used, because rank 0 waits inside of it for all ranks; if one is
    absent, it reports how many came and not which one is missing.
    """
    if url.startswith("file://"):
        return dist.FileStore(url.removeprefix("file://"), environment.world)
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    _check_resolves(host)
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = environment.rank == 0 and not (has_agent and environment.init_method == "env://")
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, int(port), None, is_host, timeout, wait_for_workers=False)


def _check_resolves(host: str) -> None:
    """Rejects a host name that does not resolve, which torch would silently retry for minutes."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"{socket.gethostname()!r} cannot resolve {host!r}, the host where the ranks meet "
            f"({error}): set MASTER_ADDR to a name or address that all nodes know"
        ) from error


def _wait_for_all(
    store: dist.Store, rank: int, world: int, timeout_s: float, report: RankReport = NO_REPORT
) -> Rendezvous:
    """Waits until all ranks have registered in the store; rank 0 publishes the verdict.

    Returns:
        The part of the store that belongs to this start of the ranks. torchrun keeps one store
        when it restarts them, where a new start would otherwise count ranks of dead processes.
    """
    if rank:
        # rank 0 gives up first and says why
        start = _join_newest_start(store, rank, timeout_s + 10, report)
    else:
        start = _store_of_start(store, store.add(_NUM_STARTS, 0) + 1)
        start.set(_PAYLOAD, report.payload)
        store.add(_NUM_STARTS, 1)
        _announce(start, 0, report.error, "")
        missing = _wait_for_registrations(start, world, timeout_s)
        errors, warnings = _values(start, _ERROR), _values(start, _WARNING)
        start.set(_VERDICT, json.dumps([missing, errors, warnings[0] if warnings else ""]))
        if missing or errors:
            # the others, who poll once a second, must read the verdict before the store ends
            time.sleep(1.5)
    missing, errors, warning = json.loads(start.get(_VERDICT))
    if errors:
        raise RanksFailed(errors)
    if missing:
        raise TimeoutError(
            f"of {world} ranks these did not appear within {timeout_s:g} s: {missing}"
        )
    return Rendezvous(start, warning)


def _announce(start: dist.Store, rank: int, error: Any, warning: str) -> None:
    """Stores a rank's error and warning in a start, then registers it."""
    for name, value in ((_ERROR, error), (_WARNING, warning)):
        if value:
            start.set(f"{name}/{start.add(name, 1)}", json.dumps(value))
    register(start, _PRESENT, rank)


def _values(start: dist.Store, name: str) -> list[Any]:
    count = min(start.add(name, 0), _MAX_VALUES)
    return [json.loads(start.get(f"{name}/{number + 1}")) for number in range(count)]


def _store_of_start(store: dist.Store, number: int) -> dist.Store:
    return dist.PrefixStore(f"start/{number}", store)


def _join_newest_start(
    store: dist.Store, rank: int, timeout_s: float, report: RankReport
) -> dist.Store:
    """Registers in the newest start and waits for rank 0's verdict on it.

    A start is over if an earlier process of this rank has joined it, or if rank 0 has already given
    its verdict. The start that this rank joins may be an old one as well; rank 0 then opens a newer
    one, which this rank joins instead.

    Returns:
        The part of the store that belongs to the start.
    """
    joined_key = f"joined/{rank}"
    joined = store.add(joined_key, 0)
    start: dist.Store | None = None

    def has_verdict() -> bool:
        nonlocal joined, start
        newest = store.add(_NUM_STARTS, 0)
        if newest > joined and not _store_of_start(store, newest).check([_VERDICT]):
            store.add(joined_key, newest - joined)
            joined, start = newest, _store_of_start(store, newest)
            error, warning = report.error, ""
            if report.on_mismatch and not error:
                payload = start.get(_PAYLOAD).decode()
                if payload not in ("", report.payload):
                    error, warning = report.on_mismatch(payload)
            _announce(start, rank, error, warning)
        return start is not None and start.check([_VERDICT])

    if not wait_until(has_verdict, timeout_s) or start is None:
        raise TimeoutError(
            f"rank {rank} reached the store, but rank 0 did not within {timeout_s:g} s"
        )
    return start


def _wait_for_registrations(start: dist.Store, world: int, timeout_s: float) -> str:
    """Waits for all ranks to register in a start.

    One or two requests count the ranks and the errors; only after `REPORT_INTERVAL_S` is each rank
    looked up. After the first error the other ranks have `AFTER_ERROR_S`, as they may have ended by
    themselves.

    Returns:
        The ranks that have not registered in time, as text; "" where all have.
    """
    deadline = time.monotonic() + timeout_s
    has_error = False

    def is_over() -> bool:
        nonlocal deadline, has_error
        if not has_error and start.add(_ERROR, 0):
            deadline, has_error = min(deadline, time.monotonic() + AFTER_ERROR_S), True
        return num_registered(start, _PRESENT) >= world or time.monotonic() >= deadline

    while not wait_until(is_over, REPORT_INTERVAL_S) or num_registered(start, _PRESENT) < world:
        missing = ranks_text(missing_ranks(start, _PRESENT, range(world)))
        if time.monotonic() >= deadline:
            return missing
        print(f"rank 0 of {world} waits for ranks {missing}", file=sys.stderr, flush=True)
    return ""

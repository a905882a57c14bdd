"""The ranks find each other: one store that all of them can reach, and the names of those that do not come."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from megatron5d.topology.launcher import Environment
from megatron5d.topology.store import missing_ranks, num_registered, ranks_text, register, wait_until

RENDEZVOUS_TIMEOUT_S = 300.0  # for the last rank to appear; nodes of one job boot minutes apart, not half hours
SAY_WAITING_S = 20.0  # rank 0 names the ranks it waits for, at this interval
_STARTS = "starts"  # in the store: how often the ranks were started
_MISSING = "missing"  # of each start: the ranks that did not come in time; set by rank 0 once it has looked
_HERE = "here"  # the register of the ranks that have come, one for each start


def meet(environment: Environment) -> dist.Store:
    """The store that all ranks share, once all of them have connected to it.

    Comm: a few requests to the store per rank.

    Raises:
        ValueError: the host name of the meeting point does not resolve.
        OSError: another process has the port of the meeting point.
        TimeoutError: rank 0 cannot be reached, or some ranks did not appear in time; names them.
    """
    where = environment.meeting
    if where == "env://":
        where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _connect(environment, where)
    except RuntimeError as error:  # torch's network and store errors
        if environment.rank == 0 and "EADDRINUSE" in str(error):
            raise OSError(
                f"rank 0 on {socket.gethostname()} cannot open {where} for the others: another process has this port, "
                "perhaps one that an earlier run has left behind; end it, or set MASTER_PORT to another port"
            ) from error
        raise TimeoutError(
            f"rank {environment.rank} could not reach rank 0 at {where} "
            f"within {RENDEZVOUS_TIMEOUT_S:g} s (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error
    return _wait_for_all(store, environment.rank, environment.world, RENDEZVOUS_TIMEOUT_S)


def _connect(environment: Environment, where: str) -> dist.Store:
    """Connects to a TCP store, which rank 0 hosts, or to a file store or the store of torchrun's agent.

    The TCP store is made here because torch's rendezvous lets rank 0 wait inside of it for all ranks; when one is
    absent, it reports how many came and not which one is missing.
    """
    timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    if where.startswith("tcp://"):
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        _check_resolves(host)
        if environment.meeting != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return dist.TCPStore(host, int(port), None, environment.rank == 0, timeout, wait_for_workers=False)
    return next(dist.rendezvous(environment.meeting, environment.rank, environment.world, timeout=timeout))[0]


def _check_resolves(host: str) -> None:
    """Refuses a host name that does not resolve: torch would retry it for minutes and print nothing."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"the ranks are to meet on host {host!r}, whose name {socket.gethostname()!r} cannot resolve ({error}): "
            "set MASTER_ADDR to a name or address that all nodes know"
        ) from error


def _wait_for_all(store: dist.Store, rank: int, world: int, timeout_s: float) -> dist.Store:
    """Waits until all ranks have registered in the store; rank 0 tells the others the result.

    Returns:
        The part of the store that belongs to this start of the ranks. torchrun keeps one store when it starts them
        again, and without a part of its own a new start would count ranks of dead processes.

    Raises:
        TimeoutError: some ranks did not register in time; names them.
    """
    if rank:
        started = _join_newest_start(store, rank, timeout_s + 10)  # rank 0 gives up first, and says who is missing
        missing = started.get(_MISSING).decode()
    else:
        started = _store_of_start(store, store.add(_STARTS, 1))
        register(started, _HERE, rank)
        missing = _wait_for_registrations(started, world, timeout_s)
        started.set(_MISSING, missing)
        if missing:
            time.sleep(1.5)  # the others, who ask once a second, read the list before the store ends with this process
    if missing:
        raise TimeoutError(f"of {world} ranks these did not appear within {timeout_s:g} s: {missing}")
    return started


def _store_of_start(store: dist.Store, number: int) -> dist.Store:
    """The part of the store that belongs to one start of the ranks."""
    return dist.PrefixStore(f"start/{number}", store)


def _join_newest_start(store: dist.Store, rank: int, timeout_s: float) -> dist.Store:
    """Registers in the newest start and waits until rank 0 has said who is missing there.

    A start is over if an earlier process of this rank has joined it, or if rank 0 has already said who is missing. The
    start that this rank joins may be an old one as well; rank 0 then opens a newer one, which this rank joins instead.

    Returns:
        The part of the store that belongs to the start.

    Raises:
        TimeoutError: rank 0 has opened no start, or has not answered in time.
    """
    known = f"joined/{rank}"
    joined = store.add(known, 0)
    started: dist.Store | None = None

    def rank_0_has_answered() -> bool:
        nonlocal joined, started
        newest = store.add(_STARTS, 0)
        if newest > joined and not _store_of_start(store, newest).check([_MISSING]):
            store.add(known, newest - joined)
            joined, started = newest, _store_of_start(store, newest)
            register(started, _HERE, rank)
        return started is not None and started.check([_MISSING])

    if not wait_until(rank_0_has_answered, timeout_s) or started is None:
        raise TimeoutError(f"rank {rank} met the store within {timeout_s:g} s, but not rank 0")
    return started


def _wait_for_registrations(store: dist.Store, world: int, timeout_s: float) -> str:
    """The ranks that have not registered in time, as text; "" where all have.

    One request counts the ranks; only after `SAY_WAITING_S` is each rank looked up.
    """
    deadline = time.monotonic() + timeout_s
    all_here = lambda: num_registered(store, _HERE) >= world  # noqa: E731
    while not wait_until(all_here, min(SAY_WAITING_S, deadline - time.monotonic())):
        missing = ranks_text(missing_ranks(store, _HERE, range(world)))
        if time.monotonic() >= deadline:
            return missing
        print(f"rank 0 of {world} waits for ranks {missing}", file=sys.stderr, flush=True)
    return ""

"""The ranks find each other: one store that all of them can reach, and the names of those that do not come.

What the launcher says about this process: its rank, the world size, and where the ranks meet.

Three launchers are understood, in this order: torchrun (and `launch/fork.py`, which sets the same variables), a SLURM
job step, and none at all, which is one process. The nodes of a SLURM step find each other by the step's node list and
the job's number; the user exports nothing.

The key-value store through which the ranks found each other, and registers in it: named sets of ranks.

One process serves it, rank 0 or the launcher. So that its load does not grow with the square of the world, every rank
may send a constant number of requests, and only one rank may send a request for each other rank.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice

import torch.distributed as dist

MET = "met"
_FIRST_PORT, _NUM_PORTS = 12000, 20000  # below the ephemeral range, so no outgoing connection holds it


@dataclass(frozen=True)
class Environment:
    """What the launcher says about this process.

    Args:
        rank: of this process, 0 ... world-1.
        world: number of processes.
        local_rank: index among the processes of this node, which chooses the GPU.
        meeting: where all ranks meet: "tcp://host:port", "file:///path", "env://" (torchrun's own), "" at world 1, or
            "met" where the launcher has made the process group already and will destroy it (local_ranks.py).
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    meeting: str = ""


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Reads rank, world size and meeting point from the launcher's variables; needs no GPU and talks to nobody.

    Args:
        variables: the process environment.

    Raises:
        ValueError: a launcher's variables are incomplete or contradict each other.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        found = _from_torchrun(variables)
    elif "SLURM_STEP_ID" in variables:  # absent in a batch script or an salloc shell, where nobody else was started
        found = _from_slurm(variables)
    else:
        found = Environment()
    if not 0 <= found.rank < found.world:
        raise ValueError(f"rank {found.rank} of a world of {found.world}: RANK or SLURM_PROCID must be below the size")
    return found


def _integer(variables: Mapping[str, str], *names: str) -> int:
    """The value of the first of these variables that is set.

    Raises:
        ValueError: it is not a whole number, or none of them is set.
    """
    for name in names:
        if name in variables:
            if not re.fullmatch(r"\d+", variables[name]):
                raise ValueError(f"environment variable {name}={variables[name]!r} is not a whole number")
            return int(variables[name])
    raise ValueError(f"environment variable {' or '.join(names)} is not set, though others of the same launcher are")


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    rank, world = _integer(variables, "RANK"), _integer(variables, "WORLD_SIZE")
    local_rank = _integer(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else rank
    if world == 1:
        return Environment(rank, world, local_rank)
    if "MEGATRON5D_MEETING" in variables:
        return Environment(rank, world, local_rank, variables["MEGATRON5D_MEETING"])
    if "MASTER_ADDR" not in variables:
        raise ValueError(f"WORLD_SIZE={world} but MASTER_ADDR is not set: the ranks cannot find each other")
    _integer(variables, "MASTER_PORT")
    return Environment(rank, world, local_rank, "env://")


def _from_slurm(variables: Mapping[str, str]) -> Environment:
    rank = _integer(variables, "SLURM_PROCID")
    world = _integer(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank = _integer(variables, "SLURM_LOCALID")
    if world == 1:
        return Environment(rank, world, local_rank)
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    host = variables.get("MASTER_ADDR") or (first_host(nodes) if nodes else None)
    if host is None:
        raise ValueError(
            f"{world} ranks, and neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST says where they meet; "
            "set MASTER_ADDR"
        )
    if "MASTER_PORT" in variables:
        port = _integer(variables, "MASTER_PORT")
    else:
        number = _integer(variables, "SLURM_JOB_ID") + _integer(variables, "SLURM_STEP_ID")
        port = _FIRST_PORT + number % _NUM_PORTS
    return Environment(rank, world, local_rank, f"tcp://{host}:{port}")


def first_host(node_list: str) -> str:
    """The first node of SLURM's compressed list: "gpu[07-11,20],login1" gives "gpu07".

    Raises:
        ValueError: the list names no node.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    if first is None:
        raise ValueError(f"SLURM's node list is {node_list!r}: no host in it")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def slurm_job(variables: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """The id of the SLURM job that this process belongs to ("" outside SLURM), and how often the job was requeued."""
    restarts = variables.get("SLURM_RESTART_COUNT", "")
    return variables.get("SLURM_JOB_ID", ""), int(restarts) if restarts.isdigit() else 0


def restarted_job(variables: Mapping[str, str] = os.environ) -> str:
    """The id of the SLURM job if its ranks were started again with the same command, by SLURM or torchrun; else ""."""
    job, restarts = slurm_job(variables)
    again = variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return job if restarts or again else ""


def wandb_mode(configured: str) -> str:
    """How Weights & Biases works: as WANDB_MODE says where it is set, as everywhere else; else as configured.

    Where there is no HOME, its service would print its own log: it is given the one of this user.
    """
    os.environ.setdefault("HOME", os.path.expanduser("~"))
    said = os.environ.get("WANDB_MODE", "")
    return said if said in ("online", "offline", "disabled") and configured != "disabled" else configured


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

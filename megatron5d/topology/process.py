"""Which process am I, and the meeting with the others: the only place that reads the environment.

Three launchers are understood, in this order: torchrun (and `launch/fork.py`, which sets the same variables), a
SLURM job step, and none at all, which is one process. The nodes of a SLURM step find each other from the step's node
list and the job's number; nothing has to be exported by hand.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron5d.topology.store import absent, listed, met_at, num_signed, sign, wait_until

MET = "met"
RENDEZVOUS_TIMEOUT_S = 300.0  # for the last rank to appear; nodes of one job boot minutes apart, not half hours
SAY_WAITING_S = 20.0  # after which, again and again, rank 0 says for whom it waits
_STARTS = "starts"  # in the store: how often the ranks were started
_HERE, _LEFT = "here", "left"  # of one start: who came, and who is about to go
_OTHER_FILES = 256  # that rank 0 has open besides its connections to the others
LEAVING_S = 60.0  # rank 0 waits for the others to go before it
_FIRST_PORT, _NUM_PORTS = 12000, 20000  # below the ephemeral range, so no outgoing connection holds it


@dataclass(frozen=True)
class Environment:
    """What the launcher says about this process.

    Args:
        rank: of this process, 0 ... world-1.
        world: number of processes.
        local_rank: index among the processes of this node, which chooses the GPU.
        meeting: where all ranks meet: "tcp://host:port", "file:///path", "env://" (torchrun's own), "" at world 1, or
            "met": the launcher has made the process group and will end it (a test's forked ranks).
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    meeting: str = ""


@dataclass(frozen=True)
class Process:
    """This process, ready to communicate.

    Args:
        rank: of this process, 0 ... world-1.
        world: number of processes.
        local_rank: index among the processes of this node.
        device: where this process computes.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device


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
    """The first of these variables that is set."""
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
    """The number of the SLURM job that this process belongs to, "" outside; and how often it has been requeued."""
    restarts = variables.get("SLURM_RESTART_COUNT", "")
    return variables.get("SLURM_JOB_ID", ""), int(restarts) if restarts.isdigit() else 0


def start_process(timeout_s: float, environment: Environment | None = None) -> Process:
    """Chooses the device and joins the other ranks; at world size 1 nothing is initialised.

    Args:
        timeout_s: seconds after which a collective gives up (`parallel.timeout_s`).
        environment: None reads the variables of this process.

    Comm: NCCL on GPUs, gloo otherwise; one store round trip per rank before it, so that absent ranks are named.

    Raises:
        ValueError: the node has no GPU for this local rank, the meeting point's host name does not resolve, or rank 0
            cannot hold so many connections.
        TimeoutError: some ranks did not appear; names them.
    """
    environment = environment or read_environment()
    device = _choose_device(environment.local_rank)
    if environment.world > 1 and environment.meeting != MET:
        _allow_connections(environment)
        store = _meet(environment)
        store.set_timeout(timedelta(seconds=timeout_s))
        if device.type == "cpu":
            preempt_nobody()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=environment.rank,
            world_size=environment.world,
            store=store,
            timeout=timedelta(seconds=timeout_s),
        )
    return Process(environment.rank, environment.world, environment.local_rank, device)


def _allow_connections(environment: Environment) -> None:
    """Lets this process open as many files as its system admits: rank 0 keeps the connections of all others, and where
    they are too many the operating system refuses them without a word to anybody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or environment.world + _OTHER_FILES <= hard or environment.rank:
        if soft != hard:
            with suppress(ValueError, OSError):  # macOS promises more than it gives
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return
    raise ValueError(
        f"rank 0 holds a connection to each of {environment.world} ranks, and its system lets a process open {hard} "
        f"files (ulimit -Hn); nearest that fit: {environment.world + _OTHER_FILES} files"
    )


def preempt_nobody() -> None:
    """To be called before gloo's threads start: a message that wakes one of them takes no core from who runs there.

    gloo's device thread does not sleep until a connection's lock is free, it asks again and again. Where ranks
    outnumber cores, it was woken in place of the very thread that held the lock, and asked for a whole time slice:
    most of the time that a small collective took. Idle cores are taken as before.

    Only from Linux's ordinary policy: who started the run under another one (`chrt`) keeps it. A sandbox that allows no
    change of policy runs as before, slower.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def stop_process() -> None:
    """Leaves the others after a good end.

    Does nothing while an exception is on its way out: a failing rank must speak before its peers see it leave, or
    one of their "connection closed" would pass for the cause, and NCCL would wait for kernels that never finish.
    """
    if dist.is_initialized() and os.environ.get("MEGATRON5D_MEETING") != MET and sys.exc_info()[0] is None:
        _leave_in_order(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()


def _leave_in_order(rank: int, world: int) -> None:
    """Rank 0 goes last: its process may be the store's, at which others still look for the end of the last save."""
    with suppress(RuntimeError):  # who is so late that rank 0 has gone has nothing left to look for
        store = met_at()
        sign(store, _LEFT, rank)
        if rank == 0:
            wait_until(lambda: num_signed(store, _LEFT) >= world, LEAVING_S)


def _choose_device(local_rank: int) -> torch.device:
    """This rank's own GPU; where a launcher shows each rank a single one, that one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU: this node shows {count}. Start at most {count} ranks on a node, "
            "or set CUDA_VISIBLE_DEVICES= (empty) to run on CPUs"
        )
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _meet(environment: Environment) -> dist.Store:
    """The store that all ranks share, once all of them are there."""
    where = environment.meeting
    if where == "env://":
        where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _store(environment, where)
    except RuntimeError as error:  # torch's network and store errors
        raise TimeoutError(
            f"rank {environment.rank} could not reach rank 0 at {where} "
            f"within {RENDEZVOUS_TIMEOUT_S:g} s (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error
    return _roll_call(store, environment.rank, environment.world, RENDEZVOUS_TIMEOUT_S)


def _store(environment: Environment, where: str) -> dist.Store:
    """A store at an address, which rank 0 hosts; a file's, or that of torchrun's agent, as torch makes it.

    torch's own way to an address makes rank 0 wait inside for all ranks, and where one is absent says how many came
    instead of who is missing.
    """
    timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    if where.startswith("tcp://"):
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        _check_resolves(host)
        if environment.meeting != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return dist.TCPStore(host, int(port), None, environment.rank == 0, timeout, wait_for_workers=False)
    return next(dist.rendezvous(environment.meeting, environment.rank, environment.world, timeout=timeout))[0]


def _check_resolves(host: str) -> None:
    """torch would retry an unknown name for minutes without saying it."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"the ranks are to meet on host {host!r}, whose name {socket.gethostname()!r} cannot resolve ({error}): "
            "set MASTER_ADDR to a name or address that all nodes know"
        ) from error


def _roll_call(store: dist.Store, rank: int, world: int, timeout_s: float) -> dist.Store:
    """Everyone signs, rank 0 reads the list: an absent rank is named instead of being waited for in silence.

    Returns:
        The part of the store that this start of the ranks has for itself: torchrun keeps one store for all of them, and
        who is gone would count as having come.
    """
    if rank:
        started = _joined(store, rank, timeout_s + 10)  # rank 0's list comes first
        missing = started.get("roll_call").decode()
    else:
        started = _start(store, store.add(_STARTS, 1))
        sign(started, _HERE, rank)
        missing = _missing(started, world, timeout_s)
        started.set("roll_call", missing)
        if missing:
            time.sleep(1.5)  # the others, who ask once a second, read the list before the store ends with this process
    if missing:
        raise TimeoutError(f"of {world} ranks these did not appear within {timeout_s:g} s: {missing}")
    return started


def _start(store: dist.Store, number: int) -> dist.Store:
    return dist.PrefixStore(f"start/{number}", store)


def _joined(store: dist.Store, rank: int, timeout_s: float) -> dist.Store:
    """Signs the newest start's roll, and waits until rank 0 has read it.

    A start that another process joined as this rank, or whose roll was read without it, is over; one that is open may
    yet be over, too, and rank 0 begins another.

    Raises:
        TimeoutError: rank 0 did not begin any, or did not end it.
    """
    known = f"joined/{rank}"
    joined = store.add(known, 0)
    started: dist.Store | None = None

    def called() -> bool:
        nonlocal joined, started
        newest = store.add(_STARTS, 0)
        if newest > joined and not _start(store, newest).check(["roll_call"]):
            store.add(known, newest - joined)
            joined, started = newest, _start(store, newest)
            sign(started, _HERE, rank)
        return started is not None and started.check(["roll_call"])

    if not wait_until(called, timeout_s) or started is None:
        raise TimeoutError(f"rank {rank} met the store within {timeout_s:g} s, but not rank 0")
    return started


def _missing(store: dist.Store, world: int, timeout_s: float) -> str:
    """Who has not signed by then: counted until all have, looked for by name where that takes long."""
    deadline = time.monotonic() + timeout_s
    while not wait_until(lambda: num_signed(store, _HERE) >= world, min(SAY_WAITING_S, deadline - time.monotonic())):
        missing = listed(absent(store, _HERE, range(world)))
        if time.monotonic() >= deadline:
            return missing
        print(f"rank 0 of {world} waits for ranks {missing}", file=sys.stderr, flush=True)
    return ""

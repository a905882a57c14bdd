"""This process among the ranks: its device, and how it joins and leaves the process group."""

import math
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron5d.topology.launcher import INITIALIZED, Environment, read_environment
from megatron5d.topology.rendezvous import default_store, meet, num_registered, register, wait_until

LEAVING_S = 60.0  # rank 0 waits at most this long for the others to leave first
_LEAVING = "leaving"  # register of the ranks that are about to leave
_OTHER_FILES = 256  # files that rank 0 has open besides its connections to the others
_SINGLE_PROCESS_FILES = 64  # files that a single process has open besides its data


@dataclass(frozen=True)
class Process:
    """This process, ready to communicate."""

    rank: int  # of this process, 0 ... world-1
    world: int
    local_rank: int  # index among the processes of this node
    device: torch.device


def start_process(
    timeout_s: float, environment: Environment | None = None, store: dist.Store | None = None
) -> Process:
    """Chooses the device and joins the other ranks; at world size 1 nothing is initialized.

    Args:
        timeout_s: seconds after which a collective fails (`parallel.timeout_s`).
        environment: of this process; None = `read_environment()`.
        store: of a rendezvous that has taken place; None = the ranks meet now.

    Comm: creates the world's process group, NCCL on GPUs and gloo otherwise, after `meet`.

    Raises:
        ValueError: the node has no GPU for this local rank, the store's host name does not
            resolve, or rank 0 cannot open enough connections.
        OSError: another process uses the store's port.
        TimeoutError: some ranks, which it names, did not appear.
    """
    environment = environment or read_environment()
    device = choose_device(environment.local_rank)
    raise_file_limit()
    if environment.world > 1 and environment.init_method != INITIALIZED:
        if store is None:
            check_connections(environment)
            store = meet(environment).store
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        if device.type == "cpu":
            use_batch_scheduling()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=environment.rank,
            world_size=environment.world,
            store=store,
            timeout=timeout,
        )
    return Process(environment.rank, environment.world, environment.local_rank, device)


def stop_process() -> None:
    """Destroys the process group after a run that ended well.

    Does nothing while an exception propagates: a failing rank must print its error before the
    others see it leave. Otherwise one of their "connection closed" would be taken for the cause,
    and NCCL would wait for kernels that never finish.
    """
    made_by_launcher = os.environ.get("MEGATRON5D_MEETING") == INITIALIZED
    if dist.is_initialized() and not made_by_launcher and sys.exc_info()[0] is None:
        _leave_in_order(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()


def use_batch_scheduling() -> None:
    """Puts this process under SCHED_BATCH, so that a waking thread does not preempt a running one.

    Must be called before gloo starts its threads. gloo's device thread spins on a connection's
    lock. Where ranks outnumber cores, it could preempt the thread that held the lock and then spin
    for a whole time slice, which took most of the time of a small collective. Waking threads still
    use idle cores at once.

    Only the default policy SCHED_OTHER is changed; a run started under another one (`chrt`) keeps
    it. Where a sandbox forbids the change, the run is slower but works.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def raise_file_limit() -> float:
    """Raises this process's limit of open files to the hard limit, and gives that limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS rejects the hard limit that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


def file_limit_for_data(world: int) -> float:
    """Number of files that rank 0, which has the most connections, can open for its data."""
    return raise_file_limit() - (world + _OTHER_FILES if world > 1 else _SINGLE_PROCESS_FILES)


def check_connections(environment: Environment) -> None:
    """Rejects a world in which rank 0 cannot keep a connection to every other rank.

    Where the limit is too low, the operating system would refuse connections without any message.

    Raises:
        ValueError: rank 0 cannot open enough files.
    """
    limit, required = raise_file_limit(), environment.world + _OTHER_FILES
    if environment.rank == 0 and required > limit:
        raise ValueError(
            f"connections of rank 0 to {environment.world} ranks require {required} open files "
            f"(got {limit}, ulimit -Hn); raise this limit to {required}"
        )


def _leave_in_order(rank: int, world: int) -> None:
    """Makes rank 0 leave last: its process may host the store, where others still read how the last
    save ended."""
    # rank 0 may have left already; then this rank is late and needs nothing more from the store
    with suppress(RuntimeError):
        store = default_store()
        register(store, _LEAVING, rank)
        if rank == 0:
            wait_until(lambda: num_registered(store, _LEAVING) >= world, LEAVING_S)


def choose_device(local_rank: int) -> torch.device:
    """Selects this rank's GPU: that of its local rank, or the only visible one; without GPUs the
    CPU.

    Raises:
        ValueError: the node shows fewer GPUs than it has ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU: this node shows {count}. Start at most {count} "
            "ranks on a node, or set CUDA_VISIBLE_DEVICES= (empty) to run on CPUs"
        )
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device

"""Ranks for tests and tools: fork gloo processes from this one, run a function on each, bring the values back.

A fork of a process that has imported torch is a rank in milliseconds, and the function may be a closure. It asks one
thing of the parent: a single thread, because OpenMP's second thread does not survive a fork and its work would hang.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401 (every optimiser imports it: once here, or for a second in each rank)
import torch.distributed as dist

from megatron5d.topology.collective_notes import first_mismatch, note_collectives
from megatron5d.topology.process import preempt_nobody

_STACK_SIGNAL = signal.SIGUSR2  # SIGUSR1 belongs to the training loop
_PR_SET_PDEATHSIG = 1
# What a rank says when another one died first: never the cause.
_ECHOES = (
    "gloo/transport/",  # connection closed, reset or refused
    "Connection closed by peer",
    "Connection reset by peer",
    "failed to pass monitoredBarrier",
    "Monitored Barrier encountered error",
    "Timed out waiting",
)
_GRACE_S = 0.3  # for others to report once a cause is known
_ECHO_GRACE_S = 10.0  # for the cause to arrive once an echo of it is known


class RankFailure(AssertionError):
    """What went wrong on the ranks, the root cause first."""


@dataclass
class _Rank:
    pid: int
    pipe: Connection
    stack: Path
    value: Any = None
    error: str | None = None
    done: bool = False

    @property
    def echo(self) -> bool:
        return self.error is not None and any(text in self.error for text in _ECHOES)


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls `fn(rank, world, *args)` on `world` forked ranks and returns their values in rank order.

    Shapes, types and order of all collectives are compared between the ranks (collective_notes.py).
    TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment adds torch's own checks, as it does for a user.

    Args:
        fn: any callable, closures included; its value must be picklable.
        world: number of ranks; 1 runs without a process group, like the real thing.
        args: reach the ranks by fork, nothing is pickled.
        timeout: seconds until ranks that have not reported are named, shown with their stacks, and killed.

    Raises:
        RankFailure: a rank raised, died or stayed silent, or its collectives were not those of the others; the first
            line is the root cause.
    """
    assert torch.get_num_threads() == 1, "set torch.set_num_threads(1) before forking: a rank would hang in OpenMP"
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(world):
                ranks.append(_fork(partial(fn, rank, world, *args), rank, world, Path(folder), timeout))
            _collect(ranks, timeout)
            failed = any(not r.done or r.error for r in ranks)
            mismatch = first_mismatch([_notes(Path(folder), rank) for rank in range(world)], ended=not failed)
            if failed or mismatch:
                raise RankFailure("\n".join(filter(None, [mismatch, _story(ranks, timeout) if failed else None])))
            return [r.value for r in ranks]
        finally:
            _kill(ranks)


def _fork(call: partial, rank: int, world: int, folder: Path, timeout: float) -> _Rank:
    receiver, sender = Pipe(duplex=False)
    stack = folder / f"stack{rank}"
    sys.stdout.flush()  # or the rank would print the parent's buffer again
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            receiver.close()
            gc.freeze()  # what the parent made is not this rank's to collect: looking at it would copy its pages
            _die_with(parent)
            faulthandler.register(_STACK_SIGNAL, file=open(stack, "w"))  # noqa: SIM115 (open for the rank's life)
            _set_variables(rank, world)
            _report(sender, *_outcome(call, partial(_init_gloo, rank, world, folder, timeout)))
            while True:  # a slower peer must still find this rank; the parent ends it
                signal.pause()
        finally:
            os._exit(1)
    sender.close()
    return _Rank(pid, receiver, stack)


def _outcome(call: partial, init_gloo: partial) -> tuple[bool, Any]:
    try:
        torch.set_num_threads(1)  # renews torch's pool after the fork; gloo's threads would race to, and one would fail
        init_gloo()
        return True, call()
    except BaseException:
        return False, traceback.format_exc()


def _set_variables(rank: int, world: int) -> None:
    """As a launcher would: a whole program can run on the rank, more than once, in the group that is made here."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MEGATRON5D_MEETING": "met"}


def _notes(folder: Path, rank: int) -> Path:
    return folder / f"collectives{rank}"


def _init_gloo(rank: int, world: int, folder: Path, timeout: float) -> None:
    if world == 1:
        return
    note_collectives(_notes(folder, rank))
    preempt_nobody()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # connections on first use: groups become several times cheaper
    dist.set_debug_level_from_env()
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world,
        store=dist.FileStore(str(folder / "store"), world),
        timeout=datetime.timedelta(seconds=max(timeout, 1.0) + 60),  # the parent's own timeout comes first
    )


def _report(sender: Connection, good: bool, value: Any) -> None:
    """Plain pickle copies the bytes; torch's own pickler would pass file descriptors that die with the rank."""
    try:
        message = pickle.dumps((good, value))
    except Exception:
        message = pickle.dumps((False, f"the value cannot be pickled\n{traceback.format_exc()}"))
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(message)


def _die_with(parent: int) -> None:
    """A rank whose parent is killed dies too: nothing is left running."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _collect(ranks: list[_Rank], timeout: float) -> None:
    """Receives reports until all are in, time is up, or a failure has had its grace."""
    deadline = time.monotonic() + timeout
    while waiting := [r for r in ranks if not r.done]:
        ready = wait([r.pipe for r in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for rank in (r for r in waiting if r.pipe in ready):
            _receive(rank)
            if rank.error:
                grace = _ECHO_GRACE_S if rank.echo else _GRACE_S
                deadline = min(deadline, time.monotonic() + grace)


def _receive(rank: _Rank) -> None:
    rank.done = True
    try:
        good, value = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.error = f"died without a report: {_death(rank)}"
        return
    if good:
        rank.value = value
    else:
        rank.error = value


def _death(rank: _Rank) -> str:
    _, status = os.waitpid(rank.pid, 0)
    rank.pid = 0
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _story(ranks: list[_Rank], timeout: float) -> str:
    """The cause in full, echoes in one line each, silent ranks with their stacks."""
    failed = sorted((r for r in ranks if r.error), key=lambda r: (r.echo, ranks.index(r)))
    silent = [r for r in ranks if not r.done]
    lines = []
    for r in failed:
        text = (r.error or "").strip()
        text = text if not r.echo or r is failed[0] else text.splitlines()[-1]
        lines.append(f"rank {ranks.index(r)}: {text}")
    if silent and (not failed or failed[0].echo):
        names = ", ".join(str(ranks.index(r)) for r in silent)
        lines.insert(0, f"no report from rank(s) {names} within {timeout:g} s")
        lines += [f"rank {ranks.index(r)} was in\n{_stack(r)}" for r in silent]
    return "\n".join(lines)


def _stack(rank: _Rank) -> str:
    os.kill(rank.pid, _STACK_SIGNAL)
    for _ in range(100):
        time.sleep(0.02)
        if text := rank.stack.read_text():
            return text.strip()
    return "(no stack: stopped, or not yet started)"


def _kill(ranks: list[_Rank]) -> None:
    for r in ranks:
        r.pipe.close()
        if r.pid:
            os.kill(r.pid, signal.SIGKILL)
            os.waitpid(r.pid, 0)

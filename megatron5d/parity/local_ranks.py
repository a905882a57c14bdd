"""Ranks for tests and tools: fork gloo processes from this one, run a function on each, and return
the values.

A fork of a process that has imported torch becomes a rank in milliseconds, and the function may be
a closure. The parent must use a single OpenMP thread, because others do not survive a fork and
their work would hang.
"""

import ctypes
import datetime
import faulthandler
import gc
import io
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
import torch._dynamo  # noqa: F401 (meta tensors and dispatch modes import it, which takes a second: not in each rank)
import torch.distributed as dist
from torch import Tensor

from megatron5d.topology.launcher import die_with_parent
from megatron5d.topology.process import use_batch_scheduling

_STACK_SIGNAL = signal.SIGUSR2  # SIGUSR1 belongs to the training loop
# Parts of the errors of a rank whose peer died first. Such an error is an echo, never the cause.
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


class Transport:
    """Joins ranks that are forked to a process group; made before, in their parent."""

    def __init__(self, world: int, folder: Path, timeout: float) -> None:
        self.world, self.folder, self.timeout = world, folder, timeout

    def connect(self, rank: int) -> None:
        """Makes this process, newly forked, a rank of the world's group."""

    def finish(self) -> None:
        """Ends in a rank, before its value is reported."""

    def mismatch(self) -> str | None:
        """Returns in the parent, once all ranks have ended, where their calls differ, if that is
        known."""
        return None

    def close(self) -> None:
        """Ends in the parent."""


class Gloo(Transport):
    """Ranks as a launcher makes them; calls are not compared."""

    def connect(self, rank: int) -> None:
        """Joins the world's group, over a file."""
        use_batch_scheduling()
        # connections on first use: groups become several times cheaper
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        dist.set_debug_level_from_env()
        store = dist.FileStore(str(self.folder / "store"), self.world)
        # the parent's own timeout comes first
        patience = datetime.timedelta(seconds=max(self.timeout, 1.0) + 60)
        dist.init_process_group(
            "gloo", rank=rank, world_size=self.world, store=store, timeout=patience
        )


# the suite has one of its own, which compares what ranks call (tests/pipe_group.py)
transport: type[Transport] = Gloo


class RankFailure(AssertionError):
    """Ranks failed; the message begins with the root cause."""


@dataclass
class _Rank:
    """A forked process: the pipe of its report, the file for its stack, and its value or error once
    it has reported."""

    pid: int
    pipe: Connection
    stack: Path
    value: Any = None
    error: str | None = None
    done: bool = False

    @property
    def echo(self) -> bool:
        """Whether its error only says that another rank died."""
        return self.error is not None and any(text in self.error for text in _ECHOES)


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls `fn(rank, world, *args)` on `world` forked ranks and returns their values in rank
    order.

    TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment adds torch's own checks, as it does for a
    user.

    Args:
        fn: any callable, closures included; its value must be picklable.
        world: number of ranks; 1 runs without a process group, like the real thing.
        args: reach the ranks by fork, nothing is pickled.
        timeout: seconds until ranks that have not reported are named, shown with their stacks, and
            killed.

    Raises:
        RankFailure: a rank raised, died or stayed silent, or ranks called other collectives; the
            first line is the root cause.
    """
    assert torch.get_num_threads() == 1, (
        "set torch.set_num_threads(1) before forking: a rank would hang in OpenMP"
    )
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        ranks: list[_Rank] = []
        joined = transport(world, Path(folder), timeout) if world > 1 else None
        try:
            for rank in range(world):
                ranks.append(
                    _fork(partial(fn, rank, world, *args), rank, world, Path(folder), joined)
                )
            _collect(ranks, timeout)
            if any(not r.done or r.error for r in ranks):
                raise RankFailure(_failures(ranks, timeout))
            if mismatch := joined and joined.mismatch():
                raise RankFailure(mismatch)
            return [r.value for r in ranks]
        finally:
            _kill(ranks)
            if joined:
                joined.close()


def _fork(call: partial, rank: int, world: int, folder: Path, joined: Transport | None) -> _Rank:
    receiver, sender = Pipe(duplex=False)
    stack = folder / f"stack{rank}"
    sys.stdout.flush()  # otherwise the rank would print the parent's buffer again
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            receiver.close()
            # collecting the parent's objects would touch, and so copy, their memory pages
            gc.freeze()
            # a short run makes little garbage, and looking for it took a tenth of it
            gc.set_threshold(20_000, 10, 10)
            die_with_parent(parent)
            faulthandler.register(_STACK_SIGNAL, file=open(stack, "w"))  # noqa: SIM115 (open for the rank's life)
            _set_variables(rank, world)
            _report(sender, *_outcome(call, rank, joined))
            while True:  # a slower peer must still find this rank; the parent ends it
                signal.pause()
        finally:
            os._exit(1)
    sender.close()
    return _Rank(pid, receiver, stack)


def _outcome(call: partial, rank: int, joined: Transport | None) -> tuple[bool, Any]:
    """Returns (True, the value of `call`), or (False, the traceback)."""
    try:
        # makes torch's pool anew; gloo's threads would race to do so, and one would fail
        torch.set_num_threads(1)
        if joined is None:
            return True, call()
        joined.connect(rank)
        value = call()
        joined.finish()
        return True, value
    except BaseException:
        return False, traceback.format_exc()


def _set_variables(rank: int, world: int) -> None:
    """Sets what a launcher would, so that the rank can run a whole program, even several times, in
    the same group."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MEGATRON5D_MEETING": "met",
    }


class _Pickler(pickle.Pickler):
    """Writes a tensor of the CPU as its bytes, ten times faster than torch does, and without its
    shared storage."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        flat = value.contiguous()
        return _tensor, (
            ctypes.string_at(flat.data_ptr(), flat.nbytes),
            flat.dtype,
            tuple(flat.shape),
        )


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


def _report(sender: Connection, good: bool, value: Any) -> None:
    """Sends the outcome to the parent.

    Pickled here because a multiprocessing pipe would use torch's pickler, which passes tensors as
    file descriptors that are gone when the rank ends.
    """
    message = io.BytesIO()
    try:
        _Pickler(message).dump((good, value))
    except Exception:
        message = io.BytesIO(
            pickle.dumps((False, f"the value cannot be pickled\n{traceback.format_exc()}"))
        )
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(message.getbuffer())


def _collect(ranks: list[_Rank], timeout: float) -> None:
    """Receives reports until all are in or time is up; after a failure, others have a short time to
    report as well."""
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
    """Reads the report of a rank, or how it died."""
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
    """Returns how a rank's process ended: a signal or an exit code."""
    _, status = os.waitpid(rank.pid, 0)
    rank.pid = 0
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _failures(ranks: list[_Rank], timeout: float) -> str:
    """Returns the message of a failure: the cause in full, echoes in one line each, silent ranks
    with their stacks."""
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
    """Asks a running rank for its Python stack."""
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

"""Ranks for tests and tools: forks processes, runs a function on each, and returns the values.

A fork of a process that has imported torch becomes a rank in milliseconds, and the function may be
a closure. The parent must use a single OpenMP thread: other threads do not survive a fork, and
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

# Meta tensors and dispatch modes import it, which takes a second in each rank if not done here.
import torch._dynamo  # noqa: F401
import torch.distributed as dist
from torch import Tensor

from megatron5d.topology.launcher import die_with_parent
from megatron5d.topology.process import use_batch_scheduling

_STACK_SIGNAL = signal.SIGUSR2  # SIGUSR1 belongs to the training loop
# Texts in the errors of a rank whose peer died first. Such an error is an echo, never the cause.
_ECHOES = (
    "gloo/transport/",  # connection closed, reset or refused
    "Connection closed by peer",
    "Connection reset by peer",
    "failed to pass monitoredBarrier",
    "Monitored Barrier encountered error",
    "Timed out waiting",
)
_GRACE_S = 0.3  # for other ranks to report once a cause is known
_ECHO_GRACE_S = 10.0  # for the cause to arrive once an echo of it is known


class Transport:
    """Connects forked ranks to a process group; created before the fork, in their parent."""

    def __init__(self, world: int, folder: Path, timeout: float) -> None:
        self.world, self.folder, self.timeout = world, folder, timeout

    def connect(self, rank: int) -> None:
        """Makes this process, newly forked, a rank of the default group."""

    def finish(self) -> None:
        """Closes the connections of a rank, before it reports its value."""

    def mismatch(self) -> str | None:
        """Where the calls of the ranks differ; called in the parent once all have reported."""
        return None

    def close(self) -> None:
        """Frees what the parent holds."""


class Gloo(Transport):
    """Ranks as a launcher starts them, over gloo; their calls are not compared."""

    def connect(self, rank: int) -> None:
        """Joins the default group, through a file."""
        use_batch_scheduling()
        # Connect on first use, which makes groups several times cheaper.
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        dist.set_debug_level_from_env()
        store = dist.FileStore(str(self.folder / "store"), self.world)
        # The parent's own timeout comes first.
        limit = datetime.timedelta(seconds=max(self.timeout, 1.0) + 60)
        dist.init_process_group(
            "gloo", rank=rank, world_size=self.world, store=store, timeout=limit
        )


# The test suite replaces it by one that compares the calls of ranks (tests/pipe_group.py).
transport: type[Transport] = Gloo


class RankFailure(AssertionError):
    """Ranks failed; the message begins with the root cause."""


@dataclass
class _Rank:
    """A forked process: the pipe for its report, the file for its stack, and its result."""

    pid: int
    pipe: Connection
    stack: Path
    value: Any = None
    error: str | None = None
    done: bool = False

    @property
    def echo(self) -> bool:
        """Whether its error only shows that another rank died."""
        return self.error is not None and any(text in self.error for text in _ECHOES)


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Values of `fn(rank, world, *args)` on `world` forked ranks, in rank order.

    TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment adds torch's own checks.

    Args:
        fn: any callable, closures included; its value must be picklable.
        world: number of ranks; 1 runs without a process group, as in training.
        args: reach the ranks through the fork, without pickling.
        timeout: seconds after which ranks without a report are named with their stacks and killed.

    Raises:
        RankFailure: a rank raised, died or stayed silent, or ranks called different collectives;
            the first line is the root cause.
    """
    assert torch.get_num_threads() == 1, (
        "set torch.set_num_threads(1) before forking: a rank would hang in OpenMP"
    )
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        ranks: list[_Rank] = []
        connection = transport(world, Path(folder), timeout) if world > 1 else None
        try:
            for rank in range(world):
                ranks.append(
                    _fork(partial(fn, rank, world, *args), rank, world, Path(folder), connection)
                )
            _collect(ranks, timeout)
            if any(not r.done or r.error for r in ranks):
                raise RankFailure(_failures(ranks, timeout))
            if mismatch := connection and connection.mismatch():
                raise RankFailure(mismatch)
            return [r.value for r in ranks]
        finally:
            _kill(ranks)
            if connection:
                connection.close()


def _fork(
    call: partial, rank: int, world: int, folder: Path, connection: Transport | None
) -> _Rank:
    receiver, sender = Pipe(duplex=False)
    stack = folder / f"stack{rank}"
    # Otherwise the rank would print the parent's buffer again.
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            receiver.close()
            # Collecting the parent's objects would write to, and so copy, their memory pages.
            gc.freeze()
            # A short run makes little garbage, and looking for it took a tenth of its time.
            gc.set_threshold(20_000, 10, 10)
            die_with_parent(parent)
            # The file stays open as long as the rank lives.
            faulthandler.register(_STACK_SIGNAL, file=open(stack, "w"))  # noqa: SIM115
            _set_variables(rank, world)
            _report(sender, *_outcome(call, rank, connection))
            # A slower peer must still find this rank, so that the parent has to end it.
            while True:
                signal.pause()
        finally:
            os._exit(1)
    sender.close()
    return _Rank(pid, receiver, stack)


def _outcome(call: partial, rank: int, connection: Transport | None) -> tuple[bool, Any]:
    """(True, the value of `call`), or (False, the traceback; of a RankFailure its message)."""
    try:
        # Recreates torch's thread pool; otherwise gloo's threads race to do so, and one fails.
        torch.set_num_threads(1)
        if connection is None:
            return True, call()
        connection.connect(rank)
        value = call()
        connection.finish()
        return True, value
    except RankFailure as failure:
        return False, str(failure)
    except BaseException:
        return False, traceback.format_exc()


def _set_variables(rank: int, world: int) -> None:
    """Sets a launcher's variables, so that the rank can run a whole program in this group."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MEGATRON5D_MEETING": "met",
    }


class _Pickler(pickle.Pickler):
    """Pickles a CPU tensor as its bytes: ten times faster than torch, without shared storage."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        flat = value.contiguous()
        return _tensor_of_bytes, (
            ctypes.string_at(flat.data_ptr(), flat.nbytes),
            flat.dtype,
            tuple(flat.shape),
        )


def _tensor_of_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


def _report(sender: Connection, success: bool, value: Any) -> None:
    """Sends the outcome to the parent.

    A multiprocessing pipe would use torch's pickler, which passes tensors as file descriptors that
    are gone when the rank ends; therefore the value is pickled here.
    """
    message = io.BytesIO()
    try:
        _Pickler(message).dump((success, value))
    except Exception:
        error = f"the value cannot be pickled\n{traceback.format_exc()}"
        message = io.BytesIO(pickle.dumps((False, error)))
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(message.getbuffer())


def _collect(ranks: list[_Rank], timeout: float) -> None:
    """Receives reports until all have arrived or the time is over.

    After a failure, the other ranks have a short time to report as well.
    """
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
    """Reads the report of a rank, or finds out how it died."""
    rank.done = True
    try:
        success, value = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.error = f"died without a report: {_death(rank)}"
        return
    if success:
        rank.value = value
    else:
        rank.error = value


def _death(rank: _Rank) -> str:
    """How a rank's process ended: a signal or an exit code."""
    _, status = os.waitpid(rank.pid, 0)
    rank.pid = 0
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _failures(ranks: list[_Rank], timeout: float) -> str:
    """Message of a failure: the cause in full, a line for each echo, stacks of silent ranks."""
    failed = sorted((r for r in ranks if r.error), key=lambda r: (r.echo, ranks.index(r)))
    silent = [r for r in ranks if not r.done]
    lines, texts = [], set[str]()
    for r in failed:
        text = (r.error or "").strip()
        text = text if not r.echo or r is failed[0] else text.splitlines()[-1]
        if text not in texts:  # all ranks may stop for the same reason
            lines.append(f"rank {ranks.index(r)}: {text}")
        texts.add(text)
    if silent and (not failed or failed[0].echo):
        names = ", ".join(str(ranks.index(r)) for r in silent)
        lines.insert(0, f"no report from rank(s) {names} within {timeout:g} s")
        lines += [f"rank {ranks.index(r)} was in\n{_stack(r)}" for r in silent]
    return "\n".join(lines)


def _stack(rank: _Rank) -> str:
    """Python stack of a running rank."""
    os.kill(rank.pid, _STACK_SIGNAL)
    for _ in range(100):
        time.sleep(0.02)
        if text := rank.stack.read_text():
            return text.strip()
    return "(no stack: the process is stopped, or has not started yet)"


def _kill(ranks: list[_Rank]) -> None:
    for r in ranks:
        r.pipe.close()
        if r.pid:
            os.kill(r.pid, signal.SIGKILL)
            os.waitpid(r.pid, 0)

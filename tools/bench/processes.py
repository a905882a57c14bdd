"""Work in other processes: tasks that may crash or hang, and programs with a deadline."""

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext

OUT_OF_TIME = "out of time"
NOT_REACHED = f"not reached: {OUT_OF_TIME}"

Send = Callable[[tuple], None]
Worker = Callable[[Sequence[str], Send], None]
"""Runs tasks in their order and sends their results, then `(task,)` once a task is done."""


def run_tasks(
    worker: Worker,
    tasks: Sequence[str],
    silence_s: float,
    deadline: float,
    context: ForkContext | SpawnContext | None = None,
) -> Iterator[tuple]:
    """Runs tasks in another process; if it dies or hangs, a new one continues after that task.

    Args:
        worker: a function of a module, so that the other process can import it.
        silence_s: seconds without a result after which a task counts as hanging.
        deadline: in `time.monotonic()`.
        context: how processes are started; None = spawn, which is safe after this process has
            used its GPU.

    Yields:
        The worker's results, and `(task, reason)` for each task that did not finish.
    """
    context = context or multiprocessing.get_context("spawn")
    pending = list(tasks)
    while pending and time.monotonic() < deadline:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(worker, pending, sender), daemon=False)
        process.start()
        # so that the receiver notices when the process dies
        sender.close()
        try:
            yield from _results(receiver, pending, silence_s, deadline)
        finally:
            process.kill()
            process.join()
            receiver.close()
    yield from ((task, NOT_REACHED) for task in pending)


def _run(worker: Worker, tasks: Sequence[str], sender: Connection) -> None:
    # Ctrl-C reaches both processes: the parent ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker(tasks, sender.send)


def _results(
    receiver: Connection, pending: list[str], silence_s: float, deadline: float
) -> Iterator[tuple]:
    """Yields the results of one process, and removes its tasks from `pending`."""
    while pending:
        timeout = min(silence_s, deadline - time.monotonic())
        if not receiver.poll(max(timeout, 0.0)):
            silent = timeout == silence_s
            yield pending.pop(0), f"no result for {silence_s:.0f} s" if silent else OUT_OF_TIME
            return
        try:
            result = receiver.recv()
        except EOFError:
            yield pending.pop(0), "its process died"
            return
        # the worker is done with the task
        if result == (pending[0],):
            pending.pop(0)
        else:
            yield result


def start_program(command: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a program, whose output `finish_program` returns."""
    # in a new session, so that its children can be killed with it
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish_program(
    program: subprocess.Popen[str], deadline: float, lines: int = 1
) -> tuple[int | None, str]:
    """Waits for a program, and kills it and its children at the deadline.

    Args:
        deadline: in `time.monotonic()`.
        lines: number of lines of output to return.

    Returns:
        Its exit code, or None if it was killed, and the last lines of its output.
    """
    try:
        output, _ = program.communicate(timeout=max(0.0, deadline - time.monotonic()))
        code: int | None = program.returncode
    except BaseException as error:
        kill_program(program)
        output, code = program.communicate()[0], None
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    return code, "\n".join([line for line in output.splitlines() if line.strip()][-lines:])


def kill_program(program: subprocess.Popen[str]) -> None:
    """Kills a program and its children, if they still run."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)

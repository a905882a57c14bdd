"""Work on a GPU in a process of its own: what crashes there, hangs, or breaks its device ends one piece and no more."""

import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path

import torch

Worker = Callable[[Sequence[str], Callable[[tuple], None]], None]
"""Does the named pieces one after the other: tells of what it has found, and with `(name,)` that a piece is done."""


def device_is_lost() -> bool:
    """Whether an earlier kernel has broken this process's GPU, so that nothing more runs on it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def write_whole(file: Path | None, found: object) -> None:
    """Writes JSON in the place of what the file holds, at once: an interrupt leaves the old figures or the new."""
    if file is not None:
        part = file.with_name(file.name + ".part")
        part.write_text(json.dumps(found, indent=1))
        part.replace(file)


def _run(worker: Worker, names: Sequence[str], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes: the parent ends this one
    worker(names, connection.send)


def in_turn(
    worker: Worker, names: Sequence[str], limit_s: float, until: float, context: BaseContext | None = None
) -> Iterator[tuple]:
    """What a worker tells, piece by piece; where it dies or falls silent, another one goes on behind that piece.

    Args:
        worker: runs in the other process; a function of a module.
        names: of the pieces.
        limit_s: the longest silence.
        until: of `time.monotonic()`; then no piece is waited for any more.
        context: how processes are started; None = spawn, which a parent may that has used its GPU.

    Yields:
        What the worker told, without the `(name,)` at the end of a piece; and `(name, reason)` of a piece that ended
        without it, also where time was up.
    """
    context = context or multiprocessing.get_context("spawn")
    left = list(names)
    while left and time.monotonic() < until:
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_run, args=(worker, left, send), daemon=False)  # type: ignore[attr-defined]
        child.start()
        send.close()
        try:
            yield from _told(receive, left, limit_s, until)
        finally:
            child.kill()
            child.join()
            receive.close()
    yield from ((name, "not reached: the time is up") for name in left)


def _told(receive: Connection, left: list[str], limit_s: float, until: float) -> Iterator[tuple]:
    """What one process tells; takes from `left` what it has done, and the piece that it has not survived."""
    while left:
        patience = min(limit_s, until - time.monotonic())
        if not receive.poll(max(patience, 0.0)):
            yield left.pop(0), f"nothing heard in {limit_s:.0f} s" if patience == limit_s else "the time is up"
            return
        try:
            message = receive.recv()
        except EOFError:
            yield left.pop(0), "its process has died"
            return
        if message == (left[0],):
            left.pop(0)
        else:
            yield message

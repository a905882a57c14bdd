"""Calls a function in several forked processes, for files that are read and written independently of each other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from megatron5d.topology.launcher import die_with_parent

T = TypeVar("T")


def in_processes(work: Callable[[int], T], count: int, num_workers: int) -> Iterator[T]:
    """Calls `work` with 0 ... count-1 and yields what it returns, in the order in which the calls end.

    What this process has opened and computed reaches the others by fork; it must use a single thread of torch's.

    Args:
        work: any function; its values and errors must be picklable.
        count: number of calls.
        num_workers: processes; with 1 the calls are made in this one.

    Raises:
        OSError: a process was killed.
        Exception: the first one that `work` raised.
    """
    if min(count, num_workers) <= 1:
        yield from map(work, range(count))
        return
    fork = multiprocessing.get_context("fork")
    following = fork.Value("q", 0)  # the call that nobody has begun

    def run(sender: Connection, parent: int) -> None:
        die_with_parent(parent)
        while True:
            with following.get_lock():
                number = following.value
                following.value += 1
            if number >= count:
                return
            try:
                sender.send((True, work(number)))
            except Exception as error:  # noqa: BLE001 - the parent raises it
                sender.send((False, error))
                return

    receivers, workers = [], []
    for _ in range(min(count, num_workers)):
        receiver, sender = fork.Pipe(duplex=False)
        workers.append(fork.Process(target=run, args=(sender, os.getpid()), daemon=True))
        workers[-1].start()
        sender.close()  # before the next fork: its end is told by nobody holding the sender
        receivers.append(receiver)
    try:
        yield from _received(receivers, count)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _received(receivers: list[Connection], count: int) -> Iterator[Any]:
    """Yields the values of `count` calls."""
    for _ in range(count):
        while True:
            if not receivers:
                raise OSError("a process that worked for this one was killed (out of memory?)")
            ready: Any = wait(receivers)[0]
            try:
                good, value = ready.recv()
                break
            except EOFError:
                receivers.remove(ready)
        if not good:
            raise value
        yield value

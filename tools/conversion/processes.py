"""Calls in forked processes, which share what this process has opened and computed."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from megatron5d.topology.launcher import die_with_parent

T = TypeVar("T")
_WORK: list[Callable[[int], Any]] = []  # the function of a forked process


def in_processes(work: Callable[[int], T], count: int, num_workers: int) -> Iterator[T]:
    """Calls `work` with 0 ... count-1 in forked processes, or in this one with a single worker.

    This process must use a single thread of torch's, because one that has more cannot be forked.

    Args:
        work: may use whatever this process has opened; its values and errors must be picklable.

    Yields:
        What `work` returns, in the order in which calls end.

    Raises:
        OSError: a process was killed.
        Exception: the first error of `work`.
    """
    if min(count, num_workers) <= 1:
        yield from map(work, range(count))
        return
    # `work` reaches the processes by fork, since it cannot be pickled
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(count, num_workers), fork, _begin, (work, os.getpid()))
    try:
        for call in as_completed([pool.submit(_call, number) for number in range(count)]):
            yield call.result()
    except BrokenProcessPool as error:
        raise OSError("a worker process was killed (out of memory?)") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[int], Any], parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a traceback: the parent prints
    _WORK.append(work)


def _call(number: int) -> Any:
    return _WORK[-1](number)

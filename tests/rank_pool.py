"""A pool of ranks that tests reuse: becoming a rank took a third of the time of a layout's test.

A forked process copies each page of its parent when it first touches it, and torch's first steps
are slow. So ranks stay alive and receive one call after the other: each run takes the first ranks
of the pool, which forks more where there are too few. After a failure the pool is replaced.

The call must be picklable. A test that patches something forks its own ranks (`tests/conftest.py`),
because those of the pool would not see the patch; with `MEGATRON5D_GLOO=1` all tests do.
"""

import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipe_group import Pipes
from ranks import run_ranks

from megatron5d.parity import local_ranks
from megatron5d.parity.local_ranks import RankFailure

MAX_RANKS = 16  # larger worlds are rare
test_patches = False  # whether the current test forks its own ranks


class _Pool:
    """Forked ranks, each with a connection for calls and reports."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.folder = tempfile.TemporaryDirectory(prefix="ranks_")
        self.transport = Pipes(MAX_RANKS, Path(self.folder.name), 0.0)
        self.ranks: list[local_ranks._Rank] = []

    def _fork(self) -> None:
        parent_end, rank_end = Pipe()
        rank, folder = len(self.ranks), Path(self.folder.name)
        inherited = [parent_end, *(other.pipe for other in self.ranks)]
        serve = partial(self._serve, rank, rank_end, inherited)
        forked = local_ranks._fork(serve, rank, MAX_RANKS, folder, None)
        rank_end.close()
        forked.pipe.close()
        forked.pipe = parent_end
        self.ranks.append(forked)

    def _serve(self, rank: int, pipe: Connection, inherited: list[Connection]) -> None:
        """Runs in a rank the calls that arrive, until the parent has ended."""
        for connection in inherited:
            connection.close()
        while True:
            self.transport.folder, world, state, fn, args = pickle.loads(pipe.recv_bytes())
            self.transport.world = world
            local_ranks._set_variables(rank, world)
            torch.set_rng_state(state)
            transport = self.transport if world > 1 else None
            call = partial(fn, rank, world, *args)
            local_ranks._report(pipe, *local_ranks._outcome(call, rank, transport))
            if dist.is_initialized():
                dist.destroy_process_group()

    def run(self, fn: Callable[..., Any], world: int, args: tuple, timeout: float) -> list[Any]:
        while len(self.ranks) < world:
            self._fork()
        self.num_runs += 1
        folder = Path(self.folder.name) / str(self.num_runs)
        folder.mkdir()
        self.transport.folder, self.transport.world = folder, world
        message = pickle.dumps((folder, world, torch.get_rng_state(), fn, args))
        ranks = self.ranks[:world]
        for rank in ranks:
            rank.done, rank.value, rank.error = False, None, None
            rank.pipe.send_bytes(message)
        local_ranks._collect(ranks, timeout)
        if any(not rank.done or rank.error for rank in ranks):
            raise RankFailure(local_ranks._failures(ranks, timeout))
        if world > 1 and (mismatch := self.transport.mismatch()):
            raise RankFailure(mismatch)
        return [rank.value for rank in ranks]

    def end(self) -> None:
        local_ranks._kill(self.ranks)
        self.transport.close()
        self.folder.cleanup()


_pools: list[_Pool] = []  # at most one


def run_on_pool(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Like `run_ranks`, for a module's function and picklable arguments."""
    if test_patches or world > MAX_RANKS or local_ranks.transport is not Pipes:
        return run_ranks(fn, world, *args, timeout=timeout)
    if not _pools:
        _pools.append(_Pool())
    try:
        return _pools[0].run(fn, world, args, timeout)
    except BaseException:
        end_pool()
        raise


def end_pool() -> None:
    """Ends all ranks of the pool."""
    while _pools:
        _pools.pop().end()

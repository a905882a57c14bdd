"""Ranks that run one layout after the other: a third of the time of a layout's test was to become a
rank.

What a fork has of its parent is copied page by page as soon as it touches it, and torch's first
steps are slow ones. So ranks stay, and are told what to run next: each run takes as many of them as
its world has, and more are forked where there are too few. After a failure others take their place.
Only what can be pickled is run on them, and not in a test that patches something, of which they
would know nothing: `tests/conftest.py` makes such a test fork ranks of its own. With
`MEGATRON5D_GLOO=1` all do.
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

MOST_RANKS = 16  # larger worlds are rare
alone = False  # whether the test that runs is one for which ranks are forked


class _Pool:
    """Forked ranks, each with a connection on which it gets orders and reports."""

    def __init__(self) -> None:
        self.number = 0
        self.folder = tempfile.TemporaryDirectory(prefix="ranks_")
        self.joined = Pipes(MOST_RANKS, Path(self.folder.name), 0.0)
        self.ranks: list[local_ranks._Rank] = []

    def _first(self, world: int) -> list[local_ranks._Rank]:
        """Returns this many ranks, those that are missing newly forked."""
        while len(self.ranks) < world:
            ours, theirs = Pipe()
            rank = len(self.ranks)
            call = partial(self._serve, rank, theirs, [ours, *(each.pipe for each in self.ranks)])
            forked = local_ranks._fork(call, rank, world, Path(self.folder.name), None)
            theirs.close()
            forked.pipe.close()
            forked.pipe = ours
            self.ranks.append(forked)
        return self.ranks[:world]

    def _serve(self, rank: int, orders: Connection, others: list[Connection]) -> None:
        """Runs in a rank what it is told until the parent has gone."""
        for other in others:
            other.close()
        while True:
            self.joined.folder, world, state, fn, args = pickle.loads(orders.recv_bytes())
            self.joined.world = world
            local_ranks._set_variables(rank, world)
            torch.set_rng_state(state)
            joined = self.joined if world > 1 else None
            local_ranks._report(
                orders, *local_ranks._outcome(partial(fn, rank, world, *args), rank, joined)
            )
            if dist.is_initialized():
                dist.destroy_process_group()

    def run(self, world: int, order: tuple, timeout: float) -> list[Any]:
        """Has the first ranks run it, and returns their values."""
        self.number += 1
        self.joined.folder, self.joined.world = Path(self.folder.name) / str(self.number), world
        self.joined.folder.mkdir()
        message, ranks = (
            pickle.dumps((self.joined.folder, world, torch.get_rng_state(), *order)),
            self._first(world),
        )
        for rank in ranks:
            rank.done, rank.value, rank.error = False, None, None
            rank.pipe.send_bytes(message)
        local_ranks._collect(ranks, timeout)
        if any(not rank.done or rank.error for rank in ranks):
            raise RankFailure(local_ranks._failures(ranks, timeout))
        if world > 1 and (mismatch := self.joined.mismatch()):
            raise RankFailure(mismatch)
        return [rank.value for rank in ranks]

    def end(self) -> None:
        local_ranks._kill(self.ranks)
        self.joined.close()
        self.folder.cleanup()


_pools: list[_Pool] = []  # the one there is, if any


def run_on_standing_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Does what `run_ranks` does with a function of a module and arguments that can be pickled."""
    if alone or world > MOST_RANKS or local_ranks.transport is not Pipes:
        return run_ranks(fn, world, *args, timeout=timeout)
    if not _pools:
        _pools.append(_Pool())
    try:
        return _pools[0].run(world, (fn, args), timeout)
    except BaseException:
        end_all()
        raise


def end_all() -> None:
    """Ends all ranks that stand."""
    while _pools:
        _pools.pop().end()

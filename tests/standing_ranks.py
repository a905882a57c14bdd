"""Ranks that run one layout after the other: a third of the time of a layout's test was to become a rank.

What a fork has of its parent is copied page by page as soon as it touches it, and torch's first steps are slow ones.
So ranks of every size of world stay, and are told what to run next; after a failure others take their place. Only what
can be pickled is run on them, and not in a test that patches something, of which they would know nothing:
`tests/conftest.py` makes such a test fork ranks of its own. With `MEGATRON5D_GLOO=1` all do.
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


class _Team:
    """Ranks of one world, each with a connection on which it gets orders and reports."""

    def __init__(self, world: int) -> None:
        self.world, self.number = world, 0
        self.folder = tempfile.TemporaryDirectory(prefix="ranks_")
        self.joined = Pipes(world, Path(self.folder.name), 0.0)
        pairs = [Pipe() for _ in range(world)]
        self.ranks = []
        for rank, (ours, theirs) in enumerate(pairs):
            call = partial(self._serve, rank, theirs, [one for pair in pairs for one in pair if one is not theirs])
            forked = local_ranks._fork(call, rank, world, Path(self.folder.name), None)
            forked.pipe.close()
            forked.pipe = ours
            self.ranks.append(forked)
        for _, theirs in pairs:
            theirs.close()

    def _serve(self, rank: int, orders: Connection, others: list[Connection]) -> None:
        """Runs in a rank what it is told until the parent has gone."""
        for other in others:
            other.close()
        while True:
            self.joined.folder, state, fn, args = pickle.loads(orders.recv_bytes())
            torch.set_rng_state(state)
            joined = self.joined if self.world > 1 else None
            local_ranks._report(orders, *local_ranks._outcome(partial(fn, rank, self.world, *args), rank, joined))
            if dist.is_initialized():
                dist.destroy_process_group()

    def run(self, order: tuple, timeout: float) -> list[Any]:
        """Has all ranks run it, and returns their values."""
        self.number += 1
        self.joined.folder = Path(self.folder.name) / str(self.number)
        self.joined.folder.mkdir()
        message = pickle.dumps((self.joined.folder, torch.get_rng_state(), *order))
        for rank in self.ranks:
            rank.done, rank.value, rank.error = False, None, None
            rank.pipe.send_bytes(message)
        local_ranks._collect(self.ranks, timeout)
        if any(not rank.done or rank.error for rank in self.ranks):
            raise RankFailure(local_ranks._failures(self.ranks, timeout))
        if self.world > 1 and (mismatch := self.joined.mismatch()):
            raise RankFailure(mismatch)
        return [rank.value for rank in self.ranks]

    def end(self) -> None:
        local_ranks._kill(self.ranks)
        self.joined.close()
        self.folder.cleanup()


_teams: dict[int, _Team] = {}


def run_on_standing_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Does what `run_ranks` does with a function of a module and arguments that can be pickled."""
    if alone or world > MOST_RANKS or local_ranks.transport is not Pipes:
        return run_ranks(fn, world, *args, timeout=timeout)
    team = _teams.get(world) or _teams.setdefault(world, _Team(world))
    try:
        return team.run((fn, args), timeout)
    except BaseException:
        _teams.pop(world).end()
        raise


def end_all() -> None:
    """Ends all ranks that stand."""
    while _teams:
        _teams.popitem()[1].end()

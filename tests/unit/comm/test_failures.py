"""Who waits longer than `parallel.timeout_s`, in a collective or for a message, names the rank that
hangs."""

import time
from collections import Counter
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron5d.comm import failures
from megatron5d.comm.collectives import all_reduce, start_shift
from megatron5d.comm.failures import CollectiveError, P2PError, silent_ranks
from megatron5d.comm.p2p import TensorMeta, open_channels
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

pytestmark = pytest.mark.usefixtures("over_gloo")

STARTS = {
    "all_reduce": lambda x, axis: all_reduce(x, axis),
    "shift": lambda x, axis: start_shift(x, axis).wait(),
}


@pytest.mark.parametrize("op", STARTS)
def test_the_rank_that_hangs_is_named(monkeypatch, op):
    monkeypatch.setattr(failures, "PATIENCE_S", 1.0)

    def fn(rank, world):
        axis = build_mesh(resolve(world, tp=2), rank, timeout_s=2.0)["tp"]
        STARTS[op](torch.zeros(3), axis)  # connects
        if rank > 1:
            return None
        if rank == 1:
            time.sleep(4)
            with suppress(CollectiveError, RuntimeError):  # too late: the others have left
                STARTS[op](torch.zeros(3), axis)
            return None
        with pytest.raises(CollectiveError) as found:
            STARTS[op](torch.zeros(3), axis)
        return str(found.value)

    message = run_ranks(fn, 4)[0]
    assert message.startswith(
        f"{op} over tp (ranks 0, 1) failed: rank 1 does not answer within 1 s: dead, or hanging"
    )


def test_who_waits_for_one_that_waits_names_the_rank_behind(monkeypatch):
    """Rank 1 hangs, rank 0 waits for it over tp, rank 2 for rank 0 over dp; rank 3 comes when all
    is over."""
    monkeypatch.setattr(failures, "PATIENCE_S", 1.0)

    def fn(rank, world):
        mesh = build_mesh(resolve(world, tp=2), rank, timeout_s=2.0)
        for name in ("tp", "dp"):
            all_reduce(torch.zeros(3), mesh[name])  # connects
        time.sleep(6 if rank in (1, 3) else 0)
        found = []
        for name in ("dp", "tp") if rank == 2 else ("tp", "dp"):
            try:
                all_reduce(torch.zeros(3), mesh[name])
            except (
                CollectiveError,
                RuntimeError,
            ) as error:  # the latter where the others have left
                found.append(str(error))
        return found[0] if found else ""

    told = run_ranks(fn, 4)
    assert told[0].startswith("all_reduce over tp (ranks 0, 1) failed: rank 1 does not answer")
    assert told[2].startswith("all_reduce over dp (ranks 0, 2) failed: rank 1 does not answer")


def test_a_message_that_does_not_come_names_the_rank_behind(monkeypatch):
    """Rank 1 hangs in its computation, rank 0 waits for it over tp, rank 2 for a message of rank
    0's."""
    monkeypatch.setattr(failures, "PATIENCE_S", 1.0)

    def fn(rank, world):
        mesh = build_mesh(resolve(world, tp=2, pp=2), rank, timeout_s=2.0)
        all_reduce(torch.zeros(3), mesh["tp"])  # connects
        inbox = open_channels([(0, 1)], mesh["pp"], timeout_s=2.0)[0]
        time.sleep(6 if rank in (1, 3) else 0)
        found = ""
        if rank == 2:
            inbox.post(TensorMeta((3,), torch.float32))
            with pytest.raises(P2PError) as lost_rank:
                inbox.take()
            found = str(lost_rank.value)
        with suppress(CollectiveError, RuntimeError):
            all_reduce(torch.zeros(3), mesh["tp"])
        return found

    told = run_ranks(fn, 4)
    assert told[2].startswith(
        "receiving from rank 0 failed: rank 1 does not answer within 1 s: dead, or hanging"
    )


def test_what_fails_at_once_names_its_axis():
    class Broken:
        def wait(self):
            raise RuntimeError("the backend's own words\nand more")

    with pytest.raises(
        CollectiveError,
        match=r"all_gather over tp \(ranks 0, 1\) failed: .* says: the backend's own words$",
    ):
        failures.wait_for_work(Broken(), "all_gather", Axis("tp", (0, 1), 0, None))


def test_one_rank_looks_for_all_of_a_long_line(monkeypatch):
    """Of 16,384 ranks that each asked for all others, no store would answer in time."""
    monkeypatch.setattr(failures, "PATIENCE_S", 0.2)
    world, asked, kept = 16384, Counter(), dist.HashStore()

    class Store:
        def __getattr__(self, name):
            asked[name] += 1
            return getattr(kept, name)

    monkeypatch.setattr(failures, "default_store", Store)
    for rank in range(world):
        if rank not in (5, 9000):
            kept.set(f"megatron5d/lost/answers/{rank}", "")
    for rank, questions in ((0, 20000), (7, 10)):
        asked.clear()
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        assert silent_ranks(tuple(range(world))) == [5, 9000]
        assert sum(asked.values()) < questions, (rank, asked)

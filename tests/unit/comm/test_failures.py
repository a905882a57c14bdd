"""A wait longer than `parallel.timeout_s`, in a collective or for a message, names the rank that
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


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(failures, "PATIENCE_S", 1.0)


def test_the_rank_that_hangs_in_a_ring_is_named(impatient):
    def on_rank(rank, world):
        axis = build_mesh(resolve(world, tp=2), rank, timeout_s=2.0)["tp"]
        start_shift(torch.zeros(3), axis).wait()  # connects
        if rank == 0:
            with pytest.raises(CollectiveError) as raised:
                start_shift(torch.zeros(3), axis).wait()
            return str(raised.value)
        if rank == 1:
            time.sleep(4)
            with suppress(CollectiveError, RuntimeError):  # too late: the others have left
                start_shift(torch.zeros(3), axis).wait()
        return None

    message = "shift over tp (ranks 0, 1) failed: rank 1 does not answer within 1 s: dead, or hang"
    assert run_ranks(on_rank, 4)[0].startswith(message)


def test_ranks_that_wait_for_a_waiting_rank_name_the_one_that_hangs(impatient):
    """Rank 1 hangs, rank 0 waits for it over tp, rank 2 for rank 0 over dp; rank 3 comes when all
    is over."""

    def on_rank(rank, world):
        mesh = build_mesh(resolve(world, tp=2), rank, timeout_s=2.0)
        for name in ("tp", "dp"):
            all_reduce(torch.zeros(3), mesh[name])  # connects
        time.sleep(6 if rank in (1, 3) else 0)
        messages = []
        for name in ("dp", "tp") if rank == 2 else ("tp", "dp"):
            try:
                all_reduce(torch.zeros(3), mesh[name])
            except (CollectiveError, RuntimeError) as error:  # RuntimeError: the others have left
                messages.append(str(error))
        return messages[0] if messages else ""

    messages = run_ranks(on_rank, 4)
    for rank, axis in ((0, "tp (ranks 0, 1)"), (2, "dp (ranks 0, 2)")):
        prefix = f"all_reduce over {axis} failed: rank 1 does not answer"
        assert messages[rank].startswith(prefix)


def test_a_missing_message_names_the_rank_that_hangs(impatient):
    """Rank 1 hangs in its computation, rank 0 waits for it over tp, rank 2 for a message of rank
    0."""

    def on_rank(rank, world):
        mesh = build_mesh(resolve(world, tp=2, pp=2), rank, timeout_s=2.0)
        all_reduce(torch.zeros(3), mesh["tp"])  # connects
        channel = open_channels([(0, 1)], mesh["pp"], timeout_s=2.0)[0]
        time.sleep(6 if rank in (1, 3) else 0)
        message = ""
        if rank == 2:
            channel.post(TensorMeta((3,), torch.float32))
            with pytest.raises(P2PError) as raised:
                channel.take()
            message = str(raised.value)
        with suppress(CollectiveError, RuntimeError):
            all_reduce(torch.zeros(3), mesh["tp"])
        return message

    message = "receiving from rank 0 failed: rank 1 does not answer within 1 s: dead, or hanging"
    assert run_ranks(on_rank, 4)[2].startswith(message)


def test_an_immediate_error_names_its_axis():
    class Work:
        def wait(self):
            raise RuntimeError("the backend's text\nand more")

    message = r"all_gather over tp \(ranks 0, 1\) failed: .* says: the backend's text$"
    with pytest.raises(CollectiveError, match=message):
        failures.wait_for_work(Work(), "all_gather", Axis("tp", (0, 1), 0, None))


def test_one_rank_checks_all_of_a_large_group(monkeypatch):
    """No store would answer in time if each of 16,384 ranks checked all others."""
    monkeypatch.setattr(failures, "PATIENCE_S", 0.2)
    world, requests, store = 16384, Counter(), dist.HashStore()

    class CountingStore:
        def __getattr__(self, name):
            requests[name] += 1
            return getattr(store, name)

    monkeypatch.setattr(failures, "default_store", CountingStore)
    for rank in range(world):
        if rank not in (5, 9000):
            store.set(f"megatron5d/lost/answers/{rank}", "")
    for rank, limit in ((0, 20000), (7, 10)):
        requests.clear()
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        assert silent_ranks(tuple(range(world))) == [5, 9000]
        assert requests.total() < limit, (rank, requests)

"""How ranks agree on a save: messages of any length, failures known on all ranks, few requests."""

import time
from collections import Counter

import pytest
import torch.distributed as dist
from ranks import run_ranks

from megatron5d.checkpoint import store_group
from megatron5d.checkpoint.save import Saver
from megatron5d.checkpoint.store_group import StoreGroup
from megatron5d.topology.rendezvous import default_store


def test_messages_reach_rank_0_and_its_answers_all(monkeypatch):
    monkeypatch.setattr(store_group, "_CHUNK_BYTES", 3)

    def fn(rank, world):
        group, heard, keys = StoreGroup(20.0), [], []
        for length in (0, 2, 3, 10, 10, 10):
            group.on_rank_0(lambda: None)
            group.send(bytes([rank]) * length)
            group.on_rank_0(
                lambda: (heard.append(group.receive_all()), keys.append(default_store().num_keys()))
            )
        with pytest.raises(OSError, match="no room"):
            group.on_rank_0(lambda: exec("raise OSError('no room')"))
        return heard, keys

    (heard, keys), nothing = run_ranks(fn, 2)
    assert heard == [
        [b"\0" * length, b"\1" * length] for length in (0, 2, 3, 10, 10, 10)
    ] and nothing == ([], [])
    assert keys[-1] == keys[-2] == keys[-3], "what all have read is forgotten"


def test_ranks_that_were_in_other_worlds_before_meet(tmp_path):
    def fn(rank, world):
        for _ in range(2 - rank):  # as in a world that the others were not in
            StoreGroup(2.0)
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), world)
        dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
        group, heard = StoreGroup(2.0), []
        group.send(b"%d" % rank)
        group.on_rank_0(lambda: heard.append(group.receive_all()))
        return heard

    assert run_ranks(fn, 3) == [[[b"0", b"1", b"2"]], [], []]


def test_who_sends_no_message_is_named_on_every_rank():
    def fn(rank, world):
        group = StoreGroup(1.0)
        if rank == 1:
            time.sleep(4)
            return None
        group.send(b"")
        with pytest.raises(OSError, match="^ranks 1 of 3 were not ready within 1 s$"):
            group.on_rank_0(group.receive_all)
        return True

    assert run_ranks(fn, 3) == [True, None, True]


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self.asked = Counter()
        self._store = store

    def __getattr__(self, name):
        def call(*args):
            self.asked[name] += 1
            return getattr(self._store, name)(*args)

        return call


def as_one_of(monkeypatch, rank, world):
    store = Counted(dist.HashStore())
    for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", world)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(store_group, "default_store", lambda: store)
    return store


def test_a_save_of_16384_ranks_asks_the_store_little(monkeypatch):
    world = 16384
    store = as_one_of(monkeypatch, 0, world)
    group = StoreGroup(1.0)
    for rank in range(1, world):
        store._store.set(group._message_key(rank), f"1 1 rank {rank}")
    store._store.add(f"{group._name}/count", world - 1)
    group.send(b"rank 0")
    heard = []
    group.on_rank_0(lambda: heard.extend(group.receive_all()))
    assert heard == [f"rank {rank}".encode() for rank in range(world)]
    assert sum(store.asked.values()) < 30, store.asked  # rank 0, for all
    store = as_one_of(monkeypatch, 77, world)
    group = StoreGroup(1.0)
    store._store.set(group._answer_key(1), "")
    group.send(b"rank 77")
    group.on_rank_0(lambda: None)
    assert sum(store.asked.values()) <= 4, store.asked  # any other


def test_rank_0_raises_what_went_wrong_once_all_have_read_it():
    """Where it keeps the store, the others would otherwise tell of a store that is gone."""

    def fn(rank, world):
        group = StoreGroup(20.0)
        time.sleep(0.5 * rank)
        asks_at = time.monotonic()
        with pytest.raises(OSError, match="no room"):
            group.on_rank_0(lambda: exec("raise OSError('no room')"))
        return asks_at, time.monotonic()

    times = run_ranks(fn, 3)
    assert times[0][1] >= times[2][0]


def test_a_store_that_is_gone_is_told_as_rank_0(tmp_path, monkeypatch):
    """Where this rank was writing while rank 0's process ended."""

    def ends(*_):
        raise dist.DistNetworkError("Broken pipe")

    def write(*_):
        monkeypatch.setattr(saver._group, "_set", ends)
        return b"written"

    saver = Saver(tmp_path, keep=1)
    monkeypatch.setattr("megatron5d.checkpoint.save.write_rank_file", write)
    with pytest.raises(
        OSError, match="could not be written: rank 0, .* does not answer: Broken pipe.*continues"
    ):
        saver.save(1, {}, {})


def test_a_rank_without_a_part_makes_no_file(tmp_path):
    Saver(tmp_path, keep=1).save(1, {}, {})
    assert sorted(path.name for path in (tmp_path / "step-00000001").iterdir()) == [
        *(".metadata", "files.json", "index.json", "run.json")
    ]

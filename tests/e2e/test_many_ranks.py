"""One process as one of 16,384 ranks: what it does alone must not grow with their number.

torch's fake backend makes a group of any size in one process, and moves nothing. The true functions
build the run and train a step in it; what they call, make and send is counted. Values mean nothing
here, and what really connects processes (NCCL, the network, the file system) is not there.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import write_corpus
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

from megatron5d.checkpoint.tensor_file import Save, write_rank_file
from megatron5d.comm.p2p import ReceiveChannel
from megatron5d.config.load import load_config
from megatron5d.planning.fit import target_here
from megatron5d.planning.memory.forecast import Forecaster
from megatron5d.topology import all_ranks
from megatron5d.topology.process import Process
from megatron5d.train.build import build_run
from megatron5d.train.data import train_loader
from megatron5d.train.pipeline_layout import pipeline_layout
from megatron5d.train.state import run_tensors

MANY = 16384
LAYOUT = [
    *(
        "model=tiny_moe",
        "model.num_layers=16",
        "model.num_heads=8",
        "model.num_kv_heads=4",
        "model.num_experts=64",
    ),
    *("model.vocab_size=512", "moe.balance=[bias]", "moe.bias_rate=0.001", "data.order=megatron"),
    *(
        "parallel.tp=8",
        "parallel.sp=true",
        "parallel.cp=4",
        "parallel.pp=16",
        "parallel.ep=64",
        "parallel.etp=1",
    ),
    *(
        "parallel.dp_replicate=2",
        "train.mbs=1",
        "train.seq_len=64",
        "train.steps=1",
        "log.progress=false",
    ),
]
COLLECTIVES = (
    *(
        "all_reduce",
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    ),
    *("broadcast", "all_gather_object", "gather_object", "scatter_object_list", "barrier"),
    *("new_group", "gather", "scatter", "all_gather"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=512, documents=400)


class Sent:
    """Counts what one rank asks of torch.distributed, by name and size of the group."""

    def __init__(self, world):
        self.world, self.calls = world, Counter()
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._counted(name, getattr(dist, name)))
        # of rank 0, which has nothing to say
        all_ranks.broadcast_bytes = self._counted(
            "broadcast_bytes", lambda message, source: message or b"[]"
        )

    def _counted(self, name, called):
        def call(*args, **kwargs):
            group = kwargs.get("group")
            size = (
                len(args[0])
                if name == "new_group"
                else self.world
                if group is None
                else group.size()
            )
            self.calls[name, size] += 1
            if name == "all_reduce" and size == self.world and args[0].dim():
                # the targets that other ranks count; of faults, a single number, they have none
                args[0].add_(1)
            return called(*args, **kwargs)

        return call

    def over_the_world(self):
        return sum(count for (_, size), count in self.calls.items() if size == self.world)


class Exchanged:
    """All others send what this rank sends, as far as it goes: counts and rows that fit."""

    def __init__(self, out, x, *_, **__):
        num = min(out.numel(), x.numel())
        out.zero_().view(-1)[:num] = x.reshape(-1)[:num]

    def wait(self):
        return True


def one_of(world, rank, config, folder: Path):
    """Builds a run and trains one step as `rank` of `world`.

    Returns:
        Python calls of each part; groups by size; collectives over the world at the start and in
        the step; bytes of its note about a checkpoint, and the names of the files that it wrote.
    """

    def on_it(*_):
        store, calls = dist.HashStore(), Counter()
        dist.init_process_group("fake", rank=rank, world_size=world, store=store)
        dist.all_to_all_single = Exchanged
        take, torch.Tensor.new_empty = ReceiveChannel.take, torch.Tensor.new_zeros
        ReceiveChannel.take = lambda inbox: take(inbox).zero_()  # what nobody sends is zero
        sent, doing = Sent(world), "start"

        def count(frame, event, _):
            calls[doing] += event == "call"

        sys.setprofile(count)
        run = build_run(
            config, Process(rank, world, 0, torch.device("cpu")), pipeline_layout(config, world)
        )
        loader = train_loader(config, run.mesh, 0, reads=run.reads_tokens)
        start = sent.over_the_world()
        if rank == 0:
            doing = "forecast"
            Forecaster(config, world, target_here(config), run.layout).ranks()
        doing = "step"
        run.trainer.guard.refuses = lambda *_: None  # what nobody reduces is not finite
        run.trainer.step(next(loader), 0.1, watched=True)
        sys.setprofile(None)
        groups = Counter(
            {size: times for (name, size), times in sent.calls.items() if name == "new_group"}
        )
        tensors = run_tensors(run.sync, run.optimizer, run.model.weights(), writing=True)
        note, files = (
            write_rank_file(folder, tensors, rank, Save("id", 1)),
            sorted(path.name for path in folder.iterdir()),
        )
        loader.close()
        assert store.num_keys() == 0
        return calls, groups, (start, sent.over_the_world() - start), (len(note), files)

    return run_ranks(on_it, 1)[0]


def test_one_of_many(tmp_path, corpus):
    found = {}
    for world, rank, zero in (
        (MANY // 8, 0, 1),
        (MANY, 0, 1),
        (MANY, 5461, 3),
        (MANY, MANY - 1, 1),
    ):
        arguments = [
            *LAYOUT,
            f"data.train=[{corpus}]",
            f"parallel.zero={zero}",
            f"train.gbs={world // 32}",
        ]
        folder = tmp_path / f"{world}-{rank}"
        folder.mkdir()
        found[world, rank] = one_of(world, rank, load_config(arguments, world=world), folder)
    for (world, rank), (_, groups, world_wide, (note_bytes, files)) in found.items():
        # a stage's ranks
        assert sum(groups.values()) <= 14 and max(groups) == world // 16, (world, rank, groups)
        told = "notes, padding, Megatron's order, faults of opened data; what a step adds up, what the routers did"
        assert world_wide[0] <= 4 and world_wide[1] <= 2, (told, world_wide)
        assert files == [f"__{rank}_0.distcp"] and note_bytes < 4096, (
            "two replicas write a half each"
        )
    few, many = (found[world, 0][0] for world in (MANY // 8, MANY))
    assert all(many[part] < 1.1 * few[part] for part in ("start", "forecast", "step")), (few, many)

"""A run's first weights: the same on any layout, and never more in memory than what a rank keeps of
them."""

import dataclasses

import pytest
import torch
from parity_configs import config_of
from ranks import run_ranks

from megatron5d.config.schema import PrecisionConfig
from megatron5d.model.gpt import GPT
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.trace import MemoryWatch
from megatron5d.topology import init_weights as rng
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.process import Process
from megatron5d.topology.shard_spec import spec_of, without_memory
from megatron5d.train.build import build_run, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout


def large(model="odd_vocab_tied", **parallel):
    """Eight layers: one of them is small beside the model."""
    config = config_of(model, gbs=4, **parallel)
    sizes = {"num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 256, "num_heads": 8}
    moe = {
        "num_experts": 4,
        "top_k": 1,
        "moe_ffn_hidden_size": 64,
        "router_bias": True,
        "first_k_dense": 6,
    }
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **sizes, **(moe if "ep" in parallel else {})),
        precision=PrecisionConfig(dtype="bf16"),
    )


LAYOUTS = [{"tp": 2, "sp": True, "zero": 3}, {"zero": 1}, {"zero": 3, "ep": 2, "dp_replicate": 2}]


def test_each_rank_fills_what_it_keeps(monkeypatch):
    monkeypatch.setattr(rng, "_CHUNK", 1024)  # of scratch, at 8 bytes an element

    def on_rank(rank, world):
        found = []
        for parallel in LAYOUTS:
            config = large(**parallel)
            with MemoryWatch() as watch:
                run = build_run(
                    config,
                    Process(rank, world, rank, torch.device("cpu")),
                    pipeline_layout(config, world),
                )
                live, peak, largest = watch.live_bytes, watch.peak_bytes, watch.largest
            plain = GPT(config, run.mesh, "cpu")
            plain.initialize(config.train.seed)
            with run.sync.weights.gathered():
                pairs = [
                    (spec_of(a).name, torch.equal(a, b))
                    for a, b in zip(run.model.weights(), plain.weights())
                ]
            wrong = [name for name, same in pairs if not same]
            masters = [
                torch.equal(each.master.bfloat16(), each.bucket.weight_slice)
                for each in run.optimizer.slices
            ]
            unit = max(bucket.numel for bucket in run.sync.buckets)
            whole = sum(bucket.numel for bucket in run.sync.buckets)
            found.append((len(pairs), wrong, all(masters), peak - live, unit, whole, largest))
        return found

    for rank in run_ranks(on_rank, 4):
        for parallel, (count, wrong, masters, excess, unit, whole, largest) in zip(
            LAYOUTS, rank, strict=True
        ):
            assert count and not wrong and masters, (parallel, wrong)
            scratch = 64 * 1024  # of random numbers
            bound = 4 * unit + scratch  # the main gradient of a unit, before it is given back
            if parallel["zero"] == 1:
                # the slices on their way to the others, as after every step
                bound = 2 * whole // 4 + scratch
            assert excess <= bound < whole, (parallel, excess, bound)
            assert largest[0] <= unit, (parallel, largest)


def test_the_setup_of_many_ranks_is_predicted_without_a_whole_model():
    """A rank of 64 holds a layer at a time, which is more than what stays of all eight."""
    config = large(zero=3)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, gbs=64))
    memory = Forecaster(config, 64, Target("sm_90")).rank(0)
    whole = Forecaster(large(zero=0), 1, Target("sm_90")).rank(0).weights
    assert memory.weights < memory.setup < whole / 2


def test_parameters_without_memory_are_not_written_unnoticed():
    config = large()
    with without_memory():
        model = GPT(config, build_mesh(sizes_of(config, 1), num_kv_heads=2))
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) < 1024
    with pytest.raises(RuntimeError, match="more than one element"):
        model.initialize(1)

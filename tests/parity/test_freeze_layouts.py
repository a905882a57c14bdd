"""Frozen parameters, rates by parameter and forced routing on N ranks equal one process."""

import dataclasses

import pytest
import torch
from layouts import assert_parity
from ranks import run_ranks
from runs import records, train_on_ranks, whole_tensors, write_corpus

from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from megatron5d.model.gpt import GPT
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout

FROZEN = ["embedding.*", "layers.0.*", "*.router.*", "*.experts.down.weight", "*.attention.norm.*"]


def config_of(
    freeze=FROZEN,
    *,
    schedule="1f1b",
    name="adamw",
    moe=None,
    recompute="none",
    dtype="fp64",
    **more,
):
    model = {key: more.pop(key) for key in ("tie_embeddings", "num_mtp_layers") if key in more}
    experts = {
        "num_experts": 4,
        "top_k": 2,
        "moe_ffn_hidden_size": 12,
        "shared_ffn_hidden_size": 12,
    }
    return Config(
        model=ModelConfig(
            num_layers=2,
            hidden_size=16,
            ffn_hidden_size=24,
            head_dim=8,
            num_heads=2,
            num_kv_heads=2,
            vocab_size=61,
            **experts,
            **model,
        ),
        parallel=ParallelConfig(**more),
        pipeline=PipelineConfig(schedule=schedule),
        train=TrainConfig(steps=10, gbs=8, mbs=1, seq_len=8),
        optim=OptimConfig(name=name, lr=1e-2, clip=0.5, freeze=freeze),
        moe=moe or MoeConfig(balance=["aux"], aux_coef=0.1),
        precision=PrecisionConfig(dtype=dtype),
        recompute=RecomputeConfig(recompute),
    )


CASES = {
    "one rank": (1, {}),
    "zero 0": (2, {}),
    "zero 1, tp, sp": (4, {"zero": 1, "tp": 2, "sp": True, "etp": 1, "ep": 2}),
    "zero 2, cp": (4, {"zero": 2, "cp": 2, "ep": 4}),
    "zero 3, recomputed, muon": (
        4,
        {"zero": 3, "dp_replicate": 2, "recompute": "full", "name": "muon"},
    ),
    "first stage frozen, zb_h1": (4, {"pp": 2, "schedule": "zb_h1", "zero": 3}),
    "dualpipe, zero 1": (4, {"pp": 2, "schedule": "dualpipe", "zero": 1}),
    "tied, mtp, all five": (
        8,
        {
            "tp": 2,
            "sp": True,
            "cp": 2,
            "pp": 2,
            "ep": 4,
            "etp": 1,
            "tie_embeddings": True,
            "num_mtp_layers": 1,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_frozen(case):
    world, options = CASES[case]
    assert_parity(config_of(**options), world)


@pytest.mark.parametrize(
    "world, layout",
    [
        (1, {}),
        (8, {"tp": 2, "sp": True, "cp": 2, "ep": 4, "etp": 1, "pp": 2}),
        (4, {"tp": 2, "ep": 2}),
    ],
)
def test_forced_balance(world, layout):
    """Each expert gets the same number of tokens, whatever the scores are; their weights are the
    scores still."""
    moe = MoeConfig(
        balance=["aux", "bias"], aux_coef=0.1, bias_rate=0.05, z_coef=0.02, force_balanced=True
    )
    assert_parity(config_of([], moe=moe, **layout), world)


SCALES = {
    "lr_scale": ["0.1 *.router.*", "3 layers.0.*"],
    "decay_scale": ["2 *.qkv.*", "0 *.experts.*"],
}


@pytest.mark.parametrize(
    "how", [{"name": "adamw"}, {"name": "muon"}, {"implementation": "kernel"}], ids=str
)
def test_rates_and_decay_by_parameter(how):
    config = config_of([], zero=3, pp=2, ep=2)
    assert_parity(
        dataclasses.replace(config, optim=dataclasses.replace(config.optim, **SCALES, **how)), 4
    )


def test_rates_by_parameter_of_weights_without_masters(tmp_path):
    config = run_config(tmp_path, write_corpus(tmp_path / "corpus", vocab_size=61), [], zero=1)
    precision = dataclasses.replace(config.precision, master_weights=False)
    optim = dataclasses.replace(config.optim, lr_scale=["0 embedding.*"])
    config = dataclasses.replace(config, precision=precision, optim=optim)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every=1))
    assert train_on_ranks(config, 2) == [0, 0]
    early, late = (
        whole_tensors(tmp_path / "checkpoints" / f"step-0000000{step}") for step in (1, 2)
    )
    same = {key for key in early if key.startswith("model.") and torch.equal(early[key], late[key])}
    assert "model.embedding.weight" in same and "model.head.weight" not in same


def what_is_held(rank, world, config):
    """(name, elements of its bucket's gradients, whether it has optimiser state) of every parameter
    here."""
    mesh = build_mesh(sizes_of(config, world), rank, num_kv_heads=2)
    model = GPT(config, mesh)
    model.initialize(1)
    sync, optimizer, _ = build_trainer(config, mesh, model, pipeline_layout(config, world))
    stateful = {segment.spec.name for state in optimizer.slices for segment in state.segments}
    return [
        (
            spec_of(parameter).name,
            bucket.resident_grads.numel(),
            spec_of(parameter).name in stateful,
        )
        for bucket in sync.buckets
        for parameter in bucket.parameters
    ]


@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_parameters_have_neither_gradient_nor_state(zero):
    held = run_ranks(what_is_held, 2, config_of(["embedding.*", "*.experts.*"], zero=zero))
    for name, gradients, _ in (each for rank in held for each in rank):
        assert (gradients == 0) == (name.startswith("embedding") or ".experts." in name), name
    stateful = {name for rank in held for name, _, state in rank if state}
    assert not any(name.startswith("embedding") or ".experts." in name for name in stateful)


def run_config(folder, corpus, freeze, **parallel):
    config = config_of(freeze, dtype="bf16", **parallel)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=4, stop_after=2),
        data=DataConfig(train=[corpus]),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints"), keep="0"),
        log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False, memory_check="off"),
    )


def test_frozen_weights_stay_through_a_checkpoint_and_another_layout(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", vocab_size=61)
    config = run_config(tmp_path, corpus, FROZEN, zero=1)
    assert train_on_ranks(config, 2) == [0, 0]
    other = run_config(tmp_path, corpus, FROZEN, zero=3, pp=2)
    other = dataclasses.replace(other, train=dataclasses.replace(other.train, stop_after=0))
    assert train_on_ranks(other, 4) == [0] * 4
    early, late = (
        whole_tensors(tmp_path / "checkpoints" / f"step-0000000{step}") for step in (2, 4)
    )
    assert not any(key.startswith("optim.") and "embedding" in key for key in late)
    moved = {
        key for key in early if key.startswith("model.") and not torch.equal(early[key], late[key])
    }
    assert "model.embedding.weight" not in moved and not any(
        key.startswith("model.layers.0.") for key in moved
    )
    assert "model.layers.1.attention.qkv.weight" in moved
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == [1, 2, 3, 4]

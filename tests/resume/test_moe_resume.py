"""A mixture of experts continues from where it stopped: bit for bit on its layout, and on any other
ep, etp and tp."""

import dataclasses
import json
import shutil

import pytest
import torch
from runs import curve, train_on_ranks, whole_tensors, write_corpus

from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)

STEPS, STOP = 4, 2
SAVED_ON = {"tp": 2, "sp": True, "ep": 2, "etp": 2, "zero": 1}  # of 4 ranks
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    head_dim=8,
    vocab_size=97,
    num_experts=8,
    top_k=2,
    moe_ffn_hidden_size=16,
    first_k_dense=1,
    shared_ffn_hidden_size=16,
    router_score="sigmoid",
    router_bias=True,
    num_mtp_layers=1,
)
MOE = MoeConfig(
    balance=["bias", "seq_aux"], aux_coef=0.01, z_coef=0.001, bias_rate=0.01, log_every=2
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)


def run(
    folder, corpus, world=4, *, parallel=None, stop_after=0, dtype="fp32", model=MODEL, moe=MOE
):
    folder.mkdir(exist_ok=True)
    config = Config(
        model=model,
        moe=moe,
        parallel=ParallelConfig(**(SAVED_ON if parallel is None else parallel)),
        train=TrainConfig(steps=STEPS, gbs=8, mbs=2, seq_len=16, stop_after=stop_after),
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
        precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(train=[corpus]),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints"), keep="0"),
        log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False, memory_check="off"),
    )
    assert train_on_ranks(config, world) == [0] * world
    return folder


def last(folder, step=STEPS):
    return folder / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory, corpus):
    return run(tmp_path_factory.mktemp("straight"), corpus)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, corpus):
    return run(tmp_path_factory.mktemp("stopped"), corpus, stop_after=STOP)


def test_names_and_shapes_are_the_models_own(straight):
    tensors = whole_tensors(last(straight))
    shapes = {
        name: tuple(tensors[f"model.layers.1.{name}"].shape)
        for name in (
            "router.weight",
            "router.bias",
            "experts.up.weight",
            "experts.down.weight",
            "shared_expert.up.weight",
        )
    }
    assert shapes == {
        "router.weight": (8, 32),
        "router.bias": (8,),
        "experts.up.weight": (8, 32, 32),
        "experts.down.weight": (8, 32, 16),
        "shared_expert.up.weight": (32, 32),
    }
    assert (
        tensors["model.layers.2.mtp.join.weight"].shape == (32, 64)
        and "model.layers.2.router.bias" in tensors
    )
    assert (
        "model.layers.0.mlp.up.weight" in tensors and "model.layers.0.router.weight" not in tensors
    )
    bias = tensors["model.layers.1.router.bias"]
    assert bias.abs().max() > 0 and torch.allclose(bias / 0.01, (bias / 0.01).round(), atol=1e-4)
    assert "optim.exp_avg.layers.1.router.bias" not in tensors


def test_the_same_layout_goes_on_bit_for_bit(tmp_path, corpus, straight, stopped):
    broken = shutil.copytree(stopped, tmp_path / "broken")
    run(broken, corpus)
    assert curve(broken / "log.jsonl") == curve(straight / "log.jsonl")
    left, right = whole_tensors(last(broken)), whole_tensors(last(straight))
    assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


OTHERS = {
    "one process": (1, {}),
    "ep4 in nodes of 2": (4, {"ep": 4, "ep_inner": 2, "zero": 1}),
    "etp4": (4, {"tp": 1, "etp": 4}),
    "ep8 over tp": (8, {"tp": 2, "sp": True, "ep": 8, "etp": 1}),
    "two stages": (4, {"pp": 2, "ep": 2}),
}


@pytest.mark.parametrize("layout", OTHERS)
def test_another_layout_continues_the_curve(tmp_path, corpus, straight, stopped, layout):
    world, parallel = OTHERS[layout]
    moved = shutil.copytree(stopped, tmp_path / "moved")
    run(moved, corpus, world, parallel=parallel)
    for mine, reference in zip(
        curve(moved / "log.jsonl"), curve(straight / "log.jsonl"), strict=True
    ):
        assert mine == pytest.approx(reference, rel=2e-5)
    got, wanted = whole_tensors(last(moved)), whole_tensors(last(straight))
    assert got.keys() == wanted.keys()
    assert torch.equal(got["model.layers.1.router.bias"], wanted["model.layers.1.router.bias"])
    for key, values in wanted.items():
        torch.testing.assert_close(got[key], values, rtol=1e-3, atol=1e-5)


def test_a_bf16_run_keeps_its_biases_in_fp32(tmp_path, corpus):
    folder = run(tmp_path / "bf16", corpus, dtype="bf16")
    tensors = whole_tensors(last(folder))
    assert tensors["model.layers.1.router.bias"].dtype == torch.float32
    assert tensors["model.layers.1.experts.up.weight"].dtype == torch.bfloat16


def test_the_log_tells_what_the_routers_did(straight):
    records = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    assert all({"seq_aux_loss", "router_z_loss", "mtp_loss"} <= record.keys() for record in records)
    assert all(1.8 < record["seq_aux_loss"] < 16 for record in records)
    watched = [record["step"] for record in records if "moe/layer_1/load" in record]
    assert watched == [1, 2, 4], "at the first step, then every moe.log_every"
    figures = ("load", "entropy", "dropped", "dead_experts", "bias_range", "logit_norm")
    assert {f"moe/layer_{layer}/{name}" for name in figures for layer in (1, 2)} <= records[
        0
    ].keys()
    assert not any(key.startswith("moe/layer_0/") for key in records[0])
    assert records[0]["comm_ep_bytes"] > 0


def test_biases_that_balancing_has_moved_are_not_left_behind(tmp_path, corpus):
    """Without them every token would choose other experts, and nothing would say so."""
    model = dataclasses.replace(MODEL, router_bias=False, num_mtp_layers=0)
    run(tmp_path, corpus, 1, parallel={}, stop_after=1, model=model)
    with pytest.raises(
        AssertionError,
        match=r"another model: moe.balance = \['aux'\], saved with \['bias', 'seq_aux'\]",
    ):
        run(
            tmp_path,
            corpus,
            1,
            parallel={},
            model=model,
            moe=MoeConfig(balance=["aux"], aux_coef=0.01),
        )

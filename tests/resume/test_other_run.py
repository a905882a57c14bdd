"""init.from_checkpoint: the weights of another run, as exact as it has them, and what of them this run cannot use."""

import dataclasses
import re

import pytest
import torch
from ranks import RankFailure, run_ranks
from runs import train_on_ranks, whole_tensors, write_corpus

from megatron5d.checkpoint.folder import read_run
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.save import Saver
from megatron5d.config.load import load_config
from megatron5d.topology.process import Process
from megatron5d.train.build import build_run

SMALL = [
    *("model=tiny", "model.vocab_size=97", "model.hidden_size=32", "train.gbs=4", "train.mbs=1", "train.seq_len=16"),
    *("train.steps=1", "optim.lr=1e-2", "optim.warmup_steps=0", "log.progress=false", "log.memory_check=off"),
]
EXPERTS = [
    *("model.num_experts=4", "model.top_k=2", "model.moe_ffn_hidden_size=16", "model.router_score=sigmoid"),
]


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)

    def of(folder, world, *overrides, init=None):
        config = load_config([*SMALL, f"data.train=[{corpus}]", f"checkpoint.dir={folder}", *overrides], world=world)
        return dataclasses.replace(config, init=dataclasses.replace(config.init, from_checkpoint=init))

    return of


def begun(config, world):
    """Each rank's notes, and by kind the values of its first weights: (name, values of the slice it owns)."""

    def fn(rank, world):
        run = build_run(config, Process(rank, world, rank, torch.device("cpu")))
        slices = [("model", state.bucket.weight_slice, state) for state in run.optimizer.slices]
        held = [
            (kind, segment.spec.name, flat[slice(*segment.owned)].clone())
            for kind, flat, state in [*slices, *run.optimizer.tensors()]
            for segment in state.segments
        ]
        biases = {
            each.spec.name: each.clone() for each in run.model.weights() if each.spec.name.endswith("router.bias")
        }
        return run.notes, held, biases, run.progress.step

    return run_ranks(fn, world)


@pytest.mark.parametrize("overrides", [[], ["optim.offload=true", "parallel.zero=3"]])
def test_masters_are_taken_where_there_are_any(tmp_path, config_of, overrides):
    """Weights in bf16 are their masters rounded: whoever begins with those has lost 16 bits of each."""
    saved_in = tmp_path / "bf16"
    assert train_on_ranks(config_of(saved_in, 2, "precision.dtype=bf16", "parallel.tp=2"), 2) == [0, 0]
    saved = whole_tensors(saved_in / "step-00000001")
    config = config_of(tmp_path / "next", 2, "precision.dtype=bf16", "parallel.zero=1", *overrides, init=str(saved_in))
    for notes, held, _, step in begun(config, 2):
        assert step == 0 and {kind for kind, _, _ in held} >= {"model", "master", "exp_avg"}
        for kind, name, values in held:
            if kind in ("model", "master"):
                whole = saved[f"optim.master.{name}"].to(values.dtype).flatten()
                assert torch.isin(values, torch.cat([whole, torch.zeros(1, dtype=values.dtype)])).all(), (kind, name)
            else:
                assert not values.any(), (kind, name)
        assert any(f"the weights of {saved_in}/step-00000001: its masters in float32" in note for note in notes), notes


def test_where_there_are_no_masters_the_log_says_so(tmp_path, config_of):
    one = ["precision.dtype=bf16", "precision.master_weights=false"]
    assert train_on_ranks(config_of(tmp_path / "rounded", 1, *one), 1) == [0]
    config = config_of(tmp_path / "next", 1, "precision.dtype=bf16", init=str(tmp_path / "rounded"))
    [(notes, held, _, _)] = begun(config, 1)
    assert any("step-00000001: its weights in bfloat16" in note for note in notes), notes
    weights = {name: values for kind, name, values in held if kind == "model"}
    for name, values in ((name, values) for kind, name, values in held if kind == "master"):
        assert torch.equal(values, weights[name].float())


def test_biases_of_balancing_that_are_left_behind_or_begin_at_zero_are_told(tmp_path, config_of):
    with_bias, without = [*EXPERTS, "moe.balance=[bias]", "moe.bias_rate=0.01"], [*EXPERTS, "moe.balance=[aux]"]
    assert train_on_ranks(config_of(tmp_path / "bias", 1, *with_bias), 1) == [0]
    assert train_on_ranks(config_of(tmp_path / "aux", 1, *without), 1) == [0]
    [(notes, *_)] = begun(config_of(tmp_path / "next", 1, *without, init=str(tmp_path / "bias")), 1)
    assert any("moe.balance = ['aux'], saved with ['bias'] in " in note for note in notes), notes
    [(notes, _, biases, _)] = begun(config_of(tmp_path / "next", 1, *with_bias, init=str(tmp_path / "aux")), 1)
    assert any("moe.balance = ['bias'], saved with ['aux'] in " in note for note in notes), notes
    assert biases and not any(bias.any() for bias in biases.values())
    [(notes, _, biases, _)] = begun(config_of(tmp_path / "next", 1, *with_bias, init=str(tmp_path / "bias")), 1)
    assert not any("moe.balance" in note for note in notes), notes
    saved = whole_tensors(tmp_path / "bias" / "step-00000001")
    assert biases and all(torch.equal(bias, saved[f"model.{name}"]) and bias.any() for name, bias in biases.items())


def test_a_weight_that_is_not_finite_is_named_whatever_way_it_comes(tmp_path, config_of):
    """Else step 1 would tell the user to lower optim.lr."""
    assert train_on_ranks(config_of(tmp_path / "sound", 1), 1) == [0]
    saved = whole_tensors(tmp_path / "sound" / "step-00000001")
    saved["model.layers.1.mlp.down.weight"][7, 3] = float("nan")
    record = read_run(tmp_path / "sound" / "step-00000001")
    tensors = {key: ShardedTensor(x.shape, [((0,) * x.dim(), x)], x.dtype) for key, x in saved.items()}
    Saver(tmp_path / "bad", keep=0).save(1, tensors, record)
    expected = "step-00000001: model.layers.1.mlp.down.weight holds nan in row 7"
    for config in (
        config_of(tmp_path / "bad", 2, "parallel.tp=2", "train.steps=2"),
        config_of(tmp_path / "next", 2, "parallel.zero=3", init=str(tmp_path / "bad")),
    ):
        with pytest.raises(RankFailure, match=expected):
            begun(config, 2)


def test_another_muon_exclude_is_told_by_its_key(tmp_path, config_of):
    muon, other = ["optim.name=muon"], 'optim.muon_exclude=["*embedding.*","head.*","*.mlp.*"]'
    assert train_on_ranks(config_of(tmp_path / "run", 1, *muon), 1) == [0]
    default = config_of(tmp_path / "run", 1, *muon).optim.muon_exclude
    with pytest.raises(RankFailure) as told:
        begun(config_of(tmp_path / "run", 2, *muon, other, "train.steps=2"), 2)
    message, folder = str(told.value), tmp_path / "run" / "step-00000001"
    assert f"init.from_checkpoint={folder}" in message and "saved with" in message
    pasted = re.search(r"resume with '(optim\.muon_exclude=.*?)'", message)[1]
    config = config_of(tmp_path / "run", 1, *muon, pasted, "train.steps=2")
    assert config.optim.muon_exclude == default
    assert begun(config, 1)[0][3] == 1

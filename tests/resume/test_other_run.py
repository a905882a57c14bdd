"""init.from_checkpoint: the weights of another run, as exact as it has them, and what of them this
run cannot use."""

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
from megatron5d.topology.shard_spec import spec_of
from megatron5d.train.build import build_run
from megatron5d.train.pipeline_layout import pipeline_layout
from pretrain import plan_and_train

SMALL = [
    *(
        "model=tiny",
        "model.vocab_size=97",
        "model.hidden_size=32",
        "train.gbs=4",
        "train.mbs=1",
        "train.seq_len=16",
    ),
    *(
        "train.steps=1",
        "optim.lr=1e-2",
        "optim.warmup_steps=0",
        "log.progress=false",
        "log.memory_check=off",
    ),
]
EXPERTS = [
    *(
        "model.num_experts=4",
        "model.top_k=2",
        "model.moe_ffn_hidden_size=16",
        "model.router_score=sigmoid",
    ),
]


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)

    def of(folder, world, *overrides, init=None):
        config = load_config(
            [*SMALL, f"data.train=[{corpus}]", f"checkpoint.dir={folder}", *overrides], world=world
        )
        return dataclasses.replace(
            config, init=dataclasses.replace(config.init, from_checkpoint=init)
        )

    return of


def begun(config, world):
    """Each rank's notes, and by kind the values of its first weights: (name, values of the slice it
    owns)."""

    def fn(rank, world):
        run = build_run(
            config, Process(rank, world, rank, torch.device("cpu")), pipeline_layout(config, world)
        )
        slices = [("model", state.bucket.weight_slice, state) for state in run.optimizer.slices]
        held = [
            (kind, segment.spec.name, flat[slice(*segment.owned)].clone())
            for kind, flat, state in [*slices, *run.optimizer.tensors()]
            for segment in state.segments
        ]
        biases = {
            spec_of(each).name: each.clone()
            for each in run.model.weights()
            if spec_of(each).name.endswith("router.bias")
        }
        return run.notes, held, biases, run.progress.step

    return run_ranks(fn, world)


@pytest.mark.parametrize("overrides", [[], ["optim.offload=true", "parallel.zero=3"]])
def test_masters_are_taken_where_there_are_any(tmp_path, config_of, overrides):
    """Weights in bf16 are their masters rounded: whoever begins with those has lost 16 bits of
    each."""
    saved_in = tmp_path / "bf16"
    assert train_on_ranks(config_of(saved_in, 2, "precision.dtype=bf16", "parallel.tp=2"), 2) == [
        0,
        0,
    ]
    saved = whole_tensors(saved_in / "step-00000001")
    config = config_of(
        tmp_path / "next",
        2,
        "precision.dtype=bf16",
        "parallel.zero=1",
        *overrides,
        init=str(saved_in),
    )
    for notes, held, _, step in begun(config, 2):
        assert step == 0 and {kind for kind, _, _ in held} >= {"model", "master", "exp_avg"}
        for kind, name, values in held:
            if kind in ("model", "master"):
                whole = saved[f"optim.master.{name}"].to(values.dtype).flatten()
                assert torch.isin(
                    values, torch.cat([whole, torch.zeros(1, dtype=values.dtype)])
                ).all(), (kind, name)
            else:
                assert not values.any(), (kind, name)
        assert any(
            f"the weights of {saved_in}/step-00000001: its masters in float32" in note
            for note in notes
        ), notes


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
    with_bias, without = (
        [*EXPERTS, "moe.balance=[bias]", "moe.bias_rate=0.01"],
        [*EXPERTS, "moe.balance=[aux]"],
    )
    assert train_on_ranks(config_of(tmp_path / "bias", 1, *with_bias), 1) == [0]
    assert train_on_ranks(config_of(tmp_path / "aux", 1, *without), 1) == [0]
    [(notes, *_)] = begun(config_of(tmp_path / "next", 1, *without, init=str(tmp_path / "bias")), 1)
    assert any("moe.balance = ['aux'], saved with ['bias'] in " in note for note in notes), notes
    [(notes, _, biases, _)] = begun(
        config_of(tmp_path / "next", 1, *with_bias, init=str(tmp_path / "aux")), 1
    )
    assert any("moe.balance = ['bias'], saved with ['aux'] in " in note for note in notes), notes
    assert biases and not any(bias.any() for bias in biases.values())
    [(notes, _, biases, _)] = begun(
        config_of(tmp_path / "next", 1, *with_bias, init=str(tmp_path / "bias")), 1
    )
    assert not any("moe.balance" in note for note in notes), notes
    saved = whole_tensors(tmp_path / "bias" / "step-00000001")
    assert biases and all(
        torch.equal(bias, saved[f"model.{name}"]) and bias.any() for name, bias in biases.items()
    )


GROWN = [
    "model.vocab_size=131",
    "model.tie_embeddings=false",
    "model.num_mtp_layers=1",
    "optim.lr=1e-300",
    "optim.min_lr=0",
]
LAYOUTS = {
    "one": (1, []),
    "tensors and stages": (4, ["parallel.tp=2", "parallel.sp=true", "parallel.pp=2"]),
    "slices": (4, ["parallel.zero=3", "optim.offload=true"]),
}


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_a_larger_vocabulary_a_head_and_prediction_layers_are_added(tmp_path, config_of, dtype):
    """New rows are the mean of the old, the head is the embedding, the layers those of a new run;
    on any layout."""
    old, precision = tmp_path / "old", f"precision.dtype={dtype}"
    assert train_on_ranks(
        config_of(old, 2, precision, "model.tie_embeddings=true", "parallel.tp=2"), 2
    ) == [0, 0]
    kind = "model" if dtype == "fp64" else "optim.master"
    saved, found = whole_tensors(old / "step-00000001"), {}
    fresh = config_of(tmp_path / "fresh", 1, precision, *GROWN)
    assert train_on_ranks(fresh, 1) == [0]
    drawn = whole_tensors(tmp_path / "fresh" / "step-00000001")
    for name, (world, overrides) in LAYOUTS.items():
        config = config_of(tmp_path / name, world, precision, *GROWN, *overrides, init=str(old))
        notes = begun(config, world)[0][0]
        assert any(
            "rows 97 to 130 of the vocabulary start as the mean" in note for note in notes
        ), notes
        assert (
            sum(
                "starts as the embedding" in note or "layers 2 start as in a new" in note
                for note in notes
            )
            == 2
        )
        assert train_on_ranks(config, world) == [0] * world
        found[name] = whole_tensors(tmp_path / name / "step-00000001")
    for tensors in found.values():
        table = saved[f"{kind}.embedding.weight"]
        assert torch.equal(tensors[f"{kind}.embedding.weight"][:97], table)
        mean = table.double().mean(0).expand(34, -1).to(table.dtype)
        torch.testing.assert_close(tensors[f"{kind}.embedding.weight"][97:], mean)
        for key in (key for key in tensors if key.startswith(("model.", "optim.master."))):
            weight = key.replace("optim.master.", "model.")
            if key.endswith("head.weight"):
                assert torch.equal(tensors[key], tensors[key.replace("head", "embedding")]), key
            elif ".layers.2." in key:
                assert torch.equal(tensors[key].to(drawn[weight].dtype), drawn[weight]), key
            elif "embedding" not in key:
                assert torch.equal(tensors[key], saved[key]), key
            assert torch.equal(tensors[key], found["one"][key]), key


def test_a_smaller_vocabulary_is_refused(tmp_path, config_of):
    old = tmp_path / "old"
    assert train_on_ranks(config_of(old, 1), 1) == [0]
    with pytest.raises(
        ValueError, match=r"embedding.weight: saved \(97, 32\), this model has \(96, 32\)"
    ):
        plan_and_train(
            config_of(tmp_path / "next", 1, "model.vocab_size=96", init=str(old)),
            Process(0, 1, 0, torch.device("cpu")),
        )


def test_a_weight_that_is_not_finite_is_named_whatever_way_it_comes(tmp_path, config_of):
    """Else step 1 would tell the user to lower optim.lr."""
    assert train_on_ranks(config_of(tmp_path / "sound", 1), 1) == [0]
    saved = whole_tensors(tmp_path / "sound" / "step-00000001")
    saved["model.layers.1.mlp.down.weight"][7, 3] = float("nan")
    record = read_run(tmp_path / "sound" / "step-00000001")
    tensors = {
        key: ShardedTensor(x.shape, [((0,) * x.dim(), x)], x.dtype) for key, x in saved.items()
    }
    Saver(tmp_path / "bad", keep=0).save(1, tensors, record)
    expected = "step-00000001: model.layers.1.mlp.down.weight holds nan in row 7"
    for config in (
        config_of(tmp_path / "bad", 2, "parallel.tp=2", "train.steps=2"),
        config_of(tmp_path / "next", 2, "parallel.zero=3", init=str(tmp_path / "bad")),
    ):
        with pytest.raises(RankFailure, match=expected):
            begun(config, 2)


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (["optim.name=muon"], 'optim.muon_exclude=["*embedding.*","head.*","*.mlp.*"]'),
        (['optim.freeze=["*.mlp.*"]'], "optim.freeze=[]"),
        (['optim.freeze=["*.mlp.*"]'], 'optim.freeze=["head.*"]'),
    ],
)
def test_another_list_of_what_has_moments_is_told_by_its_key(tmp_path, config_of, saved, other):
    assert train_on_ranks(config_of(tmp_path / "run", 1, *saved), 1) == [0]
    before = config_of(tmp_path / "run", 1, *saved).optim
    with pytest.raises(RankFailure) as told:
        begun(config_of(tmp_path / "run", 2, *saved, other, "train.steps=2"), 2)
    message, folder = str(told.value), tmp_path / "run" / "step-00000001"
    assert f"init.from_checkpoint={folder}" in message and "saved with" in message
    pasted = re.search(r"resume with '(optim\..*?)', or", message)[1]
    config = config_of(tmp_path / "run", 1, *saved, pasted, "train.steps=2")
    assert (config.optim.muon_exclude, config.optim.freeze) == (before.muon_exclude, before.freeze)
    assert begun(config, 1)[0][3] == 1

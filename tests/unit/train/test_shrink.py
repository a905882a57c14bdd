"""Small configurations for the parity check: valid, tiny, with every feature; and what can be
turned off of them."""

import dataclasses
from pathlib import Path

import pytest

from megatron5d.config.convert import value_of
from megatron5d.config.load import CONF, load_config
from megatron5d.model.flops import parameter_count
from megatron5d.parity.inputs import make_rows
from megatron5d.parity.variants import ablations, changed_keys, exact, faults_of, features, shrink
from megatron5d.train.build import sizes_of

# 25 heads
MODELS = sorted(path.stem for path in Path(CONF / "model").glob("*.yaml") if path.stem != "gpt2_xl")
LAYOUT = [
    "parallel.tp=2",
    "parallel.sp=true",
    "parallel.cp=2",
    "parallel.pp=2",
    "train.gbs=64",
    "train.seq_len=512",
]
UNTOUCHED = ("parallel", "recompute", "moe")  # groups that have no sizes in these cases


def small(world, *overrides, steps=3):
    config = exact(load_config(overrides), steps)
    assert not faults_of(config, world)
    return config, shrink(config, world)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_keeps_what_it_is(model):
    config, found = small(16, f"model={model}", *LAYOUT)
    assert features(found, 16) == features(config, 16) and not faults_of(found, 16)
    assert parameter_count(found.model) < 200_000 and found.train.seq_len == 16
    assert all(getattr(found, group) == getattr(config, group) for group in UNTOUCHED)
    kept = {
        key
        for key, (old, new) in changed_keys(config, found).items()
        if isinstance(old, bool | str)
    }
    assert not kept, "what is no size was changed"


def test_what_is_uneven_replicated_padded_or_cut_short_stays_so():
    config, found = small(
        32,
        "model=llama3_8b",
        "model.vocab_size=128257",
        "parallel.tp=16",
        "parallel.pp=2",
        "parallel.vpp=4",
        "pipeline.schedule=interleaved",
        "model.num_layers=30",
        "model.attention_window=64",
        "train.mbs=4",
        "train.gbs=64",
        "recompute.mode=full",
        "recompute.group_layers=3",
        "recompute.num_layers=2",
        "recompute.logit_tokens=128",
    )
    m = found.model
    assert (m.num_heads, m.num_kv_heads) == (32, 2), (
        "two queries a rank of 16, keys are copies, and more than one"
    )
    assert m.vocab_size % 16 and m.num_layers == 17, "two layers a stage of 8, and one more"
    assert 1 < m.attention_window < found.train.seq_len == 16 and found.train.mbs == 2
    assert found.train.gbs // found.train.mbs == 4, (
        "2·pp micro-batches, as a pipeline needs to be full"
    )
    assert (
        found.recompute.group_layers,
        found.recompute.num_layers,
        found.recompute.logit_tokens,
    ) == (2, 1, 4)


def test_layers_that_are_listed_are_listed_again():
    config, found = small(
        4,
        "model=tiny_moe",
        "model.num_layers=9",
        "model.first_k_dense=0",
        "model.moe_layers=[4,6,8]",
        "parallel.pp=4",
        "pipeline.layout=[3,4,2,0]",
        "pipeline.schedule=1f1b",
    )
    assert (
        found.pipeline.layout == [2, 2, 1, 0]
        and found.model.num_layers == 5
        and found.model.moe_layers == [2, 3]
    )


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_one_step_is_a_schedule_too(schedule):
    decay = ["optim.decay_steps=20"] if schedule == "wsd" else []
    config, _ = small(1, "optim.warmup_steps=50", f"optim.schedule={schedule}", *decay, steps=1)
    assert (config.train.steps, config.optim.warmup_steps) == (1, 0)


def test_rounding_and_files_are_taken_out():
    config, found = small(
        8,
        "experiment=quickstart",
        "precision.dtype=bf16",
        "precision.master_weights=false",
        "optim.eps=1e-15",
        "data.document_mask=true",
        "data.eod=3",
        "moe.replay=routing.npz",
        "moe.record=again.npz",
    )
    assert found.moe.replay is None and found.moe.record is None
    assert (
        found.precision.dtype == "fp64" and found.optim.eps == 1e-5 and found.checkpoint.dir is None
    )
    assert found.data == dataclasses.replace(type(found.data)(), document_mask=True, eod=0)


def test_one_thing_at_a_time_is_turned_off():
    config = shrink(exact(load_config(["experiment=quickstart", "pipeline.schedule=zb_h1"]), 3), 16)
    found = {each.change: each for each in ablations(config, 16)}
    assert list(found) == [
        "dp=1",
        "parallel.tp=1",
        "parallel.sp=false",
        "parallel.cp=1",
        "parallel.pp=1",
        "pipeline.schedule=1f1b",
        "parallel.ep=1",
        "parallel.zero=0",
    ]
    assert [each.world for each in found.values()] == [8, 8, 16, 8, 8, 16, 16, 16]
    for each in found.values():
        assert not faults_of(each.config, each.world)
        assert each.config.model == config.model and each.config.train == config.train, (
            "one process is the same"
        )
        if each.change != "dp=1":
            key, _, value = each.change.partition("=")
            assert str(value_of(each.config, key)).lower() == value
            assert sizes_of(each.config, each.world).dp == 2, "and so are the samples of a rank"
    assert found["parallel.cp=1"].config.parallel.ep == 4 and found["dp=1"].config.parallel.ep == 4


def test_experts_fold_into_the_ranks_that_are_left():
    config = exact(
        load_config(
            ["model=tiny_moe", "parallel.cp=2", "parallel.ep=4", "parallel.tp=2", "parallel.etp=1"]
        ),
        3,
    )
    found = {each.change: each.config.parallel for each in ablations(config, 4)}
    assert (
        found["parallel.tp=1"].ep == found["parallel.cp=1"].ep == 2
        and found["parallel.ep=1"].tp == 2
    )


@pytest.mark.parametrize("windowed", [[0, 1, 2, 3, 4], [1, 3, 5], [5]])
def test_some_layers_have_a_window_and_some_have_none(windowed):
    listed = f"model.window_layers={windowed}"
    _, found = small(
        2, "model=tiny", "model.num_layers=6", "model.attention_window=34", listed, "parallel.cp=2"
    )
    assert found.model.num_layers == 2 and len(found.model.window_layers) == 1


@pytest.mark.parametrize(
    "chosen, layers",
    [
        ("optim.freeze=[layers.6.*]", 7),
        ("optim.freeze=['layers.[0-2].*']", 4),
        ("optim.lr_scale=['0.1 *.2.*']", 3),
        ("optim.freeze=['*embedding*']", 2),
    ],
)
def test_names_of_layers_match_what_they_matched(chosen, layers):
    _, found = small(2, "model=tiny", "model.num_layers=8", chosen)
    assert found.model.num_layers == layers


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 34, 40, 64, 65, 66, 97, 100, 120])
def test_a_window_reaches_as_many_chunks_and_as_little_of_the_last(window):
    config, found = small(2, "model=tiny", "parallel.cp=2", f"model.attention_window={window}")
    (chunk, w), (small_chunk, small_w) = (
        (c.train.seq_len // 4, c.model.attention_window) for c in (config, found)
    )
    assert found.train.seq_len < 128 and (w - 1) // chunk == (small_w - 1) // small_chunk
    borders = [
        (rest == 0, rest == 1, rest == size - 1)
        for rest, size in (((w - 1) % chunk, chunk), ((small_w - 1) % small_chunk, small_chunk))
    ]
    assert borders[0] == borders[1]


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "model=tiny_moe",
            "parallel.ep=2",
            "model.top_k=4",
            "model.num_experts=32",
            "model.num_groups=1",
            "model.top_groups=1",
        ],  # more choices than ranks
        # rows that tp ranks do not share evenly
        ["model=tiny", "parallel.tp=2", "train.seq_len=127"],
        ["model=tiny", "recompute.logit_tokens=48"],  # a last slice of another length
        # a last group, too
        ["model=tiny", "model.num_layers=6", "recompute.mode=full", "recompute.group_layers=4"],
        # tall matrices
        ["model=tiny_moe", "parallel.ep=2", "optim.name=muon", "model.moe_ffn_hidden_size=128"],
        # micro-batches, layers beside stages
        ["model=tiny", "model.num_layers=9", "parallel.pp=2", "train.gbs=9"],
    ],
)
def test_relations_between_two_sizes_stay(overrides):
    config, found = small(2, *overrides)
    c, f = (
        (
            each.train.seq_len % 2,
            each.train.seq_len * each.train.mbs % (each.recompute.logit_tokens or 1) > 0,
            each.model.num_layers % min(each.recompute.group_layers, each.model.num_layers) > 0,
            each.train.gbs % each.parallel.pp,
            each.model.num_layers // each.parallel.pp > 1,
            each.model.top_k > 2,
            each.model.expert_hidden_size > each.model.hidden_size,
        )
        for each in (config, found)
    )
    assert c == f and found.model.hidden_size == 32
    every = set(range(found.model.vocab_size))
    first = make_rows(found, 3, ignored=0.3)[: found.train.gbs]
    assert every <= set(first[:, :-1].flatten().tolist()) and every <= set(
        first[:, 1:].flatten().tolist()
    )

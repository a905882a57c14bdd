"""Experts that a file names, on any layout; and the file that a run on any layout writes of its
own."""

import dataclasses
import os
from functools import partial

import numpy as np
import pytest
import torch
from forks import Fork
from layouts import assert_parity, layout_run, make_rows, reference_run
from parity.test_moe_layouts import config_of
from ranks import RankFailure, run_ranks
from runs import records, write_corpus

from megatron5d.config.schema import PipelineConfig, RecomputeConfig
from megatron5d.context_parallel.zigzag import SequenceLayout
from megatron5d.expert_parallel.replay import RoutingFile
from megatron5d.expert_parallel.token_share import Tokens, TokenShare
from megatron5d.topology.axis import Axis
from pretrain import main

STEPS = 2
LAYOUTS = {
    "cp, tp, sp, ep": {"cp": 2, "tp": 2, "sp": True, "ep": 2, "etp": 1},
    "tp without sp": {"tp": 2, "ep": 4, "etp": 1},
    "pp, zero": {"pp": 2, "ep": 2, "zero": 1},
}


def with_files(layout, **moe):
    config = config_of(
        "deepseek", gbs=4, mbs=2, moe=moe, recompute=RecomputeConfig("full"), **LAYOUTS[layout]
    )
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_layers=2, num_mtp_layers=1)
    )
    return dataclasses.replace(
        config, pipeline=PipelineConfig("zb_h1" if layout.startswith("pp") else "1f1b")
    )


def shape_of(config):
    blocks = config.model.num_layers - config.model.first_k_dense + config.model.num_mtp_layers
    return STEPS * config.train.gbs, config.train.seq_len, blocks, config.model.top_k


def random_choices(config):
    draws = np.random.default_rng(0).random((*shape_of(config)[:-1], config.model.num_experts))
    return draws.argsort(-1)[..., : config.model.top_k]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_take_the_experts_of_the_file(layout, tmp_path):
    config = with_files(layout, replay=str(tmp_path / "experts.npy"))
    np.save(tmp_path / "experts.npy", random_choices(config))
    assert_parity(config, world=4, steps=STEPS, ignored=0.8)


@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
def test_the_router_chooses_for_tokens_that_were_not_recorded(dtype, tmp_path):
    """-1, or what it becomes in an unsigned type; under bias and groups."""
    config = with_files("cp, tp, sp, ep", replay=str(tmp_path / "experts.npy"))
    experts = random_choices(config)
    experts[:, 2:5] = -1
    np.save(tmp_path / "experts.npy", experts.astype(dtype))
    assert_parity(config, world=4, steps=STEPS)


@pytest.mark.parametrize("kind", ["aux", "seq_aux", "global_aux"])
def test_auxiliary_losses_count_the_choices_of_the_scores(kind, tmp_path):
    """With a router that has neither bias nor groups, which the replay alone overrules."""
    path, layout = tmp_path / "experts.npy", {"cp": 2, "ep": 2}
    moe = {"balance": [kind], "aux_coef": 0.3, "replay": str(path)}
    config = config_of("mixtral", gbs=4, mbs=2, moe=moe, **layout)
    np.save(path, random_choices(config))
    assert_parity(config, world=2, steps=STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_run_writes_are_the_experts_of_its_own(layout, tmp_path):
    config = with_files(layout, record=str(tmp_path / "experts.npy"))
    rows = make_rows(config, STEPS, ignored=0.8)
    layout_run(config, 4, rows, STEPS)
    written = np.load(tmp_path / "experts.npy")
    is_padding = (written == 255).all((2, 3))
    assert is_padding.any() and (written[~is_padding] < config.model.num_experts).all()
    samples, *rest = shape_of(config)
    assert (
        written.shape == (config.train.steps * config.train.gbs, *rest)
        and written.dtype == np.uint8
    )
    assert not written[samples:].any() and len(np.unique(written)) == config.model.num_experts + 1
    plain, moe = (
        with_files(layout),
        dataclasses.replace(config.moe, record=None, replay=config.moe.record),
    )
    wanted = reference_run(plain, rows, STEPS)
    assert reference_run(dataclasses.replace(plain, moe=moe), rows, STEPS).losses == wanted.losses
    np.save(tmp_path / "experts.npy", np.roll(written, 1, axis=1))
    assert reference_run(dataclasses.replace(plain, moe=moe), rows, STEPS).losses != wanted.losses


def test_padding_to_equal_shares_is_not_written_over_the_tokens_of_other_ranks(tmp_path):
    """Of 12 tokens a cp rank has 6, which 4 ranks of tp share as 8."""
    model, layout = config_of("mixtral").model, SequenceLayout(12, 2, 1)
    file = RoutingFile(str(tmp_path / "experts.npy"), model, 12, samples=1)
    for cp, tp in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)):
        share = TokenShare(Axis("tp", (0, 1, 2, 3), tp), False)
        tokens = share._tokens_at(6, 1, "cpu", torch.from_numpy(layout.rows(cp)))
        tokens = dataclasses.replace(tokens, samples=torch.tensor([0]))
        file.write(0, tokens, torch.full((2, model.top_k), 7 if tp == 3 else 1))
    assert (file.experts[0, :, 0] == 1).all()


def test_a_file_that_does_not_fit_is_told_by_the_first_tokens(tmp_path):
    model, path = config_of("mixtral").model, str(tmp_path / "experts.npy")
    tokens = Tokens(torch.zeros(3, dtype=torch.int64), torch.arange(3), None, 1, torch.tensor([1]))

    def told(samples=None):
        with pytest.raises(ValueError) as error:
            RoutingFile(path, model, 3, samples).read(0, tokens)
        return str(error.value)

    assert "is not a routing file" in told()
    np.savez(tmp_path / "several", np.zeros(3))
    (tmp_path / "several.npz").rename(path)
    assert "expected one array" in told()
    for bad in (np.zeros((2, 3, 2, 5), np.int64), np.zeros((2, 3, 2, 2))):
        np.save(path, bad)
        assert "expected integers [samples" in told()
    np.save(path, np.full((2, 3, 2, 2), 8))
    assert "has experts 8 to 8 of 8 in samples 1 to 1" in told()
    np.save(path, np.zeros((2, 3, 2, 2), np.uint16))
    assert "has an expert twice in 3 of 3 rows in samples 1 to 1; repair it, mark" in told()
    np.save(path, np.zeros((1, 3, 2, 2), np.int64))
    assert "sample 1 is not among the 1 of" in told()
    assert "exists, but does not hold uint8" in told(samples=4)


RUN = [
    *(
        "model=tiny_moe",
        "model.vocab_size=97",
        "train.gbs=4",
        "train.seq_len=16",
        "train.steps=3",
        "log.progress=false",
    ),
    *("log.memory_check=warn", "data.train=[corpus]"),
]


def run_of(folder, *arguments, world=2):
    """Runs pretrain.py's ranks in a folder with a corpus; returns the losses that they log."""

    def one(rank, world):
        os.chdir(folder)
        return main([*RUN, "log.jsonl=log.jsonl", *arguments])

    assert run_ranks(one, world) == [0] * world
    return [record["loss"] for record in records(folder / "log.jsonl")]


def test_a_whole_run_writes_its_experts_and_another_one_replays_them(tmp_path):
    """A run is planned before it begins, with other batches than its own: no plan may leave a file
    there."""
    write_corpus(tmp_path / "corpus", vocab_size=97)
    losses = run_of(tmp_path, "moe.record=new/experts.npy")
    written = np.load(tmp_path / "new" / "experts.npy")
    assert len(written) == 3 * 4 and len(np.unique(written)) > 1
    assert run_of(tmp_path, "moe.replay=new/experts.npy", world=1) == pytest.approx(
        losses, rel=1e-5
    )


def test_files_of_experts_that_a_run_cannot_use_are_refused_before_it(tmp_path):
    """With exit code 2 and a way out, whatever is wrong with them."""
    write_corpus(tmp_path / "corpus", vocab_size=97)
    run_of(tmp_path, "moe.record=whole.npy", world=1)
    whole = np.load(tmp_path / "whole.npy")
    np.save(tmp_path / "short.npy", whole[:9])
    np.save(tmp_path / "narrow.npy", whole[:, :-1])
    np.save(
        tmp_path / "turned.npy",
        np.asfortranarray(np.where(np.arange(16)[:, None, None] == 5, 64, whole)),
    )
    np.save(
        tmp_path / "negative.npy",
        np.where(np.arange(12)[:, None, None, None] == 11, -2, whole.astype(np.int64)),
    )
    for name, value in {"zeros": [0, 0], "partly": [-1, 1], "marked": [-1, -1]}.items():
        rows = whole.astype(np.int8)
        rows[:10, 4:8] = value
        np.save(tmp_path / f"{name}.npy", rows)
    (tmp_path / "torn.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:-1])
    cases = {
        "moe.replay=none.npy": "there is no none.npy",
        "moe.replay=short.npy": "train.steps = 3 requires 12 samples (short.npy has 9)\n    fix: train.steps=2 or less",
        "moe.replay=narrow.npy": "expected integers [samples",
        "moe.replay=torn.npy": "torn.npy is not a routing file",
        "moe.replay=turned.npy": "turned.npy names experts 0 to 64 of",
        "moe.replay=negative.npy": "negative.npy names experts -2 to ",
        "moe.replay=partly.npy": "partly.npy names experts -1 to ",
        "moe.replay=zeros.npy": "zeros.npy names an expert twice in 80 of 384 rows",
        "moe.record=corpus.bin": "moe.record=corpus.bin exists, but does not hold uint8",
        "moe.record=whole.npy train.steps=4": "fix: moe.record=whole.npy.new, or null",
    }
    before = sorted(tmp_path.iterdir())
    for arguments, said in cases.items():
        ended = Fork(partial(main, [*RUN, *arguments.split()]), tmp_path).wait()
        assert ended.returncode == 2 and said in ended.stderr and "1 fault" in ended.stderr, (
            arguments,
            ended.stderr,
        )
    assert sorted(tmp_path.iterdir()) == before
    enough = (
        ["moe.replay=short.npy", "train.steps=2"],
        ["moe.replay=short.npy", "train.stop_after=2"],
        ["moe.replay=marked.npy"],
    )
    for arguments in (*enough, ["moe.record=whole.npy"]):
        run_of(tmp_path, *arguments, world=1)


def test_an_expert_that_no_look_at_the_file_has_shown_ends_the_run_in_one_message(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "megatron5d.train.preflight.data._sampled_ranges", lambda size, count: [(0, 1)]
    )
    write_corpus(tmp_path / "corpus", vocab_size=97)
    run_of(tmp_path, "moe.record=whole.npy", world=1)
    whole = np.load(tmp_path / "whole.npy")
    whole[9:] = 200
    np.save(tmp_path / "whole.npy", whole)
    with pytest.raises(
        RankFailure, match=r"stops the run: .*has experts 200 to 200 of .*moe.replay=null"
    ) as failure:
        run_of(tmp_path, "moe.replay=whole.npy")
    assert (
        "Traceback"
        not in str(failure.value).partition("stops the run")[2].partition("log.traceback=true")[0]
    )


def test_what_a_run_takes_that_is_resumed_with_other_batches_is_known_before_it(tmp_path):
    write_corpus(tmp_path / "corpus", vocab_size=97)
    run_of(tmp_path, "moe.record=whole.npy", "checkpoint.dir=c", "train.stop_after=2", world=1)
    for arguments, said in (
        (["moe.record=whole.npy"], "moe.record=whole.npy exists, but does not hold"),
        (
            ["moe.record=new.npy"],
            "moe.record: the resumed run requires 10 samples (the file has the 6 of train.steps)",
        ),
        (["moe.replay=whole.npy"], "train.steps = 3 requires 16 samples (whole.npy has 12)"),
    ):
        more = [
            *arguments,
            "checkpoint.dir=c",
            "train.gbs=8" if "replay" in arguments[0] else "train.gbs=2",
        ]
        ended = Fork(partial(main, [*RUN, *more]), tmp_path).wait()
        assert ended.returncode == 2 and said in ended.stderr, ended.stderr

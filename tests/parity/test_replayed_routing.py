"""Experts that a file names, on any layout; and the file that a run on any layout writes of its own."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from layouts import assert_parity, layout_run, make_rows, reference_run
from parity.test_moe_layouts import config_of
from ranks import run_ranks
from runs import records, write_corpus

from megatron5d.config.schema import PipelineConfig, RecomputeConfig
from megatron5d.expert_parallel.load_balancing import Tokens
from megatron5d.expert_parallel.replay import RoutingFile
from pretrain import main

STEPS = 2
LAYOUTS = {
    "cp, tp, sp, ep": {"cp": 2, "tp": 2, "sp": True, "ep": 2, "etp": 1},
    "tp without sp": {"tp": 2, "ep": 4, "etp": 1},
    "pp, zero": {"pp": 2, "ep": 2, "zero": 1},
}


def with_files(layout, **moe):
    config = config_of("deepseek", gbs=4, mbs=2, moe=moe, recompute=RecomputeConfig("full"), **LAYOUTS[layout])
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=2, num_mtp_layers=1))
    return dataclasses.replace(config, pipeline=PipelineConfig("zb_h1" if layout.startswith("pp") else "1f1b"))


def shape_of(config):
    blocks = config.model.num_layers - config.model.first_k_dense + config.model.num_mtp_layers
    return STEPS * config.train.gbs, config.train.seq_len, blocks, config.model.top_k


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_take_the_experts_of_the_file(layout, tmp_path):
    config = with_files(layout, replay=str(tmp_path / "experts.npy"))
    draws = np.random.default_rng(0).random((*shape_of(config)[:-1], config.model.num_experts))
    np.save(tmp_path / "experts.npy", draws.argsort(-1)[..., : config.model.top_k])
    assert_parity(config, world=4, steps=STEPS, ignored=0.8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_run_writes_are_the_experts_of_its_own(layout, tmp_path):
    config = with_files(layout, record=str(tmp_path / "experts.npy"))
    rows = make_rows(config, STEPS)
    layout_run(config, 4, rows, STEPS)
    written = np.load(tmp_path / "experts.npy")
    samples, *rest = shape_of(config)
    assert written.shape == (config.train.steps * config.train.gbs, *rest) and written.dtype == np.uint8
    assert not written[samples:].any() and len(np.unique(written)) == config.model.num_experts
    plain, moe = with_files(layout), dataclasses.replace(config.moe, record=None, replay=config.moe.record)
    wanted = reference_run(plain, rows, STEPS)
    assert reference_run(dataclasses.replace(plain, moe=moe), rows, STEPS).losses == wanted.losses
    np.save(tmp_path / "experts.npy", np.roll(written, 1, axis=1))
    assert reference_run(dataclasses.replace(plain, moe=moe), rows, STEPS).losses != wanted.losses


def test_a_file_that_does_not_fit_is_told_by_the_first_tokens(tmp_path):
    model, path = config_of("mixtral").model, str(tmp_path / "experts.npy")
    tokens = Tokens(torch.zeros(3, dtype=torch.int64), torch.arange(3), None, 1, torch.tensor([1]))

    def told(samples=None):
        with pytest.raises(ValueError) as error:
            RoutingFile(path, model, 3, samples).chosen(0, tokens)
        return str(error.value)

    assert "is no file of routing" in told()
    np.savez(tmp_path / "several", np.zeros(3))
    (tmp_path / "several.npz").rename(path)
    assert "it holds several arrays" in told()
    for bad in (np.zeros((2, 3, 2, 5), np.int64), np.zeros((2, 3, 2, 2))):
        np.save(path, bad)
        assert "routing here is whole numbers" in told()
    np.save(path, np.full((2, 3, 2, 2), 8))
    assert "names experts 8 to 8 of 8 in samples 1 to 1" in told()
    np.save(path, np.zeros((1, 3, 2, 2), np.int64))
    assert "ends before sample 1: it has 1" in told()
    assert "is there, and no file of uint8" in told(samples=4)


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
    """A run is planned before it begins, with other batches than its own: no plan may leave a file there."""
    write_corpus(tmp_path / "corpus", vocab_size=97)
    losses = run_of(tmp_path, "moe.record=new/experts.npy")
    written = np.load(tmp_path / "new" / "experts.npy")
    assert len(written) == 3 * 4 and len(np.unique(written)) > 1
    assert run_of(tmp_path, "moe.replay=new/experts.npy", world=1) == pytest.approx(losses, rel=1e-5)

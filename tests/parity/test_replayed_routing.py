"""Experts that a file names, on any layout; and the file that a run on any layout writes of its own."""

import dataclasses

import numpy as np
import pytest
import torch
from layouts import assert_parity, layout_run, make_rows, reference_run
from parity.test_moe_layouts import config_of

from megatron5d.config.schema import PipelineConfig, RecomputeConfig
from megatron5d.expert_parallel.load_balancing import Tokens
from megatron5d.expert_parallel.replay import RoutingFile

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


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    model, path = config_of("mixtral").model, str(tmp_path / "experts.npy")
    tokens = Tokens(torch.zeros(3, dtype=torch.int64), torch.arange(3), None, 1, torch.tensor([1]))
    with pytest.raises(ValueError, match="is no file of routing"):
        RoutingFile(path, model, 3)
    for bad in (np.zeros((2, 3, 2, 5), np.int64), np.zeros((2, 3, 2, 2))):
        np.save(path, bad)
        with pytest.raises(ValueError, match="routing here is whole numbers"):
            RoutingFile(path, model, 3)
    np.save(path, np.full((2, 3, 2, 2), 8))
    with pytest.raises(ValueError, match="names experts 8 to 8 of 8"):
        RoutingFile(path, model, 3).chosen(0, tokens)
    np.save(path, np.zeros((1, 3, 2, 2), np.int64))
    with pytest.raises(ValueError, match="ends before sample 1: it has 1"):
        RoutingFile(path, model, 3).chosen(0, tokens)
    with pytest.raises(ValueError, match="is there, and no file of uint8"):
        RoutingFile(path, model, 3, samples=4)

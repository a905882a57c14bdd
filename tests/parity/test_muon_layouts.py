"""Muon on N ranks equals Muon on a page in one process: gradients, and weights after some steps,
fp64 to 1e-10.

Five steps of Newton-Schulz are one polynomial: they enlarge the rounding of a small singular value
as they do the value, at most 485 times, which leaves 1e-10 of a weight far away. Only of a gradient
that is nothing but rounding would they make an update.
"""

from dataclasses import replace

import pytest
from layouts import assert_parity
from parity import test_moe_layouts as moe
from parity import test_mtp_layouts as mtp
from parity_configs import config_of
from pipeline_configs import scheduled_config


def with_muon(config, **optim):
    return replace(config, optim=replace(config.optim, name="muon", **optim))


# model, ranks, layout
DENSE = {
    "one process, plain": ("gpt2_style", 1, {}),
    "tp2": ("llama_gqa", 2, {"tp": 2}),
    "tp2 sp, dp2, zero 1": ("llama_gqa", 4, {"tp": 2, "sp": True, "zero": 1}),
    "tp4 beyond the KV heads, zero 3": ("mqa_qk_norm", 8, {"tp": 4, "sp": True, "zero": 3}),
    "latents whole on tp2, zero 2": ("mla", 4, {"tp": 2, "sp": True, "zero": 2}),
    "cp2, dp2, zero 3": ("gpt2_style", 4, {"cp": 2, "zero": 3}),
    "replicas, tp2, zero 1": ("llama_gqa", 8, {"dp_replicate": 2, "tp": 2, "zero": 1}),
    "dp4, zero 0": ("llama_gqa", 4, {}),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense(case):
    model, world, parallel = DENSE[case]
    assert_parity(with_muon(config_of(model, mbs=1 if world == 8 else 2, **parallel)), world=world)


def test_everything_of_two_dims():
    """Embedding, head and learned positions too, padded rows and all; fewer steps, no decay of
    some, on the host."""
    options = {
        "muon_exclude": [],
        "ns_steps": 3,
        "momentum": 0.8,
        "decay_exclude": ["*.up.*"],
        "offload": True,
    }
    assert_parity(with_muon(config_of("gpt2_style", tp=2, zero=1), **options), world=4)


@pytest.mark.parametrize(
    ("model", "world", "parallel"),
    [
        ("gated_sandwich", 8, {"tp": 4, "sp": True, "zero": 3}),
        ("mla", 4, {"tp": 2, "cp": 2, "zero": 1}),
        ("mla_plain_q", 2, {"tp": 2}),
    ],
)
def test_heads_one_by_one(model, world, parallel):
    assert_parity(with_muon(config_of(model, **parallel), muon_per_head=True), world=world)


EXPERTS = {
    "ep2": ("mixtral", 2, {"ep": 2}),
    "tp2 sp, ep2, etp2, zero 1": ("deepseek", 8, {"tp": 2, "sp": True, "ep": 2, "zero": 1}),
    "tp1, ep2, etp2, zero 3": ("mixtral", 8, {"ep": 2, "etp": 2, "zero": 3}),
    "plain, edp4, zero 2": ("plain", 4, {"tp": 2, "sp": True, "etp": 1, "zero": 2}),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts(case):
    model, world, parallel = EXPERTS[case]
    assert_parity(with_muon(moe.config_of(model, **parallel)), world=world, steps=2)


# schedule, what is beside pp = 2
PIPELINES = {
    "1f1b": {"zero": 1, "dp": 2, "tied": True},
    "zb_h1": {"zero": 0, "tp": 2, "sp": True},
    "dualpipe, zero 1": {"zero": 1, "dp": 2, "tied": True},
    "dualpipe, zero 2": {"zero": 2, "dp": 2, "dp_replicate": 2},
    "dualpipe_v": {"zero": 0},
}


@pytest.mark.parametrize("case", PIPELINES)
def test_pipelines(case):
    options = dict(PIPELINES[case])
    dp, schedule = options.pop("dp", 1), case.split(",")[0]
    config = scheduled_config(schedule, 2, 4, dp=dp, **options)
    assert_parity(with_muon(config), world=2 * dp * config.parallel.tp)


def test_a_tied_embedding_on_both_ends():
    """Mirrored ranks hold it together; it is dealt out over both and made whole on one."""
    config = scheduled_config("1f1b", 2, 4, dp=2, tied=True, zero=1)
    assert_parity(with_muon(config, muon_exclude=[]), world=4)


def test_all_five_dimensions_and_blocks_that_predict():
    config = mtp.config_of(tp=2, sp=True, cp=2, pp=2, ep=4, etp=1, zero=1, gbs=8)
    assert_parity(with_muon(config), world=8, steps=2)

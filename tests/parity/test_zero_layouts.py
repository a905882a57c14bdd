"""Every ZeRO stage and HSDP equal one process, with whatever else cuts the model: fp64 to 1e-10."""

import pytest
from layouts import assert_parity
from parity import test_moe_layouts as moe
from parity import test_mtp_layouts as mtp
from parity_configs import config_of
from pipeline_configs import assert_schedule_parity

from megatron5d.config.schema import RecomputeConfig
from megatron5d.pipeline_parallel.registry import schedule_names

PER_STEP = {"zero": 3, "zero3_gather": "per_step", "grad_reduce": "per_step"}
MIXED = {"zero": 3, "zero3_gather": "per_step"}

DENSE = {
    "tied, zero 2, one pass": (2, {"zero": 2, "optim": {"implementation": "kernel"}}),
    "tied, zero 2 per step": (2, {"zero": 2, "grad_reduce": "per_step"}),
    "tied, zero 3": (2, {"zero": 3}),
    "tied, zero 3 per step": (2, PER_STEP),
    "tp2 sp, replicate 2, zero 2": (8, {"tp": 2, "sp": True, "dp_replicate": 2, "zero": 2}),
    "tp2, replicate 2, zero 3": (8, {"tp": 2, "dp_replicate": 2, "zero": 3}),
    "replicas alone, zero 3": (2, {"dp_replicate": 2, "zero": 3}),
    "cp2, dp2, zero 3": (4, {"cp": 2, **MIXED}),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense(case):
    world, parallel = DENSE[case]
    assert_parity(config_of("odd_vocab_tied", mbs=1 if world == 8 else 2, **parallel), world=world)


def test_layers_that_autograd_differentiates():
    """Learned positions, biases and norms have no weight-gradient call of their own."""
    assert_parity(
        config_of("gpt2_style", tp=2, sp=True, zero=3, mbs=2, recompute=RecomputeConfig("full", 1)),
        world=4,
    )


# gathered weights: freed after each pass, or kept until the step ends; sums: sent on at each
# micro-batch, or once
ZERO3_GATHER = {"per_microbatch": {"zero": 3}, "kept": MIXED, "per_step": PER_STEP}


@pytest.mark.parametrize("zero3_gather", ZERO3_GATHER)
@pytest.mark.parametrize("schedule", schedule_names())
def test_pipelines(schedule, zero3_gather):
    assert_schedule_parity(schedule, 2, 4, dp=2, tied=True, **ZERO3_GATHER[zero3_gather])


# schedule -> what is beside pp = 2
COMPOSED = {
    "1f1b": {"zero": 3, "dp": 4, "dp_replicate": 2},
    "zb_v": {"zero": 2, "dp": 2},
    # chunks of one layer: a unit's last two gradients come with nothing of another unit between
    # them
    "interleaved_zb": {"zero": 3, "dp": 4, "dp_replicate": 2},
    "dualpipe_v": {"zero": 3, "dp": 2, "recompute": RecomputeConfig("full")},
    "dualpipe": {"zero": 3, "dp": 4, "dp_replicate": 2},
}


@pytest.mark.parametrize("schedule", COMPOSED)
def test_pipelines_with_more_beside(schedule):
    assert_schedule_parity(schedule, 2, 4, tied=True, **COMPOSED[schedule])


@pytest.mark.parametrize("checks", ["OFF", "DETAIL"])
@pytest.mark.parametrize(
    ("schedule", "parallel"), [("dualpipe", PER_STEP), ("zb_h1", MIXED), ("zb_v", {"zero": 2})]
)
def test_with_and_without_torchs_checks(schedule, parallel, checks, monkeypatch, over_gloo):
    """torch's checks make every collective blocking; without them gathers and reductions really run
    beside others."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", checks)
    assert_schedule_parity(schedule, 2, 4, dp=2, tied=True, **parallel)


EXPERTS = {
    "tp2 sp, ep2, replicate 2, zero 3": (
        8,
        {"tp": 2, "sp": True, "ep": 2, "dp_replicate": 2, "zero": 3},
    ),
    "cp2, ep2, zero 3 per step": (4, {"cp": 2, "ep": 2, **PER_STEP}),
    "ep2, zero 2": (4, {"ep": 2, "zero": 2}),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_dealt_out_over_their_own_axis(case):
    world, parallel = EXPERTS[case]
    assert_parity(
        moe.config_of("deepseek", gbs=8, mbs=2 if "cp" in parallel else 1, **parallel),
        world=world,
        steps=2,
    )


@pytest.mark.parametrize("schedule", ["dualpipe", "zb_h1"])
def test_experts_in_a_pipeline(schedule):
    config = moe.config_of("mixtral", gbs=8, mbs=1, pp=2, ep=2, zero=3)
    assert_parity(
        moe.with_schedule(config, schedule), world=8 if schedule == "zb_h1" else 4, steps=2
    )


def test_an_embedding_and_a_head_that_several_units_use():
    """Multi-token prediction reads both again, in blocks that are also computed again."""
    config = mtp.config_of(depths=2, zero=3, mbs=1, gbs=4, tie_embeddings=True, recompute="full")
    assert_parity(config, world=2, steps=2)

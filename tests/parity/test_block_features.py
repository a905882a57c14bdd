"""Options of the block under composed layouts: where norms stand, parallel blocks, gates, windows
by layer."""

import dataclasses

import pytest
from layouts import assert_parity
from parity_configs import config_of

from megatron5d.config.schema import DataConfig, PipelineConfig, RecomputeConfig

EXPERTS = {"num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 12, "shared_ffn_hidden_size": 16}
SPARSE = {
    "olmo2_style": {"shared_expert_gate": True},
    "neox_style": {"mlp_bias": False, "activation": "swiglu"},
    "one_norm_window": {"shared_expert_gate": True, "num_mtp_layers": 1},
    "gated_sandwich": {"shared_expert_gate": True, "first_k_dense": 1},
    "gemma2_style": {"num_mtp_layers": 1, "router_linear_bias": True},
    "gemma3_style": {"num_mtp_layers": 1},
    "gpt_oss_style": {"router_linear_bias": True},
}


def composed(model, schedule="1f1b", *, layers=2, **options):
    config = config_of(model, **options)
    changed = dataclasses.replace(config.model, num_layers=layers)
    return dataclasses.replace(config, model=changed, pipeline=PipelineConfig(schedule))


def sparse(model, schedule="1f1b", **options):
    config = composed(model, schedule, **options)
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, **EXPERTS, **SPARSE[model])
    )


@pytest.mark.parametrize("model", SPARSE)
def test_dense_in_four_dimensions_with_a_split_backward(model):
    config = composed(model, "zb_h1", tp=2, sp=True, cp=2, pp=2, zero=1, mbs=2)
    assert_parity(config, world=8, ignored=0.5)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("model", SPARSE)
def test_recompute(model, recompute):
    config = composed(
        model,
        tp=2,
        mbs=4,
        recompute=RecomputeConfig(recompute, parts=["norm", "qkv", "activation"]),
    )
    assert_parity(config, world=2)


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses", "two_level"])
def test_windows_by_layer_over_context(method):
    inner = {"cp_inner": 2} if method == "two_level" else {}
    config = composed(
        "one_norm_window",
        cp=4 if method != "ulysses" else 2,
        cp_method=method,
        mbs=4,
        layers=3,
        **inner,
    )
    data = DataConfig(document_mask=True, eod=3, eod_mask_loss=True)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=9), data=data
    )
    assert_parity(config, world=config.parallel.cp)


@pytest.mark.parametrize("model", SPARSE)
def test_mixtures_over_tp_and_ep(model):
    assert_parity(sparse(model, tp=2, ep=2, etp=1, mbs=4), world=2)


@pytest.mark.parametrize("model", SPARSE)
def test_mixtures_in_all_five_dimensions(model):
    schedule = "1f1b" if model == "one_norm_window" else "dualpipe"
    config = sparse(model, schedule, tp=2, sp=True, cp=2, pp=2, ep=4, etp=1, zero=1)
    assert_parity(config, world=16, ignored=0.5)

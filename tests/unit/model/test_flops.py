"""Parameter counts compared with the built model, FLOPs with those that the reference computes."""

from dataclasses import replace

import pytest
import reference_gpt
import torch
from parity_configs import MODELS, config_of
from torch.utils.flop_counter import FlopCounterMode

from megatron5d.model.flops import core_flops, flops_per_token, parameter_count
from megatron5d.model.gpt import GPT
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of

S = 16


def build_model(name: str):
    config = config_of(name)
    return config.model, GPT(config, build_mesh(resolve(1)))


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_the_built_model(model):
    config, gpt = build_model(model)
    count = sum(piece.numel for p in gpt.parameters() for piece in spec_of(p).pieces)
    assert parameter_count(config) == count


@pytest.mark.parametrize(
    "model",
    [
        "llama_gqa",
        "olmo2_style",
        "neox_style",
        "gated_sandwich",
        "mqa_qk_norm",
        "gpt2_style",
        "mla",
        "mla_plain_q",
        "full",
    ],
)
def test_flops_are_those_that_the_reference_computes(model):
    """The reference computes the entire score matrix; only pairs that the mask shows count."""
    config, gpt = build_model(model)
    gpt.initialize(1)
    weights = {spec_of(p).name: p.detach()[: spec_of(p).shape[0]] for p in gpt.parameters()}
    with FlopCounterMode(display=False) as counter:
        reference_gpt.logits(weights, config, torch.zeros(1, S, dtype=torch.int64))
    mla = config.attention == "mla"
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim if mla else config.head_dim
    value_dim = config.v_head_dim if mla else config.head_dim
    hidden = config.num_layers * config.num_heads * (key_dim + value_dim) * S * (S - 1)
    expected = counter.get_total_flops() - hidden * config.attention_causal
    assert flops_per_token(config, S) * S / 3 == expected


def test_a_window_limits_the_keys():
    """By hand: of 16 queries the first four see 1, 2, 3, 4 tokens and the others 5."""
    windowed = config_of("softcaps_window").model
    assert (windowed.attention_window, windowed.num_kv_heads) == (5, 4)
    pairs = (1 + 2 + 3 + 4 + 12 * 5) / S
    matrices = 32 * 3 * 32 + 32 * 32 + 3 * 32 * 48
    assert flops_per_token(windowed, S) == 6 * (2 * (matrices + 2 * 4 * 8 * pairs) + 256 * 32)
    not_causal = replace(windowed, attention_causal=False)
    assert core_flops(not_causal, S, 5) == 6 * 4 * 16 * (2 * pairs - 1)

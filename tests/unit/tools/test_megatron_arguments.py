"""from-megatron takes no checkpoint whose arguments compute what this model does not: Megatron-Core
is the oracle for its own fields, and arguments that are not known are refused."""

import ast
import importlib.util
import json
from argparse import Namespace
from pathlib import Path

import pytest
from megatron_jobs import ARGS, TOKENS, run_megatron_core

from megatron5d.checkpoint.megatron.arguments import (
    SUPPORTED,
    model_config_from_args,
    training_notes,
)
from megatron5d.checkpoint.megatron.harmless import HARMLESS


def refused(name, value, arguments="deepseek", ignored=()):
    """The line that refuses an argument, or None."""
    try:
        model_config_from_args(
            Namespace(**ARGS[arguments] | {name: value}), rows=64, ignored=ignored
        )
    except ValueError as error:
        return next(line.strip() for line in str(error).splitlines() if f" {name} = " in line)
    return None


def test_harmless_fields_change_no_logits_of_megatron_core(tmp_path):
    """Of every field of the installed TransformerConfig with which Megatron-Core runs on a CPU."""
    args = ARGS["deepseek"] | {"num_layers": 2, "moe_layer_freq": [0, 1]}
    controls = {"softmax_scale", "no_rope_freq", "moe_router_topk"}
    names = "|".join([HARMLESS.pattern, *controls])
    out = tmp_path / "fields.json"
    job = {"do": "fields", "args": args, "tokens": TOKENS, "names": names, "out": str(out)}
    run_megatron_core(tmp_path, [job])
    effective, unbuilt = json.loads(out.read_text())
    # a second pipeline rank would have the other half of the layers
    assert set(effective) == {*controls, "pipeline_model_parallel_size"}
    assert len(unbuilt) < 60


def core_defaults():
    """Fields of the installed configurations with literal defaults."""
    folder = Path(importlib.util.find_spec("megatron.core").origin).parent
    defaults = {}
    for file in ("transformer/transformer_config.py", "model_parallel_config.py"):
        for node in ast.walk(ast.parse((folder / file).read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
                defaults.setdefault(node.target.id, node.value.value)
    return defaults


def test_every_default_of_megatron_core_is_accepted():
    defaults = core_defaults() | {"num_moe_experts": ARGS["deepseek"]["num_experts"]}
    assert len(defaults) > 230
    described = {"rotary_percent", "rotary_base", *ARGS["deepseek"], "gated_linear_unit"}
    for name in defaults.keys() - described - {"moe_router_topk", "layernorm_epsilon", "rope_type"}:
        assert refused(name, defaults[name]) is None, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
        ("moe_router_load_balancing_type", "quantile_balancing"),
        ("softmax_scale", 0.1),
        ("moe_router_force_load_balancing", True),
        ("moe_router_force_biased", 0.2),
        ("moe_router_topk_limited_devices", 2),
        ("moe_router_score_function", "sqrtsoftplus"),
        ("moe_mlp_glu_interleave_size", 32),
        ("layernorm_zero_centered_gamma", True),
        ("num_moe_experts", 4),
        ("use_mup", True),
        ("mup_output_mult", 2.0),
        ("rope_type", "yarn"),
        ("linear_attention_freq", 4),
        ("enable_mhc_connections", True),
        ("window_size", (128, 0)),
        ("export_qk_l2_norm", True),
        ("retro_add_retriever", True),
        ("spec", ["my.layers", "my_spec"]),
        ("attention_of_2027", "linear"),
        ("residual_multiplier", 0.22),
        ("moe_router_of_2027", [1, 2]),
    ],
)
def test_arguments_that_may_change_the_function_are_named(name, value):
    line = refused(name, value)
    assert line.startswith(f"{name} = {value!r}")
    ignored = refused(name, value, ignored=[name])
    assert ignored == (line if "--ignore-arguments" not in line else None)
    assert ("--ignore-arguments" in line) == (name not in (*SUPPORTED, "num_moe_experts"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_load_balancing_type", ["seq_aux_loss", "global_aux_loss"]),
        ("moe_router_load_balancing_type", "none"),
        ("residual_multiplier", None),
        ("attention_of_2027", False),
        ("spec", ["local"]),
        ("kv_lora_rank", 512),
        ("fp8_option_of_2027", "on"),
        ("log_option_of_2027", 3),
        ("num_moe_experts", 8),
        ("use_te_activation_func", True),  # SwiGLU is the same everywhere
    ],
)
def test_harmless_values_are_accepted(name, value):
    assert refused(name, value) is None


def test_the_tanh_form_of_transformer_engine_is_named():
    assert "swiglu" in refused("use_te_activation_func", True, "gpt2")


def test_what_acts_in_training_only_is_told():
    args = {"moe_expert_capacity_factor": 1.5, "hidden_dropout": 0.1, "attention_dropout": 0.0}
    capacity, others = training_notes(Namespace(**args))
    assert capacity.endswith("= 1.5 is not taken along: train with moe.capacity_factor=1.5")
    assert others.endswith("counterpart: hidden_dropout = 0.1")
    by_position = training_notes(Namespace(**args, moe_token_drop_policy="position"))
    assert by_position[0].endswith("by probability, not by position")
    assert training_notes(Namespace(moe_expert_capacity_factor=-1.0)) == []

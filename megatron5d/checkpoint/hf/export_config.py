"""Our architecture as a Hugging Face config.json, or the reasons why none fits.

For transformers 5. Version 4 (from 4.46) reads it as well, but computes other positions where they
are stretched by
yarn: it passes over `original_max_position_embeddings`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron5d.checkpoint.hf.families import GELU, GEMMA, SAME, WINDOW_BY_LAYER
from megatron5d.checkpoint.hf.moe_mla import (
    LATENT,
    SPARSE,
    mla_settings,
    routing_settings,
    wanted_attention,
    wanted_routing,
)
from megatron5d.config.derived import window_of
from megatron5d.config.schema import ModelConfig, RopeScaling

# The families that are written; a model becomes the first that computes it.
ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}
_DTYPE = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Fields that must have these values for a family to compute an architecture.
_ALL: dict[str, Any] = {
    "attention": "gqa",
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "attention_sinks": False,
    "num_mtp_layers": 0,
    "attention_causal": True,
    "attention_gate": False,
    "qk_norm_all_heads": False,
    "window_layers": None,
    "norm_zero_centered": False,
    "embedding_scale": 1.0,
    "query_pre_attn_scalar": None,
    "router_linear_bias": False,
    "window_rope_theta": None,
}
_DECODER = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "rope_interleaved": False,
    "block_norm": "pre",
    "parallel_block": "none",
    "rotary_percent": 1.0,
    "shared_expert_gate": False,
    **_ALL,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False, "attention_window": None},
    "mistral": {"qk_norm": False, "qkv_bias": False, "mlp_bias": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "attention_out_bias": False, "mlp_bias": False},
    "qwen3": {"qk_norm": True, "mlp_bias": False},
    "gemma": {"qk_norm": False, "mlp_bias": False, "attention_window": None},
    "gemma2": {"qk_norm": False, "mlp_bias": False, "block_norm": "both"},
    "gemma3_text": {"qk_norm": True, "mlp_bias": False, "block_norm": "both"},
    "mixtral": {"qk_norm": False, "qkv_bias": False},
    "gpt_oss": {"qk_norm": False, "activation": "swiglu_clamped", "attention_sinks": True},
    "qwen3_moe": {"qk_norm": True},
    "olmo2": {
        "qk_norm": True,
        "qk_norm_all_heads": True,
        "block_norm": "post",
        "mlp_bias": False,
        "attention_window": None,
    },
    "qwen2_moe": {"qk_norm": False, "attention_out_bias": False},
    "glm4_moe": {"attention_out_bias": False, "attention_window": None},
}
_GPT2 = {
    "norm": "layernorm",
    "position": "learned",
    "qk_norm": False,
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
    "attention_window": None,
    "block_norm": "pre",
    "parallel_block": "none",
    **_ALL,
}


def hf_family(config: ModelConfig) -> str:
    """Returns the family whose transformers code computes this architecture. Raises ValueError:
    none does; says for each which fields stand in the way."""
    latent, sparse = config.attention == "mla", config.num_experts > 0
    families = [
        f for f in ARCHITECTURE if (f in LATENT) == latent and (latent or (f in SPARSE) == sparse)
    ]
    obstacles = {family: _obstacles(config, family) for family in families}
    for family, reasons in obstacles.items():
        if not reasons:
            return family
    lines = "".join(
        f"\n  {family} cannot hold {', '.join(reasons)}" for family, reasons in obstacles.items()
    )
    raise ValueError(f"no Hugging Face family computes model.name = {config.name}:{lines}")


def _obstacles(config: ModelConfig, family: str) -> list[str]:
    """Returns why a family does not compute this architecture."""
    wanted = _GPT2 | {"num_kv_heads": config.num_heads}
    if family == "gpt_neox":
        wanted |= {
            "position": "rope",
            "rope_interleaved": False,
            "qkv_bias": config.qkv_bias,
            "attention_out_bias": config.qkv_bias,
            "parallel_block": "none",
        }
        if config.parallel_block != "none":
            wanted["parallel_block"] = "two_norms"
    elif family != "gpt2":
        wanted = _DECODER | {"attention_out_bias": config.qkv_bias}
        wanted |= wanted_attention(config, family) if family in LATENT else _OWN[family]
        wanted |= wanted_routing(config, family) if family in SPARSE else {}
    if family in GEMMA:
        wanted |= {
            "norm_zero_centered": True,
            "activation": "geglu_tanh",
            "embedding_scale": config.hidden_size**0.5,
        }
    if family == "gemma2":
        free = ("query_pre_attn_scalar", "attention_softcap", "logit_softcap")
        wanted |= {field: getattr(config, field) for field in free}
    if family == "gemma3_text":
        free = ("query_pre_attn_scalar", "logit_softcap", "window_rope_theta")
        wanted |= {field: getattr(config, field) for field in free}
        if (
            config.attention_window
            and config.window_rope_theta is None
            and config.rope_scaling.type != "none"
        ):
            # windows have no stretched positions there
            wanted["window_rope_theta"] = config.rope_theta
    if family in WINDOW_BY_LAYER:
        wanted["window_layers"] = config.window_layers
    if family in ("deepseek_v3", "glm4_moe"):
        wanted["num_mtp_layers"] = config.num_mtp_layers
    if family == "glm4_moe":
        wanted |= {"rotary_percent": config.rotary_percent, "qk_norm": config.qk_norm}
    reasons = [
        f"model.{field} = {getattr(config, field)!r} (only {value!r})"
        for field, value in wanted.items()
        if getattr(config, field) != value
    ]
    if family in ("llama", "gemma2", "gemma3_text") and config.hidden_size % config.num_heads:
        reasons.append(
            f"model.num_heads = {config.num_heads}, no divisor of hidden_size = {config.hidden_size}"
        )
    if family in ("gpt2", "gpt_neox") and config.hidden_size != config.num_heads * config.head_dim:
        width = config.hidden_size / config.num_heads
        reasons.append(
            f"model.head_dim = {config.head_dim} (only model.hidden_size / model.num_heads = {width:g})"
        )
    if family in ("gpt2", "gpt_neox") and config.activation not in GELU.values():
        reasons.append(f"model.activation = {config.activation!r} (only gelu)")
    return reasons


def hf_config_from_model(
    config: ModelConfig, dtype: str, tokens: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the content of config.json for a model of ours.

    Args:
        dtype: of the weights beside it: fp64, fp32, bf16 or fp16.
        tokens: `eos_token_id` and its like, an id or several; without it nothing makes `generate`
            stop.

    Returns:
        A dict for `json.dump`, with the rotary settings and the dtype in both spellings.

    Raises:
        ValueError: no family computes the architecture.
    """
    family = hf_family(config)
    own = {"gpt2": _gpt2, "gpt_neox": _neox}.get(family)
    fields = _decoder(config, family) if own is None else own(config)
    return {
        "architectures": [ARCHITECTURE[family]],
        "model_type": family,
        **{theirs: getattr(config, ours) for ours, theirs in SAME[family].items()},
        **fields,
        "bos_token_id": None,
        "eos_token_id": None,
        **tokens,
        "dtype": _DTYPE[dtype],
        "torch_dtype": _DTYPE[dtype],
    }


def _decoder(config: ModelConfig, family: str) -> dict[str, Any]:
    fields = {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        **_rope_settings(config),
    }
    if family == "llama":
        return fields | {"mlp_bias": config.mlp_bias}
    if family == "mistral":
        return fields | {"sliding_window": config.attention_window}
    if family in LATENT:
        return fields | mla_settings(config, family) | routing_settings(config, family)
    if family in ("olmo2", "gemma"):
        return fields | ({"hidden_act": "gelu_pytorch_tanh"} if family == "gemma" else {})
    if family == "glm4_moe":
        rotated = {"partial_rotary_factor": config.rotary_percent}
        fields |= rotated | {
            "rope_parameters": fields["rope_parameters"] | rotated,
            "use_qk_norm": config.qk_norm,
        }
        return fields | routing_settings(config, family)
    sliding = config.attention_window is not None
    if family == "qwen3_moe" or family == "mixtral":
        window = {"use_sliding_window": sliding, "sliding_window": config.attention_window}
        return fields | window | routing_settings(config, family)
    assert family in WINDOW_BY_LAYER
    windowed = [i for i in range(config.num_layers) if window_of(config, i)]
    fields |= {
        # their code asks for a window even where no layer has one
        "sliding_window": config.attention_window
        or (config.max_positions if family in (*GEMMA, "gpt_oss") else None),
        "layer_types": [
            "sliding_attention" if i in windowed else "full_attention"
            for i in range(config.num_layers)
        ],
    }
    if family == "gemma3_text":
        local = {
            "rope_type": "default",
            "rope_theta": config.window_rope_theta or config.rope_theta,
        }
        kinds = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
        fields |= {"rope_local_base_freq": local["rope_theta"], "rope_parameters": kinds}
    if family in GEMMA:
        return fields | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
            "attn_logit_softcapping": config.attention_softcap or None,
            "final_logit_softcapping": config.logit_softcap or None,
        }
    if family == "gpt_oss":
        return fields | routing_settings(config, family)
    fields |= {
        "use_sliding_window": sliding,
        "max_window_layers": min(windowed, default=config.num_layers),
    }
    if family == "qwen2_moe":
        return fields | {"qkv_bias": config.qkv_bias} | routing_settings(config, family)
    return fields


def _neox(config: ModelConfig) -> dict[str, Any]:
    rope, share = _rope_settings(config), config.rotary_percent
    return {
        "hidden_act": next(theirs for theirs, ours in GELU.items() if ours == config.activation),
        "attention_bias": config.qkv_bias,
        "use_parallel_residual": config.parallel_block != "none",
        "rotary_pct": share,
        "rotary_emb_base": config.rope_theta,
        **rope,
        "rope_parameters": rope["rope_parameters"] | {"partial_rotary_factor": share},
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    activation = next(theirs for theirs, ours in GELU.items() if ours == config.activation)
    return {
        "n_ctx": config.max_positions,
        "activation_function": activation,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _rope_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns the rotary settings in both spellings."""
    theta, scaling = config.rope_theta, _rope_scaling(config.rope_scaling)
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.type == "none":
        return None
    fields: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type == "linear":
        return fields
    fields["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.type == "llama3":
        return fields | {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    fields |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if not scaling.truncate:
        fields["truncate"] = False
    if scaling.attention_factor is not None:
        fields["attention_factor"] = scaling.attention_factor
    if scaling.mscale_all_dim:
        fields |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return fields

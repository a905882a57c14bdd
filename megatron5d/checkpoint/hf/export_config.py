"""Writes an architecture as a Hugging Face config.json, or says why no family computes it.

A family computes a model if its config.json, read back, describes the same function. The files are
for transformers 5. Version 4 (from 4.46) reads them as well, with two exceptions: it ignores
`original_max_position_embeddings`, so it computes other positions where yarn scales them, and its
OLMo 2 (as of 4.57) checks `rope_scaling` by an older format and refuses scaled positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron5d.checkpoint.canonical_model import differing_fields
from megatron5d.checkpoint.hf.families import (
    DEFAULTS,
    GELU,
    GEMMA,
    LATENT,
    LIKE_DEEPSEEK,
    SAME_VALUE,
    SPARSE,
    WINDOW_BY_LAYER,
    Settings,
)
from megatron5d.checkpoint.hf.import_config import model_fields, with_defaults
from megatron5d.checkpoint.hf.moe_mla import mla_settings, routing_settings
from megatron5d.checkpoint.hf.rope_settings import rope_settings
from megatron5d.config.convert import from_dict
from megatron5d.config.derived import window_of
from megatron5d.config.schema import ModelConfig

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


def hf_family(config: ModelConfig) -> str:
    """Family whose transformers code computes this architecture.

    Raises:
        ValueError: none does; lists the fields that each family cannot hold.
    """
    latent, sparse = config.attention == "mla", config.num_experts > 0
    obstacles = {
        family: _obstacles(config, family)
        for family in ARCHITECTURE
        if (family in LATENT) == latent and (latent or (family in SPARSE) == sparse)
    }
    for family, reasons in obstacles.items():
        if not reasons:
            return family
    lines = "".join(
        f"\n  {family} cannot hold {', '.join(reasons)}" for family, reasons in obstacles.items()
    )
    raise ValueError(f"no Hugging Face family computes model.name = {config.name}:{lines}")


def expert_scale(config: ModelConfig, family: str) -> float:
    """Factor by which the experts' outputs are multiplied in the weights of a family, because it
    has no setting for `routed_scaling_factor`."""
    has_setting = family in LIKE_DEEPSEEK or not config.num_experts
    return 1.0 if has_setting else config.routed_scaling_factor


def _obstacles(config: ModelConfig, family: str) -> list[str]:
    """Reasons why a family does not compute this architecture."""
    if expert_scale(config, family) != 1:
        config = replace(config, routed_scaling_factor=1.0)
    settings = with_defaults(_settings(config, family), family)
    fields, unsupported = model_fields(settings)
    # only training reads them, so no config.json says how many a model has
    fields["num_mtp_layers"] = settings.get("num_nextn_predict_layers", 0)
    model = from_dict({"model": fields}).model
    reasons = [
        f"model.{field} = {value!r} (only {other!r})"
        for field, (value, other) in differing_fields(config, model).items()
    ] + unsupported
    if family in ("llama", "gemma2", "gemma3_text") and config.hidden_size % config.num_heads:
        reasons.append(
            f"model.num_heads = {config.num_heads}, no divisor of hidden_size = "
            f"{config.hidden_size}"
        )
    return reasons


def hf_config_from_model(
    config: ModelConfig, dtype: str, tokens: Mapping[str, Any] = MappingProxyType({})
) -> Settings:
    """Content of config.json for a model.

    Args:
        dtype: of the weights beside it: fp64, fp32, bf16 or fp16.
        tokens: `eos_token_id` and other special tokens, an id or several; without an end token
            `generate` never stops.

    Returns:
        A dict for `json.dump`, with the rotary settings and the dtype in both spellings.

    Raises:
        ValueError: no family computes the architecture.
    """
    family = hf_family(config)
    return {
        "architectures": [ARCHITECTURE[family]],
        "model_type": family,
        **_settings(config, family),
        "bos_token_id": None,
        "eos_token_id": None,
        **tokens,
        "dtype": _DTYPE[dtype],
        "torch_dtype": _DTYPE[dtype],
    }


def _settings(config: ModelConfig, family: str) -> Settings:
    """Settings with which a family comes closest to an architecture."""
    same = {key: getattr(config, field) for field, key in SAME_VALUE[family].items()}
    if family == "gpt2":
        return same | _gpt2(config)
    return same | (_neox(config) if family == "gpt_neox" else _decoder(config, family))


def _decoder(config: ModelConfig, family: str) -> Settings:
    settings = {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "gelu_pytorch_tanh" if family == "gemma" else "silu",
        "attention_bias": config.qkv_bias,
        **rope_settings(config),
    }
    if family == "llama":
        settings["mlp_bias"] = config.mlp_bias
    if family in LATENT:
        settings |= mla_settings(config, family)
    if family == "glm4_moe":
        rotated = {"partial_rotary_factor": config.rotary_percent}
        settings |= rotated | {
            "rope_parameters": settings["rope_parameters"] | rotated,
            "use_qk_norm": config.qk_norm,
        }
    if family in ("mixtral", "qwen3_moe"):
        settings["use_sliding_window"] = config.attention_window is not None
    if family in WINDOW_BY_LAYER:
        settings |= _windows(config, family)
    elif "sliding_window" in DEFAULTS[family]:
        settings["sliding_window"] = config.attention_window
    if family in ("gemma2", "gemma3_text"):
        settings |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
            "attn_logit_softcapping": config.attention_softcap or None,
            "final_logit_softcapping": config.logit_softcap or None,
        }
    if family == "qwen2_moe":
        settings["qkv_bias"] = config.qkv_bias
    return settings | (routing_settings(config, family) if family in SPARSE else {})


def _windows(config: ModelConfig, family: str) -> Settings:
    """Settings of a family whose layers have a sliding window or none, one by one."""
    windowed = [i for i in range(config.num_layers) if window_of(config, i)]
    # the code of these families requires a window even where no layer has one
    required = config.max_positions if family in (*GEMMA, "gpt_oss") else None
    settings: Settings = {
        "sliding_window": config.attention_window or required,
        "layer_types": [
            "sliding_attention" if i in windowed else "full_attention"
            for i in range(config.num_layers)
        ],
    }
    if family == "gemma3_text":
        theta = config.window_rope_theta or config.rope_theta
        settings["rope_local_base_freq"] = theta
        settings["rope_parameters"] = {
            "full_attention": rope_settings(config)["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        }
    if family in ("qwen2", "qwen3", "qwen2_moe"):
        settings["use_sliding_window"] = config.attention_window is not None
        settings["max_window_layers"] = min(windowed, default=config.num_layers)
    return settings


def _activation(config: ModelConfig) -> str:
    return next((theirs for theirs, ours in GELU.items() if ours == config.activation), "gelu")


def _neox(config: ModelConfig) -> Settings:
    rope, percent = rope_settings(config), config.rotary_percent
    return {
        "hidden_act": _activation(config),
        "attention_bias": config.qkv_bias,
        "use_parallel_residual": config.parallel_block != "none",
        "rotary_pct": percent,
        "rotary_emb_base": config.rope_theta,
        **rope,
        "rope_parameters": rope["rope_parameters"] | {"partial_rotary_factor": percent},
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _gpt2(config: ModelConfig) -> Settings:
    return {
        "n_ctx": config.max_positions,
        "activation_function": _activation(config),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }

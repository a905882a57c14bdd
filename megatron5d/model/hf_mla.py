"""DeepSeek's latent attention in Hugging Face folders: its settings as ours and back, and its tensors.

The latents' norms have an epsilon of their own there, 1e-6 whatever rms_norm_eps says; ours share the model's.
"""

from __future__ import annotations

from typing import Any

from megatron5d.checkpoint.hf.safetensors_folder import Entry
from megatron5d.config.schema import ModelConfig

LATENT = ("deepseek_v2", "deepseek_v3")
LATENT_EPS = 1e-6
_DIMS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def mla_fields(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    """The fields of ModelConfig that describe the attention of a DeepSeek family.

    Args:
        config: config.json with the family's defaults.
        refused: takes a line for every setting that our model does not compute.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads not in (None, heads):
        refused.append(f"num_key_value_heads = {kv_heads}: only num_attention_heads = {heads} is supported")
    interleaved = config["model_type"] == "deepseek_v2" or config["rope_interleave"]
    fields = {dim: config[dim] for dim in _DIMS}
    return {"attention": "mla", "num_kv_heads": heads, "rope_interleaved": bool(interleaved), **fields}


def mla_settings(config: ModelConfig, family: str) -> dict[str, Any]:
    """What config.json says about the attention; `wanted_attention` must hold."""
    settings = {dim: getattr(config, dim) for dim in _DIMS} | {"head_dim": config.qk_rope_head_dim}
    return settings | ({"rope_interleave": config.rope_interleaved} if family == "deepseek_v3" else {})


def wanted_attention(config: ModelConfig, family: str) -> dict[str, Any]:
    """Fields that must have these values for a DeepSeek family to compute the attention."""
    interleaved = True if family == "deepseek_v2" else config.rope_interleaved
    return {
        "attention": "mla", "rope_interleaved": interleaved, "norm_eps": LATENT_EPS, "attention_out_bias": False,
        "attention_window": None,
    }  # fmt: skip


def mla_entries(config: ModelConfig, i: int) -> list[Entry]:
    """The attention of a layer, without the norm before it."""
    h, a, q_rank, r = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    dn, dr, dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    parts: list[tuple[str, str, tuple[int, ...]]] = [("q.weight", "q_proj", (a * (dn + dr), h))]
    if q_rank:
        parts = [
            ("q_down.weight", "q_a_proj", (q_rank, h)),
            ("q_norm.weight", "q_a_layernorm", (q_rank,)),
            ("q_up.weight", "q_b_proj", (a * (dn + dr), q_rank)),
        ]
    parts += [
        ("kv_down.weight", "kv_a_proj_with_mqa", (r + dr, h)),
        ("kv_norm.weight", "kv_a_layernorm", (r,)),
        ("kv_up.weight", "kv_b_proj", (a * (dn + dv), r)),
        ("out.weight", "o_proj", (h, a * dv)),
    ]
    ours, theirs = f"layers.{i}.attention", f"model.layers.{i}.self_attn"
    return [Entry(f"{ours}.{name}", (0, shape[0]), f"{theirs}.{hf}.weight", shape) for name, hf, shape in parts]

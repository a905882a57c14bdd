"""When two architectures compute the same function: the test of every export to another format."""

from dataclasses import asdict, replace
from typing import Any

from megatron5d.config.derived import moe_layers, window_of
from megatron5d.config.schema import ModelConfig

# names and initialization change no trained model; moe_layers says what these two say of layers
_NO_EFFECT = (
    *("name", "from_hf", "from_checkpoint", "init_std", "init_scale_output"),
    *("first_k_dense", "moe_interval"),
)
_ROTARY = (
    *("rope_theta", "window_rope_theta", "rope_interleaved", "rope_scaling", "rotary_percent"),
)
_LATENT = (
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "latent_norm_eps",
)
_GROUPS = ("num_groups", "top_groups", "group_score")
_EXPERTS = (
    *("top_k", "moe_ffn_hidden_size", "shared_ffn_hidden_size", "shared_expert_gate", "moe_layers"),
    *("router_score", "norm_topk_prob", "routed_scaling_factor", "router_bias"),
    *("router_linear_bias", *_GROUPS),
)


def canonical(model: ModelConfig) -> ModelConfig:
    """The same function, with implied values filled in and fields without effect at their
    defaults."""
    layers = range(model.num_layers)
    sparse = moe_layers(model)
    windowed = [i for i in layers if window_of(model, i)]
    scaled = model.rope_scaling.type != "none"

    no_effect = {*_NO_EFFECT, *(_ROTARY if model.position == "learned" else ("max_positions",))}
    no_effect |= {"head_dim", "num_kv_heads"} if model.attention == "mla" else {*_LATENT}
    if not sparse:
        no_effect |= {"num_experts", *_EXPERTS}
    if model.top_groups == model.num_groups:
        no_effect |= {*_GROUPS}
    if not windowed:
        no_effect |= {"attention_window", "window_layers", "window_rope_theta"}

    implied: dict[str, Any] = {
        "moe_layers": sparse,
        "moe_ffn_hidden_size": model.expert_hidden_size,
        "window_layers": None if len(windowed) == model.num_layers else windowed,
        # layers with a window and a separate base have no scaled positions
        "window_rope_theta": model.window_rope_theta or (None if scaled else model.rope_theta),
        "latent_norm_eps": model.latent_norm_eps or model.norm_eps,
    }
    if len(sparse) == model.num_layers:
        implied["ffn_hidden_size"] = model.expert_hidden_size
    if model.attention != "mla":
        implied["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.head_dim
    defaults = {name: getattr(ModelConfig(), name) for name in no_effect}
    return replace(model, **(implied | defaults))


def differing_fields(model: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two architectures compute different functions, with both values."""
    values, other_values = asdict(canonical(model)), asdict(canonical(other))
    return {
        name: (value, other_values[name])
        for name, value in values.items()
        if value != other_values[name]
    }

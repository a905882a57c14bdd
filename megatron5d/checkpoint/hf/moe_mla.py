"""Settings of experts, routers and latent attention as fields of ModelConfig, and back.

The norms of DeepSeek's latents have an epsilon of 1e-6, whatever rms_norm_eps is.
"""

from megatron5d.checkpoint.hf.families import LATENT_KEYS, LIKE_DEEPSEEK, Fields, Settings
from megatron5d.config.derived import moe_layers
from megatron5d.config.schema import ModelConfig

LATENT_EPS = 1e-6
# fields of mixtures in families that have no settings for them
_FIXED_ROUTING: Fields = {
    "moe_ffn_hidden_size": None,
    "shared_ffn_hidden_size": 0,
    "first_k_dense": 0,
    "moe_interval": 1,
    "moe_layers": None,
    "router_score": "softmax",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_groups": 1,
    "top_groups": 1,
    "group_score": "max",
    "router_bias": False,
}


def mla_fields(config: Settings, unsupported: list[str]) -> Fields:
    """Fields of ModelConfig that describe the attention of a DeepSeek family.

    Args:
        config: config.json with the family's defaults.
        unsupported: receives a line for every setting that our model does not compute.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads not in (None, heads):
        unsupported.append(
            f"num_key_value_heads = {kv_heads}: only num_attention_heads = {heads} is supported"
        )
    interleaved = config["model_type"] == "deepseek_v2" or config["rope_interleave"]
    return {
        "attention": "mla",
        "num_kv_heads": heads,
        "rope_interleaved": bool(interleaved),
        **{key: config[key] for key in LATENT_KEYS},
        "latent_norm_eps": None if config["rms_norm_eps"] == LATENT_EPS else LATENT_EPS,
    }


def mla_settings(config: ModelConfig, family: str) -> Settings:
    """Settings of config.json for the attention of a DeepSeek family."""
    settings = {key: getattr(config, key) for key in LATENT_KEYS}
    settings["head_dim"] = config.qk_rope_head_dim
    if family == "deepseek_v3":
        settings["rope_interleave"] = config.rope_interleaved
    return settings


def routing_fields(config: Settings, unsupported: list[str]) -> Fields:
    """Fields of ModelConfig that describe experts and routers; arguments as in `mla_fields`.

    Returns:
        All of them for a sparse family, none for a dense one.
    """
    family = config["model_type"]
    if family in LIKE_DEEPSEEK:
        return _deepseek_fields(config, unsupported)
    if family in ("mixtral", "gpt_oss"):
        return {
            **_FIXED_ROUTING,
            "num_experts": config["num_local_experts"],
            "top_k": config["num_experts_per_tok"],
            "router_linear_bias": family == "gpt_oss",
        }
    if family not in ("qwen3_moe", "qwen2_moe"):
        return {}
    fields = _qwen_fields(config, unsupported)
    if family == "qwen2_moe" and fields.get("num_experts"):
        fields |= {
            "shared_ffn_hidden_size": config["shared_expert_intermediate_size"],
            "shared_expert_gate": True,
        }
    return fields


def _qwen_fields(config: Settings, unsupported: list[str]) -> Fields:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or []
    if not step or step < 1:
        unsupported.append(f"decoder_sparse_step = {step}: at least 1 is supported")
        return {}
    sparse = [
        i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0
    ]
    return {
        **_FIXED_ROUTING,
        "num_experts": config["num_local_experts"] if sparse else 0,
        "top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_interval": 1 if dense else step,
        "moe_layers": sparse if dense and sparse else None,
        "norm_topk_prob": config["norm_topk_prob"],
    }


def _deepseek_fields(config: Settings, unsupported: list[str]) -> Fields:
    v3, layers = config["model_type"] != "deepseek_v2", range(config["num_hidden_layers"])
    first, kinds = config["first_k_dense_replace"] or 0, config.get("mlp_layer_types")
    sparse = [i for i in layers if (kinds[i : i + 1] == ["sparse"] if kinds else i >= first)]
    contiguous = sparse == list(layers[min(sparse, default=0) :])
    experts = (config["n_routed_experts"] or 0) if sparse else 0
    if experts and not config["num_experts_per_tok"]:
        unsupported.append(
            f"num_experts_per_tok = {config['num_experts_per_tok']}: at least 1 is supported"
        )
    grouped = v3 or config["topk_method"] == "group_limited_greedy"
    features, num_shared = config["moe_intermediate_size"], config["n_shared_experts"] or 0
    return {
        "num_experts": experts,
        "top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": features,
        "shared_ffn_hidden_size": num_shared * features if experts else 0,
        "first_k_dense": min(sparse, default=first) if contiguous else 0,
        "moe_interval": 1,
        "moe_layers": None if contiguous or not experts else sparse,
        "router_score": "sigmoid" if v3 else "softmax",
        "norm_topk_prob": config["norm_topk_prob"],
        "routed_scaling_factor": float(config["routed_scaling_factor"]),
        "num_groups": (config["n_group"] or 1) if grouped else 1,
        "top_groups": (config["topk_group"] or 1) if grouped else 1,
        "group_score": "top2_sum" if v3 else "max",
        "router_bias": v3 and experts > 0,
    }


def routing_settings(config: ModelConfig, family: str) -> Settings:
    """Settings of config.json for experts and routers."""
    if family in LIKE_DEEPSEEK:
        return _deepseek_settings(config, family)
    if family in ("mixtral", "gpt_oss"):
        return {
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "intermediate_size": config.expert_hidden_size,
        }
    by_interval = config.moe_layers is None and config.first_k_dense == 0
    dense = sorted({*range(config.num_layers)} - {*moe_layers(config)})
    settings = {
        "num_experts": config.num_experts,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_hidden_size,
        "decoder_sparse_step": config.moe_interval if by_interval else 1,
        "mlp_only_layers": [] if by_interval else dense,
        "norm_topk_prob": config.norm_topk_prob,
    }
    if family == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = config.shared_ffn_hidden_size
    return settings


def _deepseek_settings(config: ModelConfig, family: str) -> Settings:
    features = config.expert_hidden_size
    settings: Settings = {
        "first_k_dense_replace": min(moe_layers(config), default=config.num_layers),
        "n_routed_experts": config.num_experts,
        # transformers builds at least one shared expert
        "n_shared_experts": max(
            config.shared_ffn_hidden_size // features, int(config.num_experts > 0)
        ),
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": features,
        "moe_layer_freq": 1,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "n_group": config.num_groups,
        "topk_group": config.top_groups,
    }
    if family == "deepseek_v2":
        limited = config.top_groups < config.num_groups
        return settings | {
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy" if limited else "greedy",
        }
    if family == "deepseek_v3":
        settings |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return settings | {"num_nextn_predict_layers": config.num_mtp_layers}

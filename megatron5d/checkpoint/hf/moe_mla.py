"""Experts, routers and latent attention in Hugging Face's folders: their settings as ours and back,
and their tensors.

On disk there is one tensor per matrix and expert, which transformers keeps writing although version
5 fuses them in memory; folders of fused ones (`save_pretrained(..., save_original_format=False)`,
or a bare state dict) are read as well. Ours, too, are one stack of all experts per layer.

The norms of DeepSeek's latents have an epsilon of their own, 1e-6 whatever rms_norm_eps says.
"""

from typing import Any

from megatron5d.checkpoint.hf.files import Entry
from megatron5d.config.derived import moe_layers
from megatron5d.config.schema import ModelConfig

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
LATENT_EPS = 1e-6
_DIMS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def mla_fields(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    """Returns the fields of ModelConfig that describe the attention of a DeepSeek family.

    Args:
        refused: takes a line for every setting that our model does not compute.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads not in (None, heads):
        refused.append(
            f"num_key_value_heads = {kv_heads}: only num_attention_heads = {heads} is supported"
        )
    interleaved = config["model_type"] == "deepseek_v2" or config["rope_interleave"]
    fields = {dim: config[dim] for dim in _DIMS}
    fields["latent_norm_eps"] = None if config["rms_norm_eps"] == LATENT_EPS else LATENT_EPS
    return {
        "attention": "mla",
        "num_kv_heads": heads,
        "rope_interleaved": bool(interleaved),
        **fields,
    }


def mla_settings(config: ModelConfig, family: str) -> dict[str, Any]:
    """Returns what config.json says about the attention; `wanted_attention` must hold."""
    settings = {dim: getattr(config, dim) for dim in _DIMS} | {"head_dim": config.qk_rope_head_dim}
    return settings | (
        {"rope_interleave": config.rope_interleaved} if family == "deepseek_v3" else {}
    )


def wanted_attention(config: ModelConfig, family: str) -> dict[str, Any]:
    """Fields that must have these values for a DeepSeek family to compute the attention."""
    interleaved = True if family == "deepseek_v2" else config.rope_interleaved
    own = config.latent_norm_eps
    return {
        "attention": "mla",
        "rope_interleaved": interleaved,
        "attention_out_bias": False,
        "attention_window": None,
        "latent_norm_eps": own if (own or config.norm_eps) == LATENT_EPS else LATENT_EPS,
    }


def mla_entries(config: ModelConfig, i: int) -> list[Entry]:
    """Returns the attention of a layer, without the norm before it."""
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
    return [
        Entry(f"{ours}.{name}", (0, shape[0]), f"{theirs}.{hf}.weight", shape)
        for name, hf, shape in parts
    ]


SPARSE = ("mixtral", "gpt_oss", "qwen3_moe", "qwen2_moe", "glm4_moe", "dots1", "hy_v3", *LATENT)
LIKE_DEEPSEEK = (*LATENT, "glm4_moe", "dots1", "hy_v3")  # in experts and routers
# the module on disk that holds router and experts, and the names of an expert's matrices: gate, up,
# down
_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(SPARSE[2:], ("mlp", "gate_proj", "up_proj", "down_proj")),
}
# router, its bias and the shared expert below that module
_BESIDE = dict.fromkeys(SPARSE, ("gate", "gate.e_score_correction_bias", "shared_experts")) | {
    "qwen2_moe": ("gate", "", "shared_expert"),
    "hy_v3": ("router.gate", "expert_bias", "shared_mlp"),
}
FUSED = "experts.gate_up_proj"  # what tells folders of fused experts apart
_PLAIN: dict[str, Any] = {
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


def routing_fields(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    """Returns the fields of ModelConfig that describe experts and routers.

    Args:
        refused: takes a line for every setting that our model does not compute.

    Returns:
        All of them for a sparse family, none for a dense one.
    """
    family = config["model_type"]
    if family in ("mixtral", "gpt_oss"):
        sizes = {"num_experts": config["num_local_experts"], "top_k": config["num_experts_per_tok"]}
        return {**_PLAIN, **sizes, "router_linear_bias": family == "gpt_oss"}
    if family == "qwen3_moe":
        return _qwen3_moe(config, refused)
    if family == "qwen2_moe":
        shared = {
            "shared_ffn_hidden_size": config["shared_expert_intermediate_size"],
            "shared_expert_gate": True,
        }
        fields = _qwen3_moe(config, refused)
        return fields | (shared if fields.get("num_experts") else {})
    return _deepseek(config, refused) if family in LIKE_DEEPSEEK else {}


def _qwen3_moe(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or []
    if not step or step < 1:
        refused.append(f"decoder_sparse_step = {step}: at least 1 is supported")
        return {}
    sparse = [
        i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0
    ]
    return {
        **_PLAIN,
        "num_experts": config["num_local_experts"] if sparse else 0,
        "top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_interval": 1 if dense else step,
        "moe_layers": sparse if dense and sparse else None,
        "norm_topk_prob": config["norm_topk_prob"],
    }


def _deepseek(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    v3, layers = config["model_type"] != "deepseek_v2", range(config["num_hidden_layers"])
    first, kinds = config["first_k_dense_replace"] or 0, config.get("mlp_layer_types")
    sparse = [i for i in layers if (kinds[i : i + 1] == ["sparse"] if kinds else i >= first)]
    regular = sparse == list(layers[min(sparse, default=0) :])
    experts = (config["n_routed_experts"] or 0) if sparse else 0
    if experts and not config["num_experts_per_tok"]:
        refused.append(
            f"num_experts_per_tok = {config['num_experts_per_tok']}: at least 1 is supported"
        )
    groups = v3 or config["topk_method"] == "group_limited_greedy"
    inner, shared = config["moe_intermediate_size"], config["n_shared_experts"] or 0
    return {
        "num_experts": experts,
        "top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": inner,
        "shared_ffn_hidden_size": shared * inner if experts else 0,
        "first_k_dense": min(sparse, default=first) if regular else 0,
        "moe_interval": 1,
        "moe_layers": None if regular or not experts else sparse,
        "router_score": "sigmoid" if v3 else "softmax",
        "norm_topk_prob": config["norm_topk_prob"],
        "routed_scaling_factor": float(config["routed_scaling_factor"]),
        "num_groups": (config["n_group"] or 1) if groups else 1,
        "top_groups": (config["topk_group"] or 1) if groups else 1,
        "group_score": "top2_sum" if v3 else "max",
        "router_bias": v3 and experts > 0,
    }


def wanted_routing(config: ModelConfig, family: str) -> dict[str, Any]:
    """Fields that must have these values for a sparse family to compute the architecture."""
    if family in LIKE_DEEPSEEK:
        return _wanted_deepseek(config, family)
    wanted = {
        "shared_ffn_hidden_size": 0,
        "router_score": "softmax",
        "routed_scaling_factor": 1.0,
        "top_groups": config.num_groups,
        "router_bias": False,
        "mlp_bias": False,
    }
    if family == "qwen2_moe":
        wanted |= {
            "shared_ffn_hidden_size": config.shared_ffn_hidden_size,
            "shared_expert_gate": True,
        }
    if family == "gpt_oss":
        wanted |= {"mlp_bias": True, "router_linear_bias": True}
    if family in ("mixtral", "gpt_oss"):
        wanted["norm_topk_prob"] = True
        if len(moe_layers(config)) < config.num_layers:
            wanted |= {"first_k_dense": 0, "moe_interval": 1, "moe_layers": None}
    return wanted


def _wanted_deepseek(config: ModelConfig, family: str) -> dict[str, Any]:
    wanted: dict[str, Any] = {"mlp_bias": False}
    if config.num_experts == 0:
        return wanted
    inner, sparse = config.expert_hidden_size, moe_layers(config)
    wanted["shared_ffn_hidden_size"] = max(1, config.shared_ffn_hidden_size // inner) * inner
    if sparse != list(range(sparse[0], config.num_layers)):
        wanted |= {"moe_interval": 1, "moe_layers": None}
    if config.top_groups < config.num_groups:
        wanted["group_score"] = "max" if family == "deepseek_v2" else "top2_sum"
    if family != "deepseek_v2":
        return wanted | {"router_score": "sigmoid", "router_bias": True}
    return wanted | {"router_score": "softmax", "router_bias": False, "norm_topk_prob": False}


def routing_settings(config: ModelConfig, family: str) -> dict[str, Any]:
    """Returns what config.json says about experts and routers; `wanted_routing` must hold."""
    inner = config.expert_hidden_size
    if family in ("mixtral", "gpt_oss"):
        return {
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "intermediate_size": inner,
        }
    if family in LIKE_DEEPSEEK:
        return _deepseek_settings(config, family, inner)
    regular = config.moe_layers is None and config.first_k_dense == 0
    sparse = moe_layers(config)
    return {
        "num_experts": config.num_experts,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": inner,
        "decoder_sparse_step": config.moe_interval if regular else 1,
        "mlp_only_layers": []
        if regular
        else [i for i in range(config.num_layers) if i not in sparse],
        "norm_topk_prob": config.norm_topk_prob,
        **(
            {"shared_expert_intermediate_size": config.shared_ffn_hidden_size}
            if family == "qwen2_moe"
            else {}
        ),
    }


def _deepseek_settings(config: ModelConfig, family: str, inner: int) -> dict[str, Any]:
    settings = {
        "first_k_dense_replace": min(moe_layers(config), default=config.num_layers),
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_ffn_hidden_size // inner,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": inner,
        "moe_layer_freq": 1,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "n_group": config.num_groups,
        "topk_group": config.top_groups,
    }
    ahead = config.num_mtp_layers
    if family == "glm4_moe":
        return settings | {"num_nextn_predict_layers": ahead}
    if family == "deepseek_v3":
        return settings | {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": ahead,
        }
    limited = config.top_groups < config.num_groups
    return settings | {
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if limited else "greedy",
    }


def gpt_oss_entries(config: ModelConfig, i: int) -> list[Entry]:
    """Lists the router and the experts of a layer, in stacks: `[E, in, out]` on disk, where gate
    and up alternate."""
    h, f, e = config.hidden_size, config.expert_hidden_size, config.num_experts
    ours, theirs, rows = f"layers.{i}", f"model.layers.{i}.mlp", (0, e)
    experts, up, down = (
        f"{ours}.experts",
        f"{theirs}.experts.gate_up_proj",
        f"{theirs}.experts.down_proj",
    )
    return [
        Entry(f"{ours}.router.weight", rows, f"{theirs}.router.weight", (e, h)),
        Entry(f"{ours}.router.linear_bias", rows, f"{theirs}.router.bias", (e,)),
        Entry(f"{experts}.up.weight", rows, up, (e, h, 2 * f), transposed=True, interleaved=True),
        Entry(f"{experts}.up.bias", rows, f"{up}_bias", (e, 2 * f), interleaved=True),
        Entry(f"{experts}.down.weight", rows, down, (e, f, h), transposed=True),
        Entry(f"{experts}.down.bias", rows, f"{down}_bias", (e, h)),
    ]


def moe_entries(config: ModelConfig, family: str, i: int, fused: bool = False) -> list[Entry]:
    """Returns the router, the experts and the shared expert of a layer.

    Args:
        family: one of SPARSE but gpt_oss.
        i: the layer, one that is a mixture of experts.
        fused: all experts of a layer lie in two tensors.
    """
    h, f, experts = config.hidden_size, config.expert_hidden_size, config.num_experts
    ours, (module, gate, up, down) = f"layers.{i}", _NAMES[family]
    theirs, shape = f"model.layers.{i}.{'mlp' if fused else module}", (experts, h)
    router, bias, shared = _BESIDE[family]
    if fused and family == "hy_v3":
        router, bias, shared = "gate", "e_score_correction_bias", "shared_experts"
    entries = [Entry(f"{ours}.router.weight", (0, shape[0]), f"{theirs}.{router}.weight", shape)]
    if config.router_bias:
        entries.append(
            Entry(f"{ours}.router.bias", (0, shape[0]), f"{theirs}.{bias}", shape[:1], wide=True)
        )
    if fused:
        entries += [
            Entry(
                f"{ours}.experts.up.weight", (0, experts), f"{theirs}.{FUSED}", (experts, 2 * f, h)
            ),
            Entry(
                f"{ours}.experts.down.weight",
                (0, experts),
                f"{theirs}.experts.down_proj",
                (experts, h, f),
            ),
        ]
    for e in range(0 if fused else experts):
        expert = f"{theirs}.experts.{e}"
        entries += [
            Entry(f"{ours}.experts.up.weight", (0, f), f"{expert}.{gate}.weight", (f, h), expert=e),
            Entry(
                f"{ours}.experts.up.weight", (f, 2 * f), f"{expert}.{up}.weight", (f, h), expert=e
            ),
            Entry(
                f"{ours}.experts.down.weight", (0, h), f"{expert}.{down}.weight", (h, f), expert=e
            ),
        ]
    if s := config.shared_ffn_hidden_size:
        if config.shared_expert_gate:
            gate_name = f"{theirs}.shared_expert_gate.weight"
            entries.append(Entry(f"{ours}.shared_expert.gate.weight", (0, 1), gate_name, (1, h)))
        ours, theirs = f"{ours}.shared_expert", f"{theirs}.{shared}"
        entries += [
            Entry(f"{ours}.up.weight", (0, s), f"{theirs}.{gate}.weight", (s, h)),
            Entry(f"{ours}.up.weight", (s, 2 * s), f"{theirs}.{up}.weight", (s, h)),
            Entry(f"{ours}.down.weight", (0, h), f"{theirs}.{down}.weight", (h, s)),
        ]
    return entries

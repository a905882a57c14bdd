"""The Hugging Face families that can be read and written, as data.

A setting that config.json omits has the default of the family's own configuration class, which is
also what transformers fills in.
"""

from typing import Any

Settings = dict[str, Any]  # of a config.json
Fields = dict[str, Any]  # of ModelConfig, by name

# Llama except for biases, windows, norms and packing
DENSE = (
    *("llama", "mistral", "phi3", "qwen2", "qwen3", "olmo2", "gemma", "gemma2", "gemma3_text"),
    "seed_oss",
)
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # with multi-head latent attention
LIKE_DEEPSEEK = (*LATENT, "glm4_moe", "dots1", "hy_v3")  # in experts and routers
SPARSE = ("mixtral", "gpt_oss", "qwen3_moe", "qwen2_moe", *LIKE_DEEPSEEK)
PARTLY_ROTATED = ("glm4_moe", "gpt_neox")
QK_NORM = ("qwen3", "qwen3_moe", "olmo2", "dots1", "hy_v3", "gemma3_text")
GEMMA = ("gemma", "gemma2", "gemma3_text")
# each layer has a sliding window or none
WINDOW_BY_LAYER = ("qwen2", "qwen3", "qwen2_moe", "dots1", "gemma2", "gemma3_text", "gpt_oss")

_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    "rms_norm_eps",
)
_SIZES = {
    "llama": (32000, 4096, 11008, 32, 32, None, None, 2048, 1e-6),
    "mistral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-6),
    "phi3": (32064, 3072, 8192, 32, 32, None, None, 4096, 1e-5),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, None, 32768, 1e-6),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 128, 32768, 1e-6),
    "seed_oss": (155136, 4096, 27648, 64, 80, 8, 128, 524288, 1e-6),
    "olmo2": (50304, 4096, 11008, 32, 32, None, None, 2048, 1e-5),
    "gemma": (256000, 3072, 24576, 28, 16, 16, 256, 8192, 1e-6),
    "gemma2": (256000, 2304, 9216, 26, 8, 4, 256, 8192, 1e-6),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 256, 131072, 1e-6),
    "gpt_oss": (201088, 2880, 2880, 36, 64, 8, 64, 131072, 1e-5),
    "mixtral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-5),
    "qwen3_moe": (151936, 2048, 6144, 24, 32, 4, None, 32768, 1e-6),
    "qwen2_moe": (151936, 2048, 5632, 24, 16, 16, None, 32768, 1e-6),
    "glm4_moe": (151552, 4096, 10944, 46, 96, 8, None, 131072, 1e-5),
    "dots1": (152064, 4608, 10944, 62, 32, 32, None, 2048, 1e-6),
    "hy_v3": (120832, 4096, 13312, 80, 64, 8, 128, 131072, 1e-5),
    "deepseek_v2": (102400, 4096, 11008, 32, 32, None, None, 2048, 1e-6),
    "deepseek_v3": (129280, 7168, 18432, 61, 128, 128, None, 4096, 1e-6),
    "glm4_moe_lite": (154880, 2048, 10240, 47, 20, 20, None, 202752, 1e-5),
}
_EXPERT_KEYS = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
)
_EXPERTS = {
    "glm4_moe": (128, 1, 8, 1408, 1, True, 1.0, 1, 1),
    "dots1": (None, None, None, 1408, 0, False, 1.0, 1, 1),
    "hy_v3": (192, 1, 8, 1536, 1, True, 2.826, 1, 1),
    "deepseek_v2": (64, 2, None, 1407, 0, False, 1.0, None, None),
    "deepseek_v3": (256, 1, 8, 2048, 3, True, 2.5, 8, 4),
    "glm4_moe_lite": (64, 1, 4, 1536, 1, True, 1.8, 1, 1),
}
LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LATENTS = {
    "deepseek_v2": (1536, 512, 128, 64, 128),
    "deepseek_v3": (1536, 512, 128, 64, 128),
    "glm4_moe_lite": (768, 512, 192, 64, 256),
}
_WINDOW: Settings = {"sliding_window": 4096, "layer_types": None}
_QWEN_WINDOW = _WINDOW | {"use_sliding_window": False, "max_window_layers": 28}
_QWEN3_EXPERTS: Settings = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
_GEMMA: Settings = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
}
_MTP = {"rope_interleave": True, "num_nextn_predict_layers": 1}
_OTHER: dict[str, Settings] = {
    "mistral": {"sliding_window": 4096},
    "phi3": {"sliding_window": None},
    "qwen2": _QWEN_WINDOW,
    "qwen3": _QWEN_WINDOW,
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "gemma": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        **_GEMMA,
        **_WINDOW,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **_GEMMA,
        **_WINDOW,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "default_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gpt_oss": {
        "mlp_bias": True,
        "default_theta": 150000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "mixtral": {
        "default_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **_QWEN3_EXPERTS,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "qwen2_moe": {
        **_QWEN_WINDOW,
        **_QWEN3_EXPERTS,
        "qkv_bias": True,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "glm4_moe": {
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
    },
    "dots1": {**_WINDOW, "max_window_layers": 62},
    "hy_v3": {
        "initializer_range": 0.006,
        "default_theta": 11158840.0,
        "mlp_layer_types": None,
    },
    "deepseek_v2": {"topk_method": "greedy"},
    "deepseek_v3": _MTP,
    "glm4_moe_lite": {**_MTP, "mlp_layer_types": None},
}


def _defaults(family: str) -> Settings:
    """Defaults of a family of decoders like Llama."""
    return {
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **dict(zip(_SIZE_KEYS, _SIZES[family])),
        **dict(zip(_EXPERT_KEYS, _EXPERTS.get(family, ()))),
        **dict(zip(LATENT_KEYS, _LATENTS.get(family, ()))),
        **_OTHER.get(family, {}),
    }


DEFAULTS: dict[str, Settings] = {
    **{family: _defaults(family) for family in _SIZES},
    "gpt_neox": {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
    },
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
}
# rotary settings of a gpt-oss folder that has none
GPT_OSS_YARN: Settings = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
RENAMED = {"kimi_k2": "deepseek_v3"}  # a model_type whose code is that of another family
_EXPERT_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
# other spellings that transformers reads
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    **dict.fromkeys(
        ("mixtral", "gpt_oss", "qwen3_moe", "qwen2_moe"), {"num_experts": "num_local_experts"}
    ),
    **dict.fromkeys(("glm4_moe", "deepseek_v3"), _EXPERT_ALIASES),
    "glm4_moe_lite": _EXPERT_ALIASES | {"head_dim": "qk_rope_head_dim"},
    "dots1": {"num_local_experts": "n_routed_experts"},
    "gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "hy_v3": {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
}
_SAME_VALUE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
# fields of ModelConfig -> settings with the same value
SAME_VALUE = dict.fromkeys(DEFAULTS, _SAME_VALUE) | {
    "gpt_neox": _SAME_VALUE | {"norm_eps": "layer_norm_eps"},
    "gpt2": _SAME_VALUE
    | {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "ffn_hidden_size": "n_inner",
        "num_heads": "n_head",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    },
}
GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
_LLAMA = _SILU | {"partial_rotary_factor": (None, 1.0)}
_NO_MLP_BIAS = _LLAMA | {"mlp_bias": (False,)}
_NO_BIAS = _NO_MLP_BIAS | {"attention_bias": (False,)}
_LATENT = _NO_BIAS | {"moe_layer_freq": (1,)}
_DEEPSEEK_V3 = _LATENT | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_CAUSAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1.0),
    "use_bidirectional_attention": (None, False),
    "mlp_bias": (False,),
}
# Settings that change the function, with the values that our model computes; a setting that is
# absent is always supported.
SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("llama", "seed_oss"), _LLAMA),
    **dict.fromkeys(("mistral", "phi3", "mixtral"), _NO_BIAS),
    # qwen2 reads no attention_bias: q, k and v always have biases
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "olmo2", "qwen2_moe", "dots1"), _NO_MLP_BIAS),
    "deepseek_v2": {
        **_LATENT,
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        # transformers never divides by the sum; DeepSeek's code does, and then does not scale
        "norm_topk_prob": (False,),
    },
    "deepseek_v3": _DEEPSEEK_V3,
    # transformers reads only mlp_layer_types in place of first_k_dense_replace
    "glm4_moe_lite": _DEEPSEEK_V3 | {"first_k_dense_replace": (1,)},
    "hy_v3": _NO_MLP_BIAS | {"first_k_dense_replace": (1,)},
    # transformers reads only hidden_act, and computes its "gelu" with tanh
    "gemma": {
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        **_CAUSAL,
    },
    "gemma2": {"hidden_activation": ("gelu_pytorch_tanh",), **_CAUSAL},
    "gemma3_text": {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),  # transformers reads it without applying it
        **_CAUSAL,
    },
    "gpt_oss": {
        **_LLAMA,
        "mlp_bias": (True,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    },
    "glm4_moe": _SILU | {"mlp_bias": (False,)},
    "gpt_neox": {"hidden_act": tuple(GELU)},
    "gpt2": {
        "activation_function": tuple(GELU),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}

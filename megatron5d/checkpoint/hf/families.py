"""The Hugging Face families that we read and write, as data: defaults, other spellings, options
that must be as ours.

What a config.json leaves out has the default of the family's own configuration class, as
transformers would fill it in.
"""

from typing import Any

DENSE = (
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "olmo2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "seed_oss",
)  # Llama but for biases, windows, norms, packing
PARTLY_ROTATED = ("glm4_moe", "gpt_neox")
QK_NORM = ("qwen3", "qwen3_moe", "olmo2", "dots1", "hy_v3", "gemma3_text")
GEMMA = ("gemma", "gemma2", "gemma3_text")
# families whose layers may differ in what they see
WINDOW_BY_LAYER = ("qwen2", "qwen3", "qwen2_moe", "dots1", "gemma2", "gemma3_text", "gpt_oss")
_DECODER_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_QWEN_DEFAULTS: dict[str, Any] = _DECODER_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_LATENT_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GEMMA_DEFAULTS: dict[str, Any] = _DECODER_DEFAULTS | {
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _DECODER_DEFAULTS
    | {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
    },
    "mistral": _DECODER_DEFAULTS
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "sliding_window": 4096,
    },
    "phi3": _DECODER_DEFAULTS
    | {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "qwen2": _QWEN_DEFAULTS | {"head_dim": None},
    "qwen3": _QWEN_DEFAULTS | {"head_dim": 128},
    "seed_oss": _DECODER_DEFAULTS
    | {
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    "olmo2": _DECODER_DEFAULTS
    | {
        "vocab_size": 50304,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
    },
    "gemma": _GEMMA_DEFAULTS
    | {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma2": _GEMMA_DEFAULTS
    | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": _GEMMA_DEFAULTS
    | {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "default_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gpt_oss": _DECODER_DEFAULTS
    | {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "default_theta": 150000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "mixtral": _DECODER_DEFAULTS
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "default_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": _DECODER_DEFAULTS
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "qwen2_moe": _QWEN_DEFAULTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": None,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
    },
    "glm4_moe": _DECODER_DEFAULTS
    | {
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
    },
    "dots1": _DECODER_DEFAULTS
    | {
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "moe_intermediate_size": 1408,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
    },
    "hy_v3": _DECODER_DEFAULTS
    | {
        "vocab_size": 120832,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "initializer_range": 0.006,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "default_theta": 11158840.0,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 192,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.826,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": _DECODER_DEFAULTS
    | _LATENT_DEFAULTS
    | {
        "vocab_size": 102400,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
    },
    "deepseek_v3": _DECODER_DEFAULTS
    | _LATENT_DEFAULTS
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe_lite": _DECODER_DEFAULTS
    | _LATENT_DEFAULTS
    | {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
    },
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
        "rope_theta": 10000.0,
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
# the rotary settings of a gpt-oss folder that has none
GPT_OSS_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
RENAMED = {"kimi_k2": "deepseek_v3"}  # model_types whose own code is that of another family
# Other spellings that transformers reads.
ALIASES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "qwen2_moe": {"num_experts": "num_local_experts"},
    "glm4_moe": {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    "dots1": {"num_local_experts": "n_routed_experts"},
    "gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    "glm4_moe_lite": {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    "hy_v3": {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
}
_SAME = {
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
# Fields of ours and settings of the same value.
SAME = dict.fromkeys(DEFAULTS, _SAME) | {
    "gpt_neox": _SAME | {"norm_eps": "layer_norm_eps"},
    "gpt2": _SAME
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

# Options that change the function: the values that our model computes; absent is always fine.
_DECODER_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1.0),
}
_CAUSAL: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "mlp_bias": (False,),
}
_LATENT_COMPUTED: dict[str, tuple[Any, ...]] = _DECODER_COMPUTED | {
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "moe_layer_freq": (1,),
}
_V3_COMPUTED = _LATENT_COMPUTED | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _DECODER_COMPUTED,
    "mistral": _DECODER_COMPUTED | {"mlp_bias": (False,), "attention_bias": (False,)},
    "phi3": _DECODER_COMPUTED | {"mlp_bias": (False,), "attention_bias": (False,)},
    # attention_bias is not asked: q, k and v have biases always
    "qwen2": _DECODER_COMPUTED | {"mlp_bias": (False,)},
    "qwen3": _DECODER_COMPUTED | {"mlp_bias": (False,)},
    "mixtral": _DECODER_COMPUTED | {"mlp_bias": (False,), "attention_bias": (False,)},
    "qwen3_moe": _DECODER_COMPUTED | {"mlp_bias": (False,)},
    "deepseek_v2": _LATENT_COMPUTED
    | {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        # transformers never divides; DeepSeek's own code does, and then does not scale
        "norm_topk_prob": (False,),
    },
    "deepseek_v3": _V3_COMPUTED,
    # transformers goes by mlp_layer_types alone, where DeepSeek has first_k_dense_replace
    "glm4_moe_lite": _V3_COMPUTED | {"first_k_dense_replace": (1,)},
    "olmo2": _DECODER_COMPUTED | {"mlp_bias": (False,)},
    "gemma": {  # transformers reads hidden_act alone, and its gelu as the tanh form
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        **_CAUSAL,
    },
    "gemma2": {"hidden_activation": ("gelu_pytorch_tanh",), **_CAUSAL},
    "gemma3_text": {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),  # transformers reads it and does not apply it
        **_CAUSAL,
    },
    "gpt_oss": _DECODER_COMPUTED
    | {"mlp_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    "qwen2_moe": _DECODER_COMPUTED | {"mlp_bias": (False,)},
    "glm4_moe": {"hidden_act": ("silu", "swish"), "mlp_bias": (False,)},
    "seed_oss": _DECODER_COMPUTED,
    "dots1": _DECODER_COMPUTED | {"mlp_bias": (False,)},
    "hy_v3": _DECODER_COMPUTED | {"mlp_bias": (False,), "first_k_dense_replace": (1,)},
    "gpt_neox": {"hidden_act": tuple(GELU)},
    "gpt2": {
        "activation_function": tuple(GELU),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}

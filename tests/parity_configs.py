"""Tiny models of every shape that the parity tests train, and runs of them on any layout."""

from megatron5d.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)

MLA = {"attention": "mla", "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
MODELS = {
    "llama_gqa": {"num_kv_heads": 2},
    "odd_vocab_tied": {"vocab_size": 251, "tie_embeddings": True, "num_kv_heads": 2},
    "mqa_qk_norm": {"num_kv_heads": 1, "qk_norm": True, "rope_interleaved": True},
    "gpt2_style": {
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "position": "learned",
        "max_positions": 24,
        "vocab_size": 203,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    },
    "softcaps_window": {
        "logit_softcap": 5.0,
        "attention_softcap": 3.0,
        "attention_window": 5,
        "mlp_bias": True,
    },
    "mla": {
        **MLA,
        "q_lora_rank": 8,
        "kv_lora_rank": 6,
        "rope_interleaved": True,
        "attention_out_bias": True,
    },  # latents of 18 < hidden_size: they are gathered
    "mla_wide_latents": {**MLA, "q_lora_rank": 24, "kv_lora_rank": 20},  # hidden states are
    "mla_plain_q": {**MLA, "kv_lora_rank": 6, "rope_interleaved": True},
    "mla_window_softcap": {
        **MLA,
        "q_lora_rank": 8,
        "kv_lora_rank": 6,
        "attention_window": 5,
        "attention_softcap": 3.0,
        "attention_sinks": True,
        "latent_norm_eps": 0.03,
        "window_rope_theta": 50.0,
    },
    "full": {"num_kv_heads": 2, "attention_causal": False},
    "full_window_sinks": {
        **MLA,
        "kv_lora_rank": 6,
        "attention_causal": False,
        "attention_window": 5,
        "attention_sinks": True,
    },
    "gqa_sinks": {"num_kv_heads": 2, "attention_sinks": True},
    "olmo2_style": {
        "num_kv_heads": 2,
        "qk_norm": True,
        "qk_norm_all_heads": True,
        "block_norm": "post",
    },
    "neox_style": {
        "norm": "layernorm",
        "activation": "gelu",
        "parallel_block": "two_norms",
        "rotary_percent": 0.5,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "one_norm_window": {
        "num_kv_heads": 2,
        "parallel_block": "one_norm",
        "attention_window": 5,
        "window_layers": [1],
    },
    "gated_sandwich": {
        "num_kv_heads": 2,
        "attention_gate": True,
        "qkv_bias": True,
        "block_norm": "both",
    },
    "gemma2_style": {
        "num_kv_heads": 2,
        "block_norm": "both",
        "norm_zero_centered": True,
        "activation": "geglu_tanh",
        "embedding_scale": 5.7,
        "query_pre_attn_scalar": 12,
        "attention_softcap": 3.0,
        "logit_softcap": 5.0,
        "attention_window": 5,
        "window_layers": [0],
        "tie_embeddings": True,
    },
    "gemma3_style": {
        "num_kv_heads": 2,
        "block_norm": "both",
        "norm_zero_centered": True,
        "activation": "geglu_tanh",
        "embedding_scale": 5.7,
        "query_pre_attn_scalar": 12,
        "qk_norm": True,
        "attention_window": 5,
        "window_layers": [0],
        "window_rope_theta": 50.0,
        "tie_embeddings": True,
    },
    "gpt_oss_style": {
        "num_kv_heads": 2,
        "activation": "swiglu_clamped",
        "attention_sinks": True,
        "attention_window": 5,
        "window_layers": [0],
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
}


def config_of(
    model: str = "llama_gqa",
    *,
    gbs=8,
    mbs=1,
    train=None,
    data=None,
    optim=None,
    recompute=None,
    **parallel,
):
    return Config(
        model=ModelConfig(
            **{
                "num_layers": 2,
                "hidden_size": 32,
                "ffn_hidden_size": 48,
                "head_dim": 8,
                **MODELS[model],
            }
        ),
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(steps=10, gbs=gbs, mbs=mbs, seq_len=16, **(train or {})),
        optim=OptimConfig(**{"lr": 1e-2, "warmup_steps": 2, "clip": 0.5, **(optim or {})}),
        precision=PrecisionConfig(dtype="fp64"),
        recompute=recompute or RecomputeConfig(),
        data=data or DataConfig(),
    )

"""Arguments of small models of Megatron-LM, and how a test has Megatron-Core do jobs with them."""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
BASE = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 12,
    "seq_length": 16,
    "max_position_embeddings": 24,
    "norm_epsilon": 1e-5,
    "vocab_size": 61,
    "make_vocab_size_divisible_by": 8,
    "position_embedding_type": "rope",
    "rotary_base": 5000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "swiglu": True,
    "bias_gelu_fusion": False,
    "normalization": "RMSNorm",
    "qk_layernorm": False,
    "num_experts": None,
    "untie_embeddings_and_output_weights": True,
}
MOE = BASE | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 20,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_layer_freq": 1,
    "moe_token_dispatcher_type": "alltoall",
}
ARGS = {
    "llama": BASE,
    "tied": BASE
    | {
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "rotary_interleaved": True,
        "use_rope_scaling": True,
    },
    "gpt2": BASE
    | {
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": 8,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "swiglu": False,
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
    },
    "fused": BASE
    | {"swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": True, "num_query_groups": 1},
    "mixtral": MOE,
    "deepseek": MOE
    | {
        "num_experts": 8,
        "moe_layer_freq": [0, 1, 1, 0],
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_shared_expert_intermediate_size": 40,
    },
    "presoftmax": MOE | {"moe_router_pre_softmax": True},
}
TOKENS = [[(5 * i * i + 3 * i + row) % 61 for i in range(16)] for row in range(2)]


def run_megatron_core(folder: Path, jobs: list[dict]) -> None:
    """Has Megatron-Core do the jobs of megatron_core_models.py."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = FOLDER / "megatron_core_models.py"
    command = [sys.executable, "-Wignore", str(script), str(folder / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]

"""Tiny models of Hugging Face's families, and folders of them as transformers writes them, with
random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 128,
}
QWEN3 = TINY | {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 61}
DEEPSEEK_EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
DEEPSEEK = DEEPSEEK_EXPERTS | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GEMMA = {"head_dim": 16, "pad_token_id": 0, "sliding_window": 5}
# what each family has beside TINY
_SIZES: dict[str, dict] = {
    "olmo2": {"pad_token_id": 0},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16, "pad_token_id": 0},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "mixtral": {"num_local_experts": 4, "sliding_window": 7},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 3},
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "glm4_moe": DEEPSEEK_EXPERTS | {"head_dim": 16},
    "dots1": DEEPSEEK_EXPERTS,
    "hy_v3": EXPERTS | {"head_dim": 16, "num_shared_experts": 2},
    "deepseek_v2": DEEPSEEK | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
}


def tiny_config(family: str, **changes):
    """transformers' configuration of a tiny model."""
    import transformers

    sizes = GPT2 if family == "gpt2" else TINY | _SIZES.get(family, {})
    if family == "gpt_neox":
        sizes = {key: size for key, size in sizes.items() if key != "num_key_value_heads"}
    return transformers.AutoConfig.for_model(family, **sizes | changes)


def save_config(config, folder: Path, **changes) -> Path:
    """Writes a configuration as transformers 5 does, then changes settings of the file; "absent"
    removes one."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({key: value for key, value in settings.items() if value != "absent"})
    )
    return folder


def random_model(config, std: float = 0.3):
    """transformers' model of a configuration; every parameter and router bias is random, norms are
    about one."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in model.state_dict().items():
        torch.nn.init.normal_(tensor, mean=1.0 if "norm.weight" in name else 0.0, std=std)
    return model


def in_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 values and the scale of each 128×128 block, as DeepSeek publishes V3; and the weights
    that they represent."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-size // 128) for size in weight.shape])
    represented = torch.empty(weight.shape)
    for i, j in ((i, j) for i in range(scales.shape[0]) for j in range(scales.shape[1])):
        block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        scales[i, j] = weight[block].abs().max() / 448
        values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
        represented[block] = values[block].float() * scales[i, j]
    return values, scales, represented

"""Which tensor of a Megatron-Core GPT model is which of ours.

Names are those of one layer and one expert, `decoder.layers.3.mlp.experts.5.linear_fc1.weight`,
however a checkpoint stacks them. The norm before a linear layer has the name that
TransformerEngine's fused modules give it.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron5d.checkpoint.hf.tensor_table import Entry
from megatron5d.config.derived import is_moe
from megatron5d.config.schema import ModelConfig

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# Stored names that carry no weights of the model: state of FP8 recipes, rotary tables, multi-token
# prediction.
IGNORED = (r"\._extra_state$", r"(^|\.)rotary_pos_emb\.", r"^mtp\.")
# a norm as a module (Megatron-Core's local modules, mixtures) -> as part of the next linear layer
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_QKV = re.compile(r"\.linear_qkv\.(weight|bias)$")
_Tensor = tuple[str, str, tuple[int, ...]]  # our name, Megatron's, shape


def megatron_entries(config: ModelConfig) -> list[Entry]:
    """One entry per tensor of the Megatron model; together they tile every parameter of ours
    exactly."""
    h = config.hidden_size
    table: list[_Tensor] = [("embedding.weight", EMBEDDING, (config.vocab_size, h))]
    if config.position == "learned":
        positions = "embedding.position_embeddings.weight"
        table.append(("position_embedding.weight", positions, (config.max_positions, h)))
    table += _norm(config, "final_norm", "decoder.final_layernorm.")
    if not config.tie_embeddings:
        table.append(("head.weight", HEAD, (config.vocab_size, h)))
    for i in range(config.num_layers):
        for name, stored_name, shape in _layer(config, is_moe(config, i)):
            table.append((f"layers.{i}.{name}", f"decoder.layers.{i}.{stored_name}", shape))
    entries = []
    for name, stored_name, shape in table:
        match = re.search(r"\.experts\.(\d+)\.", stored_name)
        expert, wide = int(match[1]) if match else None, name.endswith("router.bias")
        entries.append(Entry(name, (0, shape[0]), stored_name, shape, expert=expert, wide=wide))
    return entries


def layer_name(i: int, name: str) -> str:
    """Name of a tensor of layer i, with the fused name of its norm."""
    norm = next((norm for norm in FUSED if name.startswith(norm)), "")
    return f"decoder.layers.{i}.{FUSED.get(norm, '')}{name.removeprefix(norm)}"


def _norm(config: ModelConfig, name: str, stored_name: str) -> list[_Tensor]:
    kinds = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    return [(f"{name}.{kind}", f"{stored_name}{kind}", (config.hidden_size,)) for kind in kinds]


def _layer(config: ModelConfig, moe: bool) -> Iterator[_Tensor]:
    """Yields the tensors of a layer, those of experts one expert at a time."""
    h, d, n = config.hidden_size, config.head_dim, config.num_experts
    q, kv = config.num_heads * d, config.num_kv_heads * d
    yield from _norm(config, "attention.norm", FUSED["input_layernorm."])
    yield from _norm(config, "mlp.norm", FUSED["pre_mlp_layernorm."])
    if config.qk_norm:
        for x in "qk":
            yield f"attention.{x}_norm.weight", f"self_attention.{x}_layernorm.weight", (d,)
    mlps = [("mlp", "mlp", config.ffn_hidden_size)]
    if moe:
        yield "router.weight", "mlp.router.weight", (n, h)
        if config.router_bias:
            yield "router.bias", "mlp.router.expert_bias", (n,)
        mlps = [("experts", f"mlp.experts.{e}", config.expert_hidden_size) for e in range(n)]
        if config.shared_ffn_hidden_size:
            mlps.append(("shared_expert", "mlp.shared_experts", config.shared_ffn_hidden_size))
    linear = [
        ("attention.qkv", "self_attention.linear_qkv", (q + 2 * kv, h), config.qkv_bias),
        ("attention.out", "self_attention.linear_proj", (h, q), config.attention_out_bias),
    ]
    gate_and_up = 2 if config.activation == "swiglu" else 1
    for name, stored_name, f in mlps:
        up, down, bias = (gate_and_up * f, h), (h, f), config.mlp_bias
        linear.append((f"{name}.up", f"{stored_name}.linear_fc1", up, bias))
        linear.append((f"{name}.down", f"{stored_name}.linear_fc2", down, bias))
    for name, stored_name, shape, bias in linear:
        yield f"{name}.weight", f"{stored_name}.weight", shape
        if bias:
            yield f"{name}.bias", f"{stored_name}.bias", shape[:1]


def from_megatron_rows(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """Reorders Megatron's fused projection, by query group, to all queries, then keys, then values;
    other tensors stay."""
    return values[_rows(config)] if _QKV.search(name) else values


def to_megatron_rows(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of `from_megatron_rows`."""
    return values[_rows(config).argsort()] if _QKV.search(name) else values


def _rows(config: ModelConfig) -> Tensor:
    """Row in Megatron's fused projection of each row of ours."""
    groups, d = config.num_kv_heads, config.head_dim
    queries = config.num_heads // groups * d
    rows = torch.arange(groups * (queries + 2 * d)).view(groups, queries + 2 * d)
    return torch.cat([block.reshape(-1) for block in rows.split([queries, d, d], dim=1)])

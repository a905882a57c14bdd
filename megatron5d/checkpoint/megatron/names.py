"""Which tensor of a Megatron-Core GPT model is which of ours.

Names are those of one layer and one expert, `decoder.layers.3.mlp.experts.5.linear_fc1.weight`,
however a checkpoint stacks them. The norm before a linear layer has the name that
TransformerEngine's fused modules give it.
"""

import re

import torch
from torch import Tensor

from megatron5d.checkpoint.hf.tensor_table import (
    Entry,
    linear_entries,
    mlp_entries,
    norm_entries,
    whole_entry,
)
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


def megatron_entries(config: ModelConfig) -> list[Entry]:
    """One entry per tensor of the Megatron model; together they tile every parameter of ours
    exactly."""
    h, layer_norm = config.hidden_size, config.norm == "layernorm"
    entries = [whole_entry("embedding.weight", EMBEDDING, config.vocab_size, h)]
    if config.position == "learned":
        positions = "embedding.position_embeddings.weight"
        entries.append(whole_entry("position_embedding.weight", positions, config.max_positions, h))
    entries += norm_entries("final_norm", "decoder.final_layernorm", h, layer_norm)
    if not config.tie_embeddings:
        entries.append(whole_entry("head.weight", HEAD, config.vocab_size, h))
    return entries + [entry for i in range(config.num_layers) for entry in _layer(config, i)]


def layer_name(i: int, name: str) -> str:
    """Name of a tensor of layer i, with the fused name of its norm."""
    norm = next((norm for norm in FUSED if name.startswith(norm)), "")
    return f"decoder.layers.{i}.{FUSED.get(norm, '')}{name.removeprefix(norm)}"


def _layer(config: ModelConfig, i: int) -> list[Entry]:
    """Tensors of a layer, those of experts one expert at a time."""
    h, d, n = config.hidden_size, config.head_dim, config.num_experts
    q, kv = config.num_heads * d, config.num_kv_heads * d
    ours, theirs = f"layers.{i}", f"decoder.layers.{i}"
    entries = []
    for norm, fused in zip(("attention.norm", "mlp.norm"), FUSED.values()):
        for kind in ("weight", "bias") if config.norm == "layernorm" else ("weight",):
            entries.append(whole_entry(f"{ours}.{norm}.{kind}", f"{theirs}.{fused}{kind}", h))
    attention, stored_attention = f"{ours}.attention", f"{theirs}.self_attention"
    if config.qk_norm:
        for x in "qk":
            entries += norm_entries(f"{attention}.{x}_norm", f"{stored_attention}.{x}_layernorm", d)
    qkv = [(f"{stored_attention}.linear_qkv", q + 2 * kv)]
    out = [(f"{stored_attention}.linear_proj", h)]
    entries += linear_entries(f"{attention}.qkv", h, config.qkv_bias, qkv)
    entries += linear_entries(f"{attention}.out", q, config.attention_out_bias, out)

    if not is_moe(config, i):
        return entries + _mlp(config, f"{ours}.mlp", f"{theirs}.mlp", config.ffn_hidden_size)
    router = f"{theirs}.mlp.router"
    entries.append(whole_entry(f"{ours}.router.weight", f"{router}.weight", n, h))
    if config.router_bias:
        entries.append(whole_entry(f"{ours}.router.bias", f"{router}.expert_bias", n, wide=True))
    for e in range(n):
        stored, features = f"{theirs}.mlp.experts.{e}", config.expert_hidden_size
        entries += _mlp(config, f"{ours}.experts", stored, features, expert=e)
    if features := config.shared_ffn_hidden_size:
        stored = f"{theirs}.mlp.shared_experts"
        entries += _mlp(config, f"{ours}.shared_expert", stored, features)
    return entries


def _mlp(
    config: ModelConfig, ours: str, theirs: str, features: int, expert: int | None = None
) -> list[Entry]:
    names, gated = ("linear_fc1", "linear_fc2"), config.activation == "swiglu"
    sizes = (config.hidden_size, features)
    return mlp_entries(ours, theirs, sizes, names, config.mlp_bias, gated, expert=expert)


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

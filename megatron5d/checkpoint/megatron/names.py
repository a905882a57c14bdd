"""Which tensor of a Megatron-Core GPT model is which of ours.

One layer and one expert at a time, `decoder.layers.3.mlp.experts.5.linear_fc1.weight`, however a checkpoint stacks
them. The norm before a linear layer has the name that TransformerEngine's fused modules give it.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron5d.checkpoint.hf.entry import Entry
from megatron5d.config.derived import is_moe
from megatron5d.config.schema import ModelConfig

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# Stored names that carry no weights of the model: state of FP8 recipes, rotary tables, multi-token prediction.
IGNORED = (r"\._extra_state$", r"(^|\.)rotary_pos_emb\.", r"^mtp\.")
# A norm by itself (Megatron-Core's local modules, mixtures), and as part of the next linear layer.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_QKV = re.compile(r"\.linear_qkv\.(weight|bias)$")
_Shape = tuple[int, ...]


def entries(config: ModelConfig) -> list[Entry]:
    """Returns one entry per tensor of the Megatron model; together they tile every parameter of ours exactly."""
    h = config.hidden_size
    table: list[tuple[str, str, _Shape]] = [("embedding.weight", EMBEDDING, (config.vocab_size, h))]
    if config.position == "learned":
        table.append(("position_embedding.weight", "embedding.position_embeddings.weight", (config.max_positions, h)))
    table += _norm(config, "final_norm", "decoder.final_layernorm.")
    if not config.tie_embeddings:
        table.append(("head.weight", HEAD, (config.vocab_size, h)))
    found = [Entry(ours, (0, shape[0]), theirs, shape) for ours, theirs, shape in table]
    for i in range(config.num_layers):
        for ours, theirs, shape in _layer(config, is_moe(config, i)):
            expert = re.search(r"\.experts\.(\d+)\.", theirs)
            e, wide = int(expert[1]) if expert else None, ours == "router.bias"
            place = (f"layers.{i}.{ours}", (0, shape[0]), f"decoder.layers.{i}.{theirs}", shape)
            found.append(Entry(*place, expert=e, wide=wide))
    return found


def layer_name(i: int, name: str) -> str:
    """Returns a tensor of layer i with the fused name of its norm."""
    alone = next((alone for alone in FUSED if name.startswith(alone)), "")
    return f"decoder.layers.{i}.{FUSED.get(alone, '')}{name.removeprefix(alone)}"


def _norm(config: ModelConfig, ours: str, theirs: str) -> list[tuple[str, str, _Shape]]:
    kinds = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    return [(f"{ours}.{kind}", f"{theirs}{kind}", (config.hidden_size,)) for kind in kinds]


def _layer(config: ModelConfig, moe: bool) -> Iterator[tuple[str, str, _Shape]]:
    """Yields our name, Megatron's and the shape of every tensor of a layer; of experts for each."""
    h, d, n = config.hidden_size, config.head_dim, config.num_experts
    q, kv, gates = config.num_heads * d, config.num_kv_heads * d, 2 if config.activation == "swiglu" else 1
    linear: list[tuple[str, str, _Shape, bool]] = [
        ("attention.qkv", "self_attention.linear_qkv", (q + 2 * kv, h), config.qkv_bias),
        ("attention.out", "self_attention.linear_proj", (h, q), config.attention_out_bias),
    ]
    yield from _norm(config, "attention.norm", FUSED["input_layernorm."])
    yield from _norm(config, "mlp.norm", FUSED["pre_mlp_layernorm."])
    if config.qk_norm:
        yield from ((f"attention.{x}_norm.weight", f"self_attention.{x}_layernorm.weight", (d,)) for x in "qk")
    mlps = [("mlp", "mlp", config.ffn_hidden_size)]
    if moe:
        yield "router.weight", "mlp.router.weight", (n, h)
        mlps = [("experts", f"mlp.experts.{e}", config.expert_hidden_size) for e in range(n)]
        if config.router_bias:
            yield "router.bias", "mlp.router.expert_bias", (n,)
        if s := config.shared_ffn_hidden_size:
            mlps.append(("shared_expert", "mlp.shared_experts", s))
    for ours, theirs, f in mlps:
        linear.append((f"{ours}.up", f"{theirs}.linear_fc1", (gates * f, h), config.mlp_bias))
        linear.append((f"{ours}.down", f"{theirs}.linear_fc2", (h, f), config.mlp_bias))
    for ours, theirs, shape, bias in linear:
        yield f"{ours}.weight", f"{theirs}.weight", shape
        if bias:
            yield f"{ours}.bias", f"{theirs}.bias", shape[:1]


def to_our_rows(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """Returns rows of all queries, then keys, then values; Megatron has them by query group. Other tensors stay."""
    return values[_rows(config)] if _QKV.search(name) else values


def to_their_rows(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """Returns the inverse of `to_our_rows`."""
    return values[_rows(config).argsort()] if _QKV.search(name) else values


def _rows(config: ModelConfig) -> Tensor:
    """Returns the row in Megatron's fused projection of each row of ours."""
    groups, d = config.num_kv_heads, config.head_dim
    queries = config.num_heads // groups * d
    rows = torch.arange(groups * (queries + 2 * d)).view(groups, queries + 2 * d)
    return torch.cat([part.reshape(-1) for part in rows.split([queries, d, d], dim=1)])

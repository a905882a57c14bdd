"""Which tensor of a Megatron-Core GPT model is which of ours.

One layer and one expert at a time, `decoder.layers.3.mlp.experts.5.linear_fc1.weight`, however a checkpoint stacks
them. The norm before a linear layer has the name that TransformerEngine's fused modules give it.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from megatron5d.checkpoint.hf.safetensors_folder import Entry
from megatron5d.config.derived import is_moe
from megatron5d.config.schema import ModelConfig

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# Stored names that carry no weights of the model: state of FP8 recipes, rotary tables, multi-token prediction.
IGNORED = (r"\._extra_state$", r"(^|\.)rotary_pos_emb\.", r"^mtp\.")
# A norm by itself (Megatron-Core's local modules, mixtures, latent attention), and as part of the next linear layer.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_QKV = re.compile(r"\.linear_qkv\.(weight|bias)$")
_MODULES = ("self_attention.linear_proj", "self_attention.core_attention", "mlp.linear_fc1", "mlp.linear_fc2")


def entries(config: ModelConfig) -> list[Entry]:
    """One entry per tensor of the Megatron model; together they tile every parameter of ours exactly."""
    v, h = config.vocab_size, config.hidden_size
    table = [Entry("embedding.weight", (0, v), EMBEDDING, (v, h))]
    if config.position == "learned":
        shape = (config.max_positions, h)
        name = "embedding.position_embeddings.weight"
        table.append(Entry("position_embedding.weight", (0, shape[0]), name, shape))
    for i in range(config.num_layers):
        table += _attention(config, i)
        table += _moe(config, i) if is_moe(config, i) else _mlp(config, i)
    table += _norm(config, "final_norm", "decoder.final_layernorm.")
    return table if config.tie_embeddings else [*table, Entry("head.weight", (0, v), HEAD, (v, h))]


def layer_name(i: int, name: str) -> str:
    """A tensor of layer i with the fused name of its norm."""
    if name.startswith("self_attention.q_layernorm."):  # of each head, where attention has no latents
        return f"decoder.layers.{i}.{name}"
    alone = next((alone for alone in FUSED if name.startswith(alone)), "")
    return f"decoder.layers.{i}.{FUSED.get(alone, '')}{name.removeprefix(alone)}"


def _linear(name: str, theirs: str, shape: tuple[int, int], bias: bool) -> list[Entry]:
    found = [Entry(f"{name}.weight", (0, shape[0]), f"{theirs}.weight", shape)]
    return [*found, Entry(f"{name}.bias", (0, shape[0]), f"{theirs}.bias", shape[:1])] if bias else found


def _norm(config: ModelConfig, name: str, theirs: str) -> list[Entry]:
    kinds = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    h = config.hidden_size
    return [Entry(f"{name}.{kind}", (0, h), f"{theirs}{kind}", (h,)) for kind in kinds]


def _attention(config: ModelConfig, i: int) -> list[Entry]:
    h, d = config.hidden_size, config.head_dim
    ours, theirs = f"layers.{i}.attention", f"decoder.layers.{i}.self_attention"
    q, kv = config.num_heads * d, config.num_kv_heads * d
    table = [
        *_norm(config, f"{ours}.norm", f"{theirs}.linear_qkv.layer_norm_"),
        *_linear(f"{ours}.qkv", f"{theirs}.linear_qkv", (q + 2 * kv, h), config.qkv_bias),
        *_linear(f"{ours}.out", f"{theirs}.linear_proj", (h, q), config.attention_out_bias),
    ]
    if config.qk_norm:
        table += [Entry(f"{ours}.{x}_norm.weight", (0, d), f"{theirs}.{x}_layernorm.weight", (d,)) for x in "qk"]
    return table


def _mlp(config: ModelConfig, i: int) -> list[Entry]:
    h, f = config.hidden_size, config.ffn_hidden_size
    ours, theirs, up = f"layers.{i}.mlp", f"decoder.layers.{i}.mlp", 2 * f if config.activation == "swiglu" else f
    return [
        *_norm(config, f"{ours}.norm", f"{theirs}.linear_fc1.layer_norm_"),
        *_linear(f"{ours}.up", f"{theirs}.linear_fc1", (up, h), config.mlp_bias),
        *_linear(f"{ours}.down", f"{theirs}.linear_fc2", (h, f), config.mlp_bias),
    ]


def _moe(config: ModelConfig, i: int) -> list[Entry]:
    h, f, n, s = config.hidden_size, config.expert_hidden_size, config.num_experts, config.shared_ffn_hidden_size
    ours, theirs, gates = f"layers.{i}", f"decoder.layers.{i}.mlp", 2 if config.activation == "swiglu" else 1
    table = [
        *_norm(config, f"{ours}.mlp.norm", f"{theirs}.linear_fc1.layer_norm_"),
        Entry(f"{ours}.router.weight", (0, n), f"{theirs}.router.weight", (n, h)),
    ]
    if config.router_bias:
        table.append(Entry(f"{ours}.router.bias", (0, n), f"{theirs}.router.expert_bias", (n,), wide=True))
    for part, fc, shape in (("up", "linear_fc1", (gates * f, h)), ("down", "linear_fc2", (h, f))):
        table += [
            Entry(f"{ours}.experts.{part}.weight", (0, shape[0]), f"{theirs}.experts.{e}.{fc}.weight", shape, expert=e)
            for e in range(n)
        ]
    if s:
        shared, name = f"{ours}.shared_expert", f"{theirs}.shared_experts"
        table += _linear(f"{shared}.up", f"{name}.linear_fc1", (gates * s, h), bias=False)
        table += _linear(f"{shared}.down", f"{name}.linear_fc2", (h, s), bias=False)
    return table


def to_our_rows(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """Rows of all queries, then keys, then values; Megatron has them by query group. Other tensors stay."""
    return values[_rows(config)] if _QKV.search(name) else values


def to_their_rows(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of `to_our_rows`."""
    return values[_rows(config).argsort()] if _QKV.search(name) else values


def _rows(config: ModelConfig) -> Tensor:
    """Of each row of our fused projection, its row in Megatron's."""
    groups, d = config.num_kv_heads, config.head_dim
    queries = config.num_heads // groups * d
    rows = torch.arange(groups * (queries + 2 * d)).view(groups, queries + 2 * d)
    return torch.cat([part.reshape(-1) for part in rows.split([queries, d, d], dim=1)])

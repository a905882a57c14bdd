"""Floating-point operations of the model, for MFU.

Counted are the multiply-adds of every GEMM that the mathematics needs, 2 FLOPs each, and twice as
many for the backward. A causal query attends to half of the sequence on average, or to its window.
Of the routed experts only those of a token count. Recomputation and the embedding lookup do not.
Source: Narayanan et al. 2021 (arXiv:2104.04473), appendix, with causal attention halved as in Dao
    2023 (arXiv:2307.08691).
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron5d.config.derived import blocks, is_moe, window_of
from megatron5d.config.schema import ModelConfig


def parameter_count(model: ModelConfig, active: bool = False) -> int:
    """Number of parameters, tied ones once, without padding of the vocabulary.

    Args:
        model: the architecture.
        active: of the experts, count only those of one token.
    """
    h, v = model.hidden_size, model.vocab_size
    norm = 2 * h if model.norm == "layernorm" else h
    branch = norm * (2 if model.block_norm == "both" else 1)
    attention = COUNTS[model.attention].matrices(model) + _attention_vectors(model) + branch
    second = 0 if model.parallel_block == "one_norm" else branch
    mlps = sum(
        _feed_forward(model, i, active) + second + _mlp_biases(model, i, active)
        for i in blocks(model)
    )
    routers = (
        sum(is_moe(model, i) for i in blocks(model))
        * model.num_experts
        * (model.router_bias + model.router_linear_bias)
    )
    ends = v * h * (1 if model.tie_embeddings else 2) + norm
    ends += model.max_positions * h if model.position == "learned" else 0
    mtp = model.num_mtp_layers * (2 * h * h + 3 * norm)
    return len(blocks(model)) * attention + mlps + routers + ends + mtp


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of one training step (forward and backward) per token of a sequence."""
    return sum(layer_flops(model, i, seq_len) for i in range(model.num_layers)) + end_flops(
        model, seq_len
    )


def end_flops(model: ModelConfig, seq_len: int) -> float:
    """FLOPs per token of the head and of prediction blocks (MTP)."""
    mtp_blocks = blocks(model)[model.num_layers :]
    return head_flops(model) + sum(layer_flops(model, i, seq_len) for i in mtp_blocks)


def head_flops(model: ModelConfig) -> float:
    """FLOPs per token of the output matrix, including each depth of prediction."""
    return 6.0 * model.vocab_size * model.hidden_size * (1 + model.num_mtp_layers)


def layer_flops(model: ModelConfig, layer: int, seq_len: int) -> float:
    """FLOPs per token of one layer; of a prediction block with its join of 2h features."""
    join = 2 * model.hidden_size**2 if layer >= model.num_layers else 0
    matrices = (
        COUNTS[model.attention].matrices(model) + _feed_forward(model, layer, active=True) + join
    )
    return 6.0 * matrices + core_flops(model, seq_len, window_of(model, layer))


def core_flops(model: ModelConfig, seq_len: int, window: int | None) -> float:
    """FLOPs per token of one layer's attention without its weights: scores and values."""
    w = min(window or seq_len, seq_len)
    num_keys = w - w * (w - 1) / (2 * seq_len)  # average number at or before a query
    if not model.attention_causal:
        num_keys = 2 * num_keys - 1
    return 6.0 * COUNTS[model.attention].core(model) * num_keys


def _attention_vectors(model: ModelConfig) -> int:
    """Elements of one layer's attention biases, inner norms and sinks."""
    vectors = model.hidden_size * model.attention_out_bias + model.num_heads * model.attention_sinks
    return vectors + COUNTS[model.attention].vectors(model)


@dataclass(frozen=True)
class AttentionCounts:
    """Arithmetic of one kind of attention, functions of the architecture."""

    matrices: Callable[[ModelConfig], int]  # elements of one layer's projections
    vectors: Callable[[ModelConfig], int]  # elements of its biases and norms
    core: Callable[[ModelConfig], int]  # multiply-adds of a query with a key and its value


def _grouped_matrices(model: ModelConfig) -> int:
    a, g = model.num_heads, model.num_kv_heads
    return (2 * a + 2 * g + a * model.attention_gate) * model.head_dim * model.hidden_size


def _grouped_vectors(model: ModelConfig) -> int:
    a, g = model.num_heads, model.num_kv_heads
    heads = a + 2 * g + a * model.attention_gate
    normed = (a + g if model.qk_norm_all_heads else 2) * model.qk_norm
    return (heads * model.qkv_bias + normed) * model.head_dim


def _latent_matrices(model: ModelConfig) -> int:
    h, a, r, q_rank = model.hidden_size, model.num_heads, model.kv_lora_rank, model.q_lora_rank
    key_dim, value_dim = model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
    queries = h * a * key_dim if q_rank is None else (h + a * key_dim) * q_rank
    latent = (r + model.qk_rope_head_dim) * h + r * a * (model.qk_nope_head_dim + value_dim)
    return queries + latent + a * value_dim * h


def _latent_core(model: ModelConfig) -> int:
    key_dim = model.qk_nope_head_dim + model.qk_rope_head_dim
    return model.num_heads * (key_dim + model.v_head_dim)


COUNTS = {  # by model.attention
    "gqa": AttentionCounts(
        _grouped_matrices, _grouped_vectors, lambda model: 2 * model.num_heads * model.head_dim
    ),
    "mla": AttentionCounts(
        _latent_matrices, lambda model: model.kv_lora_rank + (model.q_lora_rank or 0), _latent_core
    ),
}


def _up(model: ModelConfig, inner: int) -> int:
    """Outputs of the first matrix of an MLP with `inner` features."""
    return 2 * inner if model.gated else inner


def _mlp_biases(model: ModelConfig, layer: int, active: bool) -> int:
    """Elements of the biases of one layer's MLP, or of its experts."""
    if not model.mlp_bias:
        return 0
    inner_sizes = [model.ffn_hidden_size]
    if is_moe(model, layer):
        inner_sizes = [model.expert_hidden_size] * (model.top_k if active else model.num_experts)
        inner_sizes += [model.shared_ffn_hidden_size] if model.shared_ffn_hidden_size else []
    return sum(_up(model, inner) + model.hidden_size for inner in inner_sizes)


def _feed_forward(model: ModelConfig, layer: int, active: bool) -> int:
    """Elements of one layer's feed-forward matrices, including the router's."""
    h = model.hidden_size

    def matrices(inner: int) -> int:
        return (_up(model, inner) + inner) * h

    if not is_moe(model, layer):
        return matrices(model.ffn_hidden_size)
    experts = model.top_k if active else model.num_experts
    routers = model.num_experts + model.shared_expert_gate
    per_expert, shared = model.expert_hidden_size, model.shared_ffn_hidden_size
    return experts * matrices(per_expert) + matrices(shared) + routers * h

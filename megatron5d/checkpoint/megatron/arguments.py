"""Megatron-LM's arguments, as saved with a checkpoint, and our architecture: one as the other, or refused by name."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron5d.config.convert import from_dict, to_dict
from megatron5d.config.derived import moe_layers
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import Config, ModelConfig

# Arguments that change the function: the values that our model computes; absent is always fine.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False, None),
    "position_embedding_type": ("rope", "learned_absolute"),
    "rotary_percent": (1.0,),
    "no_rope_freq": (None,),
    "normalization": ("RMSNorm", "LayerNorm"),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "onnx_safe": (False, None),
    "qk_l2_norm": (False,),
    "qk_clip": (False,),
    "attention_output_gate": (False,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "experimental_attention_variant": (None,),
    "linear_attention_type": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "transformer_impl": ("local", "transformer_engine", "inference_optimized"),
    "moe_shared_expert_gate": (False,),
    "moe_latent_size": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_expert_capacity_factor": (None,),
    "use_mup": (False,),
}


def model_config_of(args: Namespace, rows: int, positions: int | None, vocab_size: int | None) -> ModelConfig:
    """The architecture that a checkpoint's arguments describe.

    Args:
        args: saved by Megatron-LM.
        rows: of the stored embedding, with those that pad it.
        positions: of the stored table of positions; None = there is none.
        vocab_size: tokens; None = as the arguments say, or all rows.

    Raises:
        ValueError: they describe no model, or options that our model does not compute, all of them named.
    """
    given = vars(args)
    refused = [
        f"{name} = {given[name]!r}: only {' or '.join(map(repr, values))} is supported"
        for name, values in COMPUTED.items()
        if name in given and given[name] not in values
    ]
    vocab_size = vocab_size or given.get("vocab_size") or rows
    if vocab_size > rows:
        refused.append(f"vocab_size = {vocab_size} is more than the {rows} rows of the embedding")
    try:
        fields = _fields(given, refused) | {"vocab_size": vocab_size}
        if positions is not None:
            fields["max_positions"] = positions
        if not refused:
            return from_dict({"model": {"name": "megatron", **fields}}).model
    except (KeyError, TypeError, ConfigError, ZeroDivisionError) as error:
        missing = f"no {error}" if isinstance(error, KeyError) else str(error)
        refused.append(f"the arguments describe no model: {missing}")
    raise ValueError(f"the saved arguments compute what this model does not:{_lines(refused)}")


def _lines(texts: list[str]) -> str:
    return "".join(f"\n  {text}" for text in texts)


def _fields(given: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    h, heads = given["hidden_size"], given["num_attention_heads"]
    bias = given["add_bias_linear"] if "add_bias_linear" in given else not given.get("disable_bias_linear", False)
    rope = given.get("position_embedding_type", "learned_absolute") == "rope" or given.get(
        "use_rotary_position_embeddings", False
    )
    qk_norm, norm = given.get("qk_layernorm") or False, given.get("normalization", "LayerNorm")
    if qk_norm and norm != "RMSNorm":
        refused.append(f"qk_layernorm with normalization = {norm!r}: only RMSNorm is supported")
    sparse = _moe(given, refused) if given.get("num_experts") else {}
    if sparse and bias:
        refused.append("add_bias_linear = True with num_experts: experts have no biases here")
    return {
        "num_layers": given["num_layers"],
        "hidden_size": h,
        "ffn_hidden_size": given.get("ffn_hidden_size") or 4 * h,
        "num_heads": heads,
        "num_kv_heads": given["num_query_groups"] if given.get("group_query_attention") else heads,
        "head_dim": given.get("kv_channels") or h // heads,
        "max_positions": given.get("max_position_embeddings") or given["seq_length"],
        "norm": "rmsnorm" if norm == "RMSNorm" else "layernorm",
        "norm_eps": given.get("norm_epsilon", given.get("layernorm_epsilon", 1e-5)),
        "activation": _activation(given, bias),
        "position": "rope" if rope else "learned",
        "rope_theta": float(given.get("rotary_base", 10000)),
        "rope_interleaved": given.get("rotary_interleaved") or False,
        "rope_scaling": _rope_scaling(given),
        "qk_norm": qk_norm,
        "qkv_bias": bias or given.get("add_qkv_bias") or False,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "tie_embeddings": not given.get("untie_embeddings_and_output_weights", False),
        "init_std": given.get("init_method_std", 0.02),
        **sparse,
    }


def _activation(given: Mapping[str, Any], bias: bool) -> str:
    """Megatron's fused kernel for a bias and GELU computes the tanh form; without fusion GELU is exact."""
    if given.get("swiglu"):
        return "swiglu"
    fused = bias and given.get("bias_gelu_fusion", True)
    return "gelu_tanh" if fused or given.get("openai_gelu") else "gelu"


def _rope_scaling(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("use_rope_scaling"):  # Llama 3.1, of which only the factor can be set
        return {"type": "llama3", "factor": float(given.get("rope_scaling_factor", 8.0))}
    factor = given.get("rotary_seq_len_interpolation_factor")
    return {"type": "linear", "factor": float(factor)} if factor else {}


def _moe(given: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    layers, pattern = given["num_layers"], given.get("moe_layer_freq", 1)
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        refused.append(f"moe_layer_freq = {pattern!r}: only a number or one for each of {layers} layers is supported")
        return {}
    top_k, score = given.get("moe_router_topk", 2), given.get("moe_router_score_function", "softmax")
    groups, top = given.get("moe_router_num_groups") or 1, given.get("moe_router_group_topk") or 1
    before = given.get("moe_router_pre_softmax") or False
    if score not in ("softmax", "sigmoid"):
        refused.append(f"moe_router_score_function = {score!r}: only 'softmax' or 'sigmoid' is supported")
    summed = top_k // top if top < groups else 1
    if summed > 2 or (summed == 2 and score == "softmax" and not before):
        refused.append(
            f"moe_router_group_topk = {top} with moe_router_topk = {top_k}: only groups chosen by their best score, or "
            "by the sum of their two best scores, are supported"
        )
    return {
        "num_experts": given["num_experts"],
        "top_k": top_k,
        "moe_ffn_hidden_size": given.get("moe_ffn_hidden_size"),
        "shared_ffn_hidden_size": given.get("moe_shared_expert_intermediate_size") or 0,
        "moe_layers": None if all(pattern) else [i for i, sparse in enumerate(pattern) if sparse],
        "router_score": score,
        "norm_topk_prob": top_k > 1 if score == "sigmoid" else not before,
        "routed_scaling_factor": float(given.get("moe_router_topk_scaling_factor") or 1.0),
        "num_groups": groups if top < groups else 1,
        "top_groups": top if top < groups else 1,
        "group_score": "top2_sum" if summed == 2 else "max",
        "router_bias": given.get("moe_router_enable_expert_bias") or False,
    }


def args_of(model: ModelConfig, dtype: str, seq_len: int, tokenizer: str | None) -> Namespace:
    """The arguments with which Megatron-LM computes our architecture (`--use-checkpoint-args`).

    Args:
        model: the architecture.
        dtype: of the weights: fp32, bf16 or fp16.
        seq_len: tokens of a sequence.
        tokenizer: a file or folder, as Megatron's `--tokenizer-model`; None = none is named.

    Raises:
        ValueError: Megatron-Core's GPT model does not compute it; names the fields.
    """
    swiglu, learned, bias = model.activation == "swiglu", model.position == "learned", model.mlp_bias
    args = {
        "num_layers": model.num_layers, "hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_heads, "group_query_attention": model.num_kv_heads != model.num_heads,
        "num_query_groups": model.num_kv_heads, "kv_channels": model.head_dim, "seq_length": seq_len,
        "encoder_seq_length": seq_len, "max_position_embeddings": max(model.max_positions, seq_len),
        "position_embedding_type": "learned_absolute" if learned else "rope", "add_position_embedding": learned,
        "use_rotary_position_embeddings": False, "rotary_base": int(model.rope_theta), "rotary_percent": 1.0,
        "rotary_interleaved": model.rope_interleaved, "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": model.rope_scaling.type == "llama3", "rope_scaling_factor": model.rope_scaling.factor,
        "add_bias_linear": bias, "add_qkv_bias": model.qkv_bias and not bias, "swiglu": swiglu,
        "bias_gelu_fusion": model.activation == "gelu_tanh" and bias, "squared_relu": False,
        "openai_gelu": model.activation == "gelu_tanh" and not bias, "bias_swiglu_fusion": swiglu,
        "untie_embeddings_and_output_weights": not model.tie_embeddings, "init_method_std": model.init_std,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm", "norm_epsilon": model.norm_eps,
        "layernorm_epsilon": model.norm_eps, "apply_layernorm_1p": False, "qk_layernorm": model.qk_norm,
        "apply_query_key_layer_scaling": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "vocab_size": model.vocab_size, "make_vocab_size_divisible_by": 128,
        "tokenizer_model": tokenizer, "fp16": dtype == "fp16", "bf16": dtype == "bf16", "multi_latent_attention": False,
        "ckpt_format": "torch_dist", "use_distributed_optimizer": False, "consumed_train_samples": 0,
        "consumed_valid_samples": 0, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 1, "num_experts": None,
    }  # fmt: skip
    if model.rope_scaling.type == "linear":
        args["rotary_seq_len_interpolation_factor"] = int(model.rope_scaling.factor)
    found = Namespace(**args | (_moe_args(model) if model.num_experts else {}))
    _check_same(found, model)
    return found


def _moe_args(model: ModelConfig) -> dict[str, Any]:
    sparse, limited = moe_layers(model), model.top_groups < model.num_groups
    return {
        "num_experts": model.num_experts,
        "moe_layer_freq": 1 if len(sparse) == model.num_layers else [int(i in sparse) for i in range(model.num_layers)],
        "moe_ffn_hidden_size": model.expert_hidden_size,
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size or None,
        "moe_router_topk": model.top_k,
        "moe_router_score_function": model.router_score,
        "moe_router_pre_softmax": model.router_score == "softmax" and not model.norm_topk_prob,
        "moe_router_topk_scaling_factor": None if model.routed_scaling_factor == 1 else model.routed_scaling_factor,
        "moe_router_num_groups": model.num_groups if limited else None,
        "moe_router_group_topk": model.top_groups if limited else None,
        "moe_router_enable_expert_bias": model.router_bias,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _check_same(args: Namespace, model: ModelConfig) -> None:
    """Makes sure that Megatron's arguments mean this very architecture, by reading them back."""
    back = to_dict(Config(model=model_config_of(args, model.vocab_size, None, None)))["model"]
    wanted = to_dict(Config(model=model))["model"]
    passive = {"name", "from_hf", "max_positions", "init_scale_output", "moe_layers"}
    passive |= {"first_k_dense", "moe_interval", "top_k" if not model.num_experts else ""}
    if model.position == "learned":
        passive |= {"rope_theta", "rope_interleaved", "rope_scaling"}
    if not model.num_experts:
        passive |= {"moe_ffn_hidden_size", "norm_topk_prob", "routed_scaling_factor", "router_score"}
    back["moe_ffn_hidden_size"] = back["moe_ffn_hidden_size"] or None
    wanted["moe_ffn_hidden_size"] = model.expert_hidden_size if model.num_experts else None
    differing = [f"model.{name} = {value!r} (only {back[name]!r})" for name, value in wanted.items()
                 if name not in passive and back[name] != value]  # fmt: skip
    if differing:
        raise ValueError(f"Megatron-Core's GPT model does not compute this one:{_lines(differing)}")

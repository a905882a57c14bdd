"""Which tensor of a Megatron-Core GPT model is which of ours, and which argument which key.

One layer and one expert at a time, `decoder.layers.3.mlp.experts.5.linear_fc1.weight`, however a
checkpoint stacks them. The norm before a linear layer has the name that TransformerEngine's fused
modules give it.

Arguments saved with a checkpoint are translated into our architecture and back, or refused by name.
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from megatron5d.checkpoint.hf.tensor_table import Entry
from megatron5d.config.convert import from_dict
from megatron5d.config.derived import is_moe, moe_layers
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import ModelConfig

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# Stored names that carry no weights of the model: state of FP8 recipes, rotary tables, multi-token
# prediction.
IGNORED = (r"\._extra_state$", r"(^|\.)rotary_pos_emb\.", r"^mtp\.")
# A norm by itself (Megatron-Core's local modules, mixtures), and as part of the next linear layer.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_QKV = re.compile(r"\.linear_qkv\.(weight|bias)$")
_Shape = tuple[int, ...]


def megatron_entries(config: ModelConfig) -> list[Entry]:
    """Returns one entry per tensor of the Megatron model; together they tile every parameter of
    ours exactly."""
    h = config.hidden_size
    table: list[tuple[str, str, _Shape]] = [("embedding.weight", EMBEDDING, (config.vocab_size, h))]
    if config.position == "learned":
        table.append(
            (
                "position_embedding.weight",
                "embedding.position_embeddings.weight",
                (config.max_positions, h),
            )
        )
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
    q, kv, gates = (
        config.num_heads * d,
        config.num_kv_heads * d,
        2 if config.activation == "swiglu" else 1,
    )
    linear: list[tuple[str, str, _Shape, bool]] = [
        ("attention.qkv", "self_attention.linear_qkv", (q + 2 * kv, h), config.qkv_bias),
        ("attention.out", "self_attention.linear_proj", (h, q), config.attention_out_bias),
    ]
    yield from _norm(config, "attention.norm", FUSED["input_layernorm."])
    yield from _norm(config, "mlp.norm", FUSED["pre_mlp_layernorm."])
    if config.qk_norm:
        yield from (
            (f"attention.{x}_norm.weight", f"self_attention.{x}_layernorm.weight", (d,))
            for x in "qk"
        )
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


def from_megatron_rows(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """Returns rows of all queries, then keys, then values; Megatron has them by query group. Other
    tensors stay."""
    return values[_rows(config)] if _QKV.search(name) else values


def to_megatron_rows(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """Returns the inverse of `to_our_rows`."""
    return values[_rows(config).argsort()] if _QKV.search(name) else values


def _rows(config: ModelConfig) -> Tensor:
    """Returns the row in Megatron's fused projection of each row of ours."""
    groups, d = config.num_kv_heads, config.head_dim
    queries = config.num_heads // groups * d
    rows = torch.arange(groups * (queries + 2 * d)).view(groups, queries + 2 * d)
    return torch.cat([part.reshape(-1) for part in rows.split([queries, d, d], dim=1)])


# Arguments that change the function: the values that our model computes; absent is always fine.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "learned_absolute"),
    "rotary_percent": (1.0,),
    "normalization": ("RMSNorm", "LayerNorm"),
    "softmax_type": ("vanilla",),
    "glu_linear_offset": (0.0,),
    **dict.fromkeys(
        (
            "multi_latent_attention",
            "apply_layernorm_1p",
            "apply_residual_connection_post_layernorm",
            "squared_relu",
            "quick_geglu",
            "qk_l2_norm",
            "attention_output_gate",
            "moe_shared_expert_gate",
            "moe_apply_probs_on_input",
            "use_mup",
        ),
        (False, None),
    ),
    **dict.fromkeys(
        (
            "no_rope_freq",
            "window_size",
            "experimental_attention_variant",
            "heterogeneous_layers_config_path",
            "heterogeneous_layers_config_encoded_json",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
            "moe_latent_size",
            "activation_func_clamp_value",
        ),
        (None,),
    ),
}
# Arguments and our fields of the same value, with what an argument that is not saved means.
_SAME: dict[str, tuple[str, Any]] = {
    "ffn_hidden_size": ("ffn_hidden_size", None),
    "kv_channels": ("head_dim", None),
    "norm_epsilon": ("norm_eps", 1e-5),
    "rotary_interleaved": ("rope_interleaved", False),
    "qk_layernorm": ("qk_norm", False),
    "init_method_std": ("init_std", 0.02),
    "max_position_embeddings": ("max_positions", None),
    "num_layers": ("num_layers", None),
    "hidden_size": ("hidden_size", None),
    "num_attention_heads": ("num_heads", None),
}
_SAME_MOE: dict[str, tuple[str, Any]] = {
    "num_experts": ("num_experts", None),
    "moe_router_topk": ("top_k", 2),
    "moe_router_score_function": ("router_score", "softmax"),
    "moe_ffn_hidden_size": ("moe_ffn_hidden_size", None),
    "moe_router_enable_expert_bias": ("router_bias", False),
}


def model_config_from_args(
    args: Namespace, rows: int, vocab_size: int | None = None
) -> ModelConfig:
    """Returns the architecture that a checkpoint's arguments describe.

    Args:
        rows: of the stored embedding, with those that pad it.
        vocab_size: tokens; None = as the arguments say, or all rows.

    Raises:
        ValueError: they describe no model, or options that our model does not compute, all of them
            named.
    """
    given = vars(args)
    refused = [
        f"{name} = {given[name]!r}: only {' or '.join(map(repr, values))} is supported"
        for name, values in COMPUTED.items()
        if name in given and given[name] not in values
    ]
    # the tokenizer without a vocabulary has one token more, the end of a document
    if vocab_size is None:
        vocab_size = (given.get("vocab_size") or rows) + (
            given.get("tokenizer_type") == "NullTokenizer"
        )
    if vocab_size > rows:
        refused.append(f"vocab_size = {vocab_size} is more than the {rows} rows of the embedding")
    try:
        fields = _fields(given, refused) | (
            _moe_fields(given, refused) if given.get("num_experts") else {}
        )
        if not refused:
            return from_dict(
                {"model": {"name": "megatron", "vocab_size": vocab_size, **fields}}
            ).model
    except (KeyError, TypeError, ZeroDivisionError, ConfigError) as error:
        refused.append(f"the arguments describe no model: {type(error).__name__} {error}")
    raise ValueError(
        "the saved arguments compute what this model does not:"
        + "".join(f"\n  {x}" for x in refused)
    )


def _fields(given: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    h, heads = given["hidden_size"], given["num_attention_heads"]
    bias = (
        given["add_bias_linear"]
        if "add_bias_linear" in given
        else not given.get("disable_bias_linear", False)
    )
    kind = given.get("position_embedding_type", "learned_absolute")
    rope = kind == "rope" or given.get("use_rotary_position_embeddings", False)
    norm, factor = (
        given.get("normalization", "LayerNorm"),
        given.get("rotary_seq_len_interpolation_factor"),
    )
    scaling: dict[str, Any] = {"type": "linear", "factor": float(factor)} if factor else {}
    if given.get("use_rope_scaling"):  # Llama 3.1, of which only the factor can be set
        scaling = {"type": "llama3", "factor": float(given.get("rope_scaling_factor", 8.0))}
    if given.get("qk_layernorm") and norm != "RMSNorm":
        refused.append(f"qk_layernorm with normalization = {norm!r}: only 'RMSNorm' is supported")
    if bias and given.get("num_experts"):
        refused.append(
            "add_bias_linear = True with num_experts: only experts without biases are supported"
        )
    saved = {field: given.get(name, default) for name, (field, default) in _SAME.items()}
    # the kernel computes the tanh form of GELU
    fused = bias and given.get("bias_gelu_fusion", True)
    gelu = "gelu_tanh" if fused or given.get("openai_gelu") else "gelu"
    return saved | {
        "ffn_hidden_size": saved["ffn_hidden_size"] or 4 * h,
        "num_kv_heads": given["num_query_groups"] if given.get("group_query_attention") else heads,
        "head_dim": saved["head_dim"] or h // heads,
        "norm": "rmsnorm" if norm == "RMSNorm" else "layernorm",
        "norm_eps": given.get("layernorm_epsilon", saved["norm_eps"]),
        "activation": "swiglu" if given.get("swiglu") else gelu,
        "position": "rope" if rope else "learned",
        "rope_theta": float(given.get("rotary_base", 10000)),
        "rope_scaling": scaling,
        "qkv_bias": bias or given.get("add_qkv_bias", False),
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "tie_embeddings": not given.get("untie_embeddings_and_output_weights", False),
    }


def _moe_fields(given: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    pattern, layers = given.get("moe_layer_freq", 1), given["num_layers"]
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(layers)]
    saved = {field: given.get(name, default) for name, (field, default) in _SAME_MOE.items()}
    groups, top = given.get("moe_router_num_groups") or 1, given.get("moe_router_group_topk") or 1
    limited, softmax = top < groups, saved["router_score"] == "softmax"
    before = given.get("moe_router_pre_softmax", False)
    summed = saved["top_k"] // top if limited else 1  # scores of a group
    if summed > 2 or (summed == 2 and softmax and not before):
        refused.append(
            f"moe_router_group_topk = {top} with moe_router_topk = {saved['top_k']}: only groups chosen by "
            "their best score, or by the sum of their two best scores, are supported"
        )
    return saved | {
        "shared_ffn_hidden_size": given.get("moe_shared_expert_intermediate_size") or 0,
        "moe_layers": None if all(pattern) else [i for i, sparse in enumerate(pattern) if sparse],
        "norm_topk_prob": not before if softmax else saved["top_k"] > 1,
        "routed_scaling_factor": float(given.get("moe_router_topk_scaling_factor") or 1.0),
        "num_groups": groups if limited else 1,
        "top_groups": top if limited else 1,
        "group_score": "top2_sum" if summed == 2 else "max",
    }


def megatron_args(model: ModelConfig, dtype: str, seq_len: int, tokenizer: str | None) -> Namespace:
    """Returns the arguments with which Megatron-LM computes our architecture
    (`--use-checkpoint-args`).

    Args:
        dtype: of the weights: fp32 or bf16.
        tokenizer: a file or folder, as Megatron's `--tokenizer-model`; None = none is named.

    Raises:
        ValueError: Megatron-Core's GPT model does not compute it; names the fields.
    """
    bias, tanh, learned = (
        model.mlp_bias,
        model.activation == "gelu_tanh",
        model.position == "learned",
    )
    scaling, rms = model.rope_scaling, model.norm == "rmsnorm"
    args = {name: getattr(model, field) for name, (field, _) in _SAME.items()} | {
        "group_query_attention": model.num_kv_heads != model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "max_position_embeddings": model.max_positions
        if learned
        else max(model.max_positions, seq_len),
        "seq_length": seq_len,
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "add_position_embedding": learned,
        "use_rotary_position_embeddings": False,
        "rotary_percent": 1.0,
        "rotary_base": int(model.rope_theta),
        "use_rope_scaling": scaling.type == "llama3",
        "rope_scaling_factor": scaling.factor if scaling.type == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": int(scaling.factor)
        if scaling.type == "linear"
        else None,
        "add_bias_linear": bias,
        "add_qkv_bias": model.qkv_bias and not bias,
        "swiglu": model.activation == "swiglu",
        "bias_gelu_fusion": tanh and bias,
        "openai_gelu": tanh and not bias,
        "squared_relu": False,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "apply_layernorm_1p": False,
        "normalization": "RMSNorm" if rms else "LayerNorm",
        "layernorm_epsilon": model.norm_eps,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": None,
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 128,
        "tokenizer_model": tokenizer,
        "fp16": False,
        "bf16": dtype == "bf16",
        "ckpt_format": "torch_dist",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    found = Namespace(**args | (_moe_args(model) if model.num_experts else {}))
    back = model_config_from_args(found, model.vocab_size)
    passive = {
        "name",
        "from_hf",
        "max_positions",
        "init_scale_output",
        "moe_layers",
        "first_k_dense",
        "moe_interval",
    }
    passive |= {"rope_theta", "rope_interleaved", "rope_scaling"} if learned else set()
    if not model.num_experts:
        passive |= {
            "moe_ffn_hidden_size",
            "top_k",
            "norm_topk_prob",
            "routed_scaling_factor",
            "router_score",
        }
    if model.top_groups == model.num_groups:
        passive |= {"num_groups", "top_groups", "group_score"}
    wanted = asdict(replace(model, moe_ffn_hidden_size=model.expert_hidden_size)).items()
    differing = [
        f"model.{name} = {value!r} (only {asdict(back)[name]!r})"
        for name, value in wanted
        if name not in passive and asdict(back)[name] != value
    ]
    if differing:
        raise ValueError(
            f"Megatron-Core's GPT model does not compute this one: {'; '.join(differing)}"
        )
    return found


def _moe_args(model: ModelConfig) -> dict[str, Any]:
    sparse, limited = moe_layers(model), model.top_groups < model.num_groups
    return {name: getattr(model, field) for name, (field, _) in _SAME_MOE.items()} | {
        "moe_layer_freq": 1
        if len(sparse) == model.num_layers
        else [int(i in sparse) for i in range(model.num_layers)],
        "moe_ffn_hidden_size": model.expert_hidden_size,
        "moe_grouped_gemm": True,
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size or None,
        "moe_router_pre_softmax": model.router_score == "softmax" and not model.norm_topk_prob,
        "moe_router_topk_scaling_factor": None
        if model.routed_scaling_factor == 1
        else model.routed_scaling_factor,
        "moe_router_num_groups": model.num_groups if limited else None,
        "moe_router_group_topk": model.top_groups if limited else None,
        "moe_token_dispatcher_type": "alltoall",
    }

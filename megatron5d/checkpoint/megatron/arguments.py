"""Arguments saved with a Megatron-LM checkpoint as fields of ModelConfig, and back.

Arguments that our model does not compute are refused by name, and so are arguments of other
releases and of one's own scripts that harmless.py does not know, unless they are off.
"""

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

from megatron5d.checkpoint.canonical_model import differing_fields
from megatron5d.checkpoint.hf.families import Fields
from megatron5d.checkpoint.megatron.harmless import HARMLESS
from megatron5d.config.convert import from_dict
from megatron5d.config.derived import moe_layers
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import ModelConfig

_Args = Mapping[str, Any]
# Arguments that change the function, with the values that our model computes, of a list those of
# its elements; an argument that is absent is always supported.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "learned_absolute"),
    "rotary_percent": (1.0,),
    "normalization": ("RMSNorm", "LayerNorm"),
    "softmax_type": ("vanilla",),
    "glu_linear_offset": (0.0,),
    "moe_router_load_balancing_type": (
        *("aux_loss", "seq_aux_loss", "global_aux_loss", "none", None),
    ),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "rope_type": ("rope", None),
    "spec": ("local", None),  # a layer by other code
    **dict.fromkeys(
        ("mup_width_mult", "mup_embedding_mult", "mup_output_mult", "mup_attn_scale_power"), (1.0,)
    ),
    **dict.fromkeys(
        (
            *("multi_latent_attention", "apply_layernorm_1p", "squared_relu", "quick_geglu"),
            *("apply_residual_connection_post_layernorm", "qk_l2_norm", "attention_output_gate"),
            *("moe_shared_expert_gate", "moe_apply_probs_on_input", "use_mup"),
            *("layernorm_zero_centered_gamma", "moe_router_force_load_balancing"),
            *("enable_mhc_connections", "heterogeneous_block_specs", "is_hybrid_model"),
            *("enable_gpt_oss", "export_qk_l2_norm", "export_moe_apply_probs_on_input"),
            "retro_add_retriever",
        ),
        (False, None),
    ),
    **dict.fromkeys(
        (
            *("no_rope_freq", "window_size", "experimental_attention_variant", "softmax_scale"),
            *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
            *("hybrid_layer_pattern", "hybrid_override_pattern", "moe_latent_size"),
            *("activation_func_clamp_value", "linear_attention_freq", "activation_func"),
            *("moe_router_force_biased", "moe_router_topk_limited_devices"),
            *("mup_base_hidden_size", "mup_base_head_dim", "decoder_num_layers"),
            # rows of gate and up in another order
            *("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"),
        ),
        (None,),
    ),
}
# arguments that act in training only, and have no field in ModelConfig
_TRAINING = (
    *("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor", "moe_input_jitter_eps"),
    *("hidden_dropout", "attention_dropout"),
)
# arguments -> our field of the same value, and the value where the argument is not saved
_SAME_VALUE: dict[str, tuple[str, Any]] = {
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
_SAME_VALUE_MOE: dict[str, tuple[str, Any]] = {
    "num_experts": ("num_experts", None),
    "moe_router_topk": ("top_k", 2),
    "moe_router_score_function": ("router_score", "softmax"),
    "moe_ffn_hidden_size": ("moe_ffn_hidden_size", None),
    "moe_router_enable_expert_bias": ("router_bias", False),
}
# other arguments that are read
_READ = {
    *("use_te_activation_func", "use_transformer_engine_op_fuser"),
    *(*_SAME_VALUE, *_SAME_VALUE_MOE, *_TRAINING),
    *("num_query_groups", "group_query_attention", "layernorm_epsilon", "swiglu"),
    *("add_bias_linear", "disable_bias_linear", "add_qkv_bias", "bias_gelu_fusion", "openai_gelu"),
    *("untie_embeddings_and_output_weights", "use_rotary_position_embeddings", "rotary_base"),
    *("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"),
    *("moe_layer_freq", "moe_router_pre_softmax", "moe_shared_expert_intermediate_size"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"),
}
# names of TransformerConfig for arguments that are read
_ALIASES = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu"}


def model_config_from_args(
    args: Namespace, rows: int, vocab_size: int | None = None, ignored: Collection[str] = ()
) -> ModelConfig:
    """The architecture that a checkpoint's arguments describe.

    Args:
        rows: of the stored embedding, including its padding.
        vocab_size: tokens; None = as the arguments say, or all rows.
        ignored: unknown arguments of which the user says that they do not change the function.

    Raises:
        ValueError: they describe no model, or our model does not compute some of them; names all.
    """
    saved = vars(args)
    unsupported = _unsupported(saved, ignored)
    if vocab_size is None:
        # the tokenizer without a vocabulary has one more token, the end of a document
        end = saved.get("tokenizer_type") == "NullTokenizer"
        vocab_size = (saved.get("vocab_size") or rows) + end
    if vocab_size > rows:
        unsupported.append(f"vocab_size = {vocab_size} exceeds the {rows} rows of the embedding")
    try:
        fields = model_fields(saved, unsupported)
        if not unsupported:
            fields |= {"name": "megatron", "vocab_size": vocab_size}
            return from_dict({"model": fields}).model
    except (KeyError, TypeError, ZeroDivisionError, ConfigError) as error:
        unsupported.append(f"the arguments describe no model: {type(error).__name__} {error}")
    lines = "".join(f"\n  {line}" for line in unsupported)
    raise ValueError(f"the saved arguments compute what this model does not:{lines}")


def _unsupported(saved: _Args, ignored: Collection[str]) -> list[str]:
    """A line for each argument whose value our model does not compute, or may not."""
    lines = []
    for name, value in saved.items():
        if name in SUPPORTED:
            values = SUPPORTED[name]
            elements = value if isinstance(value, list) and value else [value]
            if any(element not in values for element in elements):
                supported = " or ".join(map(repr, values))
                lines.append(f"{name} = {value!r}: only {supported} is supported")
        elif name in _ALIASES:
            argument = _ALIASES[name]
            if value and value != saved.get(argument):
                lines.append(f"{name} = {value!r}, but {argument} = {saved.get(argument)!r}")
        elif value and not (name in _READ or name in ignored or HARMLESS.fullmatch(name)):
            lines.append(
                f"{name} = {value!r} is unknown here and may change what the model computes; "
                f"--ignore-arguments {name} if it does not"
            )
    if not saved.get("swiglu"):
        # TransformerEngine's GELU is the tanh form
        lines += [
            f"{name} = True: only with swiglu = True is it supported"
            for name in ("use_te_activation_func", "use_transformer_engine_op_fuser")
            if saved.get(name)
        ]
    return lines


def training_notes(args: Namespace) -> list[str]:
    """A line for each kind of arguments that act in training and are not taken along."""
    values = {name: value for name in _TRAINING if (value := getattr(args, name, None))}
    notes = []
    factor = values.pop("moe_expert_capacity_factor", 0)
    if factor > 0:  # Megatron-LM reads a negative factor as none
        note = f"moe_expert_capacity_factor = {factor} is not taken along: train with"
        note += f" moe.capacity_factor={factor:g}"
        if getattr(args, "moe_token_drop_policy", "probs") != "probs":
            note += f", which drops by probability, not by {args.moe_token_drop_policy}"
        notes.append(note)
    if values:
        listed = ", ".join(f"{name} = {value}" for name, value in values.items())
        notes.append(f"not taken along, since training here has no counterpart: {listed}")
    return notes


def model_fields(saved: _Args, unsupported: list[str]) -> Fields:
    """Fields of ModelConfig that arguments describe, without the vocabulary.

    Args:
        unsupported: a line is appended for what our model does not compute.
    """
    fields = _fields(saved, unsupported)
    return fields | _moe_fields(saved, unsupported) if saved.get("num_experts") else fields


def _fields(saved: _Args, unsupported: list[str]) -> Fields:
    h, heads = saved["hidden_size"], saved["num_attention_heads"]
    bias = saved.get("add_bias_linear", not saved.get("disable_bias_linear", False))
    norm = saved.get("normalization", "LayerNorm")
    if saved.get("qk_layernorm") and norm != "RMSNorm":
        unsupported.append(
            f"qk_layernorm with normalization = {norm!r}: only 'RMSNorm' is supported"
        )
    if bias and saved.get("num_experts"):
        unsupported.append(
            "add_bias_linear = True with num_experts: only experts without biases are supported"
        )
    # the fused kernel computes the tanh form of GELU
    fused = bias and saved.get("bias_gelu_fusion", True)
    gelu = "gelu_tanh" if fused or saved.get("openai_gelu") else "gelu"
    fields = {field: saved.get(name, default) for name, (field, default) in _SAME_VALUE.items()}
    return fields | {
        "ffn_hidden_size": fields["ffn_hidden_size"] or 4 * h,
        "num_kv_heads": saved["num_query_groups"] if saved.get("group_query_attention") else heads,
        "head_dim": fields["head_dim"] or h // heads,
        "norm": "rmsnorm" if norm == "RMSNorm" else "layernorm",
        "norm_eps": saved.get("layernorm_epsilon", fields["norm_eps"]),
        "activation": "swiglu" if saved.get("swiglu") else gelu,
        "qkv_bias": bias or saved.get("add_qkv_bias", False),
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "tie_embeddings": not saved.get("untie_embeddings_and_output_weights", False),
        **_position_fields(saved),
    }


def _position_fields(saved: _Args) -> Fields:
    rope = saved.get("position_embedding_type", "learned_absolute") == "rope"
    rope = rope or saved.get("use_rotary_position_embeddings", False)
    factor = saved.get("rotary_seq_len_interpolation_factor")
    scaling: Fields = {"type": "linear", "factor": float(factor)} if factor else {}
    if saved.get("use_rope_scaling"):  # Llama 3.1, of which only the factor can be set
        scaling = {"type": "llama3", "factor": float(saved.get("rope_scaling_factor", 8.0))}
    return {
        "position": "rope" if rope else "learned",
        "rope_theta": float(saved.get("rotary_base", 10000)),
        "rope_scaling": scaling,
    }


def _moe_fields(saved: _Args, unsupported: list[str]) -> Fields:
    fields = {field: saved.get(name, default) for name, (field, default) in _SAME_VALUE_MOE.items()}
    pattern, num_layers = saved.get("moe_layer_freq", 1), saved["num_layers"]
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(num_layers)]
    groups = saved.get("moe_router_num_groups") or 1
    top_groups = saved.get("moe_router_group_topk") or 1
    limited, softmax = top_groups < groups, fields["router_score"] == "softmax"
    pre_softmax = saved.get("moe_router_pre_softmax", False)
    summed = fields["top_k"] // top_groups if limited else 1  # scores that rank a group
    if summed > 2 or (summed == 2 and softmax and not pre_softmax):
        unsupported.append(
            f"moe_router_group_topk = {top_groups} with moe_router_topk = {fields['top_k']}: only "
            "groups chosen by their best score, or by the sum of their two best scores, are "
            "supported"
        )
    return fields | {
        "shared_ffn_hidden_size": saved.get("moe_shared_expert_intermediate_size") or 0,
        "moe_layers": None if all(pattern) else [i for i, sparse in enumerate(pattern) if sparse],
        "norm_topk_prob": not pre_softmax if softmax else fields["top_k"] > 1,
        "routed_scaling_factor": float(saved.get("moe_router_topk_scaling_factor") or 1.0),
        "num_groups": groups if limited else 1,
        "top_groups": top_groups if limited else 1,
        "group_score": "top2_sum" if summed == 2 else "max",
    }


def megatron_args(model: ModelConfig, dtype: str, seq_len: int, tokenizer: str | None) -> Namespace:
    """Arguments with which Megatron-LM computes our architecture (`--use-checkpoint-args`).

    Args:
        dtype: of the weights: fp32 or bf16.
        tokenizer: a file or folder, as Megatron's `--tokenizer-model`; None = none is named.

    Raises:
        ValueError: Megatron-Core's GPT model does not compute it; names the fields.
    """
    args = Namespace(
        **_model_args(model, seq_len),
        **_FIXED_ARGS,
        seq_length=seq_len,
        tokenizer_model=tokenizer,
        bf16=dtype == "bf16",
    )
    differing = [
        f"model.{name} = {value!r} (only {other!r})"
        for name, (value, other) in differing_fields(
            model, model_config_from_args(args, model.vocab_size)
        ).items()
    ]
    if differing:
        raise ValueError(
            f"Megatron-Core's GPT model does not compute this one: {'; '.join(differing)}"
        )
    return args


_FIXED_ARGS = {
    "use_rotary_position_embeddings": False,
    "rotary_percent": 1.0,
    "squared_relu": False,
    "apply_layernorm_1p": False,
    "apply_query_key_layer_scaling": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "make_vocab_size_divisible_by": 128,
    "fp16": False,
    "ckpt_format": "torch_dist",
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
}


def _model_args(model: ModelConfig, seq_len: int) -> dict[str, Any]:
    bias, tanh = model.mlp_bias, model.activation == "gelu_tanh"
    learned, scaling = model.position == "learned", model.rope_scaling
    llama3, linear = scaling.type == "llama3", scaling.type == "linear"
    positions = model.max_positions if learned else max(model.max_positions, seq_len)
    args = {name: getattr(model, field) for name, (field, _) in _SAME_VALUE.items()} | {
        "group_query_attention": model.num_kv_heads != model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "max_position_embeddings": positions,
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "add_position_embedding": learned,
        "rotary_base": int(model.rope_theta),
        "use_rope_scaling": llama3,
        "rope_scaling_factor": scaling.factor if llama3 else 8.0,
        "rotary_seq_len_interpolation_factor": int(scaling.factor) if linear else None,
        "add_bias_linear": bias,
        "add_qkv_bias": model.qkv_bias and not bias,
        "swiglu": model.activation == "swiglu",
        "bias_gelu_fusion": tanh and bias,
        "openai_gelu": tanh and not bias,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "layernorm_epsilon": model.norm_eps,
        "num_experts": None,
        "vocab_size": model.vocab_size,
    }
    return args | (_moe_args(model) if model.num_experts else {})


def _moe_args(model: ModelConfig) -> dict[str, Any]:
    sparse, limited = moe_layers(model), model.top_groups < model.num_groups
    pattern = [int(i in sparse) for i in range(model.num_layers)]
    factor = model.routed_scaling_factor
    return {name: getattr(model, field) for name, (field, _) in _SAME_VALUE_MOE.items()} | {
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_ffn_hidden_size": model.expert_hidden_size,
        "moe_grouped_gemm": True,
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size or None,
        "moe_router_pre_softmax": model.router_score == "softmax" and not model.norm_topk_prob,
        "moe_router_topk_scaling_factor": None if factor == 1 else factor,
        "moe_router_num_groups": model.num_groups if limited else None,
        "moe_router_group_topk": model.top_groups if limited else None,
        "moe_token_dispatcher_type": "alltoall",
    }

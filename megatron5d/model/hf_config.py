"""A Hugging Face config.json as fields of our ModelConfig, or a refusal that names every option we do not compute.

Both spellings are read: transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`). What a file leaves
out has the default of the family's own configuration class, as transformers would fill it in. Dropout rates are not
part of the function computed at evaluation and are passed over.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any

from megatron5d.config.schema import ModelConfig, RopeScaling
from megatron5d.model.hf_mla import LATENT, LATENT_EPS, mla_fields
from megatron5d.model.hf_moe import routing_fields

_DECODER_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
_LATENT_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _DECODER_DEFAULTS | {
        "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "head_dim": None,
        "max_position_embeddings": 2048, "mlp_bias": False,
    },
    "qwen3": _DECODER_DEFAULTS | {
        "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128,
        "max_position_embeddings": 32768, "mlp_bias": False, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "layer_types": None,
    },
    "mixtral": _DECODER_DEFAULTS | {
        "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": None,
        "max_position_embeddings": 131072, "mlp_bias": False, "rms_norm_eps": 1e-5, "default_theta": 1e6,
        "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3_moe": _DECODER_DEFAULTS | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32768, "mlp_bias": False,
        "use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1, "mlp_only_layers": None,
        "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
    "deepseek_v2": _DECODER_DEFAULTS | _LATENT_DEFAULTS | {
        "vocab_size": 102400, "intermediate_size": 11008, "max_position_embeddings": 2048, "mlp_bias": False,
        "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None,
        "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_method": "greedy",
        "n_group": None, "topk_group": None,
    },
    "deepseek_v3": _DECODER_DEFAULTS | _LATENT_DEFAULTS | {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096, "mlp_bias": False,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4, "rope_interleave": True, "num_nextn_predict_layers": 1,
    },
    "gpt2": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
# Other spellings that transformers reads.
_ALIASES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
}
GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# Options that change the function: the values that our model computes; absent is always fine.
_DECODER_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
}
_LATENT_COMPUTED: dict[str, tuple[Any, ...]] = _DECODER_COMPUTED | {
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "rms_norm_eps": (LATENT_EPS,),
    "moe_layer_freq": (1,),
}
_COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _DECODER_COMPUTED,
    "qwen3": _DECODER_COMPUTED | {"mlp_bias": (False,)},
    "mixtral": _DECODER_COMPUTED | {"mlp_bias": (False,), "attention_bias": (False,)},
    "qwen3_moe": _DECODER_COMPUTED | {"mlp_bias": (False,)},
    "deepseek_v2": _LATENT_COMPUTED
    | {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),  # transformers never divides; DeepSeek's own code does, and then does not scale
    },
    "deepseek_v3": _LATENT_COMPUTED | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "gpt2": {
        "activation_function": tuple(GELU),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
}


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json with the family's defaults filled in.

    Raises:
        ValueError: no config.json or a damaged one, a model_type that is not one of ours, values of another kind than
            the family's defaults, or two spellings of one key that disagree.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a Hugging Face folder has its architecture there")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not an object of settings")
    family = config.get("model_type")
    if family not in DEFAULTS:
        raise ValueError(f"{path}: model_type = {family!r} is not supported; supported are {', '.join(DEFAULTS)}")
    for other, key in _ALIASES.get(family, {}).items():
        if other in config and config.setdefault(key, config[other]) != config.pop(other):
            raise ValueError(f"{path}: {other} and {key} mean the same and differ")
    config = DEFAULTS[family] | config
    if wrong := [*_of_another_kind(config, DEFAULTS[family]), *_not_positive(config)]:
        raise ValueError(f"{path} ({family}) describes no model: {'; '.join(wrong)}")
    return config


def _of_another_kind(config: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """Settings that are neither null nor of their default's type; a whole number is a float, too."""
    kinds = {key: type(value) for key, value in defaults.items() if value is not None}
    return [
        f"{key} = {config[key]!r} is no {kind.__name__}"
        for key, kind in kinds.items()
        if config[key] is not None and type(config[key]) not in ((int, float) if kind is float else (kind,))
    ]


def _not_positive(config: dict[str, Any]) -> list[str]:
    sizes = (
        "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "n_embd", "n_head", "n_layer",
    )  # fmt: skip
    return [
        f"{key} = {config[key]!r} is no number above 0"
        for key in sizes
        if key in config and not (isinstance(config[key], int) and config[key] > 0)
    ]


def model_config_from_hf(folder: str | Path) -> dict[str, Any]:
    """The fields of ModelConfig that compute what the folder's model computes.

    Args:
        folder: holds config.json.

    Returns:
        Fields of ModelConfig by name, all that describe the function, as plain values like those of a YAML file.

    Raises:
        ValueError: an unknown family, or options that our model does not compute, all of them named.
    """
    config = read_hf_config(folder)
    family = config["model_type"]
    refused = [
        f"{key} = {config[key]!r}: only {' or '.join(map(repr, values))} is supported"
        for key, values in _COMPUTED[family].items()
        if key in config and config[key] not in values
    ]
    fields = (_gpt2 if family == "gpt2" else _decoder)(config, refused)
    if refused:
        lines = "".join(f"\n  {line}" for line in refused)
        raise ValueError(f"{Path(folder) / 'config.json'} ({family}) computes what this model does not:{lines}")
    return {"name": Path(folder).resolve().name, **fields}


def read_model_config(folder: str | Path) -> ModelConfig:
    """`model_config_from_hf` as the typed object; raises what it raises."""
    fields = model_config_from_hf(folder)
    scaling = RopeScaling(**fields.pop("rope_scaling", {}))
    return ModelConfig(**fields, rope_scaling=scaling)


def _decoder(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    """Llama; Qwen3, which adds norms on q and k; DeepSeek, with latents; their sliding windows and experts."""
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    theta, scaling = _rope(config, refused)
    if config["model_type"] in LATENT:
        attention = mla_fields(config, refused)
    else:
        attention = {
            "num_kv_heads": config["num_key_value_heads"] or num_heads,
            "head_dim": config["head_dim"] or hidden_size // num_heads,
            "rope_interleaved": False,
        }
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden_size,
        "ffn_hidden_size": config["intermediate_size"],
        "num_heads": num_heads,
        **attention,
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "norm": "rmsnorm",
        "norm_eps": config["rms_norm_eps"],
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": theta,
        "rope_scaling": asdict(scaling),
        "qk_norm": config["model_type"] in ("qwen3", "qwen3_moe"),
        "qkv_bias": config["attention_bias"],
        "attention_out_bias": config["attention_bias"],
        "mlp_bias": config["mlp_bias"],
        "tie_embeddings": config["tie_word_embeddings"],
        "attention_window": _window(config, refused),
        "init_std": config["initializer_range"],
        **routing_fields(config, refused),
    }


def _gpt2(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    hidden_size, num_heads = config["n_embd"], config["n_head"]
    if hidden_size % num_heads:
        refused.append(f"n_embd = {hidden_size} is not divisible by n_head = {num_heads}")
    return {
        "num_layers": config["n_layer"],
        "hidden_size": hidden_size,
        "ffn_hidden_size": config["n_inner"] or 4 * hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "vocab_size": config["vocab_size"],
        "max_positions": config["n_positions"],
        "norm": "layernorm",
        "norm_eps": config["layer_norm_epsilon"],
        "activation": GELU.get(config["activation_function"]),
        "position": "learned",
        "qk_norm": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": config["tie_word_embeddings"],
        "attention_window": None,
        "init_std": config["initializer_range"],
    }


def _window(config: dict[str, Any], refused: list[str]) -> int | None:
    """The sliding window: ours is the same in all layers; only Qwen3's may not be."""
    if "sliding_window" not in DEFAULTS[config["model_type"]]:
        return None
    window = config["sliding_window"] if config.get("use_sliding_window", True) else None
    if config["model_type"] != "qwen3":
        return window
    first = config["max_window_layers"] if window is not None else config["num_hidden_layers"]
    kinds = config["layer_types"] or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(config["num_hidden_layers"])
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"} or window is None:
        refused.append(
            f"layer_types = {sorted(set(kinds))} with sliding_window = {window}, "
            f"max_window_layers = {config['max_window_layers']}: all layers must see the same; "
            "set max_window_layers to 0 (all slide) or use_sliding_window to false"
        )
    return window


def _rope(config: dict[str, Any], refused: list[str]) -> tuple[float, RopeScaling]:
    """Theta and scaling from either spelling; where a file has both they must agree."""
    new, old = _flat(config.get("rope_parameters"), refused), _flat(config.get("rope_scaling"), refused)
    thetas = [rope.pop("rope_theta", None) for rope in (new, old)] + [config.get("rope_theta")]
    thetas = [theta for theta in thetas if theta is not None] or [config.get("default_theta", 10000.0)]
    if len(set(thetas)) > 1:
        refused.append(f"rope_theta is given as {' and as '.join(map(str, thetas))}")
    theta = float(thetas[0])
    if new and old and new != old:
        refused.append(f"rope_parameters {new} and rope_scaling {old} disagree")
    rope = new or old
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        refused.append(f"partial_rotary_factor = {rope['partial_rotary_factor']}: only 1.0 is supported")
    if kind == "default":
        return theta, RopeScaling()
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}
    if kind not in needed:
        refused.append(f"rope_type = {kind!r}: only default, {', '.join(needed)} are supported")
        return theta, RopeScaling()
    if absent := [key for key in needed[kind] if rope.get(key) is None]:
        refused.append(f"rope_type = {kind!r} without {', '.join(absent)}")
        return theta, RopeScaling()
    if kind != "yarn" and rope.get("mscale_all_dim") and config["model_type"] in LATENT:
        refused.append(f"mscale_all_dim = {rope['mscale_all_dim']} with rope_type = {kind!r}: only with yarn")
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = original or config["max_position_embeddings"]
    if kind == "linear":
        return theta, RopeScaling(type=kind, factor=float(rope["factor"]))
    if kind == "yarn":
        return theta, _yarn(rope, config["max_position_embeddings"], original, refused)
    frequencies = {key: float(rope[key]) for key in needed[kind]}
    return theta, RopeScaling(type=kind, original_max_positions=original, **frequencies)


def _flat(rope: dict[str, Any] | None, refused: list[str]) -> dict[str, Any]:
    """One dict of rope settings; transformers 5 may nest one per kind of layer, which must then be equal."""
    if not isinstance(rope, dict | None):
        refused.append(f"rope settings {rope!r}: only an object of them is supported")
        return {}
    rope = dict(rope or {})
    nested = [value for value in rope.values() if isinstance(value, dict)]
    if nested:
        if any(value != nested[0] for value in nested):
            refused.append(f"rope_parameters differ between kinds of layers: {rope}")
        rope = dict(nested[0])
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
        del rope["type"]
    for key in [key for key in rope if key not in ("rope_type", "truncate")]:
        if not isinstance(rope[key], int | float | list | None):
            refused.append(f"rope {key} = {rope.pop(key)!r}: only numbers are supported")
    return rope


def _yarn(rope: dict[str, Any], max_positions: int, original: int, refused: list[str]) -> RopeScaling:
    """YaRN (arXiv:2309.00071); mscale counts only together with mscale_all_dim, which also scales latent attention."""
    if not rope.get("truncate", True):
        refused.append("rope_parameters.truncate = false: only yarn ranges rounded to whole dims are supported")
    factor = float(rope.get("factor") or max_positions / original)
    attention_factor = rope.get("attention_factor")
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if attention_factor is None and mscale_all_dim and not mscale:
        attention_factor = 0.1 * log(max(factor, 1.0)) + 1
    return RopeScaling(
        type="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=attention_factor,
        mscale=float(mscale) if mscale and mscale_all_dim else 1.0,
        mscale_all_dim=float(mscale_all_dim or 0.0),
    )

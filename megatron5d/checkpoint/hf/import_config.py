"""A Hugging Face config.json as fields of our ModelConfig, or a refusal that names every option we do not compute.

Both spellings are read: transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`). What a file leaves
out has the family's default (families.py). Dropout rates are not part of the function computed at evaluation and are
passed over.
"""

from __future__ import annotations

from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any

from megatron5d.checkpoint.hf.families import ALIASES, COMPUTED, DEFAULTS, GELU, WINDOW_BY_LAYER
from megatron5d.checkpoint.hf.moe_mla import LATENT, mla_fields, routing_fields
from megatron5d.checkpoint.hf.safetensors_folder import BLOCK
from megatron5d.config.convert import from_dict
from megatron5d.config.json_file import parse_json
from megatron5d.config.schema import ModelConfig, RopeScaling


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
        config = parse_json(path.read_bytes(), object)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not an object of settings")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in DEFAULTS:
        raise ValueError(f"{path}: model_type = {family!r} is not supported; supported are {', '.join(DEFAULTS)}")
    for other, key in ALIASES.get(family, {}).items():
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
        for key, values in COMPUTED[family].items()
        if key in config and config[key] not in values
    ] + _unknown_quantisation(config)
    fields = (_gpt2 if family == "gpt2" else _decoder)(config, refused)
    if refused:
        lines = "".join(f"\n  {line}" for line in refused)
        raise ValueError(f"{Path(folder) / 'config.json'} ({family}) computes what this model does not:{lines}")
    return {"name": Path(folder).resolve().name, **fields}


def _unknown_quantisation(config: dict[str, Any]) -> list[str]:
    """What is not as in releases in 8 bits that checkpoint/hf/safetensors_folder.py reads; null is a folder without."""
    given = config.get("quantization_config")
    if given is None:
        return []
    if not isinstance(given, dict):
        return [f"quantization_config = {given!r}: only an object of settings is supported"]
    wanted = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    found = {"fmt": "e4m3"} | given
    return [
        f"quantization_config.{key} = {found.get(key)!r}: only {value!r} is supported"
        for key, value in wanted.items()
        if found.get(key) != value
    ]


def read_model_config(folder: str | Path) -> ModelConfig:
    """`model_config_from_hf` as the typed object; raises what it raises, and ValueError for a field of another type."""
    return from_dict({"model": model_config_from_hf(folder)}).model


def _decoder(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    """Llama; Qwen2 and Qwen3, with biases or norms on q and k; DeepSeek, with latents; their windows and experts."""
    hidden_size, num_heads, family = config["hidden_size"], config["num_attention_heads"], config["model_type"]
    theta, scaling = _rope(config, refused)
    if family == "phi3" and scaling.type != "none":
        refused.append(f"rope_type = {scaling.type!r}: transformers makes longrope of it, which is not supported")
    if family in LATENT:
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
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "qkv_bias": family == "qwen2" or config["attention_bias"],
        "attention_out_bias": family != "qwen2" and config["attention_bias"],
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
    """The sliding window: ours is the same in all layers; only those of dense Qwen may not be."""
    if "sliding_window" not in DEFAULTS[config["model_type"]]:
        return None
    window = config["sliding_window"] if config.get("use_sliding_window", True) else None
    if config["model_type"] not in WINDOW_BY_LAYER:
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
    if any(theta != thetas[0] for theta in thetas):
        refused.append(f"rope_theta is given as {' and as '.join(map(str, thetas))}")
    if not isinstance(thetas[0], (int, float)):
        refused.append(f"rope_theta = {thetas[0]!r}: only a number is supported")
        return 0.0, RopeScaling()
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

"""A Hugging Face config.json as fields of our ModelConfig, or a refusal that names every option we
do not compute.

Both spellings are read: transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
What a file leaves out has the family's default (families.py). Dropout rates are not part of the
function computed at evaluation and are passed over.
"""

from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any

from megatron5d.checkpoint.hf import families
from megatron5d.checkpoint.hf.files import read_json
from megatron5d.checkpoint.hf.moe_mla import LATENT, mla_fields, routing_fields
from megatron5d.checkpoint.hf.safetensors_folder import unsupported_quantization
from megatron5d.config.convert import from_dict
from megatron5d.config.schema import Config, ModelConfig, RopeScaling


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """Returns the folder's config.json with the family's defaults filled in.

    Raises ValueError: no config.json or a damaged one, a model_type that is not one of ours, values
    of another kind than the family's defaults, or two spellings of one key that disagree.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        told = "a Hugging Face folder has its architecture there"
        if not path.parent.exists():
            told = "nothing is downloaded here; a model becomes a folder by `hf download NAME --local-dir DIR`"
        raise ValueError(f"{path} does not exist: {told}")
    config = read_json(path)
    # beside a vision tower
    if config.get("model_type") == "gemma3" and isinstance(config.get("text_config"), dict):
        config = config["text_config"] | {"model_type": "gemma3_text"}
    family = config["model_type"] = families.RENAMED.get(
        str(config.get("model_type")), config.get("model_type")
    )
    if not isinstance(family, str) or family not in families.DEFAULTS:
        known = ", ".join([*families.DEFAULTS, *families.RENAMED, "gemma3"])
        raise ValueError(f"{path}: model_type = {family!r} is not supported; supported are {known}")
    for other, key in families.ALIASES.get(family, {}).items():
        if other in config and config.setdefault(key, config[other]) != config.pop(other):
            raise ValueError(f"{path}: {other} and {key} mean the same and differ")
    config = families.DEFAULTS[family] | config
    if wrong := [*_of_another_kind(config, families.DEFAULTS[family]), *_not_positive(config)]:
        raise ValueError(f"{path} ({family}) describes no model: {'; '.join(wrong)}")
    return config


def _of_another_kind(config: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """Settings that are neither null nor of their default's type; a whole number is a float,
    too."""
    kinds = {key: type(value) for key, value in defaults.items() if value is not None}
    kinds |= {
        key: list
        for key in ("layer_types", "mlp_layer_types", "mlp_only_layers")
        if key in defaults
    }
    return [
        f"{key} = {config[key]!r} is no {kind.__name__}"
        for key, kind in kinds.items()
        if config[key] is not None
        and type(config[key]) not in ((int, float) if kind is float else (kind,))
    ]


def _not_positive(config: dict[str, Any]) -> list[str]:
    """Returns sizes that are no sizes, or that no folder of weights can have: such tables would
    never end."""
    sizes = (
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
        "n_embd",
        "n_head",
        "n_layer",
    )
    wrong = [
        f"{key} = {config[key]!r} is no number above 0"
        for key in sizes
        if key in config and not (isinstance(config[key], int) and config[key] > 0)
    ]
    experts, layers = (
        ("num_local_experts", "n_routed_experts"),
        ("num_hidden_layers", "n_layer", "num_nextn_predict_layers"),
    )
    counts = [[(key, config.get(key)) for key in keys] for keys in (experts, layers)]
    (most_experts, e), (most_layers, n) = (
        max(
            ((key, count) for key, count in found if isinstance(count, int)),
            key=lambda each: each[1],
            default=("", 1),
        )
        for found in counts
    )
    if max(e, 1) * n > _MOST_TENSORS:
        told = f"{most_layers} = {n}" + (f" times {most_experts} = {e}" if e > 1 else "")
        wrong.append(f"{told} is more than the {_MOST_TENSORS:,} layers and experts that are read")
    return wrong


_MOST_TENSORS = 1_000_000


def token_source(config: Config) -> Path | None:
    """Returns the file or folder that says what the tokens of a run mean; None where its
    configuration names none."""
    named = config.data.tokenizer or config.model.from_hf or config.init.from_hf
    return None if named is None else Path(named)


def token_ids(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what a Hugging Face folder says about the ids of special tokens: in config.json, and
    in generation_config.json.

    Returns the former's `bos_token_id`, `eos_token_id` and `pad_token_id`, those that are there or,
    beside a vision tower, in its `text_config`; the whole latter.
    """
    config, generation = (
        read_json(path) if (path := Path(folder) / name).is_file() else {}
        for name in ("config.json", "generation_config.json")
    )
    inner = config.get("text_config")
    config = (inner if isinstance(inner, dict) else {}) | config
    return {f"{k}_token_id": config.get(f"{k}_token_id") for k in ("bos", "eos", "pad")}, generation


def end_tokens(folder: str | Path) -> list[int]:
    """Returns every token that ends a text by generation_config.json, or by config.json."""
    named = [settings.get("eos_token_id") for settings in reversed(token_ids(folder))]
    ids = [i for each in named for i in (each if isinstance(each, list) else [each])]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int)))


def model_config_from_hf(folder: str | Path) -> dict[str, Any]:
    """Returns the fields of ModelConfig that compute what the folder's model computes.

    Returns fields of ModelConfig by name, all that describe the function, as plain values like
    those of a YAML file. Raises ValueError: an unknown family, or options that our model does not
    compute, all of them named.
    """
    config = read_hf_config(folder)
    family = config["model_type"]
    refused = [
        f"{key} = {config[key]!r}: only {' or '.join(map(repr, values))} is supported"
        for key, values in families.COMPUTED[family].items()
        if key in config and config[key] not in values
    ] + unsupported_quantization(config)
    fields = {"gpt2": _gpt2, "gpt_neox": _neox}.get(family, _decoder)(config, refused)
    if refused:
        lines = "".join(f"\n  {line}" for line in refused)
        raise ValueError(
            f"{Path(folder) / 'config.json'} ({family}) computes what this model does not:{lines}"
        )
    same = {ours: config[theirs] for ours, theirs in families.SAME[family].items()}
    return {"name": Path(folder).resolve().name, **same, **fields}


def read_model_config(folder: str | Path) -> ModelConfig:
    """Returns `model_config_from_hf` as the typed object. Raises ValueError as it does, or for a
    wrong type."""
    return from_dict({"model": model_config_from_hf(folder)}).model


def _decoder(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    """Returns Llama, and what differs by options alone: biases, norms, latents, windows,
    experts."""
    hidden_size, num_heads, family = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["model_type"],
    )
    local = _local_rope_base(config, refused) if family == "gemma3_text" else None
    theta, scaling = _rope(config, refused)
    if family == "phi3" and scaling.type != "none":
        refused.append(
            f"rope_type = {scaling.type!r}: transformers makes longrope of it, which is not supported"
        )
    if family in LATENT:
        attention = mla_fields(config, refused)
    else:
        attention = {
            "num_kv_heads": config["num_key_value_heads"] or num_heads,
            "head_dim": config["head_dim"] or hidden_size // num_heads,
            "rope_interleaved": False,
            "rotary_percent": _rotary_share(config),
        }
    windows = _windows(config, refused)
    biased = config.get("qkv_bias", family == "qwen2" or config["attention_bias"])
    return {
        **attention,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": theta,
        "rope_scaling": asdict(scaling),
        "qk_norm": family in families.QK_NORM or config.get("use_qk_norm", False),
        "qk_norm_all_heads": family == "olmo2",
        "block_norm": "post" if family == "olmo2" else "pre",
        "qkv_bias": biased,
        "attention_out_bias": config.get(
            "attention_out_bias", biased and family not in ("qwen2", "qwen2_moe", "glm4_moe")
        ),
        "mlp_bias": config["mlp_bias"],
        **windows,
        **routing_fields(config, refused),
        **(_gemma(config) if family in families.GEMMA else {}),
        **({"window_rope_theta": local if windows["attention_window"] else None} if local else {}),
        **(
            {"activation": "swiglu_clamped", "attention_sinks": True} if family == "gpt_oss" else {}
        ),
    }


def _gemma(config: dict[str, Any]) -> dict[str, Any]:
    fields = {
        "norm_zero_centered": True,
        "activation": "geglu_tanh",
        "embedding_scale": config["hidden_size"] ** 0.5,
    }
    if config["model_type"] == "gemma":
        return fields
    return fields | {
        "block_norm": "both",
        "query_pre_attn_scalar": config["query_pre_attn_scalar"],
        "attention_softcap": config["attn_logit_softcapping"] or 0.0,
        "logit_softcap": config["final_logit_softcapping"] or 0.0,
    }


def _gpt2(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    hidden_size, num_heads = config["n_embd"], config["n_head"]
    if hidden_size % num_heads:
        refused.append(f"n_embd = {hidden_size} is not divisible by n_head = {num_heads}")
    return {
        "ffn_hidden_size": config["n_inner"] or 4 * hidden_size,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "norm": "layernorm",
        "activation": families.GELU.get(config["activation_function"]),
        "position": "learned",
        "qk_norm": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "attention_window": None,
    }


def _neox(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    if hidden_size % num_heads:
        refused.append(
            f"hidden_size = {hidden_size} is not divisible by num_attention_heads = {num_heads}"
        )
    theta, scaling = _rope(config, refused)
    head_dim = hidden_size // num_heads
    return {
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "norm": "layernorm",
        "activation": families.GELU.get(config["hidden_act"]),
        "position": "rope",
        "rope_theta": theta,
        "rope_scaling": asdict(scaling),
        "rope_interleaved": False,
        "rotary_percent": int(head_dim * _rotary_share(config)) / head_dim,
        "parallel_block": "two_norms" if config["use_parallel_residual"] else "none",
        "qk_norm": False,
        "qkv_bias": config["attention_bias"],
        "attention_out_bias": config["attention_bias"],
        "mlp_bias": True,
        "attention_window": None,
    }


def _rotary_share(config: dict[str, Any]) -> float:
    """Returns the share of a head's features that are rotated, in either spelling."""
    rope = config.get("rope_parameters") or {}
    return float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)


def _windows(config: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    """Returns the sliding window, and the layers that have it; None = all."""
    if "sliding_window" not in families.DEFAULTS[config["model_type"]]:
        return {"attention_window": None}
    window = config["sliding_window"] if config.get("use_sliding_window", True) else None
    if config["model_type"] not in families.WINDOW_BY_LAYER:
        return {"attention_window": window}
    layers = range(config["num_hidden_layers"])
    first = config.get("max_window_layers", len(layers))
    # in some families the even layers below `first` slide; in others those from there on
    alternates = config["model_type"] in ("qwen2_moe", "gemma2", "gpt_oss")
    slides = [i % 2 == 0 and i < first if alternates else i >= first for i in layers]
    if config["model_type"] == "gemma3_text":
        slides = [bool((i + 1) % (config["sliding_window_pattern"] or 6)) for i in layers]
    kinds = config["layer_types"] or [
        "sliding_attention" if window is not None and slides[i] else "full_attention"
        for i in layers
    ]
    if len(kinds) != len(layers):
        refused.append(f"layer_types has {len(kinds)} layers, num_hidden_layers = {len(layers)}")
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        refused.append(
            f"layer_types has {', '.join(unknown)}: only sliding_attention and full_attention are supported"
        )
    windowed = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if windowed and window is None:
        refused.append(
            "layer_types has sliding_attention without a sliding_window; set use_sliding_window to true"
        )
    return {
        "attention_window": window if windowed else None,
        "window_layers": windowed if 0 < len(windowed) < len(kinds) else None,
    }


def _rope(config: dict[str, Any], refused: list[str]) -> tuple[float, RopeScaling]:
    """Returns Theta and scaling from either spelling; where a file has both they must agree."""
    new, old = (
        _flat(config.get("rope_parameters"), refused),
        _flat(config.get("rope_scaling"), refused),
    )
    thetas = [rope.pop("rope_theta", None) for rope in (new, old)] + [config.get("rope_theta")]
    thetas = [theta for theta in thetas if theta is not None] or [
        config.get("default_theta", 10000.0)
    ]
    if any(theta != thetas[0] for theta in thetas):
        refused.append(f"rope_theta is given as {' and as '.join(map(str, thetas))}")
    if not isinstance(thetas[0], (int, float)):
        refused.append(f"rope_theta = {thetas[0]!r}: only a number is supported")
        return 0.0, RopeScaling()
    theta = float(thetas[0])
    if new and old and new != old:
        refused.append(f"rope_parameters {new} and rope_scaling {old} disagree")
    rope = new or old
    if config["model_type"] == "gpt_oss" and not any(
        config.get(key) for key in ("rope_parameters", "rope_scaling")
    ):
        rope = families.GPT_OSS_YARN
    kind = rope.get("rope_type", "default")
    if (
        rope.get("partial_rotary_factor", 1.0) != 1.0
        and config["model_type"] not in families.PARTLY_ROTATED
    ):
        refused.append(
            f"partial_rotary_factor = {rope['partial_rotary_factor']}: only 1.0 is supported"
        )
    if kind == "default":
        return theta, RopeScaling()
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": (),
    }
    if kind not in needed:
        refused.append(f"rope_type = {kind!r}: only default, {', '.join(needed)} are supported")
        return theta, RopeScaling()
    if absent := [key for key in needed[kind] if rope.get(key) is None]:
        refused.append(f"rope_type = {kind!r} without {', '.join(absent)}")
        return theta, RopeScaling()
    if kind != "yarn" and rope.get("mscale_all_dim") and config["model_type"] in LATENT:
        refused.append(
            f"mscale_all_dim = {rope['mscale_all_dim']} with rope_type = {kind!r}: only with yarn"
        )
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings"
    )
    original = original or config["max_position_embeddings"]
    if kind == "linear":
        return theta, RopeScaling(type=kind, factor=float(rope["factor"]))
    if kind == "yarn":
        return theta, _yarn(rope, config["max_position_embeddings"], original)
    frequencies: dict[str, Any] = {key: float(rope[key]) for key in needed[kind]}
    return theta, RopeScaling(type=kind, original_max_positions=original, **frequencies)


def _local_rope_base(config: dict[str, Any], refused: list[str]) -> float:
    """Returns the base in Gemma 3's sliding layers, and leaves the other layers' settings in
    `config`."""
    by_layer = config.get("rope_parameters") or {}
    if not isinstance(by_layer, dict) or any(
        not isinstance(each, dict) for each in by_layer.values()
    ):
        refused.append(
            f"rope_parameters = {by_layer!r}: only full_attention's and sliding_attention's are supported"
        )
        return 0.0
    if (local := by_layer.get("sliding_attention", {})).get("rope_type", "default") != "default":
        refused.append(
            f"rope_type = {local['rope_type']!r} of sliding_attention: only default is supported"
        )
    config["rope_parameters"] = by_layer.get("full_attention")
    return local.get("rope_theta") or config["rope_local_base_freq"]


def _flat(rope: dict[str, Any] | None, refused: list[str]) -> dict[str, Any]:
    """Returns one dict of rope settings; transformers 5 may nest one per kind of layer, which must
    then be equal."""
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


def _yarn(rope: dict[str, Any], max_positions: int, original: int) -> RopeScaling:
    """Returns YaRN (arXiv:2309.00071); mscale counts only together with mscale_all_dim."""
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
        truncate=bool(rope.get("truncate", True)),
    )

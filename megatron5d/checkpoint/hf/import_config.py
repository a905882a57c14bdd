"""Reads a Hugging Face config.json as fields of ModelConfig.

Settings that our model does not compute are refused, all of them in one message. Dropout rates are
ignored: they do not change the function computed at evaluation.
"""

from math import prod
from pathlib import Path
from typing import Any

from megatron5d.checkpoint.hf import families
from megatron5d.checkpoint.hf.families import Fields, Settings
from megatron5d.checkpoint.hf.files import read_json
from megatron5d.checkpoint.hf.moe_mla import mla_fields, routing_fields
from megatron5d.checkpoint.hf.rope_settings import rope_fields, rotary_percent, window_rope_theta
from megatron5d.checkpoint.hf.safetensors_folder import unsupported_quantization
from megatron5d.config.convert import from_dict
from megatron5d.config.schema import Config, ModelConfig

# settings that count layers and experts, whose product is limited
_COUNTS = (
    *("num_hidden_layers", "n_layer", "num_nextn_predict_layers"),
    *("num_local_experts", "n_routed_experts"),
)
_MAX_TENSORS = 1_000_000


def read_hf_config(folder: str | Path) -> Settings:
    """Reads a folder's config.json and fills in the family's defaults.

    Raises:
        ValueError: config.json is missing or damaged, its model_type is not supported, a value has
            another type than the family's default, or two spellings of a key disagree.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        hint = "a Hugging Face folder has its architecture there"
        if not path.parent.exists():
            hint = "download the model first: `hf download NAME --local-dir DIR`"
        raise ValueError(f"{path} does not exist: {hint}")
    config = read_json(path)
    # the language model beside a vision tower
    if config.get("model_type") == "gemma3" and isinstance(config.get("text_config"), dict):
        config = config["text_config"] | {"model_type": "gemma3_text"}
    model_type = config.get("model_type")
    family = families.RENAMED.get(str(model_type), model_type)
    if not isinstance(family, str) or family not in families.DEFAULTS:
        known = ", ".join([*families.DEFAULTS, *families.RENAMED, "gemma3"])
        raise ValueError(f"{path}: model_type = {family!r} is not supported; supported are {known}")
    try:
        config = with_defaults(config, family)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if wrong := [*_wrong_types(config, families.DEFAULTS[family]), *_impossible_sizes(config)]:
        raise ValueError(f"{path} ({family}) describes no model: {'; '.join(wrong)}")
    return config


def with_defaults(config: Settings, family: str) -> Settings:
    """Settings of a family in one spelling, with the defaults of those that are absent.

    Raises:
        ValueError: two spellings of a key disagree.
    """
    config = config | {"model_type": family}
    for alias, key in families.ALIASES.get(family, {}).items():
        if alias in config and config.setdefault(key, config[alias]) != config.pop(alias):
            raise ValueError(f"{alias} and {key} mean the same and differ")
    return families.DEFAULTS[family] | config


def _wrong_types(config: Settings, defaults: Settings) -> list[str]:
    """Settings that are neither null nor of their default's type; an integer is also a float."""
    types = {key: type(value) for key, value in defaults.items() if value is not None}
    lists = ("layer_types", "mlp_layer_types", "mlp_only_layers")
    types |= {key: list for key in lists if key in defaults}
    return [
        f"{key} = {config[key]!r} is no {expected.__name__}"
        for key, expected in types.items()
        if config[key] is not None
        and type(config[key]) not in ((int, float) if expected is float else (expected,))
    ]


def _impossible_sizes(config: Settings) -> list[str]:
    """Sizes that no folder of weights can have: the table of their tensors would never end."""
    sizes = (
        *("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"),
        *("n_embd", "n_head", "n_layer"),
    )
    wrong = [
        f"{key} = {config[key]!r} is no number above 0"
        for key in sizes
        if key in config and not (isinstance(config[key], int) and config[key] > 0)
    ]
    counts = {key: config[key] for key in _COUNTS if isinstance(config.get(key), int)}
    if prod(max(count, 1) for count in counts.values()) > _MAX_TENSORS:
        product = " times ".join(f"{key} = {count}" for key, count in counts.items() if count > 1)
        wrong.append(f"{product} exceeds the limit of {_MAX_TENSORS:,} layers and experts")
    return wrong


def token_source(config: Config) -> Path | None:
    """File or folder with the run's tokenizer; None where its configuration names none."""
    source = config.data.tokenizer or config.model.from_hf or config.init.from_hf
    return None if source is None else Path(source)


def token_ids(folder: str | Path) -> tuple[Settings, Settings]:
    """Ids of special tokens in a Hugging Face folder.

    Returns:
        `bos_token_id`, `eos_token_id` and `pad_token_id` of config.json, or of its `text_config`
        beside a vision tower; and all of generation_config.json.
    """
    config, generation = (
        read_json(path) if (path := Path(folder) / name).is_file() else {}
        for name in ("config.json", "generation_config.json")
    )
    text_config = config.get("text_config")
    config = (text_config if isinstance(text_config, dict) else {}) | config
    return {f"{k}_token_id": config.get(f"{k}_token_id") for k in ("bos", "eos", "pad")}, generation


def end_tokens(folder: str | Path) -> list[int]:
    """Every token that ends a text, by generation_config.json or config.json."""
    ids: list[Any] = []
    for settings in reversed(token_ids(folder)):
        end = settings.get("eos_token_id")
        ids += end if isinstance(end, list) else [end]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int)))


def model_config_from_hf(folder: str | Path) -> Fields:
    """Fields of ModelConfig that compute what the folder's model computes.

    Returns:
        All fields that determine the function, by name, as plain values like those of a YAML file.

    Raises:
        ValueError: the family is unknown, or our model does not compute some settings; names them.
    """
    config = read_hf_config(folder)
    fields, unsupported = model_fields(config)
    if unsupported:
        lines = "".join(f"\n  {line}" for line in unsupported)
        raise ValueError(
            f"{Path(folder) / 'config.json'} ({config['model_type']}) computes what this model "
            f"does not:{lines}"
        )
    return {"name": Path(folder).resolve().name, **fields}


def read_model_config(folder: str | Path) -> ModelConfig:
    """Architecture of a Hugging Face folder.

    Raises:
        ValueError: as `model_config_from_hf`, or a field has a wrong type.
    """
    return from_dict({"model": model_config_from_hf(folder)}).model


def model_fields(config: Settings) -> tuple[Fields, list[str]]:
    """Fields of ModelConfig for settings with their defaults, and a line for each setting that our
    model does not compute."""
    family = config["model_type"]
    unsupported = [
        f"{key} = {config[key]!r}: only {' or '.join(map(repr, values))} is supported"
        for key, values in families.SUPPORTED[family].items()
        if key in config and config[key] not in values
    ] + unsupported_quantization(config)
    fields = {"gpt2": _gpt2, "gpt_neox": _neox}.get(family, _decoder)(config, unsupported)
    same = {field: config[key] for field, key in families.SAME_VALUE[family].items()}
    return same | fields, unsupported


def _decoder(config: Settings, unsupported: list[str]) -> Fields:
    """Families like Llama, which differ by biases, norms, latents, windows and experts."""
    family, num_heads = config["model_type"], config["num_attention_heads"]
    window_theta = window_rope_theta(config, unsupported) if family == "gemma3_text" else None
    rope = rope_fields(config, unsupported)
    scaling = rope["rope_scaling"]["type"]
    if family == "phi3" and scaling != "none":
        unsupported.append(
            f"rope_type = {scaling!r}: transformers makes longrope of it, which is not supported"
        )
    window = _window(config, unsupported)
    qkv_bias = config.get("qkv_bias", family == "qwen2" or config["attention_bias"])
    out_bias = qkv_bias and family not in ("qwen2", "qwen2_moe", "glm4_moe")
    fields = {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        **rope,
        "qk_norm": family in families.QK_NORM or config.get("use_qk_norm", False),
        "qk_norm_all_heads": family == "olmo2",
        "block_norm": "post" if family == "olmo2" else "pre",
        "qkv_bias": qkv_bias,
        "attention_out_bias": config.get("attention_out_bias", out_bias),
        "mlp_bias": config["mlp_bias"],
        **window,
        **routing_fields(config, unsupported),
    }
    if family in families.LATENT:
        fields |= mla_fields(config, unsupported)
    else:
        fields |= {
            "num_kv_heads": config["num_key_value_heads"] or num_heads,
            "head_dim": config["head_dim"] or config["hidden_size"] // num_heads,
            "rope_interleaved": False,
            "rotary_percent": rotary_percent(config),
        }
    if family in families.GEMMA:
        fields |= _gemma(config)
    if window_theta:
        fields["window_rope_theta"] = window_theta if window["attention_window"] else None
    if family == "gpt_oss":
        fields |= {"activation": "swiglu_clamped", "attention_sinks": True}
    return fields


def _gemma(config: Settings) -> Fields:
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


_LAYER_NORM = {"norm": "layernorm", "qk_norm": False, "mlp_bias": True, "attention_window": None}


def _gpt2(config: Settings, unsupported: list[str]) -> Fields:
    hidden_size, num_heads = config["n_embd"], config["n_head"]
    if hidden_size % num_heads:
        unsupported.append(f"n_embd = {hidden_size} is not divisible by n_head = {num_heads}")
    return {
        **_LAYER_NORM,
        "ffn_hidden_size": config["n_inner"] or 4 * hidden_size,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "activation": families.GELU.get(config["activation_function"]),
        "position": "learned",
        "qkv_bias": True,
        "attention_out_bias": True,
    }


def _neox(config: Settings, unsupported: list[str]) -> Fields:
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    if hidden_size % num_heads:
        unsupported.append(
            f"hidden_size = {hidden_size} is not divisible by num_attention_heads = {num_heads}"
        )
    head_dim = hidden_size // num_heads
    return {
        **_LAYER_NORM,
        **rope_fields(config, unsupported),
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "activation": families.GELU.get(config["hidden_act"]),
        "position": "rope",
        "rope_interleaved": False,
        "rotary_percent": int(head_dim * rotary_percent(config)) / head_dim,
        "parallel_block": "two_norms" if config["use_parallel_residual"] else "none",
        "qkv_bias": config["attention_bias"],
        "attention_out_bias": config["attention_bias"],
    }


def _window(config: Settings, unsupported: list[str]) -> Fields:
    """The sliding window, and the layers that have it; None = all."""
    family = config["model_type"]
    if "sliding_window" not in families.DEFAULTS[family]:
        return {"attention_window": None}
    window = config["sliding_window"] if config.get("use_sliding_window", True) else None
    if family not in families.WINDOW_BY_LAYER:
        return {"attention_window": window}
    layers = range(config["num_hidden_layers"])
    kinds = config["layer_types"] or [
        "sliding_attention" if window is not None and slides else "full_attention"
        for slides in _sliding_layers(config, layers)
    ]
    if len(kinds) != len(layers):
        unsupported.append(
            f"layer_types has {len(kinds)} layers, num_hidden_layers = {len(layers)}"
        )
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        unsupported.append(
            f"layer_types has {', '.join(unknown)}: only sliding_attention and full_attention are "
            "supported"
        )
    windowed = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if windowed and window is None:
        unsupported.append(
            "layer_types has sliding_attention without a sliding_window; set use_sliding_window to "
            "true"
        )
    return {
        "attention_window": window if windowed else None,
        "window_layers": windowed if 0 < len(windowed) < len(kinds) else None,
    }


def _sliding_layers(config: Settings, layers: range) -> list[bool]:
    """Whether each layer has a window where layer_types does not say it."""
    family, first = config["model_type"], config.get("max_window_layers", len(layers))
    if family == "gemma3_text":
        return [bool((i + 1) % (config["sliding_window_pattern"] or 6)) for i in layers]
    if family in ("qwen2_moe", "gemma2", "gpt_oss"):
        return [i % 2 == 0 and i < first for i in layers]
    return [i >= first for i in layers]

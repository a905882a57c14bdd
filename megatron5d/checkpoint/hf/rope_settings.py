"""Rotary settings of a config.json as fields of ModelConfig, and back.

Two spellings are read and written: `rope_theta` with `rope_scaling` (transformers 4), and
`rope_parameters` (transformers 5).
"""

from dataclasses import asdict
from math import log
from typing import Any

from megatron5d.checkpoint.hf.families import GPT_OSS_YARN, LATENT, PARTLY_ROTATED, Fields, Settings
from megatron5d.config.schema import ModelConfig, RopeScaling

_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


def rope_fields(config: Settings, unsupported: list[str]) -> Fields:
    """`rope_theta` and `rope_scaling` of ModelConfig.

    Args:
        config: config.json with the family's defaults.
        unsupported: receives a line for every setting that our model does not compute.
    """
    new = _flat(config.get("rope_parameters"), unsupported)
    old = _flat(config.get("rope_scaling"), unsupported)
    thetas = [new.pop("rope_theta", None), old.pop("rope_theta", None), config.get("rope_theta")]
    theta = _theta([theta for theta in thetas if theta is not None], config, unsupported)
    for rope in (new, old):
        rotated = rope.pop("partial_rotary_factor", 1.0)
        if rotated != 1.0 and config["model_type"] not in PARTLY_ROTATED:
            unsupported.append(f"partial_rotary_factor = {rotated}: only 1.0 is supported")
    if new and old and new != old:
        unsupported.append(f"rope_parameters {new} and rope_scaling {old} disagree")
    rope = new or old
    if config["model_type"] == "gpt_oss" and not (
        config.get("rope_parameters") or config.get("rope_scaling")
    ):
        rope = GPT_OSS_YARN
    return {"rope_theta": theta, "rope_scaling": asdict(_scaling(rope, config, unsupported))}


def _theta(thetas: list[Any], config: Settings, unsupported: list[str]) -> float:
    thetas = thetas or [config.get("default_theta", 10000.0)]
    if any(theta != thetas[0] for theta in thetas):
        unsupported.append(f"rope_theta is given as {' and as '.join(map(str, thetas))}")
    if not isinstance(thetas[0], (int, float)):
        unsupported.append(f"rope_theta = {thetas[0]!r}: only a number is supported")
        return 0.0
    return float(thetas[0])


def _scaling(rope: Settings, config: Settings, unsupported: list[str]) -> RopeScaling:
    kind, family = rope.get("rope_type", "default"), config["model_type"]
    if kind == "default":
        return RopeScaling()
    if kind not in _REQUIRED:
        unsupported.append(
            f"rope_type = {kind!r}: only default, {', '.join(_REQUIRED)} are supported"
        )
        return RopeScaling()
    if absent := [key for key in _REQUIRED[kind] if rope.get(key) is None]:
        unsupported.append(f"rope_type = {kind!r} without {', '.join(absent)}")
        return RopeScaling()
    if kind != "yarn" and rope.get("mscale_all_dim") and family in LATENT:
        unsupported.append(
            f"mscale_all_dim = {rope['mscale_all_dim']} with rope_type = {kind!r}: only with yarn"
        )
    if kind == "linear":
        return RopeScaling(type=kind, factor=float(rope["factor"]))
    key = "original_max_position_embeddings"
    max_positions = config["max_position_embeddings"]
    original = config.get(key) or rope.get(key) or max_positions
    if kind == "yarn":
        return _yarn(rope, max_positions, original)
    frequencies: Settings = {key: float(rope[key]) for key in _REQUIRED[kind]}
    return RopeScaling(type=kind, original_max_positions=original, **frequencies)


def _yarn(rope: Settings, max_positions: int, original: int) -> RopeScaling:
    """YaRN (arXiv:2309.00071); mscale has an effect only together with mscale_all_dim."""
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


def _flat(rope: Settings | None, unsupported: list[str]) -> Settings:
    """One dict of rotary settings. transformers 5 may nest one for each kind of layer; they must be
    equal."""
    if not isinstance(rope, dict | None):
        unsupported.append(f"rope settings {rope!r}: only an object is supported")
        return {}
    rope = dict(rope or {})
    nested = [value for value in rope.values() if isinstance(value, dict)]
    if nested:
        if any(value != nested[0] for value in nested):
            unsupported.append(f"rope_parameters differ between kinds of layers: {rope}")
        rope = dict(nested[0])
    if "type" in rope:
        kind = rope.pop("type")
        rope.setdefault("rope_type", kind)
    for key in [key for key in rope if key not in ("rope_type", "truncate")]:
        if not isinstance(rope[key], int | float | list | None):
            unsupported.append(f"rope {key} = {rope.pop(key)!r}: only numbers are supported")
    return rope


def window_rope_theta(config: Settings, unsupported: list[str]) -> float:
    """Base in Gemma 3's layers with a window; leaves the settings of the other layers in
    `config`."""
    by_layer = config.get("rope_parameters") or {}
    if not isinstance(by_layer, dict) or any(
        not isinstance(rope, dict) for rope in by_layer.values()
    ):
        unsupported.append(
            f"rope_parameters = {by_layer!r}: only full_attention's and sliding_attention's are "
            "supported"
        )
        return 0.0
    sliding = by_layer.get("sliding_attention", {})
    if sliding.get("rope_type", "default") != "default":
        unsupported.append(
            f"rope_type = {sliding['rope_type']!r} of sliding_attention: only default is supported"
        )
    config["rope_parameters"] = by_layer.get("full_attention")
    return sliding.get("rope_theta") or config["rope_local_base_freq"]


def rotary_percent(config: Settings) -> float:
    """Share of a head's features that are rotated, in any spelling."""
    for settings in (config.get("rope_scaling"), config.get("rope_parameters"), config):
        if isinstance(settings, dict) and settings.get("partial_rotary_factor"):
            return float(settings["partial_rotary_factor"])
    return 1.0


def rope_settings(model: ModelConfig) -> Settings:
    """Rotary settings of config.json, in both spellings."""
    theta, scaling = model.rope_theta, _scaling_settings(model.rope_scaling)
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _scaling_settings(scaling: RopeScaling) -> Settings | None:
    if scaling.type == "none":
        return None
    settings: Settings = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type == "linear":
        return settings
    settings["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.type == "llama3":
        return settings | {key: getattr(scaling, key) for key in _REQUIRED["llama3"]}
    settings |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if not scaling.truncate:
        settings["truncate"] = False
    if scaling.attention_factor is not None:
        settings["attention_factor"] = scaling.attention_factor
    if scaling.mscale_all_dim:
        settings |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return settings

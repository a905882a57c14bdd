"""Compares the configuration with that of a checkpoint: for resuming, `init`, averages and `diff`.
Needs no torch, so that another architecture is refused before anything is imported."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron5d.checkpoint.folder import RUN_FILE, config_from_record
from megatron5d.config.convert import override_text, spelled, to_dict, value_of
from megatron5d.config.derived import resumed_folder
from megatron5d.config.errors import Fault
from megatron5d.config.json_file import read_json
from megatron5d.config.schema import Config, ModelConfig
from megatron5d.model.flops import parameter_count

# groups and keys of a saved configuration that are compared on resume
COMPARED_KEYS = {
    group: keys for group, keys in to_dict(Config()).items() if group in ("model", "moe", "optim")
}
# keys of the model that do not change an existing model
_NO_EFFECT = tuple(
    f"model.{key}"
    for key in ("name", "from_hf", "from_checkpoint", "init_std", "init_scale_output")
)
# keys whose new weights checkpoint/new_weights.py fills
_GROWING = {"model.vocab_size", "model.tie_embeddings", "model.num_mtp_layers"}
_MAX_KEYS = 4  # written out in a fix


def changed_keys(saved: Mapping[str, Any], config: Config, groups: Iterable[str]) -> list[str]:
    """Keys of some groups whose values differ from a saved configuration, with both values, as
    text.

    Args:
        saved: `config` of a checkpoint's run.json; keys that are gone or new since do not count.
        groups: fields of Config, such as model.
    """
    current = to_dict(config)
    return [
        f"{group}.{key} = {current[group][key]}, saved with {value}"
        for group in groups
        for key, value in saved.get(group, {}).items()
        if key in current[group] and current[group][key] != value
    ]


def model_differences(model: ModelConfig, saved: ModelConfig) -> list[str]:
    """A line for each field in which a saved model computes another function; many of them, such as
    the rotary base, have no tensor."""
    from megatron5d.checkpoint.canonical_model import differing_fields

    return [
        f"model.{name} = {value}, saved with {other}"
        for name, (value, other) in differing_fields(model, saved).items()
    ]


def tokenizer_differences(
    config: Config | Mapping[str, Any], saved: Config | Mapping[str, Any]
) -> list[str]:
    """A line where a saved configuration names a tokenizer that gives texts other ids.

    Args:
        config, saved: each a configuration, or one as run.json holds it.

    Returns:
        Nothing where one of them names no tokenizer, or its files are gone.
    """
    source, other = _tokenizer(config), _tokenizer(saved)
    if source is None or other is None or source == other:
        return []
    from megatron5d.data.tokenizer_comparison import tokenizer_difference

    try:
        difference = tokenizer_difference(source, other)
    except (ValueError, OSError, ImportError) as error:
        difference = f"they cannot be compared: {error}"
    return [f"data.tokenizer = {source}, saved with {other}: {difference}"] if difference else []


def _tokenizer(config: Config | Mapping[str, Any]) -> Path | None:
    """The file that a configuration's tokenizer is read from, if it is there."""
    from megatron5d.data.tokenizer import tokenizer_file

    values = to_dict(config) if isinstance(config, Config) else config
    for group, key in (("data", "tokenizer"), ("model", "from_hf"), ("init", "from_hf")):
        if source := values.get(group, {}).get(key):
            with suppress(ValueError, OSError):
                return tokenizer_file(source)
    return None


def architecture_faults(config: Config, world: int) -> list[Fault]:
    """What keeps the newest checkpoint from being resumed: another model or optimizer than it was
    saved with.

    A checkpoint whose run.json cannot be read is reported when it is loaded.
    """
    folder = resumed_folder(config)
    if folder is None:
        return []
    try:
        return mismatch_faults(folder, read_json(folder / RUN_FILE).get("config"), config)
    except (ValueError, OSError):
        return []


def mismatch_faults(folder: Path, saved: Any, config: Config) -> list[Fault]:
    """The fault of a model with another number of weights, or of another optimizer, than those of a
    checkpoint.

    Args:
        saved: `config` of its run.json.

    Raises:
        Refused: it is no configuration.
    """
    if missing := set(map(_file_name, saved.get("plugins", []))) - set(
        map(_file_name, config.plugins)
    ):
        reason = f"{folder} was saved with plugins={spelled(saved['plugins'])}"
        fix = f"plugins={spelled(saved['plugins'])}"
        reason += f" (got {spelled(config.plugins)}, without {', '.join(sorted(missing))})"
        return [Fault("resume-plugins", ("plugins",), reason, fix)]
    before = config_from_record(folder, saved, COMPARED_KEYS)
    knobs = ["optim.name"] if before.optim.name != config.optim.name else []
    num_saved, num_weights = _num_weights(before), _num_weights(config)
    if num_saved != num_weights:
        lines = changed_keys(saved, config, ["model", "moe"])
        keys = [line.partition(" = ")[0] for line in lines]
        knobs += [
            key
            for key in keys
            if key == "moe.balance" or key.startswith("model.") and key not in _NO_EFFECT
        ]
    if not knobs:
        return []
    kind = "model" if num_saved != num_weights else "optimizer"
    values = [
        f"{key} = {value_of(config, key)}, saved with {value_of(before, key)}" for key in knobs
    ]
    reason = f"{folder} was saved by another {kind}: {'; '.join(values)}"
    auto = config.checkpoint.resume == "auto"
    new_run = ("another checkpoint.dir" if auto else "checkpoint.resume=none") + " for a new run"
    if num_saved == num_weights or (num_saved < num_weights and _GROWING.issuperset(knobs)):
        new_run += f", which takes the weights along with init.from_checkpoint={folder}"
    fix = f"{_overrides(folder, before, knobs)}, or {new_run}"
    return [Fault("resume-architecture", tuple(knobs), reason, fix)]


def _file_name(path: str) -> str:
    return Path(path).name


def _overrides(folder: Path, before: Config, knobs: list[str]) -> str:
    """Overrides that give keys the values of a checkpoint, or the file that holds them if they are
    long."""
    values = {key: value_of(before, key) for key in knobs}
    if len(knobs) > _MAX_KEYS and all(key.startswith("model.") for key in knobs):
        return f"model.from_checkpoint={folder} without the model's other keys"
    if len(knobs) > _MAX_KEYS or any(isinstance(value, (list, dict)) for value in values.values()):
        return f"the values of {folder / RUN_FILE}"
    return override_text(values)


def _num_weights(config: Config) -> int:
    """Parameters and router biases."""
    biased = config.model.router_bias or "bias" in config.moe.balance
    return parameter_count(replace(config.model, router_bias=biased))

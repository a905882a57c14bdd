"""Compares the configuration with that of the checkpoint from which a run resumes. Needs no torch,
so that another architecture is refused before anything is imported."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron5d.checkpoint.folder import RUN_FILE, config_from_record
from megatron5d.config.convert import override_text, to_dict, value_of
from megatron5d.config.derived import resumed_folder
from megatron5d.config.errors import Fault
from megatron5d.config.json_file import read_json
from megatron5d.config.schema import Config
from megatron5d.model.flops import parameter_count

# on resume
COMPARED_KEYS = {
    group: keys for group, keys in to_dict(Config()).items() if group in ("model", "moe", "optim")
}
# of a model with weights
_PASSIVE = ("model.name", "model.from_hf", "model.init_std", "model.init_scale_output")
# as checkpoint/new_weights.py fills
_GROWN = {"model.vocab_size", "model.tie_embeddings", "model.num_mtp_layers"}
_MOST_KEYS = 4  # written out in a fix


def changed_keys(saved: Mapping[str, Any], config: Config, groups: Iterable[str]) -> list[str]:
    """Returns each key of some groups that has another value than in a saved configuration, with
    both, as text.

    Args:
        saved: `config` of a checkpoint's run.json; keys that are gone or new since do not count.
        groups: fields of Config, such as model.
    """
    here = to_dict(config)
    return [
        f"{group}.{key} = {here[group][key]}, saved with {value}"
        for group in groups
        for key, value in saved.get(group, {}).items()
        if key in here[group] and here[group][key] != value
    ]


def architecture_faults(config: Config, world: int) -> list[Fault]:
    """Returns what keeps the newest checkpoint from being resumed: another model or optimizer than
    it was saved with.

    A checkpoint whose run.json cannot be read is left to those who load it.
    """
    folder = resumed_folder(config)
    if folder is None:
        return []
    try:
        return mismatch_faults(folder, read_json(folder / RUN_FILE).get("config"), config)
    except (ValueError, OSError):
        return []


def mismatch_faults(folder: Path, saved: Any, config: Config) -> list[Fault]:
    """Returns the fault of a model with another number of weights, or of another optimizer, than
    those of a checkpoint.

    Args:
        saved: `config` of its run.json.

    Raises Refused: it is no configuration.
    """
    before = config_from_record(folder, saved, COMPARED_KEYS)
    knobs = ["optim.name"] if before.optim.name != config.optim.name else []
    held, here = _num_weights(before), _num_weights(config)
    if held != here:
        lines = changed_keys(saved, config, ["model", "moe"])
        named = [line.partition(" = ")[0] for line in lines]
        knobs += [
            key
            for key in named
            if key == "moe.balance" or key.startswith("model.") and key not in _PASSIVE
        ]
    if not knobs:
        return []
    told = [f"{key} = {value_of(config, key)}, saved with {value_of(before, key)}" for key in knobs]
    reason = f"{folder} was saved by another {'model' if held != here else 'optimizer'}: {'; '.join(told)}"
    new = (
        "another checkpoint.dir" if config.checkpoint.resume == "auto" else "checkpoint.resume=none"
    )
    new += " for a new run"
    if held == here or (held < here and _GROWN.issuperset(knobs)):
        new += f", which takes the weights along with init.from_checkpoint={folder}"
    return [
        Fault(
            "resume-architecture",
            tuple(knobs),
            reason,
            f"{_overrides(folder, before, knobs)}, or {new}",
        )
    ]


def _overrides(folder: Path, before: Config, knobs: list[str]) -> str:
    """Returns overrides that give keys the values of a checkpoint; where they are long, where to
    find them."""
    values = {key: value_of(before, key) for key in knobs}
    if len(knobs) > _MOST_KEYS or any(isinstance(value, (list, dict)) for value in values.values()):
        return f"the values of {folder / RUN_FILE}"
    return override_text(values)


def _num_weights(config: Config) -> int:
    """Parameters and router biases."""
    biased = config.model.router_bias or "bias" in config.moe.balance
    return parameter_count(replace(config.model, router_bias=biased))

"""Converts between plain mappings and the configuration's dataclasses, and looks keys up by name.

Unknown keys and values of the wrong type are collected as faults.
"""

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from megatron5d.config.errors import DATA_PARALLEL, ConfigError, Fault, closest, closest_key
from megatron5d.config.key import Key
from megatron5d.config.other_names import advice
from megatron5d.config.plugins import CHOICES, load_plugins
from megatron5d.config.schema import Config

# Old names of keys, which files and command lines may still have -> the present ones.
RENAMED = {"parallel.regather": "parallel.zero3_gather", "parallel.reduce": "parallel.grad_reduce"}
SHOWN_KEYS = 4  # in a message about an unknown key of a group
DEFAULTS = Config()
_BAD = object()  # stands for a value of the wrong type, in whose place the default is used
_TYPE_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
# W&B's older words for modes
WANDB_MODES = {"dryrun": "offline", "run": "online"}
_ITEM_NAMES = {int: "integers", float: "numbers", str: "strings"}


def from_dict(data: Mapping[str, Any]) -> Config:
    """Configuration that `to_dict` wrote.

    Missing keys keep their defaults, so old files stay readable.

    Raises:
        ConfigError: unknown keys or values of the wrong type.
    """
    faults: list[Fault] = []
    config = convert(data, faults)
    if faults:
        raise ConfigError(faults)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Configuration, or one group of it, as nested plain values, spelled as in YAML."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        out[key_of(field)] = list(value) if isinstance(value, list) else value
    return out


def convert(data: Mapping[str, Any], faults: list[Fault]) -> Config:
    """Typed configuration of nested values.

    Args:
        faults: faults of keys and types are appended here; their fields keep their defaults.
    """
    config = _convert_group(Config, data, "", faults)
    faults += load_plugins(config.plugins)
    return config


def key_of(field: dataclasses.Field) -> str:
    """Key of a field in YAML; it differs from the name for `async`, which Python does not allow."""
    return field.metadata["name"] or field.name


@cache
def types_of(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields, by name."""
    return typing.get_type_hints(cls)


@cache
def _schema(cls: type = Config, prefix: str = "", path: str = "") -> dict[str, Any]:
    """(attribute path, type, field) of all dotted keys, groups included."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key, attribute, kind = prefix + key_of(field), path + field.name, types_of(cls)[field.name]
        result[key] = attribute, kind, field
        if dataclasses.is_dataclass(kind):
            result |= _schema(typing.cast(type, kind), key + ".", attribute + ".")
    return result


@cache
def keys() -> dict[str, Any]:
    """Types of all dotted keys of the configuration, groups included, in the schema's order."""
    return {key: kind for key, (_, kind, _) in _schema().items()}


def value_of(config: Config, key: str) -> Any:
    """Value of a dotted key, spelled as in YAML."""
    return _getter(key)(config)


@cache
def _getter(key: str) -> operator.attrgetter:
    return operator.attrgetter(_schema()[key][0])


def default_of(key: str) -> Any:
    """Default of a dotted key."""
    return value_of(DEFAULTS, key)


def described(key: str) -> Key:
    """What the schema says about a dotted key that holds a value."""
    described = _schema()[key][2].metadata["key"]
    added = CHOICES.get(key)
    return (
        dataclasses.replace(described, choices=(*described.choices, *added)) if added else described
    )


@cache
def leaves() -> list[str]:
    """Dotted keys that hold values."""
    return [key for key, kind in keys().items() if not dataclasses.is_dataclass(kind)]


def group_names() -> list[str]:
    """Hydra groups, as in `model=llama3_8b` and `experiment=quickstart`."""
    return [*(key for key in keys() if "." not in key and key not in leaves()), "experiment"]


def kind_of(key: str) -> type:
    """Type of a dotted key without None: int, float, bool, str or list; or a dataclass."""
    kind = _without_none(_schema()[key][1])
    return typing.cast(type, typing.get_origin(kind) or kind)


def unknown_key(key: str) -> Fault:
    """Fault of a key that the schema does not have."""
    group, _, name = key.rpartition(".")
    reason = f"{key} is not a configuration key"
    if name in DATA_PARALLEL and group in ("", "parallel"):
        reason += ": dp is the number of remaining ranks, world / (parallel.tp·cp·pp)"
        return Fault("unknown-key", (key,), reason, "leave it out, and start dp·tp·cp·pp ranks")
    similar = None if group else closest(key, group_names(), 0.8)
    if similar:
        reason, fix = f"{key} is not a configuration group", f"did you mean {similar}=...?"
        return Fault("unknown-key", (similar,), reason, fix)
    if other := advice(key):
        similar, text = other
        text = text.replace("=true", "").replace("=...", "")
        fix = f"did you mean {text}?" if similar else text
        return Fault("unknown-key", (similar or key,), reason, fix)
    similar = closest_key(key, leaves())
    siblings = [leaf for leaf in leaves() if leaf.startswith(group + ".")]
    if similar:
        fix = f"did you mean {similar}?"
    elif siblings:
        fix = _most_similar(key, siblings)
    else:
        fix = f"the groups are {', '.join(group_names())}; --help lists every key"
    return Fault("unknown-key", (similar or key,), reason, fix)


def _most_similar(key: str, siblings: list[str]) -> str:
    """Fix that names the keys of a group with the most similar spelling."""
    fix = f"the nearest are {', '.join(get_close_matches(key, siblings, SHOWN_KEYS, 0.0))}"
    if len(siblings) > SHOWN_KEYS:
        fix += f"; all {len(siblings)} of {key.rpartition('.')[0]}: --help"
    return fix


def _convert_group(cls: type, data: Any, path: str, faults: list[Fault]) -> Any:
    if not isinstance(data, Mapping):
        example = next(key for key in leaves() if key.startswith(path + "."))
        reason = f"{path} is a group of keys (got {data!r})"
        faults.append(Fault("wrong-type", (path,), reason, f"set its keys, such as {example}"))
        return cls()
    prefix = f"{path}." if path else ""
    renamed = {old: new.removeprefix(prefix) for old, new in RENAMED.items()}
    data = {renamed.get(f"{prefix}{name}", str(name)): value for name, value in data.items()}
    fields = {key_of(field): field for field in dataclasses.fields(cls)}
    faults += [unknown_key(prefix + name) for name in data if name not in fields]
    values = {}
    for name, field in fields.items():
        if name in data:
            kind = types_of(cls)[field.name]
            value = _convert_value(kind, data[name], prefix + name, faults)
            if value is not _BAD:
                values[field.name] = value
    return cls(**values)


def _convert_value(kind: Any, value: Any, path: str, faults: list[Fault]) -> Any:
    if dataclasses.is_dataclass(kind):
        return _convert_group(typing.cast(type, kind), value, path, faults)
    if path == "pipeline.layout" and isinstance(value, str):
        value = _counts(value)
    if path == "log.wandb.mode" and isinstance(value, str):
        value = WANDB_MODES.get(value, value)
    converted = _plain(kind, value)
    if converted is _BAD:
        faults.append(_wrong_type(kind, value, path))
    return converted


def _counts(text: str) -> list[int] | str:
    """Blocks per stage of Megatron's `--pipeline-model-parallel-layout`; any other text itself."""
    flat = re.sub(r"[\s,]", "", text)
    # (ab)*2 and t*3 are repetitions; the innermost are expanded first
    while match := re.search(r"\(([^()]*)\)(?:\*(\d+))?|([EtmL|])\*(\d+)", flat):
        sequence, times, letter, count = match.groups()
        expanded = (letter or sequence or "") * int(times or count or 1)
        flat = flat[: match.start()] + expanded + flat[match.end() :]
    if not re.fullmatch(r"E[t|]*[m|]*L", flat):
        return text
    return [len(stage) for stage in flat[1:-1].split("|")]


def _plain(kind: Any, value: Any) -> Any:
    """Converts a value to `kind`, or gives _BAD.

    One string may stand for a list of one, and an integer for a number. Everything else is strict:
    an empty string is rejected, because log.dir=$NOT_SET is a mistake and null means none.
    """
    if value is None:
        return None if kind != _without_none(kind) else _BAD
    kind = _without_none(kind)
    if typing.get_origin(kind) is list:
        (item_kind,) = typing.get_args(kind)
        if isinstance(value, str) and item_kind is str:
            value = [value]
        if not isinstance(value, (list, tuple)):
            return _BAD
        items = [_plain(item_kind, item) for item in value]
        return _BAD if _BAD in items else items
    if kind is float:
        return _number(value)
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # a name or a folder may consist of digits
    if kind is str and value in ("", "None"):  # None is Python's null, and would be a folder here
        return _BAD
    if kind is int and isinstance(value, bool):
        return _BAD
    return value if isinstance(value, kind) else _BAD


def _without_none(kind: Any) -> Any:
    """T of `T | None`."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return kind
    (inner,) = (option for option in typing.get_args(kind) if option is not type(None))
    return inner


def _number(value: Any) -> Any:
    """Finite float of a value, or _BAD; YAML 1.1 reads 1e-4 as a string, so those count, too."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return _BAD
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return _BAD
    return number if math.isfinite(number) else _BAD


def _wrong_type(kind: Any, value: Any, path: str) -> Fault:
    optional, kind = kind != _without_none(kind), _without_none(kind)
    if typing.get_origin(kind) is list:
        (item_kind,) = typing.get_args(kind)
        expected = f"a list of {_ITEM_NAMES[item_kind]}"
    else:
        expected = _TYPE_NAMES[kind]
    reason = f"{path} must be {expected}{' or null' if optional else ''} (got {value!r})"
    return Fault("wrong-type", (path,), reason, f"{path}={_example(kind, value, path)}")


def items_of(text: str) -> list[str]:
    """Items of a list in any brackets: `(a, b)`, `{a,b}` or none."""
    items = (item.strip(" ()[]{}'\"") for item in text.split(","))
    return [item for item in items if item]


def _example(kind: Any, value: Any, path: str) -> str:
    """Legal value of a type, spelled: near to what was written, or the default."""
    number = int(value) if kind is int and isinstance(value, bool) else _number(value)
    if typing.get_origin(kind) is list and isinstance(value, str):
        items = [int(item) if item.isdecimal() else item for item in items_of(value)]
        if items and (converted := _plain(kind, items)) is not _BAD:
            return spelled(converted)
    if kind is int and number is not _BAD:
        return str(round(number))
    if kind is bool and isinstance(value, (str, int)):
        return "true" if str(value).lower() in ("1", "yes", "on", "t", "y") else "false"
    return spelled(default_of(path))


def spelled(value: object) -> str:
    """Spells a value as on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return "null" if value is None else str(value)


Change = dict[str, Any]  # key of the configuration -> value


def changed(config: Config, change: Change) -> Config:
    """Configuration with some keys of one dot replaced."""
    for key, value in change.items():
        group, name = key.split(".")
        replaced = dataclasses.replace(getattr(config, group), **{name: value})
        config = dataclasses.replace(config, **{group: replaced})
    return config


def override_text(change: Change) -> str:
    """Spells a change as overrides on a command line."""
    texts = {key: "null" if value is None else str(value).lower() for key, value in change.items()}
    return " ".join(f"{key}={value}" for key, value in texts.items())

"""Converts between plain mappings and the frozen dataclasses; unknown keys and wrong types are
collected as faults.
"""

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from megatron5d.config.errors import DATA_PARALLEL, ConfigError, Fault, closest, closest_key
from megatron5d.config.schema import Config

# Keys that have another name now -> that name; files and command lines may still have the old one.
RENAMED = {"parallel.regather": "parallel.zero3_gather", "parallel.reduce": "parallel.grad_reduce"}
SHOWN_KEYS = 4  # in a message about an unknown key of a group
_BAD = object()  # stands for a value of the wrong type, in whose place the default is used
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


def from_dict(data: Mapping[str, Any]) -> Config:
    """Returns the configuration that `to_dict` wrote; missing keys keep their defaults, so old
    files stay readable. Raises ConfigError: an unknown key or a value of the wrong type."""
    faults: list[Fault] = []
    config = convert(data, faults)
    if faults:
        raise ConfigError(faults)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Returns a configuration (or one group of it) as nested plain values, spelled as in YAML."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        out[key_of(field)] = list(value) if isinstance(value, list) else value
    return out


def convert(data: Mapping[str, Any], faults: list[Fault]) -> Config:
    """Returns a typed configuration; faults are appended to `faults`, and their fields have their
    defaults."""
    return _group(Config, data, "", faults)


def key_of(field: dataclasses.Field) -> str:
    """Returns the key of a field in YAML; it differs from the name for `async`, which Python does
    not allow."""
    return field.metadata.get("key", field.name)


@cache
def keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """Returns every dotted key of the configuration with its type, groups included, in the order of
    the schema."""
    found: dict[str, Any] = {}
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        key, kind = prefix + key_of(field), hints[field.name]
        found[key] = kind
        if dataclasses.is_dataclass(kind):
            found |= keys(typing.cast(type, kind), key + ".")
    return found


def value_of(config: Config, key: str) -> Any:
    """Returns the value of a dotted key, spelled as in YAML."""
    return _reader(key)(config)


@cache
def _reader(key: str) -> operator.attrgetter:
    """Returns a function that reads the field of a dotted key from a configuration."""
    cls: Any = Config
    names = []
    for part in key.split("."):
        field = next(field for field in dataclasses.fields(cls) if key_of(field) == part)
        names.append(field.name)
        cls = _hints(cls)[field.name]
    return operator.attrgetter(".".join(names))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def leaves() -> list[str]:
    """Returns the dotted keys that hold values."""
    return [key for key, kind in keys().items() if not dataclasses.is_dataclass(kind)]


def groups_of_keys() -> list[str]:
    """Returns the Hydra groups, as in `model=llama3_8b` and `experiment=quickstart`."""
    return [*(key for key in keys() if "." not in key), "experiment"]


def kind_of(key: str) -> type:
    """Returns the type of a dotted key, without None: int, float, bool, str or list; for a group
    its dataclass."""
    kind = _without_none(keys()[key])
    return typing.cast(type, typing.get_origin(kind) or kind)


def unknown_key(key: str) -> Fault:
    """Returns the fault of a key that the schema does not have."""
    group = key.rpartition(".")[0]
    if key.rpartition(".")[2] in DATA_PARALLEL and group in ("", "parallel"):
        reason = (
            f"{key} is no key of the configuration: dp is what parallel.tp·cp·pp leave of the ranks"
        )
        return Fault("unknown-key", (key,), reason, "leave it out, and start dp·tp·cp·pp ranks")
    meant = None if group else closest(key, groups_of_keys(), 0.8)
    if meant:
        fix = f"did you mean {meant}=...?"
        return Fault("unknown-key", (meant,), f"{key} is no group of the configuration", fix)
    meant = closest_key(key, leaves())
    if meant:
        fix = f"did you mean {meant}?"
    elif any(leaf.startswith(group + ".") for leaf in leaves()):
        fix = _nearest(key, [leaf for leaf in leaves() if leaf.startswith(group + ".")])
    else:
        fix = f"the groups are {', '.join(groups_of_keys())}; --help lists every key"
    return Fault("unknown-key", (meant or key,), f"{key} is no key of the configuration", fix)


def _nearest(key: str, siblings: list[str]) -> str:
    """Returns a fix that names the keys of a group with the most similar spelling."""
    alike = sorted(siblings, key=lambda leaf: -SequenceMatcher(None, key, leaf).ratio())
    more = (
        f"; all {len(siblings)} of {key.rpartition('.')[0]}: --help"
        if len(siblings) > SHOWN_KEYS
        else ""
    )
    return f"the nearest are {', '.join(alike[:SHOWN_KEYS])}{more}"


def _group(cls: type, data: Any, path: str, faults: list[Fault]) -> Any:
    if not isinstance(data, Mapping):
        example = next(key for key in leaves() if key.startswith(path + "."))
        faults.append(
            Fault(
                "wrong-type",
                (path,),
                f"{path} = {data!r} is a group of keys",
                f"set its keys, such as {example}",
            )
        )
        return cls()
    old = {key: RENAMED[f"{path}.{key}"] for key in data if f"{path}.{key}" in RENAMED}
    data = {key: value for key, value in data.items() if key not in old} | {
        new.rpartition(".")[2]: data[key] for key, new in old.items()
    }
    hints = _hints(cls)
    known = {key_of(field): field for field in dataclasses.fields(cls)}
    dotted = {key: f"{path}.{key}" if path else str(key) for key in [*data, *known]}
    faults += [unknown_key(dotted[key]) for key in data if key not in known]
    values = {}
    for key, field in known.items():
        if key not in data:
            continue
        value = _value(hints[field.name], data[key], dotted[key], faults)
        if value is not _BAD:
            values[field.name] = value
    return cls(**values)


def _value(kind: Any, value: Any, path: str, faults: list[Fault]) -> Any:
    if dataclasses.is_dataclass(kind):
        return _group(typing.cast(type, kind), value, path, faults)
    converted = _plain(
        kind, _counts(value) if path == "pipeline.layout" and isinstance(value, str) else value
    )
    if converted is _BAD:
        faults.append(_wrong_type(kind, value, path))
    return converted


def _counts(text: str) -> list[int] | str:
    """Returns blocks per stage of Megatron's `--pipeline-model-parallel-layout`; the text itself
    where it is none."""
    flat = re.sub(r"[\s,]", "", text)
    while found := re.search(r"\(([^()]*)\)(?:\*(\d+))?|([EtmL|])\*(\d+)", flat):
        group, times, letter, count = found.groups()
        flat = (
            flat[: found.start()]
            + (letter or group or "") * int(times or count or 1)
            + flat[found.end() :]
        )
    return (
        [len(stage) for stage in flat[1:-1].split("|")]
        if re.fullmatch(r"E[t|]*[m|]*L", flat)
        else text
    )


def _plain(kind: Any, value: Any) -> Any:
    """Returns `value` as `kind`, or _BAD. A lone word is a list of one; an integer is a number;
    nothing else is bent.

    An empty text is nothing: who wants none says null.
    """
    if value is None:
        return None if kind != _without_none(kind) else _BAD
    kind = _without_none(kind)
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        if isinstance(value, str) and item is str:
            value = [value]
        items = [_plain(item, one) for one in value] if isinstance(value, (list, tuple)) else [_BAD]
        return _BAD if _BAD in items else items
    if kind is float:
        return _number(value)
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # a name or a folder may consist of digits
    if kind is str and value == "None":
        return _BAD  # Python's null, which would be a folder or a name
    if (kind is int and isinstance(value, bool)) or value == "":  # log.dir=$NOT_SET is a mistake
        return _BAD
    return value if isinstance(value, kind) else _BAD


def _without_none(kind: Any) -> Any:
    """Returns T of `T | None`."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return kind
    (inner,) = (option for option in typing.get_args(kind) if option is not type(None))
    return inner


def _number(value: Any) -> Any:
    """Returns a finite float; YAML 1.1 reads 1e-4 as a text, so texts that spell numbers count."""
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
        (item,) = typing.get_args(kind)
        wanted = "a list of " + {int: "integers", float: "numbers", str: "texts"}[item]
    else:
        wanted = ("a finite number" if kind is float else _KINDS[kind]) + (
            " or null" if optional else ""
        )
    return Fault(
        "wrong-type",
        (path,),
        f"{path} = {value!r} is not {wanted}",
        f"{path}={_example(kind, value, path, optional)}",
    )


def _example(kind: Any, value: Any, path: str, optional: bool) -> str:
    """Returns a legal value of the type: near to what was written, or the default."""
    if value == "None" and optional:
        return "null"
    if kind is int and isinstance(value, (float, str)):
        number = _number(value)
        if number is not _BAD:
            return str(round(number))
    if kind is bool and not isinstance(value, (list, Mapping)):
        return "true" if str(value).lower() in ("1", "yes", "on", "t", "y") else "false"
    default = value_of(Config(), path)
    if default is None or (optional and default == []):
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return f"[{','.join(map(str, default))}]" if isinstance(default, list) else str(default)


Change = dict[str, Any]  # key of the configuration -> value


def changed(config: Config, change: Change) -> Config:
    """Returns the configuration with some keys of one dot replaced."""
    for key, value in change.items():
        group, name = key.split(".")
        config = dataclasses.replace(
            config, **{group: dataclasses.replace(getattr(config, group), **{name: value})}
        )
    return config


def override_text(change: Change) -> str:
    """Returns a change as overrides on a command line."""
    said = {key: "null" if value is None else str(value).lower() for key, value in change.items()}
    return " ".join(f"{key}={value}" for key, value in said.items())

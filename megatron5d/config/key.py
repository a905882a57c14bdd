"""What the schema says about one configuration key, besides its name and its type."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_INTEGER = 2**31 - 1  # of keys without a maximum: more digits are a slip of the hand


@dataclass(frozen=True)
class Key:
    """Description of a key; `--help`, `conf/*/default.yaml` and the checks of its value read it."""

    help: str
    unit: str = ""  # such as "tokens"; empty for counts and texts
    choices: Sequence[Any] = ()  # legal values, or legal elements of a list; empty = any
    minimum: float = 0  # smallest legal number
    above: float | None = None  # exclusive lower bound, which replaces `minimum`
    below: float | None = None  # exclusive upper bound
    maximum: float | None = None  # largest legal number


def key(default: Any, help: str, *, name: str = "", **description: Any) -> Any:
    """Declares a key of a configuration group, a field of its dataclass.

    Args:
        name: key in YAML, where Python does not allow it as the name of a field.
        description: fields of `Key`.
    """
    metadata = {"key": Key(help, **description), "name": name}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def positive(default: Any, help: str, **description: Any) -> Any:
    """Declares a key whose number is above 0; takes the arguments of `key`."""
    return key(default, help, above=0, **description)


def group(kind: type) -> Any:
    """Declares a group of keys, a field whose value is another dataclass."""
    return field(default_factory=kind, metadata={"name": ""})

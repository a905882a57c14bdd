"""The listing of every key, for people: `conf/<group>/default.yaml`, and the end of `--help`.

`python -m megatron5d.config.default_files` rewrites the files from the schema.
"""

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron5d.config.convert import default_of, described, group_names, key_of, types_of
from megatron5d.config.key import Key
from megatron5d.config.schema import Config

CONF = Path(__file__).resolve().parents[1] / "conf"
COMMENT_COLUMN = 36
LINE_LENGTH = 100


def default_file(group: str) -> str:
    """Content of `conf/<group>/default.yaml`: keys, defaults and, as comments, their help."""
    kind = types_of(Config)[group]
    return "\n".join([*_wrapped("", kind.__doc__ or ""), *_lines(kind)]) + "\n"


def _lines(kind: type, indent: str = "") -> Iterator[str]:
    types = types_of(kind)
    for field in dataclasses.fields(kind):
        entry = f"{indent}{key_of(field)}:"
        if dataclasses.is_dataclass(types[field.name]):
            yield from _wrapped(entry, types[field.name].__doc__ or "")
            yield from _lines(types[field.name], indent + "  ")
        else:
            default = getattr(kind(), field.name)
            yield from _wrapped(f"{entry} {_as_yaml(default)}", _comment(field.metadata["key"]))


def key_lines(key: str) -> str:
    """Lines of a dotted key as in `--help`: default, unit, choices, help."""
    entry = f"{key}: {_as_yaml(default_of(key))}"
    return "\n".join(_wrapped(entry, _comment(described(key)))) + "\n"


def _comment(key: Key) -> str:
    choices = " | ".join(map(str, key.choices))
    text = ": ".join(filter(None, [choices, key.help]))
    return f"[{key.unit}] {text}" if key.unit else text


def _wrapped(entry: str, comment: str) -> list[str]:
    """Lines of an entry with its comment, which continues below its own beginning."""
    column = COMMENT_COLUMN if entry else 0
    first = f"{entry:<{column - 2}}  # " if entry else "# "
    # no line ends within "null = none"
    lines = textwrap.wrap(
        " ".join(comment.split()).replace(" = ", "\xa0=\xa0"),
        LINE_LENGTH,
        initial_indent=first,
        subsequent_indent=" " * column + "# ",
        break_on_hyphens=False,
    )
    return [line.replace("\xa0", " ") for line in lines]


def _as_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if isinstance(value, str) and re.fullmatch(r"\w*[A-Za-z]\w*", value):
        return value
    text = json.dumps(value)
    # YAML 1.1 reads 1e-05 as a text, and 1.0e-05 as a number
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


if __name__ == "__main__":
    for group in set(group_names()) - {"experiment"}:
        (CONF / group / "default.yaml").write_text(default_file(group))

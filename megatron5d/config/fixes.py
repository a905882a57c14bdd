"""What to write instead of an override that cannot be read or resolved: text that works when pasted into a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from os.path import expanduser, expandvars

from megatron5d.config.convert import leaves, unknown_key, value_of
from megatron5d.config.errors import closest_key
from megatron5d.config.schema import Config

_WORDS = "options are written key=value, such as train.gbs=8"


def unreadable(text: str, why: str) -> tuple[str, str, str]:
    """Returns (knob, reason, fix) of an override that Hydra's grammar does not take."""
    head, equals, value = text.partition("=")
    key = head.strip().lstrip("+~")
    default = value_of(Config(), key) if key in leaves() else None
    if len(words := text.split()) > 1 and all(word.find("=") > 0 for word in words):
        fix = f"{text}, each option a word of its own"
    elif key not in leaves():
        fix = unknown_key(key).fix if re.fullmatch(r"[A-Za-z_][\w.]*", key) else _WORDS
    elif equals and (home := at_home(value)) != value:
        fix = shlex.quote(f"{key}={home}")
    elif equals and isinstance(default, (str, list, type(None))):
        inner = value.replace("\\", "\\\\").replace('"', '\\"')
        quoted = f'{key}="{inner}"'
        fix = f"{shlex.quote(quoted)}, with quotes that the shell leaves in place"
    else:
        number = re.search(r"-?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?", value) if not isinstance(default, bool) else None
        fix = f"{key}={number.group() if number else str(default).lower()}"
    return key, f"{text!r} cannot be read: {why}", fix


def at_home(value: str) -> str:
    """Returns a value with the home folder in place of each `~/` at the beginning of a path."""
    return re.sub(r"(?<![^\[\s,'\"])~(?=/|$|[,\]])", lambda _: expanduser("~"), value)


def unresolved(reason: str, key: str, overrides: Sequence[str]) -> str:
    """Returns the fix of a `${...}` that gives no value.

    Args:
        reason: what OmegaConf says.
        key: whose value it is.
        overrides: of the command line.
    """
    written = next((text for text in reversed(overrides) if text.lstrip("+").startswith(f"{key}=")), f"{key}=VALUE")
    if found := re.search(r"Environment variable '([^']+)' not found", reason):
        name = found.group(1)
        filled = written.replace(f"${{oc.env:{name}}}", f"${{oc.env:{name},DEFAULT}}")
        return f"{shlex.quote(filled)}, or before it: export {name}=VALUE"
    if found := re.search(r"Interpolation key '([^']+)' not found", reason):
        name = found.group(1)
        meant = None if name.isupper() else closest_key(name, leaves())
        if meant is None:
            known = expandvars(f"${name}") != f"${name}"
            meant = "now:%Y-%m-%d_%H-%M-%S" if name == "now" else f"oc.env:{name}" + ("" if known else ",DEFAULT")
        return shlex.quote(written.replace(f"${{{name}}}", f"${{{meant}}}"))
    return (
        "there are ${oc.env:NAME}, ${oc.env:NAME,DEFAULT}, ${now:%Y-%m-%d_%H-%M-%S} and ${group.key}, in single quotes"
    )


def each_value(key: str, values: Sequence[str], rest: Sequence[str]) -> str:
    """Returns the fix of a sweep: one value, and the loop that starts a run with each."""
    name = key.rpartition(".")[2]
    others = "".join(f" {shlex.quote(text)}" for text in rest)
    return (
        f"{key}={values[0]}; for all of them, a run each: for value in {' '.join(values)}; do python pretrain.py"
        f"{others} {key}=$value log.dir=runs/{name}-$value; done (or a job array with '{key}=${{oc.env:VALUE}}')"
    )

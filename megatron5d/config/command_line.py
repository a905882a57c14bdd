"""Parses the command line: a few flags of our own, and Hydra overrides, which load.py reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron5d.config.convert import groups_of_keys, leaves
from megatron5d.config.errors import Fault, closest, closest_key

FLAGS = {
    "--help": "print this text",
    "--cfg": "print the composed configuration as YAML and leave (`--cfg job` is the same)",
    "--config-dir": "DIR with groups of your own, beside ours: DIR/model/mine.yaml is model=mine; may be repeated",
    "--config-name": "NAME of the YAML that composition starts from, instead of pretrain",
}
_SHORT = {"-h": "--help", "--hydra-help": "--help", "-c": "--cfg", "-cd": "--config-dir", "-cn": "--config-name"}


@dataclass
class Arguments:
    """A parsed command line."""

    overrides: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)  # of the user's own groups
    name: str = "pretrain"
    show: str | None = None  # help | cfg
    faults: list[Fault] = field(default_factory=list)


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Separates flags from overrides.

    Args:
        argv: without the program's name.

    Returns:
        Flags, overrides in their order, and a fault for each unknown flag.
    """
    out = Arguments()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            out.overrides.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = _SHORT.get(flag, flag)
        if flag == "--help":
            out.show = "help"
        elif flag == "--cfg":
            out.show = out.show or "cfg"
            if not equals and rest and rest[0] in ("job", "all"):
                rest.pop(0)
        elif flag in ("--config-dir", "--config-name"):
            value = value if equals else (rest.pop(0) if rest and "=" not in rest[0] else "")
            _take(out, flag, value)
        else:
            out.faults.append(_unknown_flag(flag))
            if not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                rest.pop(0)  # the value of the unknown flag
    return out


def _take(out: Arguments, flag: str, value: str) -> None:
    if not value:
        out.faults.append(Fault("missing-flag-value", (flag,), f"{flag} has no value", f"{flag} {FLAGS[flag]}"))
    elif flag == "--config-dir":
        out.folders.append(value)
    else:
        out.name = value


def _unknown_flag(flag: str) -> Fault:
    name = flag.lstrip("-").replace("-", "_")
    meant = closest(name, groups_of_keys(), 0.8) or closest_key(name, leaves())
    near = closest(name, [known.lstrip("-").replace("-", "_") for known in FLAGS], 0.6)
    if near and name != (meant or "").rpartition(".")[2]:
        fix = f"did you mean --{near.replace('_', '-')}?"
    elif meant:
        fix = f"options are written key=value: {meant}=..."
    else:
        fix = f"options are written key=value, such as train.gbs=8; the flags are {', '.join(FLAGS)}"
    return Fault("unknown-flag", (meant or flag,), f"{flag} is no flag", fix)

"""Turns a command line into a checked `Config`. No other file uses Hydra.

Only Hydra's composition is used: it makes no output folder, changes no working directory and sets
up no logging. An override that cannot be read or resolved is refused with one that works when
pasted into a shell.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os.path import expanduser, expandvars
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron5d.config.checks import run_checks
from megatron5d.config.command_line import Arguments, groups_in, help_text, parse_arguments
from megatron5d.config.convert import (
    RENAMED,
    convert,
    described,
    from_dict,
    keys,
    kind_of,
    leaves,
    to_dict,
    unknown_key,
    value_of,
)
from megatron5d.config.default_files import CONF
from megatron5d.config.errors import ConfigError, Fault, alternatives, closest, closest_key
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
    elif equals and value.count("${") > value.count("}"):
        fix = shlex.quote(f"{text}}}")
    elif equals and (home := at_home(value)) != value:
        fix = shlex.quote(f"{key}={home}")
    elif equals and isinstance(default, (str, list, type(None))):
        inner = value.replace("\\", "\\\\").replace('"', '\\"')
        quoted = f'{key}="{inner}"'
        fix = f"{shlex.quote(quoted)}, with quotes that the shell leaves in place"
    else:
        number = (
            re.search(r"-?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?", value)
            if not isinstance(default, bool)
            else None
        )
        fix = f"{key}={number.group() if number else str(default).lower()}"
    return key, f"{text!r} cannot be read: {why}", fix


def at_home(value: str) -> str:
    """Returns a value with the home folder in place of each `~/` at the beginning of a path, and
    `$NAME` filled in."""
    value = re.sub(r"(?<![^\[\s,'\"])~(?=/|$|[,\]])", lambda _: expanduser("~"), value)
    return re.sub(r"\$[A-Za-z_]\w*", lambda found: expandvars(found.group()), value)


def unresolved(reason: str, key: str, overrides: Sequence[str]) -> str:
    """Returns the fix of a `${...}` that gives no value."""
    written = next(
        (text for text in reversed(overrides) if text.lstrip("+").startswith(f"{key}=")),
        f"{key}=VALUE",
    )
    if found := re.search(r"Environment variable '([^']+)' not found", reason):
        name = found.group(1)
        filled = written.replace(f"${{oc.env:{name}}}", f"${{oc.env:{name},DEFAULT}}")
        return f"{shlex.quote(filled)}, or before it: export {name}=VALUE"
    if found := re.search(r"Interpolation key '([^']+)' not found", reason):
        name = found.group(1)
        meant = None if name.isupper() else closest_key(name, leaves())
        if meant is None and "." in name:
            return unknown_key(name).fix
        if meant is None:
            known = expandvars(f"${name}") != f"${name}"
            meant = (
                "now:%Y-%m-%d_%H-%M-%S"
                if name == "now"
                else f"oc.env:{name}" + ("" if known else ",DEFAULT")
            )
        return shlex.quote(written.replace(f"${{{name}}}", f"${{{meant}}}"))
    return "there are ${oc.env:NAME}, ${oc.env:NAME,DEFAULT}, ${now:%Y-%m-%d_%H-%M-%S} and ${group.key}, in single quotes"


def each_value(key: str, values: Sequence[str], rest: Sequence[str]) -> str:
    """Returns the fix of a sweep: one value, and the loop that starts a run with each."""
    name = key.rpartition(".")[2]
    others = "".join(f" {shlex.quote(text)}" for text in rest)
    return (
        f"{key}={values[0]}; for all of them, a run each: for value in {' '.join(values)}; do python pretrain.py"
        f"{others} {key}=$value log.dir=runs/{name}-$value; done (or a job array with '{key}=${{oc.env:VALUE}}')"
    )


ModelFromHF = Callable[[str], Mapping[str, Any]]
Check = Callable[[Config, int], Sequence[Fault]]
"""(configuration, world) -> faults that only code of higher floors can find."""
_OUTSIDE = ("data", "init", "checkpoint", "log")  # groups on which neither model nor layout depends
_RESOLVED = re.compile(r"\$\{[^}]*:")  # ${oc.env:NAME}, ${now:%H-%M}
_GUESSES = ("unknown-key", "unknown-flag")  # ids of faults whose knob is only a guess
_WANDB_MODES = dict.fromkeys(
    ("off", "no", "False", "false", "None", "none", "null"), "disabled"
) | dict.fromkeys(("on", "yes", "True", "true"), "online")


def load_config(
    argv: Sequence[str],
    *,
    world: int | None = None,
    rank: int = 0,
    model_from_hf: ModelFromHF | None = None,
    options: Sequence[Check] = (),
    checks: Sequence[Check] = (),
    files: bool = True,
) -> Config:
    """Returns the typed, checked configuration of a command line.

    Args:
        argv: overrides and flags, without the program's name.
        world: number of ranks, for the checks; None = none is run.
        rank: of this process; only rank 0 prints the text of `--help` and `--cfg`.
        model_from_hf: reads a Hugging Face folder's config.json into fields of ModelConfig, for
            `model.from_hf`.
        options: checks of single values, such as whether a named schedule exists.
        checks: checks of model and layout together, each made only if these have no other fault.
        files: False: checks about files are left out, as for a run that is only planned.

    Raises:
        ConfigError: has all faults, of spelling and of checks.
        SystemExit: 0 after `--help` or `--cfg`.
    """
    arguments = parse_arguments(argv)
    folders = [CONF, *map(Path, arguments.folders)]
    if arguments.show == "help":
        _leave(help_text(folders), rank)
    spelling = _Spelling(arguments, folders)
    data = spelling.compose()
    spelling.read_model(data, model_from_hf)
    config = convert(data, spelling.faults)
    faults = list(spelling.faults)
    if arguments.show == "cfg" and not faults:
        _leave(to_yaml(config), rank)
    if world is not None:
        asked = [
            *run_checks(config, world, files),
            *(fault for option in options for fault in option(config, world)),
        ]
        faults += [fault for fault in asked if not any(map(spelling.doubtful, fault.knobs))]
        for check in checks:
            if leave_model_legal(faults):
                faults += check(config, world)
    if faults:
        raise (
            ConfigError(replace(fault, local=True) for fault in faults)
            if spelling.resolves
            else ConfigError(faults)
        )
    return config


def leave_model_legal(faults: Sequence[Fault]) -> bool:
    """Whether none of these faults concerns the model or the layout, so that later checks run."""
    return all(knob.partition(".")[0] in _OUTSIDE for fault in faults for knob in fault.knobs)


def keys_given(overrides: Sequence[str]) -> set[str]:
    """Returns the dotted keys that readable overrides give a value, those inside of a mapping too;
    flags give none."""
    parsed = OverridesParser.create().parse_overrides(
        list(map(_renamed, parse_arguments(overrides).overrides))
    )
    return {
        name
        for each in parsed
        for name in (each.key_or_group, *_nested(each.key_or_group, each._value))
    }


def answer_help(argv: Sequence[str]) -> None:
    """Prints the help and ends the process, if the command line has `--help`. Raises SystemExit: 0
    after `--help`."""
    arguments = parse_arguments(argv)
    if arguments.show == "help":
        _leave(help_text([CONF, *map(Path, arguments.folders)]), 0)


def to_yaml(config: Config) -> str:
    """Returns the whole configuration as YAML, every field resolved; `from_yaml` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def from_yaml(text: str) -> Config:
    """Returns the configuration that `to_yaml` wrote. Raises ConfigError: an unknown key or a value
    of the wrong type."""
    data = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    assert isinstance(data, dict)
    return from_dict({str(key): value for key, value in data.items()})


def _leave(text: str, rank: int) -> None:
    """Prints a text on rank 0 and ends the process with exit code 0."""
    if rank == 0:
        print(text, end="")
    raise SystemExit(0)


class _Spelling:
    """Checks overrides one by one: a wrong one becomes a fault and is left out, so that all faults
    are found."""

    def __init__(self, arguments: Arguments, folders: list[Path]) -> None:
        self.faults = arguments.faults
        self.name = arguments.name
        self.folders = [folder for folder in folders if self._is_folder(folder)]
        self.groups = groups_in(self.folders)
        # values that may differ between ranks
        self.resolves = any(map(_RESOLVED.search, arguments.overrides))
        self.explicit: list[str] = []  # keys that the command line gives a value
        self.overrides = [_renamed(text.strip()) for text in arguments.overrides]
        self.accepted: list[str] = []
        for text in filter(None, map(self._accept, self.overrides)):
            if text == "experiment=null":
                self.accepted = [
                    each for each in self.accepted if not each.startswith("experiment=")
                ]
            else:
                self.accepted.append(text)

    def compose(self) -> dict[str, Any]:
        """Returns the configuration that Hydra composes from the accepted overrides; empty if it
        refuses them."""
        quoted = [str(folder.resolve()).replace("'", "\\'") for folder in self.folders[1:]]
        own = [f"'file://{folder}'" for folder in quoted]
        search = [f"hydra.searchpath=[{','.join(own)}]"] if own else []
        try:
            with initialize_config_dir(str(CONF), version_base="1.3"):
                composed = compose(self.name, [*self.accepted, *search])
            raw = OmegaConf.to_container(composed)
            self.resolves = self.resolves or _RESOLVED.search(str(raw)) is not None
            data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            reason, key = (
                str(error).split("Config search path")[0].split("\n")[0].strip(),
                getattr(error, "full_key", ""),
            )
            fix = (
                unresolved(reason, key, self.overrides)
                if key
                else "--help lists groups, options and keys"
            )
            self._fault("composition", "", f"{key}: {reason}" if key else reason, fix)
            return {}
        assert isinstance(data, dict)
        self._check_texts(data, raw)
        return {str(key): value for key, value in data.items()}

    def _check_texts(self, data: dict[Any, Any], raw: Any) -> None:
        """Refuses texts that name a folder called ~, $NAME or None."""
        for key in leaves():
            value, written = _found(data, key), _found(raw, key)
            texts = [
                text
                for text in (value if isinstance(value, list) else [value])
                if isinstance(text, str)
            ]
            if any(at_home(text) != text for text in texts):
                home = [at_home(text) for text in texts]
                fix = shlex.quote(
                    f"{key}={home[0] if isinstance(value, str) else '[' + ','.join(home) + ']'}"
                )
                self._fault("home", key, f"{key} = {value}: no shell has filled in ~ or $NAME", fix)
            for inner in re.findall(r"\$\{([\w.]+)\}", written) if isinstance(written, str) else ():
                if inner in leaves() and _found(data, inner) is None and written != f"${{{inner}}}":
                    self._fault(
                        "null-in-text",
                        key,
                        f"{key} = {written}, and {inner} is null",
                        f"{inner}=NAME",
                    )

    def read_model(self, data: dict[str, Any], model_from_hf: ModelFromHF | None) -> None:
        """Fills `model` from the folder of model.from_hf; values on the command line stay."""
        model = data.get("model")
        folder = model.get("from_hf") if isinstance(model, dict) else None
        if not isinstance(model, dict) or not isinstance(folder, str):
            return
        assert model_from_hf is not None, (
            "model.from_hf is set, and load_config was given no way to read it"
        )
        try:
            found = dict(model_from_hf(folder))
        except (ValueError, OSError) as error:
            fix = "model.from_hf=DIR where DIR/config.json describes a model of a supported family"
            knobs = ("model", "model.from_hf")
            self.faults.append(
                Fault("model-from-hf", knobs, f"model.from_hf = {folder}: {error}", fix, True)
            )
            return
        said = {
            key: _found(data, key)
            for key in self.explicit
            if key.startswith("model.") and key in leaves()
        }
        model.update(found)
        for key, value in said.items():
            _put(data, key, value)

    def doubtful(self, knob: str) -> bool:
        """Returns whether a key may have its default only through a spelling fault, so that no
        check should read it."""
        if any(fault.id == "composition" for fault in self.faults):
            return True
        guessed = [bad for fault in self.faults if fault.id in _GUESSES for bad in fault.knobs]
        if knob not in self.explicit and any(
            bad in (knob, knob.partition(".")[0], "experiment") for bad in guessed
        ):
            return True
        wrong = [bad for fault in self.faults if fault.id not in _GUESSES for bad in fault.knobs]
        if any(knob == bad or knob.startswith(bad + ".") and "." in bad for bad in wrong):
            return True
        return knob not in self.explicit and any(
            bad in ("", "experiment", knob.partition(".")[0]) for bad in wrong
        )

    def _is_folder(self, folder: Path) -> bool:
        if not folder.is_dir():
            self._fault(
                "config-dir",
                "",
                f"--config-dir {folder}: there is no such folder",
                "--config-dir DIR",
            )
        return folder.is_dir()

    def _fault(self, kind: str, knob: str, reason: str, fix: str) -> None:
        self.faults.append(Fault(kind, (knob,), reason, fix))

    def _accept(self, text: str) -> str | None:
        """Returns the override for Hydra; None if it is wrong, which is added to the faults."""
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            self._fault("grammar", *unreadable(text, str(error).splitlines()[0]))
            return None
        key = override.key_or_group
        if not key:
            self._fault(
                "grammar",
                "",
                f"{text!r} names no key",
                "options are written key=value, without spaces",
            )
            return None
        if override.type == OverrideType.DEL:
            self._fault(
                "grammar",
                key,
                f"{text!r}: every key is there already; none is added or deleted",
                "leave it out",
            )
            return None
        if key in self.groups and not isinstance(override._value, dict):
            return self._choice(override)
        if key == "log.wandb" and not isinstance(override._value, dict):
            mode = str(override.value())
            override.key_or_group, key = "log.wandb.mode", "log.wandb.mode"
            override.input_line = text = f"log.wandb.mode={_WANDB_MODES.get(mode, mode)}"
        if key.partition(".")[0] == "hydra":
            self._fault(
                "unknown-key",
                key,
                f"{text}: Hydra only composes; its own settings do nothing here",
                "drop it",
            )
            return None
        written = [key, *_nested(key, override._value)]
        strangers = [unknown_key(name) for name in written if name not in keys()]
        if strangers:
            self.faults += strangers
            return None
        if override.type not in (OverrideType.CHANGE, OverrideType.FORCE_ADD):
            fix = text.lstrip("+") if "+" in text.partition("=")[0] else "leave it out"
            self._fault(
                "grammar",
                key,
                f"{text!r}: every key is there already; none is added or deleted",
                fix,
            )
            return None
        self.explicit += written
        return self._value(override, text.lstrip("+"))

    def _choice(self, override: Override) -> str | None:
        """Returns an override that chooses an option of a group."""
        group, chosen = override.key_or_group, override._value
        options = self.groups[group]
        if (chosen is None and group == "experiment") or (
            isinstance(chosen, str) and chosen in options
        ):
            return "experiment=null" if chosen is None else override.input_line
        written = (
            str(chosen)
            if isinstance(chosen, str)
            else (override.input_line or "").partition("=")[2]
        )
        meant = closest(written, options)
        fix = (
            f"{group}={meant}; the options are {', '.join(options)}"
            if meant
            else f"{group}={alternatives(options)}"
        )
        key = next(
            (
                key
                for key in leaves()
                if key.partition(".")[0] == group and written in described(key).choices
            ),
            None,
        )
        if key is not None:  # precision=bf16, optim=muon
            fix = f"{key}={written}"
        self._fault(
            "unknown-option",
            group,
            f"{group}={written}: there is no conf/{group}/{written}.yaml",
            fix,
        )
        return None

    def _value(self, override: Override, text: str) -> str | None:
        """Returns an override of a value. Commas make a list or are part of a text, since there are
        no sweeps."""
        key, written = override.key_or_group, text.partition("=")[2]
        kind = kind_of(key)
        if not override.is_sweep_override():
            # 007 is a name where a text is wanted
            digits = isinstance(override._value, (int, float, bool))
            return f"{key}='{written}'" if kind is str and digits else text
        if kind is list:
            return f"{key}=[{written}]"
        if kind is str:
            return f"{key}='{written}'"
        inner = re.sub(r"^\w+\((.*)\)$", r"\1", written)
        values = [value.strip() for value in inner.split(",")]
        rest = [each for each in self.overrides if each.lstrip("+") != text]
        self._fault(
            "wrong-type", key, f"{text}: one run takes one value", each_value(key, values, rest)
        )
        return None


def _renamed(text: str) -> str:
    """Returns an override with the present name of its key."""
    key, equals, value = text.partition("=")
    return f"{RENAMED.get(key.lstrip('+'), key)}{equals}{value}"


def _found(data: Any, key: str) -> Any:
    """Returns the value of a dotted key; None where a group has another form or is not there."""
    for name in key.split("."):
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        data = data.setdefault(name, {})
    data[last] = value


def _nested(key: str, value: Any) -> list[str]:
    """Returns the dotted keys inside a mapping given to `key`."""
    if not isinstance(value, Mapping):
        return []
    inner = [(f"{key}.{name}", below) for name, below in value.items()]
    return [name for dotted, below in inner for name in (dotted, *_nested(dotted, below))]

"""Turns a command line into a checked `Config`. No other file uses Hydra.

Only Hydra's composition is used: it makes no output folder, changes no working directory and sets
up no logging. All overrides that cannot be read or resolved are rejected together, each with a fix.
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
from megatron5d.config.checks.values import VALUE_CHECKS
from megatron5d.config.command_line import Arguments, answer, groups_in, parse_arguments
from megatron5d.config.convert import (
    RENAMED,
    SHOWN_KEYS,
    convert,
    default_of,
    described,
    from_dict,
    items_of,
    keys,
    kind_of,
    leaves,
    spelled,
    to_dict,
    unknown_key,
)
from megatron5d.config.default_files import CONF
from megatron5d.config.errors import ConfigError, Fault, alternatives, closest
from megatron5d.config.schema import IN_LOG_DIR, Config

ModelReader = Callable[[str], Mapping[str, Any]]
"""folder -> fields of ModelConfig"""
Check = Callable[[Config, int], Sequence[Fault]]
"""(configuration, world) -> faults that only code of higher layers can find."""
_DESCRIBED_BY = {
    "from_hf": "config.json describes a model of a supported family",
    "from_checkpoint": "step-*/run.json, or DIR/run.json, was written by a run or a conversion",
}
_USAGE = "options are written key=value, each as a separate word, such as train.gbs=8"
_FORMS = "${group.key}, ${oc.env:NAME}, ${oc.env:NAME,DEFAULT}, ${now:%Y-%m-%d}, in single quotes"
_OUTSIDE = ("data", "init", "checkpoint", "log")  # groups on which neither model nor layout depends
_RESOLVER = re.compile(r"\$\{[^}]*:")  # ${oc.env:NAME}, ${now:%H-%M}
_GUESSES = ("unknown-key", "unknown-flag")  # ids of faults whose knob is only a guess
_WANDB_MODES = dict.fromkeys(("off", "no", "false", "none"), "disabled") | dict.fromkeys(
    ("on", "yes", "true"), "online"
)


def load_config(
    argv: Sequence[str],
    *,
    world: int | None = None,
    rank: int = 0,
    model_readers: Mapping[str, ModelReader] | None = None,
    options: Sequence[Check] = (),
    checks: Sequence[Check] = (),
    files: bool = True,
) -> Config:
    """Typed, checked configuration of a command line.

    Args:
        argv: overrides and flags, without the program's name.
        world: number of ranks, for the checks; None = skip all checks.
        rank: of this process; only rank 0 prints the text of `--help` and `--cfg`.
        model_readers: for `from_hf` and `from_checkpoint` of the groups model and init.
        options: checks of single values, such as whether a named schedule exists.
        checks: checks of model and layout together, each made only if these have no other fault.
        files: False: skip checks of files, as for a run that is only planned.

    Raises:
        ConfigError: has all faults, of spelling and of checks.
        SystemExit: 0 after `--help` or `--cfg`.
    """
    arguments = parse_arguments(argv)
    folders = [CONF, *map(Path, arguments.folders)]
    if (text := answer(arguments)) is not None:
        _leave(text, rank)
    overrides = _Overrides(arguments, folders)
    data = overrides.compose()
    overrides.read_model(data, model_readers or {})
    config = convert(data, overrides.faults)
    faults = list(overrides.faults)
    if arguments.show == "cfg" and not faults:
        _leave(to_yaml(config), rank)
    if world is not None:
        check_faults = [
            *run_checks(config, world, files),
            *(fault for check in options for fault in check(config, world)),
        ]
        # a misspelled key leaves its default, which must not be judged
        faults += [
            fault for fault in check_faults if not any(map(overrides.is_doubtful, fault.knobs))
        ]
        for check in checks:
            if leave_model_legal(faults):
                faults += check(config, world)
    if faults and overrides.uses_resolvers:
        # values of ${oc.env:...} and ${now:...} may differ between nodes
        faults = [replace(fault, local=True) for fault in faults]
    if faults:
        raise ConfigError(faults)
    return config


def leave_model_legal(faults: Sequence[Fault]) -> bool:
    """Whether none of these faults concerns the model or the layout, so that later checks run."""
    return all(knob.partition(".")[0] in _OUTSIDE for fault in faults for knob in fault.knobs)


def keys_given(overrides: Sequence[str]) -> set[str]:
    """Dotted keys that readable overrides give a value, including those inside a mapping."""
    words = [_renamed(text) for text in parse_arguments(overrides).overrides]
    return {
        key
        for override in OverridesParser.create().parse_overrides(words)
        for key in (override.key_or_group, *_keys_in(override.key_or_group, override._value))
    }


def answer_help(argv: Sequence[str]) -> None:
    """Prints the help if the command line has `--help`, and ends the process.

    Raises:
        SystemExit: 0 after `--help`.
    """
    arguments = parse_arguments(argv)
    if (text := answer(arguments)) is not None:
        _leave(text, 0)


def to_yaml(config: Config) -> str:
    """Whole configuration as YAML, every key resolved; `from_yaml` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def from_yaml(text: str) -> Config:
    """Configuration that `to_yaml` wrote.

    Raises:
        ConfigError: unknown keys or values of the wrong type.
    """
    data = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    assert isinstance(data, dict)
    return from_dict({str(key): value for key, value in data.items()})


def _leave(text: str, rank: int) -> None:
    """Prints a text on rank 0 and ends the process with exit code 0."""
    if rank == 0:
        print(text, end="")
    raise SystemExit(0)


class _Overrides:
    """Overrides of a command line, read one by one.

    A wrong one becomes a fault and is left out, so that all faults are found.
    """

    def __init__(self, arguments: Arguments, folders: list[Path]) -> None:
        self.faults = arguments.faults
        self.name = arguments.name
        self.folders = [folder for folder in folders if self._is_folder(folder)]
        self.groups = groups_in(self.folders)
        self.uses_resolvers = any(map(_RESOLVER.search, arguments.overrides))
        self.explicit: list[str] = []  # keys that the command line gives a value
        self.accepted: list[str] = []
        for text in arguments.overrides:
            override = self._accept(_renamed(text.strip()))
            if override == "experiment=null":
                self.accepted = [
                    text for text in self.accepted if not text.startswith("experiment=")
                ]
            elif override is not None:
                self.accepted.append(override)

    def compose(self) -> dict[str, Any]:
        """Values that Hydra composes from the accepted overrides; empty if it cannot."""
        paths = [str(folder.resolve()).replace("'", "\\'") for folder in self.folders[1:]]
        search = ",".join(f"'file://{path}'" for path in paths)
        try:
            with initialize_config_dir(str(CONF), version_base="1.3"):
                composed = compose(self.name, [*self.accepted, f"hydra.searchpath=[{search}]"])
            # here already, because other keys may refer to these
            for key, name in IN_LOG_DIR.items():
                if OmegaConf.select(composed, key) == "auto":
                    path = f"${{log.dir}}/{name}" if OmegaConf.select(composed, "log.dir") else None
                    OmegaConf.update(composed, key, path)
            raw = OmegaConf.to_container(composed)
            self.uses_resolvers = self.uses_resolvers or bool(_RESOLVER.search(str(raw)))
            data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            self._composition_fault(error)
            return {}
        assert isinstance(data, dict)
        self._check_texts(data, raw)
        return {str(key): value for key, value in data.items()}

    def _composition_fault(self, error: Exception) -> None:
        reason = str(error).split("Config search path")[0].split("\n")[0].strip()
        fix = "--help lists groups, options and keys"
        if key := getattr(error, "full_key", ""):
            # "Interpolation key 'log.dri' not found"
            name = [*reason.split("'"), ""][1] if "Interpolation key" in reason else ""
            fix = unknown_key(name).fix if "." in name else f"the forms are {_FORMS}"
            reason = f"{key}: {reason}"
        self._fault("composition", "", reason, fix)

    def _check_texts(self, data: dict[Any, Any], raw: Any) -> None:
        """Rejects texts that would name a folder called ~, $NAME or None."""
        for key in leaves():
            value, written = _get(data, key), _get(raw, key)
            texts = written if isinstance(written, list) else [written]
            expanded = [_expanded(text) if isinstance(text, str) else text for text in texts]
            if expanded != texts:
                fix = f"{key}={spelled(expanded) if isinstance(value, list) else expanded[0]}"
                reason = f"{key}={spelled(written)}: the shell did not expand ~ or $NAME"
                self._fault("home", key, reason, shlex.quote(fix))
            for inner in re.findall(r"\$\{([\w.]+)\}", written) if isinstance(written, str) else ():
                if inner in leaves() and _get(data, inner) is None and written != f"${{{inner}}}":
                    reason = f"{key}={written} requires {inner} (got null)"
                    self._fault("null-in-text", key, reason, f"{inner}=NAME")

    def read_model(self, data: dict[str, Any], readers: Mapping[str, ModelReader]) -> None:
        """Fills `model` from the folder that describes it; values on the command line stay."""
        source = self._model_source(data, readers)
        model = data.get("model")
        if source is None or not isinstance(model, dict):
            return
        key, folder = source
        name = key.partition(".")[2]
        try:
            fields = dict(readers[name](folder))
        except (ValueError, OSError) as error:
            self.faults.append(
                Fault(
                    f"{key.replace('.', '-').replace('_', '-')}",
                    ("model", key),
                    f"{key}={folder}: {error}",
                    f"{key}=DIR where DIR/{_DESCRIBED_BY[name]}",
                    True,
                )
            )
            return
        fields |= dict.fromkeys(_DESCRIBED_BY) | {name: folder}
        explicit = {
            key: _get(data, key)
            for key in self.explicit
            if key.startswith("model.") and key in leaves()
        }
        model.update(fields)
        for key, value in explicit.items():
            _put(data, key, value)

    def _model_source(
        self, data: dict[str, Any], readers: Mapping[str, ModelReader]
    ) -> tuple[str, str] | None:
        """Key and value that name the folder of the architecture.

        Without any choice of a model, the folder of the initial weights also describes it.
        """
        names_model = any(text.startswith(("model=", "experiment=")) for text in self.accepted)
        groups = ["model"] if names_model or self.name != "pretrain" else ["model", "init"]
        for group in groups:
            for name in readers:
                folder = _get(data, f"{group}.{name}")
                if isinstance(folder, str):
                    return f"{group}.{name}", folder
        return None

    def is_doubtful(self, knob: str) -> bool:
        """Whether a key may have its value only because of a fault, so that no check reads it."""
        group, explicit = knob.partition(".")[0], knob in self.explicit
        for fault in self.faults:
            if fault.id in ("composition", "plugin"):
                return True
            for wrong in fault.knobs:
                # a guessed knob of a misspelled key is fine if the command line also gives it
                same = knob == wrong or ("." in wrong and knob.startswith(wrong + "."))
                if same and not (explicit and fault.id in _GUESSES):
                    return True
                if not explicit and wrong in ("", "experiment", group):
                    return True
        return False

    def _is_folder(self, folder: Path) -> bool:
        if not folder.is_dir():
            reason = f"--config-dir {folder}: there is no such folder"
            self._fault("config-dir", "", reason, "--config-dir DIR")
        return folder.is_dir()

    def _fault(self, kind: str, knob: str, reason: str, fix: str) -> str | None:
        """Adds a fault; gives None, in place of the override."""
        self.faults.append(Fault(kind, (knob,), reason, fix))
        return None

    def _accept(self, text: str) -> str | None:
        """Override for Hydra; None if it is wrong, which is added to the faults."""
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            if text.lower() in ("help", "?"):
                return self._fault(
                    "grammar", "", f"{text!r} is not key=value", "--help, or --help WORD"
                )
            key, fix = _readable(text)
            reason = f"{text!r} cannot be read: {str(error).splitlines()[0]}"
            return self._fault("grammar", key, reason, fix)
        key, value = override.key_or_group, override._value
        # words that set nothing
        if not key:
            return self._fault("grammar", "", f"{text!r} names no key", _USAGE)
        if override.type == OverrideType.DEL:
            return self._fixed_keys(key, text, "leave it out")
        # group=option, and the one group whose name also sets a value
        if key in self.groups and not isinstance(value, dict):
            return self._choice(override)
        if key == "log.wandb" and not isinstance(value, dict):
            mode = str(override.value()).lower()
            override.key_or_group = key = "log.wandb.mode"
            text = f"{key}={_WANDB_MODES.get(mode, mode)}"
        # key=value
        if key.partition(".")[0] == "hydra":
            reason = f"{text}: Hydra only composes, so its own settings have no effect"
            return self._fault("unknown-key", key, reason, "leave it out")
        written = [key, *_keys_in(key, value)]
        unknown = [unknown_key(name) for name in written if name not in keys()]
        if unknown:
            self.faults += unknown
            return None
        if override.type not in (OverrideType.CHANGE, OverrideType.FORCE_ADD):
            return self._fixed_keys(key, text, text.lstrip("+"))
        self.explicit += written
        return self._value(override, text.lstrip("+"))

    def _fixed_keys(self, key: str, text: str, fix: str) -> str | None:
        return self._fault("grammar", key, f"{text!r}: keys cannot be added or deleted", fix)

    def _choice(self, override: Override) -> str | None:
        """Override that chooses an option of a group."""
        group, chosen = override.key_or_group, override._value
        options = self.groups[group]
        if chosen is None and group == "experiment":
            return "experiment=null"
        if isinstance(chosen, str) and chosen in options:
            return override.input_line
        written = (override.input_line or "").partition("=")[2]
        # precision=bf16, optim=muon
        key = next(
            (
                key
                for key in leaves()
                if key.startswith(f"{group}.") and written in described(key).choices
            ),
            None,
        )
        if key is not None:
            fix = f"{key}={written}"
        elif similar := closest(written, options):
            fix = f"{group}={similar}"
        else:
            fix = f"{group}=NAME; --help lists the {len(options)} names"
            if len(options) <= SHOWN_KEYS:
                fix = f"{group}={alternatives(options)}"
        reason = f"{group}={written}: there is no conf/{group}/{written}.yaml"
        return self._fault("unknown-option", group, reason, fix)

    def _value(self, override: Override, text: str) -> str | None:
        """Override of a value. Without sweeps, commas make a list or are part of a text."""
        key, value = override.key_or_group, text.partition("=")[2]
        kind = kind_of(key)
        if not override.is_sweep_override():
            # 007 is a name where a text is expected
            is_number = isinstance(override._value, (int, float, bool))
            return f"{key}='{value}'" if kind is str and is_number else text
        if kind is list:
            return f"{key}=[{value}]"
        if kind is str:
            return f"{key}='{value}'"
        # choice(1,2) and 1,2 have a list, range(1,2) has none
        first = getattr(override.value(), "list", [default_of(key)])[0]
        fix = f"{key}={spelled(first)}, and a run for each value"
        return self._fault("wrong-type", key, f"{text}: one run takes one value", fix)


def _readable(text: str) -> tuple[str, str]:
    """(knob, fix) of an override that Hydra's grammar does not take."""
    name, _, value = text.partition("=")
    key = name.strip().lstrip("+~")
    if key in leaves():
        if kind_of(key) is str:
            # Hydra takes any text in double quotes, and the shell leaves these in place
            return key, shlex.quote(f'{key}="{_expanded(value)}"')
        fix = f"{key}={spelled(default_of(key))}"
        return key, (_list_override(key, value) if kind_of(key) is list else None) or fix
    is_name = re.fullmatch(r"[A-Za-z_][\w.]*", key) and key not in keys()
    return key, unknown_key(key).fix if is_name else _USAGE


def _list_override(key: str, value: str) -> str | None:
    """Override of a list that Hydra reads, near to one in other brackets, such as (0.9,0.95)."""
    items, fix = items_of(value), None
    quoted = [f'"{item}"' for item in items]
    for spelling in (
        (f"[{','.join(items)}]", f"[{','.join(quoted)}]", f'"{value}"') if items else ()
    ):
        text = f"{key}={spelling}"
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            continue
        faults: list[Any] = []
        data: dict[str, Any] = {}
        _put(data, key, override.value())
        config = convert(data, faults)
        faults += [check.run(config, 1) for check in VALUE_CHECKS if check.knobs == (key,)]
        if not any(faults):
            return text if re.fullmatch(r"[\w.,:/=\[\]-]+", text) else shlex.quote(text)
        fix = fix or next(fault.fix for fault in faults if fault)
    return fix


def _expanded(text: str) -> str:
    """Text with ~ at the beginning of a word and $NAME filled in, as by a shell."""
    return " ".join(expanduser(expandvars(word)) for word in text.split(" "))


def _renamed(text: str) -> str:
    """Override with the present name of its key."""
    key, equals, value = text.partition("=")
    return f"{RENAMED.get(key.lstrip('+'), key)}{equals}{value}"


def _get(data: Any, key: str) -> Any:
    """Value of a dotted key; None where a group has another form or is missing."""
    for name in key.split("."):
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        data = data.setdefault(name, {})
    data[last] = value


def _keys_in(key: str, value: Any) -> list[str]:
    """Dotted keys inside a mapping given to `key`."""
    if not isinstance(value, Mapping):
        return []
    inner = [(f"{key}.{name}", item) for name, item in value.items()]
    return [name for dotted, item in inner for name in (dotted, *_keys_in(dotted, item))]

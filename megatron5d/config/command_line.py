"""The command lines of pretrain.py (`parse_arguments`, `help_text`) and of the tools
(`OptionParser`).

pretrain.py takes a few flags of our own, and Hydra overrides, which load.py reads. Its `--help`
lists flags, the options of each group, and the YAML files with every key and its unit. Tools take
options, and positional words such as overrides anywhere between them.
"""

import argparse
import atexit
import io
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron5d.config.convert import group_names, leaves, types_of
from megatron5d.config.default_files import default_file
from megatron5d.config.errors import Fault, closest, closest_key
from megatron5d.config.schema import Config

FLAGS = {
    "--help": "print this text",
    "--cfg": "print the composed configuration as YAML and leave (`--cfg job` is the same)",
    "--config-dir": "DIR with groups of your own, beside ours: DIR/model/mine.yaml is model=mine; may be repeated",
    "--config-name": "NAME of the YAML that composition starts from, instead of pretrain",
}
_SHORT = {
    "-h": "--help",
    "--hydra-help": "--help",
    "-c": "--cfg",
    "-cd": "--config-dir",
    "-cn": "--config-name",
}


@dataclass
class Arguments:
    """A parsed command line."""

    overrides: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)  # of the user's own groups
    name: str = "pretrain"
    show: str | None = None  # help | cfg
    faults: list[Fault] = field(default_factory=list)


def print_anywhere(interrupted: str = "interrupted") -> None:
    """Prepares standard output and error for whatever they lead to, and the program for Ctrl-C.

    A terminal that lacks a character shows its code, instead of ending the program that prints it.
    Where nobody reads any more (`| head`), the program ends as shells expect it. On Ctrl-C it says
    `NAME: interrupted` in place of a traceback, and Python ends it as SIGINT does: a shell shows
    exit code 130.

    Args:
        interrupted: what it says on Ctrl-C.
    """
    sys.excepthook = partial(_told, f"{Path(sys.argv[0]).stem}: {interrupted}", sys.excepthook)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _Stream(stream.fileno(), "w", closefd=False)
            buffer = raw if stream.write_through else io.BufferedWriter(raw)
            shown, lines = "backslashreplace", stream.line_buffering
            found = io.TextIOWrapper(
                buffer, stream.encoding, shown, None, lines, stream.write_through
            )
            setattr(sys, name, found)
            atexit.register(_flush, found)


def _told(
    interrupted: str, otherwise: Callable[..., None], kind: type[BaseException], *error: Any
) -> None:
    """Shows an exception that nothing has caught."""
    if issubclass(kind, KeyboardInterrupt):
        print(interrupted, file=sys.stderr, flush=True)
    else:
        otherwise(kind, *error)


class _Stream(io.FileIO):
    """A standard stream that ends the program quietly once nobody reads it."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            # where what is printed on the way out goes
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None


def _flush(stream: io.TextIOWrapper) -> None:
    """Prints what is left; without it Python does so when it has chosen the exit code."""
    try:
        stream.flush()
    except SystemExit as error:
        os._exit(int(str(error)))


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Separates flags from overrides. Returns flags, overrides in their order, and a fault for each
    unknown flag."""
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
            if not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                equals, value = "=", rest.pop(0)
            if equals and value not in ("job", "all"):
                out.faults.append(
                    Fault(
                        "flag-value", (flag,), f"{flag} {value}: it takes only job", f"{flag} job"
                    )
                )
        elif flag in ("--config-dir", "--config-name"):
            value = value if equals else (rest.pop(0) if rest and "=" not in rest[0] else "")
            _take(out, flag, value)
        elif flag in ("-m", "--multirun"):
            fix = "for value in 1e-3 1e-4; do python pretrain.py optim.lr=$value log.dir=runs/lr-$value; done"
            out.faults.append(
                Fault(
                    "sweep",
                    (flag,),
                    f"{flag}: one command is one run",
                    f"leave it out; a sweep is {fix}",
                )
            )
        else:
            out.faults.append(_unknown_flag(flag))
            if not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                rest.pop(0)  # the value of the unknown flag
    return out


def _take(out: Arguments, flag: str, value: str) -> None:
    if not value:
        out.faults.append(
            Fault("missing-flag-value", (flag,), f"{flag} has no value", f"{flag} {FLAGS[flag]}")
        )
    elif flag == "--config-dir":
        out.folders.append(value)
    else:
        out.name = value


def _unknown_flag(flag: str) -> Fault:
    name = flag.lstrip("-").replace("-", "_")
    meant = closest(name, group_names(), 0.8) or closest_key(name, leaves())
    near = closest(name, [known.lstrip("-").replace("-", "_") for known in FLAGS], 0.6)
    if near and name != (meant or "").rpartition(".")[2]:
        fix = f"did you mean --{near.replace('_', '-')}?"
    elif meant:
        fix = f"options are written key=value: {meant}=..."
    else:
        fix = (
            f"options are written key=value, such as train.gbs=8; the flags are {', '.join(FLAGS)}"
        )
    return Fault("unknown-flag", (meant or flag,), f"{flag} is no flag", fix)


_HEAD = """\
pretrain.py [flags] [group=option ...] [key=value ...]

A group chooses a file of conf/, a key one value in it; later words win. Examples:
    bash launch/local.sh 16 experiment=quickstart train.steps=400
    python pretrain.py model=llama3_8b parallel.tp=8 parallel.sp=true data.train='[0.7 /d/web, 0.3 /d/code]'
Exit codes: 0 finished, 2 configuration refused, 75 stopped on a signal with a checkpoint saved.
"""


def groups_in(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Returns the groups of some config folders, each with the options it offers."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/**/*.yaml"):
            group, *name = file.relative_to(folder).with_suffix("").parts
            found.setdefault(group, set()).add("/".join(name))
    return {group: sorted(options) for group, options in sorted(found.items())}


def help_text(folders: Sequence[Path]) -> str:
    """Returns the text of `--help`."""
    groups = groups_in(folders)
    parts = [
        _HEAD,
        "Flags:",
        *(f"    {flag:14} {what}" for flag, what in FLAGS.items()),
        "",
        "Groups:",
    ]
    parts += [f"    {group:14} {', '.join(options)}" for group, options in groups.items()]
    for group in groups:
        if group in types_of(Config):
            parts += ["", f"{group}:", textwrap.indent(default_file(group), "    ").rstrip()]
    return "\n".join(parts) + "\n"


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose positional words may be anywhere on the command line; also with
    subcommands. Descriptions keep their line breaks."""

    _words: argparse.Action | None = None
    _takes_overrides = False

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def add_words(self, name: str, **options: Any) -> None:
        """Adds a positional argument of several words; takes the options of `add_argument`."""
        self._words = self.add_argument(name, **options)

    def add_overrides(self) -> None:
        """Adds overrides of the configuration as pretrain.py takes them, and `--config-dir`."""
        self.add_argument(
            "--config-dir",
            action="append",
            default=[],
            metavar="DIR",
            help=FLAGS["--config-dir"].removeprefix("DIR "),
        )
        self.add_words("overrides", nargs="*", metavar="key=value", help="of the configuration")
        self._takes_overrides = True

    def parse_known_args(  # type: ignore[override]  # whose overloads tell what a given namespace becomes
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses words after later options too, which argparse does not."""
        found, left = super().parse_known_args(args, namespace)
        if self._words is None:
            return found, left
        for word in left:
            if word.startswith("-"):
                near = closest(word.partition("=")[0], self._option_string_actions, 0.6)
                self.error(f"{word} is no option" + (f"; did you mean {near}?" if near else ""))
        words = [*getattr(found, self._words.dest), *map(self._words.type or str, left)]  # type: ignore[arg-type]
        folders = found.config_dir if self._takes_overrides else []
        setattr(
            found, self._words.dest, [*(f"--config-dir={folder}" for folder in folders), *words]
        )
        return found, []

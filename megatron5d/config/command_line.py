"""Command lines of pretrain.py (`parse_arguments`, `help_text`) and the tools (`OptionParser`).

pretrain.py takes a few flags, and Hydra overrides, which load.py reads. Its `--help` lists flags,
the options of each group, and every key with its default and unit. Tools take options, and
positional words such as overrides anywhere between them.
"""

import argparse
import atexit
import io
import math
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron5d.config.completion import SHELLS, completion_script
from megatron5d.config.convert import group_names, leaves
from megatron5d.config.default_files import CONF, default_file, key_lines
from megatron5d.config.errors import Fault, closest, closest_key
from megatron5d.config.other_names import advice

FLAGS = {
    "--help": "print this text, or what it says about KEY, GROUP or any WORD: --help warmup",
    "--cfg": "print the composed configuration as YAML and exit (`--cfg job` is the same)",
    "--config-dir": "DIR with more groups: DIR/model/mine.yaml is model=mine; may be repeated",
    "--completion": "SHELL: print completion for bash or zsh, as in "
    'eval "$(python pretrain.py --completion bash)"',
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
    folders: list[str] = field(default_factory=list)  # of --config-dir
    name: str = "pretrain"
    show: str | None = None  # help | cfg | completion
    topic: str = ""  # of --help, or the shell of --completion
    faults: list[Fault] = field(default_factory=list)


def print_anywhere(interrupted: str = "interrupted") -> None:
    """Prepares standard output and error for any terminal or pipe, and the program for Ctrl-C.

    A terminal that lacks a character shows its code, instead of an error. If the reader of a pipe
    has ended (`| head`), the program ends as shells expect it. On Ctrl-C it prints
    `NAME: interrupted` instead of a traceback, and ends by SIGINT: a shell shows exit code 130.

    Args:
        interrupted: message on Ctrl-C.
    """
    sys.excepthook = partial(
        _show_exception, f"{Path(sys.argv[0]).stem}: {interrupted}", sys.excepthook
    )
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _Stream(stream.fileno(), "w", closefd=False)
            buffer = raw if stream.write_through else io.BufferedWriter(raw)
            wrapper = io.TextIOWrapper(
                buffer,
                stream.encoding,
                "backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, wrapper)
            atexit.register(_flush, wrapper)


def _show_exception(
    interrupted: str, show: Callable[..., None], kind: type[BaseException], *error: Any
) -> None:
    """Shows an uncaught exception by `show`, and an interrupt as one line."""
    if issubclass(kind, KeyboardInterrupt):
        print(interrupted, file=sys.stderr, flush=True)
    else:
        show(kind, *error)


class _Stream(io.FileIO):
    """A standard stream that ends the program quietly when its pipe is closed."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            # later output, such as that of the exit handlers, is discarded
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None


def _flush(stream: io.TextIOWrapper) -> None:
    """Prints the rest of the buffer, while the exit code can still be set."""
    try:
        stream.flush()
    except SystemExit as error:
        os._exit(int(str(error)))


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Separates flags from overrides; wrong flags become faults."""
    arguments = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            arguments.overrides.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = _SHORT.get(flag, flag)
        takes_value = flag not in ("-m", "--multirun") and not equals
        values = [value] if equals else []
        while takes_value and words and not words[0].startswith("-") and "=" not in words[0]:
            values.append(words.pop(0))
            # a flag of another code base may have several
            takes_value = flag not in FLAGS
        if fault := _apply(arguments, flag, values):
            arguments.faults.append(fault)
    return arguments


def _apply(arguments: Arguments, flag: str, values: Sequence[str]) -> Fault | None:
    """Stores a flag and its value; gives the fault of a wrong one."""
    value = " ".join(values)
    if flag == "--help":
        arguments.show, arguments.topic = "help", value
    elif flag == "--completion":
        if value not in SHELLS:
            reason = f"{flag} takes {' or '.join(SHELLS)} (got {value or 'nothing'})"
            return Fault("flag-value", (flag,), reason, f"{flag} bash")
        arguments.show, arguments.topic = "completion", value
    elif flag == "--cfg":
        arguments.show = arguments.show or "cfg"
        if value not in ("", "job", "all"):
            return Fault("flag-value", (flag,), f"{flag} takes only job (got {value})", "--cfg job")
    elif flag in ("-m", "--multirun"):
        fix = "leave it out, and start one run for each value"
        return Fault("sweep", (flag,), f"{flag}: one command is one run", fix)
    elif flag not in FLAGS:
        return _unknown_flag(flag, values)
    elif not value:
        fix = f"{flag} {FLAGS[flag]}"
        return Fault("missing-flag-value", (flag,), f"{flag} has no value", fix)
    elif flag == "--config-dir":
        arguments.folders.append(value)
    else:
        arguments.name = value
    return None


def _unknown_flag(flag: str, values: Sequence[str]) -> Fault:
    name = flag.lstrip("-").replace("-", "_")
    if other := advice(flag, values):
        key, text = other
        fix = f"options are written key=value: {text}" if key else text
        return Fault("unknown-flag", (key or flag,), f"{flag} is not a flag", fix)
    key = closest(name, group_names(), 0.8) or closest_key(name, leaves()) or ""
    similar = closest(flag, FLAGS, 0.7)
    if similar and name != key.rpartition(".")[2]:
        fix = f"did you mean {similar}?"
    elif key:
        fix = f"options are written key=value: {key}={' '.join(values) or '...'}"
    else:
        fix = f"options are written key=value; the flags are {', '.join(FLAGS)}"
    return Fault("unknown-flag", (key or flag,), f"{flag} is not a flag", fix)


_HEAD = """\
pretrain.py [flags] [group=option ...] [key=value ...]

A group selects a file of conf/, a key sets one value in it; later words win. Examples:
    bash launch/local.sh 16 experiment=quickstart train.steps=400
    python pretrain.py model=llama3_8b parallel.tp=8 data.train='[0.7 /d/web, 0.3 /d/code]'
Exit codes: 0 finished, 2 configuration refused, 75 stopped on a signal with a checkpoint saved.
"""


def groups_in(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Groups of some config folders, each with its options."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/**/*.yaml"):
            group, *name = file.relative_to(folder).with_suffix("").parts
            groups.setdefault(group, set()).add("/".join(name))
    return {group: sorted(options) for group, options in sorted(groups.items())}


def answer(arguments: Arguments) -> str | None:
    """Text of `--help` or `--completion`; None if the command line has neither."""
    folders = [CONF, *map(Path, arguments.folders)]
    if arguments.show == "completion":
        return completion_script(arguments.topic, groups_in(folders))
    if arguments.show != "help":
        return None
    return _help_on(arguments.topic) if arguments.topic else help_text(folders)


def _help_on(topic: str) -> str:
    """What `--help` says about a key, a group, or every key whose description has a word."""
    if topic in group_names() and topic != "experiment":
        return f"{topic}:\n{textwrap.indent(default_file(topic), '    ')}"
    word = topic.lower().lstrip("-").replace("-", "_")
    matching = [key for key in leaves() if word in (key, key.rpartition(".")[2])]
    pattern = rf"\b{re.escape(word)}"
    matching = matching or [key for key in leaves() if re.search(pattern, key_lines(key).lower())]
    if not matching and (similar := closest_key(word, leaves())) is not None:
        matching = [similar]
    if not matching and (other := advice(topic)) is not None:
        key, text = other
        return f"{topic}: {text}\n{key_lines(key) if key else ''}"
    return "".join(map(key_lines, matching)) or f"no key's description has the word {topic}\n"


def help_text(folders: Sequence[Path]) -> str:
    """Text of `--help`."""
    groups = groups_in(folders)
    lines = [_HEAD, "Flags:", *(f"    {flag:14} {text}" for flag, text in FLAGS.items())]
    lines += ["", "Groups:"]
    lines += [f"    {group:14} {', '.join(options)}" for group, options in groups.items()]
    for group in sorted(set(group_names()) - {"experiment"}):
        lines += ["", f"{group}:", textwrap.indent(default_file(group), "    ").rstrip()]
    return "\n".join(lines) + "\n"


def _finite(text: str) -> float:
    """Parses a number: nan and inf pass most comparisons with a limit."""
    if not math.isfinite(number := float(text)):
        raise argparse.ArgumentTypeError(f"requires a finite number (got {text})")
    return number


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose positional words may be anywhere, also with subcommands.

    Descriptions keep their line breaks. Options of type float are finite.
    """

    _words: argparse.Action | None = None

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)
        self.register("type", float, _finite)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Adds an argument; `--out` may always be written `-o`."""
        short = ["-o"] if "--out" in names and "-o" not in names else []
        return super().add_argument(*short, *names, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Adds the choice that was probably meant to argparse's error."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            similar = closest(str(value), map(str, action.choices or ()), 0.6)
            if similar is not None:
                error.message = f"did you mean {similar}? {error.message}"
            raise

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

    # argparse has overloads for namespaces of other types, which no tool passes
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses words after later options, too, which argparse does not.

        Without such words, a required option may be given as a word: `to-hf DIR -o OUT`.
        """
        required = [a for a in self._actions if a.option_strings and a.required and not self._words]
        for action in required:
            action.required = False
        parsed, later_words = super().parse_known_args(args, namespace)
        for action in required:
            action.required = True
        if self._subparsers is None:
            self._refuse_options(later_words)
        self._fill(parsed, required, later_words)
        if self._words is None:
            return parsed, later_words
        convert: Any = self._words.type or str
        words = [f"--config-dir={folder}" for folder in getattr(parsed, "config_dir", [])]
        words += [*getattr(parsed, self._words.dest), *map(convert, later_words)]
        setattr(parsed, self._words.dest, words)
        return parsed, []

    def _fill(self, parsed: Any, required: Sequence[argparse.Action], words: list[str]) -> None:
        """Takes words for the required options that were not given, in their order."""
        absent = [action for action in required if getattr(parsed, action.dest) is None]
        for i, action in enumerate(absent):
            if not words:
                names = ", ".join("/".join(action.option_strings) for action in absent[i:])
                self.error(f"the following arguments are required: {names}")
            value = self._get_value(action, words.pop(0))
            self._check_value(action, value)
            setattr(parsed, action.dest, value)

    def _refuse_options(self, words: Sequence[str]) -> None:
        for word in words:
            if word.startswith("-"):
                similar = closest(word.partition("=")[0], self._option_string_actions, 0.6)
                hint = f"; did you mean {similar}?" if similar else ""
                self.error(f"{word} is not an option{hint}")

"""Every command in the documents is valid: the program's parser accepts its options, the checks its
overrides."""

import argparse
import contextlib
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from megatron5d.config.errors import ConfigError
from megatron5d.config.load import load_config

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# folders and schedules that a reader makes as the document says
READERS_OWN = ("~/my-conf", "one_at_a_time")
INVALID = "train.stepz"  # docs/configuration.md shows the error message


class Parsed(Exception):
    """The program has read its command line."""


def commands_in(text):
    """Shell commands and lines of overrides in blocks, and commands in the prose, without
    placeholders."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", "\n".join(blocks)).splitlines()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += re.findall(r"`((?:python|bash|sbatch) [^`]*)`", prose.replace("\n", " "))
    for line in lines:
        line = re.sub(r"^(\$ )?([A-Z_\d]+=\S+ )*|\s#.*", "", line.strip())
        line = re.split(r"\s{2,}(?=[^\s-])", line)[0]  # an explanation follows
        if re.match(r"(python|bash|sbatch) |[a-z]+\.[a-z_\d]+=", line):
            line = re.sub(r"(?<= )((\S+=)?\.\.\.|--\w+ …|<\w+>)(?= |$)", "", line)
            yield shlex.split(line)


COMMANDS = [
    pytest.param(words, id=f"{path.name}: {' '.join(words)}"[:110])
    for path in DOCUMENTS
    for words in commands_in(path.read_text())
    if not any(name in word for name in READERS_OWN for word in words)
]


def pass_checks(overrides, world):
    load_config(
        overrides,
        world=world,
        model_readers=dict.fromkeys(("from_hf", "from_checkpoint"), lambda folder: {}),
        files=False,
    )


def parse_options(name, arguments, monkeypatch):
    """The options that a program parses."""

    def parse(parser, args=None, namespace=None):
        options, unknown = parser.parse_known_args(args, namespace)
        if unknown:
            parser.error(f"unrecognized arguments: {unknown}")
        raise Parsed(options)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_intermixed_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    main = getattr(importlib.import_module(name), "main", None)
    if main is None:  # a module without options
        assert not arguments
        return None
    with pytest.raises(Parsed) as parsed:
        main(*([arguments] if main.__code__.co_argcount else []))
    return parsed.value.args[0]


def check_python(words, monkeypatch):
    if words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[2:])
    elif words[0] == "pretrain.py":
        with contextlib.suppress(SystemExit):  # after --help and --cfg
            pass_checks(words[1:], 1)
    else:
        name = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
        arguments = words[2:] if words[0] == "-m" else words[1:]
        options = parse_options(name, arguments, monkeypatch)
        if getattr(options, "overrides", None):
            pass_checks(options.overrides, options.world or 8)


@pytest.mark.parametrize("words", COMMANDS)
def test_the_command_is_valid(words, monkeypatch, capsys):
    program, *arguments = words
    if any(INVALID in word for word in words):
        with pytest.raises(ConfigError) as error:
            pass_checks(arguments[2:], int(arguments[1]))
        shown = (ROOT / "docs" / "configuration.md").read_text()
        assert all(line in shown for line in str(error.value).splitlines())
    elif program == "python":
        check_python(arguments, monkeypatch)
    elif program == "sbatch":
        (script,) = (i for i, word in enumerate(arguments) if word.endswith(".sbatch"))
        nodes, gpus = (int(word.split("=")[1]) for word in arguments[:script])
        pass_checks(arguments[script + 1 :], nodes * gpus)
    elif program == "bash" and arguments[0] == "launch/local.sh":
        if arguments[1].isdigit():
            pass_checks(arguments[2:], int(arguments[1]))
    elif program == "bash":
        assert (ROOT / arguments[0]).exists()
    else:
        pass_checks(words, None)


def test_commands_are_found():
    block = [
        "```bash",
        "$ A=1 python x.py --a 1 \\",
        "  b=2   # why",
        "bash y.sh 3 ...    and so on",
        "```",
    ]
    text = "\n".join([*block, "say `python z.py <op>`, not `x`"])
    assert list(commands_in(text)) == [
        ["python", "x.py", "--a", "1", "b=2"],
        ["bash", "y.sh", "3"],
        ["python", "z.py"],
    ]
    assert len(COMMANDS) > 40

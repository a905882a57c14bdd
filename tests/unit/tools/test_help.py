"""`--help` and bad options of every tool are answered before torch is imported, which takes
seconds."""

import argparse
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron5d.checkpoint.hf.export_config import ARCHITECTURE
from megatron5d.checkpoint.hf.families import DEFAULTS, RENAMED
from megatron5d.config import command_line
from megatron5d.tools import convert
from megatron5d.tools.options import file_prefix

ROOT = Path(__file__).resolve().parents[3]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
RUN = """
import runpy, sys
sys.modules["torch"] = None  # importing it fails
for tool in {tools}:
    sys.argv = [tool, "{option}"]
    try:
        runpy.run_path(tool, run_name="__main__")
    except SystemExit as end:
        print("exit code", end.code)
"""
HELP_IN_CHINESE = """
import runpy, sys
sys.argv = ["x", "--help"]
try:
    runpy.run_path("{program}", run_name="__main__")
except SystemExit:
    print("\u6d4b")
"""


@pytest.mark.parametrize("program", [ROOT / "pretrain.py", *TOOLS], ids=lambda path: path.stem)
def test_a_terminal_without_a_character_ends_no_tool(program):
    run = subprocess.run(
        [sys.executable, "-c", HELP_IN_CHINESE.replace("{program}", str(program))],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        cwd=program.parent,
    )
    assert (run.returncode, run.stderr) == (0, "") and run.stdout.endswith("\\u6d4b\n")


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_closed_pipe_ends_a_tool_quietly(tmp_path, unbuffered, merged):
    """As in `convert.py inspect PATH | head`: the exit code that a shell shows for SIGPIPE, and no
    message."""
    reader, writer = os.pipe()
    os.close(reader)
    command = f"{ROOT}/tools/schedule.py show --schedule=1f1b --pp=2 --microbatches=4"
    words = [sys.executable, *["-u"] * unbuffered, *command.split()]
    with open(tmp_path / "stderr", "wb") as stderr, open(writer, "wb") as closed:
        run = subprocess.run(words, stdout=closed, stderr=closed if merged else stderr)
    assert (run.returncode, (tmp_path / "stderr").read_text()) == (128 + signal.SIGPIPE, "")


def test_convert_and_its_guide_list_every_family():
    families = {*DEFAULTS, *RENAMED, "gemma3"}  # the last with a vision tower
    listed = convert.__doc__.partition("by model_type: ")[2].partition(" (docs/")[0]
    written, read = (
        part.split(", ")
        for part in re.sub(r"\s+", " ", listed).split("; and, written as one of these: ")
    )
    assert sorted(written + read) == sorted(families)
    guide = (ROOT / "docs/checkpoints.md").read_text()
    table = guide.partition("| `model_type` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert rows == [family for family in written + read if family != "gemma3"]
    assert written == list(ARCHITECTURE)


@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--no-such-option", 2)])
def test_tools_answer_without_torch(option, code):
    source = RUN.format(tools=[str(tool) for tool in TOOLS], option=option)
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    codes = [line for line in run.stdout.splitlines() if line.startswith("exit code")]
    assert len(TOOLS) >= 13 and codes == [f"exit code {code}"] * len(TOOLS)
    printed = run.stdout if code == 0 else run.stderr
    assert printed.count("usage: ") == len(TOOLS)


def actions_of(parser):
    """Every option of a parser and its subcommands, with the parser that it belongs to."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from actions_of(command)
        else:
            yield parser, action


def test_every_number_of_every_tool_is_finite(monkeypatch):
    parsers = []

    def capture(parser, *_):
        parsers.append(parser)
        raise SystemExit

    monkeypatch.setattr(command_line.OptionParser, "parse_known_args", capture)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", capture)
    monkeypatch.setattr(command_line, "print_anywhere", lambda *_: None)
    for tool in TOOLS:
        monkeypatch.setattr(sys, "argv", [str(tool)])
        with pytest.raises(SystemExit):
            runpy.run_path(str(tool), run_name="__main__")
    assert len(parsers) == len(TOOLS)
    numbers = [
        (parser, action)
        for tool_parser in parsers
        for parser, action in actions_of(tool_parser)
        if action.type not in (None, Path, file_prefix)
    ]
    for parser, action in numbers:
        for value in ("nan", "inf", "-inf"):
            with pytest.raises(argparse.ArgumentError):
                parser._get_value(action, value)
    floats = [action for _, action in numbers if action.type is float]
    assert len(floats) > 20

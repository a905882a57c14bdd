"""`--help` and refused options of every tool come before torch is imported, which takes seconds."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron5d.checkpoint.hf.export_config import ARCHITECTURE
from megatron5d.checkpoint.hf.families import DEFAULTS, RENAMED
from megatron5d.tools import convert

TOOLS = sorted((Path(__file__).resolve().parents[3] / "tools").glob("*.py"))
RUN = """
import runpy, sys
sys.modules["torch"] = None  # importing it fails
for tool in {tools}:
    sys.argv = [tool, "{option}"]
    try:
        runpy.run_path(tool, run_name="__main__")
    except SystemExit as left:
        print("left with", left.code)
"""


@pytest.mark.parametrize(
    "program", [TOOLS[0].parents[1] / "pretrain.py", *TOOLS], ids=lambda path: path.stem
)
def test_a_terminal_without_our_characters_ends_nobody(program):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    source = "import sys; sys.argv = ['x', '--help']; import runpy\ntry: runpy.run_path('{0}', run_name='__main__')\n"
    source += "except SystemExit: print('\u6d4b')"
    command = [sys.executable, "-c", source.replace("{0}", str(program))]
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=program.parent
    )
    assert (run.returncode, run.stderr) == (0, "") and run.stdout.endswith("\\u6d4b\n")


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_reader_that_leaves_ends_a_tool_quietly(tmp_path, unbuffered, merged):
    """As in `convert.py inspect PATH | head`: the exit code that a shell shows for SIGPIPE, and no
    word."""
    reads, writes = os.pipe()
    os.close(reads)
    shown = ["show", "--schedule=1f1b", "--pp=2", "--microbatches=4"]
    words = ["-u"] * unbuffered + [str(TOOLS[0].parent / "schedule.py"), *shown]
    with open(tmp_path / "told", "wb") as told, open(writes, "wb") as nobody:
        run = subprocess.run(
            [sys.executable, *words], stdout=nobody, stderr=nobody if merged else told
        )
    assert (run.returncode, (tmp_path / "told").read_text()) == (128 + signal.SIGPIPE, "")


def test_convert_and_its_guide_list_every_family():
    families = {*DEFAULTS, *RENAMED, "gemma3"}  # the last with a vision tower
    listed = re.sub(
        r"\s+", " ", str(convert.__doc__).partition("by model_type: ")[2].partition(" (docs/")[0]
    )
    written, read = (part.split(", ") for part in listed.split("; and, written as one of these: "))
    assert sorted(written + read) == sorted(families)
    guide = (
        (TOOLS[0].parents[1] / "docs/checkpoints.md")
        .read_text()
        .partition("| `model_type` |")[2]
        .partition("\n\n")
    )
    rows = re.findall(r"^\| `(\w+)`", guide[0], re.MULTILINE)
    assert rows == [family for family in written + read if family != "gemma3"] and written == list(
        ARCHITECTURE
    )


@pytest.mark.parametrize("option, code", [("--help", 0), ("--no-such-option", 2)])
def test_tools_answer_without_torch(option, code):
    source = RUN.format(tools=[str(tool) for tool in TOOLS], option=option)
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    left = [line for line in run.stdout.splitlines() if line.startswith("left with")]
    assert len(TOOLS) >= 13 and left == [f"left with {code}"] * len(TOOLS)
    said = run.stdout if code == 0 else run.stderr
    assert said.count("usage: ") == len(TOOLS)

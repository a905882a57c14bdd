"""Ctrl-C ends a tool, its worker processes included, with one line and by SIGINT: exit code 130 in
a shell."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
# A tool that Ctrl-C reaches while it reads its options.
RUN = """
import argparse, os, runpy, signal, sys
argparse.ArgumentParser.parse_known_args = lambda *_: os.kill(os.getpid(), signal.SIGINT)
sys.argv = {words}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FORKED = """
import os, sys, time
from megatron5d.config.command_line import print_anywhere
from megatron5d.tools.conversion.processes import in_processes
print_anywhere()
for done in in_processes(lambda number: time.sleep(60 * number), 3, 2):
    print(done, flush=True)  # after call 0, while 1 and 2 sleep
"""
# a shell's background has it ignored
IN_A_TERMINAL = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
WORDS = " ".join(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"] * 100)


def interrupted(process):
    """What a process and those that it started say once all of them are sent SIGINT, as a terminal
    does it."""
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT, said
    return said


def started(*words):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, *words]
    return subprocess.Popen(
        command, **pipes, text=True, start_new_session=True, cwd=ROOT, preexec_fn=IN_A_TERMINAL
    )


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_every_tool_says_one_line(tool):
    command = [sys.executable, "-c", RUN.format(words=[str(tool), "reshard"])]
    run = subprocess.run(command, capture_output=True, text=True, preexec_fn=IN_A_TERMINAL)
    goes_on = "; the same command continues" * (tool.stem in ("preprocess", "convert"))
    assert (run.returncode, run.stderr) == (-signal.SIGINT, f"{tool.stem}: interrupted{goes_on}\n")


def test_forked_processes_say_nothing():
    process = started("-c", FORKED)
    assert process.stdout.readline() == "None\n"
    time.sleep(1)  # until the other process has begun, too
    assert interrupted(process) == "-c: interrupted\n"


def test_preprocessing_with_processes_says_one_line_and_continues(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(["[UNK]", *set(WORDS.split())])}, "[UNK]"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "o"
    corpus.write_text((json.dumps({"text": WORDS}) + "\n") * 6000)
    words = [
        "tools/preprocess.py",
        "--input",
        corpus,
        "--tokenizer",
        tmp_path / "tokenizer.json",
        "--out",
        out,
    ]
    process = started(*words, "--workers", "2")
    while not list(tmp_path.glob("o*")):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(1)  # a process that is just being started may still say that its parent is gone
    # of the tokenizer
    said = [line for line in interrupted(process).splitlines() if "WARNING" not in line]
    assert said == ["preprocess: interrupted; the same command continues"]
    assert started(*words, "--workers", "2").wait(60) == 0 and (tmp_path / "o.idx").exists()

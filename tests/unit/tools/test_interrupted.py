"""Ctrl-C ends a tool and its workers with one line, by SIGINT: exit code 130 in a shell."""

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
for result in in_processes(lambda number: time.sleep(60 * number), 3, 2):
    print(result, flush=True)  # after call 0, while 1 and 2 sleep
"""
# processes in a shell's background ignore it
IN_A_TERMINAL = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
WORDS = " ".join(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"] * 100)


def start(*words):
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        preexec_fn=IN_A_TERMINAL,
    )


def interrupt(process):
    """Sends SIGINT to a process and its children, as a terminal does; what they print on stderr."""
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT, printed
    return printed


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_every_tool_prints_one_line(tool):
    command = [sys.executable, "-c", RUN.format(words=[str(tool), "reshard"])]
    run = subprocess.run(command, capture_output=True, text=True, preexec_fn=IN_A_TERMINAL)
    hint = "; the same command continues" * (tool.stem in ("preprocess", "convert"))
    assert (run.returncode, run.stderr) == (-signal.SIGINT, f"{tool.stem}: interrupted{hint}\n")


def test_forked_processes_print_nothing():
    process = start("-c", FORKED)
    assert process.stdout.readline() == "None\n"
    time.sleep(1)  # until the other process has begun, too
    assert interrupt(process) == "-c: interrupted\n"


def test_preprocessing_with_processes_prints_one_line_and_continues(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *set(WORDS.split())])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "corpus.jsonl").write_text((json.dumps({"text": WORDS}) + "\n") * 6000)
    command = f"tools/preprocess.py --input {tmp_path}/corpus.jsonl --out {tmp_path}/o --workers 2"
    words = f"{command} --tokenizer {tmp_path}/tokenizer.json".split()
    process = start(*words)
    while not list(tmp_path.glob("o*")):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(1)  # a process that is just being started may print that its parent is gone
    # warnings are about the tokenizer
    printed = [line for line in interrupt(process).splitlines() if "WARNING" not in line]
    assert printed == ["preprocess: interrupted; the same command continues"]
    assert start(*words).wait(60) == 0 and (tmp_path / "o.idx").exists()

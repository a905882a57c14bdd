"""The tree keeps the limits of its house. Raising one is a decision to defend, not a habit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from architecture.rules import MAX_LOADED_FILES, MAX_LOADED_LINES, RULES
from architecture.source import Source

SOURCE = Source(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule):
    broken = rule(SOURCE)
    assert not broken, "\n" + "\n".join(broken)


def test_training_loads_what_every_run_needs_and_no_more():
    """What a configuration asks for is imported where it is asked for: planning, Hugging Face,
    trackers."""
    program = "import json, sys, megatron5d.train.loop; print(json.dumps(sorted(sys.modules)))"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=SOURCE.root, check=True
    )
    loaded = set(json.loads(said.stdout))
    files = [file for file in SOURCE.code if file.module in loaded]
    assert (
        len(files) <= MAX_LOADED_FILES and sum(file.num_lines for file in files) <= MAX_LOADED_LINES
    )
    absent = {
        "planning",
        "parity",
        "checkpoint.hf",
        "data.tokenizer",
        "config.load",
        "train.monitoring.trackers",
    }
    absent |= {"train.scheduling"}
    assert not [name for name in loaded for part in absent if name.startswith(f"megatron5d.{part}")]


def test_the_tree_was_really_read():
    paths = {file.path for file in SOURCE.files}
    assert {
        "pretrain.py",
        "kernels/__init__.py",
        "megatron5d/topology/axis.py",
        "tests/layouts.py",
    } <= paths
    assert len(SOURCE.code) > 50

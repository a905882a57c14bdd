"""The tree keeps to the rules of its architecture. Raising a limit is a decision to defend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from architecture.rules import MAX_LOADED_FILES, MAX_LOADED_TOKENS, RULES
from architecture.source import Source

SOURCE = Source(Path(__file__).resolve().parents[2])
# A run imports these only where its configuration asks for them.
LOADED_ON_DEMAND = {
    "planning",
    "parity",
    "checkpoint.hf",
    "data.tokenizer",
    "config.load",
    "train.monitoring.trackers",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule):
    broken = rule(SOURCE)
    assert not broken, "\n" + "\n".join(broken)


def test_training_loads_what_every_run_needs_and_no_more():
    program = "import json, sys, megatron5d.train.loop; print(json.dumps(sorted(sys.modules)))"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=SOURCE.root, check=True
    )
    loaded = set(json.loads(process.stdout))
    files = [file for file in SOURCE.product if file.module in loaded]
    assert len(files) <= MAX_LOADED_FILES
    assert sum(file.num_tokens() for file in files) <= MAX_LOADED_TOKENS
    prefixes = tuple(f"megatron5d.{name}" for name in LOADED_ON_DEMAND)
    assert not [name for name in loaded if name.startswith(prefixes)]


def test_the_tree_was_really_read():
    paths = {file.path for file in SOURCE.files}
    assert {"pretrain.py", "kernels/__init__.py", "tests/layouts.py"} <= paths
    assert len(SOURCE.product) > 50

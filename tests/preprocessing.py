"""Texts to preprocess, and runs of tools/preprocess.py."""

import json
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

RANDOM = random.Random(0)

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]

TEXTS = [" ".join(RANDOM.choices(WORDS, k=RANDOM.randrange(1, 60))) for _ in range(400)]


def tool(*arguments):
    command = [sys.executable, "tools/preprocess.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def summary_of(*arguments):
    done = tool(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def contents(folder, pattern):
    return {path.name.partition(".")[2]: path.read_bytes() for path in sorted(folder.glob(pattern))}

"""Tokenising, preprocessing and Megatron's order keep pace with their peers; ratios of CPU times,
with slack."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from megatron5d.tools import bench_data

for package in ("tiktoken", "tokenizers", "transformers", "megatron"):
    # not imported: Megatron-Core takes seconds, in every process that collects tests
    if find_spec(package) is None:
        pytest.skip(f"could not find {package!r}", allow_module_level=True)

MOST = {  # ours ÷ peer; about half as much again as is measured
    "BPE encoding": {"encode_batch_fast": 0.4, "tiktoken": 1.5},
    "preprocessing, 1 worker": {"megatron": 0.4},
    "preprocessing, 2 workers": {"megatron": 0.5},
    "order: one dataset": {"megatron": 1.9},
    "order: a blend of four": {"megatron": 1.9},
}


@pytest.mark.timing
def test_ratios_hold():
    """In a process of its own: Megatron-Core changes what torch.load admits. No file: workers would
    import it again."""
    program = "import sys; from megatron5d.tools.bench_data import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        program,
        "--mb",
        "3",
        "--tokens",
        "2.5e8",
        "--repeats",
        "2",
        "--json",
    ]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found.keys() == MOST.keys()
    for what, row in found.items():
        ours = row.pop("ours")
        assert row.keys() == MOST[what].keys() and min(row.values()) > 0
        for name, seconds in row.items():
            assert ours < MOST[what][name] * seconds, (what, name, ours, seconds)


def test_bad_input_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_data.main(["--mb", "0"])
    assert "--mb is a number from 0.1 to 100" in capsys.readouterr().err

"""Checkpoints keep pace with torch.save, DCP and safetensors; ratios of CPU times, with slack for a busy machine."""

import json

from megatron5d.tools.bench_checkpoint import main


def test_ratios_hold(capsys):
    assert main(["--gb", "0.2", "--repeats", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    most = {"torch.save": 1.1, "torch.load": 1.1, "dcp.save": 1.0, "dcp.load": 1.0}
    for what in ("save", "load", "export", "import"):
        ours = found[what].pop("ours")
        for name, seconds in found[what].items():
            assert ours < 1.5 * most.get(name, 1.3) * seconds, (what, name, ours, seconds)
    assert found["reshard"]["ours"] < 12 * found["reshard"]["cp, sync"]  # of little data: two processes build ranks
    assert 1 <= found["restart of 64 ranks"]["ours"] < 1.05

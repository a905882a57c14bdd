"""Published layouts, each dimension made as small as it still is one: the same numbers as one
process."""

import pytest

from tools import parity

ZERO_LAYERS = ["pipeline.layout=[0,1,1,0]", "model.num_layers=2"]
# Overrides that make a layout small; the model is shrunk by the tool.
SMALL = {
    "palm_540b": ["parallel.tp=2", "train.gbs=8", "train.mbs=1"],
    "llama3_405b_128k": [
        "parallel.tp=2",
        "parallel.cp=2",
        "parallel.pp=2",
        "parallel.vpp=2",
        "train.gbs=4",
        *ZERO_LAYERS,
    ],
    "deepseek_v2": ["parallel.pp=2", "parallel.ep=4", "train.gbs=16", "train.gbs_ramp=null"],
    "mixtral_8x22b": ["parallel.pp=2", "parallel.ep=4", "train.gbs=8"],
}


@pytest.mark.parametrize("name", SMALL)
def test_small_version_equals_one_process(name, capsys):
    assert (
        parity.main(["--world", "8", "--steps", "2", f"experiment=published/{name}", *SMALL[name]])
        == 0
    )
    assert "EQUAL" in capsys.readouterr().out

"""tools/plan.py plans runs whose data and machines are not there."""

import json

import pytest

from tools.plan import main

RUN = ["memory", "--world", "8", "model=tiny", "train.gbs=8", "precision.dtype=bf16", "parallel.pp=2"]


def test_memory_of_every_pipeline_rank_as_json(capsys):
    assert main([*RUN, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(told["ranks"]) == ["0", "1"]
    for rank in told["ranks"].values():
        assert sum(rank["bytes"].values()) == rank["needed"] > rank["allocated"] > rank["resident"]


def test_a_device_that_is_too_small(capsys):
    assert main([*RUN, "--device-gb", "80"]) == 0 and "It fits 80 GB" in capsys.readouterr().out
    assert main([*RUN, "--device-gb", "0.001"]) == 1 and "WARNING: pipeline rank" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["parallel.tp=3", "train.stepz=3", "pipeline.schedule=dualpipe_x"])
def test_a_run_that_cannot_be_is_refused(wrong, capsys):
    assert main([*RUN, wrong]) == 2
    assert "the configuration is refused" in capsys.readouterr().err

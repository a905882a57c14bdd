"""Globs of parameter names that match nothing are refused before the start, whatever the layout."""

import pytest

from megatron5d.config.load import load_config
from megatron5d.train.preflight.parameters import glob_faults

LAYOUT = ["parallel.tp=2", "parallel.pp=2", "parallel.cp=2", "pipeline.schedule=1f1b"]


@pytest.mark.parametrize("overrides", [[], LAYOUT, ["precision.dtype=fp64", "parallel.zero=3"]])
@pytest.mark.parametrize("model", ["tiny", "tiny_gpt2", "tiny_deepseek"])
def test_each_glob_matches_some_parameter(model, overrides):
    globs = "['*norm*','nosuch.*','layers.0.*','layers.99.*']"
    config = load_config([f"model={model}", f"optim.decay_exclude={globs}", *overrides])
    (fault,) = glob_faults(config, 8)
    assert fault.reason.startswith(
        "optim.decay_exclude: nosuch.* and layers.99.* matches no parameter"
    )
    fix = fault.fix.strip('"')
    assert glob_faults(load_config([f"model={model}", fix, *overrides]), 8) == []


@pytest.mark.parametrize("key", ["freeze", "lr_scale", "decay_scale"])
def test_globs_of_other_keys_match_too(key):
    factor = "" if key == "freeze" else "0.5 "
    config = load_config(["model=tiny", f"optim.{key}=['{factor}head.*','{factor}hed.*']"])
    (fault,) = glob_faults(config, 1)
    assert fault.knobs == (f"optim.{key}",) and fault.fix == f"\"optim.{key}=['{factor}head.*']\""


def test_something_is_left_to_train():
    (fault,) = glob_faults(load_config(["model=tiny", "optim.freeze=['*.weight','*']"]), 1)
    assert "freezes every parameter" in fault.reason and fault.fix == "optim.freeze=[]"


def test_globs_of_muon_count_where_they_are_asked_for():
    muon = ["model=tiny", "optim.name=muon"]
    assert glob_faults(load_config(muon), 1) == []
    (fault,) = glob_faults(load_config([*muon, "optim.muon_exclude=['*embeding*']"]), 1)
    assert fault.knobs == ("optim.muon_exclude",)
    assert glob_faults(load_config(["model=tiny", "optim.muon_exclude=['*embeding*']"]), 1) == []

"""A run that continues with other values than it was saved with says which."""

import json
from dataclasses import replace

from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config
from megatron5d.train.state import changed_keys


def test_changed_keys_are_said_with_both_values():
    config = Config()
    saved = json.loads(json.dumps(to_dict(config)))  # as run.json keeps it
    saved.pop("moe")  # as if it were a group that is newer than the checkpoint
    saved["train"]["of_an_older_version"] = 1
    here = replace(config, model=replace(config.model, rope_theta=5e5), train=replace(config.train, seed=7))
    theta, seed = config.model.rope_theta, config.train.seed
    told = [f"model.rope_theta = 500000.0, saved with {theta}", f"train.seed = 7, saved with {seed}"]
    assert changed_keys(saved, here, ["model", "train", "optim", "moe"]) == told
    assert changed_keys(saved, here, ["optim"]) == changed_keys(saved, config, ["model", "train"]) == []

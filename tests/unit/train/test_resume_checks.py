"""What differs from the run that saved a checkpoint: told by key, and refused at once where it
cannot be continued."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron5d.config.convert import to_dict
from megatron5d.config.load import load_config
from megatron5d.config.schema import Config
from megatron5d.train.preflight.resume import architecture_faults, changed_keys

PRETRAIN = Path(__file__).resolve().parents[3] / "pretrain.py"
NO_TORCH = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(PRETRAIN)!r}, run_name='__main__')"


def test_changed_keys_are_said_with_both_values():
    config = Config()
    saved = json.loads(json.dumps(to_dict(config)))  # as run.json keeps it
    saved.pop("moe")  # as if it were a group that is newer than the checkpoint
    saved["train"]["of_an_older_version"] = 1
    here = replace(
        config, model=replace(config.model, rope_theta=5e5), train=replace(config.train, seed=7)
    )
    theta, seed = config.model.rope_theta, config.train.seed
    told = [
        f"model.rope_theta = 500000.0, saved with {theta}",
        f"train.seed = 7, saved with {seed}",
    ]
    assert changed_keys(saved, here, ["model", "train", "optim", "moe"]) == told
    assert (
        changed_keys(saved, here, ["optim"])
        == changed_keys(saved, config, ["model", "train"])
        == []
    )


@pytest.fixture
def folder(tmp_path):
    step = tmp_path / "step-00000003"
    step.mkdir()
    (step / "run.json").write_text(json.dumps({"format": 1, "config": to_dict(Config())}))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "told", "fix"),
    [
        (
            "model.num_layers=3",
            "model: model.num_layers = 3, saved with 2",
            "model.num_layers=2, or another",
        ),
        (
            "model.hidden_size=128 model.tie_embeddings=true",
            "tie_embeddings = True, saved with False",
            (
                "model.hidden_size=64 model.tie_embeddings=false, or another checkpoint.dir for a new "
                "run"
            ),
        ),
        ("model.vocab_size=300", "model.vocab_size = 300, saved with 256", "init.from_checkpoint="),
        ("model=tiny_deepseek", "model.attention = mla, saved with gqa", "model.from_checkpoint="),
        (
            "optim.name=muon",
            "optimizer: optim.name = muon, saved with adamw",
            "optim.name=adamw, or another",
        ),
        (
            "model.rope_theta=5e5 model.name=other optim.lr=1 parallel.tp=2 optim.freeze=[head.*]",
            None,
            "",
        ),
    ],
)
def test_another_architecture_or_optimizer_is_refused_with_both_values(folder, given, told, fix):
    def faults(resume):
        return architecture_faults(
            load_config([*given.split(), f"checkpoint.dir={folder}", resume]), 1
        )

    assert faults("checkpoint.resume=none") == []
    found = faults("checkpoint.resume=auto")
    assert len(found) == (told is not None)
    for fault in found:
        assert (
            f"{folder / 'step-00000003'} was saved by another" in fault.reason
            and told in fault.reason
        )
        assert fault.fix.startswith(fix) or (fix in fault.fix and told not in fault.fix)


def test_another_architecture_is_refused_without_torch(folder):
    run = [sys.executable, "-c", NO_TORCH, "model.num_layers=3", f"checkpoint.dir={folder}"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 2 and "model.num_layers = 3, saved with 2" in done.stderr, done.stderr
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]

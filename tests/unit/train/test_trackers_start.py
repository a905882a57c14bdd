"""Trackers that cannot start: what a setting can mend is refused, all else ends no run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from forks import Fork
from runs import write_corpus

import pretrain
from megatron5d.config.errors import Refused
from megatron5d.config.schema import Config, LogConfig
from megatron5d.train.monitoring.trackers import TensorBoard, Wandb
from megatron5d.train.monitoring.wandb_environment import wandb_mode


@pytest.mark.parametrize("kind", [wandb.errors.UsageError, wandb.errors.AuthenticationError])
@pytest.mark.parametrize(
    "decides", ["log.wandb.mode=offline", "WANDB_MODE=offline in the environment"]
)
def test_what_wandb_does_not_take_is_refused_with_the_knob_that_decides(
    kind, decides, tmp_path, monkeypatch
):
    def refuse(**_):
        raise kind("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if decides.startswith("WANDB_MODE"):
        monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(
        Refused, match=rf"log.wandb.mode = online: No API key configured.*, or {decides}\)"
    ):
        Wandb(Config(log=LogConfig(dir=str(tmp_path))), "online", None, {})


@pytest.mark.parametrize("variable", ["online", "offline", "dryrun", "run", "ofline", ""])
@pytest.mark.parametrize("configured", ["online", "offline", "disabled"])
def test_the_mode_of_the_environment_in_wandbs_older_words(configured, variable, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", variable)
    means = {"dryrun": "offline", "run": "online"}.get(variable, variable)
    decides = means in ("online", "offline") and configured != "disabled"
    assert wandb_mode(configured) == (means if decides else configured)


def whole_run(folder, *arguments, **variables):
    """A run of a step whose W&B has no settings but these variables."""
    write_corpus(folder / "corpus", vocab_size=97)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB_", "NETRC"))
    }
    env = {**kept, "HOME": str(folder), "WANDB_CONFIG_DIR": str(folder), **variables}
    command = [
        sys.executable,
        str(Path(pretrain.__file__)),
        "model=tiny",
        "model.vocab_size=97",
        "train.gbs=2",
    ]
    command += [
        "train.steps=1",
        "train.seq_len=16",
        "data.train=[corpus]",
        "log.dir=run",
        "log.jsonl=run/metrics.jsonl",
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "variables", "said"),
    [
        (
            "online",
            {"WANDB_BASE_URL": "http://w"},
            "http://w\n    fix: `wandb login`, or log.wandb.mode=offline",
        ),
        (
            "offline",
            {"WANDB_MODE": "online"},
            "`wandb login`, or WANDB_MODE=offline in the environment",
        ),
        ("online", {"WANDB_API_KEY": "short"}, "WANDB_API_KEY invalid"),
    ],
)
def test_wandb_without_a_key_is_refused_before_the_run(mode, variables, said, tmp_path):
    ended = whole_run(tmp_path, f"log.wandb={mode}", **variables)
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_trackers_that_cannot_start_end_no_run(mode, tmp_path, monkeypatch):
    """Whatever the reason is, such as a process of W&B's that does not start, or a full disk."""

    def fail(*_, **__):
        raise RuntimeError("no room for it")

    monkeypatch.setattr(wandb, "init", fail)
    monkeypatch.setattr(TensorBoard, "__init__", fail)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    write_corpus(tmp_path / "corpus", vocab_size=97)
    run = ["model=tiny", "model.vocab_size=97", "train.gbs=2", "train.steps=1", "train.seq_len=16"]
    run += ["data.train=[corpus]", "log.dir=run", f"log.wandb={mode}", "log.tensorboard=run/tb"]
    ended = Fork(lambda: pretrain.main(run), tmp_path).wait()
    assert ended.returncode == 0, ended.stderr
    for tracker in (
        "log.tensorboard = run/tb",
        f"log.wandb.mode = {mode}",
        "log.wandb.mode = offline",
    ):
        assert f"WARNING: {tracker}" in ended.stderr, ended.stderr
    assert ended.stderr.count("no room for it; training continues") == 2 + (mode == "online")


@pytest.mark.slow
def test_wandb_whose_server_does_not_answer_is_written_offline(tmp_path):
    away = {
        "WANDB_API_KEY": "a" * 40,
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_INIT_TIMEOUT": "3",
    }
    ended = whole_run(tmp_path, "log.wandb=online", **away)
    assert ended.returncode == 0 and "WARNING: log.wandb.mode = online" in ended.stderr, (
        ended.stderr
    )
    assert "training continues" in ended.stderr and "wandb sync" in ended.stderr
    assert [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ] == [1]
    assert list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))

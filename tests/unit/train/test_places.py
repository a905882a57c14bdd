"""What a run holds while it goes on, and when it lets go."""

import threading
from pathlib import Path

import pytest

from megatron5d.checkpoint.save import Saver
from megatron5d.config.load import from_yaml
from megatron5d.config.schema import CheckpointConfig, Config, LogConfig
from megatron5d.train.places import places


def config_in(folder: Path) -> Config:
    log = LogConfig(dir=str(folder), jsonl=str(folder / "log.jsonl"))
    return Config(checkpoint=CheckpointConfig(dir=str(folder / "checkpoints")), log=log)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_claims_come_first_and_go_last(tmp_path):
    config = config_in(tmp_path)
    (tmp_path / "checkpoints" / "step-00000003.tmp").mkdir(parents=True)
    with places(config) as held:
        assert names(tmp_path) == ["checkpoints/run.lock", "config.yaml", "log.jsonl.lock"]
        assert len(held.notes) == 1 and "step-00000003.tmp is removed" in held.notes[0]
        with pytest.raises(OSError, match="still going"), places(config):
            pass
    assert names(tmp_path) == ["config.yaml"] and from_yaml((tmp_path / "config.yaml").read_text()) == config


def test_who_leaves_while_a_save_goes_on_keeps_the_place(tmp_path, monkeypatch):
    """Two signals, or another rank's fault: the thread still writes, and the next run would tidy its folder away."""
    config, written = config_in(tmp_path), threading.Event()
    monkeypatch.setattr(Saver, "_write", lambda *_: written.wait(30))
    with pytest.raises(KeyboardInterrupt), places(config) as held:
        held.saver = Saver(tmp_path / "checkpoints", keep=1, background=True, claim=held.checkpoints)
        held.saver.save(1, {}, {})
        raise KeyboardInterrupt
    assert names(tmp_path) == ["checkpoints/run.lock", "config.yaml"]
    written.set()
    held.saver.wait()
    held.checkpoints.release()


def test_nothing_is_claimed_where_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with places(Config()) as held:
        assert held.checkpoints is None and list(tmp_path.iterdir()) == []

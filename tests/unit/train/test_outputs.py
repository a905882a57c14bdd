"""What a run locks, and when it unlocks it."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from runs import write_corpus

from megatron5d.checkpoint.save import Saver
from megatron5d.config.load import from_yaml
from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    OptimConfig,
    TrainConfig,
    WandbConfig,
)
from megatron5d.topology.process import Process
from megatron5d.train.loop import locked_outputs
from megatron5d.train.monitoring import trackers
from pretrain import plan_and_train


def config_in(folder: Path) -> Config:
    log = LogConfig(dir=str(folder), jsonl=str(folder / "log.jsonl"))
    return Config(checkpoint=CheckpointConfig(dir=str(folder / "checkpoints")), log=log)


def names(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "code"
    )


def test_locks_come_first_and_go_last(tmp_path):
    config = config_in(tmp_path)
    (tmp_path / "checkpoints" / "step-00000003.tmp").mkdir(parents=True)
    with locked_outputs(config) as outputs:
        assert names(tmp_path) == [
            "checkpoints/run.lock",
            "config.yaml",
            "log.jsonl.lock",
            "log.lock",
        ]
        assert len(outputs.notes) == 1 and "step-00000003.tmp is removed" in outputs.notes[0]
        with pytest.raises(OSError, match="still going"), locked_outputs(config):
            pass
    assert (
        names(tmp_path) == ["config.yaml"]
        and from_yaml((tmp_path / "config.yaml").read_text()) == config
    )


def test_a_second_run_that_shares_only_log_dir_is_told(tmp_path):
    first, second = (
        Config(
            log=LogConfig(dir=str(tmp_path), jsonl=str(tmp_path / name)),
            checkpoint=CheckpointConfig(dir=None),
        )
        for name in ("a", "b")
    )
    with (
        locked_outputs(first),
        pytest.raises(OSError, match="log.dir = .* still going"),
        locked_outputs(second),
    ):
        pass


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(path, text):
        if path.name == "config.yaml":
            raise OSError(28, "No space left on device")
        return written(path, text)

    written = Path.write_text
    monkeypatch.setattr(Path, "write_text", full)
    with locked_outputs(Config(log=LogConfig(dir=str(tmp_path)))) as outputs:
        (note,) = outputs.notes
    assert f"log.dir = {tmp_path}, config.yaml" in note and "No space left on device" in note


def test_a_run_that_ends_while_a_save_goes_on_keeps_its_lock(tmp_path, monkeypatch):
    """Two signals, or another rank's fault: the thread still writes, and the next run would tidy
    its folder away."""
    config, written = config_in(tmp_path), threading.Event()
    monkeypatch.setattr(Saver, "_write", lambda *_: written.wait(30))
    with pytest.raises(KeyboardInterrupt), locked_outputs(config) as outputs:
        outputs.saver = Saver(tmp_path / "checkpoints", keep=1, background=True, lock=outputs.lock)
        outputs.saver.save(1, {}, {})
        raise KeyboardInterrupt
    assert names(tmp_path) == ["checkpoints/run.lock", "config.yaml"]
    written.set()
    outputs.saver.wait()
    outputs.lock.release()


def test_nothing_is_locked_where_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with locked_outputs(Config()) as outputs:
        assert outputs.lock is None and list(tmp_path.iterdir()) == []


class Told:
    """Stands for Weights & Biases: notes how the run ended."""

    run_id, last = "abc", 0

    def __init__(self, file, stopped):
        self.file, self.stopped = file, stopped

    def write(self, record):
        if self.stopped and record["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self, code):
        self.file.write_text(str(code))


@pytest.mark.parametrize(("how", "code"), [("finished", 0), ("crashed", 1), ("stopped", 75)])
def test_a_tracker_learns_how_the_run_ended(tmp_path, how, code):
    corpus = write_corpus(tmp_path / "toy", vocab_size=256)
    config = Config(
        train=TrainConfig(steps=40, gbs=2, mbs=1, seq_len=16),
        data=DataConfig(train=[corpus]),
        optim=OptimConfig(lr=1e9 if how == "crashed" else 1e-3, min_lr=0.0),
        log=LogConfig(progress=False, memory_check="off", wandb=WandbConfig(mode="offline")),
    )
    if how == "stopped":
        config = replace(config, checkpoint=CheckpointConfig(dir=str(tmp_path / "checkpoints")))

    def one(rank, world):
        trackers.Wandb = lambda *_: Told(tmp_path / "code", how == "stopped")
        try:
            return plan_and_train(config, Process(rank, world, rank, torch.device("cpu")))
        except FloatingPointError:
            return 1

    assert run_ranks(one, 1, timeout=60) == [code]
    assert (tmp_path / "code").read_text() == str(code)

"""kill -9 of a random rank at random moments, and resuming: in the end every bit equals that of the
undisturbed run."""

import os
import random
import re
import signal
import threading
import time

import pytest
import torch
from ranks import RankFailure, run_ranks
from runs import records, whole_tensors, write_corpus

from megatron5d.checkpoint.folder import checkpoint_error, saved_steps, step_folder
from megatron5d.config.load import load_config
from megatron5d.topology.process import Process
from pretrain import plan_and_train

STEPS, WORLD = 8, 4
EXPERIMENT = [
    "model=tiny",
    "model.vocab_size=97",
    "model.num_kv_heads=2",
    "train.gbs=4",
    "train.mbs=1",
    "train.seq_len=16",
    "optim.lr=1e-2",
    "optim.warmup_steps=2",
    f"train.steps={STEPS}",
    "checkpoint.every=2",
    "train.eval_every=4",
    "train.eval_batches=1",
    "data.split='80,20,0'",
    "log.progress=false",
    "log.memory_check=off",
]
LAYOUTS = {
    "tp-sp-zero1": ["parallel.tp=2", "parallel.sp=true", "parallel.zero=1"],
    "dp-background-save": ["parallel.zero=1", "checkpoint.async=true"],
    "zero0": ["parallel.tp=2", "parallel.zero=0"],
}
# fields that may differ between equal runs
TIMES = {"step_time_s", "tokens_per_s_per_gpu", "mfu", "memory_gb", "zero_exposed_s"}


pytestmark = pytest.mark.timeout(900)


class Killer:
    """Kills its own rank, from a thread, at some moment of the run.

    Args:
        condition: is true from some moment on.
        delay_s: slept after it, so that all moments of a step are hit.
    """

    def __init__(self, condition, delay_s):
        self.condition, self.delay_s = condition, delay_s

    def __call__(self):
        while not self.condition():
            time.sleep(0.001)
        time.sleep(self.delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


class TrainingRun:
    """Runs in one folder, with checkpoints and a log."""

    def __init__(self, folder, corpus, layout):
        self.checkpoints, self.log = folder / "checkpoints", folder / "log.jsonl"
        outputs = [f"checkpoint.dir={self.checkpoints}", f"log.jsonl={self.log}"]
        self.overrides = [*EXPERIMENT, *LAYOUTS[layout], *outputs, f"data.train=[{corpus}]"]

    def train(self, *overrides, victim=None, killer=None):
        """Trains on forked ranks; False where a rank was killed."""
        # once, because it would take 0.16 s on every rank
        config = load_config([*self.overrides, *overrides], world=WORLD)

        def on_rank(rank, world):
            if rank == victim:
                threading.Thread(target=killer, daemon=True).start()
            return plan_and_train(config, Process(rank, world, rank, torch.device("cpu")))

        try:
            return run_ranks(on_rank, WORLD, timeout=300) == [0] * WORLD
        except RankFailure as failure:
            message = rf"rank {victim}: died without a report: killed by SIGKILL"
            assert re.match(message, str(failure)), failure
            return False

    def records(self):
        return [
            {key: value for key, value in record.items() if key not in TIMES}
            for record in records(self.log)
        ]

    def num_records(self):
        return self.log.read_text().count("\n") if self.log.exists() else 0

    def assert_same_checkpoint(self, reference, step):
        tensors, expected = (
            whole_tensors(step_folder(run.checkpoints, step)) for run in (self, reference)
        )
        assert tensors.keys() == expected.keys()
        for key in tensors:
            assert torch.equal(tensors[key], expected[key]), key

    def assert_no_broken_checkpoint_looks_complete(self, reference):
        for step in saved_steps(self.checkpoints):
            if checkpoint_error(step_folder(self.checkpoints, step)) is None:
                self.assert_same_checkpoint(reference, step)

    def assert_finishes_like(self, reference):
        assert self.train()
        assert self.records() == reference.records()
        self.assert_same_checkpoint(reference, STEPS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)


@pytest.fixture(scope="module", params=LAYOUTS)
def reference(request, tmp_path_factory, corpus):
    """The undisturbed run of a layout, with all its checkpoints."""
    run = TrainingRun(tmp_path_factory.mktemp(request.param), corpus, request.param)
    run.layout = request.param
    assert run.train("checkpoint.keep=0")
    return run


@pytest.fixture
def run(reference, corpus, tmp_path):
    return TrainingRun(tmp_path, corpus, reference.layout)


def test_killed_at_random_moments(run, reference):
    step_s = sum(record["step_time_s"] for record in records(reference.log)[1:]) / (STEPS - 1)
    chance = random.Random(reference.layout)
    num_kills = 0
    for _ in range(3):
        step = chance.randint(1, STEPS - 2)
        killer = Killer(
            lambda step=step: run.num_records() >= step, chance.uniform(0, 1.5 * step_s)
        )
        num_kills += not run.train(victim=chance.randrange(WORLD), killer=killer)
        run.assert_no_broken_checkpoint_looks_complete(reference)
    assert num_kills >= 2
    run.assert_finishes_like(reference)


@pytest.mark.parametrize(
    ("reference", "victim", "file"),
    [
        ("tp-sp-zero1", 3, "run.json"),
        ("tp-sp-zero1", 0, "*.distcp"),
        ("dp-background-save", 0, "*.distcp"),
    ],
    indirect=["reference"],
)
def test_killed_while_saving(run, reference, victim, file):
    """The half-written folder is never taken for a checkpoint."""
    half = step_folder(run.checkpoints, 4).with_suffix(".tmp")
    assert not run.train(victim=victim, killer=Killer(lambda: any(half.glob(file)), 0.0))
    run.assert_no_broken_checkpoint_looks_complete(reference)
    run.assert_finishes_like(reference)

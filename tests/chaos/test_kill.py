"""kill -9 of a random rank at random moments, resume, and again: in the end no bit differs from the
undisturbed run."""

import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from ranks import RankFailure, run_ranks
from runs import records, whole_tensors, write_corpus

from megatron5d.checkpoint.folder import checkpoint_error, saved_steps, step_folder
from megatron5d.config.load import load_config
from megatron5d.topology.process import Process
from pretrain import plan_and_train

STEPS, EVERY, WORLD = 8, 2, 4
EXPERIMENT = [
    *(
        "model=tiny",
        "model.vocab_size=97",
        "model.num_kv_heads=2",
        "train.gbs=4",
        "train.mbs=1",
        "train.seq_len=16",
    ),
    *("optim.lr=1e-2", "optim.warmup_steps=2", f"train.steps={STEPS}", f"checkpoint.every={EVERY}"),
    *("train.eval_every=4", "train.eval_batches=1", "data.split='80,20,0'"),
    *("log.progress=false", "log.memory_check=off"),
]
LAYOUTS = {
    "tp-sp-zero1": ["parallel.tp=2", "parallel.sp=true", "parallel.zero=1"],
    "dp-background-save": ["parallel.zero=1", "checkpoint.async=true"],
    "zero0": ["parallel.tp=2", "parallel.zero=0"],
}
CLOCKS = {
    "step_time_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "memory_gb",
    "zero_exposed_s",
}  # what may differ between equal runs


pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)


@pytest.fixture(scope="module", params=LAYOUTS)
def undisturbed(request, tmp_path_factory, corpus):
    """A layout, and the folder of its run that nobody killed, with all checkpoints."""
    folder = tmp_path_factory.mktemp(request.param)
    assert attempt([*arguments_of(folder, corpus, request.param), "checkpoint.keep=0"])
    return request.param, folder


class Killer:
    """Kills its own rank, from a thread, when the run has come to a point: no handler, no goodbye.

    Args:
        reached: says whether the point has come.
        delay_s: slept after it, so that all places of a step are hit.
    """

    def __init__(self, reached, delay_s):
        self.reached, self.delay_s = reached, delay_s

    def __call__(self):
        while not self.reached():
            time.sleep(0.001)
        time.sleep(self.delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


def attempt(arguments, victim=None, killer=None):
    """One run on forked ranks; True where it came to its end."""

    config = load_config(arguments, world=WORLD)  # once: on every rank it would take 0.16 s

    def one(rank, world):
        if rank == victim:
            threading.Thread(target=killer, daemon=True).start()
        return plan_and_train(config, Process(rank, world, rank, torch.device("cpu")))

    try:
        return run_ranks(one, WORLD, timeout=300) == [0] * WORLD
    except RankFailure as failure:
        assert re.match(
            rf"rank {victim}: died without a report: killed by SIGKILL", str(failure)
        ), failure
        return False


def arguments_of(folder, corpus, layout):
    places = [
        f"data.train=[{corpus}]",
        f"checkpoint.dir={folder}/checkpoints",
        f"log.jsonl={folder}/log.jsonl",
    ]
    return [*EXPERIMENT, *LAYOUTS[layout], *places]


def losses(folder: Path):
    return [
        {k: v for k, v in record.items() if k not in CLOCKS}
        for record in records(folder / "log.jsonl")
    ]


def lines(path: Path):
    return path.read_text().count("\n") if path.exists() else 0


def assert_same_checkpoint(folder, other, step):
    left, right = (whole_tensors(step_folder(f / "checkpoints", step)) for f in (folder, other))
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), key


def assert_whatever_looks_whole_is_whole(folder, reference):
    for step in saved_steps(folder / "checkpoints"):
        if checkpoint_error(step_folder(folder / "checkpoints", step)) is None:
            assert_same_checkpoint(folder, reference, step)


def test_killed_at_random_moments(tmp_path, corpus, undisturbed):
    layout, reference = undisturbed
    step_s = sum(r["step_time_s"] for r in records(reference / "log.jsonl")[1:]) / (STEPS - 1)
    chance = random.Random(layout)
    num_kills = 0
    for _ in range(3):
        log, target = tmp_path / "log.jsonl", chance.randint(1, STEPS - 2)
        killer = Killer(
            lambda log=log, target=target: lines(log) >= target, chance.uniform(0, 1.5 * step_s)
        )
        num_kills += not attempt(
            arguments_of(tmp_path, corpus, layout), chance.randrange(WORLD), killer
        )
        assert_whatever_looks_whole_is_whole(tmp_path, reference)
    assert num_kills >= 2
    assert attempt(arguments_of(tmp_path, corpus, layout))
    assert losses(tmp_path) == losses(reference)
    assert_same_checkpoint(tmp_path, reference, STEPS)


@pytest.mark.parametrize(
    ("undisturbed", "victim", "sign"),
    [
        ("tp-sp-zero1", 3, "run.json"),
        ("tp-sp-zero1", 0, "*.distcp"),
        ("dp-background-save", 0, "*.distcp"),
    ],
    indirect=["undisturbed"],
)
def test_killed_while_saving(tmp_path, corpus, undisturbed, victim, sign):
    """The half-written folder is never taken for a checkpoint."""
    layout, reference = undisturbed
    half = step_folder(tmp_path / "checkpoints", 4).with_suffix(".tmp")
    killer = Killer(lambda: any(half.glob(sign)), 0.0)
    assert not attempt(arguments_of(tmp_path, corpus, layout), victim, killer)
    assert_whatever_looks_whole_is_whole(tmp_path, reference)
    assert attempt(arguments_of(tmp_path, corpus, layout))
    assert losses(tmp_path) == losses(reference)
    assert_same_checkpoint(tmp_path, reference, STEPS)

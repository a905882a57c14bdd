"""A run moved twice between layouts drawn at random gives the records and weights of one that
stayed in one process.

What it reads, how its batch grows, when it is evaluated and how it is saved are drawn as well.
"""

import random
from dataclasses import replace

import pytest
from random_configs import another_layout, numbers, overrides, random_config
from runs import records, train_on_ranks, whole_tensors, write_corpus

from megatron5d.config.schema import CheckpointConfig, LogConfig, ParallelConfig, PipelineConfig
from megatron5d.parity.variants import faults_of

STEPS = 3
ALONE = {"parallel": ParallelConfig(), "pipeline": PipelineConfig()}


def reading(config, folder, dice):
    """With token files, an order to read them in, evaluations, and perhaps a batch that grows or
    steps left out."""
    one, two = (
        write_corpus(folder / name, vocab_size=config.model.vocab_size, seed=i)
        for i, name in enumerate("ab")
    )
    train, optim = config.train, config.optim
    if train.gbs % 2 == 0 and dice.random() < 0.4:
        half, gbs = train.gbs // 2, train.gbs
        train = replace(
            train,
            gbs_ramp=dice.choice([[str(half), str(half), str(gbs)], [f"0:{half} 2steps:{gbs}"]]),
        )
        optim = replace(optim, schedule_by=dice.choice(["steps", "samples"]))
    return replace(
        config,
        train=replace(train, steps=STEPS, eval_every=2, eval_batches=1),
        optim=replace(
            optim,
            decay_steps=2 * (optim.schedule == "wsd"),
            skip_norm=dice.choice([0.0, 0.0, 0.0, 1.0, 3.0]),
        ),
        moe=replace(config.moe, log_every=dice.choice([1, 2])),
        data=replace(
            config.data,
            train=dice.choice([[one], [f"0.3 {one}", f"0.7 {two}"]]),
            split="9,1",
            order=dice.choice(["shuffled", "sequential", "megatron"]),
            prefetch=dice.choice([0, 2]),
            valid_sets=dice.choice([[f"all {one}"], [f"a {one}", f"b 2 {two}", f"b {one}"]]),
        ),
    )


def run(config, world, folder, stop_after, dice):
    saving = {"every": dice.choice([0, 1]), "async_save": dice.random() < 0.3}
    config = replace(
        config,
        train=replace(config.train, stop_after=stop_after),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints"), keep="0", **saving),
        log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False, memory_check="off"),
    )
    print(f"{world} ranks until step {stop_after}: {overrides(config)}")  # shown on failure
    assert train_on_ranks(config, world) == [0] * world


@pytest.mark.parametrize("number", numbers("0:3"))
def test_moved_twice(tmp_path, number):
    dice = random.Random(number)
    config, world, _ = random_config(number)
    config = reading(config, tmp_path, dice)
    if faults_of(config, world):  # of the growing batch: the schedule, or dp, does not divide it
        config = replace(config, train=replace(config.train, gbs_ramp=None))
    for name in ("straight", "moved"):
        (tmp_path / name).mkdir()
    run(
        replace(config, **ALONE, optim=replace(config.optim, offload=False)),
        1,
        tmp_path / "straight",
        STEPS,
        dice,
    )
    run(config, world, tmp_path / "moved", 1, dice)
    for stop_after in (2, STEPS):
        other, ranks = another_layout(config, 1000 * number + stop_after)
        run(other, ranks, tmp_path / "moved", stop_after, dice)
    for mine, theirs in zip(
        *(records(tmp_path / name / "log.jsonl") for name in ("moved", "straight")), strict=True
    ):
        told = {"step", "lr", "consumed_samples", "tokens", "grad_norm"} | {
            key for key in theirs if "loss" in key
        }
        for key in told:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-10), (mine["step"], key)
    saved, expected = (
        whole_tensors(tmp_path / name / "checkpoints" / f"step-{STEPS:08d}")
        for name in ("moved", "straight")
    )
    assert saved.keys() == expected.keys()
    for key, values in expected.items():
        scale = values.abs().max().clamp(min=1e-30)
        assert ((saved[key] - values).abs().max() / scale).item() < 1e-7, key

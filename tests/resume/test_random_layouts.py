"""A run moved twice between layouts drawn at random gives the records and weights of one that stayed in one process."""

from dataclasses import replace

import pytest
from random_configs import another_layout, numbers, overrides, random_config
from runs import records, train_on_ranks, whole_tensors, write_corpus

from megatron5d.config.schema import CheckpointConfig, LogConfig, ParallelConfig, PipelineConfig

STEPS = 3
ALONE = {"parallel": ParallelConfig(), "pipeline": PipelineConfig()}


def run(config, world, folder, corpus, stop_after):
    config = replace(
        config,
        train=replace(config.train, steps=STEPS, stop_after=stop_after, eval_every=2, eval_batches=1),
        data=replace(config.data, train=[corpus], split="9,1", prefetch=0, valid_sets=[f"all {corpus}"]),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints"), keep=0),
        log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False, memory_check="off"),
    )
    print(f"{world} ranks until step {stop_after}: {overrides(config)}")  # shown on failure
    assert train_on_ranks(config, world) == [0] * world


@pytest.mark.parametrize("number", numbers("0:3"))
def test_moved_twice(tmp_path, number):
    config, world, _ = random_config(number)
    corpus = write_corpus(tmp_path / "toy", vocab_size=config.model.vocab_size)
    for name in ("straight", "moved"):
        (tmp_path / name).mkdir()
    run(replace(config, **ALONE, optim=replace(config.optim, offload=False)), 1, tmp_path / "straight", corpus, STEPS)
    run(config, world, tmp_path / "moved", corpus, 1)
    for stop_after in (2, 3):
        other, ranks = another_layout(config, 1000 * number + stop_after)
        run(other, ranks, tmp_path / "moved", corpus, stop_after)
    for mine, theirs in zip(*(records(tmp_path / name / "log.jsonl") for name in ("moved", "straight")), strict=True):
        told = {
            key for key in theirs if key.endswith(("loss", "loss/all", "tokens", "grad_norm")) or key in ("step", "lr")
        }
        for key in told:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-10), (mine["step"], key)
    saved, expected = (
        whole_tensors(tmp_path / name / "checkpoints" / f"step-{STEPS:08d}") for name in ("moved", "straight")
    )
    assert saved.keys() == expected.keys()
    for key, values in expected.items():
        scale = values.abs().max().clamp(min=1e-30)
        assert ((saved[key] - values).abs().max() / scale).item() < 1e-7, key

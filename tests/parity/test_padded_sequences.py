"""Samples of a length that cp and sp do not divide, padded: the numbers of one process that reads
them unpadded."""

from dataclasses import replace

import pytest
from runs import records, train_on_ranks, write_corpus

from megatron5d.config.checks import run_checks
from megatron5d.config.schema import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)

SAMPLE = 21
MODELS = {
    "dense": (
        ModelConfig(vocab_size=43, num_layers=2, hidden_size=16, ffn_hidden_size=24, head_dim=4),
        MoeConfig(),
    ),
    "moe": (
        ModelConfig(
            vocab_size=43,
            num_layers=2,
            hidden_size=16,
            ffn_hidden_size=24,
            head_dim=4,
            num_experts=4,
            top_k=2,
        ),
        MoeConfig(balance=["aux"], aux_coef=0.01, log_every=1),
    ),
    "bidirectional": (
        ModelConfig(
            vocab_size=43,
            num_layers=2,
            hidden_size=16,
            ffn_hidden_size=24,
            head_dim=4,
            attention_causal=False,
        ),
        MoeConfig(),
    ),
}


def run(config: Config, world: int, folder) -> list[dict]:
    folder.mkdir()
    config = replace(
        config, log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False, memory_check="off")
    )
    assert run_checks(config, world) == []
    assert train_on_ranks(config, world) == [0] * world
    return records(folder / "log.jsonl")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("parallel", "seq_len"),
    [
        (ParallelConfig(cp=2), 24),
        (ParallelConfig(cp=2, cp_method="ulysses", tp=2, sp=True), 24),
        (ParallelConfig(tp=2, sp=True), 22),
        (ParallelConfig(), 30),
    ],
)
def test_padded_samples_give_the_numbers_of_unpadded_ones(tmp_path, model, parallel, seq_len):
    corpus = write_corpus(tmp_path / "corpus", vocab_size=43)
    architecture, moe = MODELS[model]
    alone = Config(
        model=architecture,
        moe=moe,
        precision=PrecisionConfig(dtype="fp64"),
        optim=OptimConfig(lr=0.01),
        train=TrainConfig(steps=3, gbs=4, mbs=2, seq_len=SAMPLE, eval_every=2, eval_batches=1),
        data=DataConfig(train=[corpus], split="9,1"),
    )
    padded = replace(
        alone,
        parallel=parallel,
        train=replace(alone.train, seq_len=seq_len),
        data=replace(alone.data, sample_len=SAMPLE),
    )
    expected = run(alone, 1, tmp_path / "alone")
    found = run(padded, parallel.cp * parallel.tp, tmp_path / "padded")
    for mine, theirs in zip(found, expected, strict=True):
        for key in {"loss", "grad_norm", "tokens", "consumed_samples"} | {
            key for key in theirs if "aux" in key or "valid" in key
        }:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-10), (mine["step"], key)

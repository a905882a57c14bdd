"""Runs whose checkpoints are resharded, and their resharding by tools/convert.py."""

import dataclasses
import json

from megatron5d.config.convert import leaves, value_of
from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    TrainConfig,
)
from megatron5d.tools import convert

STEPS = 4
GROUPS = ("parallel.", "pipeline.", "recompute.", "train.")


DENSE = ModelConfig(
    vocab_size=96,
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


SPARSE = dataclasses.replace(
    DENSE,
    num_experts=8,
    top_k=2,
    moe_ffn_hidden_size=16,
    first_k_dense=1,
    router_bias=True,
    router_score="sigmoid",
)


def config_of(
    folder,
    corpus,
    model=DENSE,
    dtype="fp64",
    stop_after=0,
    schedule="1f1b",
    optim="adamw",
    **parallel,
):
    return Config(
        model=model,
        parallel=ParallelConfig(**parallel),
        pipeline=PipelineConfig(schedule=schedule),
        train=TrainConfig(steps=STEPS, gbs=8, mbs=1, seq_len=16, stop_after=stop_after),
        optim=OptimConfig(name=optim, lr=1e-2, warmup_steps=2),
        precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(train=[corpus]),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints"), keep="0"),
        log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False, memory_check="off"),
    )


def overrides_between(before, after):
    """What differs between two layouts, as on a command line."""
    keys = [
        key
        for key in leaves()
        if key.startswith(GROUPS) and value_of(after, key) != value_of(before, key)
    ]
    return [f"{key}={json.dumps(value_of(after, key))}" for key in keys]


def reshard(source, out, config, world, before, *words):
    words = [*overrides_between(before, config), *words]
    return convert.main(["reshard", str(source), str(out), "--world", str(world), *words])


def moved(config, folder):
    return dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, dir=str(folder / "checkpoints")),
        log=dataclasses.replace(config.log, jsonl=str(folder / "log.jsonl")),
    )

"""Tiny models on any pipeline schedule, for the parity tests."""

from layouts import assert_parity

from megatron5d.config.schema import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from megatron5d.pipeline_parallel.program import Program
from megatron5d.pipeline_parallel.registry import build_program


def admitted_program(schedule: str, pp: int, min_microbatches: int) -> Program:
    """The Program of the first number of micro-batches that the schedule admits."""
    for m in range(min_microbatches, min_microbatches + 4 * pp):
        try:
            return build_program(schedule, pp, m)
        except ValueError:
            continue
    raise AssertionError(f"{schedule} admits no {min_microbatches} micro-batches or a few more")


def tiny_config(
    model: dict, pipeline: PipelineConfig, m: int, *, mbs=1, dp=1, **sections
) -> Config:
    """A model of 16 features in fp64 and batches of m micro-batches.

    Args:
        model: further fields, num_layers among them.
        sections: further sections, of which train adds fields to those here.
    """
    shape = {"hidden_size": 16, "ffn_hidden_size": 24, "num_heads": 2, "num_kv_heads": 2}
    batch = {"gbs": m * dp * mbs, "mbs": mbs, "seq_len": 8, "steps": 10}
    return Config(
        model=ModelConfig(**(shape | {"head_dim": 8, "vocab_size": 61} | model)),
        pipeline=pipeline,
        train=TrainConfig(**(batch | sections.pop("train", {}))),
        optim=OptimConfig(lr=1e-2, warmup_steps=2, clip=0.5),
        precision=PrecisionConfig(dtype="fp64"),
        **sections,
    )


def scheduled_config(
    schedule,
    pp,
    m,
    *,
    dp=1,
    tied=False,
    uneven=False,
    vpp=1,
    layout=None,
    recompute=None,
    **parallel,
) -> Config:
    """One layer more than stages, or an `uneven` layout.

    That has the embedding alone on the first stage, the head alone on the last one, and two layers
    on the second.
    """
    if layout is None:
        stages = build_program(schedule, pp, m, vpp if vpp > 1 else None).num_stages
    if uneven:
        layout = [0, *[1] * (stages - 2), 0] if stages > 2 else [2, 1]
        layout[1] += stages > 2
    return tiny_config(
        {"num_layers": sum(layout) if layout else stages + 1, "tie_embeddings": tied},
        PipelineConfig(schedule, layout=layout),
        m,
        dp=dp,
        parallel=ParallelConfig(pp=pp, vpp=vpp, **parallel),
        recompute=recompute or RecomputeConfig(),
    )


def assert_schedule_parity(schedule, pp, min_microbatches, *, tp=1, dp=1, steps=2, **options):
    """The schedule, with the next number of micro-batches that it admits, equals one process."""
    if tp > 1:
        options |= {"tp": tp, "sp": True}
    m = admitted_program(schedule, pp, min_microbatches).num_microbatches
    config = scheduled_config(schedule, pp, m, dp=dp, **options)
    assert_parity(config, pp * dp * tp, steps=steps, ignored=0.3)

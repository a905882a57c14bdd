"""A short training run on any layout, which returns all its numbers for the parity check to compare.

What a rank has comes in global coordinates, as rectangles of whole tensors, every copy of every rank: also two copies
that should be one are seen to differ. tools/parity.py holds a user's own layout to one process; the suite holds ours
to a model on one page (tests/reference_gpt.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron5d.checkpoint.layout import sharded_slice
from megatron5d.config.schema import Config, ParallelConfig, PipelineConfig, RecomputeConfig
from megatron5d.data.batch import SequenceSharding, make_micro_batch
from megatron5d.data.sample_order import micro_batch_samples
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.model.gpt import Gpt
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.parity.local_ranks import run_ranks
from megatron5d.pipeline_parallel.phase import IGNORED, MicroBatch
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import ShardSpec, spec_of
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.guard import StepSamples
from megatron5d.train.pipeline_layout import PipelinePlan, plan_pipeline
from megatron5d.train.state import run_tensors

ROWS_SEED = 7  # of the random tokens
Rectangles = list[tuple[str, tuple[int, ...], Tensor]]  # global name, first index in the whole tensor, values


@dataclass
class RankRecord:
    """What one rank had."""

    figures: list[dict[str, float]] = field(default_factory=list)  # of each step: losses by name, and grad_norm
    layers: list[dict[str, float]] = field(default_factory=list)  # what the routers did in each step
    gradients: Rectangles = field(default_factory=list)  # of the first step, before clipping
    weights: Rectangles = field(default_factory=list)  # after the last step, the routers' biases among them
    moments: dict[str, Rectangles] = field(default_factory=dict)  # of the optimiser, by kind, after the last step
    specs: dict[str, ShardSpec] = field(default_factory=dict)  # in the order of the model


def alone(config: Config) -> Config:
    """The same mathematics in one process, plainly: no axis, nothing computed twice or kept elsewhere."""
    optim = replace(config.optim, implementation="auto", offload=False)
    plain = {"parallel": ParallelConfig(), "pipeline": PipelineConfig(), "recompute": RecomputeConfig()}
    return replace(config, optim=optim, **plain)  # type: ignore[arg-type]


def make_rows(config: Config, steps: int, *, ignored: float = 0.0) -> Tensor:
    """Random token rows `[steps·gbs, s+1]`, up to a share of each ignored as padding at its end."""
    generator = torch.Generator().manual_seed(ROWS_SEED)
    shape = (steps * config.train.gbs, config.train.seq_len + 1)
    rows = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    if ignored:
        lengths = torch.randint(int(shape[1] * (1 - ignored)), shape[1], (shape[0],), generator=generator)
        rows[torch.arange(shape[1])[None] > lengths[:, None]] = IGNORED
    return rows


def micro_batch(config: Config, rows: Tensor, numbers: Tensor | None = None) -> MicroBatch:
    """All rows, or as in training those of these numbers."""
    data, rows = config.data, rows if numbers is None else rows[numbers]
    batch = make_micro_batch(
        rows, document_mask=data.document_mask, eod=data.eod, eod_mask_loss=data.eod_mask_loss,
        causal=config.model.attention_causal,
    )  # fmt: skip
    return replace(batch, samples=numbers)


def perturb(parameters, coarse: bool = False) -> None:
    """Moves vectors off their ones and zeros, the same on any layout, so that every gradient path is seen.

    Args:
        parameters: of a rank.
        coarse: all of them are rounded to what bf16 has, vectors before and after.
    """
    for parameter in parameters:
        spec = spec_of(parameter)
        if coarse:
            parameter.data.copy_(parameter.data.bfloat16())
        if len(spec.shape) == 1:
            generator = torch.Generator().manual_seed(len(spec.name) * 1009 + spec.shape[0])
            noise = 0.3 * torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            for piece in spec.pieces:
                span = slice(piece.offset[0], piece.offset[0] + piece.shape[0])
                part = parameter.data[piece.row : piece.row + piece.shape[0]]
                if coarse:
                    part.copy_(part.bfloat16() + noise[span].bfloat16())
                else:
                    part += noise[span].to(parameter.dtype)


def owned_slices(sync: GradSync, buffer: str) -> Rectangles:
    """What this rank owns of the `weight_slice` or the `grad_slice` of every bucket."""
    found: Rectangles = []
    for bucket in sync.buckets:
        for segment in bucket.segments() if getattr(bucket, buffer).numel() else ():  # frozen ones have no gradient
            parts = sharded_slice(segment, getattr(bucket, buffer), writing=False).parts
            found += [(segment.spec.name, offset, view.clone()) for offset, view in parts.items()]
    return found


def short_run(
    config: Config, world: int, rows: Tensor, steps: int, *, coarse: bool = False, timeout: float = 120.0
) -> list[RankRecord]:
    """Trains the real thing on forked ranks.

    Args:
        config: a lawful configuration; its vectors' first values are moved (`perturb`).
        world: number of ranks.
        rows: int64 `[steps·gbs, s+1]`.
        steps: optimiser steps.
        coarse: it begins with weights that bf16 has, whatever its precision.
        timeout: seconds after which silent ranks are named.

    Returns:
        One record a rank.

    Raises:
        RankFailure: a rank failed.
    """
    return run_ranks(_train_on_rank, world, config, plan_pipeline(config, world), rows, steps, coarse, timeout=timeout)


def _train_on_rank(
    rank: int, world: int, config: Config, plan: PipelinePlan, rows: Tensor, steps: int, coarse: bool
) -> RankRecord:
    sizes, kv = sizes_of(config, world), config.model.num_kv_heads
    mesh = build_mesh(sizes, rank, num_kv_heads=kv, pairs=plan.shared != "none")
    model = Gpt(config, mesh, "cpu", plan.stage_specs(mesh["pp"].rank), plan.shared)
    model.initialize(config.train.seed)
    perturb(model.weights(), coarse)
    sync, optimizer, trainer = build_trainer(config, mesh, model, plan)
    t, dp, sharding, record = config.train, mesh["dp"], SequenceSharding(config, mesh), RankRecord()
    finish_reduce = sync.finish_reduce

    def finish_reduce_and_note() -> None:
        """Keeps the first step's gradients as they are before anything is done with them."""
        finish_reduce()
        if not record.figures:
            record.gradients = owned_slices(sync, "grad_slice")

    sync.finish_reduce = finish_reduce_and_note  # type: ignore[method-assign]
    for step in range(steps):
        numbers = micro_batch_samples(step * t.gbs, t.gbs, t.mbs, dp.rank, dp.size)
        where = StepSamples(step + 1, range(step * t.gbs, (step + 1) * t.gbs))
        batches = [sharding(micro_batch(config, rows, torch.tensor(each))) for each in numbers]
        result = trainer.step(batches, learning_rate(config.optim, step + 1, t.steps), watched=True, where=where)
        record.figures.append(result.losses | {"grad_norm": result.grad_norm})
        record.layers.append(result.layers)
    with sync.whole_weights():
        for weight in model.weights():
            spec = record.specs[spec_of(weight).name] = spec_of(weight)
            for piece in spec.pieces:
                values = weight.detach()[piece.row : piece.row + piece.shape[0]].clone()
                record.weights.append((spec.name, piece.offset, values))
    for key, tensor in run_tensors(sync, optimizer, (), writing=False).items():
        kind, _, name = key.removeprefix("optim.").partition(".")
        if key.startswith("optim."):
            held = record.moments.setdefault(kind, [])
            held += [(name, offset, view.clone()) for offset, view in tensor.parts.items()]
    return record

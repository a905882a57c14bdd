"""Puts a run together: mesh, model, data parallelism, optimiser, pipeline, weights. Shows what
holds what."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron5d.checkpoint.layout import by_key
from megatron5d.checkpoint.load import agree_on_checkpoint
from megatron5d.comm.ledger import Ledger
from megatron5d.config.derived import split_of
from megatron5d.config.schema import Config
from megatron5d.data_parallel.bucket import GatherFormat
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.model.block_inputs import DTYPES
from megatron5d.model.embedding_head import loss_terms
from megatron5d.model.gpt import GPT
from megatron5d.optim.optimizer import Optimizer, build_optimizer
from megatron5d.optim.sharded_state import freezes, takes_muon
from megatron5d.phases.stage import Stage
from megatron5d.pipeline_parallel.executor import Pipeline
from megatron5d.topology.all_ranks import on_every_rank, on_rank_0
from megatron5d.topology.grid import Sizes, resolve
from megatron5d.topology.init_weights import initialize_rectangle
from megatron5d.topology.launcher import restarted_job
from megatron5d.topology.mesh import Mesh, build_mesh
from megatron5d.topology.process import Process
from megatron5d.topology.shard_spec import without_memory
from megatron5d.train.data import may_hold_padding
from megatron5d.train.pipeline_layout import PipelineLayout, boundary_form
from megatron5d.train.preflight.warnings import (
    broken_checkpoints,
    checkpoints_ahead,
    idle_routers,
    passed_over,
)
from megatron5d.train.state import (
    Progress,
    load_weights_of_run,
    refuse_nonfinite,
    resume,
    weight_shards,
)
from megatron5d.train.step import Trainer

if TYPE_CHECKING:
    from megatron5d.pipeline_parallel.phase_graphs import PhaseGraphs


@dataclass
class Run:
    """Everything a training loop holds."""

    config: Config
    process: Process
    mesh: Mesh
    ledger: Ledger
    model: GPT
    sync: GradSync
    optimizer: Optimizer
    trainer: Trainer
    progress: Progress
    layout: PipelineLayout
    notes: list[str] = field(default_factory=list)  # shown when the run starts
    padded: bool = True  # the files may hold padding

    @property
    def reads_tokens(self) -> bool:
        """This rank needs tokens: to embed or to predict them; elsewhere to tell documents or
        padding apart."""
        model = self.model
        ends = model.embedding is not None or model.head is not None or len(model.mtp_blocks) > 0
        return (
            ends
            or self.config.data.document_mask
            or self.config.model.num_experts > 0
            or self.padded
        )


def build_run(config: Config, process: Process, layout: PipelineLayout) -> Run:
    """Builds a run and brings it to its first step: new weights, imported ones, or those of a
    checkpoint.

    Args:
        layout: of the pipeline, the same on every rank.

    Raises:
        ValueError: a checkpoint or an imported model does not fit.

    Comm: group creation; the pipeline's channels; loading a checkpoint.
    """
    if config.train.cuda_graph != "none" and process.device.type == "cuda":
        # the default stream cannot be captured, and autograd stays on one
        stream = torch.cuda.Stream(process.device)
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
    ledger = Ledger(process.device)
    mesh = build_mesh(
        sizes_of(config, process.world),
        process.rank,
        num_kv_heads=config.model.num_kv_heads,
        shared=layout.shared,
        recorder=ledger,
        timeout_s=config.parallel.timeout_s,
    )
    with without_memory():
        model = GPT(
            config, mesh, process.device, layout.stage_specs(mesh["pp"].rank), layout.shared
        )
    sync, optimizer, trainer = build_trainer(config, mesh, model, layout)
    checkpoint = agree_on_checkpoint(
        config.checkpoint.dir, config.checkpoint.resume, restarted_job()
    )
    notes, progress = (
        [*idle_routers(config), layout.note, passed_over(config, checkpoint)],
        Progress(),
    )
    if checkpoint is None:
        notes += _first_weights(config, sync, optimizer, model)
    else:
        progress, changed, config = resume(checkpoint, sync, optimizer, model.weights(), config)
        trainer.guard.in_a_row = progress.skipped_in_a_row
        notes += [f"continues from {checkpoint} with {'; '.join(changed)}"] if changed else []
    notes += on_rank_0(
        lambda: [*broken_checkpoints(config), *checkpoints_ahead(config, progress.step)]
    )
    if process.device.type == "cuda":
        from megatron5d.train.preflight.kernels import capability_here, choice_text

        notes.append(choice_text(config, capability_here()))
    padded = on_rank_0(lambda: may_hold_padding(config))
    notes = [note for note in notes if note]
    return Run(
        config,
        process,
        mesh,
        ledger,
        model,
        sync,
        optimizer,
        trainer,
        progress,
        layout,
        notes,
        padded,
    )


def build_trainer(
    config: Config, mesh: Mesh, model: GPT, layout: PipelineLayout
) -> tuple[GradSync, Optimizer, Trainer]:
    """Returns data parallelism, optimiser and pipeline around a model, whose weights may still have
    no values.

    Comm: the pipeline's channels are opened; that of `build_optimizer`.
    """
    sync = build_sync(config, mesh, model)
    optimizer = build_optimizer(sync.buckets, config.optim, mesh, rounding_seed(config))
    held = layout.placement.stages_of(mesh["pp"].rank)
    phases = {stage: model.phases_of(stage) for _, stage in held}
    stages = {
        (direction, stage): Stage(phases[stage], sync, _graphs(config, mesh))
        for direction, stage in held
    }
    forms = [
        boundary_form(config, sync.buckets[0].weights.device, spec.sent) for spec in layout.specs
    ]
    pipeline = Pipeline(
        layout.program_of, layout.placement, stages, mesh["pp"], forms, config.parallel.timeout_s
    )
    terms = loss_terms(config)
    check = model.overlap.check
    masked_by = (
        "data.eod_mask_loss = true, or padding (-100)"
        if config.data.eod_mask_loss
        else "padding (-100)"
    )
    trainer = Trainer(
        pipeline,
        sync,
        optimizer,
        mesh,
        terms,
        config.optim,
        model.balancer,
        model.send_capacity,
        check_overlap=check,
        masked_by=masked_by,
    )
    return sync, optimizer, trainer


def _graphs(config: Config, mesh: Mesh) -> PhaseGraphs | None:
    """Returns the graphs of one stage; None where phases run as they are."""
    if config.train.cuda_graph == "none" or not torch.cuda.is_available():
        return None
    from megatron5d.pipeline_parallel.phase_graphs import PhaseGraphs

    ledger = mesh["world"].recorder
    assert isinstance(ledger, Ledger)
    return PhaseGraphs(ledger)


def build_sync(config: Config, mesh: Mesh, model: GPT) -> GradSync:
    """Returns data parallelism around a model, whose parameters become views of its buckets."""
    p = config.parallel
    return GradSync(
        model.units,
        mesh,
        p.zero,
        grad_dtype(config),
        reduce_per_step=p.grad_reduce == "per_step",
        gather_per_step=p.zero3_gather == "per_step",
        gather_format=_gather_format(config),
        separate=lambda spec: takes_muon(spec, config.optim),
        frozen=lambda spec: freezes(spec, config.optim),
    )


def _gather_format(config: Config) -> type[GatherFormat] | None:
    """Returns the format in which ZeRO-3 gathers the weights of FP8 GEMMs; None = in their
    dtype."""
    if (
        config.parallel.zero < 3
        or config.precision.fp8 == "none"
        or not config.precision.fp8_gather
    ):
        return None
    from megatron5d.data_parallel.fp8_all_gather import Fp8ShardedWeights

    return Fp8ShardedWeights


def _first_weights(config: Config, sync: GradSync, optimizer: Optimizer, model: GPT) -> list[str]:
    """Returns the weights of the first step. Each rank fills only the slices that it owns, so no
    rank ever holds a whole model.

    Returns notes for the log: where loaded weights were trained as another function than this model
    computes.

    Comm: below ZeRO-3 an all_gather of the slices; for a checkpoint that of `load_tensors`.
    """
    init, held, notes = config.init, weight_shards(sync, model.weights()), list[str]()
    if init.from_checkpoint is not None:
        notes = load_weights_of_run(init.from_checkpoint, held, optimizer, config)
    else:
        if (folder := init.from_hf) is not None:
            from megatron5d.checkpoint.hf.weights import load_hf_shards

            notes = on_every_rank(
                lambda: load_hf_shards(held, config.model, folder, config.train.seed)
            )
            refuse_nonfinite(Path(folder), by_key("model", held))
        else:
            for spec, tensor in held:
                for offset, view in tensor.shards.items():
                    initialize_rectangle(view, offset, spec, config.train.seed)
        optimizer.weights_to_masters()
    sync.start_gather()
    sync.finish_gather()
    return notes


def sizes_of(config: Config, world: int) -> Sizes:
    """Returns the sizes of a run's axes; dp is what remains of the world."""
    p = config.parallel
    return resolve(
        world,
        tp=p.tp,
        cp=p.cp,
        pp=p.pp,
        ep=p.ep,
        etp=p.etp,
        dp_replicate=p.dp_replicate,
        order=tuple(p.order),
        ep_inner=p.ep_inner,
        cp_inner=split_of(config)[1],
    )


def grad_dtype(config: Config) -> torch.dtype:
    """Returns the dtype of main gradients: fp64 for a model in fp64, else as configured."""
    return (
        torch.float64 if config.precision.dtype == "fp64" else DTYPES[config.precision.grad_dtype]
    )


def rounding_seed(config: Config) -> int | None:
    """Returns the seed of stochastic rounding, for bf16 weights without fp32 masters; None where
    there are masters."""
    return None if config.precision.master_weights else config.train.seed

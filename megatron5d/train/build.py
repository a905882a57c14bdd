"""Builds a run from its components: mesh, model, data parallelism, optimizer, pipeline, weights."""

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
from megatron5d.optim.sharded_state import is_frozen, uses_muon
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
from megatron5d.train.preflight.resume import tokenizer_differences
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
    """Components and state of a training run.

    Args:
        notes: printed when the run starts.
        padded: whether the data files may contain padding.
    """

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
    notes: list[str] = field(default_factory=list)
    padded: bool = True

    @property
    def reads_tokens(self) -> bool:
        """Whether this rank needs tokens."""
        return reads_tokens(self.config, self.model, self.padded)


def reads_tokens(config: Config, model: GPT, padded: bool) -> bool:
    """Whether a rank needs tokens: to embed, predict, or find documents and padding."""
    at_ends = model.embedding is not None or model.head is not None or len(model.mtp_blocks) > 0
    needs_masks = config.data.document_mask or config.model.num_experts > 0 or padded
    return at_ends or needs_masks


def build_run(config: Config, process: Process, layout: PipelineLayout) -> Run:
    """Builds a run and gives it weights: initial, imported, or those of a checkpoint.

    Args:
        layout: of the pipeline, the same on every rank.

    Raises:
        ValueError: a checkpoint or an imported model does not fit.

    Comm: group creation; the pipeline's channels; loading a checkpoint.
    """
    on_gpu = process.device.type == "cuda"
    if config.train.cuda_graph != "none" and on_gpu:
        _leave_default_stream(process.device)
    ledger = Ledger(process.device)
    mesh = build_mesh(
        sizes_of(config, process.world),
        process.rank,
        num_kv_heads=config.model.num_kv_heads,
        shared=layout.shared,
        recorder=ledger,
        timeout_s=config.parallel.timeout_s,
    )
    stages = layout.stage_specs(mesh["pp"].rank)
    with without_memory():
        model = GPT(config, mesh, process.device, stages, layout.shared)
    sync, optimizer, trainer = build_trainer(config, mesh, model, layout)

    folder, resumed = config.checkpoint.dir, config.checkpoint.resume
    checkpoint = agree_on_checkpoint(folder, resumed, restarted_job())
    notes = [*idle_routers(config), layout.note, passed_over(config, checkpoint)]
    progress = Progress()
    if checkpoint is None:
        notes += _load_first_weights(config, sync, optimizer, model)
    else:
        progress, changes, config = resume(checkpoint, sync, optimizer, model.weights(), config)
        trainer.guard.in_a_row = progress.skipped_in_a_row
        notes += [f"continues from {checkpoint} with {'; '.join(changes)}"] if changes else []
    notes += on_rank_0(lambda: _checkpoint_notes(config, progress))
    if on_gpu:
        from megatron5d.train.preflight.kernels import capability_here, choice_text

        notes.append(choice_text(config, capability_here()))
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
        notes=[note for note in notes if note],
        padded=on_rank_0(lambda: may_hold_padding(config)),
    )


def _leave_default_stream(device: torch.device) -> None:
    """The default stream cannot be captured, and autograd runs on the stream of the forward."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)


def _checkpoint_notes(config: Config, progress: Progress) -> list[str]:
    return [*broken_checkpoints(config), *checkpoints_ahead(config, progress.step)]


def build_trainer(
    config: Config, mesh: Mesh, model: GPT, layout: PipelineLayout
) -> tuple[GradSync, Optimizer, Trainer]:
    """Data parallelism, optimizer and pipeline around a model, whose weights may lack values.

    Comm: the pipeline's channels are opened; that of `build_optimizer`.
    """
    sync = build_sync(config, mesh, model)
    optimizer = build_optimizer(sync.buckets, config.optim, mesh, rounding_seed(config))
    local_stages = layout.placement.stages_of(mesh["pp"].rank)
    phases = {stage: model.phases_of(stage) for _, stage in local_stages}
    stages = {
        (direction, stage): Stage(phases[stage], sync, _graphs(config, mesh))
        for direction, stage in local_stages
    }
    device, timeout_s = sync.buckets[0].weights.device, config.parallel.timeout_s
    forms = [boundary_form(config, device, spec.num_states) for spec in layout.specs]
    pipeline = Pipeline(layout.program_of, layout.placement, stages, mesh["pp"], forms, timeout_s)
    masks = ["data.eod_mask_loss = true"] if config.data.eod_mask_loss else []
    trainer = Trainer(
        pipeline,
        sync,
        optimizer,
        mesh,
        loss_terms(config),
        config.optim,
        model.balancer,
        model.send_capacity,
        check_overlap=model.overlap.check,
        masked_by=", or ".join([*masks, "padding (-100)"]),
    )
    return sync, optimizer, trainer


def _graphs(config: Config, mesh: Mesh) -> PhaseGraphs | None:
    """CUDA graphs of one stage; None where phases run without."""
    if config.train.cuda_graph == "none" or not torch.cuda.is_available():
        return None
    from megatron5d.pipeline_parallel.phase_graphs import PhaseGraphs

    ledger = mesh["world"].recorder
    assert isinstance(ledger, Ledger)
    return PhaseGraphs(ledger)


def build_sync(config: Config, mesh: Mesh, model: GPT) -> GradSync:
    """Data parallelism around a model, whose parameters become views of its buckets."""
    p = config.parallel
    return GradSync(
        model.units,
        mesh,
        p.zero,
        grad_dtype(config),
        reduce_per_step=p.grad_reduce == "per_step",
        gather_per_step=p.zero3_gather == "per_step",
        gather_format=_gather_format(config),
        separate=lambda spec: uses_muon(spec, config.optim),
        frozen=lambda spec: is_frozen(spec, config.optim),
    )


def _gather_format(config: Config) -> type[GatherFormat] | None:
    """Format in which ZeRO-3 gathers the weights of FP8 GEMMs; None = in their dtype."""
    precision = config.precision
    if config.parallel.zero < 3 or precision.fp8 == "none" or not precision.fp8_gather:
        return None
    from megatron5d.data_parallel.fp8_all_gather import Fp8ShardedWeights

    return Fp8ShardedWeights


def _load_first_weights(
    config: Config, sync: GradSync, optimizer: Optimizer, model: GPT
) -> list[str]:
    """Fills in the weights of the first step.

    Each rank fills only the slices that it owns, so that no rank ever holds a whole model.

    Returns:
        Notes for the log, where loaded weights were trained as another function than this model's.

    Comm: below ZeRO-3 an all_gather of the slices; for a checkpoint that of `load_tensors`.
    """
    init, shards = config.init, weight_shards(sync, model.weights())
    notes: list[str] = []
    if init.from_checkpoint is not None:
        notes = load_weights_of_run(init.from_checkpoint, shards, optimizer, config)
    else:
        if (folder := init.from_hf) is not None:
            from megatron5d.checkpoint.hf.weights import load_hf_shards

            notes = on_every_rank(
                lambda: load_hf_shards(shards, config.model, folder, config.train.seed)
            )
            saved = {"init": {"from_hf": folder}}
            notes += on_rank_0(lambda: tokenizer_differences(config, saved))
            refuse_nonfinite(Path(folder), by_key("model", shards))
        else:
            for spec, tensor in shards:
                for offset, view in tensor.shards.items():
                    initialize_rectangle(view, offset, spec, config.train.seed)
        optimizer.weights_to_masters()
    sync.start_gather()
    sync.finish_gather()
    return notes


def sizes_of(config: Config, world: int) -> Sizes:
    """Sizes of a run's axes; dp takes all remaining ranks."""
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
    """Dtype of main gradients: fp64 for a model in fp64, else as configured."""
    precision = config.precision
    return torch.float64 if precision.dtype == "fp64" else DTYPES[precision.grad_dtype]


def rounding_seed(config: Config) -> int | None:
    """Seed of stochastic rounding, for bf16 weights without fp32 masters; else None."""
    return None if config.precision.master_weights else config.train.seed

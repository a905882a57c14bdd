"""A short training run on any layout that returns all its numbers for comparison.

Every rank returns rectangles of global tensors, in global coordinates, including each copy that
several ranks hold: copies that should be equal are compared, too. tools/parity.py compares a user's
layout with one process; the test suite compares ours with a model on one page
(tests/reference_gpt.py).
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron5d.checkpoint.layout import sharded_slice
from megatron5d.config.schema import Config, ParallelConfig, PipelineConfig, RecomputeConfig
from megatron5d.data.batch import Loader
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.model.gpt import GPT
from megatron5d.optim.optimizer import Optimizer
from megatron5d.parity.inputs import Rows, perturb
from megatron5d.parity.local_ranks import RankFailure, run_ranks
from megatron5d.parity.rectangles import Rectangles, Vanishing, index_of, vanishing_elements
from megatron5d.parity.routing import Choices, fix_routing, replace_method
from megatron5d.phases.phase import Phase, phases_in
from megatron5d.planning.schedule_search.auto_schedule import searched_layout
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh, build_mesh
from megatron5d.topology.shard_spec import ShardSpec, spec_of
from megatron5d.train.build import build_trainer, reads_tokens, sizes_of
from megatron5d.train.data import BlankSamples, loader_of
from megatron5d.train.guard import crash_message
from megatron5d.train.pipeline_layout import PipelineLayout
from megatron5d.train.state import Progress, run_tensors
from megatron5d.train.step import Trainer, advance, next_step


@dataclass
class RankRecord:
    """The numbers of one rank; lists have an entry for each step.

    Args:
        figures: losses by name, grad_norm, num_targets.
        layers: figures of the routers.
        samples: for each micro-batch, the numbers of its sequences.
        skipped: why there was no update; None = there was one.
        repeats: steps that ran again because the send capacity was too small
            (moe.exchange=planned).
        hidden: this rank's share of each phase's output, as one number.
        gradients: those that this rank owns, before clipping; none in data.skip_steps.
        vanishing: their elements without an effect on the update, because there is only rounding.
        weights: all that this rank holds before the first step and after the last one, and those
            that it owns after the other steps; biases of routers included; none after
            data.skip_steps.
        moments: of the optimizer, by kind, after the last step.
        specs: by name, in the order of the model.
        choices: of experts, where they are recorded.
    """

    figures: list[dict[str, float]] = field(default_factory=list)
    layers: list[dict[str, float]] = field(default_factory=list)
    samples: list[list[list[int]]] = field(default_factory=list)
    skipped: list[str | None] = field(default_factory=list)
    repeats: int = 0
    hidden: list[dict[str, float]] = field(default_factory=list)
    gradients: list[Rectangles] = field(default_factory=list)
    vanishing: Vanishing = field(default_factory=dict)
    weights: list[Rectangles] = field(default_factory=list)
    moments: dict[str, Rectangles] = field(default_factory=dict)
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)


def single_process(config: Config) -> Config:
    """The same mathematics in one process: no axis, no recomputation, nothing offloaded."""
    return replace(
        config,
        optim=replace(config.optim, implementation="auto", offload=False),
        parallel=ParallelConfig(),
        pipeline=PipelineConfig(),
        recompute=RecomputeConfig(),
    )


def owned_slices(sync: GradSync, buffer: str) -> Rectangles:
    """What this rank owns of the `weight_slice` or the `grad_slice` of every bucket."""
    rectangles: Rectangles = []
    for bucket in sync.buckets:
        values = getattr(bucket, buffer)
        # Buckets of frozen parameters have no gradients.
        for segment in bucket.segments() if values.numel() else ():
            shards = sharded_slice(segment, values, writing=False).shards
            rectangles += [(segment.spec.name, at, view.clone()) for at, view in shards.items()]
    return rectangles


def short_run(
    config: Config,
    world: int,
    rows: Rows,
    steps: int,
    *,
    coarse: bool = False,
    choices: Choices | None = None,
    vanishing: Vanishing | None = None,
    phases: bool = True,
    timeout: float = 120.0,
) -> list[RankRecord]:
    """Trains with the product's own code on forked ranks.

    Args:
        config: a valid configuration; noise is added to its initial vectors (`perturb`).
        coarse: begin with weights that bf16 represents, whatever the precision.
        choices: of experts, which the run repeats; empty = record them, None = neither.
        vanishing: elements of gradients that the update does not see; empty = those in which there
            is only rounding, in one process; None = none.
        phases: record the hidden states of every phase.
        timeout: seconds after which ranks without a result are named.

    Returns:
        One record per rank.

    Raises:
        RankFailure: a rank failed; in words where its user can fix the cause.
    """
    layout = searched_layout(config, world)
    train = partial(train_on_rank, phases=phases, vanishing=vanishing)
    arguments = config, layout, rows, steps, coarse, choices
    return run_ranks(partial(_in_words, train), world, *arguments, timeout=timeout)


def _in_words(train: Callable[..., RankRecord], rank: int, world: int, *arguments) -> RankRecord:
    try:
        return train(rank, world, *arguments)
    except Exception as error:
        if crash_message(error, rank, world) is None:
            raise
        raise RankFailure(str(error)) from error


def train_on_rank(
    rank: int,
    world: int,
    config: Config,
    layout: PipelineLayout,
    rows: Rows,
    steps: int,
    coarse: bool,
    choices: Choices | None,
    *,
    phases: bool,
    vanishing: Vanishing | None = None,
) -> RankRecord:
    """Runs the steps of one rank; arguments as of `short_run`."""
    kv_heads = config.model.num_kv_heads
    mesh = build_mesh(sizes_of(config, world), rank, num_kv_heads=kv_heads, shared=layout.shared)
    model = _model(config, mesh, layout, coarse)
    record = RankRecord(specs={spec.name: spec for spec in map(spec_of, model.weights())})
    record.weights.append(_copies(model.weights()))
    if choices is not None:
        record.choices = fix_routing(model, choices, len(rows.tokens), config.train.seq_len)
    take_hidden = _watch_hidden(model, config, mesh["tp"]) if phases else dict
    sync, optimizer, trainer = build_trainer(config, mesh, model, layout)
    progress = Progress()
    _record_gradients(sync, record, progress, vanishing)

    with closing(_loader(config, mesh, model, rows)) as loader:
        while progress.step < steps:
            _train_step(trainer, config, loader, progress, record)
            record.hidden.append(take_hidden())
            if progress.step < steps:
                record.weights.append(_owned_weights(sync, model) if record.samples[-1] else [])
    with sync.weights.gathered():
        record.weights.append(_copies(model.weights()))
    record.moments = _moments(sync, optimizer)
    return record


def _model(config: Config, mesh: Mesh, layout: PipelineLayout, coarse: bool) -> GPT:
    """This rank's part of the model with its first weights; `coarse` as of `short_run`."""
    model = GPT(config, mesh, "cpu", layout.stage_specs(mesh["pp"].rank), layout.shared)
    model.initialize(config.train.seed)
    perturb(model.weights(), coarse)
    return model


def _loader(config: Config, mesh: Mesh, model: GPT, rows: Rows) -> Loader:
    """The run's own loader of these rows; as in a run, some ranks read no tokens."""
    reads = reads_tokens(config, model, rows.padded)
    samples = rows if reads else BlankSamples(rows.seq_len)
    return loader_of(config, mesh, samples, 0, 0, reads=reads)


def _train_step(
    trainer: Trainer, config: Config, loader: Loader, progress: Progress, record: RankRecord
) -> None:
    """Makes the next step, as the training loop does, and records its figures."""
    step = next_step(config, loader, progress)
    result = step.run(trainer)
    advance(progress, result, step.samples, trainer.guard.in_a_row)
    if not step.batches:
        record.gradients.append([])
    if result.repeated:
        del record.gradients[-2]
        record.repeats += 1
    norm_and_count = {"grad_norm": result.grad_norm, "num_targets": float(result.num_targets)}
    record.figures.append(result.losses | norm_and_count)
    record.layers.append(result.layers)
    record.skipped.append(result.skipped)
    numbers = [batch.samples for batch in step.batches]
    record.samples.append([samples.tolist() for samples in numbers if samples is not None])


def _record_gradients(
    sync: GradSync, record: RankRecord, progress: Progress, vanishing: Vanishing | None
) -> None:
    """Copies the reduced gradients of every step before anything else uses them.

    Then sets their vanishing elements to zero.
    """
    finish_reduce = sync.finish_reduce

    def finish_and_record() -> None:
        finish_reduce()
        record.gradients.append(owned_slices(sync, "grad_slice"))
        if vanishing is not None:
            step = progress.step + 1
            if step not in vanishing:
                vanishing[step] = vanishing_elements(record.gradients[-1])
            elements = record.vanishing[step] = vanishing[step]
            _clear_gradients(sync, elements)

    replace_method(sync, "finish_reduce", finish_and_record)


def _clear_gradients(sync: GradSync, elements: dict[str, Tensor]) -> None:
    for bucket in sync.buckets:
        for segment in bucket.segments() if bucket.grad_slice.numel() else ():
            if (mask := elements.get(segment.spec.name)) is not None:
                shards = sharded_slice(segment, bucket.grad_slice, writing=False).shards
                for offset, view in shards.items():
                    view.masked_fill_(mask[index_of(offset, view)], 0.0)


def _owned_weights(sync: GradSync, model: GPT) -> Rectangles:
    """Weights that this rank owns: gathering more would repair copies that were not sent."""
    return owned_slices(sync, "weight_slice") + _copies(model.weights(), buffers=True)


def _moments(sync: GradSync, optimizer: Optimizer) -> dict[str, Rectangles]:
    moments: dict[str, Rectangles] = {}
    for key, tensor in run_tensors(sync, optimizer, (), writing=False).items():
        if key.startswith("optim."):
            kind, _, name = key.removeprefix("optim.").partition(".")
            shards = [(name, at, view.clone()) for at, view in tensor.shards.items()]
            moments.setdefault(kind, []).extend(shards)
    return moments


def _copies(weights: list[Tensor], buffers: bool = False) -> Rectangles:
    """Copies of all weights of a rank, or with `buffers` of those that are no parameters."""
    return [
        (
            spec_of(weight).name,
            piece.offset,
            weight.detach()[piece.row : piece.row + piece.shape[0]].clone(),
        )
        for weight in weights
        if not (buffers and isinstance(weight, nn.Parameter))
        for piece in spec_of(weight).pieces
    ]


def _named_phases(model: GPT) -> Iterator[tuple[str, Phase]]:
    """(name, phase) of a rank, in the order of the model."""
    if model.embedding is not None:
        yield "embedding", model.embedding
    blocks = [(f"layers.{name}", phases_in(block)) for name, block in model.layers.items()]
    blocks += [(f"mtp {depth}", phases_in(block)) for depth, block in model.mtp_blocks.items()]
    for name, phases in blocks:
        yield from ((f"{name}.{phase.kind or i}", phase) for i, phase in enumerate(phases))


def _watch_hidden(model: GPT, config: Config, tp: Axis) -> Callable[[], dict[str, float]]:
    """Makes every phase record its hidden states as one number.

    Returns:
        Function that returns and clears the sums of a step, by phase.
    """
    copies = 1 if config.parallel.sp else tp.size  # without sp, all ranks of tp hold the same
    totals: dict[str, dict[tuple[int, ...], float]] = {name: {} for name, _ in _named_phases(model)}

    def recorder(name: str) -> Callable:
        def hook(phase, arguments, y) -> None:
            # The last phase returns (sums of losses, hidden states).
            y = y[1] if isinstance(y, tuple) and len(y) == 2 else y
            if isinstance(y, Tensor) and y.ndim == 3:
                # Before the head, multi-token prediction passes on the states of all depths.
                if getattr(phase, "output", phase) is None:
                    y = y.chunk(phase.depth + 2)[-1]
                # Different weights, so that swapped features change the number.
                features = torch.arange(y.shape[-1], dtype=torch.float64).cos()
                total = (y.detach().double() * features).square().sum().item()
                # By samples, so that a recomputed forward counts once.
                totals[name][tuple(arguments[1].samples.tolist())] = total / copies

        return hook

    for name, phase in _named_phases(model):
        phase.register_forward_hook(recorder(name))

    def take() -> dict[str, float]:
        sums = {name: sum(shares.values()) for name, shares in totals.items() if shares}
        for by_samples in totals.values():
            by_samples.clear()
        return sums

    return take

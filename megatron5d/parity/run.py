"""A short training run on any layout, which returns all its numbers for the parity check to
compare.

What a rank has comes in global coordinates, as rectangles of whole tensors, every copy of every
rank: also two copies that should be one are seen to differ. tools/parity.py holds a user's own
layout to one process; the suite holds ours to a model on one page (tests/reference_gpt.py).

One run can repeat another's choices of experts, so that rounding cannot send a token another way.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

from megatron5d.checkpoint.layout import sharded_slice
from megatron5d.config.schema import Config, ParallelConfig, PipelineConfig, RecomputeConfig
from megatron5d.data.batch import SequenceSharding, make_micro_batch
from megatron5d.data.sample_order import micro_batch_samples
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.expert_parallel.load_balancing import Tokens
from megatron5d.expert_parallel.router import scores_of, weights_of
from megatron5d.model.gpt import GPT
from megatron5d.model.moe import MoEDispatch
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.parity.local_ranks import run_ranks
from megatron5d.phases.phase import IGNORED, MicroBatch, Phase, phases_in
from megatron5d.planning.schedule_search.auto_schedule import searched_layout
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import ShardSpec, spec_of
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.guard import StepSamples
from megatron5d.train.pipeline_layout import PipelineLayout
from megatron5d.train.state import run_tensors

Choices = dict[int, dict[str, Tensor]]
"""Layer -> by sample·seq_len + position, int64 `[n+1, k]` chosen experts and those chosen by plain scores, and bool
`[n+1, k]` whether a choice is within the capacity; the last row is for what pads to equal shares."""


def fix_routing(model: GPT, choices: Choices, num_samples: int, seq_len: int) -> Choices:
    """Lets the routers of a rank note their choices, or repeat those of another run.

    Returns what is noted while the model runs, or `choices`.
    """
    noted: Choices = {}
    for phase in model.modules():
        if isinstance(phase, MoEDispatch):
            shape = num_samples * seq_len + 1, phase.config.top_k
            empty = {
                name: torch.zeros(shape, dtype=torch.int64) for name in ("chosen", "plain", "kept")
            }
            noted[phase.layer] = choices[phase.layer] if choices else empty
            _fix_phase(phase, noted[phase.layer], bool(choices), seq_len)
    return noted


def _fix_phase(phase: MoEDispatch, table: dict[str, Tensor], repeat: bool, seq_len: int) -> None:
    """Replaces what chooses in one phase by what notes its choice, or repeats the one in the
    tables."""
    model, choose, limit = phase.config, phase.router.forward, phase.limit_capacity
    plainly = type(phase.balancer).plain_choice
    rows = torch.zeros(0, dtype=torch.int64)  # of the tables: what is routed now

    def start(_, arguments) -> None:
        nonlocal rows
        x, batch, *_ = arguments
        tokens = phase.share.tokens(x.shape, batch)
        rows = batch.samples[tokens.sequence] * seq_len + tokens.order // tokens.num_sequences
        rows = rows.masked_fill(
            tokens.order >= seq_len * tokens.num_sequences, len(table["chosen"]) - 1
        )
        phase.balancer.plain_choice = plain_choice  # type: ignore[method-assign]

    def forward(logits: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not repeat:
            experts, weights = choose(logits, forced)
            table["chosen"][rows] = experts
            return experts, weights
        experts = table["chosen"][rows]
        return experts, weights_of(scores_of(logits, model.router_score), experts, model)

    def plain_choice(logits: Tensor, experts: Tensor, tokens: Tokens) -> Tensor:
        if not repeat:
            table["plain"][rows] = plainly(phase.balancer, logits, experts, tokens)
        return table["plain"][rows].masked_fill(experts == model.num_experts, model.num_experts)

    def limited(
        experts: Tensor, weights: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not repeat:
            taken, weights, dropped = limit(experts, weights, tokens)
            table["kept"][rows] = (taken == experts).long()
            return taken, weights, dropped
        # padding has no choice to drop
        keep = (table["kept"][rows] > 0) | (experts == model.num_experts)
        dropped = None if phase.moe.capacity_factor is None else (~keep).sum()
        return (
            experts.masked_fill(~keep, model.num_experts),
            weights * keep.to(weights.dtype),
            dropped,
        )

    phase.register_forward_pre_hook(start)
    phase.router.forward = forward  # type: ignore[method-assign]
    phase.limit_capacity = limited  # type: ignore[method-assign]


ROWS_SEED = 7  # of the random tokens
# global name, first index in the whole tensor, values
Rectangles = list[tuple[str, tuple[int, ...], Tensor]]


@dataclass
class RankRecord:
    """What one rank had; lists have an entry for each step."""

    # losses by name, grad_norm, num_targets
    figures: list[dict[str, float]] = field(default_factory=list)
    layers: list[dict[str, float]] = field(default_factory=list)  # what the routers did
    # numbers of the sequences of each micro-batch
    samples: list[list[list[int]]] = field(default_factory=list)
    repeats: int = 0  # steps that were run once more, for want of room (moe.exchange=planned)
    # its share of each phase's output, as one number
    hidden: list[dict[str, float]] = field(default_factory=list)
    gradients: list[Rectangles] = field(default_factory=list)  # what it owns, before clipping
    # before the first step and after the last all that it holds, after the others what it owns
    weights: list[Rectangles] = field(default_factory=list)  # the routers' biases among them
    # of the optimiser, by kind, after the last step
    moments: dict[str, Rectangles] = field(default_factory=dict)
    specs: dict[str, ShardSpec] = field(default_factory=dict)  # in the order of the model
    choices: Choices = field(default_factory=dict)  # of experts, where they were to be noted


def alone(config: Config) -> Config:
    """Returns the same mathematics in one process, plainly: no axis, nothing computed twice or kept
    elsewhere."""
    optim = replace(config.optim, implementation="auto", offload=False)
    plain = {
        "parallel": ParallelConfig(),
        "pipeline": PipelineConfig(),
        "recompute": RecomputeConfig(),
    }
    return replace(config, optim=optim, **plain)  # type: ignore[arg-type]


def make_rows(config: Config, steps: int, *, ignored: float = 0.0) -> Tensor:
    """Returns random token rows `[steps·gbs, s+1]`, up to a share of each ignored as padding at its
    end.

    In the first step every token is both read and predicted, where the batch has room for that.
    """
    generator = torch.Generator().manual_seed(ROWS_SEED)
    t, vocab = config.train, config.model.vocab_size
    shape = (steps * t.gbs, t.seq_len + 1)
    rows = torch.randint(0, vocab, shape, generator=generator)
    padding = torch.zeros(shape, dtype=torch.bool)
    if ignored:
        lengths = torch.randint(
            int(shape[1] * (1 - ignored)), shape[1], (shape[0],), generator=generator
        )
        padding = torch.arange(shape[1])[None] > lengths[:, None]
    places, met = ~padding[: t.gbs], -1
    # a token may fall on the first places of rows alone, which nothing predicts
    for _ in range(20):
        count = int(places.sum())
        drawn = torch.cat(
            [torch.randperm(vocab, generator=generator) for _ in range(-(-count // vocab))]
        )[:count]
        if config.data.eod is not None:  # documents end in every step
            drawn[vocab::4] = config.data.eod
        first = torch.full((t.gbs, shape[1]), IGNORED)
        first[places] = drawn
        both = sum(
            first[:, part][places[:, 1:]].unique().numel()
            for part in (slice(None, -1), slice(1, None))
        )
        if both > met:
            rows[: t.gbs], met = first, both
    return rows.masked_fill(padding, IGNORED)


def with_gaps(rows: Tensor, gbs: int) -> Tensor:
    """Returns rows in whose last step, where it is not the first, every other one has padding
    inside, and the last one is padding throughout."""
    rows, length = rows.clone(), rows.shape[1]
    if len(rows) > gbs > 1:
        rows[-gbs::2, length // 4 : length // 2] = rows[-1] = IGNORED
    return rows


def micro_batch(config: Config, rows: Tensor, numbers: Tensor | None = None) -> MicroBatch:
    """Returns all rows, or as in training those of these numbers."""
    data, rows = config.data, rows if numbers is None else rows[numbers]
    batch = make_micro_batch(
        rows,
        document_mask=data.document_mask,
        eod=data.eod,
        eod_mask_loss=data.eod_mask_loss,
        causal=config.model.attention_causal,
    )
    return replace(batch, samples=numbers)


def perturb(parameters, coarse: bool = False) -> None:
    """Moves vectors off their ones and zeros, the same on any layout, so that every gradient path
    is seen.

    Biases get the size of what they are added to: larger ones would make all tokens alike, and send
    them to the same experts.

    Args:
        coarse: all of them are rounded to what bf16 has, vectors before and after.
    """
    parameters = list(parameters)
    specs = {spec_of(parameter).name: spec_of(parameter) for parameter in parameters}
    for parameter in parameters:
        spec = spec_of(parameter)
        if coarse:
            parameter.data.copy_(parameter.data.bfloat16())
        if len(spec.shape) == 1:
            generator = torch.Generator().manual_seed(len(spec.name) * 1009 + spec.shape[0])
            noise = 0.3 * torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            matrix = specs.get(re.sub(r"\.(linear_)?bias$", ".weight", spec.name))
            if spec.name.endswith("bias") and matrix is not None and len(matrix.shape) == 2:
                noise *= float(matrix.init)
                # scores are softmax or sigmoid of w·x, with features of about 1
                if spec.name.endswith("router.bias"):
                    noise *= sqrt(matrix.shape[1]) / matrix.shape[0]
            for piece in spec.pieces:
                span = slice(piece.offset[0], piece.offset[0] + piece.shape[0])
                part = parameter.data[piece.row : piece.row + piece.shape[0]]
                if coarse:
                    part.copy_(part.bfloat16() + noise[span].bfloat16())
                else:
                    part += noise[span].to(parameter.dtype)


def owned_slices(sync: GradSync, buffer: str) -> Rectangles:
    """Returns what this rank owns of the `weight_slice` or the `grad_slice` of every bucket."""
    found: Rectangles = []
    for bucket in sync.buckets:
        # frozen ones have no gradient
        for segment in bucket.segments() if getattr(bucket, buffer).numel() else ():
            parts = sharded_slice(segment, getattr(bucket, buffer), writing=False).shards
            found += [(segment.spec.name, offset, view.clone()) for offset, view in parts.items()]
    return found


def short_run(
    config: Config,
    world: int,
    rows: Tensor,
    steps: int,
    *,
    coarse: bool = False,
    choices: Choices | None = None,
    phases: bool = True,
    timeout: float = 120.0,
) -> list[RankRecord]:
    """Trains the real thing on forked ranks.

    Args:
        config: a valid configuration; its vectors' first values are moved (`perturb`).
        rows: int64 `[steps·gbs, s+1]`.
        coarse: it begins with weights that bf16 has, whatever its precision.
        choices: of experts, which are repeated; empty = noted, None = neither.
        phases: whether each notes its hidden states.
        timeout: seconds after which silent ranks are named.

    Returns:
        One record a rank.

    Raises:
        RankFailure: a rank failed.
    """
    layout = searched_layout(config, world)
    train = partial(train_on_rank, phases=phases)
    return run_ranks(train, world, config, layout, rows, steps, coarse, choices, timeout=timeout)


def train_on_rank(
    rank: int,
    world: int,
    config: Config,
    layout: PipelineLayout,
    rows: Tensor,
    steps: int,
    coarse: bool,
    choices: Choices | None,
    *,
    phases: bool,
) -> RankRecord:
    sizes, kv = sizes_of(config, world), config.model.num_kv_heads
    mesh = build_mesh(sizes, rank, num_kv_heads=kv, shared=layout.shared)
    model = GPT(config, mesh, "cpu", layout.stage_specs(mesh["pp"].rank), layout.shared)
    model.initialize(config.train.seed)
    perturb(model.weights(), coarse)
    t, dp, sharding, record = config.train, mesh["dp"], SequenceSharding(config, mesh), RankRecord()
    record.specs = {spec.name: spec for spec in map(spec_of, model.weights())}
    record.weights.append(_held(model.weights()))
    if choices is not None:
        record.choices = fix_routing(model, choices, len(rows), t.seq_len)
    take_hidden = (
        _watch_hidden(model, 1 if config.parallel.sp else mesh["tp"].size) if phases else dict
    )
    sync, optimizer, trainer = build_trainer(config, mesh, model, layout)
    finish_reduce = sync.finish_reduce

    def finish_reduce_and_note() -> None:
        """Keeps the gradients as they are before anything is done with them."""
        finish_reduce()
        record.gradients.append(owned_slices(sync, "grad_slice"))

    sync.finish_reduce = finish_reduce_and_note  # type: ignore[method-assign]
    for step in range(steps):
        numbers = micro_batch_samples(step * t.gbs, t.gbs, t.mbs, dp.rank, dp.size)
        where = StepSamples(step + 1, range(step * t.gbs, (step + 1) * t.gbs))
        batches = [sharding(micro_batch(config, rows, torch.tensor(each))) for each in numbers]
        result = trainer.step(
            batches, learning_rate(config.optim, step + 1, t.steps), watched=True, where=where
        )
        if result.repeated:
            del record.gradients[-2]
            record.repeats += 1
        targets = float(result.num_targets)
        record.figures.append(
            result.losses | {"grad_norm": result.grad_norm, "num_targets": targets}
        )
        record.layers.append(result.layers)
        record.samples.append([list(each) for each in numbers])
        record.hidden.append(take_hidden())
        if step + 1 < steps:  # gathering more would repair copies that were not sent
            record.weights.append(
                owned_slices(sync, "weight_slice") + _held(model.weights(), buffers=True)
            )
    with sync.weights.whole():
        record.weights.append(_held(model.weights()))
    for key, tensor in run_tensors(sync, optimizer, (), writing=False).items():
        kind, _, name = key.removeprefix("optim.").partition(".")
        if key.startswith("optim."):
            held = record.moments.setdefault(kind, [])
            held += [(name, offset, view.clone()) for offset, view in tensor.shards.items()]
    return record


def _held(weights: list[Tensor], buffers: bool = False) -> Rectangles:
    """Copies of all weights of a rank, or of those alone that are no parameters."""
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


def _phases(model: GPT) -> Iterator[tuple[str, Phase]]:
    """Yields the phases of a rank by name, in the order of the model."""
    if model.embedding is not None:
        yield "embedding", model.embedding
    blocks = [(name, phases_in(block)) for name, block in model.layers.items()]
    blocks += [(f"mtp {depth}", phases_in(block)) for depth, block in model.mtp_blocks.items()]
    for name, phases in blocks:
        prefix = name if name.startswith("mtp") else f"layers.{name}"
        yield from ((f"{prefix}.{phase.kind or i}", phase) for i, phase in enumerate(phases))


def _watch_hidden(model: GPT, copies: int) -> Callable[[], dict[str, float]]:
    """Lets every phase note its hidden states as one number, and returns what takes the sums of a
    step."""
    seen: dict[str, dict[tuple[int, ...], float]] = {name: {} for name, _ in _phases(model)}

    def note(name: str) -> Callable:
        def hook(phase, arguments, y) -> None:
            # (sums of losses, hidden states)
            y = y[1] if isinstance(y, tuple) and len(y) == 2 else y
            if isinstance(y, Tensor) and y.ndim == 3:
                # multi-token prediction before the head: of all depths
                if getattr(phase, "output", phase) is None:
                    y = y.chunk(phase.depth + 2)[-1]
                # that a feature is told from another
                features = torch.arange(y.shape[-1], dtype=torch.float64).cos()
                total = (y.detach().double() * features).square().sum().item()
                # a recomputed one counts once
                seen[name][tuple(arguments[1].samples.tolist())] = total / copies

        return hook

    for name, phase in _phases(model):
        phase.register_forward_hook(note(name))

    def take() -> dict[str, float]:
        found = {name: sum(each.values()) for name, each in seen.items() if each}
        for each in seen.values():
            each.clear()
        return found

    return take

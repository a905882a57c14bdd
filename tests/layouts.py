"""Runs a configuration on any layout and brings back, in global coordinates, what the parity tests compare.

`reference_run` is one process with plain autograd (reference_gpt.py) and torch's own AdamW and clipping;
`layout_run` is the real model, data parallelism and optimiser on forked ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import inf, isnan

import pytest
import reference_gpt
import torch
from ranks import run_ranks

from megatron5d.checkpoint.layout import sharded_slice
from megatron5d.config.schema import Config, ParallelConfig
from megatron5d.data.batch import make_micro_batch
from megatron5d.data.sampler import micro_batch_samples
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.model.context import SequenceSharding
from megatron5d.model.gpt import Gpt
from megatron5d.optim.adamw import decays
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard import spec_of
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.schedule import plan_pipeline

IGNORED = -100


@dataclass
class Outcome:
    """Figures of a short training, weights and first gradients by global name."""

    losses: list[float]
    z_losses: list[float]
    grad_norms: list[float]
    grads: dict[str, torch.Tensor]  # of the first step, before clipping
    weights: dict[str, torch.Tensor]  # after the last step, the routers' biases among them
    routers: list[dict[str, float]] = field(default_factory=list)  # auxiliary losses of each step
    layers: list[dict[str, float]] = field(default_factory=list)  # what the routers did in each step


def make_rows(config: Config, steps: int, *, ignored: float = 0.0) -> torch.Tensor:
    """Random token rows `[steps·gbs, s+1]`, a share of them ignored as padding at the end of the row."""
    generator = torch.Generator().manual_seed(7)
    shape = (steps * config.train.gbs, config.train.seq_len + 1)
    rows = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    if ignored:
        lengths = torch.randint(int(shape[1] * (1 - ignored)), shape[1], (shape[0],), generator=generator)
        rows[torch.arange(shape[1])[None] > lengths[:, None]] = IGNORED
    return rows


def micro_batch(config: Config, rows: torch.Tensor, numbers: torch.Tensor | None = None):
    """All rows, or as in training those of these numbers."""
    data, rows = config.data, rows if numbers is None else rows[numbers]
    batch = make_micro_batch(rows, document_mask=data.document_mask, eod=data.eod, eod_mask_loss=data.eod_mask_loss)
    return dataclasses.replace(batch, samples=numbers)


def perturb(parameters) -> None:
    """Moves vectors off their ones and zeros, the same on any layout, so that every gradient path is seen."""
    for parameter in parameters:
        spec = spec_of(parameter)
        if len(spec.shape) == 1:
            generator = torch.Generator().manual_seed(len(spec.name) * 1009 + spec.shape[0])
            noise = 0.3 * torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            for piece in spec.pieces:
                span = slice(piece.offset[0], piece.offset[0] + piece.shape[0])
                parameter.data[piece.row : piece.row + piece.shape[0]] += noise[span].to(parameter.dtype)


def reference_run(config: Config, rows: torch.Tensor, steps: int) -> Outcome:
    """One process, plain torch."""
    alone = dataclasses.replace(config, parallel=ParallelConfig())
    model = Gpt(alone, build_mesh(sizes_of(alone, 1), num_kv_heads=config.model.num_kv_heads))
    model.initialize(config.train.seed)
    perturb(model.weights())
    biases = {spec_of(buffer).name: buffer for buffer in model.weights()[len(list(model.parameters())) :]}
    specs = {name: spec_of(parameter) for name, parameter in model.named_specs()}
    weights = {
        name: parameter.detach()[: specs[name].shape[0]].clone().requires_grad_()
        for name, parameter in model.named_specs()
    }
    o = config.optim
    groups = [
        {
            "params": [w for n, w in weights.items() if decays(specs[n], o.decay_exclude)],
            "weight_decay": o.weight_decay,
        },
        {"params": [w for n, w in weights.items() if not decays(specs[n], o.decay_exclude)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=tuple(o.betas), eps=o.eps)
    outcome = Outcome([], [], [], {}, {})
    gbs = config.train.gbs
    for step in range(steps):
        numbers = torch.arange(step * gbs, (step + 1) * gbs)
        batch = micro_batch(config, rows, numbers)
        state = weights | {name: bias.clone() for name, bias in biases.items()}
        loss, objective, book = reference_gpt.losses(
            state, config.model, batch, config.train, config.moe, config.train.mbs
        )
        optimizer.zero_grad()
        objective.backward()
        if step == 0:
            outcome.grads = {name: w.grad.clone() for name, w in weights.items()}
        max_norm = o.clip or float("inf")
        outcome.grad_norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), max_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step + 1, config.train.steps)
        optimizer.step()
        outcome.losses.append(loss.item())
        outcome.z_losses.append(book.pop("z_loss").item())
        outcome.routers.append({name: value.item() for name, value in book.items() if name.endswith("_loss")})
        outcome.layers.append(book)
        if "bias" in config.moe.balance:
            for name, bias in biases.items():
                counts = book[name.replace("router.bias", "counts")]
                bias += config.moe.bias_rate * torch.sign(counts.mean() - counts)
    outcome.weights = {name: w.detach() for name, w in weights.items()} | biases
    return outcome


def _rectangles(sync: GradSync, buffer: str) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    found = []
    for bucket in sync.buckets:
        flat = {"weights": bucket.weight_slice, "grads": bucket.grad_slice}[buffer]
        for segment in bucket.segments():
            parts = sharded_slice(segment, flat, writing=False).parts
            found += [(segment.spec.name, offset, view.clone()) for offset, view in parts.items()]
    return found


def _train_on_rank(rank: int, world: int, config: Config, rows: torch.Tensor, steps: int):
    plan = plan_pipeline(config, world)
    sizes, kv = sizes_of(config, world), config.model.num_kv_heads
    mesh = build_mesh(sizes, rank, num_kv_heads=kv, pairs=plan.shared != "none")
    model = Gpt(config, mesh, "cpu", plan.parts(mesh["pp"].rank), plan.shared)
    model.initialize(config.train.seed)
    perturb(model.weights())
    sync, _, trainer = build_trainer(config, mesh, model, plan)
    t, dp, sharding = config.train, mesh["dp"], SequenceSharding(config, mesh)
    figures, grads = [], []
    finish_reduce = sync.finish_reduce

    def finish_reduce_and_note() -> None:
        """Keeps the first step's gradients as they are before anything is done with them."""
        finish_reduce()
        if not figures:
            grads.extend(_rectangles(sync, "grads"))

    sync.finish_reduce = finish_reduce_and_note
    for step in range(steps):
        numbers = micro_batch_samples(step * t.gbs, t.gbs, t.mbs, dp.rank, dp.size)
        batches = [sharding(micro_batch(config, rows, torch.tensor(each))) for each in numbers]
        result = trainer.step(batches, learning_rate(config.optim, step + 1, t.steps), watched=True)
        routers = {name: value for name, value in result.sums.items() if name not in ("loss", "z_loss")}
        figures.append((result.sums["loss"], result.sums["z_loss"], result.grad_norm, routers, result.layers))
    with sync.whole_weights():
        whole = [(spec_of(p).name, piece.offset, p.detach()[piece.row : piece.row + piece.shape[0]].clone())
                 for p in model.weights() for piece in spec_of(p).pieces]  # fmt: skip
    return figures, grads, whole


def layout_run(config: Config, world: int, rows: torch.Tensor, steps: int) -> list[Outcome]:
    """The real thing on `world` ranks; one Outcome per rank, its grads and weights as lists joined by `assembled`."""
    results = run_ranks(_train_on_rank, world, config, rows, steps, timeout=120)
    for figures, _, _ in results[1:]:
        assert figures == results[0][0], "ranks disagree about loss or gradient norm"
    figures = results[0][0]
    losses, z_losses, norms, routers, layers = (list(column) for column in zip(*figures))
    outcome = Outcome(losses, z_losses, norms, {}, {}, routers, layers)
    return [outcome, [r[1] for r in results], [r[2] for r in results]]


def worst_relative(rectangles, truth: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest |difference| / max|truth of that tensor| over every rank's every rectangle; checks that all is covered.

    Raises:
        AssertionError: some element of some tensor is held by nobody.
    """
    covered = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in truth.items()}
    worst, where = 0.0, ""
    for rank, held in enumerate(rectangles):
        for name, offset, values in held:
            index = tuple(slice(o, o + n) for o, n in zip(offset, values.shape))
            covered[name][index] = True
            scale = truth[name].abs().max().clamp(min=1e-30)
            error = ((values - truth[name][index]).abs().max() / scale).item() if values.numel() else 0.0
            error = inf if isnan(error) else error
            if error > worst:
                worst, where = error, f"{name} on rank {rank} at {offset}"
    missing = [name for name, mask in covered.items() if not mask.all()]
    assert not missing, f"held by nobody: {missing}"
    return worst, where


def auxiliary_losses(config: Config) -> set[str]:
    """Names of the losses that a run tells beside the main one and its z-loss."""
    balanced = {f"{kind}_loss" for kind in config.moe.balance if kind.endswith("aux")}
    routers = balanced | ({"router_z_loss"} if config.moe.z_coef else set())
    return (routers if config.model.num_experts else set()) | ({"mtp_loss"} if config.model.num_mtp_layers else set())


def assert_parity(config: Config, world: int, *, steps: int = 3, rtol: float = 1e-10, ignored: float = 0.0) -> None:
    """Loss, every gradient, gradient norm and the weights after some steps equal the one-process reference."""
    rows = make_rows(config, steps, ignored=ignored)
    truth = reference_run(config, rows, steps)
    outcome, grads, weights = layout_run(config, world, rows, steps)
    for name in ("losses", "grad_norms") + (("z_losses",) if config.train.z_loss else ()):
        assert getattr(outcome, name) == pytest.approx(getattr(truth, name), rel=rtol, abs=0), name
    for got, expected in zip(outcome.routers, truth.routers, strict=True):
        assert got == pytest.approx({name: expected[name] for name in auxiliary_losses(config)}, rel=rtol, abs=0)
    for what, held, expected in (("gradient", grads, truth.grads), ("weight", weights, truth.weights)):
        worst, where = worst_relative(held, expected)
        assert worst <= rtol, f"{what} of {where} is off by {worst:.2e} relative, more than {rtol:.0e}"

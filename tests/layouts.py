"""Runs a configuration on any layout and brings back, in global coordinates, what the parity tests
compare.

`reference_run` is one process with plain autograd (reference_gpt.py), torch's own AdamW and
clipping, and Muon on a page (reference_muon.py); `layout_run` is the real model, data parallelism
and optimiser on forked ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
import reference_gpt
import reference_muon
import torch
from rank_pool import run_on_pool

from megatron5d.config.schema import Config, ParallelConfig, PipelineConfig, RecomputeConfig
from megatron5d.model.gpt import GPT
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.optim.sharded_state import decay_of, is_frozen, scale_of
from megatron5d.parity.differences import tensor_differences
from megatron5d.parity.inputs import Rows, make_rows, micro_batch, perturb, with_gaps
from megatron5d.parity.run import train_on_rank
from megatron5d.planning.schedule_search.auto_schedule import searched_layout
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of
from megatron5d.train.build import sizes_of
from megatron5d.train.pipeline_layout import micro_batch_counts

__all__ = [
    "assert_parity",
    "layout_run",
    "make_rows",
    "micro_batch",
    "perturb",
    "reference_run",
    "worst_relative",
]


@dataclass
class Outcome:
    """Figures of a short training, weights and first gradients by global name."""

    losses: list[float]
    z_losses: list[float]
    grad_norms: list[float]
    grads: dict[str, torch.Tensor]  # of the first step, before clipping
    weights: dict[str, torch.Tensor]  # after the last step, the routers' biases among them
    routers: list[dict[str, float]] = field(default_factory=list)  # auxiliary losses of each step
    # what the routers did in each step
    layers: list[dict[str, float]] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)  # predictions of each step that count


def plain_optimizers(config: Config, specs, trained: dict[str, torch.Tensor]):
    """torch's AdamW, and Muon for what it takes, of weights by global name."""
    o = config.optim
    decay = {name: decay_of(specs[name], o) for name in trained}
    scale = {name: scale_of(specs[name], o.lr_scale) for name in trained}
    muon = reference_muon.Muon(trained, decay, scale, config)
    names = [name for name in trained if name not in muon.names]
    groups = [
        {"params": [trained[name]], "weight_decay": decay[name], "scale": scale[name]}
        for name in names
    ]
    return torch.optim.AdamW(groups, betas=tuple(o.betas), eps=o.eps), muon


# of layouts that follow each other: most of a file's hold to one of a few
_references: dict[tuple, Outcome] = {}


def reference_run(config: Config, rows: torch.Tensor, steps: int) -> Outcome:
    """One process, plain torch; once for layouts of the same mathematics. Its figures are not to be
    changed."""
    apart = {
        "parallel": ParallelConfig(),
        "pipeline": PipelineConfig(),
        "recompute": RecomputeConfig(),
    }
    key = repr(dataclasses.replace(config, **apart)), rows.numpy().tobytes(), steps
    if config.moe.replay is not None:  # what its file says may change
        return _reference_run(config, rows, steps)
    if key not in _references:
        while len(_references) >= 8:
            del _references[next(iter(_references))]
        _references[key] = _reference_run(config, rows, steps)
    return _references[key]


def _reference_run(config: Config, rows: torch.Tensor, steps: int) -> Outcome:
    alone = dataclasses.replace(config, parallel=ParallelConfig())
    model = GPT(alone, build_mesh(sizes_of(alone, 1), num_kv_heads=config.model.num_kv_heads))
    model.initialize(config.train.seed)
    perturb(model.weights())
    biases = {
        spec_of(buffer).name: buffer for buffer in model.weights()[len(list(model.parameters())) :]
    }
    pairs = [(spec_of(parameter), parameter.detach()) for parameter in model.parameters()]
    specs = {spec.name: spec for spec, _ in pairs}
    weights = {spec.name: whole[: spec.shape[0]].clone().requires_grad_() for spec, whole in pairs}
    o, trained = (
        config.optim,
        {name: w for name, w in weights.items() if not is_frozen(specs[name], config.optim)},
    )
    for name in weights.keys() - trained:
        weights[name].requires_grad_(False)
    optimizer, muon = plain_optimizers(config, specs, trained)
    outcome = Outcome([], [], [], {}, {})
    gbs = config.train.gbs
    for step in range(steps):
        numbers = torch.arange(step * gbs, (step + 1) * gbs)
        batch = micro_batch(config, rows, numbers)
        state = weights | {name: bias.clone() for name, bias in biases.items()}
        loss, objective, book = reference_gpt.losses(
            state, config.model, batch, config.train, config.moe, config.train.mbs
        )
        for weight in trained.values():
            weight.grad = None
        objective.backward()
        for weight in trained.values():  # those of a depth without targets
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if step == 0:
            outcome.grads = {name: w.grad.clone() for name, w in trained.items()}
        max_norm = o.clip or float("inf")
        outcome.grad_norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), max_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step + 1, config.train.steps) * group["scale"]
        optimizer.step()
        muon.step(learning_rate(o, step + 1, config.train.steps))
        outcome.losses.append(loss.item())
        outcome.targets.append(batch.loss_mask.sum().item())
        outcome.z_losses.append(book.pop("z_loss").item())
        outcome.routers.append(
            {name: value.item() for name, value in book.items() if name.endswith("_loss")}
        )
        outcome.layers.append(book)
        if "bias" in config.moe.balance:
            for name, bias in biases.items():
                counts = book[name.replace("router.bias", "counts")]
                bias += config.moe.bias_rate * torch.sign(counts.mean() - counts)
    outcome.weights = {name: w.detach() for name, w in weights.items()} | biases
    return outcome


# of all that a rank has: sending it takes time as well
def _what_is_compared(rank: int, world: int, *arguments):
    record = train_on_rank(rank, world, *arguments, False, None, phases=False)
    return (record.figures, record.layers), record.gradients[0], record.weights[-1]


def layout_run(config: Config, world: int, rows: torch.Tensor, steps: int):
    """The real thing on `world` ranks: its Outcome, and every rank's gradients and weights as
    rectangles."""
    layout = searched_layout(config, world)
    # can be pickled
    programs = {count: layout.program_of(count) for count in micro_batch_counts(config, world)}
    layout = dataclasses.replace(layout, program_of=programs.__getitem__)
    watched = dataclasses.replace(config, moe=dataclasses.replace(config.moe, log_every=1))
    arguments = watched, layout, Rows(rows), steps
    told, gradients, weights = zip(*run_on_pool(_what_is_compared, world, *arguments), strict=True)
    assert all(each == told[0] for each in told), "ranks disagree about loss or gradient norm"
    (figures, layers), plain = told[0], ("loss", "z_loss", "grad_norm", "num_targets")
    losses, z_losses, norms, targets = ([f[name] for f in figures] for name in plain)
    routers = [{k: v for k, v in f.items() if k not in plain} for f in figures]
    return Outcome(losses, z_losses, norms, {}, {}, routers, layers, targets), gradients, weights


def worst_relative(rectangles, truth: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest |difference| / max|truth of that tensor| over every rank's every rectangle, infinite
    where some element is held by nobody; and where it is."""
    worst = max(tensor_differences("", rectangles, truth), key=lambda each: each.relative)
    return worst.relative, f"{worst.name} on rank {worst.rank} at {worst.position}"


def auxiliary_losses(config: Config) -> set[str]:
    """Names of the losses that a run tells beside the main one and its z-loss."""
    balanced = {f"{kind}_loss" for kind in config.moe.balance if kind.endswith("aux")}
    routers = balanced | ({"router_z_loss"} if config.moe.z_coef else set())
    return (routers if config.model.num_experts else set()) | (
        {"mtp_loss"} if config.model.num_mtp_layers else set()
    )


def constant_choices(config: Config, truth: Outcome) -> list[str]:
    """The routers that sent every token of every step to the same experts, which tries nothing that
    follows."""
    k, book = config.model.top_k, truth.layers
    names = (
        [name for name in book[0] if name.endswith(".counts")]
        if k < config.model.num_experts
        else []
    )
    return [name for name in names if all((step[name] > 0).sum() <= k for step in book)]


def assert_parity(
    config: Config,
    world: int,
    *,
    steps: int = 2,
    rtol: float = 1e-10,
    ignored: float = 0.0,
    rows=None,
) -> None:
    """Loss, every gradient, gradient norm and the weights after some steps equal the one-process
    reference.

    Args:
        ignored: largest share of a row that is padding at its end; if not 0, some rows of the last
            step also have padding inside.
    """
    if rows is None:
        rows = make_rows(config, steps, ignored=ignored)
        rows = with_gaps(config, rows, steps) if ignored else rows
    truth = reference_run(config, rows, steps)
    outcome, grads, weights = layout_run(config, world, rows, steps)
    assert not (constant := constant_choices(config, truth)), (
        f"every token goes to the same experts: {constant}"
    )
    assert outcome.targets == truth.targets, "ranks count other targets than there are"
    for name in ("losses", "grad_norms") + (("z_losses",) if config.train.z_loss else ()):
        assert getattr(outcome, name) == pytest.approx(getattr(truth, name), rel=rtol, abs=0), name
    for got, expected in zip(outcome.routers, truth.routers, strict=True):
        assert got == pytest.approx(
            {name: expected[name] for name in auxiliary_losses(config)}, rel=rtol, abs=0
        )
    for what, held, expected in (
        ("gradient", grads, truth.grads),
        ("weight", weights, truth.weights),
    ):
        worst, where = worst_relative(held, expected)
        assert worst <= rtol, (
            f"{what} of {where} is off by {worst:.2e} relative, more than {rtol:.0e}"
        )

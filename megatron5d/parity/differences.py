"""Differences between the numbers of some ranks and those of one process, one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan, nan

import numpy as np
import torch
from torch import Tensor

from megatron5d.config.schema import Config
from megatron5d.parity.rectangles import Rectangles, index_of, joined, masked, rounding_of
from megatron5d.parity.run import RankRecord
from megatron5d.topology.grid import DENSE_GROUPS, Sizes, dense_grid
from megatron5d.topology.mesh import groups_of

SAMPLES, HIDDEN = "samples", "hidden state"
FLOOR = 1e-3  # as a scale, at the default tolerance: differences of ROUNDING are none
SLACK = 10.0  # by which a rank's rounding may exceed that of one process


@dataclass(frozen=True)
class Difference:
    """Distance of some ranks from one process, in one tensor or one figure.

    Args:
        quantity: loss, grad_norm, ...; "routers"; gradient, weight, or a kind of moments.
        name: the parameter's global name, or the step of a figure.
        relative: largest |difference| relative to the largest value of the global tensor; inf where
            no rank holds an element.
        rank: the one that is furthest off; None where no rank holds the element.
        ranks: all that are further off than the tolerance.
        position: of that element in the global tensor; () for a figure.
        got: the value on `rank`.
        expected: the value in one process.
        step: counted from 1; 0 = before the first.
    """

    quantity: str
    name: str
    relative: float = 0.0
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    position: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0
    step: int = 0


def figure_differences(
    records: Sequence[RankRecord], truth: RankRecord, tolerance: float
) -> Iterator[Difference]:
    """Differences in every figure of every step: losses first, then routers and hidden states."""
    for kind in ("figures", "layers"):
        for step, figures in enumerate(getattr(truth, kind), 1):
            for name, value in figures.items():
                values = [getattr(record, kind)[step - 1].get(name, inf) for record in records]
                if isnan(value) and not figures.get("num_targets", 1):
                    value, values = without_target(values)
                quantity, label = name, f"step {step}"
                if kind == "layers":
                    quantity, label = "routers", f"{name}, step {step}"
                yield one_figure(quantity, label, values, value, tolerance, step)
    for step, name, total, value, ranks in hidden_sums(records, truth):
        label = f"{name}, step {step}"
        difference = one_figure(HIDDEN, label, [total], value, tolerance, step)
        yield replace(difference, rank=ranks[0])


def without_target(values: list[float]) -> tuple[float, list[float]]:
    """What to compare of a loss without targets: ranks on which it is NaN, too, are equal."""
    return 0.0, [0.0 if isnan(value) else inf for value in values]


def one_figure(
    quantity: str, name: str, values: list[float], value: float, tolerance: float, step: int
) -> Difference:
    """Difference of one figure, given its value on each rank."""
    off = [abs(figure - value) / (abs(value) or 1.0) for figure in values]
    off = [inf if isnan(distance) else distance for distance in off]
    rank = off.index(max(off))
    ranks = tuple(r for r, distance in enumerate(off) if distance > tolerance)
    return Difference(quantity, name, off[rank], rank, ranks, (), values[rank], value, step)


def hidden_sums(
    records: Sequence[RankRecord], truth: RankRecord
) -> Iterator[tuple[int, str, float, float, tuple[int, ...]]]:
    """(step, phase, sum over ranks, value in one process, ranks that run it) of every phase."""
    for step, expected in enumerate(truth.hidden, 1):
        for name, value in expected.items():
            by_rank = {
                rank: record.hidden[step - 1][name]
                for rank, record in enumerate(records)
                if name in record.hidden[step - 1]
            }
            total = sum(by_rank.values()) if by_rank else inf
            yield step, name, total, value, tuple(by_rank) or (0,)


def sample_differences(
    records: Sequence[RankRecord], truth: RankRecord, sizes: Sizes
) -> Iterator[Difference]:
    """Number of sequences of each step that a rank should not have read.

    dp rank r reads micro-batches r, r + dp, ...
    """
    grid = dense_grid(sizes)
    for step, batches in enumerate(truth.samples, 1):
        off = []
        for rank, record in enumerate(records):
            dp_rank = grid.group(rank, *DENSE_GROUPS["dp"]).index(rank)
            expected, actual = batches[dp_rank :: sizes.dp], record.samples[step - 1]
            wrong = sum(a != b for a, b in zip(sum(actual, []), sum(expected, [])))
            off.append(float(wrong) + abs(len(actual) - len(expected)))
        yield one_figure(SAMPLES, f"step {step}", off, 0.0, 0.0, step)


def tensor_differences(
    quantity: str,
    by_rank: Sequence[Rectangles],
    truth: dict[str, Tensor],
    tolerance: float = 0.0,
    floor: float = 0.0,
) -> Iterator[Difference]:
    """Difference of every tensor over all rectangles of all ranks.

    An element that no rank holds is infinitely far off, and so is a tensor that one process does
    not have.

    Args:
        by_rank: rectangles of each rank.
        truth: global tensors, in the order of the result.
        tolerance: up to which a rank is not listed as off.
        floor: the scale of a tensor is at least this share of the largest tensor's, because a
            tensor that should vanish has no scale.
    """
    by_name: dict[str, list[tuple[int, tuple[int, ...], Tensor]]] = {name: [] for name in truth}
    for rank, rectangles in enumerate(by_rank):
        for name, offset, values in rectangles:
            by_name.setdefault(name, []).append((rank, offset, values))
    maxima = {name: tensor.abs().max().item() for name, tensor in truth.items() if tensor.numel()}
    smallest = max([1e-30, *(floor * largest for largest in maxima.values())])
    for name, tensor in truth.items():
        scale = max(maxima[name], smallest)
        yield _tensor_difference(
            Difference(quantity, name), by_name[name], tensor, scale, tolerance
        )
    for name in sorted(by_name.keys() - truth.keys()):
        ranks = sorted({rank for rank, *_ in by_name[name]})
        offset = by_name[name][0][1]
        yield Difference(quantity, name, inf, ranks[0], tuple(ranks), offset, expected=nan)


def _tensor_difference(
    worst: Difference,
    rectangles: Sequence[tuple[int, tuple[int, ...], Tensor]],
    expected: Tensor,
    scale: float,
    tolerance: float,
) -> Difference:
    """Difference of one tensor.

    Args:
        worst: names the tensor; the result where nothing is compared.
        rectangles: (rank, offset, values).
    """
    missing = torch.ones(expected.shape, dtype=torch.bool)
    ranks, largest = set(), -1.0
    for rank, offset, values in rectangles:
        if not values.numel():
            continue
        index = index_of(offset, values)
        missing[index] = False
        off = ((values - expected[index]).abs() / scale).nan_to_num(nan=inf, posinf=inf)
        relative = off.max().item()
        if relative > tolerance:
            ranks.add(rank)
        if relative > largest:
            largest = relative
            element = tuple(map(int, np.unravel_index(int(off.argmax()), off.shape)))
            position = tuple(o + i for o, i in zip(offset, element))
            actual = values[element].item()
            worst = replace(worst, relative=relative, rank=rank, position=position, got=actual)
    if missing.any():
        position = tuple(missing.nonzero()[0].tolist())
        worst = replace(worst, relative=inf, rank=None, position=position, got=nan)
    return replace(worst, ranks=tuple(sorted(ranks)), expected=expected[worst.position].item())


Tensors = tuple[int, str, list[Rectangles], Rectangles]
"""Step, quantity, its rectangles on each rank, and those of one process."""


def all_tensors(records: Sequence[RankRecord], truth: RankRecord) -> Iterator[Tensors]:
    """All tensors in the order of training."""
    yield 0, "weight", [record.weights[0] for record in records], truth.weights[0]
    steps = len(truth.gradients)
    for step in range(steps):
        gradients = [record.gradients[step] for record in records]
        yield step + 1, "gradient", gradients, truth.gradients[step]
        weights = [record.weights[step + 1] for record in records]
        yield step + 1, "weight", weights, truth.weights[step + 1]
    for kind, rectangles in truth.moments.items():
        yield steps, kind, [record.moments.get(kind, []) for record in records], rectangles


def differences(
    records: Sequence[RankRecord], truth: RankRecord, tolerance: float
) -> list[Difference]:
    """Everything that is compared: in the order of training, each tensor in that of the model."""
    compared = list(figure_differences(records, truth, tolerance))
    for step, quantity, by_rank, rectangles in all_tensors(records, truth):
        if quantity == "gradient" and (masks := truth.vanishing.get(step)):
            limit = SLACK * rounding_of(rectangles)
            by_rank = [masked(of_rank, masks, limit) for of_rank in by_rank]
            rectangles = masked(rectangles, masks, limit)
        tensors = joined(rectangles)
        ordered = {name: tensors[name] for name in truth.specs if name in tensors}
        of_tensors = tensor_differences(quantity, by_rank, ordered, tolerance, FLOOR)
        compared += (replace(difference, step=step) for difference in of_tensors)
    return compared


def rounding_only(truth: RankRecord) -> list[str]:
    """Parameters with elements whose gradient in some step differs from zero by rounding only."""
    names = {
        name
        for step, gradients in enumerate(truth.gradients, 1)
        for name, gradient in joined(gradients).items()
        if name in truth.vanishing.get(step, {}) and gradient[truth.vanishing[step][name]].any()
    }
    return [name for name in truth.specs if name in names]


def untried(
    config: Config, truth: RankRecord, records: Sequence[RankRecord], tolerance: float
) -> list[str]:
    """What equal numbers say nothing about, because one process did not exercise it.

    Args:
        truth: of one process.
        records: of the ranks, which alone may run out of send capacity.
        tolerance: relative change of a weight up to which it counts as not moved.
    """
    moe = config.moe
    notes = _untried_routing(config, truth) + _untried_steps(config, truth, tolerance)
    norms = [figures["grad_norm"] for figures in truth.figures if not isnan(figures["grad_norm"])]
    norm, clip = max(norms, default=0.0), config.optim.clip
    if norm <= clip:
        notes.append(f"no gradient was clipped: norms up to {norm:.2g}, optim.clip = {clip:g}")
    dropped = [n for step in truth.layers for name, n in step.items() if name.endswith("dropped")]
    if moe.capacity_factor is not None and dropped and not any(dropped):
        factor = f"moe.capacity_factor = {moe.capacity_factor:g}"
        notes.append(f"no token was dropped: {factor} was enough for all")
    if moe.exchange == "planned" and config.parallel.ep > 1 and not records[0].repeats:
        imbalance = f"moe.planned_imbalance = {moe.planned_imbalance:g}"
        notes.append(f"no step was repeated: {imbalance} was enough for all")
    if noise := rounding_only(truth):
        names = ", ".join(noise)
        notes.append(f"updates whose gradient is only rounding were not compared: {names}")
    return notes


def _untried_routing(config: Config, truth: RankRecord) -> list[str]:
    """Notes on choices that runs repeat, and on layers whose tokens went to the same experts."""
    notes, model, suffix = [], config.model, "/dead_experts"
    if truth.choices:
        notes.append(
            "experts were not chosen on the layout: all runs repeat the choices and drops of fp64, "
            "which --precision fp64 compares"
        )
    layers = [step for step in truth.layers if step]
    names = [name for name in (layers[0] if layers else {}) if name.endswith(suffix)]
    num_idle = model.num_experts - model.top_k
    constant = [
        name.split("/")[1] for name in names if all(step.get(name) == num_idle for step in layers)
    ]
    if constant and num_idle > 0:
        same = f"the same {model.top_k} of {model.num_experts} experts"
        where = ", ".join(constant)
        notes.append(f"routing was not tried in {where}: every token of a batch goes to {same}")
    return notes


def _untried_steps(config: Config, truth: RankRecord, tolerance: float) -> list[str]:
    """Notes on steps that were not made, or without a loss or an update."""
    skipped = [reason for reason, samples in zip(truth.skipped, truth.samples) if not samples]
    notes = [reason for reason in skipped if reason]
    if config.data.skip_steps and not skipped:
        steps = ",".join(config.data.skip_steps)
        notes.append(f"data.skip_steps = [{steps}] skips none of the {len(truth.figures)} steps")
    empty = [
        str(step)
        for step, (figures, samples) in enumerate(zip(truth.figures, truth.samples), 1)
        if samples and not figures["num_targets"]
    ]
    if empty:
        notes.append(f"there was no loss to compare in step {', '.join(empty)}: no target token")
    if unmoved := _steps_without_update(truth, tolerance):
        limit = f"no weight moved by more than {tolerance:g}"
        notes.append(f"no update was made in step {', '.join(unmoved)}: {limit}")
    return notes


def _steps_without_update(truth: RankRecord, tolerance: float) -> list[str]:
    steps, before = [], joined(truth.weights[0])
    for step, (rectangles, samples) in enumerate(zip(truth.weights[1:], truth.samples), 1):
        if not samples:  # in data.skip_steps
            continue
        after = joined(rectangles)
        moved = (
            (after[name] - before[name]).abs().max() > tolerance * before[name].abs().max()
            for name in after
            if name in before
        )
        if not any(moved):
            steps.append(str(step))
        before = after
    return steps


def axes_of(name: str, records: Sequence[RankRecord], sizes: Sizes) -> tuple[list[str], list[str]]:
    """The axes that shard a parameter, and those over which its gradient is summed."""
    specs = [record.specs.get(name) for record in records]
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:  # no rank holds it
        return [], []
    pieces = [() if spec is None else spec.pieces for spec in specs]
    offsets = [{piece.offset for piece in of_rank} for of_rank in pieces]
    cut = [
        axis
        for axis in (("ep", "etp") if spec.expert else ("tp",))
        if any(
            offsets[rank] != offsets[other]
            for rank in range(len(records))
            for other in groups_of(sizes, rank)[axis]
        )
    ]
    partial = {axis for of_rank in pieces for piece in of_rank for axis in piece.summed}
    summed = ["edp" if spec.expert else "dp_cp", *sorted(partial)]
    return cut, summed + (["the replica's rank"] if spec.shared else [])

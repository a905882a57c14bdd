"""How far a layout in 16 bits is from the exact run, beside how far one process in 16 bits is.

Two runs in 16 bits differ by rounding, and nobody can say of a difference between them whether that
is all. Both have a distance from the run in fp64 that begins with the same weights, and rounding
alone makes those about equal: the relative L2 distance of each whole tensor, that of the ranks over
that of one process, is what is judged. Two such distances of a few elements differ by chance:
tensors of one kind are judged by what all layers have together, and small ones may be further off
than large ones (`_chance`).
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, inf, isfinite, isnan, sqrt

import torch
from torch import Tensor

from megatron5d.config.schema import Config, PrecisionConfig
from megatron5d.parity.differences import (
    HIDDEN,
    Difference,
    all_tensors,
    hidden_sums,
    index_of,
    joined,
    without_target,
)
from megatron5d.parity.run import RankRecord, Rectangles

SMOOTH_EPS = 1.0  # above the root of every second moment
# of a figure, which one process may meet by chance: a unit in the last place of bf16
FIGURE_FLOOR = 2.0**-8
CHANCE = 4.0  # standard deviations by which the logarithm of a ratio of two distances may be off


def smooth(config: Config) -> Config:
    """Makes the update nearly linear in the gradient: AdamW's first is its sign, which rounding
    flips."""
    return replace(config, optim=replace(config.optim, eps=max(config.optim.eps, SMOOTH_EPS)))


def in_16_bits(config: Config, precision: PrecisionConfig) -> Config:
    """Returns an exact configuration with the run's arithmetic in bf16, without FP8 GEMMs."""
    masters, grad_dtype = precision.master_weights, precision.grad_dtype
    return replace(
        config,
        precision=PrecisionConfig(dtype="bf16", master_weights=masters, grad_dtype=grad_dtype),
    )


def rounding_differences(
    records: Sequence[RankRecord], alone: RankRecord, truth: RankRecord, factor: float
) -> list[Difference]:
    """Returns everything that is judged, in the order of training, each tensor in the order of the
    model.

    Returns:
        Of each, `relative` = how many times as far from `truth` as `alone` is, inf where one of the
        two is not finite; `got` and `expected` the two distances. No tensor counts as nearer than
        the median one of its quantity is in one process.
    """
    found = list(_figures(records, alone, truth, factor))
    mine = all_tensors([alone], truth)
    for (step, quantity, held, exact), (_, _, (one,), _) in zip(
        all_tensors(records, truth), mine, strict=True
    ):
        found += _tensors(quantity, held, one, exact, truth, factor, step)
    if masters := {name for name, _, _ in alone.moments.get("master", [])}:
        held, exact = [record.moments.get("master", []) for record in records], truth.weights[-1]
        exact = [each for each in exact if each[0] in masters]
        found += _tensors(
            "master", held, alone.moments["master"], exact, truth, factor, len(truth.gradients)
        )
    return found


def _figures(
    records: Sequence[RankRecord], alone: RankRecord, truth: RankRecord, factor: float
) -> Iterator[Difference]:
    """Yields those of every step; what the routers did is not judged."""
    for step, exact in enumerate(truth.figures, 1):
        for name, value in exact.items():
            got = [record.figures[step - 1].get(name, inf) for record in records]
            near = alone.figures[step - 1][name]
            if isnan(value) and isnan(near) and not exact["num_targets"]:
                near = 0.0
                value, got = without_target(got)
            yield _figure(name, f"step {step}", got, near, value, factor, step)
    one = {(step, name): value for step, name, value, _, _ in hidden_sums([alone], truth)}
    for step, name, total, value, ranks in hidden_sums(records, truth):
        found = _figure(
            HIDDEN, f"{name}, step {step}", [total], one[step, name], value, factor, step
        )
        yield replace(found, rank=ranks[0])


def _figure(
    quantity: str, name: str, got: list[float], alone: float, value: float, factor: float, step: int
) -> Difference:
    here = max(abs(alone / value - 1) if value else 0.0, FIGURE_FLOOR)
    off = [abs(each - value) / (abs(value) or 1.0) for each in got]
    times = [_times(each, here) for each in off]
    rank = times.index(max(times))
    ranks = tuple(r for r, each in enumerate(times) if each > factor)
    return Difference(quantity, name, times[rank], rank, ranks, (), off[rank], here, step)


def _tensors(
    quantity: str,
    held: Sequence[Rectangles],
    alone: Rectangles,
    exact: Rectangles,
    truth: RankRecord,
    factor: float,
    step: int,
) -> Iterator[Difference]:
    """Yields the differences in every tensor; of several copies, the furthest off counts, by
    element."""
    whole = joined(exact)
    names = [name for name in truth.specs if name in whole and whole[name].any()]
    here = {
        name: _distance(error, whole[name]) for name, (error, _) in _errors([alone], whole).items()
    }
    least = max(statistics.median(here[name] for name in names), 1e-30) if names else 0.0
    errors = _errors(held, whole)
    pools: dict[str, list[str]] = {}
    for name in names:
        pools.setdefault(_kind(name), []).append(name)
    for name in names:
        (error, owner), pool = errors[name], pools[_kind(name)]
        alike = max(sqrt(statistics.fmean(here[each] ** 2 for each in pool)), least)
        off, floor = _distance(error, whole[name]), max(here[name], alike)
        pooled = sqrt(
            statistics.fmean(_distance(errors[each][0], whole[each]) ** 2 for each in pool)
        )
        chance = _chance(
            torch.cat([(errors[each][0] / whole[each].norm()).flatten() for each in pool])
        )
        position = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        rank, times = int(owner[position]), min(_times(off, floor), _times(pooled, alike) / chance)
        if not isfinite(off):
            times = inf
        difference = Difference(quantity, name, times, rank, (), position, off, floor, step)
        if rank < 0:
            difference = replace(difference, relative=inf, rank=None)
        elif difference.relative > factor:
            difference = replace(difference, ranks=tuple(sorted(set(owner[error > 0].tolist()))))
        yield difference


def _kind(name: str) -> str:
    """Returns a parameter's name without its layer's number."""
    return re.sub(r"\.\d+\.", ".", name)


def _chance(errors: Tensor) -> float:
    """Returns how many times as large a distance that consists of such errors may be by chance.

    The logarithm of the ratio of two is about normal, with a variance of 1/n (Fisher's z), where n
    is the number of errors that count: one that is much larger than the others counts alone.
    """
    total, largest = errors.square().sum().item(), errors.abs().max().item()
    if not 0 < largest < inf:
        return 1.0
    number = total**2 / (errors / largest).pow(4).sum().item() / largest**4
    return exp(CHANCE / sqrt(number))


def _times(off: float, here: float) -> float:
    # of what overflows nobody can say that it is equal
    return off / here if isfinite(off) and isfinite(here) else inf


def _distance(error: Tensor, whole: Tensor) -> float:
    return (error.norm() / whole.norm()).item()


def _errors(
    held: Sequence[Rectangles], whole: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns name -> (largest |difference| of any copy, its rank); infinite and -1 where nobody
    holds an element."""
    found = {
        name: (torch.full(each.shape, -1.0, dtype=torch.float64), torch.full(each.shape, -1))
        for name, each in whole.items()
    }
    for rank, rectangles in enumerate(held):
        for name, offset, values in rectangles:
            if name not in whole:
                continue
            at = index_of(offset, values)
            off = (values.double() - whole[name][at]).abs().nan_to_num(nan=inf, posinf=inf)
            error, owner = (each[at] for each in found[name])
            owner[off > error] = rank
            torch.maximum(error, off, out=error)
    for error, _ in found.values():
        error[error < 0] = inf
    return found

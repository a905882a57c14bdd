"""Judges a layout in bf16: its distance from an exact run, relative to that of one process in bf16.

Two runs in bf16 differ by rounding, and their difference alone does not show whether rounding is
its only cause. Each also has a distance from the fp64 run that begins with the same weights, and
where only rounding is at work both distances are about equal. The figure that is judged is the
relative L2 distance of each global tensor, that of the ranks divided by that of one process. Two
such distances of a few elements differ by chance: tensors of one kind are judged by those of all
layers together, and small ones may be further off than large ones (`_chance_factor`).
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
    without_target,
)
from megatron5d.parity.rectangles import Rectangles, index_of, joined
from megatron5d.parity.run import RankRecord

SMOOTH_EPS = 1.0  # above the root of every second moment
SMOOTH_NS_STEPS = 1
# Smallest distance of a figure: one process may be exact by chance. A unit in bf16's last place.
FIGURE_FLOOR = 2.0**-8
CHANCE = 4.0  # standard deviations by which the logarithm of a ratio of two distances may be off


def smooth(config: Config) -> Config:
    """Makes the update nearly linear in the gradient.

    AdamW's first update is the sign of the gradient, which rounding flips. So does every step of
    Muon's iteration enlarge small singular values, until those of rounding are as large as others.
    """
    optim = replace(config.optim, eps=max(config.optim.eps, SMOOTH_EPS))
    if optim.name == "muon":
        optim = replace(optim, ns_steps=SMOOTH_NS_STEPS)
    return replace(config, optim=optim)


def in_16_bits(config: Config, precision: PrecisionConfig) -> Config:
    """An exact configuration with the run's arithmetic in bf16, without FP8 GEMMs."""
    masters, grad_dtype = precision.master_weights, precision.grad_dtype
    rounded = PrecisionConfig(dtype="bf16", master_weights=masters, grad_dtype=grad_dtype)
    return replace(config, precision=rounded)


def rounding_differences(
    records: Sequence[RankRecord], single: RankRecord, truth: RankRecord, factor: float
) -> list[Difference]:
    """Everything that is judged: in the order of training, each tensor in that of the model.

    Args:
        records: of the ranks, in bf16.
        single: of one process in bf16.
        truth: of one process in fp64.
        factor: ratio of distances up to which a rank is not listed as off.

    Returns:
        Differences whose `relative` is the distance of the ranks from `truth` divided by that of
        `single`, inf where either is not finite; `got` and `expected` are the two distances. The
        divisor is at least the median distance of the tensors of its quantity.
    """
    judged = list(_figures(records, single, truth, factor))
    of_single = all_tensors([single], truth)
    for (step, quantity, by_rank, exact), (_, _, (rounded,), _) in zip(
        all_tensors(records, truth), of_single, strict=True
    ):
        judged += _Distances(by_rank, rounded, exact, truth, factor).judge(quantity, step)
    if masters := {name for name, _, _ in single.moments.get("master", [])}:
        by_rank = [record.moments.get("master", []) for record in records]
        exact = [rectangle for rectangle in truth.weights[-1] if rectangle[0] in masters]
        distances = _Distances(by_rank, single.moments["master"], exact, truth, factor)
        judged += distances.judge("master", len(truth.gradients))
    return judged


def _figures(
    records: Sequence[RankRecord], single: RankRecord, truth: RankRecord, factor: float
) -> Iterator[Difference]:
    """Differences of the losses, norms and hidden states of every step; routers are not judged."""
    for step, figures in enumerate(truth.figures, 1):
        for name, value in figures.items():
            values = [record.figures[step - 1].get(name, inf) for record in records]
            rounded = single.figures[step - 1][name]
            if isnan(value) and isnan(rounded) and not figures["num_targets"]:
                rounded = 0.0
                value, values = without_target(values)
            yield _figure(name, f"step {step}", values, rounded, value, factor, step)
    sums = {(step, name): total for step, name, total, _, _ in hidden_sums([single], truth)}
    for step, name, total, value, ranks in hidden_sums(records, truth):
        rounded, label = sums[step, name], f"{name}, step {step}"
        difference = _figure(HIDDEN, label, [total], rounded, value, factor, step)
        yield replace(difference, rank=ranks[0])


def _figure(
    quantity: str,
    name: str,
    values: list[float],
    rounded: float,
    value: float,
    factor: float,
    step: int,
) -> Difference:
    divisor = max(abs(rounded / value - 1) if value else 0.0, FIGURE_FLOOR)
    off = [abs(figure - value) / (abs(value) or 1.0) for figure in values]
    ratios = [_ratio(distance, divisor) for distance in off]
    rank = ratios.index(max(ratios))
    ranks = tuple(r for r, ratio in enumerate(ratios) if ratio > factor)
    return Difference(quantity, name, ratios[rank], rank, ranks, (), off[rank], divisor, step)


class _Distances:
    """Distances of one quantity's tensors from the exact run.

    Of several copies of an element, the one that is furthest off counts.

    Args:
        by_rank: rectangles of each rank.
        rounded: those of one process in bf16.
        exact: those of one process in fp64.
    """

    def __init__(
        self,
        by_rank: Sequence[Rectangles],
        rounded: Rectangles,
        exact: Rectangles,
        truth: RankRecord,
        factor: float,
    ) -> None:
        self.factor, self.exact = factor, joined(exact)
        self.names = [name for name in truth.specs if name in self.exact and self.exact[name].any()]
        self.errors = _errors(by_rank, self.exact)
        self.of_single = {
            name: self._relative(error, name)
            for name, (error, _) in _errors([rounded], self.exact).items()
        }
        medians = [self.of_single[name] for name in self.names]
        self.smallest = max(statistics.median(medians), 1e-30) if medians else 0.0

    def judge(self, quantity: str, step: int) -> Iterator[Difference]:
        """Differences of the tensors, in the order of the model."""
        pools: dict[str, list[str]] = {}
        for name in self.names:
            pools.setdefault(_kind(name), []).append(name)
        for name in self.names:
            yield self._difference(quantity, name, pools[_kind(name)], step)

    def _difference(self, quantity: str, name: str, pool: list[str], step: int) -> Difference:
        """Difference of one tensor, judged with those of its kind in all layers."""
        error, owner = self.errors[name]
        mean_square = statistics.fmean(self.of_single[other] ** 2 for other in pool)
        pool_single = max(sqrt(mean_square), self.smallest)
        distance, divisor = self._relative(error, name), max(self.of_single[name], pool_single)
        relative = [self._relative(self.errors[other][0], other) for other in pool]
        pool_distance = sqrt(statistics.fmean(value**2 for value in relative))
        normalized = [self.errors[other][0] / self.exact[other].norm() for other in pool]
        chance = _chance_factor(torch.cat([values.flatten() for values in normalized]))

        ratio = min(_ratio(distance, divisor), _ratio(pool_distance, pool_single) / chance)
        if not isfinite(distance):
            ratio = inf
        position = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        rank: int | None = int(owner[position])
        ranks: tuple[int, ...] = ()
        if rank == -1:
            rank, ratio = None, inf
        elif ratio > self.factor:
            ranks = tuple(sorted(set(owner[error > 0].tolist())))
        return Difference(quantity, name, ratio, rank, ranks, position, distance, divisor, step)

    def _relative(self, error: Tensor, name: str) -> float:
        return (error.norm() / self.exact[name].norm()).item()


def _kind(name: str) -> str:
    """A parameter's name without the number of its layer."""
    return re.sub(r"\.\d+\.", ".", name)


def _chance_factor(errors: Tensor) -> float:
    """Factor by which a distance that consists of these errors may be larger by chance.

    The logarithm of the ratio of two distances is about normal with a variance of 1/n (Fisher's z).
    n is the effective number of errors: one that is much larger than the others counts alone.
    """
    total, largest = errors.square().sum().item(), errors.abs().max().item()
    if not 0 < largest < inf:
        return 1.0
    number = total**2 / (errors / largest).pow(4).sum().item() / largest**4
    return exp(CHANCE / sqrt(number))


def _ratio(distance: float, divisor: float) -> float:
    # Values that overflow cannot be called equal.
    return distance / divisor if isfinite(distance) and isfinite(divisor) else inf


def _errors(
    by_rank: Sequence[Rectangles], exact: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (largest |difference| of any copy, its rank); inf and -1 where no rank has a copy."""
    errors = {
        name: (torch.full(tensor.shape, -1.0, dtype=torch.float64), torch.full(tensor.shape, -1))
        for name, tensor in exact.items()
    }
    for rank, rectangles in enumerate(by_rank):
        for name, offset, values in rectangles:
            if name not in exact:
                continue
            index = index_of(offset, values)
            off = (values.double() - exact[name][index]).abs().nan_to_num(nan=inf, posinf=inf)
            error, owner = (tensor[index] for tensor in errors[name])
            owner[off > error] = rank
            torch.maximum(error, off, out=error)
    for error, _ in errors.values():
        error[error < 0] = inf
    return errors

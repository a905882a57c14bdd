"""How far a layout in 16 bits is from the exact run, beside how far one process in 16 bits is.

Two runs in 16 bits differ by rounding, and nobody can say of a difference between them whether that is all. Both have
a distance from the run in fp64 that begins with the same weights, and rounding alone makes those about equal: the
relative L2 distance of each whole tensor, that of the ranks over that of one process, is what is judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite

import torch
from torch import Tensor

from megatron5d.config.schema import Config, PrecisionConfig
from megatron5d.parity.differences import Difference, index_of, joined
from megatron5d.parity.run import RankRecord, Rectangles

SMOOTH_EPS = 1.0  # above the root of every second moment
FIGURE_FLOOR = 2.0**-9  # of a figure, which one process may meet by chance: half a unit in the last place of bf16


def smooth(config: Config) -> Config:
    """With an update that is nearly linear in the gradient: AdamW's first is its sign, which rounding turns over."""
    return replace(config, optim=replace(config.optim, eps=max(config.optim.eps, SMOOTH_EPS)))


def in_16_bits(config: Config, precision: PrecisionConfig) -> Config:
    """An exact configuration with the arithmetic of the run in bf16: its masters and gradients, no 8-bit products."""
    masters, grad_dtype = precision.master_weights, precision.grad_dtype
    return replace(config, precision=PrecisionConfig(dtype="bf16", master_weights=masters, grad_dtype=grad_dtype))


def rounding_differences(
    records: Sequence[RankRecord], alone: RankRecord, truth: RankRecord, factor: float
) -> list[Difference]:
    """Everything that is judged, in the order of training, each tensor in the order of the model.

    Args:
        records: of a layout's ranks, in 16 bits.
        alone: of one process in 16 bits.
        truth: of one process in fp64.
        factor: that passes.

    Returns:
        Of each, `relative` = how many times as far from `truth` as `alone` is, inf where one of the two is not finite;
        `got` and `expected` the two distances.
        No tensor counts as nearer than the median one of its quantity is in one process.
    """
    found = list(_figures(records, alone, truth, factor))
    gradients = [record.gradients for record in records]
    found += _tensors("gradient", gradients, alone.gradients, truth.gradients, truth, factor)
    weights = [record.weights for record in records]
    found += _tensors("weight", weights, alone.weights, truth.weights, truth, factor)
    masters = {name for name, _, _ in alone.moments.get("master", [])}
    exact = {"master": [each for each in truth.weights if each[0] in masters], **truth.moments}
    for kind, rectangles in exact.items():
        held = [record.moments.get(kind, []) for record in records]
        found += _tensors(kind, held, alone.moments.get(kind, []), rectangles, truth, factor)
    return found


def _figures(
    records: Sequence[RankRecord], alone: RankRecord, truth: RankRecord, factor: float
) -> Iterator[Difference]:
    for step, exact in enumerate(truth.figures):
        for name, value in exact.items():
            here = max(abs(alone.figures[step][name] / value - 1) if value else 0.0, FIGURE_FLOOR)
            off = [abs(record.figures[step].get(name, inf) - value) / (abs(value) or 1.0) for record in records]
            times = [_times(each, here) for each in off]
            rank = times.index(max(times))
            ranks = tuple(r for r, each in enumerate(times) if each > factor)
            yield Difference(name, f"step {step + 1}", times[rank], rank, ranks, (), off[rank], here)


def _tensors(
    quantity: str, held: Sequence[Rectangles], alone: Rectangles, exact: Rectangles, truth: RankRecord, factor: float
) -> Iterator[Difference]:
    """The differences in every tensor; of several copies, the one that is furthest off counts, element by element."""
    whole = joined(exact)
    names = [name for name in truth.specs if name in whole and whole[name].any()]
    here = {name: _distance(error, whole[name]) for name, (error, _) in _errors([alone], whole).items()}
    least = statistics.median(here[name] for name in names) if names else 0.0
    errors = _errors(held, whole)
    for name in names:
        error, owner = errors[name]
        floor, off = max(here[name], least, 1e-30), _distance(error, whole[name])
        position = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        rank = int(owner[position])
        difference = Difference(quantity, name, _times(off, floor), rank, (), position, off, floor)
        if rank < 0:
            difference = replace(difference, relative=inf, rank=None)
        elif difference.relative > factor:
            difference = replace(difference, ranks=tuple(sorted(set(owner[error > 0].tolist()))))
        yield difference


def _times(off: float, here: float) -> float:
    return off / here if isfinite(off) and isfinite(here) else inf  # of what overflows nobody can say that it is equal


def _distance(error: Tensor, whole: Tensor) -> float:
    return (error.norm() / whole.norm()).item()


def _errors(held: Sequence[Rectangles], whole: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (largest |difference| of any copy, its rank); infinite and -1 where nobody holds an element."""
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

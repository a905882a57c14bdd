"""How far the numbers of some ranks are from those of one process, one by one.

How far a layout in 16 bits is from the exact run, beside how far one process in 16 bits is.

Two runs in 16 bits differ by rounding, and nobody can say of a difference between them whether that is all. Both have
a distance from the run in fp64 that begins with the same weights, and rounding alone makes those about equal: the
relative L2 distance of each whole tensor, that of the ranks over that of one process, is what is judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan

import torch
from torch import Tensor

from megatron5d.config.schema import Config, PrecisionConfig
from megatron5d.parity.run import RankRecord, Rectangles
from megatron5d.topology.grid import Sizes
from megatron5d.topology.mesh import lines_of


@dataclass(frozen=True)
class Difference:
    """How far some ranks are from one process, in one tensor or one figure.

    Args:
        quantity: loss, grad_norm, ...; routers: what they did; gradient, weight, or a kind of the optimiser's tensors.
        name: the parameter's global name, or the step of a figure.
        relative: the largest |difference|, of the largest value in the whole tensor; inf where nobody holds an element.
        rank: that is furthest off; None where nobody holds the element.
        ranks: all that are further off than is tolerated.
        position: of that element in the whole tensor; () of a figure.
        got: the value there.
        expected: what one process has.
    """

    quantity: str
    name: str
    relative: float = 0.0
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    position: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0


def joined(rectangles: Rectangles) -> dict[str, Tensor]:
    """The whole tensors that one process has in rectangles."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, offset, values in rectangles:
        end = tuple(o + n for o, n in zip(offset, values.shape))
        sizes[name] = tuple(map(max, end, sizes.get(name, end)))
    tensors = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    for name, offset, values in rectangles:
        tensors[name][index_of(offset, values)] = values.double()
    return tensors


def index_of(offset: Sequence[int], values: Tensor) -> tuple[slice, ...]:
    """Where a rectangle lies in its whole tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offset, values.shape))


def figure_differences(records: Sequence[RankRecord], truth: RankRecord, tolerance: float) -> Iterator[Difference]:
    """The differences in every figure of every step, over all ranks; losses first, then what the routers did."""
    for kind in ("figures", "layers"):
        for step, expected in enumerate(getattr(truth, kind)):
            for name, value in expected.items():
                got = [getattr(record, kind)[step].get(name, inf) for record in records]
                off = [abs(each - value) / (abs(value) or 1.0) for each in got]
                off = [inf if isnan(each) else each for each in off]
                rank = off.index(max(off))
                ranks = tuple(r for r, each in enumerate(off) if each > tolerance)
                quantity, where = (
                    (name, f"step {step + 1}") if kind == "figures" else ("routers", f"{name}, step {step + 1}")
                )
                yield Difference(quantity, where, off[rank], rank, ranks, (), got[rank], value)


def tensor_differences(
    quantity: str, held: Sequence[Rectangles], truth: dict[str, Tensor], tolerance: float = 0.0, floor: float = 0.0
) -> Iterator[Difference]:
    """Of every tensor, over all rectangles of all ranks; an element that nobody holds is infinitely far off.

    Args:
        quantity: what the tensors are.
        held: what each rank has.
        truth: the whole tensors, in the order in which they are told.
        tolerance: up to which a rank is not counted among those that are off.
        floor: a tensor that should vanish is compared on this share of the largest one's scale.
    """
    by_name: dict[str, list[tuple[int, tuple[int, ...], Tensor]]] = {name: [] for name in truth}
    for rank, rectangles in enumerate(held):
        for name, offset, values in rectangles:
            by_name[name].append((rank, offset, values))
    least = max([1e-30, *(floor * whole.abs().max().item() for whole in truth.values() if whole.numel())])
    for name, whole in truth.items():
        scale, worst, ranks = max(whole.abs().max().item(), least), Difference(quantity, name), set[int]()
        missing = torch.ones(whole.shape, dtype=torch.bool)
        for rank, offset, values in by_name[name]:
            if values.numel() == 0:
                continue
            missing[index_of(offset, values)] = False
            off = (values - whole[index_of(offset, values)]).abs() / scale
            off = off.nan_to_num(nan=inf, posinf=inf)
            relative = off.max().item()
            if relative > tolerance:
                ranks.add(rank)
            if relative > worst.relative or worst.rank is None:
                at = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]
                position = tuple(o + i for o, i in zip(offset, at))
                worst = replace(worst, relative=relative, rank=rank, position=position, got=values[tuple(at)].item())
        if missing.any():
            worst = Difference(quantity, name, inf, None, (), tuple(missing.nonzero()[0].tolist()), float("nan"))
        yield replace(worst, ranks=tuple(sorted(ranks)), expected=whole[worst.position].item())


def differences(records: Sequence[RankRecord], truth: RankRecord, tolerance: float) -> list[Difference]:
    """Everything that is compared, in the order of training, each tensor in the order of the model.

    Args:
        records: of a layout's ranks.
        truth: of one process.
        tolerance: largest relative difference that passes.
    """
    found = list(figure_differences(records, truth, tolerance))
    pairs = [("gradient", [record.gradients for record in records], truth.gradients)]
    pairs.append(("weight", [record.weights for record in records], truth.weights))
    for kind, rectangles in truth.moments.items():
        pairs.append((kind, [record.moments.get(kind, []) for record in records], rectangles))
    for quantity, held, rectangles in pairs:
        whole = joined(rectangles)
        ordered = {name: whole[name] for name in truth.specs if name in whole}
        found += tensor_differences(quantity, held, ordered, tolerance, floor=1e-6)
    return found


def axes_of(name: str, records: Sequence[RankRecord], sizes: Sizes) -> tuple[list[str], list[str]]:
    """The axes that cut a parameter, and those over which its gradient is summed."""
    specs = [record.specs[name] for record in records if name in record.specs]
    if not specs:  # nobody holds it
        return [], []
    places = [record.specs[name].pieces if name in record.specs else () for record in records]
    cut = [
        axis
        for axis in (("ep", "etp") if specs[0].expert else ("tp",))
        if any(
            {piece.offset for piece in places[rank]} != {piece.offset for piece in places[other]}
            for rank in range(len(records))
            for other in lines_of(sizes, rank)[axis]
        )
    ]
    partial = {axis for pieces in places for piece in pieces for axis in piece.summed}
    summed = ["edp" if specs[0].expert else "dp_cp", *sorted(partial)]
    summed += ["the mirrored rank"] if specs[0].shared else []
    return cut, summed


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

"""How far the numbers of some ranks are from those of one process, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan

import torch
from torch import Tensor

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

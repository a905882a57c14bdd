"""How far the numbers of some ranks are from those of one process, one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from megatron5d.config.schema import Config
from megatron5d.parity.run import RankRecord, Rectangles
from megatron5d.topology.grid import DENSE_GROUPS, Sizes, dense_grid
from megatron5d.topology.mesh import groups_of

SAMPLES, HIDDEN = "samples", "hidden state"
ROUNDING = 1e-13  # of the largest gradient: what sums of this length leave of zero


@dataclass(frozen=True)
class Difference:
    """How far some ranks are from one process, in one tensor or one figure."""

    # loss, grad_norm, ...; routers: what they did; gradient, weight, or a kind of the optimiser's
    # tensors
    quantity: str
    name: str  # the parameter's global name, or the step of a figure
    # the largest |difference|, of the largest value in the whole tensor; inf where nobody holds an
    # element
    relative: float = 0.0
    rank: int | None = None  # that is furthest off; None where nobody holds the element
    ranks: tuple[int, ...] = ()  # all that are further off than is tolerated
    position: tuple[int, ...] = ()  # of that element in the whole tensor; () of a figure
    got: float = 0.0
    expected: float = 0.0
    step: int = 0  # counted from 1; 0 = before the first


def joined(rectangles: Rectangles) -> dict[str, Tensor]:
    """Returns the whole tensors that one process has in rectangles."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, offset, values in rectangles:
        end = tuple(o + n for o, n in zip(offset, values.shape))
        sizes[name] = tuple(map(max, end, sizes.get(name, end)))
    tensors = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    for name, offset, values in rectangles:
        tensors[name][index_of(offset, values)] = values.double()
    return tensors


def index_of(offset: Sequence[int], values: Tensor) -> tuple[slice, ...]:
    """Returns where a rectangle lies in its whole tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offset, values.shape))


def figure_differences(
    records: Sequence[RankRecord], truth: RankRecord, tolerance: float
) -> Iterator[Difference]:
    """Yields the differences in every figure of every step, over all ranks; losses first, then what
    the routers did."""
    for kind in ("figures", "layers"):
        for step, figures in enumerate(getattr(truth, kind), 1):
            for name, value in figures.items():
                got = [getattr(record, kind)[step - 1].get(name, inf) for record in records]
                if isnan(value) and not figures.get("num_targets", 1):
                    value, got = without_target(got)
                quantity, where = (
                    (name, f"step {step}")
                    if kind == "figures"
                    else ("routers", f"{name}, step {step}")
                )
                yield one_figure(quantity, where, got, value, tolerance, step)
    for step, name, total, value, ranks in hidden_sums(records, truth):
        yield replace(
            one_figure(HIDDEN, f"{name}, step {step}", [total], value, tolerance, step),
            rank=ranks[0],
        )


def without_target(got: list[float]) -> tuple[float, list[float]]:
    """Returns what to compare of a loss that no target has: ranks on which it is NaN too are
    equal."""
    return 0.0, [0.0 if isnan(each) else inf for each in got]


def one_figure(
    quantity: str, name: str, got: list[float], value: float, tolerance: float, step: int
) -> Difference:
    """Compares one figure, from what each rank has."""
    off = [abs(each - value) / (abs(value) or 1.0) for each in got]
    off = [inf if isnan(each) else each for each in off]
    rank = off.index(max(off))
    ranks = tuple(r for r, each in enumerate(off) if each > tolerance)
    return Difference(quantity, name, off[rank], rank, ranks, (), got[rank], value, step)


def hidden_sums(
    records: Sequence[RankRecord], truth: RankRecord
) -> Iterator[tuple[int, str, float, float, tuple[int, ...]]]:
    """Compares the outputs of phases: step, phase, sum over ranks, that of one process, ranks that
    hold it."""
    for step, expected in enumerate(truth.hidden, 1):
        for name, value in expected.items():
            held = {
                r: each.hidden[step - 1][name]
                for r, each in enumerate(records)
                if name in each.hidden[step - 1]
            }
            yield step, name, sum(held.values()) if held else inf, value, tuple(held) or (0,)


def sample_differences(
    records: Sequence[RankRecord], truth: RankRecord, sizes: Sizes
) -> Iterator[Difference]:
    """Yields how many sequences of each step are not the share of the rank that reads them: r, r +
    dp, ..."""
    for step, batches in enumerate(truth.samples, 1):
        off = []
        for rank, record in enumerate(records):
            mine = batches[
                dense_grid(sizes).group(rank, *DENSE_GROUPS["dp"]).index(rank) :: sizes.dp
            ]
            got = record.samples[step - 1]
            off.append(
                float(sum(a != b for a, b in zip(sum(got, []), sum(mine, []))))
                + abs(len(got) - len(mine))
            )
        yield one_figure(SAMPLES, f"step {step}", off, 0.0, 0.0, step)


def tensor_differences(
    quantity: str,
    held: Sequence[Rectangles],
    truth: dict[str, Tensor],
    tolerance: float = 0.0,
    floor: float = 0.0,
) -> Iterator[Difference]:
    """Yields the difference of every tensor over all rectangles.

    An element that nobody holds is infinitely far off, and so is a tensor that one process does not
    have.

    Args:
        truth: the whole tensors, in the order in which they are told.
        tolerance: up to which a rank is not counted among those that are off.
        floor: a tensor that should vanish is compared on this share of the largest one's scale.
    """
    by_name: dict[str, list[tuple[int, tuple[int, ...], Tensor]]] = {name: [] for name in truth}
    for rank, rectangles in enumerate(held):
        for name, offset, values in rectangles:
            by_name.setdefault(name, []).append((rank, offset, values))
    least = max(
        [1e-30, *(floor * whole.abs().max().item() for whole in truth.values() if whole.numel())]
    )
    for name, whole in truth.items():
        scale, worst, found = max(whole.abs().max().item(), least), Difference(quantity, name), []
        missing = torch.ones(whole.shape, dtype=torch.bool)
        for rank, offset, values in by_name[name]:
            if values.numel():
                missing[index_of(offset, values)] = False
                off = ((values - whole[index_of(offset, values)]).abs() / scale).nan_to_num(
                    nan=inf, posinf=inf
                )
                found.append((off.max().item(), rank, offset, values, off))
        if found:
            relative, rank, offset, values, off = max(found, key=itemgetter(0))
            at = tuple(map(int, np.unravel_index(int(off.argmax()), off.shape)))
            position = tuple(o + i for o, i in zip(offset, at))
            worst = Difference(quantity, name, relative, rank, (), position, values[at].item())
        if missing.any():
            worst = Difference(
                quantity, name, inf, None, (), tuple(missing.nonzero()[0].tolist()), float("nan")
            )
        ranks = sorted({rank for relative, rank, *_ in found if relative > tolerance})
        yield replace(worst, ranks=tuple(ranks), expected=whole[worst.position].item())
    for name in sorted(by_name.keys() - truth.keys()):
        ranks = sorted({rank for rank, *_ in by_name[name]})
        yield Difference(
            quantity, name, inf, ranks[0], tuple(ranks), by_name[name][0][1], expected=float("nan")
        )


Tensors = tuple[int, str, list[Rectangles], Rectangles]
"""Step, quantity, what each rank holds of it, and what one process does."""


def all_tensors(records: Sequence[RankRecord], truth: RankRecord) -> Iterator[Tensors]:
    """Lists all tensors in the order of training."""
    yield 0, "weight", [record.weights[0] for record in records], truth.weights[0]
    for step in range(len(truth.gradients)):
        yield (
            step + 1,
            "gradient",
            [record.gradients[step] for record in records],
            truth.gradients[step],
        )
        yield (
            step + 1,
            "weight",
            [record.weights[step + 1] for record in records],
            truth.weights[step + 1],
        )
    for kind, rectangles in truth.moments.items():
        yield (
            len(truth.gradients),
            kind,
            [record.moments.get(kind, []) for record in records],
            rectangles,
        )


def differences(
    records: Sequence[RankRecord], truth: RankRecord, tolerance: float
) -> list[Difference]:
    """Returns everything that is compared, in the order of training, each tensor in the order of
    the model."""
    found, noise = list(figure_differences(records, truth, tolerance)), rounding_alone(truth)
    for step, quantity, held, rectangles in all_tensors(records, truth):
        whole = joined(rectangles)
        ordered = {name: whole[name] for name in truth.specs if name in whole}
        if step and quantity in ("weight", "momentum"):
            held = [[(n, at, _without(v, at, noise.get(n))) for n, at, v in each] for each in held]
            ordered = {
                name: _without(each, (0,) * each.ndim, noise.get(name))
                for name, each in ordered.items()
            }
        each = tensor_differences(quantity, held, ordered, tolerance, floor=1e-6)
        found += (replace(difference, step=step) for difference in each)
    return found


def rounding_alone(truth: RankRecord) -> dict[str, Tensor]:
    """Returns which matrices that Muon updates had in some step a gradient that only rounding keeps
    from zero.

    Its update is as large as any other, and says nothing.

    Returns name -> bool in the shape of the whole tensor, where there are any.
    """
    found: dict[str, Tensor] = {}
    for rectangles in truth.gradients:
        whole = joined(rectangles)
        least = ROUNDING * max(
            (each.abs().max().item() for each in whole.values() if each.numel()), default=0.0
        )
        updated = {name for name, _, _ in truth.moments.get("momentum", [])}
        for name in (name for name in truth.specs if name in updated):
            heights = truth.specs[name].stack or (whole[name].shape[-2],)
            parts = whole[name].abs().split(list(heights), dim=-2)
            largest = [part.amax((-2, -1), keepdim=True).expand_as(part) for part in parts]
            zero = torch.cat([(each > 0) & (each <= least) for each in largest], -2)
            if zero.any():
                found[name] = zero | found.get(name, zero)
    return found


def _without(values: Tensor, offset: Sequence[int], left_out: Tensor | None) -> Tensor:
    return (
        values if left_out is None else values.masked_fill(left_out[index_of(offset, values)], 0.0)
    )


def untried(
    config: Config, truth: RankRecord, records: Sequence[RankRecord], tolerance: float
) -> list[str]:
    """Returns what equal numbers say nothing about, because one process has done nothing there.

    Args:
        truth: of one process.
        records: of the ranks, which alone may have had no room for what they send.
        tolerance: relative change of a weight below which it counts as not moved.
    """
    found, model = list[str](), config.model
    idle = [
        name.split("/")[1]
        for name in (truth.layers[0] if truth.layers else {})
        if name.endswith("dead_experts")
    ]
    idle = [
        name
        for name in idle
        if all(
            step.get(f"moe/{name}/dead_experts") == model.num_experts - model.top_k
            for step in truth.layers
        )
    ]
    if idle and model.top_k < model.num_experts:
        same = (
            f"every token of a batch goes to the same {model.top_k} of {model.num_experts} experts"
        )
        found.append(f"routing was not tried in {', '.join(idle)}: {same}")
    nothing = [str(step) for step, each in enumerate(truth.figures, 1) if not each["num_targets"]]
    if nothing:
        found.append(
            f"there was no loss to compare in step {', '.join(nothing)}: it has no target token"
        )
    still = []
    for step, (before, after) in enumerate(
        zip(map(joined, truth.weights), map(joined, truth.weights[1:])), 1
    ):
        moved = (
            (after[n] - before[n]).abs().max() > tolerance * before[n].abs().max()
            for n in after
            if n in before
        )
        still += [] if any(moved) else [str(step)]
    if still:
        found.append(
            f"no update was made in step {', '.join(still)}: no weight moved by more than {tolerance:g}"
        )
    norm = max(each["grad_norm"] for each in truth.figures)
    if norm <= config.optim.clip:
        found.append(
            f"no gradient was clipped: their norm is at most {norm:.2g}, optim.clip = {config.optim.clip:g}"
        )
    dropped = [
        value for step in truth.layers for name, value in step.items() if name.endswith("dropped")
    ]
    moe = config.moe
    if moe.capacity_factor is not None and dropped and not any(dropped):
        found.append(
            f"no token was dropped: moe.capacity_factor = {moe.capacity_factor:g} left room for all"
        )
    if moe.exchange == "planned" and config.parallel.ep > 1 and not records[0].repeats:
        found.append(
            f"no step was repeated: moe.planned_imbalance = {moe.planned_imbalance:g} left room for all"
        )
    if noise := rounding_alone(truth):
        found.append(
            f"an update was not compared, of a gradient that is rounding alone: {', '.join(noise)}"
        )
    return found


def axes_of(name: str, records: Sequence[RankRecord], sizes: Sizes) -> tuple[list[str], list[str]]:
    """Returns the axes that cut a parameter, and those over which its gradient is summed."""
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
            for other in groups_of(sizes, rank)[axis]
        )
    ]
    partial = {axis for pieces in places for piece in pieces for axis in piece.summed}
    summed = ["edp" if specs[0].expert else "dp_cp", *sorted(partial)]
    summed += ["the replica's rank"] if specs[0].shared else []
    return cut, summed

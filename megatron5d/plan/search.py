"""Proposes layouts for a model and a world, and finds the fastest of those that fit.

Layouts are proposed by size only. The caller's functions say which ones are legal, how long a step takes, and how much
memory it needs. The most expensive of them is asked last, and only of layouts that nothing else can overtake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Any

from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.catalogue import find_schedule
from megatron5d.planning.step_time import StepCost

Change = dict[str, Any]  # key of the configuration -> value

MODES = ("none", "selective", "full")  # of recompute, the one that keeps most first
SCHEDULES = (  # (schedule, chunks per rank)
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4), ("zb_h1", 1), ("zb_v", 1),
    ("dualpipe_v", 1),
)  # fmt: skip
SHORTEST_SLICE = 4096  # tokens of a sequence on one rank; cp is not tried where there would be fewer
DEEPEST = 32  # most pipeline ranks
MOST_EXPERTS = 32  # most experts of one rank
MICRO_BATCHES = (1, 2, 4, 8, 16)


class Proposals:
    """Combinations of values to try; many of them break some law.

    Args:
        config: gives the model, and the values of fixed keys.
        world: number of ranks.
        node: ranks that share fast links; tp is not larger.
        fixed: keys whose values are not changed.
    """

    def __init__(self, config: Config, world: int, node: int, fixed: Iterable[str] = ()) -> None:
        self.config, self.world, self.node, self.fixed = config, world, node, set(fixed)

    def _free(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values to try for a key: `values`, or only its own where it is fixed."""
        group, name = key.split(".")
        return [getattr(getattr(self.config, group), name)] if key in self.fixed else values

    def shapes(self) -> Iterator[Change]:
        """Combinations of sizes of the axes and ZeRO stages."""
        model, world = self.config.model, self.world
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        tps = [n for n in divisors if n <= self.node and model.num_heads % n == 0]
        cps = [n for n in divisors if n == 1 or self.config.train.seq_len // n >= SHORTEST_SLICE]
        pps = [n for n in divisors if n <= min(DEEPEST, model.num_layers)]
        experts = [n for n in divisors if model.num_experts % n == 0 and n * MOST_EXPERTS >= model.num_experts]
        for tp, cp, pp in product(
            *(self._free(f"parallel.{n}", v) for n, v in (("tp", tps), ("cp", cps), ("pp", pps)))
        ):
            if world % (tp * cp * pp):
                continue
            shards = world // (tp * pp)
            axes = {
                "parallel.sp": [tp > 1],
                "parallel.ep": [n for n in experts if shards * tp % n == 0] if model.num_experts else [1],
                "parallel.etp": [1 if model.num_experts else self.config.parallel.etp],
                "parallel.zero": [0] if shards == 1 else [1, 3] if pp == 1 else [1],
            }
            for values in product(*(self._free(key, values) for key, values in axes.items())):
                yield {"parallel.tp": tp, "parallel.cp": cp, "parallel.pp": pp, **dict(zip(axes, values))}

    def batches(self, dp: int) -> Iterator[Change]:
        """Combinations of micro-batch sizes and recompute modes.

        Args:
            dp: data-parallel ranks.
        """
        sizes = [n for n in MICRO_BATCHES if self.config.train.gbs % (n * dp) == 0]
        for mbs, mode in product(self._free("train.mbs", sizes), self._free("recompute.mode", MODES)):
            yield {"train.mbs": mbs, "recompute.mode": mode}

    def schedules(self, pp: int) -> list[Change]:
        """Combinations of schedules and chunks per rank, for pp pipeline ranks."""
        deepest = self.config.model.num_layers // pp
        pairs = [
            (name, vpp) for name, vpp in SCHEDULES if pp > 1 and max(vpp, find_schedule(name).chunks) <= deepest
        ] or SCHEDULES[:1]
        ways = [{"pipeline.schedule": name, "parallel.vpp": vpp} for name, vpp in pairs]
        kept = {key: self._free(key, ())[0] for key in ways[0] if key in self.fixed}
        return [way for way in ways if way | kept == way] or [ways[0] | kept]


@dataclass
class Candidate:
    """A layout that may be legal and may fit.

    Args:
        change: the values that it sets.
        guess_s: cheap estimate of a step's seconds.
        cost: predicted cost of a step; None = not known yet.
        needed: bytes of the rank that needs most, or of any rank that needs more than a device has; of a layout that
            is not among the results, at least so many. 0 = not known yet.
    """

    change: Change
    guess_s: float
    cost: StepCost | None = None
    needed: float = 0

    @property
    def seconds(self) -> float:
        """Of a step according to `cost`."""
        assert self.cost is not None
        return self.cost.step_s


@dataclass(frozen=True)
class Questions:
    """The functions with which the search examines a candidate, the cheapest first.

    Args:
        runs: whether it is legal and has a Program.
        least: bytes that the rank which needs most needs at least.
        price: cost of a step.
        need: bytes of the rank that needs most, or of any rank that needs more than a device has.
    """

    runs: Callable[[Change], bool]
    least: Callable[[Change], float]
    price: Callable[[Change], StepCost]
    need: Callable[[Change], float]


def best(
    candidates: Sequence[Candidate],
    questions: Questions,
    *,
    have: int,
    count: int,
    limit: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Candidate]:
    """The fastest candidates that fit.

    The candidate that is fastest by what is known so far is always examined next: first what it needs at least and what
    a step costs, then, when none of the others looks faster than that, all that it needs. So these are the fastest of
    all, as far as estimates are no slower than costs and `limit` reaches.

    Args:
        candidates: to be examined; what is found out is written into them.
        questions: the functions that examine them.
        have: bytes of one device.
        count: how many are wanted.
        limit: number of candidates of which all memory is asked for.
        progress: called for each candidate that is examined.

    Returns:
        At most `count`, the fastest first.
    """
    found: list[Candidate] = []
    waiting = [(each.guess_s, place) for place, each in enumerate(candidates)]
    heapify(waiting)
    while waiting and len(found) < count and limit:
        place = heappop(waiting)[1]
        candidate = candidates[place]
        if candidate.cost is None:
            progress()
            if questions.runs(candidate.change):
                candidate.needed = questions.least(candidate.change)
                if candidate.needed <= have:
                    candidate.cost = questions.price(candidate.change)
                    heappush(waiting, (candidate.seconds, place))
            continue
        limit -= 1
        candidate.needed = questions.need(candidate.change)
        if candidate.needed <= have:
            found.append(candidate)
    return sorted(found, key=lambda each: each.seconds)

"""Proposes layouts for a model and a world, and finds the fastest of those that fit.

Layouts are proposed by size only. The caller's functions say which ones are legal, how long a step takes, and how much
memory it needs. The expensive functions are called last, in the order of a cheap estimate, and rarely: a layout that
needs more memory than one that was too large is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.catalogue import find_schedule
from megatron5d.plan.cost import StepCost

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
FAR = 1.5  # a layout that needs so many times the memory of a device fits with no schedule
PATIENCE = 3  # how many times longer to search while fewer layouts fit than are wanted
_WAYS = ("pipeline.schedule", "parallel.vpp")


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
    """A legal layout.

    Args:
        change: the values that it sets.
        guess_s: cheap estimate of a step's seconds; candidates are tried in this order.
        cost: predicted cost of a step; None = not known yet.
        needed: bytes of the rank that needs most; 0 = not known yet.
    """

    change: Change
    guess_s: float
    cost: StepCost | None = None
    needed: int = 0

    @property
    def seconds(self) -> float:
        """Of a step according to `cost`."""
        assert self.cost is not None
        return self.cost.step_s


@dataclass(frozen=True)
class Questions:
    """The functions with which the search examines a candidate.

    Args:
        runs: whether it is legal and has a Program.
        price: cost of a step.
        need: bytes of the rank that needs most, or of any rank that needs more than a device has.
    """

    runs: Callable[[Change], bool]
    price: Callable[[Change], StepCost]
    need: Callable[[Change], int]


@dataclass
class Misfits:
    """Layouts that were too large; others that need at least as much are known to be too large as well."""

    _known: dict[tuple, list[tuple[int, int, int]]] = field(default_factory=dict)

    def add(self, change: Change, excess: float) -> None:
        """Adds a layout that was too large.

        Args:
            change: the layout.
            excess: memory that it needs / memory of a device; above FAR, it is taken to be so with any schedule.
        """
        same, size = self._parts(change, anyhow=excess > FAR)
        self._known.setdefault(same, []).append(size)

    def cover(self, change: Change) -> bool:
        """Whether a layout needs at least as much as one of them."""
        for anyhow in (False, True):
            same, size = self._parts(change, anyhow)
            if any(all(a <= b for a, b in zip(small, size)) for small in self._known.get(same, ())):
                return True
        return False

    def _parts(self, change: Change, anyhow: bool) -> tuple[tuple, tuple[int, int, int]]:
        """(values that must be equal, sizes that grow with memory: micro-batch, recompute mode, unsharded state).

        Args:
            change: the layout.
            anyhow: the schedule need not be equal.
        """
        sizes = {"train.mbs", "recompute.mode", "parallel.zero"} | ({*_WAYS} if anyhow else set())
        same = tuple((key, value) for key, value in sorted(change.items()) if key not in sizes)
        kept = len(MODES) - MODES.index(change["recompute.mode"])
        return same, (change["train.mbs"], kept, 3 - change["parallel.zero"])


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

    Args:
        candidates: to be examined.
        questions: the functions that examine them.
        have: bytes of one device.
        count: how many are wanted.
        limit: number of candidates to examine; PATIENCE times as many while fewer than `count` fit.
        progress: called for each one examined.

    Returns:
        At most `count`, the fastest first.
    """
    found: list[Candidate] = []
    misfits = Misfits()
    looked = 0
    for candidate in sorted(candidates, key=lambda each: each.guess_s):
        if misfits.cover(candidate.change):
            continue
        full = len(found) == count
        if looked >= (limit if full else PATIENCE * limit) or (full and candidate.guess_s > 1.1 * found[-1].seconds):
            break
        if not questions.runs(candidate.change):
            continue
        looked += 1
        progress()
        if full and not _priced(candidate, questions, below=found[-1].seconds):
            continue
        candidate.needed = questions.need(candidate.change)
        if candidate.needed > have:
            misfits.add(candidate.change, candidate.needed / have)
        elif full or _priced(candidate, questions):
            found = sorted([*found, candidate], key=lambda each: each.seconds)[:count]
    return found


def _priced(candidate: Candidate, questions: Questions, below: float = float("inf")) -> bool:
    """Sets the cost of a candidate; whether a step takes less than `below` seconds."""
    candidate.cost = questions.price(candidate.change)
    return candidate.seconds < below

"""The fastest layouts of a model on a cluster that fit.

Layouts are proposed by size only (proposals.py). Functions say which ones are legal, how long a
step takes, and how much memory it needs. The most expensive of them is asked last, and only of
layouts that nothing else can overtake.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from math import inf
from typing import Any

from megatron5d.config.checks import run_checks
from megatron5d.config.checks.check import data_parallel
from megatron5d.config.checks.context import recommended
from megatron5d.config.convert import Change, changed
from megatron5d.config.schema import Config
from megatron5d.planning.clusters import Cluster
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.rank_memory import minimum_needed
from megatron5d.planning.proposals import MODES, Proposals
from megatron5d.planning.schedule_search.auto_schedule import quick_layout
from megatron5d.planning.time.predict import Estimator, check_predictable
from megatron5d.planning.time.step_time import Prices, StepCost
from megatron5d.planning.time.work import Unit
from megatron5d.topology.mesh import planned_mesh
from megatron5d.train.build import sizes_of
from megatron5d.train.pipeline_layout import PipelineLayout, micro_batch_counts, verified_program


@dataclass
class Candidate:
    """A layout that may be legal and may fit.

    Args:
        change: the values that it sets.
        guess_s: cheap estimate of a step's seconds.
        cost: predicted cost of a step; None = not known yet.
        needed: bytes of the rank that needs most, or of any rank that needs more than a device has;
            of a layout that is not among the results, at least this many. 0 = not known yet.
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
    """Returns the fastest candidates that fit.

    The candidate that is fastest by what is known so far is always examined next: first what it
    needs at least and what a step costs, then, when none of the others looks faster than that, all
    that it needs. So these are the fastest of all, as far as estimates are no slower than costs and
    `limit` reaches.

    Args:
        candidates: to be examined; what is found out is written into them.
        questions: the functions that examine them.
        have: bytes of one device.
        count: how many are wanted.
        limit: number of candidates of which all memory is asked for.
        progress: called for each candidate that is examined, and again before its memory is
            forecast.

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
        progress()
        candidate.needed = questions.need(candidate.change)
        if candidate.needed <= have:
            found.append(candidate)
    return sorted(found, key=lambda each: each.seconds)


BUBBLES = {"zb_h1": 1 / 3, "zb_v": 1 / 6, "dualpipe_v": 1 / 6}  # of 1F1B's, about
# of what 1F1B's first rank would keep with as many layers as the others: it may have fewer
FIRST = 0.85
# Micro-batches that the fullest rank holds at least, of 1F1B's; what is searched or read from a
# file may hold any
IN_FLIGHT = {"v_half": 1 / 2, "v_min": 1 / 3, "auto": 0.0, "file": 0.0}
# of what a rank keeps between two slots, next to others with the same layers: it will not need more
SURE = 0.98
LIMIT = 60  # layouts whose memory is forecast
SMALL_LOOKING = 8  # layouts of which the smallest is named where none fits


class LayoutSearch:
    """
    Args:
        config: model, batch and all that is not searched for.
        world: number of ranks.
        cluster: on which.
        imbalance: rows that the busiest rank's experts are sent, of an even share; None = an even
            share for the time, `moe.planned_imbalance` for the memory, as the run itself forecasts
            it.
        fixed: keys that keep their values.

    Attributes:
        found_legal: `candidates` has met a shape that the checks admit, whether it fits or not.

    Raises:
        ValueError: no layout's time can be predicted (`check_predictable`).
    """

    def __init__(
        self,
        config: Config,
        world: int,
        cluster: Cluster,
        imbalance: float | None = None,
        fixed: Iterable[str] = (),
    ) -> None:
        check_predictable(config)
        self.config, self.world, self.cluster, self.fixed = config, world, cluster, set(fixed)
        self._proposals = Proposals(config, world, cluster.node, self.fixed)
        careful = config.moe.planned_imbalance if imbalance is None else imbalance
        self._target = Target(cluster.architecture, careful)
        self._estimator = Estimator(cluster, 1.0 if imbalance is None else imbalance)
        even = config.model.num_experts and imbalance is None
        self._careful = Estimator(cluster, careful) if even else self._estimator
        self.found_legal = False
        self._layouts: dict[tuple, PipelineLayout | None] = {}
        # of each shape: bytes at a glance, and the layout
        self._smallest: dict[tuple, tuple[float, Change]] = {}

    def candidates(self, have: int, progress: Callable[[], None] = lambda: None) -> list[Candidate]:
        """Layouts that are not too large at a glance, with a first guess of their time, and the
        given one.

        Args:
            have: bytes of one device.
            progress: called for each shape that is looked at.
        """
        found = [Candidate(self._given(), 0.0)]
        for shape in self._proposals.shapes():
            progress()
            shape = self._with_lines(shape)
            if self._is_legal(shape):
                self.found_legal = True
                found += [each for each in self._glances(shape, have) if self.overrides(each)]
        return found

    def overrides(self, candidate: Candidate) -> Change:
        """Returns what a candidate says otherwise than the configuration: empty for the given
        one."""
        return {
            key: value
            for key, value in candidate.change.items()
            if value != _value(self.config, key)
        }

    def best(
        self,
        candidates: Sequence[Candidate],
        have: int,
        count: int,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Candidate]:
        """Returns the fastest that fit: each time from its Program, each memory as a run's own
        forecast has it.

        Args:
            candidates: of `candidates`.
            have: bytes of one device.
            count: how many are wanted.
            progress: called for each layout that is looked at.
        """
        questions = Questions(
            runs=self._runs,
            least=lambda change: max(self._estimator.least_bytes(*self._laid(change))),
            price=lambda change: self._estimator.step(*self._laid(change)),
            need=partial(self._need, have=have),
        )
        return best(candidates, questions, have=have, count=count, limit=LIMIT, progress=progress)

    def smallest(self) -> Candidate | None:
        """Returns the layout that needs least memory, of those that look smallest; None where none
        is legal."""
        looks = nsmallest(SMALL_LOOKING, self._smallest.values(), key=lambda each: each[0])
        legal = [change for _, change in looks if self._runs(change)]
        found = [Candidate(change, 0.0, needed=self._need(change, inf)) for change in legal]
        return min(found, key=lambda each: each.needed, default=None)

    def _given(self) -> Change:
        """Returns the layout of the configuration itself, with which the others compete."""
        names = ("tp", "cp", "pp", "sp", "ep", "etp", "zero", "cp_method", "cp_inner", "vpp")
        keys = [
            *(f"parallel.{name}" for name in names),
            "train.mbs",
            "recompute.mode",
            "pipeline.schedule",
        ]
        return {key: _value(self.config, key) for key in keys}

    def _with_lines(self, shape: Change) -> Change:
        """Returns how cp and ep are parted, where nobody says so: attention as sends least between
        nodes, experts as given."""
        parallel = self.config.parallel
        if not {"parallel.cp_method", "parallel.cp_inner"} & self.fixed:
            method, inner = parallel.cp_method, parallel.cp_inner
            if shape["parallel.cp"] > 1:
                method, inner = recommended(changed(self.config, shape), self.cluster.node)
            elif inner > 1:  # the given one parts a longer line
                method, inner = "ring", 1
            shape = {**shape, "parallel.cp_method": method, "parallel.cp_inner": inner}
        if "parallel.ep_inner" not in self.fixed and shape["parallel.ep"] % parallel.ep_inner:
            shape = {**shape, "parallel.ep_inner": 1}
        return shape

    def _is_legal(self, shape: Change) -> bool:
        """Says if a shape is legal with some schedule and recompute; checks of the axes ask for
        neither."""
        dp = data_parallel(changed(self.config, shape), self.world)
        return any(
            not run_checks(changed(self.config, {**shape, **batch, **way}), self.world, files=False)
            for batch in islice(self._proposals.batches(dp), len(MODES))
            for way in self._proposals.schedules(shape["parallel.pp"])
        )

    def _glances(self, shape: Change, have: int) -> Iterator[Candidate]:
        """Yields a first guess of the time of a shape with every micro-batch and schedule: equal
        ranks, no messages."""
        config = changed(self.config, shape)
        prices = Prices(
            self.cluster,
            config,
            planned_mesh(sizes_of(config, self.world), num_kv_heads=config.model.num_kv_heads),
        )
        pp, dp, key = config.parallel.pp, data_parallel(config, self.world), tuple(shape.values())
        for batch in self._proposals.batches(dp):
            laid = changed(config, batch)
            units = self._estimator.workloads.counted(laid, "FB")
            m = laid.train.gbs // (laid.train.mbs * dp)
            state = (
                sum(count * prices.sharding.state_bytes([unit]) for unit, count, _ in units) / pp
            )
            kept = sum(
                n * unit.passes["F"].kept_bytes
                for unit, n, is_layer in units
                if is_layer or pp == 1
            )
            kept *= min(1.0, m / pp) * (1.0 if pp == 1 else FIRST)
            ways = []
            for way in self._proposals.schedules(pp):
                least = minimum_needed(state + kept * IN_FLIGHT.get(_name(way), 1.0))
                if least < self._smallest.get(key, (inf,))[0]:
                    self._smallest[key] = least, {**shape, **batch, **way}
                if least <= have:
                    ways.append(way)
            if not ways:
                continue
            busy, a2a = (
                sum(each) / pp for each in zip(*(_seconds(prices, unit, n) for unit, n, _ in units))
            )
            for way in ways:
                bubble = (pp - 1) * BUBBLES.get(_name(way), 1.0) / way["parallel.vpp"]
                # which it hides
                passes = busy + (0.0 if _name(way).startswith("dualpipe") else a2a)
                yield Candidate({**shape, **batch, **way}, passes * (m + bubble))

    def _layout(self, config: Config) -> PipelineLayout | None:
        """Returns none where the schedule, the layers or a tied embedding do not fit together; many
        layouts share one."""
        parallel, schedule = config.parallel, config.pipeline.schedule
        key: tuple = (
            parallel.pp,
            parallel.vpp,
            schedule,
            tuple(micro_batch_counts(config, self.world)),
        )
        if schedule == "auto":  # it weighs communication against computation
            key += repr(parallel), repr(config.train)
        if key not in self._layouts:
            self._layouts[key] = None
            with suppress(ValueError):
                self._layouts[key] = quick_layout(config, self.world, check=False)
        return self._layouts[key]

    def _runs(self, change: Change) -> bool:
        """Returns whether it is legal, schedule, layers and tied embedding included."""
        config = changed(self.config, change)
        return not run_checks(config, self.world, files=False) and self._layout(config) is not None

    def _laid(self, change: Change) -> tuple[Config, int, PipelineLayout | None]:
        config = changed(self.config, change)
        return config, self.world, self._layout(config)

    def _need(self, change: Change, have: float) -> float:
        """Returns bytes of the rank that needs most; the one that looks so is asked first.

        Of ranks with the same layers, those are not asked that surely keep less between two slots,
        or as much.
        """
        config, world, layout = self._laid(change)
        assert layout is not None
        likely, most = self._careful.least_bytes(config, world, layout), 0
        if max(likely) > have:
            return max(likely)
        stages = self._careful.workloads.stages(config, layout, "F")
        forecaster, asked = (
            Forecaster(config, world, self._target, layout),
            defaultdict[tuple, list[float]](list),
        )
        for rank in sorted(range(config.parallel.pp), key=lambda rank: -likely[rank]):
            known = asked[
                tuple(
                    tuple(map(id, stages[stage])) for _, stage in layout.placement.stages_of(rank)
                )
            ]
            if likely[rank] not in known and (not known or likely[rank] >= SURE * known[0]):
                known.append(likely[rank])
                most = max(most, forecaster.rank(rank).needed)
            if most > have:
                return most
        verified_program(layout.program_of(micro_batch_counts(config, self.world)[-1]))
        return most


def _value(config: Config, key: str) -> Any:
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def _name(way: Change) -> str:
    """Returns the schedule, without the path of a file."""
    return way["pipeline.schedule"].partition(":")[0]


def _seconds(prices: Prices, unit: Unit, count: int) -> tuple[float, float]:
    """Returns one micro-batch's forward and backward of this many units, and their all-to-alls."""
    both = [prices.stage([unit], op) for op in "FB"]
    return count * sum(sum(kinds.values()) for kinds, _ in both), count * sum(
        a2a for _, a2a in both
    )

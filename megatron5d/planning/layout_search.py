"""Searches for the fastest layouts of a model that fit a cluster.

proposals.py proposes layouts by size only. Functions decide which ones are legal, how long a step
takes, and how much memory it needs. The most expensive function is called last, and only for
layouts that no other one can beat.
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
from megatron5d.planning.proposals import BATCH_KEYS, MODES, Proposals
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
        needed: bytes of the rank that needs most, or of any rank that needs more than a device has.
            A lower bound for layouts that are not in the result; 0 = not known yet.
    """

    change: Change
    guess_s: float
    cost: StepCost | None = None
    needed: float = 0

    @property
    def seconds(self) -> float:
        """Of a step, as predicted."""
        assert self.cost is not None
        return self.cost.step_s


@dataclass(frozen=True)
class Evaluation:
    """The functions that the search evaluates candidates with, the cheapest first.

    Args:
        runs: whether the layout is legal and has a Program.
        min_bytes: lower bound of the bytes of the rank that needs most.
        price: cost of a step.
        needed_bytes: of the rank that needs most, or of any that needs more than a device has.
    """

    runs: Callable[[Change], bool]
    min_bytes: Callable[[Change], float]
    price: Callable[[Change], StepCost]
    needed_bytes: Callable[[Change], float]


def best(
    candidates: Sequence[Candidate],
    evaluation: Evaluation,
    *,
    capacity: int,
    count: int,
    limit: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Candidate]:
    """The fastest candidates that fit.

    The next candidate is always the one that is fastest by what is known so far. At first its lower
    bound of memory and its cost are computed; once no other candidate looks faster than that cost,
    all of its memory. The results are the fastest of all as long as no estimate exceeds a cost and
    `limit` is not reached.

    Args:
        candidates: to evaluate; the results are stored in them.
        evaluation: the functions.
        capacity: bytes of one device.
        count: number of results.
        limit: number of candidates whose memory is forecast.
        progress: called for each candidate, and again before its memory is forecast.

    Returns:
        At most `count`, the fastest first.
    """
    fitting: list[Candidate] = []
    queue = [(candidate.guess_s, index) for index, candidate in enumerate(candidates)]
    heapify(queue)
    while queue and len(fitting) < count and limit:
        _, index = heappop(queue)
        candidate = candidates[index]
        if candidate.cost is None:
            progress()
            if evaluation.runs(candidate.change):
                candidate.needed = evaluation.min_bytes(candidate.change)
                if candidate.needed <= capacity:
                    candidate.cost = evaluation.price(candidate.change)
                    heappush(queue, (candidate.seconds, index))
            continue
        limit -= 1
        progress()
        candidate.needed = evaluation.needed_bytes(candidate.change)
        if candidate.needed <= capacity:
            fitting.append(candidate)
    return sorted(fitting, key=lambda candidate: candidate.seconds)


BUBBLES = {"zb_h1": 1 / 3, "zb_v": 1 / 6, "dualpipe_v": 1 / 6}  # of 1F1B's, about
# Share of what 1F1B's first rank would keep with the others' number of layers: it may have fewer.
FIRST = 0.85
# Lower bounds of the micro-batches on the fullest rank, relative to 1F1B's. A schedule that is
# searched or read from a file may hold any number.
IN_FLIGHT = {"v_half": 1 / 2, "v_min": 1 / 3, "auto": 0.0, "file": 0.0}
# A rank that keeps less than this share of what a rank with the same layers keeps needs no more.
SURE = 0.98
LIMIT = 60  # layouts whose memory is forecast
NUM_SMALLEST = 8  # layouts among which the smallest is found if none fits


class LayoutSearch:
    """Search among the layouts of one configuration.

    Args:
        config: model, batch, and every key that is not searched.
        world: number of ranks.
        cluster: hardware.
        imbalance: rows that the busiest rank's experts receive, relative to an even share; None = 1
            for the time and `moe.planned_imbalance` for the memory, as in the run's own forecast.
        fixed: keys that keep their values.

    Attributes:
        has_legal_shape: `candidates` has met a shape that the checks accept, whether it fits or
            not.

    Raises:
        ValueError: step times cannot be predicted (`check_predictable`).
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
        for_memory = config.moe.planned_imbalance if imbalance is None else imbalance
        self._target = Target(cluster.architecture, for_memory)
        self._estimator = Estimator(cluster, 1.0 if imbalance is None else imbalance)
        differs = config.model.num_experts and imbalance is None
        self._memory_estimator = Estimator(cluster, for_memory) if differs else self._estimator
        self.has_legal_shape = False
        self._layouts: dict[tuple, PipelineLayout | None] = {}
        # by shape: estimated bytes, and the layout
        self._smallest: dict[tuple, tuple[float, Change]] = {}

    def candidates(
        self, capacity: int, progress: Callable[[], None] = lambda: None
    ) -> list[Candidate]:
        """Layouts whose first estimate fits, with a guess of their time, and the configured one.

        Args:
            capacity: bytes of one device.
            progress: called for each shape.
        """
        candidates = [Candidate(self._configured(), 0.0)]
        for shape in self._proposals.shapes():
            progress()
            shape = self._with_inner_axes(shape)
            if self._is_legal(shape):
                self.has_legal_shape = True
                estimates = self._estimates(shape, capacity)
                candidates += [candidate for candidate in estimates if self.overrides(candidate)]
        return candidates

    def overrides(self, candidate: Candidate) -> Change:
        """What a candidate changes in the configuration; empty for the configured layout."""
        return {
            key: value
            for key, value in candidate.change.items()
            if value != _value(self.config, key)
        }

    def best(
        self,
        candidates: Sequence[Candidate],
        capacity: int,
        count: int,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Candidate]:
        """The fastest layouts that fit, by simulated time and by the run's own memory forecast.

        Args:
            candidates: of `candidates`.
            capacity: bytes of one device.
            count: number of results.
            progress: called for each layout that is evaluated.
        """
        evaluation = Evaluation(
            runs=self._runs,
            min_bytes=lambda change: max(self._estimator.min_bytes(*self._arguments(change))),
            price=lambda change: self._estimator.step(*self._arguments(change)),
            needed_bytes=partial(self._needed_bytes, capacity=capacity),
        )
        return best(
            candidates,
            evaluation,
            capacity=capacity,
            count=count,
            limit=LIMIT,
            progress=progress,
        )

    def smallest(self) -> Candidate | None:
        """The layout that needs least memory, of the smallest estimates; None if none is legal."""
        estimates = nsmallest(NUM_SMALLEST, self._smallest.values(), key=lambda pair: pair[0])
        changes = [change for _, change in estimates if self._runs(change)]
        candidates = [Candidate(c, 0.0, needed=self._needed_bytes(c, inf)) for c in changes]
        return min(candidates, key=lambda candidate: candidate.needed, default=None)

    def _configured(self) -> Change:
        """The layout of the configuration itself, which competes with the others."""
        names = ("tp", "cp", "pp", "sp", "ep", "etp", "zero", "cp_method", "cp_inner", "vpp")
        keys = [f"parallel.{name}" for name in names]
        keys += ["train.mbs", "recompute.mode", "pipeline.schedule"]
        return {key: _value(self.config, key) for key in keys}

    def _with_inner_axes(self, shape: Change) -> Change:
        """A shape with the division of cp and ep over nodes, where that is not fixed.

        Attention uses the method that sends least between nodes, experts the configured division.
        """
        parallel = self.config.parallel
        if not {"parallel.cp_method", "parallel.cp_inner"} & self.fixed:
            method, inner = parallel.cp_method, parallel.cp_inner
            if shape["parallel.cp"] > 1:
                method, inner = recommended(changed(self.config, shape), self.cluster.node)
            elif inner > 1:  # configured for a larger cp
                method, inner = "ring", 1
            shape = {**shape, "parallel.cp_method": method, "parallel.cp_inner": inner}
        if "parallel.ep_inner" not in self.fixed and shape["parallel.ep"] % parallel.ep_inner:
            shape = {**shape, "parallel.ep_inner": 1}
        return shape

    def _is_legal(self, shape: Change) -> bool:
        """Whether a shape is legal with some schedule and recompute mode."""
        dp = data_parallel(changed(self.config, shape), self.world)
        variants = (
            changed(self.config, {**shape, **batch, **schedule})
            for batch in islice(self._proposals.batches(dp), len(MODES))
            for schedule in self._proposals.schedules(shape["parallel.pp"])
        )
        return any(not run_checks(variant, self.world, files=False) for variant in variants)

    def _estimates(self, shape: Change, capacity: int) -> Iterator[Candidate]:
        """A shape with every micro-batch and schedule whose first estimate of memory fits.

        The guess of the time assumes equal ranks and no messages.
        """
        config = changed(self.config, shape)
        sizes = sizes_of(config, self.world)
        mesh = planned_mesh(sizes, num_kv_heads=config.model.num_kv_heads)
        prices = Prices(self.cluster, config, mesh)
        pp, dp = config.parallel.pp, data_parallel(config, self.world)
        for batch in self._proposals.batches(dp):
            train = changed(config, batch).train
            units = self._estimator.workloads.counted(changed(config, batch), "FB")
            m = train.gbs // (train.mbs * dp)
            schedules = self._fitting_schedules({**shape, **batch}, units, prices, m, capacity)
            if not schedules:
                continue
            times = zip(*(_seconds(prices, unit, count) for unit, count, _ in units))
            compute, a2a = (sum(of_units) / pp for of_units in times)
            for schedule in schedules:
                name = _schedule_name(schedule)
                bubble = (pp - 1) * BUBBLES.get(name, 1.0) / schedule["parallel.vpp"]
                # DualPipe hides the all-to-alls.
                passes = compute + (0.0 if name.startswith("dualpipe") else a2a)
                yield Candidate({**shape, **batch, **schedule}, passes * (m + bubble))

    def _fitting_schedules(
        self,
        change: Change,
        units: Sequence[tuple[Unit, int, bool]],
        prices: Prices,
        num_microbatches: int,
        capacity: int,
    ) -> list[Change]:
        """Schedules with which state and the first rank's activations fit; notes the smallest."""
        pp = change["parallel.pp"]
        key = tuple(value for name, value in change.items() if name not in BATCH_KEYS)
        state_bytes = [count * prices.sharding.state_bytes([unit]) for unit, count, _ in units]
        state = sum(state_bytes) / pp
        activations = sum(
            count * unit.passes["F"].kept_bytes
            for unit, count, is_layer in units
            if is_layer or pp == 1
        )
        activations *= min(1.0, num_microbatches / pp) * (1.0 if pp == 1 else FIRST)
        fitting = []
        for schedule in self._proposals.schedules(pp):
            in_flight = IN_FLIGHT.get(_schedule_name(schedule), 1.0)
            needed = minimum_needed(state + activations * in_flight)
            if needed < self._smallest.get(key, (inf,))[0]:
                self._smallest[key] = needed, {**change, **schedule}
            if needed <= capacity:
                fitting.append(schedule)
        return fitting

    def _layout(self, config: Config) -> PipelineLayout | None:
        """Pipeline layout, shared by many candidates; None if schedule and layers do not fit."""
        parallel, schedule = config.parallel, config.pipeline.schedule
        counts = tuple(micro_batch_counts(config, self.world))
        key: tuple = (parallel.pp, parallel.vpp, schedule, counts)
        if schedule == "auto":  # weighs communication against computation
            key += repr(parallel), repr(config.train)
        if key not in self._layouts:
            self._layouts[key] = None
            with suppress(ValueError):
                self._layouts[key] = quick_layout(config, self.world, check=False)
        return self._layouts[key]

    def _runs(self, change: Change) -> bool:
        """Whether a layout is legal, including its schedule, layers and tied embedding."""
        config = changed(self.config, change)
        return not run_checks(config, self.world, files=False) and self._layout(config) is not None

    def _arguments(self, change: Change) -> tuple[Config, int, PipelineLayout | None]:
        config = changed(self.config, change)
        return config, self.world, self._layout(config)

    def _needed_bytes(self, change: Change, capacity: float) -> float:
        """Bytes of the rank that needs most; ranks are forecast in the order of their bounds.

        Ranks are skipped if a rank with the same layers keeps more between two slots, or as much.
        """
        config, world, layout = self._arguments(change)
        assert layout is not None
        bounds, largest = self._memory_estimator.min_bytes(config, world, layout), 0
        if max(bounds) > capacity:
            return max(bounds)
        stages = self._memory_estimator.workloads.stages(config, layout, "F")
        forecaster = Forecaster(config, world, self._target, layout)
        forecast_bounds = defaultdict[tuple, list[float]](list)  # by the layers of a rank
        for rank in sorted(range(config.parallel.pp), key=lambda rank: -bounds[rank]):
            local = [stages[stage] for _, stage in layout.placement.stages_of(rank)]
            same_layers = forecast_bounds[tuple(tuple(map(id, units)) for units in local)]
            is_new = bounds[rank] not in same_layers
            if is_new and (not same_layers or bounds[rank] >= SURE * same_layers[0]):
                same_layers.append(bounds[rank])
                largest = max(largest, forecaster.rank(rank).needed)
            if largest > capacity:
                return largest
        verified_program(layout.program_of(micro_batch_counts(config, self.world)[-1]))
        return largest


def _value(config: Config, key: str) -> Any:
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def _schedule_name(schedule: Change) -> str:
    """Name of a schedule, without the path of a file."""
    return schedule["pipeline.schedule"].partition(":")[0]


def _seconds(prices: Prices, unit: Unit, count: int) -> tuple[float, float]:
    """Seconds of one micro-batch's forward and backward of several units, and of all-to-alls."""
    passes = [prices.stage([unit], op) for op in "FB"]
    compute = sum(sum(kinds.values()) for kinds, _ in passes)
    return count * compute, count * sum(a2a for _, a2a in passes)

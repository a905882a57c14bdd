"""The best layouts of a model on a cluster: the search of plan/search.py, with our laws, times and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from megatron5d.config.context_cost import recommended
from megatron5d.config.law import data_parallel
from megatron5d.config.laws import broken_laws
from megatron5d.config.laws_files import FILE_LAWS
from megatron5d.config.schema import Config, RecomputeConfig
from megatron5d.plan.cluster import Cluster
from megatron5d.plan.cost import Prices, StepCost
from megatron5d.plan.search import MODES, Candidate, Change, Proposals, Questions, best
from megatron5d.plan.traffic import message_bytes
from megatron5d.plan.work import Unit
from megatron5d.topology.mesh import lines_of
from megatron5d.train.build import sizes_of
from megatron5d.train.planning.estimate import Estimator, check_predictable
from megatron5d.train.planning.fitting import changed
from megatron5d.train.planning.forecast import Forecaster, Target
from megatron5d.train.schedule import PipelinePlan, micro_batch_counts, planned_pipeline

# Of the bytes that a forward makes, what a micro-batch keeps at least, times √tp: dense layers, mixtures. Measured on
# four models at tp 1 to 8; what tp gathers is made whole and not kept.
KEPT = {"none": (0.85, 0.45), "selective": (0.58, 0.38)}
BUBBLES = {"zb_h1": 1 / 3, "zb_v": 1 / 6, "dualpipe_v": 1 / 6}  # of 1F1B's, about
# Micro-batches that the fullest rank holds at least, of 1F1B's; what is searched or read from a file may hold any
IN_FLIGHT = {"v_half": 1 / 2, "v_min": 1 / 3, "auto": 0.0, "file": 0.0}
LIMIT = 60  # layouts whose memory or exact time is asked for


class LayoutSearch:
    """
    Args:
        config: model, batch and all that is not searched for.
        world: number of ranks.
        cluster: on which.
        imbalance: rows that the busiest rank's experts are sent, of an even share; None = an even share for the time,
            `moe.planned_imbalance` for the memory, as the run itself forecasts it.
        fixed: keys that keep their values.

    Attributes:
        found_legal: `candidates` has met a shape that the laws admit, whether it fits or not.

    Raises:
        ValueError: no layout's time can be predicted (`check_predictable`).
    """

    def __init__(
        self, config: Config, world: int, cluster: Cluster, imbalance: float | None = None, fixed: Iterable[str] = ()
    ) -> None:
        check_predictable(config)
        self.config, self.world, self.cluster, self.fixed = config, world, cluster, set(fixed)
        self._proposals = Proposals(config, world, cluster.node, self.fixed)
        careful = config.moe.planned_imbalance if imbalance is None else imbalance
        self._target = Target(cluster.architecture, careful)
        self._estimator = Estimator(cluster, 1.0 if imbalance is None else imbalance)
        self.found_legal = False
        self._plans: dict[tuple, PipelinePlan | None] = {}

    def candidates(self, have: int, progress: Callable[[], None] = lambda: None) -> list[Candidate]:
        """Layouts that are not too large at a glance, with a first guess of their time, and the given one.

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
        """What a candidate says otherwise than the configuration: empty for the given one."""
        return {key: value for key, value in candidate.change.items() if value != _value(self.config, key)}

    def best(
        self,
        candidates: Sequence[Candidate],
        have: int,
        count: int,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Candidate]:
        """The fastest that fit: each time from its Program, each memory as a run's own forecast has it.

        Args:
            candidates: of `candidates`.
            have: bytes of one device.
            count: how many are wanted.
            progress: called for each layout that is looked at.
        """
        questions = Questions(self._runs, self._price, lambda change: self._need(change, have))
        return best(candidates, questions, have=have, count=count, limit=LIMIT, progress=progress)

    def _given(self) -> Change:
        """The layout of the configuration itself, with which the others compete."""
        names = ("tp", "cp", "pp", "sp", "ep", "etp", "zero", "cp_method", "cp_inner", "vpp")
        keys = [*(f"parallel.{name}" for name in names), "train.mbs", "recompute.mode", "pipeline.schedule"]
        return {key: _value(self.config, key) for key in keys}

    def _with_lines(self, shape: Change) -> Change:
        """How cp and ep are parted, where nobody says so: attention as sends least between nodes, experts as given."""
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
        """With some schedule and some recomputation of the smallest micro-batch: laws of the axes ask for neither."""
        dp = data_parallel(changed(self.config, shape), self.world)
        return any(
            not broken_laws(changed(self.config, {**shape, **batch, **way}), self.world, without=FILE_LAWS)
            for batch in islice(self._proposals.batches(dp), len(MODES))
            for way in self._proposals.schedules(shape["parallel.pp"])
        )

    def _glances(self, shape: Change, have: int) -> Iterator[Candidate]:
        """A first guess of the time of a shape with every micro-batch and schedule: equal ranks, no messages."""
        config = changed(self.config, shape)
        prices = Prices(self.cluster, config, lines_of(sizes_of(config, self.world), 0, config.model.num_kv_heads))
        pp, dp = config.parallel.pp, data_parallel(config, self.world)
        for batch in self._proposals.batches(dp):
            laid = changed(config, batch)
            units = self._estimator.workloads.counted(laid)
            m = laid.train.gbs // (laid.train.mbs * dp)
            state = sum(count * prices.sharding.state_bytes([unit]) for unit, count, _ in units) / pp
            kept = _kept_bytes(laid, prices, [(unit, n) for unit, n, is_layer in units if is_layer or pp == 1], m)
            ways = [
                way
                for way in self._proposals.schedules(pp)
                if state + kept * IN_FLIGHT.get(way["pipeline.schedule"].partition(":")[0], 1.0) <= have
            ]
            passes = sum(count * _seconds(prices, unit) for unit, count, _ in units) / pp if ways else 0.0
            for way in ways:
                bubble = (pp - 1) * BUBBLES.get(way["pipeline.schedule"], 1.0) / way["parallel.vpp"]
                yield Candidate({**shape, **batch, **way}, passes * (m + bubble))

    def _plan(self, config: Config) -> PipelinePlan | None:
        """None where the schedule, the layers or a tied embedding do not fit together; many layouts share one."""
        parallel, schedule = config.parallel, config.pipeline.schedule
        key: tuple = parallel.pp, parallel.vpp, schedule, tuple(micro_batch_counts(config, self.world))
        if schedule == "auto":  # it weighs communication against computation
            key += repr(parallel), repr(config.train)
        if key not in self._plans:
            self._plans[key] = None
            with suppress(ValueError):
                self._plans[key] = planned_pipeline(config, self.world)
        return self._plans[key]

    def _runs(self, change: Change) -> bool:
        """Whether it is legal, schedule, layers and tied embedding included."""
        config = changed(self.config, change)
        return not broken_laws(config, self.world, without=FILE_LAWS) and self._plan(config) is not None

    def _price(self, change: Change) -> StepCost:
        config = changed(self.config, change)
        return self._estimator.step(config, self.world, self._plan(config))

    def _need(self, change: Change, have: int) -> int:
        """Bytes of the rank that needs most; the ends of the pipeline, which usually do, are asked first."""
        config = changed(self.config, change)
        forecaster, most = Forecaster(config, self.world, self._target, self._plan(config)), 0
        for rank in dict.fromkeys((0, config.parallel.pp - 1, *range(config.parallel.pp))):
            most = max(most, forecaster.rank(rank).needed)
            if most > have:
                break
        return most


def _value(config: Config, key: str) -> Any:
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def _seconds(prices: Prices, unit: Unit) -> float:
    """One micro-batch's forward and backward of a unit, its all-to-alls with it."""
    total = 0.0
    for op in "FB":
        kinds, a2a = prices.stage([unit], op)
        total += sum(kinds.values()) + a2a
    return total


def _kept_bytes(config: Config, prices: Prices, units: Sequence[tuple[Unit, int]], m: int) -> float:
    """What the first rank of 1F1B surely keeps of its micro-batches.

    Args:
        config: with the micro-batch and what is recomputed of it.
        prices: of the layout.
        units: that the rank may hold all of, and how many of each: the layers; without a pipeline also the ends.
        m: micro-batches of a step.
    """
    mode, parts = config.recompute.mode, config.recompute.parts
    if config.recompute.offload:
        return 0.0
    if mode == "full" or parts != RecomputeConfig().parts:  # of other parts no share was measured
        of_one = message_bytes(prices.config) // prices.config.train.mbs  # the prices' own micro-batch is the given one
        kept = float(config.model.num_layers * of_one * config.train.mbs)
    else:
        made = sum(count * unit.passes["F"].made_bytes * KEPT[mode][unit.expert > 0] for unit, count in units)
        kept = made / math.sqrt(config.parallel.tp)
    return kept * min(1.0, m / config.parallel.pp)

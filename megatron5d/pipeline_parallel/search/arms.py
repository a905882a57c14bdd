"""Evolution on several placements at once: every turn serves those that still promise something."""

from collections.abc import Sequence

import numpy as np

from megatron5d.pipeline_parallel.search.evolve import Evolution
from megatron5d.pipeline_parallel.search.policy import starting_points
from megatron5d.pipeline_parallel.search.problem import Clock, Contender, Problem
from megatron5d.pipeline_parallel.search.timeline import IS_COMPILED

FINALISTS = 2
"""Policies of each arm left at the end whose Programs are made, where there is time for several."""
ELITES = 8
"""Policies that go on from one size of the problem to the next."""
STEP = 0.3
"""Spread of the first candidates around a policy; priorities of the plain policy lie 1 apart."""
PATIENCE = 60
"""Generations without progress after which evolution starts again around the best policy."""
TURNS_TO_DROP = 4
"""Turns after which the last of the arms is dropped, until two are left."""


class Arm:
    """Evolution on one problem.

    Args:
        problem: what policies are tried on.
        starts: policies to begin with, all tried where that takes milliseconds; evolution goes on around the best.
        seed: of the only source of chance.
        clock: counts what is tried here, and ends it.
    """

    def __init__(self, problem: Problem, starts: Sequence[np.ndarray], seed: Sequence[int], clock: Clock) -> None:
        self.problem, self._clock = problem, clock
        self._rng = np.random.default_rng(list(seed))
        self.elites: list[tuple[float, np.ndarray]] = []
        for numbers in starts:
            if not self.elites or IS_COMPILED or clock.share() < 1:
                self._try(numbers)
        self._evolution, self._idle = Evolution(self.elites[0][1], STEP, self._rng), 0

    @property
    def best(self) -> float:
        """The shortest makespan so far; STUCK or more where no policy came through."""
        return self.elites[0][0]

    def generation(self) -> None:
        """Tries one generation, or what the clock allows of it."""
        before, makespans = self.best, []
        for numbers in self._evolution.ask():
            if self._clock.share() >= 1:
                return
            makespans.append(self._try(numbers))
        self._evolution.tell(np.array(makespans))
        self._idle = 0 if self.best < before - 1e-9 else self._idle + 1
        if self._idle >= PATIENCE or self._evolution.step < STEP / 100:
            self._evolution, self._idle = Evolution(self.elites[0][1], STEP, self._rng), 0

    def _try(self, numbers: np.ndarray) -> float:
        makespan = self.problem.makespan(numbers)
        self._clock.used += 1
        if len(self.elites) < ELITES or makespan < self.elites[-1][0] - 1e-9:
            self.elites = sorted([*self.elites, (makespan, numbers)], key=lambda elite: elite[0])[:ELITES]
        return makespan


def evolve(levels: Sequence[Sequence[Problem]], seed: int, clock: Clock, until: float, count: int) -> list[Contender]:
    """Returns the best Programs of the last level, called `auto`, the fastest first; nothing where all get stuck.

    Args:
        levels: the same problems in every level, from the smallest size to the one that is asked for; only those that
            one level does not drop are tried in the next.
        seed: of all chance.
        clock: what may be spent.
        until: share of it that all levels together may spend; most of that goes to the first.
        count: the most Programs to return.
    """
    pools = {index: starting_points(problem.num_lanes) for index, problem in enumerate(levels[0])}
    alive: list[Arm] = []
    for level, problems in enumerate(levels):
        arms = {index: Arm(problems[index], pool, (seed, level, index), clock) for index, pool in pools.items()}
        share = until * (1 - 0.3 ** (level + 1) if level + 1 < len(levels) else 1.0)
        alive = _take_turns(list(arms.values()), clock, share)
        pools = {index: [numbers for _, numbers in arm.elites] for index, arm in arms.items() if arm in alive}
    finalists = [(*elite, arm.problem) for arm in alive for elite in arm.elites[:FINALISTS]]
    contenders: list[Contender] = []
    for makespan, numbers, problem in sorted(finalists, key=lambda finalist: finalist[2].promise(finalist[0]))[:count]:
        program = problem.program(numbers)
        if program is not None:
            contenders.append(Contender(program, problem, makespan))
    return contenders


def _take_turns(alive: list[Arm], clock: Clock, until: float) -> list[Arm]:
    """Lets every arm try a generation in turn; returns those that are not dropped.

    An arm that cannot come below what another one has is dropped at once.
    """
    turn, reached = 0, min(arm.best for arm in alive)
    alive = [arm for arm in alive if arm.best <= reached or arm.problem.bound < reached]
    while clock.share() < until:
        for arm in alive:
            if clock.share() < until:
                arm.generation()
        turn += 1
        if turn % TURNS_TO_DROP == 0 and len(alive) > 2:
            alive.remove(max(alive, key=lambda arm: arm.problem.promise(arm.best)))
    return alive

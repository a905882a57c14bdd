"""Search for a Program: evolution over the policies of a list scheduler, then local search on what it found."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache as keep
from pathlib import Path

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.program import loop_placement
from megatron5d.pipeline_parallel.search.arms import evolve
from megatron5d.pipeline_parallel.search.cache import file_for, load, store
from megatron5d.pipeline_parallel.search.clock import Clock
from megatron5d.pipeline_parallel.search.compiled import IS_COMPILED
from megatron5d.pipeline_parallel.search.lanes import PAIRS
from megatron5d.pipeline_parallel.search.model import CostModel, are_equal, is_even
from megatron5d.pipeline_parallel.search.named import best_named
from megatron5d.pipeline_parallel.search.placements import called, candidates, placement_called
from megatron5d.pipeline_parallel.search.policy import flat, plain_policy
from megatron5d.pipeline_parallel.search.problem import Contender, Problem
from megatron5d.pipeline_parallel.search.refine import refine
from megatron5d.pipeline_parallel.search.result import SearchResult
from megatron5d.pipeline_parallel.simulate import lower_bound, simulate
from megatron5d.pipeline_parallel.verify import verify

SMALL_RANKS = 16
"""Policies for more ranks than this are first searched for at this many, where all stages are alike."""
EVOLUTION = 0.25
"""Share of what may be spent that evolution gets; the rest is for the local search, which gains where it ends."""
HEATS = 0.4
"""Share at which the local search goes on with one Program alone, the most promising of those that it tried."""
TRIED = 4
"""Programs that the local search tries: which of them it makes fastest, their makespans do not tell."""
LARGE = 1 << 17
"""Actions of a problem from which on there is time for one Program alone."""


def search_program(
    pp: int,
    num_microbatches: int,
    splits: Sequence[CostModel],
    *,
    memory: float,
    copies: int = 1,
    seconds: float | None = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
    placements: Collection[str] | None = None,
    pairs: Collection[str] = PAIRS,
    cache: Path | None = None,
) -> SearchResult:
    """Returns the fastest Program found under a memory cap, never slower than the best named schedule that fits.

    The result follows from the arguments alone where `evaluations` ends the search and not `seconds`.

    Args:
        pp: pipeline ranks.
        num_microbatches: of one step, over both directions where there are two.
        splits: the costs under every way to deal the layers to stages, of which the search chooses one.
        memory: the most activations a rank may hold, in micro-batches of one rank's layers.
        copies: the most copies of every parameter; 2 admits the bidirectional placement.
        seconds: time limit of the evolution; None = none.
        evaluations: the most list schedules to try (32 moves count as one); None = no limit, 0 = only known policies.
        seed: of all chance.
        placements: names such as `loop:4`, `zigzag:2`, `mirrored`; None = all usual ones.
        pairs: which actions may overlap, of PAIRS.
        cache: folder in which results are kept under a hash of all arguments, and taken from; None = neither.

    Raises:
        ValueError: Bad sizes, an unknown placement, or a cap that no schedule found fits.
    """
    _check(pp, num_microbatches, copies, seconds, evaluations)
    problems = _problems(pp, num_microbatches, splits, memory, copies, placements, pairs)
    file = file_for(cache, problems, [seconds, evaluations, seed]) if cache else None
    if file and file.exists():
        return _checked(load(file), problems)
    _compile()
    clock = Clock(seconds, evaluations)
    floor, tried = sorted(_named(problems, splits), key=lambda one: one.makespan)[:1], _num_tried(problems)
    contenders = floor + evolve(_levels(problems, splits, num_microbatches), seed, clock, EVOLUTION, tried)
    contenders += _refined(_most_promising(contenders, tried), clock)
    result = _best(contenders, len(floor), problems[0].memory, clock)
    if file:
        store(file, result)
    return result


@keep
def _compile() -> None:
    """Has everything compiled before the clock starts; it takes seconds where numba has not kept it on disk yet."""
    placement = loop_placement(2)
    problem = Problem("loop:1", placement, 2, Costs().of(placement), np.full(2, 2.0))
    program = problem.program(flat(plain_policy(1))) if IS_COMPILED else None
    if program is not None:
        refine(program, problem.costs, problem.memory, PAIRS, Clock(None, 1), 1.0)


def _checked(result: SearchResult, problems: Sequence[Problem]) -> SearchResult:
    """Returns a result from disk after `verify` has accepted its Program, as it does those found anew."""
    problem = next(p for p in problems if (p.placement, p.split) == (result.program.placement, result.split))
    verify(result.program, problem.memory.tolist(), problem.costs)
    return result


def _problems(pp, num_microbatches, splits, memory, copies, placements, pairs) -> list[Problem]:
    """Returns a problem for every placement that has these stages and no more copies, and every split that differs."""
    caps = np.full(pp, float(memory))
    names = list(placements) if placements is not None else candidates(pp, copies)
    problems: list[Problem] = []
    for name in names:
        placement = placement_called(name, pp)
        for split, costs in enumerate(splits if placement.copies <= copies else ()):
            try:
                stage_costs = costs.of(placement)
            except ValueError:
                if len(splits) == 1:
                    raise
                continue  # it has not the layers for these stages; another split has
            known = [problem.costs for problem in problems if problem.name == name]
            if not any(are_equal(stage_costs, other) for other in known):
                problems.append(Problem(name, placement, num_microbatches, stage_costs, caps, tuple(pairs), split))
    if not problems:
        raise ValueError(f"none of the placements {', '.join(names)} has at most {copies} copies")
    return problems


def _check(pp: int, num_microbatches: int, copies: int, seconds: float | None, evaluations: int | None) -> None:
    if pp < 1 or num_microbatches < 1:
        raise ValueError(f"parallel.pp={pp} and num_microbatches={num_microbatches}: both must be at least 1")
    if copies not in (1, 2):
        raise ValueError(f"copies={copies}: a stage has 1 copy, or 2 where micro-batches go both ways")
    if seconds is None and evaluations is None:
        raise ValueError("seconds=None and evaluations=None: one of them must end the search; set seconds=10")


def _named(problems: list[Problem], splits: Sequence[CostModel]) -> Iterator[Contender]:
    """Yields the best named schedule for every split, if any fits."""
    for split, costs in enumerate(splits):
        mine = {problem.name: problem for problem in problems if problem.split == split}
        for problem in list(mine.values())[:1]:
            pp = problem.placement.num_ranks
            program = best_named(pp, problem.num_microbatches, costs, problem.memory, mine)
            if program is not None:
                problem = mine[called(program.placement)]
                yield Contender(program, problem, simulate(program, problem.costs).makespan)


def _levels(problems: list[Problem], splits: Sequence[CostModel], num_microbatches: int) -> list[list[Problem]]:
    """Returns the problems at growing sizes, the last one as it is: what is learnt at small sizes serves large ones."""
    pp = problems[0].placement.num_ranks
    sizes = [(pp, num_microbatches)]
    if num_microbatches > 8 * pp or (pp > SMALL_RANKS and num_microbatches > 4 * pp):
        sizes.insert(0, (pp, 4 * pp))
    if pp > SMALL_RANKS and all(map(is_even, splits)):
        sizes.insert(0, (SMALL_RANKS, min(num_microbatches, 4 * SMALL_RANKS)))
    return [[_resized(problem, splits[problem.split], *size) for problem in problems] for size in sizes]


def _resized(problem: Problem, costs: CostModel, pp: int, num_microbatches: int) -> Problem:
    if pp == problem.placement.num_ranks:
        return replace(problem, num_microbatches=num_microbatches)
    placement = placement_called(problem.name, pp)
    memory = problem.memory[:pp] * (pp / problem.placement.num_ranks)
    return replace(
        problem, placement=placement, num_microbatches=num_microbatches, costs=costs.of(placement), memory=memory
    )


def _num_tried(problems: list[Problem]) -> int:
    return 1 if max(problem.num_actions for problem in problems) >= LARGE else TRIED


def _most_promising(contenders: list[Contender], count: int) -> list[Contender]:
    """Returns the most promising of some Programs, each once, the best first."""
    distinct: list[Contender] = []
    for contender in sorted(contenders, key=lambda contender: contender.promise):
        if len(distinct) < count and all(contender.program != other.program for other in distinct):
            distinct.append(contender)
    return distinct


def _refined(tried: list[Contender], clock: Clock) -> list[Contender]:
    """Returns what the local search makes of some Programs, and then of the one that promises most."""
    begin, refined = clock.share(), list[Contender]()
    heats = tried if len(tried) > 1 else []
    for place, contender in enumerate(heats, 1):
        refined.append(_moved_on(contender, clock, begin + (HEATS - begin) * place / len(heats)))
    return refined + [_moved_on(contender, clock, 1.0) for contender in _most_promising(refined or tried, 1)]


def _moved_on(contender: Contender, clock: Clock, until: float) -> Contender:
    problem = contender.problem
    program = refine(contender.program, problem.costs, problem.memory, problem.pairs, clock, until)
    return Contender(program, problem, simulate(program, problem.costs).makespan)


def _best(contenders: list[Contender], named: int, caps: np.ndarray, clock: Clock) -> SearchResult:
    """Returns the figures of the fastest contender, after `verify` has accepted it; the named one where they tie.

    Args:
        contenders: A named one first.
        named: how many of them are named ones, 0 or 1.
        caps: `[pp]` the most activations a rank may hold.
        clock: what was spent.
    """
    if not contenders:
        pp = len(caps)
        raise ValueError(
            f"no schedule found holds at most {caps.min():g} micro-batches of one rank's layers at parallel.pp={pp}; "
            f"raise the memory (1f1b holds {pp}), or name placements with more chunks"
        )
    program, problem, _ = min(contenders, key=lambda contender: round(contender.makespan, 9))
    result = simulate(program, problem.costs)
    verify(program, caps.tolist(), problem.costs)
    cap = float(caps.max())
    return SearchResult(
        program=program,
        makespan=result.makespan,
        overhead=result.overhead,
        bubble=result.bubble,
        peak=result.peak_activations,
        lower_bound=lower_bound(program.placement, problem.costs, program.num_microbatches, cap),
        placement=called(program.placement),
        evaluations=round(clock.used),
        elapsed_s=clock.elapsed_s,
        compiled=IS_COMPILED,
        named=(contenders[0].program.name, contenders[0].makespan) if named else None,
        split=problem.split,
    )

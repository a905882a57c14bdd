"""Search for a Program: evolution over the policies of a list scheduler, then local search on what it found."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache as keep
from pathlib import Path

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import Program, loop_placement
from megatron5d.pipeline_parallel.search.arms import evolve
from megatron5d.pipeline_parallel.search.cache import file_for, load, store
from megatron5d.pipeline_parallel.search.clock import Clock
from megatron5d.pipeline_parallel.search.compiled import IS_COMPILED
from megatron5d.pipeline_parallel.search.lanes import PAIRS
from megatron5d.pipeline_parallel.search.model import CostModel, costs_on, is_even
from megatron5d.pipeline_parallel.search.named import best_named
from megatron5d.pipeline_parallel.search.placements import called, candidates, placement_called
from megatron5d.pipeline_parallel.search.policy import flat, plain_policy
from megatron5d.pipeline_parallel.search.problem import Problem
from megatron5d.pipeline_parallel.search.refine import refine
from megatron5d.pipeline_parallel.search.result import SearchResult
from megatron5d.pipeline_parallel.search.shipped import starting_points
from megatron5d.pipeline_parallel.simulate import lower_bound, simulate
from megatron5d.pipeline_parallel.verify import verify

SMALL_RANKS = 16
"""Policies for more ranks than this are first searched for at this many, where all stages are alike."""
EVOLUTION = 0.25
"""Share of what may be spent that evolution gets; the rest is for the local search, which gains where it ends."""


def search_program(
    pp: int,
    num_microbatches: int,
    costs: CostModel | StageCosts,
    *,
    memory: float | Sequence[float],
    copies: int = 1,
    seconds: float | None = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
    placements: Collection[str] | None = None,
    pairs: Collection[str] = PAIRS,
    cache: Path | None = None,
) -> SearchResult:
    """Return the fastest Program found under a memory cap, never slower than the best named schedule that fits.

    The result follows from the arguments alone where `evaluations` ends the search and not `seconds`.

    Args:
        pp: Pipeline ranks.
        num_microbatches: Of one step, over both directions where there are two.
        costs: Of any placement (`Costs`, or another CostModel), or of every stage where the number of stages is fixed.
        memory: The most activations a rank may hold, in micro-batches of one rank's layers; one number or one a rank.
        copies: The most copies of every parameter; 2 admits the bidirectional placement.
        seconds: Time limit of the evolution; None = none.
        evaluations: The most list schedules to try; None = as the time admits. 0 = only the policies known before.
        seed: Of all chance.
        placements: Names such as `loop:4`, `zigzag:2`, `mirrored`; None = all usual ones.
        pairs: Which actions may overlap, of F&I, F&W, I&W.
        cache: Folder in which results are kept under a hash of all arguments, and taken from; None = neither.

    Raises:
        ValueError: Bad sizes, an unknown placement, or a cap that no schedule found fits.
    """
    _check(pp, num_microbatches, copies, seconds, evaluations)
    problems = _problems(pp, num_microbatches, costs, memory, copies, placements, pairs)
    file = file_for(cache, problems, [seconds, evaluations, seed]) if cache else None
    if file and file.exists():
        return _checked(load(file), problems)
    _compile()
    clock = Clock(seconds, evaluations)
    floor = best_named(pp, num_microbatches, costs, problems[0].memory, [problem.name for problem in problems])
    starts = [starting_points(problem.num_lanes) for problem in problems]
    found = evolve(_levels(problems, costs, num_microbatches), starts, seed, clock, EVOLUTION)
    contenders = [program for program in (floor, found) if program]
    contenders += [_refined(program, problems, costs, clock) for program in _fastest(contenders, costs)]
    result = _best(contenders, floor, costs, problems[0].memory, clock)
    if file:
        store(file, result)
    return result


@keep
def _compile() -> None:
    """Have everything compiled before the clock starts; it takes seconds where numba has not kept it on disk yet."""
    placement = loop_placement(2)
    problem = Problem("loop:1", placement, 2, Costs().of(placement), np.full(2, 2.0))
    program = problem.program(flat(plain_policy(1)), "auto") if IS_COMPILED else None
    if program is not None:
        refine(program, problem.costs, problem.memory, PAIRS, Clock(None, 1), 1.0)


def _checked(result: SearchResult, problems: Sequence[Problem]) -> SearchResult:
    """Return a result from disk after `verify` has accepted its Program, as it does those found anew."""
    problem = next(p for p in problems if p.placement == result.program.placement)
    verify(result.program, problem.memory.tolist(), problem.costs)
    return result


def _problems(pp, num_microbatches, costs, memory, copies, placements, pairs) -> list[Problem]:
    """Return a problem for every placement that has these stages and no more copies."""
    caps = np.broadcast_to(np.asarray(memory, dtype=float), (pp,))
    names = list(placements) if placements is not None else candidates(pp, copies)
    problems = []
    for name in names:
        placement = placement_called(name, pp)
        stage_costs = costs_on(costs, placement) if placement.copies <= copies else None
        if stage_costs is not None:
            problems.append(Problem(name, placement, num_microbatches, stage_costs, caps, tuple(pairs)))
    if not problems:
        raise ValueError(f"none of the placements {', '.join(names)} has at most {copies} copies and these stages")
    return problems


def _check(pp: int, num_microbatches: int, copies: int, seconds: float | None, evaluations: int | None) -> None:
    if pp < 1 or num_microbatches < 1:
        raise ValueError(f"parallel.pp={pp} and num_microbatches={num_microbatches}: both must be at least 1")
    if copies not in (1, 2):
        raise ValueError(f"copies={copies}: a stage has 1 copy, or 2 where micro-batches go both ways")
    if seconds is None and evaluations is None:
        raise ValueError("seconds=None and evaluations=None: one of them must end the search; set seconds=10")


def _levels(problems: list[Problem], costs: CostModel | StageCosts, num_microbatches: int) -> list[list[Problem]]:
    """Return the problems at growing sizes, the last one as it is: what is learnt at small sizes serves large ones."""
    pp = problems[0].placement.num_ranks
    even_caps = len(set(problems[0].memory.tolist())) == 1
    sizes = [(pp, num_microbatches)]
    if num_microbatches > 8 * pp or (pp > SMALL_RANKS and num_microbatches > 4 * pp):
        sizes.insert(0, (pp, 4 * pp))
    if pp > SMALL_RANKS and is_even(costs) and even_caps:
        sizes.insert(0, (SMALL_RANKS, min(num_microbatches, 4 * SMALL_RANKS)))
    return [[_resized(problem, costs, *size) for problem in problems] for size in sizes]


def _resized(problem: Problem, costs: CostModel | StageCosts, pp: int, num_microbatches: int) -> Problem:
    if pp == problem.placement.num_ranks:
        return replace(problem, num_microbatches=num_microbatches)
    placement = placement_called(problem.name, pp)
    stage_costs = costs_on(costs, placement)
    assert stage_costs is not None
    memory = problem.memory[:pp] * (pp / problem.placement.num_ranks)
    return Problem(problem.name, placement, num_microbatches, stage_costs, memory, problem.pairs)


def _fastest(contenders: list[Program], costs: CostModel | StageCosts) -> list[Program]:
    """Return the fastest Program in a list, or none."""
    times = [simulate(program, _stage_costs(costs, program)).makespan for program in contenders]
    return contenders[times.index(min(times)) :][:1] if times else []


def _refined(program: Program, problems: Sequence[Problem], costs: CostModel | StageCosts, clock: Clock) -> Program:
    problem = problems[0]
    return refine(program, _stage_costs(costs, program), problem.memory, problem.pairs, clock, 1.0)


def _stage_costs(costs: CostModel | StageCosts, program: Program) -> StageCosts:
    found = costs_on(costs, program.placement)
    assert found is not None, f"{program.name} has stages that the costs do not know"
    return found


def _best(contenders: list[Program], floor: Program | None, costs, caps: np.ndarray, clock: Clock) -> SearchResult:
    """Return the figures of the fastest contender, after `verify` has accepted it; the named one where they tie."""
    if not contenders:
        pp = len(caps)
        raise ValueError(
            f"no schedule found holds at most {caps.min():g} micro-batches of one rank's layers at parallel.pp={pp}; "
            f"raise the memory (1f1b holds {pp}), or name placements with more chunks"
        )
    results = []
    for program in contenders:
        stage_costs = _stage_costs(costs, program)
        results.append((simulate(program, stage_costs), stage_costs, program))
    result, stage_costs, program = min(results, key=lambda item: round(item[0].makespan, 9))
    verify(program, caps.tolist(), stage_costs)
    cap = float(caps.max())
    return SearchResult(
        program=program,
        makespan=result.makespan,
        overhead=result.overhead,
        bubble=result.bubble,
        peak=result.peak_activations,
        lower_bound=lower_bound(program.placement, stage_costs, program.num_microbatches, cap),
        placement=called(program.placement),
        evaluations=clock.used,
        elapsed_s=clock.elapsed_s,
        compiled=IS_COMPILED,
        named=(floor.name, results[0][0].makespan) if floor else None,
    )

"""Search for a Program: a list scheduler by shipped policies, then local search on the best that
they make.

The best named schedule that fits is a floor under the search. Results are kept on disk under a hash
of the question, so that the next run starts at once. Shipped policies are no part of the question:
a resumed run keeps its schedule when better policies are shipped.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache as keep
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import Program, loop_placement, make_program
from megatron5d.pipeline_parallel.schedule_csv import read_program, write_program
from megatron5d.pipeline_parallel.simulate import Simulation, lower_bound, simulate
from megatron5d.pipeline_parallel.verify import verify
from megatron5d.planning.schedule_search.list_scheduler import Policy, shipped_policies
from megatron5d.planning.schedule_search.local_search import refine
from megatron5d.planning.schedule_search.named import (
    PAIRS,
    CostModel,
    best_named,
    candidates,
    placement_called,
)
from megatron5d.planning.schedule_search.problem import Budget, Problem
from megatron5d.planning.schedule_search.timeline import IS_COMPILED

LARGE, TRIED, TRIAL = 1 << 17, 4, 0.1
"""Actions from which on policies are ranked with fewer micro-batches; what the local search tries, each for a TRIAL."""


@dataclass(frozen=True)
class Contender:
    """A Program that may become the result, and the problem that it solves."""

    program: Program
    problem: Problem

    @cached_property
    def simulation(self) -> Simulation:
        return simulate(self.program, self.problem.costs)


def _makespan(contender: Contender) -> float:
    """Returns how long its Program takes, rounded so that equal ones tie."""
    return round(contender.simulation.makespan, 9)


@dataclass(frozen=True)
class SearchResult:
    """The best Program found, verified."""

    program: Program  # called `auto`, or by its name where a named schedule is the best
    simulation: Simulation  # what it takes, in the unit of the costs
    # an overhead below which no Program of this placement fits in this many activations
    lower_bound: float
    placement: str  # name of the placement
    split: int  # which of several ways to deal the layers to stages it is for
    evaluations: int  # list schedules tried
    elapsed_s: float
    # the best named schedule that fits, and its makespan; None where none does
    named: tuple[str, float] | None


FORMAT = 2
"""Raised when a file or the search itself changes its meaning: older files are then not found."""


def _file_for(folder: Path, problems: Sequence[Problem], limits: Sequence[Any]) -> Path:
    """Returns where the result for these problems and limits lies, or would lie."""
    found = hashlib.sha256(json.dumps([FORMAT, *limits]).encode())
    for problem in problems:
        found.update(_described(problem))
    return folder / f"schedule-{found.hexdigest()[:32]}.json"


def _described(problem: Problem) -> bytes:
    """Returns a problem as bytes, equal for two that ask the same."""
    described = [
        problem.placement.route,
        problem.num_microbatches,
        problem.memory.tolist(),
        problem.pairs,
    ]
    costs = [
        np.asarray(getattr(problem.costs, field.name), dtype=float).tobytes()
        for field in fields(StageCosts)
    ]
    return json.dumps(described).encode() + b"".join(costs)


def _store(file: Path, result: SearchResult) -> None:
    """Writes a result beside its place and renames it: it is there whole or not at all, even if
    others write it."""
    program = result.program
    content = {
        name: getattr(result, name)
        for name in ("placement", "split", "evaluations", "elapsed_s", "named")
    }
    content |= {"name": program.name, "direction": program.direction, "csv": write_program(program)}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{id(result):x}")
    beside.write_text(json.dumps(content))
    beside.replace(file)


def _load(file: Path, problems: list[Problem]) -> SearchResult:
    """Returns a result as it was stored."""
    kept = json.loads(file.read_text())
    problem = next(
        each for each in problems if (each.name, each.split) == (kept["placement"], kept["split"])
    )
    ranks = read_program(
        kept["csv"], kept["name"], len(problem.memory), problem.num_microbatches
    ).ranks
    program = make_program(kept["name"], problem.placement, kept["direction"], ranks)
    named = tuple(kept["named"]) if kept["named"] else None
    return _result(Contender(program, problem), kept["evaluations"], kept["elapsed_s"], named)


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
    """Returns the fastest Program found under a memory cap, never slower than the best named
    schedule that fits.

    The result follows from the arguments alone where `evaluations` ends the search and not
    `seconds`.

    Args:
        pp, num_microbatches: the pipeline, and one step over both directions where there are two.
        splits: the costs under every way to deal the layers to stages, of which the search chooses
            one.
        memory: the most activations a rank may hold, in micro-batches of one rank's layers.
        copies: the most copies of every parameter; 2 admits the bidirectional placement.
        evaluations: the most list schedules to try (32 moves count as one); None = no limit, 0 =
            only shipped policies.
        seconds, seed: time limit, None = none; of all chance.
        placements: names such as `loop:4`, `zigzag:2`, `mirrored`; None = all usual ones.
        pairs, cache: which actions may overlap; folder in which results are kept and found, if any.

    Raises:
        ValueError: Bad sizes, an unknown placement, or a cap that no schedule found fits.
    """
    problems = _problems(pp, num_microbatches, splits, memory, copies, placements, pairs)
    file = _file_for(cache, problems, [seconds, evaluations, seed]) if cache else None
    if file and file.exists():
        return _load(file, problems)
    _compile()
    budget = Budget(seconds, evaluations)
    named = min(_named(problems, splits), key=_makespan, default=None)
    best = _fastest(problems, named, budget, seed)
    floor = (named.program.name, _makespan(named)) if named else None
    result = _result(best, round(budget.used), budget.elapsed_s, floor)
    if file:
        _store(file, result)
    return result


def _fastest(
    problems: list[Problem], named: Contender | None, budget: Budget, seed: int
) -> Contender:
    """Returns what the local search makes of the fastest Program known, or that where it becomes no
    faster."""
    memory = problems[0].memory
    found = [*([named] if named else []), *_list_scheduled(problems, budget)]
    if not found:
        raise ValueError(
            f"no schedule found holds at most {memory.max():g} micro-batches of one rank's layers at parallel.pp="
            f"{len(memory)}; raise the memory (1f1b holds {len(memory)}), or name placements with more chunks"
        )
    tried, after = (
        sorted(found, key=_makespan)[: TRIED if problems[0].num_actions < LARGE else 1],
        list[Contender](),
    )
    for until in [*(TRIAL * (place + 1) for place in range(len(tried))), 1.0]:
        start = tried.pop(0) if tried else min(after, key=_makespan)
        after.append(
            Contender(refine(start.program, start.problem, budget, until, seed), start.problem)
        )
    return min([*found, *after], key=_makespan)  # the first where they tie


@keep
def _compile() -> None:
    """Compiles everything before the budget's time runs; it takes half a minute where numba has not
    cached it yet."""
    placement = loop_placement(2)
    problem = Problem(placement, 2, Costs().of(placement), np.full(2, 2.0))
    if IS_COMPILED and (program := problem.program(shipped_policies(1)[0])):
        refine(program, problem, Budget(None, 1), 1.0)


def _problems(pp, num_microbatches, splits, memory, copies, placements, pairs) -> list[Problem]:
    """Returns a problem for every placement that has these stages and no more copies, and every
    split that differs."""
    if min(pp, num_microbatches) < 1 or copies not in (1, 2):
        raise ValueError(
            f"parallel.pp={pp}, num_microbatches={num_microbatches}, copies={copies}: copies are 1 or 2"
        )
    names = list(placements) if placements is not None else candidates(pp, copies)
    problems: dict[bytes, Problem] = {}
    for name in names:
        placement = placement_called(name, pp)
        for split, costs in enumerate(splits if placement.copies <= copies else ()):
            try:
                stage_costs = costs.of(placement)
            except ValueError:
                if len(splits) == 1:
                    raise
                continue  # it has not the layers for these stages; another split has
            problem = Problem(
                placement,
                num_microbatches,
                stage_costs,
                np.full(pp, float(memory)),
                tuple(pairs),
                split,
            )
            problems.setdefault(_described(problem), problem)
    if not problems:
        raise ValueError(f"none of the placements {', '.join(names)} has at most {copies} copies")
    return list(problems.values())


def _named(problems: list[Problem], splits: Sequence[CostModel]) -> Iterator[Contender]:
    """Yields the best named schedule for every split, if any fits."""
    m, memory = problems[0].num_microbatches, problems[0].memory
    for split, costs in enumerate(splits):
        admitted = {problem.placement: problem for problem in problems if problem.split == split}
        program = best_named(
            len(memory), m, costs, memory, [problem.name for problem in admitted.values()]
        )
        if program is not None:
            yield Contender(program, admitted[program.placement])


def _list_scheduled(problems: list[Problem], budget: Budget) -> list[Contender]:
    """Returns the fastest Programs that shipped policies make; none where all get stuck."""
    few = min(problems[0].num_microbatches, 4 * len(problems[0].memory))
    small = [
        replace(one, num_microbatches=few) if one.num_actions >= LARGE else one for one in problems
    ]
    tried = list[tuple[float, int, Policy]]()
    for policies in zip(*(shipped_policies(problem.num_streams) for problem in problems)):
        for index, policy in enumerate(policies):
            if IS_COMPILED or len(tried) < len(problems) or budget.share() < 1:
                tried.append((small[index].makespan(policy), index, policy))
                budget.used += 1
    ranking = sorted(tried, key=itemgetter(0))[:TRIED]
    programs = [(problems[index].program(policy), problems[index]) for _, index, policy in ranking]
    return [Contender(program, problem) for program, problem in programs if program]


def _result(
    best: Contender, evaluations: int, elapsed_s: float, named: tuple[str, float] | None
) -> SearchResult:
    """Returns a Program with its figures, after `verify` has accepted it."""
    program, problem, memory = best.program, best.problem, best.problem.memory
    verify(program, memory.tolist(), problem.costs)
    bound = lower_bound(
        program.placement, problem.costs, program.num_microbatches, float(memory.max())
    )
    return SearchResult(
        program, best.simulation, bound, problem.name, problem.split, evaluations, elapsed_s, named
    )

"""Search for a Program: a list scheduler by shipped policies, then local search on its best
results.

The result is never slower than the best named schedule that fits. Results are kept on disk under a
hash of the problem, so that the next run starts at once. Shipped policies are not part of the hash:
a resumed run keeps its schedule when better policies are shipped.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache as memoize
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
from megatron5d.planning.schedule_search.named_schedules import (
    PAIRS,
    CostModel,
    best_named_program,
    default_placements,
    placement_by_name,
)
from megatron5d.planning.schedule_search.problem import Budget, Problem
from megatron5d.planning.schedule_search.timeline import IS_COMPILED

LARGE = 1 << 17
"""Number of actions from which policies are ranked with fewer micro-batches."""
NUM_STARTS, START_SHARE = 4, 0.1
"""Number of Programs from which the local search starts, and the share of the budget of each."""


@dataclass(frozen=True)
class Contender:
    """A Program that may become the result, and the problem that it solves."""

    program: Program
    problem: Problem

    @cached_property
    def simulation(self) -> Simulation:
        return simulate(self.program, self.problem.costs)


def _makespan(contender: Contender) -> float:
    """The makespan, rounded so that equal ones tie."""
    return round(contender.simulation.makespan, 9)


@dataclass(frozen=True)
class SearchResult:
    """The fastest Program of a search, verified."""

    program: Program  # named `auto`, or by its own name if a named schedule is the best
    simulation: Simulation  # in the unit of the costs
    # an overhead below which no Program of this placement fits in this many activations
    lower_bound: float
    placement: str  # name of the placement
    split: int  # index of the division of layers over stages that it is for
    evaluations: int  # list schedules tried
    elapsed_s: float
    # the best named schedule that fits, and its makespan; None if none does
    named: tuple[str, float] | None


FORMAT = 2
"""Version of files and of the search itself, part of the hash: a new one ignores older files."""


def _file_for(folder: Path, problems: Sequence[Problem], limits: Sequence[Any]) -> Path:
    """The file with the result for these problems and limits, which need not exist."""
    digest = hashlib.sha256(json.dumps([FORMAT, *limits]).encode())
    for problem in problems:
        digest.update(_described(problem))
    return folder / f"schedule-{digest.hexdigest()[:32]}.json"


def _described(problem: Problem) -> bytes:
    """A problem as bytes, equal for two problems that are equal but for their split."""
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


STORED_FIELDS = ("placement", "split", "evaluations", "elapsed_s", "named")


def _store(file: Path, result: SearchResult) -> None:
    """Writes a result to a temporary file and renames it, so that readers never see half a file."""
    program = result.program
    content = {name: getattr(result, name) for name in STORED_FIELDS}
    content |= {"name": program.name, "direction": program.direction, "csv": write_program(program)}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{id(result):x}")
    temporary.write_text(json.dumps(content))
    temporary.replace(file)


def _load(file: Path, problems: list[Problem]) -> SearchResult:
    """Reads a result that `_store` has written."""
    content = json.loads(file.read_text())
    placement, split, evaluations, elapsed_s, named = (content[name] for name in STORED_FIELDS)
    problem = next(
        problem for problem in problems if (problem.name, problem.split) == (placement, split)
    )
    name, num_ranks = content["name"], len(problem.memory)
    ranks = read_program(content["csv"], name, num_ranks, problem.num_microbatches).ranks
    program = make_program(name, problem.placement, content["direction"], ranks)
    named = tuple(named) if named else None
    return _result(Contender(program, problem), evaluations, elapsed_s, named)


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
    """Searches for the fastest Program under a memory cap.

    The result follows from the arguments alone if `evaluations` ends the search and not `seconds`.

    Args:
        pp: pipeline ranks.
        num_microbatches: of one step, over both directions where there are two.
        splits: the costs of each division of layers over stages, of which the search chooses one.
        memory: the most activations a rank may hold, in micro-batches of one rank's layers.
        copies: the most copies of every parameter; 2 admits the bidirectional placement.
        seconds: time limit; None = none.
        evaluations: the most list schedules to try (32 moves count as one); None = no limit, 0 =
            only shipped policies.
        seed: of all random choices.
        placements: names such as `loop:4`, `zigzag:2`, `mirrored`; None = the default ones.
        pairs: which actions may overlap.
        cache: folder that keeps results; None = none.

    Raises:
        ValueError: wrong sizes, an unknown placement, or a cap under which no schedule fits.
    """
    problems = _problems(pp, num_microbatches, splits, memory, copies, placements, pairs)
    file = _file_for(cache, problems, [seconds, evaluations, seed]) if cache else None
    if file and file.exists():
        return _load(file, problems)
    _compile()
    budget = Budget(seconds, evaluations)
    named = min(_named(problems, splits), key=_makespan, default=None)
    best = _fastest(problems, named, budget, seed)
    named_makespan = (named.program.name, _makespan(named)) if named else None
    result = _result(best, round(budget.used), budget.elapsed_s, named_makespan)
    if file:
        _store(file, result)
    return result


def _fastest(
    problems: list[Problem], named: Contender | None, budget: Budget, seed: int
) -> Contender:
    """The fastest contender: named, list-scheduled, or refined by the local search."""
    memory = problems[0].memory
    contenders = [*([named] if named else []), *_list_scheduled(problems, budget)]
    if not contenders:
        raise ValueError(
            f"no schedule holds at most {memory.max():g} micro-batches of one rank's layers at "
            f"parallel.pp={len(memory)}; raise the memory (1f1b holds {len(memory)}), or name "
            "placements with more chunks"
        )
    num_starts = NUM_STARTS if problems[0].num_actions < LARGE else 1
    starts = sorted(contenders, key=_makespan)[:num_starts]
    refined: list[Contender] = []
    for number, start in enumerate(starts, 1):
        refined.append(_refine(start, budget, START_SHARE * number, seed))
    refined.append(_refine(min(refined, key=_makespan), budget, 1.0, seed))
    return min([*contenders, *refined], key=_makespan)  # the first where they tie


def _refine(start: Contender, budget: Budget, until: float, seed: int) -> Contender:
    program = refine(start.program, start.problem, budget, until, seed)
    return Contender(program, start.problem)


@memoize
def _compile() -> None:
    """Compiles everything before the budget's time runs: half a minute if nothing is cached."""
    placement = loop_placement(2)
    problem = Problem(placement, 2, Costs().of(placement), np.full(2, 2.0))
    if IS_COMPILED and (program := problem.program(shipped_policies(1)[0])):
        refine(program, problem, Budget(None, 1), 1.0)


def _problems(pp, num_microbatches, splits, memory, copies, placements, pairs) -> list[Problem]:
    """A problem for every admitted placement and every split whose costs differ."""
    if min(pp, num_microbatches) < 1 or copies not in (1, 2):
        raise ValueError(
            f"parallel.pp={pp}, num_microbatches={num_microbatches}, copies={copies}: sizes must "
            "be at least 1, and copies 1 or 2"
        )
    names = list(placements) if placements is not None else default_placements(pp, copies)
    problems: dict[bytes, Problem] = {}
    for name in names:
        placement = placement_by_name(name, pp)
        for split, costs in enumerate(splits if placement.copies <= copies else ()):
            try:
                stage_costs = costs.of(placement)
            except ValueError:
                if len(splits) == 1:
                    raise
                continue  # too few layers for these stages; another split may have enough
            cap = np.full(pp, float(memory))
            problem = Problem(placement, num_microbatches, stage_costs, cap, tuple(pairs), split)
            problems.setdefault(_described(problem), problem)
    if not problems:
        raise ValueError(f"none of the placements {', '.join(names)} has at most {copies} copies")
    return list(problems.values())


def _named(problems: list[Problem], splits: Sequence[CostModel]) -> Iterator[Contender]:
    """Yields the best named schedule for every split, if any fits."""
    m, memory = problems[0].num_microbatches, problems[0].memory
    for split, costs in enumerate(splits):
        admitted = {problem.placement: problem for problem in problems if problem.split == split}
        names = [problem.name for problem in admitted.values()]
        program = best_named_program(len(memory), m, costs, memory, names)
        if program is not None:
            yield Contender(program, admitted[program.placement])


def _list_scheduled(problems: list[Problem], budget: Budget) -> list[Contender]:
    """The fastest Programs that shipped policies make; none if all get stuck."""
    few = min(problems[0].num_microbatches, 4 * len(problems[0].memory))
    small = [
        replace(problem, num_microbatches=few) if problem.num_actions >= LARGE else problem
        for problem in problems
    ]
    tried: list[tuple[float, int, Policy]] = []
    for policies in zip(*(shipped_policies(problem.num_streams) for problem in problems)):
        for index, policy in enumerate(policies):
            if IS_COMPILED or len(tried) < len(problems) or budget.share() < 1:
                tried.append((small[index].makespan(policy), index, policy))
                budget.used += 1
    ranking = sorted(tried, key=itemgetter(0))[:NUM_STARTS]
    programs = [(problems[index].program(policy), problems[index]) for _, index, policy in ranking]
    return [Contender(program, problem) for program, problem in programs if program]


def _result(
    best: Contender, evaluations: int, elapsed_s: float, named: tuple[str, float] | None
) -> SearchResult:
    """Verifies a Program and adds its figures."""
    program, problem, memory = best.program, best.problem, best.problem.memory
    verify(program, memory.tolist(), problem.costs)
    bound = lower_bound(
        program.placement, problem.costs, program.num_microbatches, float(memory.max())
    )
    return SearchResult(
        program, best.simulation, bound, problem.name, problem.split, evaluations, elapsed_s, named
    )

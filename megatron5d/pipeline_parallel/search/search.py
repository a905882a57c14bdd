"""Search for a Program: a list scheduler by shipped policies, then local search on the best that they make.

The best named schedule that fits is a floor under the search. Results are kept on disk under a hash of the question,
so that the next run starts at once. Shipped policies are no part of the question: a resumed run keeps its schedule when
better policies are shipped.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache as keep
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import Placement, Program, loop_placement, make_program
from megatron5d.pipeline_parallel.schedule_csv import read_program, write_program
from megatron5d.pipeline_parallel.search.list_scheduler import Policy, shipped_policies
from megatron5d.pipeline_parallel.search.local_search import refine
from megatron5d.pipeline_parallel.search.named import (
    PAIRS,
    CostModel,
    best_named,
    called,
    candidates,
    placement_called,
)
from megatron5d.pipeline_parallel.search.problem import Budget, Problem
from megatron5d.pipeline_parallel.search.timeline import IS_COMPILED
from megatron5d.pipeline_parallel.simulate import lower_bound, simulate
from megatron5d.pipeline_parallel.verify import verify

HEATS = 0.4
"""Share of the budget at which the local search continues with one Program alone, the fastest of those tried."""
TRIED = 4
"""Programs that the local search tries: which of them it makes fastest, their makespans do not tell."""
FINALISTS = 2
"""Policies of one problem whose Programs are made."""
LARGE = 1 << 17
"""Actions from which on policies are ranked with fewer micro-batches, and the local search tries one Program."""


@dataclass(frozen=True)
class SearchResult:
    """The best Program found, verified; times in the unit of the costs.

    Args:
        program: called `auto`, or by its name where a named schedule is the best.
        makespan: from the first action's start to the last one's end.
        overhead: makespan − the compute of the busiest rank.
        bubble: overhead / makespan.
        peak: `[num_ranks]` activations, in micro-batches of one rank's layers.
        lower_bound: an overhead below which no Program of this placement fits in this many activations.
        placement: name of the placement.
        evaluations: list schedules tried.
        elapsed_s: time taken.
        compiled: whether numba is installed; without it a list schedule takes a hundred times as long.
        named: the best named schedule that fits, and its makespan; None where none does.
        split: which of several ways to deal the layers to stages it is for.
    """

    program: Program
    makespan: float
    overhead: float
    bubble: float
    peak: np.ndarray
    lower_bound: float
    placement: str
    evaluations: int
    elapsed_s: float
    compiled: bool
    named: tuple[str, float] | None
    split: int = 0


FORMAT = 2
"""Raised when a file or the search itself changes its meaning: older files are then not found."""


def file_for(folder: Path, problems: Sequence[Problem], limits: Sequence[Any]) -> Path:
    """Returns where the result for these problems and limits lies, or would lie."""
    found = hashlib.sha256(json.dumps([FORMAT, *limits]).encode())
    for problem in problems:
        found.update(_described(problem))
    return folder / f"schedule-{found.hexdigest()[:32]}.json"


def _described(problem: Problem) -> bytes:
    """Returns a problem as bytes, equal for two that ask the same."""
    described = [problem.placement.route, problem.num_microbatches, problem.memory.tolist(), problem.pairs]
    costs = [np.asarray(getattr(problem.costs, field.name), dtype=float).tobytes() for field in fields(StageCosts)]
    return json.dumps(described).encode() + b"".join(costs)


def store(file: Path, result: SearchResult) -> None:
    """Writes a result beside its place and renames it: it is there whole or not at all, even if others write it."""
    program = result.program
    content = {
        **{name: value for name, value in vars(result).items() if name not in ("program", "peak")},
        "peak": result.peak.tolist(),
        "name": program.name,
        "route": program.placement.route,
        "direction": program.direction,
        "csv": write_program(program),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{id(result):x}")
    beside.write_text(json.dumps(content))
    beside.replace(file)


def load(file: Path) -> SearchResult:
    """Returns a result as it was stored."""
    content = json.loads(file.read_text())
    route, direction = content.pop("route"), content.pop("direction")
    name, text, peak, named = (content.pop(key) for key in ("name", "csv", "peak", "named"))
    ranks = read_program(text, name, len(peak), len(direction)).ranks
    program = make_program(name, Placement(tuple(map(tuple, route)), len(peak)), direction, ranks)
    return SearchResult(program=program, peak=np.array(peak), named=tuple(named) if named else None, **content)


@dataclass(frozen=True)
class Contender:
    """A Program that may become the result, and the problem that it solves."""

    program: Program
    problem: Problem

    @cached_property
    def makespan(self) -> float:
        """How long it takes, rounded so that equal ones tie."""
        return round(simulate(self.program, self.problem.costs).makespan, 9)


MAKESPAN = attrgetter("makespan")


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
        seconds: time limit; None = none.
        evaluations: the most list schedules to try (32 moves count as one); None = no limit, 0 = only shipped policies.
        seed: of all chance.
        placements: names such as `loop:4`, `zigzag:2`, `mirrored`; None = all usual ones.
        pairs: which actions may overlap, of PAIRS.
        cache: folder in which results are kept under a hash of all arguments, and taken from; None = neither.

    Raises:
        ValueError: Bad sizes, an unknown placement, or a cap that no schedule found fits.
    """
    _check(pp, num_microbatches, copies, seconds, evaluations)
    problems = _problems(pp, num_microbatches, splits, np.full(pp, float(memory)), copies, placements, pairs)
    file = file_for(cache, problems, [seconds, evaluations, seed]) if cache else None
    if file and file.exists():
        return _verified(load(file), problems)
    _compile()
    budget = Budget(seconds, evaluations)
    named = min(_named(problems, splits), key=MAKESPAN, default=None)
    found = [named] if named else []
    found += _list_scheduled(problems, budget)
    found += _refined(sorted(found, key=MAKESPAN)[:TRIED], budget, seed)
    result = _result(found, named, problems[0].memory, budget)
    if file:
        store(file, result)
    return result


def _verified(result: SearchResult, problems: list[Problem]) -> SearchResult:
    problem = next(p for p in problems if (p.placement, p.split) == (result.program.placement, result.split))
    verify(result.program, problem.memory.tolist(), problem.costs)
    return result


@keep
def _compile() -> None:
    """Compiles everything before the budget's time runs; it takes half a minute where numba has not cached it yet."""
    placement = loop_placement(2)
    problem = Problem(placement, 2, Costs().of(placement), np.full(2, 2.0))
    program = problem.program(shipped_policies(1)[0]) if IS_COMPILED else None
    if program is not None:
        refine(program, problem.costs, problem.memory, PAIRS, Budget(None, 1), 1.0)


def _check(pp: int, num_microbatches: int, copies: int, seconds: float | None, evaluations: int | None) -> None:
    if pp < 1 or num_microbatches < 1:
        raise ValueError(f"parallel.pp={pp} and num_microbatches={num_microbatches}: both must be at least 1")
    if copies not in (1, 2):
        raise ValueError(f"copies={copies}: a stage has 1 copy, or 2 where micro-batches go both ways")
    if seconds is None and evaluations is None:
        raise ValueError("seconds=None and evaluations=None: one of them must end the search; set seconds=10")


def _problems(pp, num_microbatches, splits, memory, copies, placements, pairs) -> list[Problem]:
    """Returns a problem for every placement that has these stages and no more copies, and every split that differs."""
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
            problem = Problem(placement, num_microbatches, stage_costs, memory, tuple(pairs), split)
            problems.setdefault(_described(problem), problem)
    if not problems:
        raise ValueError(f"none of the placements {', '.join(names)} has at most {copies} copies")
    return list(problems.values())


def _named(problems: list[Problem], splits: Sequence[CostModel]) -> Iterator[Contender]:
    """Yields the best named schedule for every split, if any fits."""
    for split, costs in enumerate(splits):
        admitted = {problem.name: problem for problem in problems if problem.split == split}
        for problem in list(admitted.values())[:1]:
            program = best_named(len(problem.memory), problem.num_microbatches, costs, problem.memory, admitted)
            if program is not None:
                yield Contender(program, admitted[called(program.placement)])


def _list_scheduled(problems: list[Problem], budget: Budget) -> list[Contender]:
    """Returns the fastest Programs that shipped policies make, at most TRIED; none where all get stuck."""
    few = min(problems[0].num_microbatches, 4 * len(problems[0].memory))
    small = [replace(one, num_microbatches=few) if one.num_actions >= LARGE else one for one in problems]
    tried: list[list[tuple[float, int, Policy]]] = [[] for _ in problems]
    for policies in zip(*(shipped_policies(problem.num_streams) for problem in problems)):
        for index, policy in enumerate(policies):
            if IS_COMPILED or not tried[index] or budget.share() < 1:
                tried[index].append((small[index].makespan(policy), index, policy))
                budget.used += 1
    finalists = [entry for found in tried for entry in sorted(found, key=itemgetter(0))[:FINALISTS]]
    ranking = sorted(finalists, key=itemgetter(0))[:TRIED]
    programs = [(problems[index].program(policy), problems[index]) for _, index, policy in ranking]
    return [Contender(program, problem) for program, problem in programs if program is not None]


def _refined(tried: list[Contender], budget: Budget, seed: int) -> list[Contender]:
    """Returns what the local search makes of some Programs, and then of the fastest that it made of them."""
    begin, refined = budget.share(), list[Contender]()

    def refine_until(contender: Contender, until: float) -> None:
        problem = contender.problem
        program = refine(contender.program, problem.costs, problem.memory, problem.pairs, budget, until, seed)
        refined.append(Contender(program, problem))

    heats = tried if all(contender.problem.num_actions < LARGE for contender in tried) else []
    for place, contender in enumerate(heats, 1):
        refine_until(contender, begin + (HEATS - begin) * place / len(tried))
    if tried:
        refine_until(min(refined or tried, key=MAKESPAN), 1.0)
    return refined


def _result(found: list[Contender], named: Contender | None, caps: np.ndarray, budget: Budget) -> SearchResult:
    """Returns the figures of the fastest Program, after `verify` has accepted it; the first one where they tie."""
    if not found:
        pp = len(caps)
        raise ValueError(
            f"no schedule found holds at most {caps.min():g} micro-batches of one rank's layers at parallel.pp={pp}; "
            f"raise the memory (1f1b holds {pp}), or name placements with more chunks"
        )
    best = min(found, key=MAKESPAN)
    program, problem = best.program, best.problem
    result = simulate(program, problem.costs)
    verify(program, caps.tolist(), problem.costs)
    return SearchResult(
        program=program,
        makespan=result.makespan,
        overhead=result.overhead,
        bubble=result.bubble,
        peak=result.peak_activations,
        lower_bound=lower_bound(program.placement, problem.costs, program.num_microbatches, float(caps.max())),
        placement=called(program.placement),
        evaluations=round(budget.used),
        elapsed_s=budget.elapsed_s,
        compiled=IS_COMPILED,
        named=(named.program.name, named.makespan) if named else None,
        split=problem.split,
    )

"""Search for a Program: evolution over the policies of a list scheduler, then local search on what it found.

The named schedules as a floor under the search: what it returns is never worse than the best of them that fits.

What a search returns.

Results kept on disk under a hash of the question that they answer, so that the next run starts at once.

Shipped policies are no part of the question: a run that goes on keeps its schedule when better ones have been learnt.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache as keep
from pathlib import Path
from typing import Any

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import Placement, Program, loop_placement, make_program
from megatron5d.pipeline_parallel.registry import build_program, find_schedule, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import read_program, write_program
from megatron5d.pipeline_parallel.search.arms import evolve
from megatron5d.pipeline_parallel.search.local_search import refine
from megatron5d.pipeline_parallel.search.policy import PAIRS, flat, plain_policy
from megatron5d.pipeline_parallel.search.problem import (
    Clock,
    Contender,
    CostModel,
    Problem,
    are_equal,
    called,
    candidates,
    is_even,
    placement_called,
)
from megatron5d.pipeline_parallel.search.timeline import IS_COMPILED
from megatron5d.pipeline_parallel.simulate import lower_bound, simulate
from megatron5d.pipeline_parallel.verify import verify

LARGE = 1 << 14
"""pp · num_microbatches beyond which the named schedules are compared at 4·pp micro-batches, and the best one built."""


def best_named(
    pp: int, num_microbatches: int, costs: CostModel, memory: np.ndarray, placements: Collection[str]
) -> Program | None:
    """Returns the fastest named schedule that fits; None where none does.

    Args:
        pp: pipeline ranks.
        num_microbatches: of one step.
        costs: of every placement.
        memory: `[pp]` the most activations a rank may hold.
        placements: names of those that may be used.
    """
    few = min(num_microbatches, 4 * pp) if pp * num_microbatches > LARGE else num_microbatches
    ranking = sorted(
        ((makespan, name, chunks) for makespan, name, chunks in _all(pp, few, costs, memory, placements)),
        key=lambda found: found[0],
    )
    for _, name, chunks in ranking:
        for _, program in _built(name, pp, num_microbatches, chunks, costs, memory):
            return program
    return None


def _all(pp, num_microbatches, costs, memory, placements) -> Iterator[tuple[float, str, int]]:
    wanted = sorted({int(name.partition(":")[2] or 1) for name in placements})
    for name in schedule_names():
        schedule = find_schedule(name)
        fitting = [n for n in wanted if n > 1] if schedule.any_chunks else {schedule.chunks}.intersection(wanted)
        for chunks in fitting:
            for makespan, program in _built(name, pp, num_microbatches, chunks, costs, memory):
                if called(program.placement) in placements:
                    yield makespan, name, chunks


def _built(name, pp, num_microbatches, chunks, costs, memory) -> Iterator[tuple[float, Program]]:
    """Yields the Program of one schedule with its makespan, or nothing where the sizes or the memory refuse it."""
    try:
        program = build_program(name, pp, num_microbatches, chunks)
        stage_costs = costs.of(program.placement)
    except ValueError:
        return
    result = simulate(program, stage_costs)
    if (result.peak_activations <= memory + 1e-9).all():
        yield result.makespan, program


@dataclass(frozen=True)
class SearchResult:
    """The best Program found, verified; times in the unit of the costs.

    Args:
        program: called `auto`, or by its name where a named schedule is the best.
        makespan: from the first action's start to the last one's end.
        overhead: makespan − the compute of the busiest rank.
        bubble: overhead / makespan.
        peak: `[num_ranks]` activations, in micro-batches of one rank's layers.
        lower_bound: an overhead below which no Program of this placement goes with so many activations.
        placement: name of the placement.
        evaluations: list schedules tried.
        elapsed_s: time taken.
        compiled: whether numba was there; without it a list schedule takes a hundred times as long.
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
        described = [problem.placement.route, problem.num_microbatches, problem.memory.tolist(), problem.pairs]
        found.update(json.dumps(described).encode())
        for field in fields(StageCosts):
            found.update(np.asarray(getattr(problem.costs, field.name), dtype=float).tobytes())
    return folder / f"schedule-{found.hexdigest()[:32]}.json"


def store(file: Path, result: SearchResult) -> None:
    """Writes a result beside its place and renames it: it is there whole or not at all, whoever else writes it."""
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


SMALL_RANKS = 16
"""Policies for more ranks than this are first searched for at this many, where all stages are alike."""
EVOLUTION = 0.25
"""Share of what may be spent that evolution gets; the rest is for the local search, which gains where it ends."""
HEATS = 0.4
"""Share at which the local search goes on with one Program alone, the most promising of those that it tried."""
TRIED = 4
"""Programs that the local search tries: which of them it makes fastest, their makespans do not tell."""
LARGE_SEARCH = 1 << 17
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
    return 1 if max(problem.num_actions for problem in problems) >= LARGE_SEARCH else TRIED


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

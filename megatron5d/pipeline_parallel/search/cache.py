"""Results kept on disk under a hash of the question that they answer, so that the next run starts at once.

Shipped policies are no part of the question: a run that goes on keeps its schedule when better ones have been learnt.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import Placement, make_program
from megatron5d.pipeline_parallel.schedule_csv import read_program, write_program
from megatron5d.pipeline_parallel.search.problem import Problem
from megatron5d.pipeline_parallel.search.result import SearchResult

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

"""Without numba the search is slow, and has the same results."""

import json
import subprocess
import sys

import numpy as np
import pytest

from megatron5d.pipeline_parallel.costs import parse_costs
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.schedule_csv import write_program
from megatron5d.planning.schedule_search.list_scheduler import shipped_policies
from megatron5d.planning.schedule_search.local_search import refine
from megatron5d.planning.schedule_search.named_schedules import placement_by_name
from megatron5d.planning.schedule_search.problem import Budget, Problem
from megatron5d.planning.schedule_search.search import search_program
from megatron5d.planning.schedule_search.timeline import IS_COMPILED

COSTS = parse_costs("F=1,I=1.2,W=0.8,comm=0.1,a2aF=0.5,a2aB=0.5")


def problem_of(placement, memory) -> Problem:
    return Problem(placement, 6, COSTS.of(placement), np.full(4, memory))


def small_programs() -> list[str]:
    """Results of list schedules and of the local search for small problems."""
    texts = []
    for name in ("zigzag:2", "mirrored"):
        problem = problem_of(placement_by_name(name, 4), 6.0)
        for policy in shipped_policies(problem.num_streams)[:3]:
            program = problem.program(policy)
            texts.append(write_program(program) if program else f"stuck {problem.makespan(policy)}")
    program = build_program("zb_v", 4, 6)
    problem = problem_of(program.placement, 5.0)
    texts.append(write_program(refine(program, problem, Budget(None, 10), 1.0)))
    return texts


def small_makespan() -> float:
    """Makespan that a search with few evaluations reaches."""
    result = search_program(2, 4, [COSTS], memory=3.0, seconds=None, evaluations=20)
    return result.simulation.makespan


def test_results_are_the_same():
    pytest.importorskip("numba")
    assert IS_COMPILED
    code = (
        "import sys, json; sys.modules['numba'] = None; sys.path[:0] = json.loads(sys.argv[1]); "
        "import test_without_numba as here; assert not here.IS_COMPILED; "
        "print(json.dumps([here.small_programs(), here.small_makespan()]))"
    )
    folders = json.dumps([__file__.rpartition("/")[0], *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code, folders], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    programs, makespan = json.loads(run.stdout)
    assert programs == small_programs()
    # fewer starts are tried, as each takes long
    assert makespan == pytest.approx(small_makespan(), rel=0.1)

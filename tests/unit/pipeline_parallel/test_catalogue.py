"""Schedules are found by name: a new file with one decorated function is all that a new schedule
takes."""

import subprocess
import sys

import pytest

from megatron5d.pipeline_parallel.registry import build_program, find_schedule, schedule_names

CONTRACT = [
    "gpipe",
    "1f1b",
    "interleaved",
    "bfs",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe",
    "dualpipe_v",
]
ONE_MORE = """
from megatron5d.pipeline_parallel.program import Action, loop_placement, make_program
from megatron5d.pipeline_parallel.registry import schedule


@schedule("one_at_a_time")
def one_at_a_time(num_ranks, num_microbatches, chunks):
    line = lambda rank: [(Action(op, rank, i),) for i in range(num_microbatches) for op in "FB"]
    return make_program("one_at_a_time", loop_placement(num_ranks), [0] * num_microbatches, map(line, range(num_ranks)))
"""


def test_the_names_of_the_contract_are_there():
    assert set(CONTRACT) <= set(schedule_names())


def test_one_chunk_is_not_interleaved():
    with pytest.raises(ValueError, match=r"\(got 1\); set parallel.vpp=2"):
        build_program("interleaved", 2, 4, 1)


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_tells_its_source_and_its_formula(name):
    text = find_schedule(name).generator.__doc__
    assert "Source:" in text and "ctivations" in text and "ubble " in text
    assert build_program(name, 2, 4).name == name


def test_a_new_schedule_is_one_file(tmp_path):
    """With a second folder on the package's path, as an installed plug-in would have: nothing else
    is told about it."""
    (tmp_path / "extra.py").write_text(ONE_MORE)
    code = f"""
from megatron5d.pipeline_parallel import schedules
schedules.__path__.append({str(tmp_path)!r})
from megatron5d.tools.schedule import main
raise SystemExit(main(["simulate", "--schedule", "one_at_a_time", "--pp", "2", "--microbatches", "3"]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "makespan  18.0" in run.stdout


def test_planning_needs_no_torch():
    code = "import sys, tools.schedule; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

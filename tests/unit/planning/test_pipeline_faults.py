"""Faults of pipeline schedules: their reasons, and fixes that work."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron5d.config.checks import run_checks
from megatron5d.config.load import load_config
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.schedule_csv import write_program
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults
from megatron5d.train import pipeline_layout


def config_of(words: str):
    return load_config(["model.num_layers=2", "parallel.pp=2", "train.gbs=8", *words.split()])


def only_fault(words: str, world: int = 2):
    (fault,) = pipeline_faults(config_of(words), world)
    return fault


@pytest.fixture
def schedule_file(tmp_path):
    """Writes a schedule to a file; gives the override that reads it."""

    def write(*schedule, old: str = "~", new: str = "") -> str:
        path = Path(tmp_path, "mine.csv")
        path.write_text(write_program(build_program(*schedule)).replace(old, new))
        return f"pipeline.schedule=file:{path}"

    return write


@pytest.mark.parametrize(
    ("world", "sizes", "fix"),
    [
        # not pp = 4, which does not divide 6
        (6, "train.gbs=12 model.num_layers=6", "parallel.pp=2"),
        # with pp = 2, dp = 3 would not divide 16
        (6, "train.gbs=16 model.num_layers=6", "parallel.pp=6"),
        (3, "train.gbs=12 model.num_layers=6", "pipeline.schedule=dualpipe_v"),
        # too few layers for two chunks per rank
        (3, "train.gbs=12 model.num_layers=3", "pipeline.schedule=1f1b"),
    ],
)
def test_an_odd_number_of_mirrored_ranks_gets_a_fix_that_works(world, sizes, fix):
    words = f"parallel.pp=3 pipeline.schedule=dualpipe {sizes}"
    fault = only_fault(words, world)
    assert "is odd" in fault.reason and fault.fix == fix
    config = config_of(f"{words} {fix}")
    assert run_checks(config, world, files=False) == [] and pipeline_faults(config, world) == []


@pytest.mark.parametrize(
    ("gbs", "old", "new", "reason", "fix"),
    [
        (8, "1F5,", "", "rank 1, position 9: 1F5 is missing", "pipeline.schedule=1f1b, or file:"),
        (9, "~", "", "0F8 is missing", "train.gbs=8"),
        (
            6,
            "~",
            "",
            "0F6 is beyond num_microbatches=6 = train.gbs / (train.mbs·dp) = 6 / 1",
            "train.gbs=8",
        ),
        (8, "\n1F0", "\n1F0\n1F0", "has 3 rows, one per rank, but pp=2", "parallel.pp=3"),
    ],
)
def test_a_file_that_is_no_schedule_of_this_run(schedule_file, gbs, old, new, reason, fix):
    words = schedule_file("1f1b", 2, 8, old=old, new=new)
    fault = only_fault(f"{words} train.gbs={gbs}")
    assert fault.reason.startswith(words.replace("=", " = ")) and reason in fault.reason
    assert fault.fix.startswith(fix)


def test_a_file_of_another_number_of_chunks(schedule_file):
    words = schedule_file("interleaved", 2, 8, 2) + " model.num_layers=4"
    fault = only_fault(f"{words} parallel.vpp=3")
    assert fault.reason.endswith("needs parallel.vpp=2 (got 3)")
    assert fault.fix == "parallel.vpp=2"
    for vpp in (1, 2):  # 1, the default, leaves it to the file
        assert pipeline_faults(config_of(f"{words} parallel.vpp={vpp}"), 2) == []


def test_a_small_batch_of_a_ramp_is_named():
    words = "pipeline.schedule=dualpipe"
    fault = only_fault(f"{words} train.gbs_ramp=[3,5,6]")
    assert "num_microbatches=3 = train.gbs_ramp / (train.mbs·dp) = 3 / 1" in fault.reason
    assert fault.fix == "train.gbs_ramp=null" and "train.gbs_ramp" in fault.knobs
    assert pipeline_faults(config_of(words), 2) == []


def test_costs_that_cannot_be_read_are_no_fault_of_the_file(schedule_file):
    fault = only_fault(schedule_file("1f1b", 2, 8) + " pipeline.costs='F=1,F=2'")
    assert (fault.reason, fault.fix) == ("pipeline.costs: F is given twice", "pipeline.costs=null")


@pytest.mark.parametrize(
    ("name", "fix"), [("1f1b", "pipeline.schedule=gpipe"), ("gpipe", "pipeline.schedule=1f1b")]
)
def test_a_wrong_order_of_a_named_schedule(monkeypatch, name, fix):
    original = pipeline_layout.build_program

    def reversed_on_rank_0(schedule, *sizes):
        program = original(schedule, *sizes)
        ranks = (program.ranks[0][::-1], *program.ranks[1:])
        return replace(program, ranks=ranks) if schedule == name else program

    monkeypatch.setattr(pipeline_layout, "build_program", reversed_on_rank_0)
    fault = only_fault(f"pipeline.schedule={name}")
    assert fault.reason.startswith(f"pipeline.schedule = {name}: rank 0") and fault.fix == fix

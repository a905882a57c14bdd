"""Numbers of a report: its first sentence, all sets of switches, and the causes of the bubble."""

import re

import pytest

from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.simulate import simulate
from megatron5d.planning.clusters import GIB
from megatron5d.planning.planned_config import planned_config
from megatron5d.tools.report.collect import ReportLayout, layout_record
from megatron5d.tools.report.headline import COSTS, headline, toggles
from megatron5d.tools.report.layer import key_of
from megatron5d.tools.report.timeline import SimulatedStep, bubble_by_cause, timeline_record


def numbers_of(gib=10.0, step_s=10.0, gbs=8, **seconds):
    return {
        "needed_bytes": int(gib * GIB),
        "step_time_s": step_s,
        "tokens_per_s_per_gpu": gbs / step_s,
        "mfu": 0.25,
        "seconds": dict.fromkeys(COSTS, 0.0) | seconds,
    }


@pytest.mark.parametrize(
    "overrides, error",
    [
        ([], "25 % MFU ± 6 % of it"),
        (["model=tiny_moe"], "25 % MFU (no such run was measured)"),
        (["parallel.cp=2"], "25 % MFU (no such run was measured)"),
        (["optim.name=muon"], "25 % MFU (no such run was measured)"),
    ],
)
def test_error_of_predicted_times_is_shown_only_for_runs_like_the_measured_ones(overrides, error):
    assert error in headline(planned_config(overrides, 2), numbers_of(), {}, None)


FASTER, SLOWER, LARGE = numbers_of(40, 6.7), numbers_of(5, 12), numbers_of(99, 1)


@pytest.mark.parametrize(
    "numbers, changes, text",
    [
        (
            numbers_of(),
            {"turn it off": FASTER, "turn that off": SLOWER, "turn all off": LARGE},
            "Fits with 70.0 GiB to spare; .* turn it off: 33 % less time per token, "
            "40.0 of 80.0 GiB, still fits.",
        ),
        (
            numbers_of(90),
            {"turn it off": LARGE, "turn that off": SLOWER},
            "Does not fit: 10.0 GiB too much; .* turn that off: 20 % more time per token, "
            "5.0 of 80.0 GiB, fits.",
        ),
        # A larger batch takes a longer step, but less time per token.
        (
            numbers_of(),
            {"turn it off": numbers_of(20, 15, gbs=16)},
            ".* turn it off: 25 % less time per token, .*",
        ),
        (numbers_of(), {"turn it off": numbers_of(10, 9.9)}, ".*; no dimension costs time."),
        (numbers_of(tp=0.7, ep=1.9), {}, ".*; exposed ep takes 19 %."),
        (
            numbers_of(ep=1.9) | {"pipeline": {"bubble": 0.3, "step_time": 10.0}},
            {"turn it off": {"refused": "no"}},
            ".*; the bubble takes 30 %.",
        ),
        ({"refused": "sp requires tp"}, {"turn it on": FASTER}, "Not .*: sp requires tp."),
        ({"needed_bytes": 2**20}, {}, "Fits with 80.0 GiB to spare."),
    ],
)
def test_headline_names_the_best_single_change_that_fits(numbers, changes, text):
    sentence = headline(planned_config([], 1), numbers, changes, 80 * GIB)
    assert re.fullmatch(text, sentence), sentence


def test_a_switch_of_tp_takes_sp_along():
    switches = ("zero", "tp", "sp")
    variants = {key: {"key": key} for key in ("", "zero", "tp", "sp", "zero tp", "zero sp")}
    changes = {off: dict(toggles(variants, switches, off.split())) for off in variants}
    assert changes["tp"] == {
        "turn ZeRO off": {"key": "zero tp"},
        "turn tensor parallelism on": {"key": ""},
    }
    assert changes["zero sp"]["turn sequence parallelism on"] == {"key": "zero"}
    assert changes["zero sp"]["turn tensor parallelism off"] == {"key": "zero tp"}
    assert key_of(("zero", "tp", "sp")) == "zero tp"


def test_every_set_of_switches_has_numbers_and_a_sentence():
    """On a CPU, too; a change of the batch is in the numbers."""
    overrides = ["model=tiny", "parallel.tp=2", "parallel.sp=true", "parallel.pp=2", "train.gbs=2"]
    record = layout_record(ReportLayout("x", planned_config(overrides, 4), 4, None))
    assert set(record["variants"]) == {"", "tp", "sp", "pp", "tp pp", "sp pp"}
    for key, variant in record["variants"].items():
        assert variant["sentence"].startswith("Needs ")
        assert ("bubble" in variant["sentence"]) == ("pp" not in key)
        sizes = variant["microbatch"]["sizes"]
        assert sizes["tp"] == (1 if "tp" in key else 2) and sizes["sp"] == (key in ("", "pp"))
        assert variant["sent_bytes"] and variant["memory"] and variant["layer"]
    assert record["variants"]["tp pp"]["changed"] == "train.gbs=4"
    assert record["free_messages"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("comm", [0.0, 1.0])
def test_causes_of_the_bubble_of_equal_stages(name, comm):
    """p - 1 forwards and backwards; a message delays GPipe on each hop there and back."""
    program = build_program(name, 4, 8)
    costs = Costs(comm=comm).of(program.placement)
    causes = bubble_by_cause(SimulatedStep(program, costs, simulate(program, costs), None))
    messages = 6 * comm if name == "gpipe" else causes["messages"]  # 1F1B waits in each turn
    assert causes == pytest.approx(
        {"warm-up and drain": 9.0, "messages": messages, "imbalance": 0.0}
    )
    assert causes["messages"] >= 6 * comm


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipe", "interleaved"])
def test_bubble_is_the_idle_area_of_the_picture(name):
    """Also where one stage is slower: its causes add up, and none is negative."""
    program = build_program(name, 4, 8)
    stage_costs = Costs(comm=0.2, a2aF=0.3, a2aB=0.3).of(program.placement)
    stage_costs.compute[:, 1] *= 1.5
    step = SimulatedStep(program, stage_costs, simulate(program, stage_costs), None)
    record = timeline_record(name, step, 10**6)
    ticks = sum(length for line in record["slots"] for _, length, *_ in line)
    area = 1 - ticks / (100_000 * program.num_ranks)
    assert record["bubble"] == pytest.approx(area, abs=1e-3)
    causes = record["bubble_by_cause"]
    assert min(causes.values()) >= 0 and causes["imbalance"] > 0
    assert sum(causes.values()) == pytest.approx(record["bubble"] * record["makespan"])

"""Every schedule equals one process: loss, every gradient, norm and weights after two or three
steps, fp64 to 1e-10.

The default is a covering subset: each schedule meets 2 and 4 stages' ranks, awkward numbers of
micro-batches, tied and untied embeddings, uneven layers, tp, dp and both ZeRO stages.
MEGATRON5D_TESTS=nightly runs the entire product.
"""

from itertools import product

import pytest
import tiers
from layouts import assert_parity
from pipeline_configs import assert_schedule_parity, scheduled_config

from megatron5d.config.schema import RecomputeConfig
from megatron5d.pipeline_parallel.program import Action, make_program, zigzag_placement
from megatron5d.pipeline_parallel.registry import schedule_names
from megatron5d.pipeline_parallel.schedule_csv import write_program

# (pp, micro-batches at least, options), for every schedule
CASES = {
    "tied-uneven": (2, 5, {"tied": True, "uneven": True, "steps": 3}),
    "zero1": (2, 4, {"tied": True, "dp": 2, "zero": 1}),
    "four": (4, 7, {"tied": True, "uneven": True}),
    "few": (4, 1, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule(schedule, case):
    pp, min_microbatches, options = CASES[case]
    assert_schedule_parity(schedule, pp, min_microbatches, **options)


HYBRID = {"dp": 4, "dp_replicate": 2}
ALL_AXES = {"tp": 2, "dp": 2, "zero": 1}
# (schedule, options beside pp = 2, tied embeddings and at least 4 micro-batches)
COMPOSED = [
    *((schedule, ALL_AXES) for schedule in ("1f1b", "zb_h1", "zb_v", "dualpipe")),
    *((schedule, {"tp": 2}) for schedule in ("interleaved", "dualpipe_v", "dualpipe")),
    *((name, {**HYBRID, "zero": zero}) for name in ("dualpipe", "1f1b") for zero in (0, 1)),
    ("dualpipe", {**ALL_AXES, "order": ["tp", "dp", "cp", "pp"]}),
    ("dualpipe", {**ALL_AXES, "order": ["dp", "pp", "tp", "cp"]}),
]


@pytest.mark.parametrize("schedule, options", COMPOSED)
def test_with_other_dimensions(schedule, options):
    assert_schedule_parity(schedule, 2, 4, tied=True, **options)


@pytest.mark.parametrize("tied", [True, False])
def test_bidirectional_on_eight(tied):
    assert_schedule_parity("dualpipe", 8, 18, tied=tied, uneven=True)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zb"])
def test_a_tied_embedding_around_a_middle_rank(schedule):
    """The middle one of three ranks has no mirror image, and its groups must not confuse the
    others."""
    assert_schedule_parity(schedule, 3, 5, tied=True, dp=2, zero=1)


@pytest.mark.parametrize("vpp", [3, 4])
@pytest.mark.parametrize("schedule", ["interleaved", "bfs", "interleaved_zb"])
def test_more_chunks(schedule, vpp):
    assert_parity(scheduled_config(schedule, 2, 5, vpp=vpp, tied=True), 2)


RECOMPUTED = {
    "1f1b": RecomputeConfig("full", stage_layers=[2, 0]),
    "zb_v": RecomputeConfig("full", 1),
    "dualpipe": RecomputeConfig("full", group_layers=2),
}


@pytest.mark.parametrize("schedule", RECOMPUTED)
def test_full_recompute(schedule):
    """I recomputes a phase, and the weight gradient must use its new graph."""
    assert_schedule_parity(schedule, 2, 4, recompute=RECOMPUTED[schedule])


@pytest.mark.parametrize("schedule", ["dualpipe", "1f1b"])
@pytest.mark.parametrize("zero", [0, 1])
def test_under_torchs_own_checks(schedule, zero, monkeypatch, over_gloo):
    """They make every collective blocking: mirrored ranks must not start one while the other waits
    for a message."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert_schedule_parity(schedule, 2, 4, dp=2, zero=zero, tied=True)


FULL = RecomputeConfig("full", 1)
# stages without a layer: at the V's turn, two in a row, in the middle of a loop, on mirrored ranks
EMPTY = {
    "zb_v": (2, {"layout": [2, 0, 1, 0], "tied": True, "dp": 2, "zero": 3}),
    "v_half": (3, {"layout": [1, 2, 0, 1, 0, 1], "recompute": FULL, "dp": 2, "zero": 1}),
    "interleaved": (3, {"layout": [1, 1, 0, 1, 0, 1], "vpp": 2, "tied": True}),
    "interleaved_zb": (2, {"layout": [1, 0, 1, 1, 0, 0], "vpp": 3, "tp": 2}),
    "dualpipe": (4, {"layout": [1, 0, 2, 0], "tied": True, "dp": 2, "zero": 2}),
}


@pytest.mark.parametrize("schedule", EMPTY)
def test_stages_without_a_layer(schedule):
    pp, options = EMPTY[schedule]
    assert_schedule_parity(schedule, pp, 2 * pp, **options)


def test_a_program_from_a_file(tmp_path):
    """A zigzag of four chunks, which no generator makes: all forwards, then input gradients, then
    weight gradients."""
    placement, m = zigzag_placement(2, 4), 3
    lines = []
    for rank in range(2):
        stages = [stage for _, stage in placement.stages_of(rank)]
        passes = [("F", stages), ("I", stages[::-1]), ("W", stages[::-1])]
        lines.append(
            [(Action(op, stage, i),) for op, order in passes for stage in order for i in range(m)]
        )
    path = tmp_path / "zigzag.csv"
    path.write_text(write_program(make_program("zigzag", placement, [0] * m, lines)))
    assert_parity(scheduled_config(f"file:{path}", 2, m, tied=True, layout=[1] * 8), 2)


SIZES = product(
    schedule_names(), (2, 4), (1, 3, 8, 11), (False, True), (False, True), (1, 2), (0, 1)
)


@pytest.mark.parametrize(
    ("schedule", "pp", "min_microbatches", "tied", "uneven", "tp", "zero"),
    list(SIZES) if tiers.NIGHTLY else list(SIZES)[-1:],
)
def test_the_entire_product(schedule, pp, min_microbatches, tied, uneven, tp, zero):
    options = {"tied": tied, "uneven": uneven, "tp": tp, "zero": zero}
    assert_schedule_parity(schedule, pp, min_microbatches, dp=2, **options)

"""Every named schedule against published formulas, a table of independently simulated figures, and
the verifier. A new schedule is one file with one decorated function."""

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megatron5d.pipeline_parallel.costs import Costs, parse_costs
from megatron5d.pipeline_parallel.registry import build_program, find_schedule, schedule_names
from megatron5d.pipeline_parallel.schedules.gpipe_and_1f1b import group_sizes
from megatron5d.pipeline_parallel.simulate import lower_bound, simulate
from megatron5d.pipeline_parallel.verify import verify

COSTS = {
    "unit": "",
    "real": "F=1,I=1.2,W=0.8,comm=0.1",
    "moe": "a2aF=0.5,a2aB=0.5",
    "dear": "a2aF=1,a2aB=1,comm=0.1",
}
# schedule, chunks, overhead under each of the costs, peak activations; of each figure at p = 8 and
# m = 32, then at p = 16 and m = 64
FIGURES = """
    gpipe               -   21    45  22.4    48    60   124 100.4    206   32    64
    1f1b                -   21    45  27.8  59.8    60   124 105.8  217.8    8    16
    interleaved         2 10.5  22.5  13.5  28.7    46    94  84.5  171.7 11.5  23.5
    interleaved         4 5.25 11.25 11.45 23.85    39    79 78.95 159.35 9.75 19.75
    bfs                 2 10.5  22.5  11.9  25.5    46    94  82.9  168.5   32    64
    zb_h1               -    7    15  12.6    27    46    94  87.8    179    8    16
    zb_h2               -    7    15   7.7  16.5  42.5  86.5  79.4    161   15    31
    interleaved_zb      2  3.5   7.5   8.5  18.1    39    79  78.1  158.1    8    16
    interleaved_zb      4 1.75  3.75  7.65 16.05  35.5  71.5 74.45 150.05    8    16
    zb_v                -  3.5   7.5   7.5  16.3 37.25 75.25    75  151.8    8    16
    interleaved_overlap 2    -     -     -     -  18.5  38.5  34.9   71.7   12    24
    interleaved_overlap 4    -     -     -     - 13.25 27.25 37.65  76.45   10    20
    dualpipe            -    6    14  10.9    26  16.5  34.5  30.7   63.1    9    17
    dualpipe_v          -    7    15  16.8  36.8 17.25 35.25  34.7   72.3  8.5  16.5
    v_half              -  8.5  20.5  15.9  36.4     -     -     -      -    5     9
"""
SIZES = ((8, 32), (16, 64))
MANY = [(p, m) for p in (1, 2, 3, 4, 6, 8, 13) for m in (p, p + 1, 2 * p, 2 * p + 3, 5 * p)]
COPRIME = Costs(F=1.0, I=1.375, W=0.8125)


def programs(p, m):
    for name in schedule_names():
        for chunks in (2, 3, 4) if find_schedule(name).any_chunks else (None,):
            try:
                yield build_program(name, p, m, chunks)
            except ValueError as error:
                assert name in ("dualpipe", "dualpipe_v") and (p % 2 or m % 2 or m < 2 * p), error


def overhead(name, p, m, costs=Costs(), chunks=None):  # noqa: B008
    return simulate(build_program(name, p, m, chunks), costs).overhead


def peak(name, p, m, chunks=None):
    return verify(build_program(name, p, m, chunks)).peak_activations.max()


@pytest.mark.parametrize("row", FIGURES.strip().splitlines(), ids=lambda row: row.split()[0])
def test_known_figures(row):
    name, chunks, *cells = row.split()
    figures = [None if cell == "-" else float(cell) for cell in cells]
    for index, (p, m) in enumerate(SIZES):
        program = build_program(name, p, m, None if chunks == "-" else int(chunks))
        *overheads, expected_peak = figures[index::2]
        for text, expected in zip(COSTS.values(), overheads):
            result = simulate(program, parse_costs(text))
            assert result.peak_activations.max() == expected_peak
            assert result.bubble == pytest.approx(result.overhead / (result.overhead + 3 * m))
            if expected is not None:
                assert result.overhead == pytest.approx(expected, abs=1e-6), (p, text)


@pytest.mark.parametrize(
    "p, m", [(p, m) for p in (1, 2, 3, 5, 8) for m in (1, 2, 3, 7, 8, 12, 19, 33)]
)
def test_every_schedule_is_correct_at_any_size(p, m):
    for program in programs(p, m):
        verify(program)


@pytest.mark.parametrize("p, m", MANY)
def test_published_formulas(p, m):
    """Bubble and memory at costs without a common measure, wherever m is at least p."""
    c, total = COPRIME, COPRIME.F + COPRIME.I + COPRIME.W
    for name, bubble, activations in (
        ("gpipe", total, m),
        ("1f1b", total, p),
        ("zb_h1", total - 2 * c.W, p),
    ):
        assert overhead(name, p, m, c) == pytest.approx((p - 1) * bubble)
        assert peak(name, p, m) == activations
    for v in (2, 4):
        assert overhead("bfs", p, m, c, v) == pytest.approx((p - 1) * total / v)
        assert peak("bfs", p, m, v) == m
        if m % p == 0:
            assert overhead("interleaved", p, m, c, v) == pytest.approx((p - 1) * total / v)
            assert peak("interleaved", p, m, v) == pytest.approx(
                min(p * (1 + (p - 1) / (p * v)), m)
            )
            assert overhead("interleaved_zb", p, m, chunks=v) == pytest.approx((p - 1) / v)
            assert peak("interleaved_zb", p, m, v) <= p


@pytest.mark.parametrize("p", (1, 2, 3, 4, 6, 8, 13))
def test_zero_bubble_formulas(p):
    """No bubble between a rank's first and last action where F = I = W; the ranks' shifted starts
    remain."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1, 6 * p):
        assert overhead("zb_h2", p, m) == p - 1
        assert peak("zb_h2", p, m) == 2 * p - 1
        assert overhead("zb_v", p, m) == (p - 1) / 2
        assert peak("zb_v", p, m) <= p
        for name in ("zb_h2", "zb_v"):
            program = build_program(name, p, m)
            result = simulate(program, Costs())
            for a, b in itertools.pairwise(program.table.rank_start):
                assert result.end[b - 1] - result.start[a] == result.work[0]


@pytest.mark.parametrize("p", (2, 4, 6, 8, 12, 16))
def test_dualpipe_formulas(p):
    """(p/2 − 1)(F&B + B − 3W), where an overlapped pair takes the sum of its computes: 3 + 2 − 3
    with equal costs."""
    for m in (2 * p, 2 * p + 2, 5 * p):
        assert overhead("dualpipe", p, m) == pytest.approx((p / 2 - 1) * 2)
        assert peak("dualpipe", p, m) == p + 1
    for m in (2 * p, 2 * p + 1, 5 * p):
        assert overhead("dualpipe_v", p, m) == pytest.approx(p - 1)
        assert peak("dualpipe_v", p, m) == p + 0.5


@pytest.mark.parametrize("p", (3, 4, 5, 7, 8, 12, 16, 17))
def test_controllable_memory_formulas(p):
    """V-Half and V-Min hold a half and a third of 1F1B's activations, and have a half and two
    thirds of its bubble."""
    for m in (2 * p, 2 * p + 1, 4 * p):
        assert peak("v_half", p, m) == p // 2 + 1
        assert peak("v_min", p, m) == (p + 1) // 3 + 1
        assert overhead("v_half", p, m) == pytest.approx((p - 1) * 3 / 2 - (0.5 if p % 2 else 2.0))
        assert overhead("v_min", p, m) == pytest.approx((p - 1) * 2 - (0.5 if p % 3 else 1.5))


@pytest.mark.parametrize("text", COSTS.values())
def test_nothing_beats_the_lower_bound(text):
    costs = parse_costs(text)
    for program in programs(8, 24):
        result = simulate(program, costs)
        bound = lower_bound(program.placement, costs, 24, result.peak_activations.max())
        assert 0 < bound <= result.overhead + 1e-9, program.name


def test_nothing_beats_the_lower_bound_of_uneven_stages():
    """In time and in memory, by different factors, so that ranks admit different numbers of
    forwards."""
    random = np.random.default_rng(0)
    for name in schedule_names() * 3:
        program = build_program(name, 4, 12)
        even, num_stages = Costs().of(program.placement), program.placement.num_stages
        slow, large = random.uniform(0.3, 2, (2, num_stages))
        costs = replace(even, compute=even.compute * slow, activation=even.activation * large)
        result = simulate(program, costs)
        bound = lower_bound(program.placement, costs, 12, result.peak_activations.max())
        assert 0 <= bound <= result.overhead + 1e-9, name


@pytest.mark.parametrize("name", ["zb_v", "interleaved_zb", "zb_h1"])
def test_equal_costs_meet_the_lower_bound(name):
    program = build_program(name, 8, 32)
    bound = lower_bound(program.placement, Costs(), 32, memory=8)
    assert simulate(program, Costs()).overhead == bound


# the slots of the first ranks; v_half and v_min (their second rank) in the order of
# github.com/sail-sg/zero-bubble-pipeline-parallelism; dualpipe: forwards in both directions,
# zero-bubble start, pairs, zero-bubble end
BY_HAND = {
    ("1f1b", 3, 4): """
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 |
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 |
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    ("interleaved", 2, 4): """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3 |
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""",
    ("zb_v", 2, 4): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3
        0W3 |
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3
        1W3""",
    ("v_half", 4, 6): """
        1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6F2 6I1 6W1 1I0 1W0 1F4 6F3 6I2 6W2 1I1 1F5 1W1 6F4 6I3 6W3
        1I2 6I4 6W4 6F5 1W2 1I3 6I5 1I4 6W5 1W3 1W4 1I5 1W5""",
    ("v_min", 4, 6): """
        1F0 1F1 6F0 6F1 6I0 6W0 1F2 1I0 6I1 6W1 1W0 6F2 1F3 1I1 6I2 6W2 1W1 6F3 1F4 1I2 6I3 6W3 1W2
        6F4 1F5 1I3 6I4 6W4 1W3 6F5 1I4 6I5 6W5 1W4 1I5 1W5""",
    ("dualpipe", 4, 8): """
        0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3&3B5 3F6&0B0 3B6 3F7&0B1 3B7 0I2 0W2 0I3 0W3 |
        1F0 2F4 1F1 2F5 1F2 2B4 2F6&1B0 1F3&2B5 2F7&1B1 2B6 1B2 2I7 1I3 2W7 1W3""",
}


@pytest.mark.parametrize("name, p, m", BY_HAND)
def test_schedules_by_hand(name, p, m):
    ranks = build_program(name, p, m).ranks[name in ("v_half", "v_min") :]
    for line, text in zip(ranks, BY_HAND[name, p, m].split("|")):
        assert ["&".join(map(str, slot)) for slot in line] == text.split()


def test_mirrored_ranks_of_dualpipe_do_the_same():
    ranks = build_program("dualpipe", 4, 8).ranks
    for rank in (0, 1):
        swapped = [
            tuple(a._replace(microbatch=(a.microbatch + 4) % 8) for a in slot)
            for slot in ranks[rank]
        ]
        assert tuple(swapped) == ranks[3 - rank]


@pytest.mark.parametrize(
    "p, m", [(4, 4), (4, 5), (4, 7), (4, 8), (4, 11), (4, 15), (3, 2), (8, 33)]
)
def test_groups_are_even_and_at_least_as_long_as_the_pipeline(p, m):
    sizes = group_sizes(p, m)
    assert sum(sizes) == m and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= p or len(sizes) == 1


@pytest.mark.parametrize("m", range(9, 16))
def test_interleaved_does_not_degrade_between_multiples(m):
    """Micro-batches beyond a multiple cost at most what another round would."""
    assert overhead("interleaved", 8, m) <= overhead("interleaved", 8, 8) + 3


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("dualpip", 8, 32), ["pipeline.schedule=dualpip", "did you mean dualpipe"]),
        (("nonsense", 8, 32), ["pipeline.schedule=nonsense", "1f1b", "zb_v"]),
        (("dualpipe", 7, 32), ["parallel.pp=7", "parallel.pp=8"]),
        (("dualpipe", 8, 15), ["num_microbatches=15", "nearest legal value is 16"]),
        (("dualpipe", 8, 33), ["num_microbatches=33", "nearest legal value is 34"]),
        (("dualpipe_v", 8, 3), ["num_microbatches=3", "2·pp = 16"]),
        (("1f1b", 0, 3), ["parallel.pp=0"]),
        (("1f1b", 2, 0), ["num_microbatches=0"]),
        (("1f1b", 2, 4, 2), ["(got 2); set parallel.vpp=1"]),
        (("zb_v", 2, 4, 3), ["(got 3); set parallel.vpp=2"]),
        (("interleaved", 2, 4, 1), ["(got 1); set parallel.vpp=2"]),
    ],
)
def test_impossible_sizes_are_rejected_with_the_nearest_legal_value(arguments, words):
    with pytest.raises(ValueError) as caught:
        build_program(*arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_names_its_source_and_its_formula(name):
    text = find_schedule(name).generator.__doc__
    assert "Source:" in text and "ctivations" in text and "ubble " in text
    assert build_program(name, 2, 4).name == name


NEW_SCHEDULE = """
from megatron5d.pipeline_parallel.program import Action, loop_placement, make_program
from megatron5d.pipeline_parallel.registry import schedule


@schedule("one_at_a_time")
def one_at_a_time(num_ranks, num_microbatches, chunks):
    line = lambda rank: [(Action(op, rank, i),) for i in range(num_microbatches) for op in "FB"]
    direction, lines = [0] * num_microbatches, map(line, range(num_ranks))
    return make_program("one_at_a_time", loop_placement(num_ranks), direction, lines)
"""
SIMULATE = """
from megatron5d.pipeline_parallel import schedules
schedules.__path__.append({folder!r})
from megatron5d.tools.schedule import main
arguments = "simulate --schedule one_at_a_time --pp 2 --microbatches 3"
raise SystemExit(main(arguments.split()))
"""


def test_a_new_schedule_is_one_file(tmp_path):
    """In a second folder on the package's path, as an installed plug-in would have."""
    (tmp_path / "new.py").write_text(NEW_SCHEDULE)
    command = [sys.executable, "-c", SIMULATE.format(folder=str(tmp_path))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "makespan  18.0" in run.stdout


def test_planning_needs_no_torch():
    code = "import sys, tools.schedule; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

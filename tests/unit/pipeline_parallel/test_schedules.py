"""Every named schedule against published formulas, a table of independently simulated figures, and
the checker."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from megatron5d.pipeline_parallel.costs import Costs, parse_costs
from megatron5d.pipeline_parallel.registry import build_program, find_schedule, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import slot_text
from megatron5d.pipeline_parallel.schedules.gpipe_and_1f1b import group_sizes
from megatron5d.pipeline_parallel.simulate import lower_bound, simulate
from megatron5d.pipeline_parallel.verify import verify

UNIT = ""
REAL = "F=1,I=1.2,W=0.8,comm=0.1"
MOE = "a2aF=0.5,a2aB=0.5"
DEAR = "a2aF=1,a2aB=1,comm=0.1"

# overhead at (p=8, m=32) and (p=16, m=64) for each of the four costs; then the peak activations at
# both sizes
TABLE = {
    ("gpipe", None): ((21, 45), (22.4, 48), (60, 124), (100.4, 206), (32, 64)),
    ("1f1b", None): ((21, 45), (27.8, 59.8), (60, 124), (105.8, 217.8), (8, 16)),
    ("interleaved", 2): ((10.5, 22.5), (13.5, 28.7), (46, 94), (84.5, 171.7), (11.5, 23.5)),
    ("interleaved", 4): ((5.25, 11.25), (11.45, 23.85), (39, 79), (78.95, 159.35), (9.75, 19.75)),
    ("bfs", 2): ((10.5, 22.5), (11.9, 25.5), (46, 94), (82.9, 168.5), (32, 64)),
    ("zb_h1", None): ((7, 15), (12.6, 27), (46, 94), (87.8, 179), (8, 16)),
    ("zb_h2", None): ((7, 15), (7.7, 16.5), (42.5, 86.5), (79.4, 161), (15, 31)),
    ("interleaved_zb", 2): ((3.5, 7.5), (8.5, 18.1), (39, 79), (78.1, 158.1), (8, 16)),
    ("interleaved_zb", 4): ((1.75, 3.75), (7.65, 16.05), (35.5, 71.5), (74.45, 150.05), (8, 16)),
    ("zb_v", None): ((3.5, 7.5), (7.5, 16.3), (37.25, 75.25), (75, 151.8), (8, 16)),
    ("interleaved_overlap", 2): (None, None, (18.5, 38.5), (34.9, 71.7), (12, 24)),
    ("interleaved_overlap", 4): (None, None, (13.25, 27.25), (37.65, 76.45), (10, 20)),
    ("dualpipe", None): ((6, 14), (10.9, 26), (16.5, 34.5), (30.7, 63.1), (9, 17)),
    ("dualpipe_v", None): ((7, 15), (16.8, 36.8), (17.25, 35.25), (34.7, 72.3), (8.5, 16.5)),
    ("v_half", None): ((8.5, 20.5), (15.9, 36.4), None, None, (5, 9)),
}
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


def overhead(name, p, m, costs, chunks=None):
    return simulate(build_program(name, p, m, chunks), costs).overhead


def peak(name, p, m, chunks=None):
    return verify(build_program(name, p, m, chunks)).peak_activations.max()


@pytest.mark.parametrize("name, chunks", TABLE)
def test_known_figures(name, chunks):
    *overheads, peaks = TABLE[name, chunks]
    for known, text in zip(overheads, (UNIT, REAL, MOE, DEAR)):
        for size, expected in zip(SIZES, known or ()):
            costs = parse_costs(text)
            result = simulate(build_program(name, *size, chunks), costs)
            assert result.overhead == pytest.approx(expected, abs=1e-6), (size, text)
            assert result.peak_activations.max() == peaks[SIZES.index(size)]
            assert result.bubble == pytest.approx(result.overhead / (result.overhead + 3 * size[1]))


@pytest.mark.parametrize(
    "p, m", [(p, m) for p in (1, 2, 3, 5, 8) for m in (1, 2, 3, 7, 8, 12, 19, 33)]
)
def test_every_schedule_is_correct_at_any_size(p, m):
    for program in programs(p, m):
        verify(program)


@pytest.mark.parametrize("p, m", MANY)
def test_published_formulas(p, m):
    """Bubble and memory at costs without a common measure, wherever m is at least p."""
    c, both = COPRIME, COPRIME.F + COPRIME.I + COPRIME.W
    assert overhead("gpipe", p, m, c) == pytest.approx((p - 1) * both)
    assert overhead("1f1b", p, m, c) == pytest.approx((p - 1) * both)
    assert peak("gpipe", p, m) == m
    assert peak("1f1b", p, m) == p
    assert overhead("zb_h1", p, m, c) == pytest.approx((p - 1) * (both - 2 * c.W))
    assert peak("zb_h1", p, m) == p
    for v in (2, 4):
        assert overhead("bfs", p, m, c, v) == pytest.approx((p - 1) * both / v)
        assert peak("bfs", p, m, v) == m
    if m % p == 0:
        for v in (2, 4):
            assert overhead("interleaved", p, m, c, v) == pytest.approx((p - 1) * both / v)
            assert peak("interleaved", p, m, v) == pytest.approx(
                min(p * (1 + (p - 1) / (p * v)), m)
            )
            assert overhead("interleaved_zb", p, m, Costs(), v) == pytest.approx((p - 1) / v)
            assert peak("interleaved_zb", p, m, v) <= p


@pytest.mark.parametrize("p", (1, 2, 3, 4, 6, 8, 13))
def test_zero_bubble_formulas(p):
    """No bubble between a rank's first and last action where F = I = W; the ranks' shifted starts
    stay."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1, 6 * p):
        assert overhead("zb_h2", p, m, Costs()) == p - 1
        assert peak("zb_h2", p, m) == 2 * p - 1
        assert overhead("zb_v", p, m, Costs()) == (p - 1) / 2
        assert peak("zb_v", p, m) <= p
        for name in ("zb_h2", "zb_v"):
            program = build_program(name, p, m)
            result, edges = simulate(program, Costs()), program.table.rank_start
            for a, b in itertools.pairwise(edges):
                assert result.end[b - 1] - result.start[a] == result.work[0]


@pytest.mark.parametrize("p", (2, 4, 6, 8, 12, 16))
def test_dualpipe_formula(p):
    """(p/2 − 1)(F&B + B − 3W), where an overlapped pair takes the sum of its computes."""
    c = Costs(F=1.0, I=1.0, W=1.0)
    for m in (2 * p, 2 * p + 2, 5 * p):
        pair, backward = c.F + c.I + c.W, c.I + c.W
        assert overhead("dualpipe", p, m, c) == pytest.approx(
            (p / 2 - 1) * (pair + backward - 3 * c.W)
        )
        assert peak("dualpipe", p, m) == p + 1
    for m in (2 * p, 2 * p + 1, 5 * p):
        assert overhead("dualpipe_v", p, m, c) == pytest.approx(
            (p - 1) * (pair + backward - 3 * c.W) / 2
        )
        assert peak("dualpipe_v", p, m) == p + 0.5


@pytest.mark.parametrize("p", (3, 4, 5, 7, 8, 12, 16, 17))
def test_controllable_memory_formulas(p):
    """V-Half and V-Min hold a half and a third of 1F1B's activations, and bubble a half and two
    thirds of its time."""
    for m in (2 * p, 2 * p + 1, 4 * p):
        assert peak("v_half", p, m) == p // 2 + 1
        assert peak("v_min", p, m) == (p + 1) // 3 + 1
        assert overhead("v_half", p, m, Costs()) == pytest.approx(
            (p - 1) * 3 / 2 - (0.5 if p % 2 else 2.0)
        )
        assert overhead("v_min", p, m, Costs()) == pytest.approx(
            (p - 1) * 2 - (0.5 if p % 3 else 1.5)
        )


@pytest.mark.parametrize("text", [UNIT, REAL, MOE, DEAR])
def test_nothing_beats_the_lower_bound(text):
    costs = parse_costs(text)
    for program in programs(8, 24):
        result = simulate(program, costs)
        bound = lower_bound(program.placement, costs, 24, result.peak_activations.max())
        assert 0 < bound <= result.overhead + 1e-9, program.name


def test_nothing_beats_the_lower_bound_of_stages_that_differ():
    """In time and in memory, and not by the same factor: what memory admits is each rank's own
    matter."""
    random = np.random.default_rng(0)
    for name in schedule_names() * 3:
        program = build_program(name, 4, 12)
        even, num_stages = Costs().of(program.placement), program.placement.num_stages
        slow, large = random.uniform(0.3, 2, (2, num_stages))
        costs = replace(even, compute=even.compute * slow, activation=even.activation * large)
        result = simulate(program, costs)
        bound = lower_bound(program.placement, costs, 12, result.peak_activations.max())
        assert 0 <= bound <= result.overhead + 1e-9, name


def test_the_lower_bound_is_met_where_f_i_and_w_are_equal():
    for name, memory in (("zb_v", 8), ("interleaved_zb", 8), ("zb_h1", 8)):
        program = build_program(name, 8, 32)
        assert simulate(program, Costs()).overhead == lower_bound(
            program.placement, Costs(), 32, memory
        )


def lines(program):
    return [" ".join(slot_text(slot) for slot in line) for line in program.ranks]


def test_one_forward_one_backward_by_hand():
    assert lines(build_program("1f1b", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_by_hand():
    assert lines(build_program("interleaved", 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_zb_v_by_hand():
    assert lines(build_program("zb_v", 2, 4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ]


def test_controllable_memory_as_its_authors_squeeze_it():
    """The second of four ranks, as github.com/sail-sg/zero-bubble-pipeline-parallelism orders
    it."""
    assert lines(build_program("v_half", 4, 6))[1] == (
        "1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6F2 6I1 6W1 1I0 1W0 1F4 6F3 6I2 6W2 1I1 1F5 1W1 6F4 6I3 6W3 1I2 6I4 6W4 6F5 "
        "1W2 1I3 6I5 1I4 6W5 1W3 1W4 1I5 1W5"
    )
    assert lines(build_program("v_min", 4, 6))[1] == (
        "1F0 1F1 6F0 6F1 6I0 6W0 1F2 1I0 6I1 6W1 1W0 6F2 1F3 1I1 6I2 6W2 1W1 6F3 1F4 1I2 6I3 6W3 1W2 6F4 1F5 1I3 6I4 "
        "6W4 1W3 6F5 1I4 6I5 6W5 1W4 1I5 1W5"
    )


def test_dualpipe_by_hand():
    """Outer ranks: forwards both ways, zero-bubble start, pairs, zero-bubble end; mirrored ranks do
    the same."""
    program = build_program("dualpipe", 4, 8)
    assert lines(program)[0] == (
        "0F0 0F1 0F2 3F4 3I4 3W4 3F5 (0F3;3B5)OVERLAP_F_B (3F6;0B0)OVERLAP_F_B 3B6 (3F7;0B1)OVERLAP_F_B 3B7 "
        "0I2 0W2 0I3 0W3"
    )
    assert lines(program)[1] == (
        "1F0 2F4 1F1 2F5 1F2 2B4 (2F6;1B0)OVERLAP_F_B (1F3;2B5)OVERLAP_F_B (2F7;1B1)OVERLAP_F_B 2B6 1B2 2I7 1I3 2W7 1W3"
    )
    for rank in (0, 1):
        turned = [
            tuple(a._replace(microbatch=(a.microbatch + 4) % 8) for a in slot)
            for slot in program.ranks[rank]
        ]
        assert tuple(turned) == program.ranks[3 - rank]


@pytest.mark.parametrize(
    "p, m", [(4, 4), (4, 5), (4, 7), (4, 8), (4, 11), (4, 15), (3, 2), (8, 33)]
)
def test_groups_are_even_and_at_least_as_long_as_the_pipeline(p, m):
    sizes = group_sizes(p, m)
    assert sum(sizes) == m and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= p or len(sizes) == 1


def test_interleaved_does_not_degrade_between_multiples():
    """A rest of micro-batches costs at most what a whole further round would."""
    for m in range(9, 16):
        assert (
            overhead("interleaved", 8, m, Costs(), 2)
            <= overhead("interleaved", 8, 8, Costs(), 2) + 3
        )


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
        (("1f1b", 2, 4, 2), ["parallel.vpp=1", "got 2"]),
        (("zb_v", 2, 4, 3), ["parallel.vpp=2", "got 3"]),
        (("interleaved", 2, 4, 1), ["parallel.vpp=2", "got 1"]),
    ],
)
def test_impossible_sizes_are_refused_with_the_nearest_legal_value(arguments, words):
    with pytest.raises(ValueError) as caught:
        build_program(*arguments)
    for word in words:
        assert word in str(caught.value)

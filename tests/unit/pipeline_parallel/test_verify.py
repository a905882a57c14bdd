"""Programs broken by hand in more than 50 ways: each is refused, with the place named and the
schedule shown."""

from dataclasses import replace

import pytest

from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.program import (
    Action,
    Placement,
    loop_placement,
    make_program,
    zigzag_placement,
)
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.verify import ProgramError, verify


def action(text):
    digits = [i for i, letter in enumerate(text) if letter in "FIWBX"]
    return Action(text[digits[0]], int(text[: digits[0]]), int(text[digits[0] + 1 :]))


def slot(text):
    return tuple(action(part) for part in text.split("&"))


def hand(placement, *ranks):
    """A Program written out: one text of slots per rank, such as `0F0 0F1&0B0`."""
    lines = [[slot(text) for text in line.split()] for line in ranks]
    m = 1 + max(a.microbatch for line in lines for cell in line for a in cell)
    return make_program("hand", placement, [0] * m, lines)


class Edit:
    """Changes one Program, action by action, and gives it back in the end."""

    def __init__(self, name, p=4, m=8, chunks=None):
        self.program = build_program(name, p, m, chunks)
        self.ranks = [list(line) for line in self.program.ranks]
        self.direction = list(self.program.direction)

    def find(self, text):
        wanted = action(text)
        return next(
            (r, k)
            for r, line in enumerate(self.ranks)
            for k, cell in enumerate(line)
            if wanted in cell
        )

    def drop(self, *texts):
        for text in texts:
            rank, k = self.find(text)
            left = tuple(a for a in self.ranks[rank][k] if a != action(text))
            self.ranks[rank][k : k + 1] = [left] if left else []
        return self

    def add(self, text, rank, k):
        self.ranks[rank].insert(k, slot(text))
        return self

    def put(self, text, new):
        rank, k = self.find(text)
        self.ranks[rank][k] = slot(new) if new else ()
        return self

    def swap(self, one, two):
        (r, a), (q, b) = self.find(one), self.find(two)
        self.ranks[r][a], self.ranks[q][b] = self.ranks[q][b], self.ranks[r][a]
        return self

    def move(self, text, rank, k):
        self.drop(text)
        return self.add(text, rank, k)

    def fuse(self, one, two):
        self.drop(two)
        rank, k = self.find(one)
        self.ranks[rank][k] += slot(two)
        return self

    def turn(self, rank, at):
        self.ranks[rank] = at(self.ranks[rank])
        return self

    def way(self, microbatch, direction):
        self.direction[microbatch] = direction
        return self

    def done(self):
        program = self.program
        return make_program(program.name, program.placement, self.direction, self.ranks)


def edit(*arguments):
    return Edit(*arguments)


def loop(chunks=2):
    return loop_placement(2, chunks)


BROKEN = {
    # something is missing: where it would stand, by the rank and the slot after which it belongs
    "first F": (lambda: edit("1f1b").drop("0F0"), "rank 0, position 0: 0F0 is missing"),
    "middle F": (lambda: edit("1f1b").drop("2F5"), r"rank 2, position \d+: 2F5 is missing"),
    "last F": (lambda: edit("gpipe").drop("3F7"), "rank 3, position 7: 3F7 is missing"),
    "a B": (lambda: edit("1f1b").drop("1B3"), "rank 1, position 8: 1B3.*is missing"),
    "last B": (lambda: edit("1f1b").drop("0B7"), "rank 0, position 15: 0B7.*is missing"),
    "an I": (lambda: edit("zb_h1").drop("2I4"), "rank 2.*2I4 is missing"),
    "a W": (lambda: edit("zb_v").drop("6W2"), "rank 1.*6W2 is missing"),
    "an I and its W": (
        lambda: edit("zb_h2").drop("1I2", "1W2"),
        r"rank 1.*1B2 \(or 1I2 and its W\) is missing",
    ),
    "all W of a stage": (
        lambda: edit("zb_h1").drop(*(f"3W{i}" for i in range(8))),
        "rank 3.*3W0 is missing",
    ),
    "one of a pair": (lambda: edit("dualpipe").drop("3F6"), "rank 0.*3F6 is missing"),
    "a whole rank": (
        lambda: edit("1f1b").turn(2, lambda line: []),
        "rank 2, position 0: 2F0 is missing",
    ),
    "the second half of a rank": (
        lambda: edit("gpipe").turn(1, lambda line: line[:8]),
        "rank 1.*1B0.*is missing",
    ),
    # something runs twice
    "F twice": (
        lambda: edit("1f1b").add("1F3", 1, 9),
        "rank 1, position 9: 1F3 runs a second time",
    ),
    "B twice": (
        lambda: edit("gpipe").add("3B0", 3, 16),
        "rank 3, position 16: 3B0 runs a second time",
    ),
    "I twice": (lambda: edit("zb_h1").add("0I1", 0, 20), "rank 0.*0I1 runs a second time"),
    "W twice": (lambda: edit("zb_v").add("7W7", 0, 40), "rank 0.*7W7 runs a second time"),
    "twice in one slot": (
        lambda: edit("gpipe").put("2F5", "2F5&2F5"),
        "rank 2, position 5: 2F5 runs a second time",
    ),
    "one micro-batch for another": (
        lambda: edit("1f1b").put("2F5", "2F4"),
        "rank 2.*2F4 runs a second time",
    ),
    "B beside I and W": (
        lambda: edit("zb_h1").add("1B2", 1, 12),
        "rank 1.*1[IW]2 repeats a part of 1B2",
    ),
    "W beside B": (
        lambda: edit("1f1b").add("1W2", 1, 12),
        "rank 1, position 12: 1W2 repeats a part of 1B2",
    ),
    "I beside B": (
        lambda: edit("1f1b").add("3I2", 3, 12),
        "rank 3, position 12: 3I2 repeats a part of 3B2",
    ),
    # the order on one rank
    "B before its F": (
        lambda: edit("1f1b").swap("3F2", "3B2"),
        "rank 3, position 4: 3B2 runs before 3F2",
    ),
    "I before its F": (lambda: edit("zb_h1").swap("3F2", "3I2"), "rank 3.*3I2 runs before 3F2"),
    "W before its I": (lambda: edit("zb_v").swap("0I3", "0W3"), "rank 0.*0W3 runs before 0I3"),
    "W first of all": (
        lambda: edit("zb_h1").move("2W0", 2, 0),
        "rank 2, position 0: 2W0 runs before 2I0",
    ),
    "B first of all": (
        lambda: edit("gpipe").move("0B0", 0, 0),
        "rank 0, position 0: 0B0 runs before 0F0",
    ),
    "a rank backwards": (
        lambda: edit("gpipe").turn(3, lambda x: x[::-1]),
        "rank 3, position 0: 3B7 runs before 3F7",
    ),
    # messages that cross in their channel
    "F crossed at the sender": (
        lambda: edit("gpipe").swap("0F3", "0F4"),
        "rank 1, position 3: messages cross in flow F of stages 0>1, rank 0 to 1: sent 0F4 before 0F3",
    ),
    "F crossed at the receiver": (
        lambda: edit("gpipe").swap("3F3", "3F4"),
        "rank 3, position 3: messages cross",
    ),
    "F crossed in the middle": (
        lambda: edit("gpipe").swap("2F0", "2F7"),
        "flow F of stages 1>2, rank 1 to 2",
    ),
    "B crossed": (
        lambda: edit("gpipe").swap("1B3", "1B4"),
        "messages cross in flow B of stages [01]<",
    ),
    "I crossed": (
        lambda: edit("zb_v", 4, 12).swap("0I8", "0I9").swap("0W8", "0W9"),
        "flow B of stages 0<1",
    ),
    "B crossed where it wraps round": (
        lambda: edit("interleaved", 2, 4).swap("2B0", "2B1"),
        "flow B of stages [12]<[23]",
    ),
    "crossed in the second direction": (
        lambda: edit("dualpipe", 4, 12).swap("1F6", "1F7"),
        "messages cross in flow F of stages [01]>[12], rank [32] to [21]",
    ),
    # circles of waiting
    "two ranks wait for each other": (
        lambda: hand(loop(1), "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        "rank 0, position 1: deadlock.*rank 0 at 0B0; rank 1 at 1F1",
    ),
    "chunk 0 back before chunk 1": (
        lambda: hand(loop(), "0F0 2F0 0B0 2B0", "1F0 3F0 3B0 1B0"),
        "rank 0, position 2: deadlock.*rank 0 at 0B0; rank 1 at 1B0",
    ),
    "chunk 1 before chunk 0": (
        lambda: hand(loop(), "2F0 0F0 2B0 0B0", "1F0 3F0 3B0 1B0"),
        "deadlock.*rank 0 at 2F0; rank 1 at 1F0",
    ),
    "a pair that waits for itself": (
        lambda: hand(loop(1), "0F0 0F1&0B0 0B1", "1F0 1F1&1B0 1B1"),
        "rank 0, position 1: deadlock.*0F1&0B0.*1F1&1B0",
    ),
    "three ranks in a circle": (
        lambda: hand(loop_placement(3), "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"),
        "deadlock.*rank 0 at 0B0; rank 1 at 1F1",
    ),
    # on the wrong rank, or in the wrong direction
    "an F on its neighbour": (
        lambda: edit("1f1b").move("1F2", 2, 2),
        "position 2: 1F2 is on rank 2, but rank 1 holds",
    ),
    "a W on its neighbour": (
        lambda: edit("zb_h1").move("1W2", 0, 20),
        "rank 0.*1W2 is on rank 0, but rank 1",
    ),
    "two ranks changed": (
        lambda: edit("1f1b").turn(0, lambda _: list(build_program("1f1b", 4, 8).ranks[3])),
        "rank 0, position 0: 3F0 is on rank 0, but rank 3",
    ),
    "the other copy's rank": (
        lambda: edit("dualpipe").move("0F1", 3, 0),
        "0F1 is on rank 3, but rank 0.*direction 0",
    ),
    "a micro-batch turned round": (
        lambda: edit("dualpipe").way(2, 1),
        "0F2 is on rank 0, but rank 3.*direction 1",
    ),
    "a direction without a copy": (
        lambda: edit("dualpipe").way(5, 2),
        "micro-batch 5 has direction 2.*2 copies",
    ),
    "a second direction in a V": (
        lambda: edit("zb_v").way(5, 1),
        "micro-batch 5 has direction 1.*1 copies",
    ),
    # what must not overlap
    "F with its own B": (
        lambda: edit("1f1b").fuse("3F2", "3B2"),
        "rank 3.*3F2 and 3B2 overlap: a forward cannot",
    ),
    "F with its own I": (
        lambda: edit("zb_h1").fuse("3F2", "3I2"),
        "rank 3.*3F2 and 3I2 overlap: a forward cannot",
    ),
    "B with its own F": (
        lambda: edit("1f1b").fuse("3B2", "3F2"),
        "rank 3.*3B2 and 3F2 overlap: a forward cannot",
    ),
    "I with its own W": (
        lambda: edit("zb_h1").fuse("3I2", "3W2"),
        "rank 3.*3I2 and 3W2 overlap: one needs",
    ),
    "both F at a V's turn": (
        lambda: edit("zb_v").fuse("3F0", "4F0"),
        "rank 3, position 0: 3F0 and 4F0 overlap",
    ),
    "both I at a V's turn": (
        lambda: edit("zb_v").fuse("4I0", "3I0"),
        "rank 3.*4I0 and 3I0 overlap",
    ),
    "F(s) with I(s+1) at a V's turn": (
        lambda: hand(zigzag_placement(1), "0F0&1I0 1F0 1W0 0B0"),
        "rank 0, position 0: 0F0 and 1I0 overlap",
    ),
    "three at once": (lambda: edit("dualpipe", 4, 16).fuse("0F3", "0F4"), "3 actions in a slot"),
    "an empty slot": (
        lambda: edit("1f1b").put("2F3", ""),
        "rank 2, position 5: 0 actions in a slot",
    ),
    # what is no action of this Program
    "an unknown op": (
        lambda: edit("1f1b").put("2F3", "2X3"),
        "rank 2, position 5: 2X3: 'X' is none of F, I, W, B",
    ),
    "a stage too many": (
        lambda: edit("1f1b").put("2F3", "4F3"),
        "rank 2, position 5: 4F3: the stages are 0 to 3",
    ),
    "a micro-batch too many": (
        lambda: edit("1f1b").put("2F3", "2F8"),
        "2F8: the micro-batches are 0 to 7",
    ),
    "a negative micro-batch": (
        lambda: edit("1f1b").turn(2, lambda x: [(Action("F", 2, -1),), *x[1:]]),
        "rank 2, position 0: 2F-1: the micro-batches are 0 to 7",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_program_is_refused_with_its_place(case):
    make, words = BROKEN[case]
    made = make()
    broken = made.done() if isinstance(made, Edit) else made
    with pytest.raises(ValueError, match=words) as caught:
        verify(broken)
    if isinstance(caught.value, ProgramError):
        first, *shown = str(caught.value).splitlines()
        assert f"rank {caught.value.rank}, position {caught.value.position}" in first
        assert shown and shown[0].startswith(f"  rank {caught.value.rank}:")


def test_the_breaks_are_many_and_their_originals_correct():
    assert len(BROKEN) >= 50
    for name in ("1f1b", "gpipe", "zb_h1", "zb_h2", "zb_v", "dualpipe"):
        verify(edit(name).done())
    for name, p, m in (
        ("zb_v", 4, 12),
        ("interleaved", 2, 4),
        ("dualpipe", 4, 12),
        ("dualpipe", 4, 16),
    ):
        verify(edit(name, p, m).done())
    verify(hand(loop(1), "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))


@pytest.mark.parametrize(
    "name, cap, words",
    [
        ("1f1b", 3, "rank 0, position 3: 0F3 raises the activations to 4.*cap is 3.*cap of 4"),
        ("gpipe", 4, "rank 0, position 4: 0F4 raises the activations to 5.*cap is 4.*cap of 8"),
        ("dualpipe", 4, "rank 0.*raises the activations to 5.*cap is 4"),
        (
            "zb_h1",
            [4, 4, 3, 4],
            "rank 2, position [0-9]+: .* raises the activations to 4.*cap is 3",
        ),
    ],
)
def test_memory_over_the_cap(name, cap, words):
    program = build_program(name, 4, 8)
    with pytest.raises(ProgramError, match=words):
        verify(program, memory=cap)
    verify(program, memory=8)


def test_weight_gradients_put_off_too_long_break_the_cap():
    late = edit("zb_h1").turn(3, lambda line: sorted(line, key=lambda cell: cell[0].op == "W"))
    assert verify(edit("zb_h1").done(), memory=4).peak_activations.max() == 4
    with pytest.raises(ProgramError, match="rank 3.*3F4 raises the activations to 5"):
        verify(late.done(), memory=4)


def test_uneven_stages_change_the_peaks():
    program = build_program("1f1b", 2, 4)
    assert verify(program, costs=Costs(stage_scale=(0.5, 2.0))).peak_activations.tolist() == [
        1.0,
        2.0,
    ]


def test_allowed_pairs_are_accepted():
    """F&B, F&W, I&W of different micro-batches, F&F, and a W beside what does not need it."""
    verify(build_program("dualpipe", 4, 8))
    verify(hand(loop_placement(1), "0F0 0F1&0I0 0F2&0W0 0I1 0I2&0W1 0W2"))
    verify(hand(loop_placement(1), "0F0&0F1 0B0 0B1"))
    verify(hand(zigzag_placement(1), "0F0 1F0 1I0 0I0&1W0 0W0"))


def test_a_placement_must_be_even_and_complete():
    program = build_program("1f1b", 2, 2)
    with pytest.raises(ValueError, match="rank 0 holds 2 stages"):
        verify(replace(program, placement=Placement(((0, 0),), 2)))
    with pytest.raises(ValueError, match="1 lists of slots, but pp=2"):
        verify(replace(program, ranks=program.ranks[:1]))


def test_the_message_shows_the_schedule_around_the_fault():
    with pytest.raises(ProgramError) as caught:
        verify(edit("1f1b").swap("3F4", "3B4").done())
    assert str(caught.value).splitlines() == [
        "1f1b: rank 3, position 8: 3B4 runs before 3F4",
        "  rank 3: … 3B2 3F3 3B3 [3B4] 3F4 3F5 3B5 …",
        "  rank 3: … 3F3 3B3 3B4 [3F4] 3F5 3B5 3F6 …",
    ]

"""Programs broken by hand in more than 50 ways: each is rejected with its place and the schedule
around it."""

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
    (i,) = [i for i, letter in enumerate(text) if letter in "FIWBX"]
    return Action(text[i], int(text[:i]), int(text[i + 1 :]))


def slot(text):
    return tuple(action(name) for name in text.split("&"))


def by_hand(placement, *ranks):
    """A Program written out: one text of slots per rank, such as `0F0 0F1&0B0`."""
    lines = [[slot(text) for text in line.split()] for line in ranks]
    m = 1 + max(action.microbatch for line in lines for slot in line for action in slot)
    return make_program("by hand", placement, [0] * m, lines)


class Edit:
    """Changes one Program by commands such as `drop 0F0`."""

    def __init__(self, schedule, commands, p=4, m=8):
        self.program = build_program(schedule, p, m)
        self.ranks = [list(line) for line in self.program.ranks]
        self.direction = list(self.program.direction)
        for command in filter(None, commands.split("; ")):
            name, *arguments = command.split()
            getattr(self, name)(*[int(a) if a.isdigit() else a for a in arguments])

    @property
    def result(self):
        program = self.program
        return make_program(program.name, program.placement, self.direction, self.ranks)

    def find(self, text):
        """Rank and position of an action."""
        return next(
            (rank, position)
            for rank, line in enumerate(self.ranks)
            for position, slot in enumerate(line)
            if action(text) in slot
        )

    def drop(self, text):
        rank, k = self.find(text)
        partner = tuple(other for other in self.ranks[rank][k] if other != action(text))
        self.ranks[rank][k : k + 1] = [partner] if partner else []

    def add(self, text, rank, position):
        self.ranks[rank].insert(position, slot(text))

    def put(self, text, new=""):
        rank, position = self.find(text)
        self.ranks[rank][position] = slot(new) if new else ()

    def swap(self, one, two):
        (r, a), (q, b) = self.find(one), self.find(two)
        self.ranks[r][a], self.ranks[q][b] = self.ranks[q][b], self.ranks[r][a]

    def move(self, text, rank, position):
        self.drop(text)
        self.add(text, rank, position)

    def fuse(self, one, two):
        self.drop(two)
        rank, position = self.find(one)
        self.ranks[rank][position] += slot(two)

    def cut(self, rank, length):
        del self.ranks[rank][length:]

    def reverse(self, rank):
        self.ranks[rank].reverse()

    def copy(self, source, target):
        self.ranks[target] = list(self.ranks[source])

    def route(self, microbatch, direction):
        self.direction[microbatch] = direction


# (schedule, commands, error), and sizes other than 4 ranks and 8 micro-batches
EDITS = {
    # missing actions: the place is where they belong
    "first F": ("1f1b", "drop 0F0", "rank 0, position 0: 0F0 is missing"),
    "middle F": ("1f1b", "drop 2F5", r"rank 2, position \d+: 2F5 is missing"),
    "last F": ("gpipe", "drop 3F7", "rank 3, position 7: 3F7 is missing"),
    "a B": ("1f1b", "drop 1B3", "rank 1, position 8: 1B3.*is missing"),
    "last B": ("1f1b", "drop 0B7", "rank 0, position 15: 0B7.*is missing"),
    "an I": ("zb_h1", "drop 2I4", "rank 2.*2I4 is missing"),
    "a W": ("zb_v", "drop 6W2", "rank 1.*6W2 is missing"),
    "an I and its W": (
        "zb_h2",
        "drop 1I2; drop 1W2",
        r"rank 1.*1B2 \(or 1I2 and its W\) is missing",
    ),
    "all W of a stage": (
        "zb_h1",
        "; ".join(f"drop 3W{i}" for i in range(8)),
        "rank 3.*3W0 is missing",
    ),
    "one of a pair": ("dualpipe", "drop 3F6", "rank 0.*3F6 is missing"),
    "all of a rank": ("1f1b", "cut 2 0", "rank 2, position 0: 2F0 is missing"),
    "the second half of a rank": ("gpipe", "cut 1 8", "rank 1.*1B0.*is missing"),
    # repeated actions
    "F twice": ("1f1b", "add 1F3 1 9", "rank 1, position 9: 1F3 runs a second time"),
    "B twice": ("gpipe", "add 3B0 3 16", "rank 3, position 16: 3B0 runs a second time"),
    "I twice": ("zb_h1", "add 0I1 0 20", "rank 0.*0I1 runs a second time"),
    "W twice": ("zb_v", "add 7W7 0 40", "rank 0.*7W7 runs a second time"),
    "twice in one slot": (
        "gpipe",
        "put 2F5 2F5&2F5",
        "rank 2, position 5: 2F5 runs a second time",
    ),
    "one micro-batch for another": ("1f1b", "put 2F5 2F4", "rank 2.*2F4 runs a second time"),
    "B with I and W": ("zb_h1", "add 1B2 1 12", "rank 1.*1[IW]2 repeats a part of 1B2"),
    "W with B": ("1f1b", "add 1W2 1 12", "rank 1, position 12: 1W2 repeats a part of 1B2"),
    "I with B": ("1f1b", "add 3I2 3 12", "rank 3, position 12: 3I2 repeats a part of 3B2"),
    # the order on one rank
    "B before its F": ("1f1b", "swap 3F2 3B2", "rank 3, position 4: 3B2 runs before 3F2"),
    "I before its F": ("zb_h1", "swap 3F2 3I2", "rank 3.*3I2 runs before 3F2"),
    "W before its I": ("zb_v", "swap 0I3 0W3", "rank 0.*0W3 runs before 0I3"),
    "W first of all": ("zb_h1", "move 2W0 2 0", "rank 2, position 0: 2W0 runs before 2I0"),
    "B first of all": ("gpipe", "move 0B0 0 0", "rank 0, position 0: 0B0 runs before 0F0"),
    "a rank backwards": ("gpipe", "reverse 3", "rank 3, position 0: 3B7 runs before 3F7"),
    # messages that cross in their channel
    "F crossed at the sender": (
        "gpipe",
        "swap 0F3 0F4",
        "rank 1, position 3: messages cross in flow F of stages 0>1, rank 0 to 1: "
        "sent 0F4 before 0F3",
    ),
    "F crossed at the receiver": ("gpipe", "swap 3F3 3F4", "rank 3, position 3: messages cross"),
    "F crossed in the middle": ("gpipe", "swap 2F0 2F7", "flow F of stages 1>2, rank 1 to 2"),
    "B crossed": ("gpipe", "swap 1B3 1B4", "messages cross in flow B of stages [01]<"),
    "I crossed": ("zb_v", "swap 0I8 0I9; swap 0W8 0W9", "flow B of stages 0<1", 4, 12),
    "B crossed at the loop's end": (
        "interleaved",
        "swap 2B0 2B1",
        "flow B of stages [12]<[23]",
        2,
        4,
    ),
    "crossed in the second direction": (
        "dualpipe",
        "swap 1F6 1F7",
        "messages cross in flow F of stages [01]>[12], rank [32] to [21]",
        4,
        12,
    ),
    # wrong ranks or directions
    "an F on its neighbor": ("1f1b", "move 1F2 2 2", "position 2: 1F2 is on rank 2, but rank 1"),
    "a W on its neighbor": ("zb_h1", "move 1W2 0 20", "rank 0.*1W2 is on rank 0, but rank 1"),
    "another rank's actions": (
        "1f1b",
        "copy 3 0",
        "rank 0, position 0: 3F0 is on rank 0, but rank 3",
    ),
    "the other copy's rank": (
        "dualpipe",
        "move 0F1 3 0",
        "0F1 is on rank 3, but rank 0.*direction 0",
    ),
    "another direction": ("dualpipe", "route 2 1", "0F2 is on rank 0, but rank 3.*direction 1"),
    "a direction without a copy": (
        "dualpipe",
        "route 5 2",
        "micro-batch 5 has direction 2.*2 copies",
    ),
    "a second direction in a V": ("zb_v", "route 5 1", "micro-batch 5 has direction 1.*1 copies"),
    # pairs that must not overlap
    "F with its B": ("1f1b", "fuse 3F2 3B2", "rank 3.*3F2 and 3B2 overlap: a forward cannot"),
    "F with its I": ("zb_h1", "fuse 3F2 3I2", "rank 3.*3F2 and 3I2 overlap: a forward cannot"),
    "B with its F": ("1f1b", "fuse 3B2 3F2", "rank 3.*3B2 and 3F2 overlap: a forward cannot"),
    "I with its W": ("zb_h1", "fuse 3I2 3W2", "rank 3.*3I2 and 3W2 overlap: one needs"),
    "both F at a V's turn": ("zb_v", "fuse 3F0 4F0", "rank 3, position 0: 3F0 and 4F0 overlap"),
    "both I at a V's turn": ("zb_v", "fuse 4I0 3I0", "rank 3.*4I0 and 3I0 overlap"),
    "three at once": ("dualpipe", "fuse 0F3 0F4", "3 actions in a slot", 4, 16),
    "an empty slot": ("1f1b", "put 2F3", "rank 2, position 5: 0 actions in a slot"),
    # actions that cannot belong to the Program
    "an unknown op": (
        "1f1b",
        "put 2F3 2X3",
        "rank 2, position 5: 2X3: 'X' is none of F, I, W, B",
    ),
    "a stage too many": ("1f1b", "put 2F3 4F3", "position 5: 4F3: the stages are 0 to 3"),
    "a micro-batch too many": ("1f1b", "put 2F3 2F8", "2F8: the micro-batches are 0 to 7"),
    "a negative micro-batch": ("1f1b", "put 2F0 2F-1", "2F-1: the micro-batches are 0 to 7"),
}
ONE, TWO = loop_placement(2), loop_placement(2, 2)
DEADLOCKS = {
    "two ranks wait for each other": (
        by_hand(ONE, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        "rank 0, position 1: deadlock.*rank 0 at 0B0; rank 1 at 1F1",
    ),
    "chunk 0 back before chunk 1": (
        by_hand(TWO, "0F0 2F0 0B0 2B0", "1F0 3F0 3B0 1B0"),
        "rank 0, position 2: deadlock.*rank 0 at 0B0; rank 1 at 1B0",
    ),
    "chunk 1 before chunk 0": (
        by_hand(TWO, "2F0 0F0 2B0 0B0", "1F0 3F0 3B0 1B0"),
        "deadlock.*rank 0 at 2F0; rank 1 at 1F0",
    ),
    "a pair that waits for itself": (
        by_hand(ONE, "0F0 0F1&0B0 0B1", "1F0 1F1&1B0 1B1"),
        "rank 0, position 1: deadlock.*0F1&0B0.*1F1&1B0",
    ),
    "one of three ranks does not wait": (
        by_hand(loop_placement(3), "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"),
        "deadlock.*rank 0 at 0B0; rank 1 at 1F1",
    ),
    "F(s) with I(s+1) at a V's turn": (
        by_hand(zigzag_placement(1), "0F0&1I0 1F0 1W0 0B0"),
        "rank 0, position 0: 0F0 and 1I0 overlap",
    ),
}
BROKEN = DEADLOCKS | {
    case: (Edit(schedule, commands, *sizes).result, error)
    for case, (schedule, commands, error, *sizes) in EDITS.items()
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_program_is_rejected_with_its_place(case):
    program, message = BROKEN[case]
    with pytest.raises(ValueError, match=message) as caught:
        verify(program)
    if isinstance(caught.value, ProgramError):
        first, *shown = str(caught.value).splitlines()
        assert f"rank {caught.value.rank}, position {caught.value.position}" in first
        assert shown and shown[0].startswith(f"  rank {caught.value.rank}:")


def test_the_originals_are_correct():
    assert len(BROKEN) >= 50
    for schedule, _, _, *sizes in EDITS.values():
        verify(Edit(schedule, "", *sizes).result)
    verify(by_hand(ONE, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))


@pytest.mark.parametrize(
    "name, cap, message",
    [
        ("1f1b", 3, "rank 0, position 3: 0F3 raises the activations to 4.*cap is 3.*cap of 4"),
        ("gpipe", 4, "rank 0, position 4: 0F4 raises the activations to 5.*cap is 4.*cap of 8"),
        ("dualpipe", 4, "rank 0.*raises the activations to 5.*cap is 4"),
        ("zb_h1", [4, 4, 3, 4], "rank 2, position [0-9]+: .* the activations to 4.*cap is 3"),
    ],
)
def test_memory_over_the_cap(name, cap, message):
    program = build_program(name, 4, 8)
    with pytest.raises(ProgramError, match=message):
        verify(program, memory=cap)
    verify(program, memory=8)


def test_late_weight_gradients_exceed_the_cap():
    edit = Edit("zb_h1", "")
    assert verify(edit.result, memory=4).peak_activations.max() == 4
    edit.ranks[3].sort(key=lambda slot: slot[0].op == "W")
    with pytest.raises(ProgramError, match="rank 3.*3F4 raises the activations to 5"):
        verify(edit.result, memory=4)


def test_uneven_stages_change_the_peaks():
    peaks = verify(build_program("1f1b", 2, 4), costs=Costs(stage_scale=(0.5, 2.0)))
    assert peaks.peak_activations.tolist() == [1.0, 2.0]


def test_allowed_pairs_are_accepted():
    """F&B, F&W, I&W of different micro-batches, F&F, and a W with an action that it does not
    need."""
    verify(build_program("dualpipe", 4, 8))
    verify(by_hand(loop_placement(1), "0F0 0F1&0I0 0F2&0W0 0I1 0I2&0W1 0W2"))
    verify(by_hand(loop_placement(1), "0F0&0F1 0B0 0B1"))
    verify(by_hand(zigzag_placement(1), "0F0 1F0 1I0 0I0&1W0 0W0"))


def test_a_placement_must_be_even_and_complete():
    program = build_program("1f1b", 2, 2)
    with pytest.raises(ValueError, match="rank 0 holds 2 stages"):
        verify(replace(program, placement=Placement(((0, 0),), 2)))
    with pytest.raises(ValueError, match="1 lists of slots, but pp=2"):
        verify(replace(program, ranks=program.ranks[:1]))


def test_the_message_shows_the_schedule_around_the_fault():
    with pytest.raises(ProgramError) as caught:
        verify(Edit("1f1b", "swap 3F4 3B4").result)
    assert str(caught.value).splitlines() == [
        "1f1b: rank 3, position 8: 3B4 runs before 3F4",
        "  rank 3: … 3B2 3F3 3B3 [3B4] 3F4 3F5 3B5 …",
        "  rank 3: … 3F3 3B3 3B4 [3F4] 3F5 3B5 3F6 …",
    ]

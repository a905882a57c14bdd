"""The messages that the executor sends: every one once, in the same order at both ends, and few
ahead of their time."""

from collections import defaultdict

import pytest

from megatron5d.pipeline_parallel.messages import (
    Flow,
    Message,
    can_limit_sends,
    flows,
    input_of,
    lockstep_receives,
    output_of,
    slot_messages,
)
from megatron5d.pipeline_parallel.program import Action
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import read_program

PROGRAMS = [
    (name, p, m)
    for name in schedule_names()
    for p, m in ((2, 4), (4, 9), (4, 16))
    if "dual" not in name
] + [("dualpipe", 4, 16), ("dualpipe", 2, 4), ("dualpipe_v", 3, 7)]


@pytest.mark.parametrize("name, p, m", PROGRAMS)
def test_both_ends_of_every_flow_agree(name, p, m):
    program = build_program(name, p, m)
    sent, received = defaultdict(list), defaultdict(list)
    for rank in range(p):
        for step in slot_messages(program, rank):
            for message in step.sends:
                assert message.flow.source == rank
                sent[message.flow].append(message.microbatch)
            for message in step.receives:
                assert message.flow.destination == rank
                received[message.flow].append(message.microbatch)
    assert sent == received
    assert set(sent) <= set(flows(program))
    assert flows(program) == sorted(set(flows(program)))
    lines = [program.placement.route[way] for way in program.direction]
    hops = sum(a != b for line in lines for a, b in zip(line, line[1:]))
    assert sum(map(len, sent.values())) == 2 * hops


@pytest.mark.parametrize("name, p, m", PROGRAMS)
def test_receives_are_posted_early_and_few_at_a_time(name, p, m):
    program = build_program(name, p, m)
    for rank in range(p):
        posted, slots = {}, list(slot_messages(program, rank))
        for k, step in enumerate(slots):
            posted.update(dict.fromkeys(step.receives, k))
            for message in filter(None, (input_of(program, action) for action in step.slot)):
                assert k - posted.pop(message) == min(k, 2)
            overlapped = any(len(other.slot) > 1 for other in slots[k : k + 3])
            assert len(posted) <= (4 if overlapped else 2)
        assert not posted


def ends_where_hosts_wait(program, receives):
    """Whether all ranks finish if each, before each slot, waits for whatever it has sent or is to
    receive so far.

    So a GPU's host does that loads a kernel.
    """
    posted, sent = set(), set()

    def walk(rank):
        begun = set()
        for due, slot in zip(receives[rank], program.ranks[rank]):
            posted.update(due)
            begun.update(due)
            while not begun <= posted & sent:
                yield
            outputs = set(filter(None, (output_of(program, action) for action in slot)))
            begun |= outputs
            sent.update(outputs)

    walks, before = [walk(rank) for rank in range(program.num_ranks)], None
    while walks and before != (before := (len(posted), len(sent), len(walks))):
        walks = [each for each in walks if next(each, "done") != "done"]
    return not walks


@pytest.mark.parametrize("name, p, m", PROGRAMS)
def test_hosts_that_wait_for_their_devices_finish_in_lockstep_alone(name, p, m):
    program = build_program(name, p, m)
    lockstep = [lockstep_receives(program, rank) for rank in range(p)]
    early = [[each.receives for each in slot_messages(program, rank)] for rank in range(p)]
    assert ends_where_hosts_wait(program, lockstep) and not ends_where_hosts_wait(program, early)
    for rank in range(p):
        in_order, as_early = defaultdict(list), defaultdict(list)
        for due, each in zip(lockstep[rank], early[rank], strict=True):
            for message in due:
                in_order[message.flow].append(message.microbatch)
            for message in each:
                as_early[message.flow].append(message.microbatch)
        assert in_order == as_early


def test_the_messages_of_a_v_by_hand():
    program = build_program("zb_v", 2, 3)  # stages 0 1 | 1 0
    assert output_of(program, Action("F", 0, 1)) == Message(Flow(0, 1, "F", 0), 1)
    assert input_of(program, Action("F", 1, 1)) == Message(Flow(0, 1, "F", 0), 1)
    # the turn
    assert (
        output_of(program, Action("F", 1, 1)) is None
        and input_of(program, Action("F", 2, 1)) is None
    )
    assert input_of(program, Action("I", 2, 0)) == Message(Flow(0, 1, "B", 2), 0)
    assert (
        input_of(program, Action("F", 0, 0)) is None
        and output_of(program, Action("I", 0, 0)) is None
    )
    assert (
        input_of(program, Action("I", 3, 0)) is None
        and output_of(program, Action("F", 3, 0)) is None
    )
    assert (
        input_of(program, Action("W", 2, 0)) is None
        and output_of(program, Action("W", 2, 0)) is None
    )
    assert {str(flow) for flow in flows(program)} == {
        "F of stages 0>1, rank 0 to 1",
        "B of stages 2<3, rank 0 to 1",
        "B of stages 0<1, rank 1 to 0",
        "F of stages 2>3, rank 1 to 0",
    }


def test_opposite_directions_share_no_flow():
    program = build_program("dualpipe", 4, 8)
    own = defaultdict(set)
    for rank in range(4):
        for step in slot_messages(program, rank):
            for message in step.sends:
                own[message.flow].add(program.direction[message.microbatch])
    assert len(own) == 12 and all(len(directions) == 1 for directions in own.values())


def test_a_rank_waits_after_the_first_of_two_overlapping_forwards_sends():
    """Rank 0 would wait for 1F3's receive before it sends what 3F0 needs, which comes three slots
    before 1F3."""
    first = "0F0,0F1,0F2,0F3,0F4,{},2F1,2F2,2F3,2F4,2F5\n1F0,1F1,3F0,3F1,1F2,1F3,3F2,3F3,1F4,1F5,3F4,3F5\n"
    overlapped = read_program(first.format("(0F5;2F0)OVERLAP_F_B"), "overlapped", 2, 6)
    apart = read_program(first.format("2F0,0F5"), "apart", 2, 6)
    assert [can_limit_sends(overlapped, most) for most in (2, 3)] == [False, True]
    assert can_limit_sends(apart, 2)

"""The messages of a Program: each is sent once, in the same order at both ends, and few arrive
early."""

from collections import defaultdict

import pytest

from megatron5d.pipeline_parallel.messages import (
    Flow,
    Message,
    can_limit_sends,
    early_receives,
    flows,
    input_of,
    inputs_of,
    lockstep_receives,
    output_of,
    outputs_of,
)
from megatron5d.pipeline_parallel.program import Action
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import read_program

PROGRAMS = [
    build_program(name, p, m)
    for name in schedule_names()
    for p, m in ((2, 4), (4, 9), (4, 16))
    if "dual" not in name
] + [build_program("dualpipe", p, m) for p, m in ((4, 16), (2, 4))]
PROGRAMS.append(build_program("dualpipe_v", 3, 7))
every_program = pytest.mark.parametrize(
    "program", PROGRAMS, ids=lambda g: f"{g.name}-{g.num_ranks}-{g.num_microbatches}"
)


def by_flow(messages):
    """The micro-batches of every flow."""
    microbatches = defaultdict(list)
    for message in messages:
        microbatches[message.flow].append(message.microbatch)
    return microbatches


@every_program
def test_both_ends_of_every_flow_agree(program):
    sends = [sum((outputs_of(program, slot) for slot in line), []) for line in program.ranks]
    receives = [sum(early_receives(program, rank), []) for rank in range(program.num_ranks)]
    for rank in range(program.num_ranks):
        assert {message.flow.source for message in sends[rank]} == {rank}
        assert {message.flow.destination for message in receives[rank]} == {rank}
    sent = by_flow(sum(sends, []))
    assert sent == by_flow(sum(receives, []))
    assert set(sent) <= set(flows(program))
    assert flows(program) == sorted(set(flows(program)))
    routes = [program.placement.route[direction] for direction in program.direction]
    hops = sum(a != b for route in routes for a, b in zip(route, route[1:]))
    assert sum(map(len, sent.values())) == 2 * hops


@every_program
def test_receives_are_posted_early_and_few_at_a_time(program):
    for rank in range(program.num_ranks):
        posted, line = {}, program.ranks[rank]
        for k, (receives, slot) in enumerate(zip(early_receives(program, rank), line, strict=True)):
            posted.update(dict.fromkeys(receives, k))
            for message in inputs_of(program, slot):
                assert k - posted.pop(message) == min(k, 2)
            overlapped = any(len(other) > 1 for other in line[k : k + 3])
            assert len(posted) <= (4 if overlapped else 2)
        assert not posted


def finishes_with_waiting_hosts(program, receives):
    """Whether all ranks finish if each waits before every slot for all it has sent or posted so
    far, as a GPU's host does when it loads a kernel."""
    posted, sent = set(), set()

    def walk(rank):
        begun = set()
        for messages, slot in zip(receives[rank], program.ranks[rank]):
            posted.update(messages)
            begun.update(messages)
            while not begun <= posted & sent:
                yield
            begun.update(outputs_of(program, slot))
            sent.update(outputs_of(program, slot))

    walks, progress = [walk(rank) for rank in range(program.num_ranks)], None
    while walks and progress != (progress := (len(posted), len(sent), len(walks))):
        walks = [steps for steps in walks if next(steps, "done") != "done"]
    return not walks


@every_program
def test_only_lockstep_lets_hosts_wait_for_their_devices(program):
    ranks = range(program.num_ranks)
    lockstep = [lockstep_receives(program, rank) for rank in ranks]
    early = [early_receives(program, rank) for rank in ranks]
    assert finishes_with_waiting_hosts(program, lockstep)
    assert not finishes_with_waiting_hosts(program, early)
    for lockstep_line, early_line in zip(lockstep, early):
        assert len(lockstep_line) == len(early_line)
        assert by_flow(sum(lockstep_line, [])) == by_flow(sum(early_line, []))


def test_the_messages_of_a_v_by_hand():
    program = build_program("zb_v", 2, 3)  # stages 0 1 | 1 0
    message = Message(Flow(0, 1, "F", 0), 1)
    assert output_of(program, Action("F", 0, 1)) == input_of(program, Action("F", 1, 1)) == message
    assert input_of(program, Action("I", 2, 0)) == Message(Flow(0, 1, "B", 2), 0)
    # no output: at the turn, at both ends, and of a weight gradient
    for op, stage in (("F", 1), ("F", 3), ("I", 0), ("W", 2)):
        assert output_of(program, Action(op, stage, 0)) is None
    for op, stage in (("F", 2), ("F", 0), ("I", 3), ("W", 2)):
        assert input_of(program, Action(op, stage, 0)) is None
    assert {str(flow) for flow in flows(program)} == {
        "F of stages 0>1, rank 0 to 1",
        "B of stages 2<3, rank 0 to 1",
        "B of stages 0<1, rank 1 to 0",
        "F of stages 2>3, rank 1 to 0",
    }


def test_opposite_directions_share_no_flow():
    program = build_program("dualpipe", 4, 8)
    sends = [outputs_of(program, slot) for line in program.ranks for slot in line]
    directions = [
        {program.direction[microbatch] for microbatch in microbatches}
        for microbatches in by_flow(sum(sends, [])).values()
    ]
    assert len(directions) == 12 and all(len(unique) == 1 for unique in directions)


def test_a_rank_waits_after_the_first_of_two_overlapping_forwards_sends():
    """Rank 0 would wait for 1F3's receive before it sends what 3F0 needs, which comes three slots
    before 1F3."""
    text = (
        "0F0,0F1,0F2,0F3,0F4,{},2F1,2F2,2F3,2F4,2F5\n"
        "1F0,1F1,3F0,3F1,1F2,1F3,3F2,3F3,1F4,1F5,3F4,3F5\n"
    )
    overlapped = read_program(text.format("(0F5;2F0)OVERLAP_F_B"), "overlapped", 2, 6)
    separate = read_program(text.format("2F0,0F5"), "separate", 2, 6)
    assert [can_limit_sends(overlapped, limit) for limit in (2, 3)] == [False, True]
    assert can_limit_sends(separate, 2)

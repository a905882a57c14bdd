"""The simulator compared with a slow one that polls all ranks, and with cases counted by hand."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from megatron5d.pipeline_parallel.costs import Costs, StageCosts, parse_costs
from megatron5d.pipeline_parallel.program import (
    OPS,
    Action,
    loop_placement,
    make_program,
    mirrored_placement,
    program_from_table,
    zigzag_placement,
)
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.simulate import idle_fractions, simulate
from megatron5d.pipeline_parallel.verify import verify


def inputs_of(program, action):
    """(op, stage) of the passes that an action waits for."""
    op, stage, _ = action
    if op == "F":
        return [("F", stage - 1)] if stage else []
    if op == "W":
        return [("I", stage)]
    return [("F", stage)] + ([("I", stage + 1)] if stage < program.num_stages - 1 else [])


def arrival(program, costs, ends, action):
    """When the last input of an action arrives; None if one is not made yet."""
    _, stage, i = action
    times = [0.0]
    for op, source in inputs_of(program, action):
        made = [ends[a] for a in (Action(op, source, i), Action("B", source, i)) if a in ends]
        if not made:
            return None
        crosses = program.rank_of(stage, i) != program.rank_of(source, i)
        times.append(made[0] + (costs.comm if crosses else 0.0))
    return max(times)


def polled(program, costs):
    """Makespan, {action: end} and peak activations, by polling every rank for what it can start."""
    ends, position = {}, [0] * program.num_ranks
    clock, activations, peak = ([0.0] * program.num_ranks for _ in range(3))
    while any(position[r] < len(line) for r, line in enumerate(program.ranks)):
        progress = False
        for r, line in enumerate(program.ranks):
            slot = line[position[r]] if position[r] < len(line) else ()
            arrivals = [arrival(program, costs, ends, action) for action in slot]
            if not slot or None in arrivals:
                continue
            compute, a2a = (
                [times[OPS.index(a.op), a.stage] for a in slot]
                for times in (costs.compute, costs.a2a)
            )
            clock[r] = max(clock[r], *arrivals) + max(
                sum(compute), sum(a2a), *(c + t for c, t in zip(compute, a2a))
            )
            activations[r] += sum(costs.activation[a.stage] for a in slot if a.op == "F")
            peak[r] = max(peak[r], activations[r])
            activations[r] -= sum(costs.activation[a.stage] for a in slot if a.op in "WB")
            ends.update(dict.fromkeys(slot, clock[r]))
            position[r] += 1
            progress = True
        assert progress, "stuck"
    return max(clock), ends, peak


def random_costs(placement, seed):
    rng = np.random.default_rng(seed)
    shape = (len(OPS), placement.num_stages)
    sizes = rng.uniform(0.5, 1.5, placement.num_stages)
    return StageCosts(
        rng.uniform(0.2, 2, shape), rng.uniform(0, 1.5, shape), rng.uniform(0, 0.5), sizes, sizes
    )


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("p, m", [(2, 6), (4, 12)])
def test_agrees_with_a_simulator_that_polls(name, p, m):
    program = build_program(name, p, m)
    for seed in range(3):
        costs = random_costs(program.placement, seed)
        result = simulate(program, costs)
        makespan, ends, peak = polled(program, costs)
        assert result.makespan == pytest.approx(makespan)
        assert result.peak_activations == pytest.approx(peak)
        slots = sum(program.ranks, ())
        assert result.end == pytest.approx([ends[slot[0]] for slot in slots])


def test_random_pairs_agree_too():
    """Adjacent slots of any two ops overlap, at random, as long as the Program still runs."""
    rng, kinds = random.Random(0), set()
    for seed, name in enumerate(("zb_v", "interleaved_zb", "zb_h2", "zb_h1", "v_half")):
        program = build_program(name, 3, 6)
        for _ in range(60):
            rank = rng.randrange(3)
            line = program.ranks[rank]
            k = rng.randrange(len(line) - 1)
            pair = line[k] + line[k + 1]
            lines = list(program.ranks)
            lines[rank] = (*line[:k], pair, *line[k + 2 :])
            try:
                verify(replace(program, ranks=tuple(lines)))
            except ValueError:
                continue
            program = replace(program, ranks=tuple(lines))
        slots = sum(program.ranks, ())
        kinds |= {frozenset(a.op for a in slot) for slot in slots if len(slot) == 2}
        costs = random_costs(program.placement, seed)
        assert simulate(program, costs).makespan == pytest.approx(polled(program, costs)[0])
    assert kinds >= {frozenset("FI"), frozenset("FW"), frozenset("IW"), frozenset("F")}


def one_rank(text, m=2):
    """A Program of one stage: its slots, such as `F0 F1&B0`."""
    slots = [
        tuple(Action(action[0], 0, int(action[1:])) for action in slot.split("&"))
        for slot in text.split()
    ]
    return make_program("by hand", loop_placement(1), [0] * m, [slots])


@pytest.mark.parametrize(
    "text, times",
    [
        ("F=1,I=1,W=1,a2aF=0.5,a2aB=0.5", [1.5, 3.0, 2.5]),  # the computes fill the time
        ("F=1,I=1,W=1,a2aF=2,a2aB=2", [3.0, 4.0, 4.0]),  # the all-to-alls do
        ("F=1,I=1,W=1,a2aF=0,a2aB=3", [1.0, 5.0, 5.0]),  # the backward is longer than either sum
    ],
)
def test_the_time_of_a_pair(text, times):
    """max(sum of computes, sum of all-to-alls, the longer of the two by itself)."""
    result = simulate(one_rank("F0 F1&B0 B1"), parse_costs(text))
    assert (result.end - result.start).tolist() == times
    assert result.work[0] == 6 and result.exposed_a2a[0] == pytest.approx(sum(times) - 6)


def test_costs_divide_over_chunks_and_latency_delays_only_the_receiver():
    lines = [
        [(Action(op, int(stage), 0),) for stage, op in text.split()]
        for text in ("0F 3F 3B 0B", "1F 2F 2B 1B")
    ]
    v = make_program("v", zigzag_placement(2), [0], lines)
    result = simulate(v, Costs(F=2, I=2, W=2, comm=0.25))
    # the turn from 1 to 2 stays on its rank
    assert result.start.tolist() == [0, 3.5, 4.5, 11, 1.25, 2.25, 6.75, 8.75]
    assert result.makespan == 13
    assert result.exposed_p2p.tolist() == [0.5, 0.5]
    assert result.peak_activations.tolist() == [1, 1]


@pytest.mark.parametrize(
    "text, activations, stash",
    [("F0 I0 F1 I1 W0 W1", 2, 2), ("F0 I0 W0 F1 I1 W1", 1, 1), ("F0 F1&B0 B1", 2, 0)],
)
def test_an_activation_counts_until_its_weight_gradient_has_run(text, activations, stash):
    result = simulate(one_rank(text), Costs())
    assert (result.peak_activations[0], result.peak_stash[0]) == (activations, stash)


def test_stages_may_differ():
    program = build_program("gpipe", 2, 1)
    result = simulate(program, Costs(stage_scale=(0.5, 2.0)))
    assert result.makespan == 0.5 + 2 + 4 + 1 and result.work.tolist() == [1.5, 6.0]
    assert result.peak_activations.tolist() == [0.5, 2.0]
    with pytest.raises(ValueError, match="3 entries.*2 stages"):
        simulate(program, Costs(stage_scale=(1.0, 1.0, 1.0)))


def test_bidirectional_ranks_do_the_work_of_half_the_micro_batches_twice():
    result = simulate(build_program("dualpipe", 4, 16), Costs())
    assert result.work.tolist() == [48.0] * 4


def test_a_program_that_hangs_is_not_simulated():
    program = build_program("1f1b", 2, 2)
    reversed_line = replace(program, ranks=(program.ranks[0], program.ranks[1][::-1]))
    error = "never ends: rank 0 waits forever at position 2; rank 1 waits forever at position 0"
    with pytest.raises(ValueError, match=error):
        simulate(reversed_line, Costs())


@pytest.mark.parametrize("name", schedule_names())
def test_the_table_has_the_entire_program(name):
    program = build_program(name, 4, 8)
    from_table = program_from_table(name, program.placement, program.direction, program.table)
    assert from_table == program


def test_placements():
    assert loop_placement(3, 2).route == ((0, 1, 2, 0, 1, 2),)
    assert zigzag_placement(3, 4).route == ((0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0),)
    mirrored = mirrored_placement(4)
    assert mirrored.route == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert mirrored.copies == 2 and mirrored.chunks == 1
    assert mirrored.stages_of(1) == [(0, 1), (1, 2)]
    assert zigzag_placement(3, 2).stages_of(1) == [(0, 1), (0, 4)]


@pytest.mark.parametrize(
    "text, error", [("F=x", "'x'"), ("G=1", "'G'"), ("F=-1", "at least 0"), ("W=inf", "finite")]
)
def test_costs_are_read_strictly(text, error):
    with pytest.raises(ValueError, match=error):
        parse_costs(text)


@pytest.mark.timing
def test_large_programs_take_seconds():
    begin = time.process_time()
    for name in ("zb_v", "dualpipe"):
        program = build_program(name, 64, 1024)
        verify(program)
        simulate(program, parse_costs("F=1,I=1.2,W=0.8,comm=0.1"))
    assert time.process_time() - begin < 30


def test_a_rank_does_not_wait_after_its_last_action():
    """One micro-batch: F 0 to 1 and B 4 to 6 on rank 0, F 1 to 2 and B 2 to 4 on rank 1."""
    program = build_program("1f1b", 2, 1)
    assert idle_fractions(program, simulate(program, Costs())) == [1 / 2, 1 / 4]

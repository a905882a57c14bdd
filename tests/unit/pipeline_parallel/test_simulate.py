"""The simulator against a second, slow one that steps through time, and against cases counted by
hand."""

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
from megatron5d.pipeline_parallel.registry import build_program, find_schedule, schedule_names
from megatron5d.pipeline_parallel.simulate import idle_fractions, simulate
from megatron5d.pipeline_parallel.verify import verify


def stepped(program, costs):
    """Return makespan, {action: end} and peak activations by asking every rank again and again what
    it can start."""
    ends, at, begun = {}, [0] * program.num_ranks, [0.0] * program.num_ranks
    held, peak = [0.0] * program.num_ranks, [0.0] * program.num_ranks
    last = program.num_stages - 1

    def done(op, stage, i):
        return next(
            (ends[a] for a in (Action(op, stage, i), Action("B", stage, i)) if a in ends), None
        )

    def ready(action):
        op, stage, i = action
        if op == "F":
            needs = [] if stage == 0 else [("F", stage - 1)]
        elif op == "W":
            needs = [("I", stage)]
        else:
            needs = [("F", stage)] + ([] if stage == last else [("I", stage + 1)])
        times = [0.0]
        for kind, other in needs:
            end = done(kind, other, i)
            if end is None:
                return None
            times.append(
                end
                + (costs.comm if program.rank_of(stage, i) != program.rank_of(other, i) else 0.0)
            )
        return max(times)

    while any(at[r] < len(program.ranks[r]) for r in range(program.num_ranks)):
        progress = False
        for r in range(program.num_ranks):
            if at[r] == len(program.ranks[r]):
                continue
            slot = program.ranks[r][at[r]]
            times = [ready(action) for action in slot]
            if None in times:
                continue
            compute = [costs.compute[OPS.index(a.op), a.stage] for a in slot]
            a2a = [costs.a2a[OPS.index(a.op), a.stage] for a in slot]
            alone = [c + t for c, t in zip(compute, a2a)]
            took = alone[0] if len(slot) == 1 else max(sum(compute), sum(a2a), *alone)
            begun[r] = max(begun[r], *times) + took
            held[r] += sum(costs.activation[a.stage] for a in slot if a.op == "F")
            peak[r] = max(peak[r], held[r])
            held[r] -= sum(costs.activation[a.stage] for a in slot if a.op in "WB")
            ends.update(dict.fromkeys(slot, begun[r]))
            at[r] += 1
            progress = True
        assert progress, "stuck"
    return max(begun), ends, peak


def random_costs(placement, seed):
    rng = np.random.default_rng(seed)
    shape = (len(OPS), placement.num_stages)
    sizes = rng.uniform(0.5, 1.5, placement.num_stages)
    return StageCosts(
        rng.uniform(0.2, 2, shape), rng.uniform(0, 1.5, shape), rng.uniform(0, 0.5), sizes, sizes
    )


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("p, m", [(2, 5), (4, 12)])
def test_agrees_with_a_simulator_that_steps_through_time(name, p, m):
    program = build_program(name, p, m + m % 2)
    for seed in range(3):
        costs = random_costs(program.placement, seed)
        result = simulate(program, costs)
        makespan, ends, peak = stepped(program, costs)
        assert result.makespan == pytest.approx(makespan)
        assert result.peak_activations == pytest.approx(peak)
        flat = [slot for line in program.ranks for slot in line]
        assert result.end == pytest.approx([ends[slot[0]] for slot in flat])


def test_random_pairs_agree_too():
    """Neighbouring slots of any two ops overlap, at random, as long as the Program still runs."""
    rng, kinds = random.Random(0), set()
    for seed, name in enumerate(("zb_v", "interleaved_zb", "zb_h2", "zb_h1", "v_half")):
        program = build_program(name, 3, 6)
        for _ in range(60):
            rank = rng.randrange(3)
            line = program.ranks[rank]
            at = rng.randrange(len(line) - 1)
            if len(line[at] + line[at + 1]) == 2:
                joined = (*line[:at], line[at] + line[at + 1], *line[at + 2 :])
                fused = replace(
                    program, ranks=(*program.ranks[:rank], joined, *program.ranks[rank + 1 :])
                )
                try:
                    verify(fused)
                except ValueError:
                    continue
                program = fused
        kinds |= {
            frozenset(a.op for a in slot)
            for line in program.ranks
            for slot in line
            if len(slot) == 2
        }
        costs = random_costs(program.placement, seed)
        assert simulate(program, costs).makespan == pytest.approx(stepped(program, costs)[0])
    assert kinds >= {frozenset("FI"), frozenset("FW"), frozenset("IW"), frozenset("F")}


def one_rank(*slots, m=2):
    return make_program("hand", loop_placement(1), [0] * m, [slots])


def test_what_a_pair_takes():
    """max(sum of computes, sum of all-to-alls, the longest of the two alone)."""
    pair = one_rank(
        (Action("F", 0, 0),), (Action("F", 0, 1), Action("B", 0, 0)), (Action("B", 0, 1),)
    )
    for text, plain_f, together, plain_b in (
        ("F=1,I=1,W=1,a2aF=0.5,a2aB=0.5", 1.5, 3.0, 2.5),  # the computes fill the time
        ("F=1,I=1,W=1,a2aF=2,a2aB=2", 3.0, 4.0, 4.0),  # the all-to-alls do
        # the backward alone is longer than either sum
        ("F=1,I=1,W=1,a2aF=0,a2aB=3", 1.0, 5.0, 5.0),
    ):
        result = simulate(pair, parse_costs(text))
        assert (result.end - result.start).tolist() == [plain_f, together, plain_b], text
        assert result.work[0] == 6 and result.exposed_a2a[0] == pytest.approx(
            plain_f + together + plain_b - 6
        )


def test_costs_divide_over_chunks_and_latency_delays_only_the_neighbour():
    slots = lambda *texts: [(Action(t[1], int(t[0]), 0),) for t in texts]  # noqa: E731
    v = make_program(
        "v",
        zigzag_placement(2),
        [0],
        [slots("0F", "3F", "3B", "0B"), slots("1F", "2F", "2B", "1B")],
    )
    result = simulate(v, Costs(F=2, I=2, W=2, comm=0.25))
    # the turn 1 to 2 stays on its rank
    assert result.start.tolist() == [0, 3.5, 4.5, 11, 1.25, 2.25, 6.75, 8.75]
    assert result.makespan == 13
    assert result.exposed_p2p.tolist() == [0.5, 0.5]
    assert result.peak_activations.tolist() == [1, 1]


def test_an_activation_counts_until_its_weight_gradient_has_run():
    a = lambda op, i: (Action(op, 0, i),)  # noqa: E731
    late = one_rank(a("F", 0), a("I", 0), a("F", 1), a("I", 1), a("W", 0), a("W", 1))
    early = one_rank(a("F", 0), a("I", 0), a("W", 0), a("F", 1), a("I", 1), a("W", 1))
    fused = one_rank(a("F", 0), (Action("F", 0, 1), Action("B", 0, 0)), a("B", 1))
    peaks = [
        (r.peak_activations[0], r.peak_stash[0])
        for r in (simulate(x, Costs()) for x in (late, early, fused))
    ]
    assert peaks == [(2, 2), (1, 1), (2, 0)]


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
    turned = replace(program, ranks=(program.ranks[0], program.ranks[1][::-1]))
    with pytest.raises(
        ValueError,
        match="never ends: rank 0 waits forever at position 2; rank 1 waits forever at position 0",
    ):
        simulate(turned, Costs())


@pytest.mark.parametrize("name", schedule_names())
def test_the_table_holds_the_whole_program(name):
    program = build_program(name, 4, 8)
    again = program_from_table(name, program.placement, program.direction, program.table)
    assert again == program


def test_placements():
    assert loop_placement(3, 2).route == ((0, 1, 2, 0, 1, 2),)
    assert zigzag_placement(3, 4).route == ((0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0),)
    both = mirrored_placement(4)
    assert both.route == ((0, 1, 2, 3), (3, 2, 1, 0)) and both.copies == 2 and both.chunks == 1
    assert both.stages_of(1) == [(0, 1), (1, 2)]
    assert zigzag_placement(3, 2).stages_of(1) == [(0, 1), (0, 4)]


@pytest.mark.parametrize(
    "text, word", [("F=x", "'x'"), ("G=1", "'G'"), ("F=-1", "at least 0"), ("W=inf", "finite")]
)
def test_costs_are_read_strictly(text, word):
    with pytest.raises(ValueError, match=word):
        parse_costs(text)


def test_large_programs_take_seconds():
    begin = time.process_time()
    for name in ("zb_v", "dualpipe"):
        assert find_schedule(name)
        program = build_program(name, 64, 1024)
        verify(program)
        simulate(program, parse_costs("F=1,I=1.2,W=0.8,comm=0.1"))
    assert time.process_time() - begin < 30


def test_a_rank_does_not_wait_after_its_own_last_action():
    """One micro-batch: F 0 to 1 and B 4 to 6 on rank 0, F 1 to 2 and B 2 to 4 on rank 1."""
    program = build_program("1f1b", 2, 1)
    assert idle_fractions(program, simulate(program, Costs())) == [1 / 2, 1 / 4]

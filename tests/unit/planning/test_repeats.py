"""Slots that repeat those before them are not walked through: peaks and moments are those of the
whole walk."""

import pytest
import tiers

from megatron5d.config.convert import changed
from megatron5d.config.load import load_config
from megatron5d.pipeline_parallel.messages import completed_sends
from megatron5d.pipeline_parallel.program import Action, loop_placement, make_program
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.planning.memory import forecast
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.repeat import find_repeat

PP, MICROBATCHES, DP = 4, 24, 2
ZERO = [
    {"parallel.zero": 3},
    {"parallel.zero": 2, "precision.fp8": "tensorwise"},
    {"parallel.zero": 1},
    {"parallel.zero": 3, "parallel.zero3_gather": "per_step", "parallel.grad_reduce": "per_step"},
    {
        "parallel.zero": 3,
        "recompute.mode": "full",
        "precision.fp8": "tensorwise",
        "precision.fp8_gather": True,
    },
    {"parallel.zero": 2, "parallel.grad_reduce": "per_step"},
    {"parallel.zero": 0},
]
WHOLE = ("gpipe", "bfs")  # what they hold grows until the last forward
GIVEN = [
    "model=tiny_moe",
    f"model.num_layers={2 * PP}",
    f"parallel.pp={PP}",
    "parallel.ep=2",
    "train.seq_len=256",
    f"train.gbs={MICROBATCHES * DP}",
    "precision.dtype=bf16",
]
ALL = tiers.NIGHTLY


def asked(config):
    """Every rank's memory, and its moments: bytes in all and by kind, without the action."""
    walked = []
    ranks = Forecaster(config, PP * DP, Target(), moments=walked).ranks()
    moments = [
        [(each.total, vars(each.by_kind()) | {"action": None}) for each in line] for line in walked
    ]
    return ranks, moments


@pytest.mark.parametrize("number, name", list(enumerate(schedule_names())))
def test_what_a_repeat_leaves_out_changes_nothing(number, name, monkeypatch):
    config, found = load_config([*GIVEN, f"pipeline.schedule={name}"]), []

    def noted(*given):
        found.append(find_repeat(*given))
        return found[-1]

    for change in ZERO if ALL else [ZERO[number % len(ZERO)]]:
        monkeypatch.setattr(forecast, "find_repeat", noted)
        short = asked(changed(config, change))
        monkeypatch.setattr(forecast, "find_repeat", lambda *given: None)
        assert short == asked(changed(config, change)), change
    assert any(found) != (name in WHOLE)


@pytest.mark.parametrize("name", schedule_names())
def test_a_repeat_does_the_same_with_later_micro_batches(name):
    """Against a comparison of all its slots, and of all messages."""
    program = build_program(name, PP, 32)
    for rank, line in enumerate(program.ranks):
        repeat, proofs = find_repeat(program, rank), completed_sends(program, rank)
        assert (repeat is None) == (name in WHOLE)
        for place in range(repeat.start, repeat.stop) if repeat else ():
            before = line[place - repeat.length]
            assert line[place] == tuple(
                action._replace(microbatch=action[2] + repeat.shift) for action in before
            )
            for old, new in zip(before, line[place]):
                assert [flow for flow, _ in proofs.get(old, ())] == [
                    flow for flow, _ in proofs.get(new, ())
                ]


def test_what_grows_is_no_repeat():
    """Two forwards, a backward, over and over: the same slots, and one more micro-batch in flight
    each time."""
    slots, done = [], 0
    for microbatch in range(0, 40, 2):
        slots += [
            (Action("F", 0, microbatch),),
            (Action("F", 0, microbatch + 1),),
            (Action("B", 0, done),),
        ]
        done += 1
    slots += [(Action("B", 0, left),) for left in range(done, 40)]
    assert find_repeat(make_program("grows", loop_placement(1), [0] * 40, [slots]), 0) is None

"""What goes wrong on one rank is known on all."""

import pickle
import re
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megatron5d.topology.all_ranks import (
    Failure,
    first_failure,
    first_failure_in,
    gather_json,
    on_every_rank,
    on_rank_0,
)

ROOT = Path(__file__).parents[3]


def test_the_first_failure_is_told_on_all_with_the_number_of_others():
    faults = [None, "no room", "a longer text of another rank"]
    told = run_ranks(lambda rank, world: (first_failure(None), first_failure(faults[rank])), 3)
    assert told == [(None, Failure(1, "no room", 1))] * 3
    assert str(told[0][1]) == str(first_failure_in(faults)) == "rank 1: no room (and 1 more rank)"
    assert first_failure_in([None]) is None


def failing(value, error):
    def act():
        if error is not None:
            raise error
        return value

    return act


def outcome(meet, act):
    try:
        return meet(act)
    except Exception as error:  # noqa: BLE001 - told
        return type(error), str(error)


def test_every_rank_raises_what_one_has_raised_and_all_stay_in_step():
    errors = [None, FileNotFoundError("no file"), ValueError("no number")]

    def fn(rank, world):
        values = [
            on_every_rank(lambda: rank),
            on_rank_0(failing("of 0", None if rank == 0 else KeyError())),
        ]
        raised = [
            outcome(on_every_rank, failing(rank, errors[rank])),
            outcome(on_rank_0, failing(0, errors[rank - 2])),
        ]
        return values, raised, outcome(on_rank_0, failing(0, KeyError("ours")))[1]

    found = run_ranks(fn, 3)
    assert [values for values, _, _ in found] == [[rank, "of 0"] for rank in range(3)]
    first = (OSError, "rank 1: no file (and 1 more rank)")
    own = [first, (FileNotFoundError, "no file"), (ValueError, "no number")]
    of_0 = [(FileNotFoundError, "no file"), *[(OSError, "rank 0: no file")] * 2]
    assert [raised for _, raised, _ in found] == [
        list(pair) for pair in zip(own, of_0, strict=True)
    ]
    assert found[0][2] == "'ours'" and all(
        "rank 0: Traceback" in told and "in act" in told for _, _, told in found[1:]
    )


SENT = [
    None,
    "",
    "naïve\n\ud800",
    b"\0\xff{",
    b"",
    {"a": [1, 2.5, float("inf"), True, None]},
    (1, ("x",)),
]


def test_what_ranks_send_is_text_or_bytes_and_never_unpickled():
    def fn(rank, world):
        def refused(*_):
            raise AssertionError("unpickled")

        pickle.loads = pickle.Unpickler = torch.distributed.distributed_c10d._unpickler = refused
        group = torch.distributed.group.WORLD
        faults = [None, None, "x" * 5000]
        told = [on_rank_0(lambda value=value: value if rank == 0 else 1 / 0) for value in SENT]
        gathered = gather_json({"rank": rank, "text": "é" * 10**rank}, group)
        return (
            told,
            gathered,
            first_failure(faults[rank]).text,
            outcome(on_rank_0, lambda: {1, 2})[0],
        )

    wanted = (
        [*SENT[:-1], [1, ["x"]]],
        [{"rank": i, "text": "é" * 10**i} for i in range(3)],
        "x" * 5000,
    )
    found = run_ranks(fn, 3)
    assert [each[:3] for each in found] == [wanted] * 3
    # a set is no JSON: all raise
    assert [kind for *_, kind in found] == [TypeError, RuntimeError, RuntimeError]
    sources = [
        path for room in ("megatron5d", "kernels", "tools") for path in (ROOT / room).rglob("*.py")
    ]
    assert len(sources) > 100 and not [
        p
        for p in sources
        if re.search(r"(gather|cast|ter|send|recv)_object(_list)?\(", p.read_text())
    ]


def test_one_process_needs_no_others():
    assert on_every_rank(lambda: 1) == on_rank_0(lambda: 1) == 1
    with pytest.raises(KeyError, match="ours"):
        on_every_rank(failing(0, KeyError("ours")))

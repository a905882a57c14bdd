"""An error of one rank is known on all."""

import pickle
import re
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megatron5d.topology.all_ranks import (
    Failure,
    broadcast_text,
    first_failure,
    first_failure_in,
    gather_json,
    on_every_rank,
    on_rank_0,
)

ROOT = Path(__file__).parents[3]


def test_every_rank_knows_the_first_failure_and_how_many_ranks_failed():
    errors = [None, "disk full", "a longer text of another rank"]
    failures = run_ranks(lambda rank, world: (first_failure(None), first_failure(errors[rank])), 3)
    assert failures == [(None, Failure(1, "disk full", 1))] * 3
    text = "rank 1: disk full (and 1 more rank)"
    assert str(failures[0][1]) == str(first_failure_in(errors)) == text
    assert first_failure_in([None]) is None


def failing(value, error):
    def act():
        if error is not None:
            raise error
        return value

    return act


def outcome(run, act):
    try:
        return run(act)
    except Exception as error:  # noqa: BLE001 - compared by the test
        return type(error), str(error)


def test_every_rank_raises_if_one_does_and_all_stay_in_step():
    errors = [None, FileNotFoundError("no file"), ValueError("no number")]

    def on_rank(rank, world):
        values = [
            on_every_rank(lambda: rank),
            on_rank_0(failing("of 0", None if rank == 0 else KeyError())),
        ]
        raised = [
            outcome(on_every_rank, failing(rank, errors[rank])),
            outcome(on_rank_0, failing(0, errors[rank - 2])),
        ]
        return values, raised, outcome(on_rank_0, failing(0, KeyError("our bug")))[1]

    values, raised, bugs = zip(*run_ranks(on_rank, 3))
    assert values == tuple([rank, "of 0"] for rank in range(3))
    assert raised == (
        [(OSError, "rank 1: no file (and 1 more rank)"), (FileNotFoundError, "no file")],
        [(FileNotFoundError, "no file"), (OSError, "rank 0: no file")],
        [(ValueError, "no number"), (OSError, "rank 0: no file")],
    )
    assert bugs[0] == "'our bug'"
    assert all("rank 0: Traceback" in text and "in act" in text for text in bugs[1:])


VALUES = [
    None,
    "",
    "naïve\n\ud800",
    b"\0\xff{",
    b"",
    {"a": [1, 2.5, float("inf"), True, None]},
    (1, ("x",)),
]


def test_ranks_send_text_or_bytes_that_are_never_unpickled():
    def on_rank(rank, world):
        def refuse(*_):
            raise AssertionError("unpickled")

        pickle.loads = pickle.Unpickler = torch.distributed.distributed_c10d._unpickler = refuse
        values = [on_rank_0(lambda value=value: value if rank == 0 else 1 / 0) for value in VALUES]
        gathered = gather_json(
            {"rank": rank, "text": "é" * 10**rank}, torch.distributed.group.WORLD
        )
        failure = first_failure([None, None, "x" * 5000][rank])
        texts = failure.text, broadcast_text(1, f"naïve {rank}")
        # JSON has no sets
        return values, gathered, texts, outcome(on_rank_0, lambda: {1, 2})[0]

    values, gathered, texts, errors = zip(*run_ranks(on_rank, 3))
    assert values == ([*VALUES[:-1], [1, ["x"]]],) * 3
    assert gathered == ([{"rank": i, "text": "é" * 10**i} for i in range(3)],) * 3
    assert texts == (("x" * 5000, "naïve 1"),) * 3
    assert errors == (TypeError, RuntimeError, RuntimeError)
    folders = ("megatron5d", "kernels", "tools")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    unpickles = re.compile(r"(gather|cast|ter|send|recv)_object(_list)?\(")
    assert len(sources) > 100
    assert not [path for path in sources if unpickles.search(path.read_text())]


def test_one_process_communicates_with_none():
    assert on_every_rank(lambda: 1) == on_rank_0(lambda: 1) == 1
    assert broadcast_text(0, "own") == "own"
    with pytest.raises(KeyError, match="our bug"):
        on_every_rank(failing(0, KeyError("our bug")))

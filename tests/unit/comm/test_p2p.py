"""Channels: in order each, independent of each other, and honest about a peer that is gone."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankFailure, run_ranks

from megatron5d.comm.ledger import Ledger
from megatron5d.comm.p2p import (
    ReceiveChannel,
    SendChannel,
    TensorMeta,
    group_indices,
    open_channels,
)
from megatron5d.topology.axis import Axis

pytestmark = pytest.mark.usefixtures("over_gloo")

FORM = TensorMeta((3,), torch.float32)


def axis_of(rank, world, recorder=None):
    return Axis("pp", tuple(range(world)), rank, dist.group.WORLD, recorder)


def test_channels_between_the_same_ranks_do_not_wait_for_each_other():
    """Two channels each way; one side takes them in the opposite order of the sends."""
    links = [(0, 1), (0, 1), (1, 0), (1, 0)]

    def on_rank(rank, world):
        ends = open_channels(links, axis_of(rank, world))
        senders = [end for end in ends if isinstance(end, SendChannel)]
        receivers = [end for end in ends if isinstance(end, ReceiveChannel)]
        for receiver in reversed(receivers):
            for _ in range(3):
                receiver.post(FORM)
        for channel, sender in enumerate(senders):
            for i in range(3):
                sender.send(torch.full((3,), 100.0 * rank + 10 * channel + i))
        got = [[int(receiver.take()[0]) for _ in range(3)] for receiver in reversed(receivers)]
        for end in ends:
            end.finish()
        return got

    assert run_ranks(on_rank, 2) == [[[110, 111, 112], [100, 101, 102]], [[10, 11, 12], [0, 1, 2]]]


def test_forms_may_change_from_message_to_message_and_are_counted():
    def on_rank(rank, world):
        ledger = Ledger()
        (end,) = open_channels([(0, 1)], axis_of(rank, world, ledger))
        ledger.clear()
        shapes = [(2, 5), (7,), (1, 1, 4)]
        if rank == 0:
            for i, shape in enumerate(shapes):
                # not contiguous
                end.send(torch.full(shape, float(i), dtype=torch.float64).transpose(0, -1))
            end.finish()
            return ledger.totals["pp", "send"]
        got, ledger.timing = [], True
        for shape in shapes:
            end.post(TensorMeta(tuple(reversed(shape)), torch.float64))
            got.append(end.take())
        assert ledger.take_waits()["pp"] > 0, "a wait for a message was not timed"
        return [(tuple(x.shape), x.unique().item()) for x in got]

    sent, got = run_ranks(on_rank, 2)
    assert (sent.calls, sent.elements, sent.num_bytes) == (3, 21, 168)
    assert got == [((5, 2), 0.0), ((7,), 1.0), ((4, 1, 1), 2.0)]


def test_what_the_peer_has_used_is_let_go_of_in_every_step():
    def on_rank(rank, world):
        (end,) = open_channels([(0, 1)], axis_of(rank, world))
        kept = []
        for _ in range(2):
            for count in range(1, 4):
                if rank == 1:
                    end.post(FORM)
                    end.take()
                else:
                    end.send(torch.zeros(3))
                    end.release_first(count - 1)  # all but the newest
                    kept.append(len(end._under_way))
            end.finish()
        return kept

    assert run_ranks(on_rank, 2)[0] == [1] * 6


def test_nothing_is_opened_alone_and_nothing_where_a_rank_has_no_end():
    assert open_channels([], Axis("pp")) == []

    def on_rank(rank, world):
        return [end is None for end in open_channels([(0, 1), (1, 2)], axis_of(rank, world))]

    assert run_ranks(on_rank, 3) == [[False, True], [False, False], [True, False]]


def test_a_receive_that_nobody_takes_is_found():
    def on_rank(rank, world):
        (end,) = open_channels([(0, 1)], axis_of(rank, world))
        if rank == 0:
            end.send(torch.zeros(3))
        else:
            end.post(FORM)
        end.finish()

    with pytest.raises(RankFailure, match="1 receives of .* were posted and never taken"):
        run_ranks(on_rank, 2)


def test_a_dead_peer_is_named():
    def on_rank(rank, world):
        (end,) = open_channels([(1, 0)], axis_of(rank, world))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        end.post(FORM)
        end.take()

    with pytest.raises(RankFailure, match="receiving from rank 1 failed: rank 1 is gone"):
        run_ranks(on_rank, 2)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda link: link[0] != link[1])
    )
)
def test_colours_keep_the_channels_of_two_ranks_apart_with_as_few_groups_as_can_be(links):
    found = list(zip(map(frozenset, links), group_indices(links)))
    assert len(set(found)) == len(found)
    most = max((sum(set(link) == pair for link in links) for pair in map(set, links)), default=0)
    assert max(group_indices(links), default=-1) + 1 == most

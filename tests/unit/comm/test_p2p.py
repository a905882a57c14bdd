"""Channels keep their own order, do not wait for each other, and name a peer that is gone."""

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

META = TensorMeta((3,), torch.float32)


def opened(links, rank, world, recorder=None):
    axis = Axis("pp", tuple(range(world)), rank, dist.group.WORLD, recorder)
    return open_channels(links, axis)


def test_channels_between_the_same_ranks_do_not_wait_for_each_other():
    """Two channels each way; one side takes them in the opposite order of the sends."""

    def on_rank(rank, world):
        channels = opened([(0, 1), (0, 1), (1, 0), (1, 0)], rank, world)
        senders = [channel for channel in channels if isinstance(channel, SendChannel)]
        receivers = [channel for channel in channels if isinstance(channel, ReceiveChannel)][::-1]
        for receiver in receivers:
            for _ in range(3):
                receiver.post(META)
        for index, sender in enumerate(senders):
            for i in range(3):
                sender.send(torch.full((3,), 100.0 * rank + 10 * index + i))
        received = [[int(receiver.take()[0]) for _ in range(3)] for receiver in receivers]
        for channel in channels:
            channel.finish()
        return received

    from_1, from_0 = [[110, 111, 112], [100, 101, 102]], [[10, 11, 12], [0, 1, 2]]
    assert run_ranks(on_rank, 2) == [from_1, from_0]


def test_shapes_may_change_from_message_to_message_and_bytes_are_counted():
    shapes = [(2, 5), (7,), (1, 1, 4)]

    def on_rank(rank, world):
        ledger = Ledger()
        (channel,) = opened([(0, 1)], rank, world, ledger)
        ledger.clear()
        if rank == 0:
            for i, shape in enumerate(shapes):
                not_contiguous = torch.full(shape, i, dtype=torch.float64).transpose(0, -1)
                channel.send(not_contiguous)
            channel.finish()
            return ledger.totals["pp", "send"]
        received, ledger.timing = [], True
        for shape in shapes:
            channel.post(TensorMeta(shape[::-1], torch.float64))
            received.append(channel.take())
        assert ledger.take_waits()["pp"] > 0, "a wait for a message was not timed"
        return [(tuple(x.shape), x.unique().item()) for x in received]

    traffic, received = run_ranks(on_rank, 2)
    assert (traffic.calls, traffic.elements, traffic.num_bytes) == (3, 21, 168)
    assert received == [((5, 2), 0.0), ((7,), 1.0), ((4, 1, 1), 2.0)]


def test_used_messages_are_released_in_every_step():
    def on_rank(rank, world):
        (channel,) = opened([(0, 1)], rank, world)
        lengths = []
        for _ in range(2):
            for count in range(1, 4):
                if rank == 1:
                    channel.post(META)
                    channel.take()
                else:
                    channel.send(torch.zeros(3))
                    channel.release_first(count - 1)  # all but the newest
                    lengths.append(len(channel._in_flight))
            channel.finish()
        return lengths

    assert run_ranks(on_rank, 2)[0] == [1] * 6


def test_a_rank_opens_the_channels_that_it_is_at_an_end_of():
    assert open_channels([], Axis("pp")) == []

    def on_rank(rank, world):
        return [channel is None for channel in opened([(0, 1), (1, 2)], rank, world)]

    assert run_ranks(on_rank, 3) == [[False, True], [False, False], [True, False]]


def test_a_receive_that_is_never_taken_is_an_error():
    def on_rank(rank, world):
        (channel,) = opened([(0, 1)], rank, world)
        if rank == 0:
            channel.send(torch.zeros(3))
        else:
            channel.post(META)
        channel.finish()

    with pytest.raises(RankFailure, match="1 receives of .* were posted and never taken"):
        run_ranks(on_rank, 2)


def test_a_dead_peer_is_named():
    def on_rank(rank, world):
        (channel,) = opened([(1, 0)], rank, world)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        channel.post(META)
        channel.take()

    with pytest.raises(RankFailure, match="receiving from rank 1 failed: rank 1 is gone"):
        run_ranks(on_rank, 2)


LINKS = st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda link: link[0] != link[1])


@given(st.lists(LINKS))
def test_channels_of_two_ranks_are_in_different_groups_of_which_there_are_few(links):
    pairs, groups = [frozenset(link) for link in links], group_indices(links)
    assert len(set(zip(pairs, groups))) == len(links)
    assert max(groups, default=-1) + 1 == max(map(pairs.count, pairs), default=0)

"""Channels from one rank of an axis to another: messages arrive in the order in which they were
sent.

Each channel is independent of all others, so no order between channels is ever needed. On gloo
channels are tags of one group. NCCL knows no tags and runs all messages of a pair of ranks in one
group in one order, so there channels between the same two ranks live in different groups.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.failures import P2PError
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import group_settings

Link = tuple[int, int]
"""Positions on the axis: (source, destination)."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and device of every message of a channel; sender and receiver know it
    beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str = "cpu"


class _End:
    """One end of a channel."""

    def __init__(self, axis: Axis, peer: int, group: Any, tag: int) -> None:
        self.axis, self.peer, self._tag = axis, peer, tag
        self._group = group
        self.peer_rank = axis.ranks[peer]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.axis}, rank {self.peer_rank}, tag {self._tag})"


class SendChannel(_End):
    """The sending end. A message is kept until its transfer has completed."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._settled = 0

    def send(self, x: Tensor) -> None:
        """Starts sending.

        Args:
            x: as the peer expects it; not to be changed before `release_first` or `finish`.

        Raises:
            P2PError: the peer is dead or hangs.

        Comm: one message of numel elements.
        """
        x = x.contiguous()
        self.axis.record("send", x.numel(), x.element_size())
        try:
            work = self._group.send([x], self.peer, self._tag)
        except RuntimeError as error:
            raise P2PError("sending to", self.peer_rank, error) from error
        self._under_way.append((work, x))

    def release_first(self, count: int) -> None:
        """Releases the first `count` messages since the last `finish`: the peer has used them."""
        while self._settled < count:
            self._wait_first()

    def release_all_but(self, most: int) -> None:
        """Releases all but the last `most` messages, once they have been sent."""
        while len(self._under_way) > most:
            self._wait_first()

    def finish(self) -> None:
        """Waits until everything has been sent, and counts from 0 again."""
        while self._under_way:
            self._wait_first()
        self._settled = 0

    def _wait_first(self) -> None:
        work, _ = self._under_way.popleft()
        try:
            self.axis.wait(work.wait)
        except RuntimeError as error:
            raise P2PError("sending to", self.peer_rank, error) from error
        self._settled += 1


class ReceiveChannel(_End):
    """The receiving end."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._posted: deque[tuple[Any, Tensor]] = deque()

    def post(self, form: TensorMeta) -> None:
        """Starts receiving the channel's next message into memory of its own. Raises P2PError: the
        peer is dead or hangs; here, or in `take`."""
        x = torch.empty(form.shape, dtype=form.dtype, device=form.device)
        try:
            work = self._group.recv([x], self.peer, self._tag)
        except RuntimeError as error:
            raise P2PError("receiving from", self.peer_rank, error) from error
        self._posted.append((work, x))

    def take(self) -> Tensor:
        """Waits for the oldest message that was posted and not yet taken, and returns it. Raises
        P2PError: the peer is dead or hangs."""
        work, x = self._posted.popleft()
        try:
            self.axis.wait(work.wait)
        except RuntimeError as error:
            raise P2PError("receiving from", self.peer_rank, error) from error
        return x

    def finish(self) -> None:
        """Asserts that every posted message has been taken."""
        assert not self._posted, (
            f"{len(self._posted)} receives of {self} were posted and never taken"
        )


def group_indices(links: Sequence[Link]) -> list[int]:
    """Returns a group number for every link, as few as possible: no two between the same ranks
    share one."""
    used: dict[frozenset[int], int] = {}
    found = []
    for link in links:
        pair = frozenset(link)
        found.append(used.get(pair, 0))
        used[pair] = found[-1] + 1
    return found


def open_channels(
    links: Sequence[Link],
    axis: Axis,
    device: torch.device | str = "cpu",
    timeout_s: float | None = None,
) -> list[SendChannel | ReceiveChannel | None]:
    """Opens this rank's end of every channel.

    Every rank of the axis must call it with the same links. One element is sent over each channel,
    in the order of the links, so that connections are made here and not in the middle of a step,
    where ranks could wait for each other.

    Args:
        axis: on which they run.
        device: on which messages will lie.
        timeout_s: seconds after which a message fails, as in `build_mesh`.

    Returns:
        One entry per link; None if this rank is at neither end.

    Comm: creation of one group (with NCCL, of as many as channels join the same two ranks); one
        element per channel.
    """
    if axis.size == 1 or not links:
        return [None] * len(links)
    tagged = dist.get_backend(axis.group) != "nccl"
    colour = [0] * len(links) if tagged else group_indices(links)
    # groups of their own: torch's checks count messages and collectives of a group together, and
    # ranks have unequally many messages
    groups = [
        dist.new_group(list(axis.ranks), group_desc="p2p", **group_settings(timeout_s))
        for _ in range(max(colour) + 1)
    ]
    ends: list[SendChannel | ReceiveChannel | None] = []
    first = TensorMeta((1,), torch.float32, device)
    for tag, ((source, destination), index) in enumerate(zip(links, colour)):
        if axis.rank == source:
            send_channel = SendChannel(axis, destination, groups[index], tag)
            send_channel.send(torch.zeros(first.shape, dtype=first.dtype, device=device))
            send_channel.finish()
            ends.append(send_channel)
        elif axis.rank == destination:
            receive_channel = ReceiveChannel(axis, source, groups[index], tag)
            receive_channel.post(first)
            receive_channel.take()
            ends.append(receive_channel)
        else:
            ends.append(None)
    return ends

"""Flat buffers that are in memory only while they are used (ZeRO-2 and 3): at any address, or
always at the same one.

A CUDA graph reads and writes at the addresses of its capture, so where phases are replayed
(train.cuda_graph) a buffer must come back to the place that it had. `FixedPlaces` notes in one step
without graphs which buffers are held at the same time, and gives them places for all steps after
it; buffers that are never held together share one. The places stay allocated, about as much memory
as these buffers needed at their worst moment. A step with other passes is noted anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron5d.phases.phase import Phase


def allocate_storage(flat: Tensor) -> None:
    """Allocates the memory of a flat buffer in place; its values are undefined."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def free_storage(flat: Tensor) -> None:
    """Frees the memory of a flat buffer and of all its views."""
    flat.untyped_storage().resize_(0)


class _Place:
    """Memory that several buffers use in turn."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.user: TemporaryBuffer | None = None  # that is held in it


class TemporaryBuffer:
    """A flat buffer with memory while `is_held`, as it is when made; its values are then undefined.

    Args:
        bind: takes `flat`, now and whenever it becomes another tensor.
    """

    flat: Tensor

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        bind: Callable[[Tensor], None] = lambda flat: None,
    ) -> None:
        self._bind = bind
        self._place: _Place | None = None
        # called when it has been allocated
        self.noted: Callable[[TemporaryBuffer], None] | None = None
        self.is_held = True
        self._rebind(torch.empty(numel, dtype=dtype, device=device))

    def _rebind(self, flat: Tensor) -> None:
        self.flat = flat
        self._bind(flat)

    @property
    def num_bytes(self) -> int:
        """Bytes that it needs while it is held."""
        return self.flat.numel() * self.flat.element_size()

    def allocate(self) -> None:
        """Gives the buffer its memory, if it has none.

        While another buffer is in its place, as outside of the steps for which places were made (an
        evaluation, weights read from outside), it gets memory of its own.
        """
        if self.is_held:
            return
        self.is_held = True
        if self._place is None:
            allocate_storage(self.flat)
        elif self._place.user is None:
            self._place.user = self
        else:
            self._rebind(torch.empty_like(self.flat))
        if self.noted is not None:
            self.noted(self)

    def free(self) -> None:
        """Gives the memory back."""
        was_held, self.is_held = self.is_held, False
        if self._place is None:
            free_storage(self.flat)
        elif self._place.user is self:
            self._place.user = None
        elif was_held:
            self.put(self._place)

    def put(self, place: _Place | None) -> None:
        """Has the buffer, which is not held, use a place from now on; None = memory of its own,
        whenever it is held."""
        assert not self.is_held
        self._place = place
        if place is not None:
            self._rebind(place.memory[: self.num_bytes].view(self.flat.dtype))
        else:
            self._rebind(torch.empty_like(self.flat))
            free_storage(self.flat)


class FixedPlaces:
    """Gives temporary buffers addresses that stay the same from step to step."""

    def __init__(self, buffers: Sequence[TemporaryBuffer]) -> None:
        self._buffers = buffers
        self._passes: Mapping[Phase, int] | None = None  # of the step that was noted
        self._together: dict[TemporaryBuffer, set[TemporaryBuffer]] = {}  # held at the same time
        self._are_fixed = False

    def start_step(self, passes: Mapping[Phase, int]) -> None:
        """Notes a step with new passes; gives the buffers their places in the next step with the
        same ones.

        Args:
            passes: as in `GradSync.start_step`.
        """
        if passes != self._passes:
            self._passes, self._together = passes, {}
            for buffer in self._buffers:
                buffer.noted = self._note
                if self._are_fixed:
                    buffer.put(None)
            self._are_fixed = False
        elif not self._are_fixed:
            self._fix()

    def finish_step(self) -> None:
        """Ends what `start_step` began: what is held from here on matters to no graph."""
        for buffer in self._buffers:
            buffer.noted = None

    def _note(self, allocated: TemporaryBuffer) -> None:
        own = self._together.setdefault(allocated, set())
        own.update(other for other in self._buffers if other.is_held and other is not allocated)
        for other in own:
            self._together[other].add(allocated)

    def _fix(self) -> None:
        """Puts each buffer that was used, the largest first, into the first place that it can
        share."""
        shared: list[list[TemporaryBuffer]] = []
        for buffer in sorted(self._together, key=lambda each: each.num_bytes, reverse=True):
            members = next(
                (each for each in shared if self._together[buffer].isdisjoint(each)), None
            )
            if members is None:
                shared.append(members := [])
            members.append(buffer)
        for members in shared:
            place = _Place(members[0].num_bytes, members[0].flat.device)
            for buffer in members:
                buffer.put(place)
        self._are_fixed = True

"""Flat buffers that are in memory only while they are used (ZeRO-2 and 3), optionally at fixed
addresses.

A CUDA graph reads and writes at the addresses of its capture. So where phases are replayed
(train.cuda_graph), a buffer must have the same address in every step. `FixedAddresses` records in
one step without graphs which buffers are allocated at the same time, and then gives every buffer a
memory block for all later steps; buffers that are never allocated together share one. The blocks
stay allocated, and take about as much memory as these buffers did at their peak. A step with other
passes is recorded again.
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


class _MemoryBlock:
    """Memory that several buffers use in turn."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.user: TemporaryBuffer | None = None  # the allocated buffer that uses it


class TemporaryBuffer:
    """A flat buffer that has memory while `is_allocated`; its values are undefined at first.

    Args:
        numel, dtype, device: of `flat`.
        bind: receives `flat`, at construction and whenever it becomes another tensor.
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
        self._block: _MemoryBlock | None = None
        self.on_allocate: Callable[[TemporaryBuffer], None] | None = None
        self.is_allocated = True
        self._rebind(torch.empty(numel, dtype=dtype, device=device))

    def _rebind(self, flat: Tensor) -> None:
        self.flat = flat
        self._bind(flat)

    @property
    def num_bytes(self) -> int:
        """Bytes that it needs while it is allocated."""
        return self.flat.numel() * self.flat.element_size()

    def allocate(self) -> None:
        """Allocates the memory, unless it is allocated.

        Outside the steps for which blocks were planned (an evaluation, weights read from outside),
        another buffer may be using the block. The buffer then gets separate memory.
        """
        if self.is_allocated:
            return
        self.is_allocated = True
        if self._block is None:
            allocate_storage(self.flat)
        elif self._block.user is None:
            self._block.user = self
        else:
            self._rebind(torch.empty_like(self.flat))
        if self.on_allocate is not None:
            self.on_allocate(self)

    def free(self) -> None:
        """Frees the memory."""
        was_allocated, self.is_allocated = self.is_allocated, False
        if self._block is None:
            free_storage(self.flat)
        elif self._block.user is self:
            self._block.user = None
        elif was_allocated:
            self.use_block(self._block)

    def use_block(self, block: _MemoryBlock | None) -> None:
        """Makes the buffer, which is not allocated, use a block from now on.

        Args:
            block: None = new memory whenever it is allocated.
        """
        assert not self.is_allocated
        self._block = block
        if block is not None:
            self._rebind(block.memory[: self.num_bytes].view(self.flat.dtype))
        else:
            self._rebind(torch.empty_like(self.flat))
            free_storage(self.flat)


class FixedAddresses:
    """Gives temporary buffers the same addresses in every step."""

    def __init__(self, buffers: Sequence[TemporaryBuffer]) -> None:
        self._buffers = buffers
        self._passes: Mapping[Phase, int] | None = None  # of the recorded step
        # buffer -> buffers that were allocated at the same time
        self._overlaps: dict[TemporaryBuffer, set[TemporaryBuffer]] = {}
        self._are_fixed = False

    def start_step(self, passes: Mapping[Phase, int]) -> None:
        """Records a step with new passes, and fixes addresses in the next one with the same.

        Args:
            passes: as in `GradSync.start_step`.
        """
        if passes != self._passes:
            self._passes, self._overlaps = passes, {}
            for buffer in self._buffers:
                buffer.on_allocate = self._record
                if self._are_fixed:
                    buffer.use_block(None)
            self._are_fixed = False
        elif not self._are_fixed:
            self._fix()

    def finish_step(self) -> None:
        """Stops recording: no graph uses buffers that are allocated between steps."""
        for buffer in self._buffers:
            buffer.on_allocate = None

    def _record(self, allocated: TemporaryBuffer) -> None:
        overlaps = self._overlaps.setdefault(allocated, set())
        overlaps.update(b for b in self._buffers if b.is_allocated and b is not allocated)
        for other in overlaps:
            self._overlaps[other].add(allocated)

    def _fix(self) -> None:
        """Assigns each used buffer, the largest first, to the first block that it can share."""
        groups: list[list[TemporaryBuffer]] = []
        for buffer in sorted(self._overlaps, key=lambda b: b.num_bytes, reverse=True):
            overlaps = self._overlaps[buffer]
            group = next((group for group in groups if overlaps.isdisjoint(group)), None)
            if group is None:
                groups.append(group := [])
            group.append(buffer)
        for group in groups:
            block = _MemoryBlock(group[0].num_bytes, group[0].flat.device)
            for buffer in group:
                buffer.use_block(block)
        self._are_fixed = True

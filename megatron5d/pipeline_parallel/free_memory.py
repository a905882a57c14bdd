"""Detects whether any device has so little free memory that its host may have to wait for it.

If an allocation finds no memory, torch's allocator returns unused blocks to CUDA, which waits until
nothing runs. What runs may be a receive that was posted early, and whose message depends on what
this very host has yet to launch (messages.py). So a step posts receives in lockstep when it may
take more memory than is free.
"""

from __future__ import annotations

import torch

from megatron5d.comm.collectives import Pending, start_all_reduce
from megatron5d.topology.axis import Axis

# Fraction of a device's memory that must stay free: steps of one shape differ by less, in how their
# blocks fit.
SPARE = 0.05


class FreeMemory:
    """Watches the memory of all ranks' devices, from step to step.

    Args:
        device: of this rank.
        is_watched: False: memory is never short, and no rank communicates.
    """

    def __init__(self, device: torch.device, is_watched: bool) -> None:
        self._device, self._is_watched = device, is_watched
        self._reserved_bytes = 0
        self._pending: Pending | None = None
        # On some rank, at the end of the last step, less was free than the step has taken, or than
        # SPARE.
        self.is_short = False

    def start_check(self, world: Axis) -> None:
        """Starts comparing the free memory of all ranks. Comm: all_reduce world of one number."""
        if not self._is_watched:
            return
        # asks the driver, which does not wait for the device
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        step_bytes, self._reserved_bytes = reserved - self._reserved_bytes, reserved
        is_short = torch.tensor([float(free < max(step_bytes, SPARE * total))]).pin_memory()
        self._pending = start_all_reduce(is_short.to(self._device, non_blocking=True), world)

    def finish_check(self) -> None:
        """Waits for the result, and sets `is_short`."""
        if self._pending is not None:
            self.is_short, self._pending = self._pending.wait().item() > 0, None

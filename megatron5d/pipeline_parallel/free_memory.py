"""Whether the devices have so little memory left that a host may have to wait for its own.

Where an allocation finds no memory, torch's allocator gives what is not in use back to CUDA, which
waits until nothing runs. What runs may be a receive that was posted early, and whose message
depends on what this very host has yet to launch (messages.py). So steps post receives in lockstep
where another one may take more than is free.
"""

from __future__ import annotations

import torch

from megatron5d.comm.collectives import Pending, start_all_reduce
from megatron5d.topology.axis import Axis

SPARE = 0.05  # of a device's memory: steps of one shape differ by less, in how their blocks fit


class FreeMemory:
    """Watches the memory of all ranks' devices, from step to step.

    Args:
        is_watched: False: memory is never short, and nothing is asked.
    """

    def __init__(self, device: torch.device, is_watched: bool) -> None:
        self._device, self._is_watched = device, is_watched
        self._reserved = 0
        self._asked: Pending | None = None
        self.is_short = False
        """On some rank, at the end of the last step: less is free than the step has taken, or than is to be spare."""

    def start_asking(self, world: Axis) -> None:
        """Starts asking all ranks. Comm: all_reduce world of one number."""
        if not self._is_watched:
            return
        # asks the driver, which does not wait for the device
        free, total = torch.cuda.mem_get_info(self._device)
        before, self._reserved = self._reserved, torch.cuda.memory_reserved(self._device)
        is_short = torch.tensor(
            [float(free < max(self._reserved - before, SPARE * total))]
        ).pin_memory()
        self._asked = start_all_reduce(is_short.to(self._device, non_blocking=True), world)

    def finish_asking(self) -> None:
        """Waits for the answers."""
        if self._asked is not None:
            self.is_short, self._asked = self._asked.wait().item() > 0, None

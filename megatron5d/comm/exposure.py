"""How long a rank stands still for communication that it had started early enough to hope it would not."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from megatron5d.comm.collectives import Pending


class Exposure:
    """Adds up the waits it is given. On a GPU the waits of the stream are measured, by events, not those of the host.

    Args:
        device: on which the results are used.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, pending: Pending) -> Tensor:
        """`pending.wait()`, timed."""
        if not self._cuda:
            begin = time.perf_counter()
            result = pending.wait()
            self._host_s += time.perf_counter() - begin
            return result
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        result = pending.wait()
        events[1].record()
        self._events.append(events)
        return result

    def clear(self) -> None:
        """Forgets all waits so far."""
        self._host_s = 0.0
        self._events.clear()

    def take(self) -> float:
        """Seconds waited since the last call; on a GPU to be called when the host has waited for the stream."""
        seconds = self._host_s + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self.clear()
        return seconds

"""Offloads activations to the host's memory between forward and backward, on a stream of their own.

When an operation saves a tensor, its copy to the host is queued; the device's memory is freed when
nothing else holds the tensor. `fetch` starts the copy back, one phase ahead of its use, and `value`
makes the compute stream wait for it. On a CPU the copy is a second buffer, so that everything but
the streams is the same; on the meta device there is none. A tensor of n bytes moves n bytes each
way, once per micro-batch.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Called with the bytes of every copy that begins; for the memory forecast.
WATCH: ContextVar[Callable[[int], None] | None] = ContextVar("WATCH", default=None)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """A copy of a tensor on the host; its construction starts the copy, after the work that is
    queued by then."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._form: dict[str, Any] = {"size": tensor.shape, "dtype": tensor.dtype}
        if (watch := WATCH.get()) is not None:
            watch(self.num_bytes)
        if not tensor.is_cuda:
            self.host = tensor.new_empty(0) if tensor.is_meta else tensor.clone()
            return
        stream = _side_stream(self.device)
        self.host = torch.empty(**self._form, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not reused before the copy has read it

    @property
    def num_bytes(self) -> int:
        # `host` is empty on the meta device
        return math.prod(self._form["size"]) * self._form["dtype"].itemsize

    def fetch(self) -> None:
        """Starts the copy back to the device; a second call does nothing."""
        if self._back is not None:
            return
        if self.device.type != "cuda":
            self._back = (
                self.host.clone()
                if self.device.type == "cpu"
                else torch.empty(**self._form, device="meta")
            )
            return
        stream = _side_stream(self.device)
        self._back = torch.empty(**self._form, device=self.device)
        # the memory may be in use until now
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._back.copy_(self.host, non_blocking=True)
            self._arrived = stream.record_event()
        self._back.record_stream(stream)

    def value(self) -> Tensor:
        """Returns the tensor on its device; work that is queued from now on may read it."""
        self.fetch()
        assert self._back is not None
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
        return self._back

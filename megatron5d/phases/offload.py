"""Offloads activations to host memory between forward and backward, on a separate CUDA stream.

When an operation saves a tensor, its copy to the host is queued; the device memory is freed when
nothing else refers to the tensor. `fetch` starts the copy back, one phase before its use, and
`value` makes the compute stream wait for it. On a CPU the copy is a second buffer, so that only the
streams differ; on the meta device there is no copy. A tensor of n bytes moves n bytes each way,
once per micro-batch.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Called with the bytes of every copy that begins; the memory forecast sets it.
COPY_CALLBACK: ContextVar[Callable[[int], None] | None] = ContextVar("COPY_CALLBACK", default=None)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """A copy of a tensor on the host, started by the constructor after all work queued so far."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self._device_copy: Tensor | None = None
        self._fetch_event: torch.cuda.Event | None = None
        self._layout: dict[str, Any] = {"size": tensor.shape, "dtype": tensor.dtype}
        if (callback := COPY_CALLBACK.get()) is not None:
            callback(self.num_bytes)
        if not tensor.is_cuda:
            self.host = tensor.new_empty(0) if tensor.is_meta else tensor.clone()
            return
        stream = _side_stream(self.device)
        self.host = torch.empty(**self._layout, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        # The allocator must not reuse the tensor's memory before the copy has read it.
        tensor.record_stream(stream)

    @property
    def num_bytes(self) -> int:
        # `host` is empty on the meta device
        return math.prod(self._layout["size"]) * self._layout["dtype"].itemsize

    def fetch(self) -> None:
        """Starts the copy back to the device; a second call does nothing."""
        if self._device_copy is not None:
            return
        if self.device.type != "cuda":
            is_cpu = self.device.type == "cpu"
            self._device_copy = (
                self.host.clone() if is_cpu else torch.empty(**self._layout, device="meta")
            )
            return
        stream = _side_stream(self.device)
        self._device_copy = torch.empty(**self._layout, device=self.device)
        # Queued kernels may still use the memory that the allocator has just reused.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._device_copy.copy_(self.host, non_blocking=True)
            self._fetch_event = stream.record_event()
        self._device_copy.record_stream(stream)

    def value(self) -> Tensor:
        """The tensor on its device, readable by all work queued after this call."""
        self.fetch()
        assert self._device_copy is not None
        if self._fetch_event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._fetch_event)
        return self._device_copy

"""Which path a tensor takes, and which precision its sums are kept in."""

import os

import torch
from torch import Tensor

from kernels.language import HAS_TRITON

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_NUM_PROCESSORS_WITHOUT_GPU = 4


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float64 stays exact, everything narrower is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def runs_triton(x: Tensor) -> bool:
    """Whether an operation on this tensor runs its Triton kernel: on a GPU, or on the CPU under the interpreter.

    float64 has no fast path anywhere and always takes the plain one, and so do empty tensors.
    """
    if not HAS_TRITON or x.dtype == torch.float64 or x.numel() == 0:
        return False
    return x.is_cuda or (INTERPRETED and x.device.type == "cpu")


def num_processors(device: torch.device) -> int:
    """How many streaming multiprocessors the device has; a few without a GPU, so that loops over work are tested."""
    if device.type != "cuda":
        return _NUM_PROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_of(x: Tensor) -> Tensor:
    """`[..., n]` as `[rows, n]` with neighbours in memory along the row; a copy only where the layout demands it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()

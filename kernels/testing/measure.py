"""Timing on a GPU: the median of many runs over several inputs, with a cold cache; and the device's own limits."""

import time
from collections.abc import Callable, Sequence

import torch

FLUSH_BYTES = 512 * 2**20  # more than any second-level cache
CLOCK_HZ = 2e9  # about the highest of GPUs in data centres; `median_ms` waits twice as long
_LONGEST_S = 0.01


def median_ms(calls: Sequence[Callable[[], object]], repeats: int = 50) -> float:
    """Median time of a call in milliseconds.

    Args:
        calls: the same work on different inputs, taken in turn.
        repeats: how many timed calls.

    Returns:
        Milliseconds on the device. Before each call the device waits for as long as the host takes to launch it, lest
        a launch that takes longer than its kernel be timed in its place.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for call in calls:
        call()
    torch.cuda.synchronize()
    since = time.perf_counter()
    calls[0]()
    launch_s = min(time.perf_counter() - since, _LONGEST_S)
    starts, stops = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    for i, (start, stop) in enumerate(zip(starts, stops)):
        flush.zero_()
        torch.cuda._sleep(int(2 * launch_s * CLOCK_HZ))
        start.record()
        calls[i % len(calls)]()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) for start, stop in zip(starts, stops))
    return times[len(times) // 2]


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that is allocated during a call, what it returns included, beyond what was before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_gb_s() -> float:
    """Bytes read and written a second by a plain copy of 2 GiB, in GB/s."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms([lambda: target.copy_(source)], 20) / 1e6


def gemm_tflop_s() -> float:
    """bfloat16 GEMM of 8192³ by the vendor's library, in TFLOP/s."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / median_ms([lambda: a @ b.t()], 20) / 1e9

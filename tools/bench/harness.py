"""Benchmarks of kernels: what one call does, who can do it, and how calls are timed.

A time is the median of many calls on several inputs with a cold cache, and is compared with the
limits of the same device.
"""

import gc
import importlib
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron5d.kernels.choice import TRITON, Settings
from megatron5d.kernels.fp8.quantize import Quantized

OURS = Settings(TRITON, TRITON, TRITON, TRITON)
Call = Callable[..., Any]
Calls = dict[str, Call]
"""Provider -> a call of its implementation."""
Sizes = Mapping[str, int]
LIBRARIES = {
    "attention": ("cudnn", "fa4"),
    "fp8": ("torch",),
    "grouped": ("torch",),
    "norm": ("torch",),
}
"""Key of `kernels` -> the libraries that it can select beside Triton."""


@dataclass(frozen=True)
class Benchmark:
    """One row of the table."""

    # `make(device, **sizes)` gives calls on fresh random inputs; "ours" is always among them. Our
    # calls return all that they compute, also in place, so that results can be compared. Whatever
    # only one provider needs is made by its first call: it may be missing, or take long.
    make: Callable[..., Calls]
    # floating-point operations, or bytes that must move, of one call, from the same sizes
    work: Callable[..., float]
    unit: str  # "TFLOP/s" or "GB/s"
    sizes: Sizes  # those of real training
    tiny: Sizes  # for a run without a GPU
    # our providers that libraries can compute as well, by their `settings` -> key of `kernels`
    families: Mapping[str, str] = field(default_factory=dict)

    @property
    def work_of_a_call(self) -> float:
        """Operations or bytes at the sizes of real training."""
        return self.work(**self.sizes)

    def calls(self, device: str = "cuda", tiny: bool = False) -> Calls:
        return self.make(device, **(self.tiny if tiny else self.sizes))

    def calls_by_library(self, device: str = "cuda", tiny: bool = False) -> Calls:
        """The calls, with those of `families` pinned to Triton, and again by each library.

        A call that its library does not support raises ValueError.
        """
        calls = self.calls(device, tiny)
        for provider, family in self.families.items():
            ours = calls[provider]
            for library in (TRITON, *LIBRARIES[family]):
                label = provider if library == TRITON else f"{provider}, by {library}"
                settings = Settings(**{family: library}, strict=True, deterministic=False)
                calls[label] = partial(ours, settings=settings)
        return calls


def elementwise(
    make: Callable[..., Calls], bytes_each: int, sizes: Sizes, tiny: Sizes, family: str = ""
) -> Benchmark:
    """Row that moves `bytes_each` for every element; `sizes` are the dims of its tensors."""
    families = {"ours": family} if family else {}
    return Benchmark(
        make, lambda **dims: bytes_each * prod(dims.values()), "GB/s", sizes, tiny, families
    )


def copies_of(output: object) -> list[Tensor]:
    """Copies in fp32 of all tensors that a call returned.

    Raises:
        TypeError: it returned nothing that could be compared.
    """
    if isinstance(output, Tensor):
        return [output.detach().float().clone()]
    if isinstance(output, Quantized):
        return copies_of((output.values, output.scales))
    if isinstance(output, (tuple, list)) and output:
        return [tensor for item in output for tensor in copies_of(item)]
    raise TypeError(f"a benchmark's call has to return tensors (got {output!r})")


def randn(
    device: str, *shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)


def returning(call: Call, *outputs: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A call that returns the tensors into which it writes."""

    def run() -> tuple[Tensor, ...]:
        call()
        return outputs

    return run


def liger(name: str) -> Call:
    """Function of Liger-Kernel, or one that raises the reason why there is none."""
    try:
        return getattr(importlib.import_module("liger_kernel.transformers.functional"), name)
    except (ImportError, AttributeError) as error:
        reason = error

    def missing(*inputs: Any, **options: Any) -> Any:
        raise reason

    return missing


Forward = tuple[Call, tuple[Tensor, ...]]
"""A call, and the leaves whose gradients its backward computes."""


def forward_or_backward(forwards: Mapping[str, Forward], backward: bool) -> Calls:
    """The forwards themselves, or backwards of the graphs that their first calls record."""
    return {
        name: _backward(run, leaves) if backward else run
        for name, (run, leaves) in forwards.items()
    }


def _backward(run: Call, leaves: tuple[Tensor, ...]) -> Call:
    graphs: dict[object, tuple[tuple[Tensor, ...], ...]] = {}

    def call(**options) -> tuple[Tensor, ...]:
        key = tuple(options.items())
        if key not in graphs:
            output = run(**options)
            outputs = output if isinstance(output, tuple) else (output,)
            graphs[key] = outputs, tuple(torch.randn_like(y) for y in outputs)
        outputs, grads = graphs[key]
        return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    return call


def with_compiled(
    ours: Call,
    reference: Call,
    leaves: tuple[Tensor, ...],
    backward: bool,
    **peers,
) -> Calls:
    """Our operation, its plain version under torch.compile, and peers by name, of the leaves."""
    operations = {"ours": ours, "torch.compile": torch.compile(reference), **peers}
    return forward_or_backward(
        {name: (partial(run, *leaves), leaves) for name, run in operations.items()}, backward
    )


FLUSH_BYTES = 512 * 2**20  # more than any second-level cache
CLOCK_HZ = 2e9  # about the highest of GPUs in data centers; `median_ms` waits twice as long
_MAX_LAUNCH_S = 0.01


def median_ms(calls: Sequence[Call], repeats: int = 50) -> float:
    """Median time of a call on the device, in milliseconds.

    Args:
        calls: the same work on different inputs, called in turn.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for call in calls:
        call()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    calls[0]()
    launch_s = min(time.perf_counter() - start_s, _MAX_LAUNCH_S)
    starts, stops = (
        [torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2)
    )
    for i, (start, stop) in enumerate(zip(starts, stops)):
        flush.zero_()
        # the device waits until the call is launched: a small kernel would be timed as its launch
        torch.cuda._sleep(int(2 * launch_s * CLOCK_HZ))
        start.record()
        calls[i % len(calls)]()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) for start, stop in zip(starts, stops))
    return times[len(times) // 2]


def peak_bytes(call: Call) -> int:
    """Peak of what a call allocates, its outputs included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_gb_s() -> float:
    """Rate of a plain copy of 2 GiB, bytes read and written, in GB/s."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms([lambda: target.copy_(source)], 20) / 1e6


def gemm_tflop_s() -> float:
    """Rate of a bfloat16 GEMM of 8192³ by the vendor's library, in TFLOP/s."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / median_ms([lambda: a @ b.t()], 20) / 1e9


def no_gpu(tool: str, alternative: str = "") -> bool:
    """Whether torch finds no GPU; prints that the tool needs one."""
    if torch.cuda.is_available():
        return False
    print(f"{tool} needs a GPU, and torch finds none; {alternative}".rstrip("; "), file=sys.stderr)
    return True


def device_is_lost() -> bool:
    """Whether a kernel has broken this process's GPU, on which nothing runs any more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def clear_device() -> None:
    """Frees memory, and forgets compiled functions, which make other shapes dynamic."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def cpu_s() -> float:
    """CPU time of this process and of the children that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def least_seconds(
    calls: Calls, repeats: int, check: Callable[[dict[str, Any]], None] = lambda results: None
) -> tuple[dict[str, float], dict[str, float]]:
    """Least CPU time of each call, with its children's, and least wall time.

    Calls alternate, and the least time counts: a busy machine changes it least.

    Args:
        check: compares what the calls of one round return, and raises.
    """
    cpu, wall = (dict.fromkeys(calls, float("inf")) for _ in range(2))
    for _ in range(repeats):
        results = {}
        for name, call in calls.items():
            start_cpu, start_wall = cpu_s(), time.perf_counter()
            results[name] = call()
            wall[name] = min(wall[name], time.perf_counter() - start_wall)
            cpu[name] = min(cpu[name], cpu_s() - start_cpu)
        check(results)
    return cpu, wall

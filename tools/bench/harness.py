"""Rows of the table of speeds (`Benchmark`: what one call does, and everybody who can do it), and
how they are timed.

A time is the median of many runs over several inputs, with a cold cache, beside the device's own
limits. Each piece of work has a process of its own (`in_turn`): what crashes there, hangs, or
breaks its device ends one piece and no more.
"""

import importlib
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import Tensor

from megatron5d.kernels.choice import Settings

OURS = Settings("triton", "triton", "triton", "triton")
Calls = dict[str, Callable[..., object]]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Benchmark:
    """One row of the table."""

    # called as `make(device, **sizes)`: provider name -> call, on fresh random inputs; "ours" is
    # always there. A call of ours returns all it makes, also in place, so that results can be
    # compared. What only one provider needs, its first call makes: it may be missing, or take long
    make: Callable[..., Calls]
    # floating-point operations, or bytes that must move, of one call, from the same sizes
    work: Callable[..., float]
    unit: str  # "TFLOP/s" or "GB/s"
    sizes: Sizes  # those of real training
    tiny: Sizes  # the same in small, for a run without a GPU
    # calls of ours that libraries may make, too: provider -> key of `kernels`; they take `settings`
    families: Mapping[str, str] = field(default_factory=dict)

    @property
    def work_of_a_call(self) -> float:
        """At the sizes of real training."""
        return self.work(**self.sizes)

    def calls(self, device: str = "cuda", tiny: bool = False) -> Calls:
        return self.make(device, **(self.tiny if tiny else self.sizes))


def random(
    device: str, *shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)


def writing(call: Callable[[], object], *written: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a call that returns what it has written."""

    def run() -> tuple[Tensor, ...]:
        call()
        return written

    return run


def failing(error: Exception) -> Callable[[], object]:
    """Returns the call of a provider that could not be made ready: it says why."""

    def run() -> object:
        raise error

    return run


def liger(name: str) -> Callable[..., Any]:
    """Returns a function of Liger-Kernel, or, where it is not installed or has none of that name,
    one that says so."""
    try:
        return getattr(importlib.import_module("liger_kernel.transformers.functional"), name)
    except (ImportError, AttributeError) as error:
        reason = error
    return lambda *inputs, **options: failing(reason)()


Forward = tuple[Callable[..., Any], tuple[Tensor, ...]]
"""A call, and the leaves whose gradients its backward makes."""


def one_way(forwards: Mapping[str, Forward], backward: bool) -> Calls:
    """Returns the forwards as they are, or the backwards of graphs that the first call records."""
    return {name: _backward(*each) if backward else each[0] for name, each in forwards.items()}


def _backward(run: Callable[..., Any], leaves: tuple[Tensor, ...]) -> Callable[..., object]:
    graphs: dict[object, tuple[tuple[Tensor, ...], ...]] = {}

    def call(**options) -> tuple[Tensor, ...]:
        key = tuple(options.items())
        if key not in graphs:
            out = run(**options)
            outputs = out if isinstance(out, tuple) else (out,)
            graphs[key] = outputs, tuple(torch.randn_like(y) for y in outputs)
        outputs, grads = graphs[key]
        return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    return call


def beside_compiled(
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    leaves: tuple[Tensor, ...],
    backward: bool,
    **others,
) -> Calls:
    """Makes our operation, its plain version compiled, and others by name; all take the leaves."""
    every = {"ours": ours, "torch.compile": torch.compile(reference), **others}
    return one_way({name: (partial(run, *leaves), leaves) for name, run in every.items()}, backward)


FLUSH_BYTES = 512 * 2**20  # more than any second-level cache
CLOCK_HZ = 2e9  # about the highest of GPUs in data centres; `median_ms` waits twice as long
_LONGEST_S = 0.01


def median_ms(calls: Sequence[Callable[[], object]], repeats: int = 50) -> float:
    """Measures the median time of a call in milliseconds.

    Args:
        calls: the same work on different inputs, taken in turn.

    Returns:
        Milliseconds on the device. Before each call the device waits for as long as the host takes
        to launch it, lest a launch that takes longer than its kernel be timed in its place.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for call in calls:
        call()
    torch.cuda.synchronize()
    since = time.perf_counter()
    calls[0]()
    launch_s = min(time.perf_counter() - since, _LONGEST_S)
    starts, stops = (
        [torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2)
    )
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
    """Returns the most that is allocated during a call, what it returns included, beyond what was
    before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_gb_s() -> float:
    """Measures the bytes read and written a second by a plain copy of 2 GiB, in GB/s."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms([lambda: target.copy_(source)], 20) / 1e6


def gemm_tflop_s() -> float:
    """Returns times a bfloat16 GEMM of 8192³ by the vendor's library, in TFLOP/s."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / median_ms([lambda: a @ b.t()], 20) / 1e9


def cpu_s() -> float:
    """Returns the CPU time of this process and of those that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def least_seconds(
    ways: Mapping[str, Callable[[], Any]],
    repeats: int,
    check: Callable[[dict[str, Any]], None] = lambda _: None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the least CPU time, its children's too, and the least wall time of each way; all are
    taken by turns.

    `check` compares what they return, and raises.
    """
    cpu, wall = (dict.fromkeys(ways, float("inf")) for _ in range(2))
    for _ in range(repeats):
        results = {}
        for name, way in ways.items():
            start, start_wall = cpu_s(), time.perf_counter()
            results[name] = way()
            wall[name] = min(wall[name], time.perf_counter() - start_wall)
            cpu[name] = min(cpu[name], cpu_s() - start)
        check(results)
    return cpu, wall


Worker = Callable[[Sequence[str], Callable[[tuple], None]], None]
"""Does the named pieces one after the other: tells of what it has found, and with `(name,)` that a piece is done."""


def device_is_lost() -> bool:
    """Says whether an earlier kernel has broken this process's GPU, so that nothing more runs on
    it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _run(worker: Worker, names: Sequence[str], connection: Connection) -> None:
    # Ctrl-C reaches both processes: the parent ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker(names, connection.send)


def in_turn(
    worker: Worker,
    names: Sequence[str],
    limit_s: float,
    until: float,
    context: BaseContext | None = None,
) -> Iterator[tuple]:
    """Yields a worker's reports, piece by piece; if it dies or hangs, another one continues after
    that piece.

    Args:
        worker: runs in the other process; a function of a module.
        until: of `time.monotonic()`; then no piece is waited for any more.
        context: how processes are started; None = spawn, which a parent may that has used its GPU.

    Yields:
        What the worker told, without the `(name,)` at the end of a piece; and `(name, reason)` of a
        piece that ended without it, also where time was up.
    """
    context = context or multiprocessing.get_context("spawn")
    left = list(names)
    while left and time.monotonic() < until:
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_run, args=(worker, left, send), daemon=False)  # type: ignore[attr-defined]
        child.start()
        send.close()
        try:
            yield from _told(receive, left, limit_s, until)
        finally:
            child.kill()
            child.join()
            receive.close()
    yield from ((name, "not reached: the time is up") for name in left)


def _told(receive: Connection, left: list[str], limit_s: float, until: float) -> Iterator[tuple]:
    """Returns what one process tells; takes from `left` what it has done, and the piece that it has
    not survived."""
    while left:
        patience = min(limit_s, until - time.monotonic())
        if not receive.poll(max(patience, 0.0)):
            yield (
                left.pop(0),
                f"nothing heard in {limit_s:.0f} s" if patience == limit_s else "the time is up",
            )
            return
        try:
            message = receive.recv()
        except EOFError:
            yield left.pop(0), "its process has died"
            return
        if message == (left[0],):
            left.pop(0)
        else:
            yield message

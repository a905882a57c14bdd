"""Traces what the passes of a stage allocate and keep, by running them on the meta device.

A pass is the work of one action of a schedule: F, B, I or W of one micro-batch. It runs phase by
phase as in training, on tensors without memory, while every storage is counted: what layers keep
for the backward, pass to each other or need temporarily, buffers of collectives included. No
formula has to follow changes of the layers. Weights are complete here; peak.py counts what data
parallelism does with them and with their FP8 copies. Of equal consecutive layers only three run;
the middle one stands for all between the first and the last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.kernels.dispatch import statistics_dtype
from megatron5d.phases.phase import Phase, PhaseHooks
from megatron5d.phases.stage import Pass, Stage
from megatron5d.planning.memory.meta_outputs import operation_of
from megatron5d.precision.fp8_recipes import quantized_copies
from megatron5d.precision.gemm import forget_copies
from megatron5d.topology.shard_spec import state_of

BOUNDARY = "input"  # kind of the input and output of a stage


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors in nested lists; for a wrapper subclass, which has no memory, those inside it."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            if type(value) is Tensor or not is_traceable_wrapper_subclass(value):
                yield value
            else:
                yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])


class MemoryWatch(TorchDispatchMode):
    """Counts the storages made inside this context, of any device, until they are freed or resized.

    `live_bytes` are alive now, `peak_bytes` is their maximum. `largest` is (elements, shape,
    operation) of the largest tensor, without views. Meta tensors count as if they had memory.

    Args:
        block: sizes are rounded up to a multiple of this many bytes (512 for torch's CUDA
            allocator).
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.block = block
        self.live_bytes = self.peak_bytes = 0
        self.largest: tuple[int, tuple[int, ...], str] = (0, (), "")
        # id of a live storage -> its bytes
        self._sizes: dict[int, tuple[int, weakref.ref]] = {}
        self._resize = torch.UntypedStorage.resize_

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The inherited method gives the same, but imports torch's compiler, which takes seconds.
        return False

    def __enter__(self):
        watch, resize = self, self._resize

        # A dispatch mode does not see resize_.
        def counted_resize(storage, num_bytes):
            before = storage.nbytes()
            result = resize(storage, num_bytes)
            watch._changed(storage, before)
            return result

        setattr(torch.UntypedStorage, "resize_", counted_resize)  # noqa: B010
        return super().__enter__()

    def __exit__(self, *error):
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        return super().__exit__(*error)

    def forget_peak(self) -> int:
        """Starts a new `peak_bytes`; returns the bytes that are alive now."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, operation = kwargs or {}, operation_of(func)
        inputs: set[int] = set()  # ids of storages that exist already
        out = None if operation.outputs is None else operation.outputs(args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
            if operation.views:
                return out
            if not operation.fresh:
                tensors = _tensors((args, tuple(kwargs.values())))
                inputs = {id(tensor.untyped_storage()) for tensor in tensors}
        elif args and out is args[0]:
            return out
        for tensor in (out,) if type(out) is Tensor else _tensors((out,)):
            if id(tensor.untyped_storage()) not in inputs:
                self._count(tensor, func)
        return out

    def _count(self, tensor: Tensor, operation: Any) -> None:
        if tensor.numel() > self.largest[0]:
            self.largest = tensor.numel(), tuple(tensor.shape), str(operation)
        storage = tensor.untyped_storage()
        if id(storage) not in self._sizes:
            self._grow(storage, 0)

    def _changed(self, storage: torch.UntypedStorage, before: int) -> None:
        """Counts a resized storage; only the change, if it is older than this context."""
        self._grow(storage, self.rounded(before))

    def _grow(self, storage: torch.UntypedStorage, before: int) -> None:
        """Counts a storage's bytes, less those counted so far: `before` if it is new here."""
        key, size = id(storage), self.rounded(storage.nbytes())
        counted, ref = self._sizes.get(key) or (
            before,
            weakref.ref(storage, lambda _: self._freed(key)),
        )
        self._sizes[key] = size, ref
        self.live_bytes += size - counted
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)[0]

    def rounded(self, num_bytes: int) -> int:
        """Bytes that the allocator uses for a request."""
        return -(-num_bytes // self.block) * self.block


@dataclass(frozen=True)
class Step:
    """Change of the live bytes by one phase of one pass.

    Args:
        kind: class of the phase.
        rise: peak during the phase, relative to its beginning.
        delta: bytes at its end, relative to its beginning.
        frees: whether it is the phase's backward, after which its activations are freed.
        host: of a forward, bytes in host memory until the phase's backward; not part of `delta`.
        late: (index, rise) for each bucket of the phase, in the order of their first weight
            gradients, for which data parallelism may allocate a buffer: the index among the phase's
            buckets, and the rise from there until the next bucket. `rise` is until the first one.
    """

    kind: str
    rise: int
    delta: int
    frees: bool = False
    host: int = 0
    late: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StageTrace:
    """The passes of one stage, phase by phase in the order in which they run.

    A stage's input and the gradient of its output count from the beginning of their pass. The
    output of a pass no longer counts at its end. Data parallelism's buffers do not count (peak.py).

    Args:
        passes: op (F, B, I, W) -> its steps.
        output_kept: whether the stage's last phase saves its output until the backward.
        making: as `passes`, where each phase makes the FP8 copies of its weights. Temporary tensors
            for that count, the copies do not (peak.py).
    """

    passes: dict[str, tuple[Step, ...]]
    output_kept: bool
    making: dict[str, tuple[Step, ...]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether the stage has no layer and only forwards messages."""
        return all(step.kind == BOUNDARY for step in self.passes["F"])


def empty_trace(message_bytes: int) -> StageTrace:
    """Trace of a stage without phases, which only forwards messages."""
    steps = (Step(BOUNDARY, message_bytes, message_bytes), Step(BOUNDARY, 0, -message_bytes))
    return StageTrace({"F": steps, "B": steps, "I": steps, "W": ()}, output_kept=False)


class Tracer:
    """Runs stages on the meta device.

    Args:
        shapes: of the stage's input and output, `[s/cp/tp, b, h]`, or several states joined.
        dtype: of a message.
        batch: one micro-batch on the meta device.
        num_sums: length of the last stage's output.
        sync: data parallelism if gradients have temporary buffers, else None.
        rehearse: run a micro-batch before those that count, because the first one makes tensors
            that remain (FP8 copies of weights, symmetric memory).
        split: trace the passes I and W as well.
        block: as in MemoryWatch.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        batch: Any,
        num_sums: int,
        *,
        sync: GradSync | None = None,
        rehearse: bool = False,
        split: bool = True,
        block: int = 1,
    ) -> None:
        self.shapes, self.dtype, self.batch, self.num_sums = shapes, dtype, batch, num_sums
        self.rehearse, self.split, self.block = rehearse, split, block
        # bucket -> peak bytes before its first weight gradient, since that of the bucket before
        self._peaks: dict[int, int] = {}
        self._sync = sync
        for index, bucket in enumerate([] if sync is None else sync.buckets):
            for parameter in bucket.parameters if bucket.shards_grads else ():
                state_of(parameter).allocate_main_grad = partial(self._begin_grads, index)

    def trace(
        self,
        units: Sequence[Sequence[Phase]],
        signatures: Sequence[Hashable],
        *,
        first: bool,
        last: bool,
    ) -> StageTrace:
        """Runs the passes of a stage.

        Args:
            units: the phases of the stage, grouped in layers.
            signatures: one per unit; equal for layers doing the same work on the same shapes.
            first: whether the input of the stage is tokens.
            last: whether the output of the stage is the loss.
        """
        indices, repeats = _representatives(signatures)
        phases = [phase for index in indices for phase in units[index]]
        times = {phase: count for index, count in zip(indices, repeats) for phase in units[index]}
        making: dict[str, tuple[Step, ...]] = {}
        with MemoryWatch(self.block) as self._watch:
            if self.rehearse:
                self._cycle(phases, times, PhaseHooks(), first, last, (self.split,))
                making = self._cycle(phases, times, _Requantized(self._sync), first, last)
            passes = self._cycle(phases, times, PhaseHooks(), first, last)
        return StageTrace(passes, passes["F"][-1].delta == 0, making)

    def _cycle(
        self,
        phases: Sequence[Phase],
        times: Mapping[Phase, int],
        hooks: PhaseHooks,
        first: bool,
        last: bool,
        splits: Sequence[bool] = (False, True),
    ) -> dict[str, tuple[Step, ...]]:
        """Runs one micro-batch for each way of the backward, joined or split."""
        watch, passes = self._watch, dict[str, tuple[Step, ...]]()
        for split in splits if self.split else (False,):
            stage = Stage(phases, hooks)
            passes["F"] = self._forward(watch, stage, times, first)
            passes["I" if split else "B"] = self._backward(watch, stage, times, last, split)
            if split:
                passes["W"] = self._record(watch, stage.begin("W", 0), times)
        return passes

    def _boundary(
        self, watch: MemoryWatch, shape: tuple[int, ...], last: bool = False
    ) -> tuple[Tensor, Step]:
        """The input of a pass, and the step that counts it."""
        before = watch.forget_peak()
        form = (self.num_sums, statistics_dtype(self.dtype)) if last else (shape, self.dtype)
        x = torch.empty(form[0], dtype=form[1], device="meta")
        return x, Step(BOUNDARY, watch.live_bytes - before, watch.live_bytes - before)

    def _forward(
        self, watch: MemoryWatch, stage: Stage, times: Mapping[Phase, int], first: bool
    ) -> tuple[Step, ...]:
        x, arrival = (
            (None, Step(BOUNDARY, 0, 0)) if first else self._boundary(watch, self.shapes[0])
        )
        work = stage.begin("F", 0, x, self.batch)
        del x
        return (arrival, *self._record(watch, work, times, lambda: stage.host_bytes(0)))

    def _backward(
        self,
        watch: MemoryWatch,
        stage: Stage,
        times: Mapping[Phase, int],
        last: bool,
        split: bool,
    ) -> tuple[Step, ...]:
        grad, arrival = self._boundary(watch, self.shapes[1], last)
        work = stage.begin("I" if split else "B", 0, grad)
        del grad
        return (arrival, *self._record(watch, work, times))

    def _record(
        self,
        watch: MemoryWatch,
        work: Pass,
        times: Mapping[Phase, int],
        host_bytes: Callable[[], int] = lambda: 0,
    ) -> tuple[Step, ...]:
        """Runs a pass step by step. The last step frees the output, which `work` holds.

        Args:
            watch: counts bytes.
            work: the pass.
            times: how many equal phases each one stands for.
            host_bytes: bytes of the pass that are in host memory now.
        """
        steps = []
        for kind, phase, *_ in work.steps:
            before, on_host, self._peaks = watch.forget_peak(), host_bytes(), {}
            work.advance()
            peaks = [*self._peaks.values(), watch.peak_bytes]
            rise, *later = (peak - before for peak in peaks)
            uses = self._sync.uses[phase] if self._sync else []
            late = tuple(zip(map(uses.index, self._peaks), later))
            delta, host = watch.live_bytes - before, host_bytes() - on_host
            name, is_backward = type(phase).__name__, kind == "backward"
            steps.append(Step(name, rise, delta, is_backward, host, late))
        before = watch.forget_peak()
        work.state = None
        counts = [times[step.phase] for step in work.steps]
        return (*_expanded(steps, counts), Step(BOUNDARY, 0, watch.live_bytes - before))

    def _begin_grads(self, bucket: int) -> None:
        """Takes the place of the allocation of a bucket's gradients."""
        if bucket not in self._peaks:
            self._peaks[bucket] = self._watch.peak_bytes
            self._watch.forget_peak()


class _Requantized(PhaseHooks):
    """Drops the FP8 copies of weights before each phase, so that every pass makes them again.

    Of weights that are gathered in FP8, only the transposes are dropped.
    """

    def __init__(self, sync: GradSync | None) -> None:
        buckets = [] if sync is None else sync.buckets
        in_fp8 = [bucket for bucket in buckets if bucket.format is not None]
        self._gathered = {weight for bucket in in_fp8 for weight in bucket.parameters}

    def before(self, phase: Phase, kind: str) -> None:
        if kind == "wgrad":  # reads no weights
            return
        forget_copies(weight for weight in phase.parameters() if weight not in self._gathered)
        for weight in self._gathered.intersection(phase.parameters()) if kind == "backward" else ():
            quantized_copies(weight).forget_transposed()


def _representatives(signatures: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Indices of the units to run, and how many units each stands for.

    Of equal consecutive units the first, one in the middle and the last one run.
    """
    indices: list[int] = []
    repeats: list[int] = []
    start = 0
    for end in range(1, len(signatures) + 1):
        if end < len(signatures) and signatures[end] == signatures[start]:
            continue
        length = end - start
        indices += range(start, end) if length <= 3 else (start, start + 1, end - 1)
        repeats += [1] * length if length <= 3 else [1, length - 2, 1]
        start = end
    return indices, repeats


def _expanded(steps: Sequence[Step], times: Sequence[int]) -> tuple[Step, ...]:
    """Steps of all phases: those of a unit that stands for several are repeated."""
    expanded: list[Step] = []
    start = 0
    while start < len(steps):
        stop = start + 1
        while times[start] > 1 and stop < len(steps) and times[stop] == times[start]:
            stop += 1
        expanded += list(steps[start:stop]) * times[start]
        start = stop
    return tuple(expanded)

"""Finds out what the passes of a stage allocate and keep, by running them on the meta device.

A pass is the work of one action of a schedule: F, B, I or W of one micro-batch. It runs phase by
phase as in training, on tensors without memory, while every storage is counted. So there are no
formulas to keep in step with the layers: what they keep for the backward, pass to each other or
need temporarily is counted where it happens, buffers of collectives included. Weights are whole;
what data parallelism does with them and with their FP8 copies is another matter
(planning/memory/peak.py). Of many equal layers in a row only three are run; the middle one stands
for all between the first and the last.
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
    """Yields the tensors in nested lists; of a wrapper subclass, which has no memory of its own,
    those inside it."""
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

    `live_bytes` are alive now, `peak_bytes` were the most; `largest` is (elements, shape,
    operation) of the largest tensor made, without views. On the meta device, sizes are counted that
    have no memory.

    Args:
        block: sizes are rounded up to a multiple of this many bytes (512 for torch's CUDA
            allocator).
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.block = block
        self.live_bytes = self.peak_bytes = 0
        self.largest: tuple[int, tuple[int, ...], str] = (0, (), "")
        # id of a storage that lives -> its bytes
        self._sizes: dict[int, tuple[int, weakref.ref]] = {}
        self._resize = torch.UntypedStorage.resize_

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # as torch would by importing its compiler
        return False

    def __enter__(self):
        watch, resize = self, self._resize

        def resized(storage, num_bytes):  # a dispatch mode does not see resize_
            before = storage.nbytes()
            result = resize(storage, num_bytes)
            watch._changed(storage, before)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        return super().__exit__(*error)

    def forget_peak(self) -> int:
        """Starts a new `peak_bytes`; returns the bytes that are alive now."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, operation, given = kwargs or {}, operation_of(func), None
        out = None if operation.outputs is None else operation.outputs(args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
            if operation.views:
                return out
            if not operation.fresh:
                given = {
                    id(tensor.untyped_storage())
                    for tensor in _tensors((args, tuple(kwargs.values())))
                }
        elif args and out is args[0]:
            return out
        for tensor in (out,) if type(out) is Tensor else _tensors((out,)):
            if not given or id(tensor.untyped_storage()) not in given:
                self._made(tensor, func)
        return out

    def _made(self, tensor: Tensor, operation: Any) -> None:
        if tensor.numel() > self.largest[0]:
            self.largest = tensor.numel(), tuple(tensor.shape), str(operation)
        storage = tensor.untyped_storage()
        if id(storage) not in self._sizes:
            self._grow(storage, 0)

    def _changed(self, storage: torch.UntypedStorage, before: int) -> None:
        """Counts a resized storage; of one made before the context only the change, as long as it
        lives."""
        self._grow(storage, self.rounded(before))

    def _grow(self, storage: torch.UntypedStorage, before: int) -> None:
        """Counts a storage's bytes, less those counted of it so far: `before` where it is new."""
        place, now = id(storage), self.rounded(storage.nbytes())
        known, ref = self._sizes.get(place) or (
            before,
            weakref.ref(storage, lambda _: self._freed(place)),
        )
        self._sizes[place] = now, ref
        self.live_bytes += now - known
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, place: int) -> None:
        self.live_bytes -= self._sizes.pop(place)[0]

    def rounded(self, num_bytes: int) -> int:
        """Returns the bytes that the allocator uses for a request."""
        return -(-num_bytes // self.block) * self.block


@dataclass(frozen=True)
class Step:
    """How one phase of one pass changes the number of bytes that are alive.

    Args:
        kind: class of the phase.
        rise: the most that is alive during the phase, minus what was alive at its beginning.
        delta: what is alive at its end, minus what was alive at its beginning.
        frees: whether it is the backward of its phase, after which the activations are not needed
            any more.
        host: of a forward, bytes that are in the host's memory until the phase's backward; not part
            of `delta`.
        late: (place, most) for each bucket of the phase in the order of its first weight gradient,
            for which data parallelism may have to allocate: its place among the phase's buckets,
            and as `rise` from there until the next. `rise` is until the first.
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

    The stage's input and the gradient of its output count from the beginning of the pass that takes
    them. What a pass passes on does not count any more at its end. Data parallelism's buffers do
    not count (planning/memory/peak.py).

    Args:
        passes: op (F, B, I, W) -> its steps.
        output_kept: whether the stage's last phase saves its output until the backward.
        making: as `passes`, where each phase makes the FP8 copies of its weights. The temporary
            tensors of that count, the copies do not (planning/memory/peak.py).
    """

    passes: dict[str, tuple[Step, ...]]
    output_kept: bool
    making: dict[str, tuple[Step, ...]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether the stage has no layer, so that it only passes messages on."""
        return all(step.kind == BOUNDARY for step in self.passes["F"])

    def kept(self, op: str = "F") -> int:
        """Returns bytes that a pass leaves alive: F until B or I, I until W (usually negative,
        since I frees activations)."""
        return sum(step.delta for step in self.passes[op])


def empty_trace(message_bytes: int) -> StageTrace:
    """Returns the trace of a stage without phases: it holds a message until it passes it on."""
    passed = (Step(BOUNDARY, message_bytes, message_bytes), Step(BOUNDARY, 0, -message_bytes))
    return StageTrace({"F": passed, "B": passed, "I": passed, "W": ()}, output_kept=False)


class Tracer:
    """Runs stages on the meta device.

    Args:
        shapes: of the stage's input and of its output, `[s/cp/tp, b, h]`, or several one after the
            other.
        dtype: of a message.
        batch: one micro-batch on the meta device.
        num_sums: length of the last stage's output.
        sync: data parallelism if gradients have temporary buffers, else None.
        rehearse: the first micro-batch makes what stays (FP8 copies of weights, symmetric memory):
            others are counted.
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
        # bucket -> the most bytes until its first weight gradient, from the one before
        self._begun: dict[int, int] = {}
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
            signatures: one per unit; equal for layers that do the same with tensors of the same
                sizes.
            first: whether the input of the stage is tokens.
            last: whether the output of the stage is the loss.
        """
        chosen, repeats = _abridged(signatures)
        phases = [phase for index in chosen for phase in units[index]]
        times = {phase: count for index, count in zip(chosen, repeats) for phase in units[index]}
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
        """Runs one micro-batch forward and backward, and if backwards are split, another; or only
        one of them."""
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
        """Returns the input of a pass, and the step that counts it."""
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
            host_bytes: bytes of the pass that are in the host's memory at the moment.
        """
        steps = []
        for kind, phase, *_ in work.steps:
            before, away, self._begun = watch.forget_peak(), host_bytes(), {}
            work.advance()
            rise, *later = (most - before for most in (*self._begun.values(), watch.peak_bytes))
            places = (
                [self._sync.uses[phase].index(bucket) for bucket in self._begun]
                if self._sync
                else []
            )
            delta, host = watch.live_bytes - before, host_bytes() - away
            steps.append(
                Step(
                    type(phase).__name__,
                    rise,
                    delta,
                    kind == "backward",
                    host,
                    tuple(zip(places, later)),
                )
            )
        before = watch.forget_peak()
        work.state = None
        return (
            *_expanded(steps, [times[step.phase] for step in work.steps]),
            Step(BOUNDARY, 0, watch.live_bytes - before),
        )

    def _begin_grads(self, bucket: int) -> None:
        """Stands for the allocation of a bucket's gradients."""
        if bucket not in self._begun:
            self._begun[bucket] = self._watch.peak_bytes
            self._watch.forget_peak()


class _Requantized(PhaseHooks):
    """Drops the FP8 copies of weights, so that a pass makes them anew; if gathered in FP8, only
    transposes."""

    def __init__(self, sync: GradSync | None) -> None:
        formatted = [
            bucket for bucket in ([] if sync is None else sync.buckets) if bucket.format is not None
        ]
        self._gathered = {weight for bucket in formatted for weight in bucket.parameters}

    def before(self, phase: Phase, kind: str) -> None:
        if kind == "wgrad":  # which reads none
            return
        forget_copies(weight for weight in phase.parameters() if weight not in self._gathered)
        for weight in self._gathered.intersection(phase.parameters()) if kind == "backward" else ():
            quantized_copies(weight).forget_transposed()


def _abridged(signatures: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Returns (indices of the units to run, how many each stands for): the first, one and the last
    of equal ones in a row."""
    chosen: list[int] = []
    repeats: list[int] = []
    start = 0
    for end in range(1, len(signatures) + 1):
        if end < len(signatures) and signatures[end] == signatures[start]:
            continue
        length = end - start
        chosen += range(start, end) if length <= 3 else (start, start + 1, end - 1)
        repeats += [1] * length if length <= 3 else [1, length - 2, 1]
        start = end
    return chosen, repeats


def _expanded(steps: Sequence[Step], times: Sequence[int]) -> tuple[Step, ...]:
    """Returns the steps of all phases: those of a unit that stands for several are repeated."""
    out: list[Step] = []
    at = 0
    while at < len(steps):
        stop = at + 1
        while times[at] > 1 and stop < len(steps) and times[stop] == times[at]:
            stop += 1
        out += list(steps[at:stop]) * times[at]
        at = stop
    return tuple(out)

"""What a stage's passes allocate and keep, found by running them on the meta device.

A pass is the work of one action of a schedule: F, B, I or W of one micro-batch. It runs phase by phase exactly as in
training, on tensors that have sizes and no memory, while every storage is counted. So no formula has to follow what the
layers do: what they keep for the backward, what they pass to each other, and what they need for a moment is counted
where it happens, collectives' buffers included. Of a long row of equal layers three are run, and the middle one stands
for all that lie between the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron5d.pipeline_parallel.hooks import PhaseHooks
from megatron5d.pipeline_parallel.stage import Stage, segments_of
from megatron5d.plan.watch import MemoryWatch

BOUNDARY = "input"  # kind of what enters a stage, and leaves it


@dataclass(frozen=True)
class Step:
    """What one phase does to the bytes alive in one pass.

    Args:
        kind: class of the phase.
        rise: the most above what was alive when it began.
        delta: what is alive when it ends, less what was when it began.
        frees: it is the backward of its phase, which then has no use for its activations any more.
        buffers: what of `delta` lies in data parallelism's buffers that come and go (ZeRO-2 and 3).
        host: of a forward, bytes that wait in the host's memory until the phase's backward; none of `delta`.
    """

    kind: str
    rise: int
    delta: int
    frees: bool = False
    buffers: int = 0
    host: int = 0


@dataclass(frozen=True)
class StageTrace:
    """The passes of one stage, phase by phase in the order in which they run.

    The stage's input and the gradient of its output count from the beginning of the pass that takes them, and what a
    pass hands on does not count any more when it ends.

    Args:
        passes: op (F, B, I, W) -> its steps.
        output_kept: the stage itself keeps its output until its backward, in whatever its last phase has saved.
        standing: bytes that data parallelism leaves between two passes: a unit whose sum is under way, and that sum.
        first: the passes of a step's first micro-batch, which finds nothing whole; empty where all are alike.
        ahead: op -> bytes of what it reads first, which are fetched while the last unit of the action before runs.
        last_unit: op -> how many of its steps, before the very last, belong to its last unit.
    """

    passes: dict[str, tuple[Step, ...]]
    output_kept: bool
    standing: int = 0
    first: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    last_unit: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_relay(self) -> bool:
        """The stage holds no layer: it hands on what it is given."""
        return all(step.kind == BOUNDARY for step in self.passes["F"])

    def kept(self, op: str = "F") -> int:
        """Bytes that stay when a pass has run: F until B or I, I until W (of I: less than F kept, usually)."""
        return sum(step.delta for step in self.passes[op])


def relay_trace(message_bytes: int) -> StageTrace:
    """The trace of a relay: it holds a message until it passes it on."""
    passed = (Step(BOUNDARY, message_bytes, message_bytes), Step(BOUNDARY, 0, -message_bytes))
    return StageTrace({"F": passed, "B": passed, "I": passed, "W": ()}, output_kept=False)


class Buffers(PhaseHooks, Protocol):
    """Data parallelism whose buffers come and go with the passes."""

    def buffer_bytes(self) -> int:
        """Bytes of buffers that are there now."""

    def fetched_bytes(self, phase: nn.Module) -> int:
        """Bytes of the weights that are gathered for the unit of a phase, and given back after it."""


class Tracer:
    """Runs stages on the meta device.

    Args:
        shape: of what travels between stages, `[s/cp/tp, b, h]`.
        dtype: of it.
        batch: one micro-batch on the meta device.
        num_sums: entries of what the last stage returns.
        hooks: data parallelism where it has buffers that come and go; None = nothing does.
        split: the passes I and W are asked for, too.
        block: see MemoryWatch.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, batch: Any, num_sums: int, *, hooks: Buffers | None = None,
        split: bool = True, block: int = 1,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.batch, self.num_sums = shape, dtype, batch, num_sums
        self.hooks, self.split, self.block = hooks, split, block

    def trace(
        self, units: Sequence[Sequence[nn.Module]], signatures: Sequence[Hashable], *, first: bool, last: bool
    ) -> StageTrace:
        """
        Args:
            units: the phases of the stage, grouped in layers.
            signatures: equal for layers that do the same on tensors of the same sizes.
            first: the stage begins with tokens.
            last: the stage ends in the loss.
        """
        chosen, repeats = _abridged(signatures)
        phases = [phase for index in chosen for phase in units[index]]
        times = {phase: count for index, count in zip(chosen, repeats) for phase in units[index]}
        passes: dict[str, tuple[Step, ...]] = {}
        first_ones: dict[str, tuple[Step, ...]] = {}
        standing = 0
        with MemoryWatch(self.block) as watch:
            for split in (False, True) if self.split else (False,):
                stage = Stage(phases, self.hooks)
                if self.hooks is not None:  # a step's first micro-batch finds nothing whole: it is not the usual one
                    first_time = self._cycle(watch, stage, times, first=first, last=last, split=split)
                    standing += sum(step.delta for steps in first_time.values() for step in steps)
                    first_ones = first_ones or first_time
                passes |= self._cycle(watch, stage, times, first=first, last=last, split=split)
        ahead, last_unit = {}, {}
        if self.hooks is not None:
            ends = {"F": (units[0], units[-1]), "B": (units[-1], units[0]), "I": (units[-1], units[0])}
            ahead = {op: self.hooks.fetched_bytes(begin[0]) for op, (begin, _) in ends.items()}
            again = {
                op: 1 + (op != "F" and getattr(end[0], "recompute", None) is not None) for op, (_, end) in ends.items()
            }
            last_unit = {op: again[op] * len(end) for op, (_, end) in ends.items()}
        return StageTrace(passes, passes["F"][-1].delta == 0, standing, first_ones, ahead, last_unit)

    def _cycle(
        self, watch: MemoryWatch, stage: Stage, times: Mapping[nn.Module, int], *, first: bool, last: bool, split: bool
    ) -> dict[str, tuple[Step, ...]]:
        """One micro-batch forward and backward.

        What the next action reads first is not fetched ahead: that belongs to the Program, and there are two units
        whole at once with it as without it.
        """
        back = "I" if split else "B"
        passes = {
            "F": self._forward(watch, stage, times, first),
            back: self._backward(watch, stage, times, last, split),
        }
        if split:
            order = [(phase, False) for phase in stage.phases[::-1]]
            passes["W"] = self._record(watch, stage.weight_steps(0), order, times)
        return passes

    def _boundary(self, watch: MemoryWatch, last: bool) -> tuple[Tensor, Step]:
        """The tensor that arrives, and the step that counts it."""
        before = watch.forget_peak()
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        x = torch.empty(self.num_sums, dtype=wide, device="meta") if last else self._message()
        return x, Step(BOUNDARY, watch.live_bytes - before, watch.live_bytes - before)

    def _message(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def _forward(
        self, watch: MemoryWatch, stage: Stage, times: Mapping[nn.Module, int], first: bool
    ) -> tuple[Step, ...]:
        x, arrival = (None, Step(BOUNDARY, 0, 0)) if first else self._boundary(watch, False)
        work = stage.forward_steps(0, x, self.batch)
        del x
        order = [(phase, False) for phase in stage.phases]
        return (arrival, *self._record(watch, work, order, times, lambda: stage.host_bytes(0)))

    def _backward(
        self, watch: MemoryWatch, stage: Stage, times: Mapping[nn.Module, int], last: bool, split: bool
    ) -> tuple[Step, ...]:
        grad, arrival = self._boundary(watch, last)
        work = stage.backward_steps(0, grad, split)
        del grad
        order: list[tuple[nn.Module, bool]] = []
        for phases, recompute in reversed(segments_of(stage.phases)):
            order += [(phase, False) for phase in phases if recompute] + [(phase, True) for phase in phases[::-1]]
        return (arrival, *self._record(watch, work, order, times))

    def _record(
        self,
        watch: MemoryWatch,
        work: Iterator[Any],
        order: Sequence[tuple[nn.Module, bool]],
        times: Mapping[nn.Module, int],
        host_bytes: Callable[[], int] = lambda: 0,
    ) -> tuple[Step, ...]:
        """Runs a pass step by step; the last step is what happens when its output, which `work` holds, is let go.

        Args:
            watch: counts.
            work: the pass.
            order: the phase of every step, and whether the step is its backward.
            times: how often each phase counts.
            host_bytes: what of the pass waits on the host by now.
        """
        steps = []
        for phase, frees in order:
            before, whole, away = watch.forget_peak(), self._buffer_bytes(), host_bytes()
            next(work)
            rise, delta = watch.peak_bytes - before, watch.live_bytes - before
            buffers, host = self._buffer_bytes() - whole, host_bytes() - away
            steps.append(Step(type(phase).__name__, rise, delta, frees, buffers, host))
        before = watch.forget_peak()
        assert next(work, None) is None
        return (*_expanded(steps, [times[phase] for phase, _ in order]), Step(BOUNDARY, 0, watch.live_bytes - before))

    def _buffer_bytes(self) -> int:
        return 0 if self.hooks is None else self.hooks.buffer_bytes()


def _abridged(signatures: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Which units to run, and how often each counts: of a row of equal ones the first, one in the middle, the last."""
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
    """The steps of every phase of every unit, in groups as long as the units."""
    out: list[Step] = []
    at = 0
    while at < len(steps):
        stop = at + 1
        while times[at] > 1 and stop < len(steps) and times[stop] == times[at]:
            stop += 1
        out += list(steps[at:stop]) * times[at]
        at = stop
    return tuple(out)

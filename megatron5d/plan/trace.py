"""Finds out what the passes of a stage allocate and keep, by running them on the meta device.

A pass is the work of one action of a schedule: F, B, I or W of one micro-batch. It runs phase by phase as in training,
on tensors without memory, while every storage is counted. So there are no formulas to keep in step with the layers:
what they keep for the backward, pass to each other or need temporarily is counted where it happens, buffers of
collectives included. Of many equal layers in a row only three are run; the middle one stands for all between the first
and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kernels.dispatch import statistics_dtype
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.pipeline_parallel.stage import Stage, phase_groups
from megatron5d.plan.watch import MemoryWatch
from megatron5d.precision.activations import policy_of

BOUNDARY = "input"  # kind of the input and output of a stage


@dataclass(frozen=True)
class Step:
    """How one phase of one pass changes the number of bytes that are alive.

    Args:
        kind: class of the phase.
        rise: the most that is alive during the phase, minus what was alive at its beginning.
        delta: what is alive at its end, minus what was alive at its beginning.
        frees: whether it is the backward of its phase, after which the activations are not needed any more.
        buffers: the part of `delta` in data parallelism's temporary buffers (ZeRO-2 and 3).
        host: of a forward, bytes that are in the host's memory until the phase's backward; not part of `delta`.
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

    The stage's input and the gradient of its output count from the beginning of the pass that takes them. What a pass
    passes on does not count any more at its end.

    Args:
        passes: op (F, B, I, W) -> its steps.
        output_kept: whether the stage's last phase saves its output until the backward.
        standing: bytes of data parallelism's buffers that stay between two passes: a unit whose sum has not finished,
            and that sum.
        first: the passes of a step's first micro-batch, when no weights are gathered yet; empty if they do not differ.
        ahead: op -> bytes of the weights that it reads first, which are gathered during the last unit of the action
            before.
        last_unit: op -> how many of its steps, the final one aside, belong to its last unit.
    """

    passes: dict[str, tuple[Step, ...]]
    output_kept: bool
    standing: int = 0
    first: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    last_unit: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_relay(self) -> bool:
        """Whether the stage has no layer, so that it only passes messages on."""
        return all(step.kind == BOUNDARY for step in self.passes["F"])

    def kept(self, op: str = "F") -> int:
        """Bytes that a pass leaves alive: F until B or I, I until W (usually negative, since I frees activations)."""
        return sum(step.delta for step in self.passes[op])


def relay_trace(message_bytes: int) -> StageTrace:
    """The trace of a relay: it holds a message until it passes it on."""
    passed = (Step(BOUNDARY, message_bytes, message_bytes), Step(BOUNDARY, 0, -message_bytes))
    return StageTrace({"F": passed, "B": passed, "I": passed, "W": ()}, output_kept=False)


class Tracer:
    """Runs stages on the meta device.

    Args:
        shape: of a message between stages, `[s/cp/tp, b, h]`.
        dtype: of a message.
        batch: one micro-batch on the meta device.
        num_sums: length of the last stage's output.
        hooks: data parallelism if it has temporary buffers, else None.
        split: trace the passes I and W as well.
        block: as in MemoryWatch.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, batch: Any, num_sums: int, *, hooks: GradSync | None = None,
        split: bool = True, block: int = 1,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.batch, self.num_sums = shape, dtype, batch, num_sums
        self.hooks, self.split, self.block = hooks, split, block

    def trace(
        self, units: Sequence[Sequence[nn.Module]], signatures: Sequence[Hashable], *, first: bool, last: bool
    ) -> StageTrace:
        """Runs the passes of a stage.

        Args:
            units: the phases of the stage, grouped in layers.
            signatures: one per unit; equal for layers that do the same with tensors of the same sizes.
            first: whether the input of the stage is tokens.
            last: whether the output of the stage is the loss.
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
                if self.hooks is not None:  # the first micro-batch of a step differs: nothing is gathered yet
                    first_time = self._cycle(watch, stage, times, first=first, last=last, split=split)
                    standing += sum(step.delta for steps in first_time.values() for step in steps)
                    first_ones = first_ones or first_time
                passes |= self._cycle(watch, stage, times, first=first, last=last, split=split)
        ahead, last_unit = {}, {}
        if self.hooks is not None:
            ends = {"F": (units[0], units[-1]), "B": (units[-1], units[0]), "I": (units[-1], units[0])}
            ahead = {op: self.hooks.fetched_bytes(begin[0]) for op, (begin, _) in ends.items()}
            again = {op: 1 + (op != "F" and policy_of(end[0]).group is not None) for op, (_, end) in ends.items()}
            last_unit = {op: again[op] * len(end) for op, (_, end) in ends.items()}
        return StageTrace(passes, passes["F"][-1].delta == 0, standing, first_ones, ahead, last_unit)

    def _cycle(
        self, watch: MemoryWatch, stage: Stage, times: Mapping[nn.Module, int], *, first: bool, last: bool, split: bool
    ) -> dict[str, tuple[Step, ...]]:
        """Runs one micro-batch forward and backward.

        The first weights of the next action are not gathered ahead here, which depends on the Program. Two units are
        whole at once in any case.
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
        """The input of a pass, and the step that counts it."""
        before = watch.forget_peak()
        x = torch.empty(self.num_sums, dtype=statistics_dtype(self.dtype), device="meta") if last else self._message()
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
        for phases, recompute in reversed(phase_groups(stage.phases)):
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
        """Runs a pass step by step. The last step frees the output, which `work` holds.

        Args:
            watch: counts bytes.
            work: the pass.
            order: the phase of every step, and whether the step is its backward.
            times: how many equal phases each one stands for.
            host_bytes: bytes of the pass that are in the host's memory at the moment.
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
    """(indices of the units to run, how many each stands for): the first, one and the last of equal ones in a row."""
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
    """The steps of all phases: those of a unit that stands for several are repeated."""
    out: list[Step] = []
    at = 0
    while at < len(steps):
        stop = at + 1
        while times[at] > 1 and stop < len(steps) and times[stop] == times[at]:
            stop += 1
        out += list(steps[at:stop]) * times[at]
        at = stop
    return tuple(out)

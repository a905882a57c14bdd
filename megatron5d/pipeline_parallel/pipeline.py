"""This rank's part of the pipeline: its stages and channels, for steps of any number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from megatron5d.comm.exposure import Exposure
from megatron5d.comm.p2p import Form, open_channels
from megatron5d.pipeline_parallel.executor import Executor, Loss, forward_only
from megatron5d.pipeline_parallel.messages import flows
from megatron5d.pipeline_parallel.microbatch import MicroBatch
from megatron5d.pipeline_parallel.program import Placement, Program
from megatron5d.pipeline_parallel.stage import Relay, Stage
from megatron5d.topology.axis import Axis


class Pipeline:
    """Executors for every number of micro-batches, over one set of stages and channels.

    Args:
        program_of: number of micro-batches of a step -> verified Program, always with the same placement.
        placement: of those Programs.
        stages: the stage of every (direction, stage) that this rank holds.
        axis: pp.
        form: shape and dtype of what is sent between stages, `[s/cp/tp, b, h]`.
        timeout_s: seconds after which a message is given up (`parallel.timeout_s`); None = torch's own.

    Comm: the channels are opened, see comm/p2p.py.
    """

    def __init__(
        self,
        program_of: Callable[[int], Program],
        placement: Placement,
        stages: Mapping[tuple[int, int], Stage | Relay],
        axis: Axis,
        form: Form,
        timeout_s: float | None = None,
    ) -> None:
        self.placement, self.axis, self.form = placement, axis, form
        self._program_of, self._stages = program_of, stages
        lines = flows(Program("channels", placement, (), ()))
        ends = open_channels([(flow.source, flow.destination) for flow in lines], axis, form.device, timeout_s)
        self._channels = {flow: end for flow, end in zip(lines, ends) if end is not None}
        self._executors: dict[tuple[int, bool], Executor] = {}
        self._waits, self._runs = Exposure(form.device), Exposure(form.device)

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss of some micro-batches."""
        return any(stage == self.placement.num_stages - 1 for _, stage in self._stages)

    @property
    def stages(self) -> list[Stage]:
        """This rank's stages, without relays."""
        return [stage for stage in self._stages.values() if isinstance(stage, Stage)]

    def executor(self, num_microbatches: int, training: bool = True) -> Executor:
        """The executor for a number of micro-batches, made at its first use."""
        key = num_microbatches, training
        if key not in self._executors:
            program = self._program_of(num_microbatches)
            assert program.placement == self.placement, f"{program.name} has another placement than the model"
            if not training:
                program = forward_only(program)
            name = f"rank {self.axis.ranks[self.axis.rank]} (pipeline rank {self.axis.rank})"
            waits = self._waits if training else None
            self._executors[key] = Executor(
                program, self.axis.rank, self._stages, self._channels, name, training, waits
            )
        return self._executors[key]

    def train(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Forward and backward of all micro-batches (see Executor.run)."""
        executor = self.executor(len(batches))
        self._runs.during(lambda: executor.run(batches, loss, self.form))

    def take_bubble(self) -> float:
        """Fraction of the last `train` in which this rank waited for messages; the device must have finished it."""
        waited, ran = self._waits.take(), self._runs.take()
        return waited / ran if ran else 0.0

    def evaluate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Forward of all micro-batches through the same pipeline."""
        self.executor(len(batches), training=False).run(batches, loss, self.form)

    def passes(self, num_microbatches: int) -> dict[nn.Module, int]:
        """Every local phase with its number of micro-batches, in the order in which phases finish.

        The order is the same on all ranks that hold copies of the same stages.
        """
        phases = {key: stage.phases for key, stage in self._stages.items()}
        return passes_of(self.executor(num_microbatches).program, phases)


def passes_of(program: Program, phases: Mapping[tuple[int, int], Sequence[nn.Module]]) -> dict[nn.Module, int]:
    """As `Pipeline.passes`, of the phases of every (direction, stage)."""
    counts: dict[nn.Module, int] = {}
    for stage in sorted({stage for _, stage in phases}, key=lambda stage: _finish(program, stage)):
        for direction, held in phases:
            if held == stage:
                for phase in reversed(phases[direction, held]):
                    counts[phase] = counts.get(phase, 0) + program.direction.count(direction)
    return counts


def _finish(program: Program, stage: int) -> tuple[int, int]:
    """When a stage has its last weight gradient on all ranks that hold a copy, as (slots from the end, stage).

    Slots are counted back from each rank's end, since ranks begin at different times and end together.
    """
    left = []
    for rank in {line[stage] for line in program.placement.route}:
        line = program.ranks[rank]
        last = max(
            (position for position, slot in enumerate(line) for op, held, _ in slot if op in "WB" and held == stage),
            default=0,
        )
        left.append(last - len(line))
    return max(left), stage

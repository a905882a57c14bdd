"""Runs one rank's part of any Program: actions in order, messages on their channels, pairs
interleaved.

Before a slot runs, the receives of a later slot are posted; in a step in which the host may have to
wait for its device, only those of messages that have been sent (messages.py). Then each action
waits for its input, runs its stage phase by phase, and passes its output to a channel, to another
stage of this rank, or at the end of the model to the loss. Two overlapped actions interleave, phase
by phase, so that communication started by one proceeds under the compute of the other. An executor
runs steps of one number of micro-batches; `Pipeline` holds a rank's stages and channels, and makes
an executor for any number.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron5d.comm.ledger import Exposure
from megatron5d.comm.p2p import ReceiveChannel, SendChannel, TensorMeta, open_channels
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.phases.stage import Pass, Stage
from megatron5d.pipeline_parallel.free_memory import FreeMemory
from megatron5d.pipeline_parallel.messages import (
    Flow,
    Message,
    can_limit_sends,
    completed_sends,
    early_receives,
    flows,
    input_of,
    lockstep_receives,
    output_of,
)
from megatron5d.pipeline_parallel.program import Action, Placement, Program, make_program
from megatron5d.topology.axis import Axis

Loss = Callable[[MicroBatch, Tensor], Tensor | None]
"""(micro-batch, output of the last stage) -> gradient of that output; None in evaluation."""

Value = tuple[str, int, int]
"""The input ("F") of a stage, or the gradient of its output ("B"); the stage; the micro-batch."""

Channels = Mapping[Flow, SendChannel | ReceiveChannel]

Receives = list[tuple[tuple[ReceiveChannel, int], ...]]
"""Before each slot: the channels on which to receive, and the boundary of each message."""

MAX_INCOMPLETE_SENDS = 2
"""Messages of a channel in flight in evaluation, where no backward proves that they arrived."""


class PipelineError(RuntimeError):
    """An action failed; the message names the rank and the action."""


@dataclass(slots=True)
class _Task:
    """One action with everything that it needs, looked up once for all steps."""

    action: Action
    stage: Stage
    is_split: bool  # the backward runs as I and W
    is_last: bool  # the forward of the last stage
    source: Value | None  # its input, if that is made on this rank
    target: Value | None  # its output, if that is used on this rank
    receive_channel: ReceiveChannel | None
    send_channel: SendChannel | None
    completed_sends: list[tuple[SendChannel, int]]  # what its input proves
    running: Pass | None = None  # from its first step to its last
    output: Tensor | None = None  # from its last step until it is sent


class Executor:
    """One rank's part of a Program, ready to run step after step.

    Args:
        program: a verified Program.
        rank: position on the pipeline axis.
        stages: the stage of every (direction, stage) that this rank holds.
        channels: this rank's end of every flow it takes part in.
        name: of the rank in errors.
        training: False if the Program has forwards only, so that nothing is kept for a backward.
        waits: measures how long actions wait for messages; None = not measured.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[tuple[int, int], Stage],
        channels: Channels,
        name: str = "",
        training: bool = True,
        waits: Exposure | None = None,
    ) -> None:
        self.program, self.rank, self.name = program, rank, name or f"pipeline rank {rank}"
        self.training, self._waits = training, waits
        # bfs runs all micro-batches through one chunk before the next chunk takes any, so there
        # all outputs have to be kept.
        limits_sends = not training and can_limit_sends(program, MAX_INCOMPLETE_SENDS)
        self._max_incomplete_sends = MAX_INCOMPLETE_SENDS if limits_sends else None
        self._stages, self._channels = dict(stages), dict(channels)
        self._values: dict[Value, Tensor] = {}
        proofs = completed_sends(program, rank)
        line = program.ranks[rank]
        split = {action[1:] for slot in line for action in slot if action.op == "I"}
        self._slots = [
            tuple(self._look_up(action, action[1:] in split, proofs) for action in slot)
            for slot in line
        ]
        self._next_readers = _next_readers(self._slots)
        self._early_receives = self._receives(early_receives(program, rank))
        # computed at the first run, which needs it
        self._lockstep_receives: Receives | None = None

    def _receives(self, messages_by_slot: Iterable[Sequence[Message]]) -> Receives:
        return [
            tuple(
                (_end(self._channels, message.flow, ReceiveChannel), message.flow.boundary)
                for message in messages
            )
            for messages in messages_by_slot
        ]

    def _look_up(self, action: Action, is_split: bool, proofs: Mapping) -> _Task:
        program, channels = self.program, self._channels
        incoming, outgoing = input_of(program, action), output_of(program, action)
        source, target = _values(action, program.num_stages - 1)
        return _Task(
            action,
            self._stages[program.direction[action.microbatch], action.stage],
            is_split,
            action.op == "F" and action.stage == program.num_stages - 1,
            source,
            target,
            None if incoming is None else _end(channels, incoming.flow, ReceiveChannel),
            None if outgoing is None else _end(channels, outgoing.flow, SendChannel),
            [(_end(channels, flow, SendChannel), n) for flow, n in proofs.get(action, ())],
        )

    def run(
        self,
        batches: Sequence[MicroBatch],
        loss: Loss,
        forms: Sequence[TensorMeta],
        host_may_wait: bool = False,
    ) -> None:
        """Runs the entire Program once, and waits until all its messages have arrived.

        Args:
            batches: of every micro-batch, for its phases to read.
            loss: takes the last stage's outputs and returns their gradients.
            forms: shape and dtype of what each stage sends to the next, `[s/cp/tp, b, h]`.
            host_may_wait: for its device, for example to launch kernels that no run before has
                launched, or for memory. The same on every pipeline rank; always assumed of the
                first run.

        Raises:
            PipelineError: an action failed, or the rank that it waited for is gone.

        Comm: the Program's messages on the pipeline axis, and the layers' own.
        """
        in_lockstep = host_may_wait or self._lockstep_receives is None
        if self._lockstep_receives is None:
            self._lockstep_receives = self._receives(lockstep_receives(self.program, self.rank))
        receives = self._lockstep_receives if in_lockstep else self._early_receives
        for slot_receives, tasks, next_readers in zip(receives, self._slots, self._next_readers):
            task = tasks[0]
            try:
                for receive_channel, boundary in slot_receives:
                    receive_channel.post(forms[boundary])
                for reader in next_readers:
                    reader.stage.prefetch(reader.action.op)
                running = list(tasks)
                while running:
                    for task in tuple(running):
                        if not self._advance(task, batches, loss):
                            running.remove(task)
                            if not in_lockstep:
                                self._send(task)
                # In lockstep, messages leave when the entire slot has run.
                for task in tasks:
                    self._send(task)
            except Exception as error:
                raise self._failure(task.action, error) from error
        self._finish()

    def _advance(self, task: _Task, batches: Sequence[MicroBatch], loss: Loss) -> bool:
        """Runs the next step of an action; returns whether another follows.

        The action takes its input at its first step, so that a partner computes meanwhile, and
        passes its output on after its last. Only the stage holds the input, and decides how long.
        """
        op, _, microbatch = task.action
        batch = batches[microbatch]
        if not self.training:
            y = task.stage.evaluate(self._input(task), batch)
        else:
            if task.running is None:
                task.running = task.stage.begin(
                    op, microbatch, self._input(task), batch, task.is_split
                )
            if task.running.advance():
                return True
            y, task.running = task.running.state, None
        if y is not None:
            self._pass_on(task, y, batch, loss)
        return False

    def _input(self, task: _Task) -> Tensor | None:
        """Waits for the action's input `[s/cp/tp, b, h]`; None at the model's beginning.

        Comm: receive pp.
        """
        if task.receive_channel is None:
            return None if task.source is None else self._values.pop(task.source)
        x = (
            task.receive_channel.take()
            if self._waits is None
            else self._waits.time_call(task.receive_channel.take)
        )
        for send_channel, count in task.completed_sends:
            send_channel.release_first(count)
        return x

    def _pass_on(self, task: _Task, y: Tensor, batch: MicroBatch, loss: Loss) -> None:
        """Keeps the action's output for a channel or another local stage, or takes the loss."""
        if task.send_channel is not None:
            task.output = y
        elif task.is_last:
            grad = loss(batch, y)
            if self.training:
                assert grad is not None and task.target is not None
                self._values[task.target] = grad
        elif task.target is not None:
            self._values[task.target] = y

    def _send(self, task: _Task) -> None:
        """Sends the output `[s/cp/tp, b, h]` of an action that has ended, unless it has been sent.

        Comm: send pp.
        """
        if task.send_channel is None or task.output is None:
            return
        task.send_channel.send(task.output)
        if self._max_incomplete_sends is not None:
            task.send_channel.release_all_but(self._max_incomplete_sends)
        task.output = None

    def _finish(self) -> None:
        """Waits for the last messages and checks that every value and graph has been used."""
        try:
            for end in self._channels.values():
                end.finish()
        except ConnectionError as error:
            raise PipelineError(f"{self.name}, at the end of the step: {error}") from error
        assert not self._values, f"{self.name}: values were never used: {sorted(self._values)}"
        in_flight = {
            key: stage.num_in_flight for key, stage in self._stages.items() if stage.num_in_flight
        }
        assert not in_flight, (
            f"{self.name}: micro-batches without a backward, per (direction, stage): {in_flight}"
        )

    def _failure(self, action: Action, error: Exception) -> PipelineError:
        return PipelineError(
            f"{self.name}, action {action} (stage {action.stage}, micro-batch "
            f"{action.microbatch}): {type(error).__name__}: {error}"
        )


def _values(action: Action, last_stage: int) -> tuple[Value | None, Value | None]:
    """The input and the output of an action; None where it has none."""
    op, stage, microbatch = action
    if op == "W":
        return None, None
    if op == "F":
        output = ("B", stage) if stage == last_stage else ("F", stage + 1)
        return ("F", stage, microbatch) if stage > 0 else None, (*output, microbatch)
    return ("B", stage, microbatch), ("B", stage - 1, microbatch) if stage > 0 else None


def _next_readers(slots: Sequence[tuple[_Task, ...]]) -> list[tuple[_Task, ...]]:
    """Maps each weight-reading slot to the tasks of the next one, for prefetching.

    W reads no weights, and a stage without phases has none.
    """
    reading = [
        position
        for position, tasks in enumerate(slots)
        if any(task.action.op != "W" and task.stage.phases for task in tasks)
    ]
    next_readers: list[tuple[_Task, ...]] = [()] * len(slots)
    for position, following in zip(reading, reading[1:]):
        next_readers[position] = slots[following]
    return next_readers


def forward_only(program: Program) -> Program:
    """The forwards of a Program in its order, for evaluation.

    Leaving out actions can only remove reasons to wait, so the forwards cannot deadlock.
    """
    lines = [
        [
            forwards
            for slot in line
            if (forwards := tuple(action for action in slot if action.op == "F"))
        ]
        for line in program.ranks
    ]
    return make_program(f"{program.name} (forward)", program.placement, program.direction, lines)


def open_flows(
    placement: Placement,
    axis: Axis,
    device: torch.device | str = "cpu",
    timeout_s: float | None = None,
) -> dict[Flow, SendChannel | ReceiveChannel]:
    """Opens this rank's end of every flow that a placement has on `axis`.

    Comm: see comm/p2p.py.
    """
    all_flows = flows(Program("channels", placement, (), ()))
    ends = open_channels(
        [(flow.source, flow.destination) for flow in all_flows], axis, device, timeout_s
    )
    return {flow: end for flow, end in zip(all_flows, ends) if end is not None}


def _end(channels: Channels, flow: Flow, kind: type) -> Any:
    end = channels[flow]
    assert isinstance(end, kind), f"{flow} needs a {kind.__name__} (got {end})"
    return end


class Pipeline:
    """Executors for every number of micro-batches, over one set of stages and channels.

    Args:
        program_of: number of micro-batches of a step -> verified Program, always with the same
            placement.
        placement: of these Programs.
        stages: the stage of every (direction, stage) that this rank holds.
        axis: pp.
        forms: shape and dtype of what each stage sends to the next, `[s/cp/tp, b, h]`, or several
            such states concatenated.
        timeout_s: seconds after which a message fails (`parallel.timeout_s`); None = torch's
            default.

    Comm: opens the channels, see comm/p2p.py.
    """

    def __init__(
        self,
        program_of: Callable[[int], Program],
        placement: Placement,
        stages: Mapping[tuple[int, int], Stage],
        axis: Axis,
        forms: Sequence[TensorMeta],
        timeout_s: float | None = None,
    ) -> None:
        device = torch.device(forms[0].device)
        self.placement, self.axis, self.forms = placement, axis, forms
        self._program_of, self._stages = program_of, stages
        self._channels = open_flows(placement, axis, device, timeout_s)
        self._executors: dict[tuple[int, bool], Executor] = {}
        self._waits, self._runs = Exposure(device), Exposure(device)
        self.memory = FreeMemory(device, is_watched=axis.size > 1 and device.type == "cuda")

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss of some micro-batches."""
        return any(stage == self.placement.num_stages - 1 for _, stage in self._stages)

    @property
    def stages(self) -> list[Stage]:
        """This rank's stages that have phases."""
        return [stage for stage in self._stages.values() if stage.phases]

    def executor(self, num_microbatches: int, training: bool = True) -> Executor:
        """The executor for a number of micro-batches, made at its first use."""
        key = num_microbatches, training
        if key not in self._executors:
            program = self._program_of(num_microbatches)
            assert program.placement == self.placement, (
                f"{program.name} has another placement than the model"
            )
            if not training:
                program = forward_only(program)
            name = f"rank {self.axis.ranks[self.axis.rank]} (pipeline rank {self.axis.rank})"
            waits = self._waits if training else None
            self._executors[key] = Executor(
                program, self.axis.rank, self._stages, self._channels, name, training, waits
            )
        return self._executors[key]

    def timed(self) -> AbstractContextManager[None]:
        """Measures a step for `take_bubble`."""
        return self._runs.timed()

    def take_bubble(self) -> float:
        """Fraction of the last `timed` step that this rank waited for messages.

        Waits for the device.
        """
        waited, ran = self._waits.take(), self._runs.take()
        return waited / ran if ran else 0.0

    def evaluate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Runs the forward of all micro-batches through the same pipeline."""
        executor = self.executor(len(batches), training=False)
        # Evaluation batches may differ each time, and so may need kernels not launched before.
        executor.run(batches, loss, self.forms, host_may_wait=True)

    def passes(self, num_microbatches: int) -> dict[Phase, int]:
        """Number of micro-batches of every local phase, in the order in which phases finish.

        The order is the same on all ranks that hold copies of the same stages.
        """
        phases = {key: stage.phases for key, stage in self._stages.items()}
        return passes_of(self.executor(num_microbatches).program, phases)


def passes_of(
    program: Program, phases: Mapping[tuple[int, int], Sequence[Phase]]
) -> dict[Phase, int]:
    """As `Pipeline.passes`, for the phases of every local (direction, stage)."""
    counts: dict[Phase, int] = {}
    for finishing in sorted({s for _, s in phases}, key=lambda stage: _finish(program, stage)):
        for (direction, stage), stage_phases in phases.items():
            if stage == finishing:
                for phase in reversed(stage_phases):
                    counts[phase] = counts.get(phase, 0) + program.direction.count(direction)
    return counts


def _finish(program: Program, stage: int) -> tuple[int, int]:
    """Sort key of when the last weight gradient of a stage runs on any holder of a copy.

    Slots are counted back from each rank's end, because ranks begin at different times and end
    together.
    """
    slots_left = []
    for rank in {route[stage] for route in program.placement.route}:
        line = program.ranks[rank]
        last = max(
            (
                position
                for position, slot in enumerate(line)
                for action in slot
                if action.op in "WB" and action.stage == stage
            ),
            default=0,
        )
        slots_left.append(last - len(line))
    return max(slots_left), stage

"""Runs one rank's part of any Program: actions in order, messages on their channels, pairs
interleaved.

Before a slot runs, the receives of a later slot are posted; where the host may have to wait for its
device, those of messages that have been sent (messages.py). Then each action waits for its own
input, runs its stage phase by phase, and passes its output on: to a channel, to another stage of
this rank, or at the end of the model to the loss. Two overlapped actions take turns, one phase
each, so that the communication that one has started proceeds under the compute of the other. An
executor runs steps of one number of micro-batches; `Pipeline` holds a rank's stages and channels,
and makes one for any number.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
    completed_sends,
    finishes_with,
    flows,
    input_of,
    lockstep_receives,
    output_of,
    slot_messages,
)
from megatron5d.pipeline_parallel.program import Action, Placement, Program, make_program
from megatron5d.topology.axis import Axis

Loss = Callable[[MicroBatch, Tensor], Tensor | None]
"""(a micro-batch, output of the last stage) -> gradient of that output; None where only forwards run."""

Value = tuple[str, int, int]
"""What a stage is given: "F" its input or "B" the gradient of its output; the stage; the micro-batch."""

Receives = list[tuple[tuple[ReceiveChannel, int], ...]]
"""Before each slot: the channels on which a message is received, and the boundary that it crosses."""

# messages of a channel that are under way where forwards run alone, and nothing proves their
# arrival
MAX_UNPROVEN = 2


class PipelineError(RuntimeError):
    """An action failed; says on which rank, and which."""


class _Task:
    """One action with everything that it needs, looked up once for all steps."""

    __slots__ = (
        "action",
        "op",
        "microbatch",
        "stage",
        "receive_channel",
        "source",
        "send_channel",
        "target",
        "is_last",
        "split",
        "completed_sends",
        "running",
        "output",
    )

    def __init__(self, action: Action, stage: Stage, num_stages: int, split: bool) -> None:
        self.action, self.stage, self.split = action, stage, split
        self.op, index, self.microbatch = action  # index of the stage
        self.receive_channel: ReceiveChannel | None = None
        self.send_channel: SendChannel | None = None
        self.completed_sends: list[tuple[SendChannel, int]] = []
        self.running: Pass | None = None  # while the action is under way
        self.output: Tensor | None = None  # between its end and the sending
        self.source: Value | None = None  # its input, if that is made on this rank
        self.target: Value | None = None  # its output, if that is used on this rank
        self.is_last = self.op == "F" and index == num_stages - 1
        if self.op == "F":
            self.source = ("F", index, self.microbatch) if index > 0 else None
            self.target = (
                ("B", index, self.microbatch) if self.is_last else ("F", index + 1, self.microbatch)
            )
        elif self.op != "W":
            self.source = ("B", index, self.microbatch)
            self.target = ("B", index - 1, self.microbatch) if index > 0 else None


class Executor:
    """One rank's part of a Program, ready to run step after step.

    Args:
        program: a verified Program.
        rank: position on the pipeline axis.
        stages: the stage of every (direction, stage) that this rank holds.
        channels: this rank's end of every flow it takes part in.
        name: what the rank is called in errors.
        training: False if the Program has forwards only, so that nothing is kept for a backward.
        waits: measures how long actions wait for what other ranks send; None = not measured.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[tuple[int, int], Stage],
        channels: Mapping[Flow, SendChannel | ReceiveChannel],
        name: str = "",
        training: bool = True,
        waits: Exposure | None = None,
    ) -> None:
        self.program, self.rank, self.name = program, rank, name or f"pipeline rank {rank}"
        self.training, self._waits = training, waits
        # bfs runs all micro-batches through one chunk before the next one takes any: their outputs
        # have to be kept
        self._most_sent = (
            MAX_UNPROVEN if not training and finishes_with(program, MAX_UNPROVEN) else None
        )
        self._stages = dict(stages)
        self._ends = list(channels.values())
        self._values: dict[Value, Tensor] = {}
        proofs = completed_sends(program, rank)
        self._split = {
            action[1:] for slot in program.ranks[rank] for action in slot if action.op == "I"
        }
        self._slots = [
            tuple(self._look_up(action, stages, channels, proofs) for action in slot)
            for slot in program.ranks[rank]
        ]
        self._following = _following(self._slots)
        self._channels = dict(channels)
        self._early = self._receives(each.receives for each in slot_messages(program, rank))
        self._lockstep: Receives | None = None  # for the first run, and seldom later

    def _receives(self, messages: Iterable[Sequence[Message]]) -> Receives:
        return [
            tuple((_end(self._channels, each, ReceiveChannel), each.flow.boundary) for each in due)
            for due in messages
        ]

    def _look_up(self, action: Action, stages, channels, proofs) -> _Task:
        program = self.program
        stage = stages[program.direction[action.microbatch], action.stage]
        task = _Task(action, stage, program.num_stages, action[1:] in self._split)
        incoming, outgoing = input_of(program, action), output_of(program, action)
        if incoming is not None:
            task.receive_channel = _end(channels, incoming, ReceiveChannel)
        if outgoing is not None:
            task.send_channel = _end(channels, outgoing, SendChannel)
        task.completed_sends = [(channels[flow], count) for flow, count in proofs.get(action, ())]
        return task

    def run(
        self,
        batches: Sequence[MicroBatch],
        loss: Loss,
        forms: Sequence[TensorMeta],
        host_may_wait: bool = False,
    ) -> None:
        """Runs the whole Program once, and waits until all its messages have arrived.

        Args:
            batches: the MicroBatch of every micro-batch, which its phases read.
            loss: takes the last stage's outputs and returns their gradients.
            forms: shape and dtype of what is sent between each stage and the next, `[s/cp/tp, b,
                h]`.
            host_may_wait: for its device, as for kernels that no run before has launched, or for
                memory. The same on every pipeline rank; the first run is taken to be such.

        Raises:
            PipelineError: an action failed, or the rank that it waited for is gone.

        Comm: the Program's messages on the pipeline axis, beside the layers' own.
        """
        receives = self._early
        if host_may_wait or self._lockstep is None:
            self._lockstep = self._lockstep or self._receives(
                lockstep_receives(self.program, self.rank)
            )
            receives = self._lockstep
        for due, tasks, following in zip(receives, self._slots, self._following):
            self._post(due, tasks, forms)
            for each in following:
                each.stage.prefetch(each.op)
            running = list(tasks)
            while running:
                for task in tuple(running):
                    if not self._advance(task, batches, loss):
                        running.remove(task)
                        if receives is self._early:
                            self._send(task)
            for task in tasks:
                self._send(task)  # in lockstep, when the whole slot has run
        self._finish()

    def _post(
        self,
        receives: Sequence[tuple[ReceiveChannel, int]],
        tasks: tuple[_Task, ...],
        forms: Sequence[TensorMeta],
    ) -> None:
        try:
            for receive_channel, boundary in receives:
                receive_channel.post(forms[boundary])
        except Exception as error:
            raise self._failure(tasks[0].action, error) from error

    def _advance(self, task: _Task, batches: Sequence[MicroBatch], loss: Loss) -> bool:
        """Runs the next step of an action; returns whether another follows.

        The action takes its input at its first step, so that a partner computes meanwhile, and
        passes its output on after its last. The stage alone holds the input, and decides how long.
        """
        try:
            batch = batches[task.microbatch]
            if not self.training:
                y = task.stage.evaluate(self._input(task), batch)
            else:
                if task.running is None:
                    task.running = task.stage.begin(
                        task.op, task.microbatch, self._input(task), batch, task.split
                    )
                if task.running.advance():
                    return True
                y, task.running = task.running.state, None
            if y is not None:
                self._hand_on(task, y, batch, loss)
        except Exception as error:
            raise self._failure(task.action, error) from error
        return False

    def _input(self, task: _Task) -> Tensor | None:
        """Waits for the action's input `[s/cp/tp, b, h]` and returns it; None at the model's beginning.  receive pp"""
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

    def _hand_on(self, task: _Task, y: Tensor, batch: MicroBatch, loss: Loss) -> None:
        """Passes the action's output on: to a channel, to another stage of this rank, or to the
        loss."""
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
        """Sends the output `[s/cp/tp, b, h]` of an action that has ended, unless it has been sent.  send pp"""
        if task.send_channel is None or task.output is None:
            return
        try:
            task.send_channel.send(task.output)
            if self._most_sent is not None:
                task.send_channel.release_all_but(self._most_sent)
        except Exception as error:
            raise self._failure(task.action, error) from error
        task.output = None

    def _finish(self) -> None:
        """Waits for the last messages and checks that the step has left nothing behind."""
        try:
            for end in self._ends:
                end.finish()
        except ConnectionError as error:
            raise PipelineError(f"{self.name}, at the end of the step: {error}") from error
        assert not self._values, f"{self.name}: made and never used: {sorted(self._values)}"
        owed = {
            key: stage.num_in_flight for key, stage in self._stages.items() if stage.num_in_flight
        }
        assert not owed, (
            f"{self.name}: micro-batches that still owe a backward, per (direction, stage): {owed}"
        )

    def _failure(self, action: Action, error: Exception) -> PipelineError:
        return PipelineError(
            f"{self.name}, action {action} (stage {action.stage}, micro-batch {action.microbatch}): "
            f"{type(error).__name__}: {error}"
        )


def _following(slots: Sequence[tuple[_Task, ...]]) -> list[tuple[_Task, ...]]:
    """Returns for each slot that reads weights the actions of the next one that does, whose weights
    can be gathered.

    W reads none, and an empty stage has none.
    """
    needy = [any(each.op != "W" and each.stage.phases for each in tasks) for tasks in slots]
    positions = [position for position, needs in enumerate(needy) if needs]
    found: list[tuple[_Task, ...]] = [()] * len(slots)
    for position, after in zip(positions, positions[1:]):
        found[position] = slots[after]
    return found


def forward_only(program: Program) -> Program:
    """Returns the forwards of a Program in its order, for evaluation.

    Leaving actions out can only remove reasons to wait, so the rest cannot deadlock.
    """
    lines = [
        [kept for slot in line if (kept := tuple(action for action in slot if action.op == "F"))]
        for line in program.ranks
    ]
    return make_program(f"{program.name} (forward)", program.placement, program.direction, lines)


def _end(
    channels: Mapping[Flow, SendChannel | ReceiveChannel], message: Message, kind: type
) -> Any:
    end = channels[message.flow]
    assert isinstance(end, kind), f"{message.flow} ends here as {end}"
    return end


class Pipeline:
    """Executors for every number of micro-batches, over one set of stages and channels.

    Args:
        program_of: number of micro-batches of a step -> verified Program, always with the same
            placement.
        stages: the stage of every (direction, stage) that this rank holds.
        axis: pp.
        forms: shape and dtype of what each stage sends to the next, `[s/cp/tp, b, h]`, or several
            one after the other.
        timeout_s: seconds after which a message is given up (`parallel.timeout_s`); None = torch's
            own.

    Comm: the channels are opened, see comm/p2p.py.
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
        self.placement, self.axis, self.forms, device = (
            placement,
            axis,
            forms,
            torch.device(forms[0].device),
        )
        self._program_of, self._stages = program_of, stages
        lines = flows(Program("channels", placement, (), ()))
        ends = open_channels(
            [(flow.source, flow.destination) for flow in lines], axis, device, timeout_s
        )
        self._channels = {flow: end for flow, end in zip(lines, ends) if end is not None}
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
        """Returns the executor for a number of micro-batches, made at its first use."""
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
        """Returns the share of the last `timed` step that this rank waited for messages; waits for
        the device."""
        waited, ran = self._waits.take(), self._runs.take()
        return waited / ran if ran else 0.0

    def evaluate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Runs the forward of all micro-batches through the same pipeline."""
        executor = self.executor(len(batches), training=False)
        # what is evaluated may differ from time to time
        executor.run(batches, loss, self.forms, host_may_wait=True)

    def passes(self, num_microbatches: int) -> dict[Phase, int]:
        """Returns every local phase with its number of micro-batches, in the order in which phases
        finish.

        The order is the same on all ranks that hold copies of the same stages.
        """
        phases = {key: stage.phases for key, stage in self._stages.items()}
        return passes_of(self.executor(num_microbatches).program, phases)


def passes_of(
    program: Program, phases: Mapping[tuple[int, int], Sequence[Phase]]
) -> dict[Phase, int]:
    """Returns, as `Pipeline.passes`, those of the phases of every (direction, stage)."""
    counts: dict[Phase, int] = {}
    for stage in sorted({stage for _, stage in phases}, key=lambda stage: _finish(program, stage)):
        for direction, held in phases:
            if held == stage:
                for phase in reversed(phases[direction, held]):
                    counts[phase] = counts.get(phase, 0) + program.direction.count(direction)
    return counts


def _finish(program: Program, stage: int) -> tuple[int, int]:
    """Returns when a stage has its last weight gradient on all holders of a copy, as (slots from
    the end, stage).

    Slots are counted back from each rank's end, since ranks begin at different times and end
    together.
    """
    left = []
    for rank in {line[stage] for line in program.placement.route}:
        line = program.ranks[rank]
        last = max(
            (
                position
                for position, slot in enumerate(line)
                for op, held, _ in slot
                if op in "WB" and held == stage
            ),
            default=0,
        )
        left.append(last - len(line))
    return max(left), stage

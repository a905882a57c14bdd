"""Runs one rank's part of any Program: actions in order, messages on their channels, pairs interleaved.

Before a slot runs, the receives of a later slot are posted (see transfers.py); then each action waits for its own
input, advances its stage phase by phase, and hands its output on: to a channel, to another stage of this rank, or, at
the end of the model, to the loss. Two overlapped actions take turns, one phase each, so that what one has set in
motion on the network proceeds under the compute of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron5d.comm.exposure import Exposure
from megatron5d.comm.p2p import Form, Inbox, Outbox
from megatron5d.pipeline_parallel.program import Action, Program, make_program
from megatron5d.pipeline_parallel.receipts import receipts
from megatron5d.pipeline_parallel.stage import Relay
from megatron5d.pipeline_parallel.transfers import Flow, Message, input_of, output_of, steps

Loss = Callable[[Any, Tensor], Tensor | None]
"""(a micro-batch's data, output of the last stage) -> gradient of that output; None where only forwards run."""

Value = tuple[str, int, int]
"""What a stage is given: "F" its input or "B" the gradient of its output; the stage; the micro-batch."""

_DONE = object()


class Runnable(Protocol):
    """What the executor needs of a stage (`stage.Stage` is one)."""

    def forward_steps(self, microbatch: int, x: Tensor | None, batch: Any) -> Iterator[Tensor]:
        """F, phase by phase; the last value is the output. `x` is None on the first stage."""

    def backward_steps(self, microbatch: int, grad: Tensor, split: bool = False) -> Iterator[Tensor | None]:
        """B, or with `split` I, phase by phase; the last value is the input's gradient, None on the first stage."""

    def weight_steps(self, microbatch: int) -> Iterator[None]:
        """W, phase by phase: what I has put off."""

    def expect(self, op: str) -> None:
        """The action after the one that starts now is this one: its weights may be gathered meanwhile."""

    def evaluate(self, x: Tensor | None, batch: Any) -> Tensor:
        """A forward without gradients, which keeps nothing."""

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose backward is not over yet."""


class PipelineError(RuntimeError):
    """An action failed; says on which rank, and which."""


class Timing(NamedTuple):
    """When one action ran, on the clock of time.perf_counter (one clock for all processes of a machine)."""

    action: Action
    start: float  # its input was there
    end: float  # its output was handed on


class _Pass:
    """One action with everything it touches, looked up once."""

    __slots__ = ("action", "op", "microbatch", "stage", "inbox", "source", "outbox", "target", "is_last", "receipts")

    def __init__(self, action: Action, stage: Runnable, num_stages: int) -> None:
        self.action, self.stage = action, stage
        self.op, place, self.microbatch = action
        self.inbox: Inbox | None = None
        self.outbox: Outbox | None = None
        self.receipts: list[tuple[Outbox, int]] = []
        self.source: Value | None = None  # of an input or output that stays on this rank
        self.target: Value | None = None
        self.is_last = self.op == "F" and place == num_stages - 1
        if self.op == "F":
            self.source = ("F", place, self.microbatch) if place > 0 else None
            self.target = ("B", place, self.microbatch) if self.is_last else ("F", place + 1, self.microbatch)
        elif self.op != "W":
            self.source = ("B", place, self.microbatch)
            self.target = ("B", place - 1, self.microbatch) if place > 0 else None


class Executor:
    """One rank's part of a Program, ready to run step after step.

    Args:
        program: a verified Program.
        rank: position on the pipeline axis.
        stages: the stage of every (direction, stage) that this rank holds.
        channels: this rank's end of every flow it takes part in.
        name: how the rank is called in errors.
        training: False where the Program has forwards only and nothing is kept for a backward.
        waits: measures how long actions wait for what other ranks send; None = not measured.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[tuple[int, int], Runnable],
        channels: Mapping[Flow, Outbox | Inbox],
        name: str = "",
        training: bool = True,
        waits: Exposure | None = None,
    ) -> None:
        self.program, self.rank, self.name = program, rank, name or f"pipeline rank {rank}"
        self.training, self._waits = training, waits
        self.timeline: list[Timing] | None = None  # a list: every action's times are appended to it
        self._stages = dict(stages)
        self._ends = list(channels.values())
        self._values: dict[Value, Tensor] = {}
        proofs = receipts(program, rank)
        self._slots: list[tuple[tuple[Inbox, ...], tuple[_Pass, ...]]] = []
        for receives, slot, _ in steps(program, rank):
            passes = tuple(self._look_up(action, stages, channels, proofs) for action in slot)
            self._slots.append((tuple(_end(channels, message, Inbox) for message in receives), passes))
        self._following = _following([passes for _, passes in self._slots])

    def _look_up(self, action: Action, stages, channels, proofs) -> _Pass:
        program = self.program
        here = _Pass(action, stages[program.direction[action.microbatch], action.stage], program.num_stages)
        incoming, outgoing = input_of(program, action), output_of(program, action)
        if incoming is not None:
            here.inbox = _end(channels, incoming, Inbox)
        if outgoing is not None:
            here.outbox = _end(channels, outgoing, Outbox)
        here.receipts = [(channels[flow], count) for flow, count in proofs.get(action, ())]
        return here

    def run(self, batches: Sequence[Any], loss: Loss, form: Form) -> None:
        """Runs the whole Program once; nothing is left under way.

        Args:
            batches: what the phases of every micro-batch read (tokens, labels, positions).
            loss: takes the last stage's outputs and gives their gradients.
            form: of what travels between stages, `[s/cp/tp, b, h]`.

        Raises:
            PipelineError: an action failed, or the rank that it waited for is gone.

        Comm: the Program's messages on the pipeline axis, beside the layers' own.
        """
        for (receives, passes), following in zip(self._slots, self._following):
            self._post(receives, passes, form)
            for each in following:
                each.stage.expect(each.op)
            if len(passes) == 1:
                for _ in self._advance(passes[0], batches, loss):
                    pass
            else:
                running = [self._advance(each, batches, loss) for each in passes]
                while running:
                    running = [action for action in running if next(action, _DONE) is not _DONE]
        self._finish()

    def _post(self, receives: tuple[Inbox, ...], passes: tuple[_Pass, ...], form: Form) -> None:
        try:
            for inbox in receives:
                inbox.post(form)
        except Exception as error:
            raise self._failure(passes[0].action, error) from error

    def _advance(self, here: _Pass, batches: Sequence[Any], loss: Loss) -> Iterator[None]:
        """One action, phase by phase."""
        try:
            work = self._start(here, batches)
            begin = time.perf_counter() if self.timeline is not None else 0.0
            y = None
            for step in work:
                y = step
                yield None
            if y is not None:
                self._hand_on(here, y, batches, loss)
            if self.timeline is not None:
                self.timeline.append(Timing(here.action, begin, time.perf_counter()))
        except Exception as error:
            raise self._failure(here.action, error) from error

    def _start(self, here: _Pass, batches: Sequence[Any]) -> Iterator[Tensor | None]:
        """The action's phases; its input goes to the stage, which alone says how long it lives."""
        if here.op == "W":
            return here.stage.weight_steps(here.microbatch)
        if here.op == "F":
            batch = batches[here.microbatch]
            if not self.training:
                return iter((here.stage.evaluate(self._input(here), batch),))
            return here.stage.forward_steps(here.microbatch, self._input(here), batch)
        grad = self._input(here)
        assert grad is not None
        return here.stage.backward_steps(here.microbatch, grad, here.op == "I")

    def _input(self, here: _Pass) -> Tensor | None:
        """Waits for the action's input; None at the model's beginning."""
        if here.inbox is None:
            return None if here.source is None else self._values.pop(here.source)
        x = here.inbox.take() if self._waits is None else self._waits.during(here.inbox.take)
        for outbox, count in here.receipts:
            outbox.settle(count)
        return x

    def _hand_on(self, here: _Pass, y: Tensor, batches: Sequence[Any], loss: Loss) -> None:
        """The action's output goes to a channel, to another stage of this rank, or to the loss."""
        if here.outbox is not None:
            here.outbox.send(y)
        elif here.is_last:
            grad = loss(batches[here.microbatch], y)
            if self.training:
                assert grad is not None and here.target is not None
                self._values[here.target] = grad
        elif here.target is not None:
            self._values[here.target] = y

    def _finish(self) -> None:
        """Waits for the last messages and checks that the step has left nothing behind."""
        try:
            for end in self._ends:
                end.finish()
        except ConnectionError as error:
            raise PipelineError(f"{self.name}, at the end of the step: {error}") from error
        assert not self._values, f"{self.name}: made and never used: {sorted(self._values)}"
        owed = {key: stage.num_in_flight for key, stage in self._stages.items() if stage.num_in_flight}
        assert not owed, f"{self.name}: micro-batches that still owe a backward, per (direction, stage): {owed}"

    def _failure(self, action: Action, error: Exception) -> PipelineError:
        return PipelineError(
            f"{self.name}, action {action} (stage {action.stage}, micro-batch {action.microbatch}): "
            f"{type(error).__name__}: {error}"
        )


def _following(slots: Sequence[tuple[_Pass, ...]]) -> list[tuple[_Pass, ...]]:
    """For each slot that needs weights, the actions of the next one that does: their first weights can be fetched.

    W needs none, and a relay has none.
    """
    needy = [any(each.op != "W" and not isinstance(each.stage, Relay) for each in passes) for passes in slots]
    places = [place for place, needs in enumerate(needy) if needs]
    found: list[tuple[_Pass, ...]] = [()] * len(slots)
    for place, after in zip(places, places[1:]):
        found[place] = slots[after]
    return found


def forward_only(program: Program) -> Program:
    """The forwards of a Program in its order: what evaluation runs.

    Leaving actions out takes away reasons to wait and adds none, so the rest still runs through.
    """
    lines = [
        [kept for slot in line if (kept := tuple(action for action in slot if action.op == "F"))]
        for line in program.ranks
    ]
    return make_program(f"{program.name} (forward)", program.placement, program.direction, lines)


def _end(channels: Mapping[Flow, Outbox | Inbox], message: Message, kind: type) -> Any:
    end = channels[message.flow]
    assert isinstance(end, kind), f"{message.flow} ends here as {end}"
    return end

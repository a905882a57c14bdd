"""Peak memory of one rank during a step: walks through a Program with the bytes of each pass.

Memory follows from the order in which the host runs a rank's passes. Activations are alive from
their F until their B or I, tensors of deferred weight gradients from I until W, a received message
from the moment its receive is posted, and a sent one until its send is known to have finished. Two
overlapped actions alternate phase by phase, as in the executor, so temporary tensors of one add to
the activations of the other.

Data parallelism takes part on the meta device (`Replay`): the GradSync that would train gathers,
allocates, reduces and frees its buffers as phases begin and end, and its bytes are counted. No
second account of when a unit is gathered is needed. FP8 copies of gathered weights are made here,
too, when a phase reads them, and are freed with the unit. Copies of other weights are made once a
step and are not counted here.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.phases.phase import Phase
from megatron5d.phases.stage import Stage
from megatron5d.pipeline_parallel.messages import (
    Flow,
    completed_sends,
    early_receives,
    input_of,
    output_of,
)
from megatron5d.pipeline_parallel.program import Action, Program, Slot
from megatron5d.planning.memory.rank_memory import Peak
from megatron5d.planning.memory.repeat import Repeat
from megatron5d.planning.memory.trace import BOUNDARY, MemoryWatch, StageTrace, Step
from megatron5d.precision.fp8_recipes import is_quantized, quantized_copies
from megatron5d.topology.shard_spec import state_of


class Replay(MemoryWatch):
    """Context in which data parallelism goes through a step; counts its temporary buffers.

    Args:
        sync: of a rank, with nothing gathered and no gradients.
        phases: of every stage of the rank.
        passes: as in `GradSync.start_step`.
        block: as in MemoryWatch.
        with_graphs: as in `GradSync.start_step`.
    """

    def __init__(
        self,
        sync: GradSync,
        phases: Mapping[int, Sequence[Phase]],
        passes: Mapping[Phase, int],
        block: int,
        with_graphs: bool = False,
    ) -> None:
        super().__init__(block)
        self._sync, self._passes, self._phases = sync, passes, phases
        self._with_graphs = with_graphs
        # weights that are not gathered, and those of them without FP8 copies in this step
        self._resident = {
            weight
            for bucket in sync.buckets
            if not bucket.shards_weights
            for weight in bucket.parameters
        }
        self._without_copies = set(self._resident)
        self._quantized = {
            phase: list(filter(is_quantized, phase.parameters()))
            for stage_phases in phases.values()
            for phase in stage_phases
        }
        self._gathers = any(bucket.shards_weights for bucket in sync.buckets)
        # A new Stage registers the order of its phases with data parallelism.
        self._steps = {stage: Stage(of_stage, sync).steps for stage, of_stage in phases.items()}

    def __enter__(self):
        context = super().__enter__()
        self._sync.start_step(self._passes, self._with_graphs)
        return context

    def expect(self, actions: Sequence[Action]) -> None:
        """Announces the next actions that read weights, which may be gathered early."""
        for action in actions if self._gathers else ():
            phases = self._phases[action.stage]
            self._sync.prefetch(phases[0 if action.op == "F" else -1], action.op == "F")

    def before(self, action: Action, step: int) -> bool:
        """Announces that a step of an action, counted from its first phase, is about to run.

        Returns:
            Whether it makes FP8 copies of its weights.
        """
        self.forget_peak()
        kind, phase, *_ = self._steps[action.stage][action.op][step]
        if self._gathers:
            self._sync.before(phase, kind)
        return kind != "wgrad" and self._make_copies(phase, kind == "backward")

    def _make_copies(self, phase: Phase, backward: bool) -> bool:
        """Makes the FP8 copies that a phase reads; returns whether some of them were missing."""
        is_missing = False
        for weight in self._quantized[phase]:
            if weight in self._resident:
                is_missing = is_missing or weight in self._without_copies
                self._without_copies.discard(weight)
                continue
            is_missing = is_missing or state_of(weight).fp8_copies is None
            copies = quantized_copies(weight)
            if backward and not copies.has_transposed:
                is_missing = copies.transposed is not None  # reading the attribute makes it
        return is_missing

    def allocate(self, action: Action, step: int, index: int) -> None:
        """Allocates the gradients of a bucket, given its index among those of the step's phase."""
        phase = self._steps[action.stage][action.op][step].phase
        bucket = self._sync.buckets[self._sync.uses[phase][index]]
        if bucket.shards_grads:
            bucket.allocate_grads()

    def after(self, action: Action, step: int) -> None:
        """Ends a step."""
        kind, phase, *_ = self._steps[action.stage][action.op][step]
        if self._gathers or kind == "wgrad":
            self._sync.after(phase, kind)
        if action.op == "B" and kind == "backward":
            self._sync.after(phase, "wgrad")


InFlight = tuple[int, int]
"""(stage, micro-batch)."""


def find_peak(
    program: Program,
    rank: int,
    traces: Mapping[int, StageTrace],
    message_bytes: Sequence[int],
    replay: Replay | None = None,
    *,
    repeat: Repeat | None = None,
    moments: list[Moment] | None = None,
) -> Peak:
    """The moment of a step with the most memory on one rank.

    Args:
        program: a verified Program.
        rank: the pipeline rank.
        traces: of every stage that the rank holds.
        message_bytes: of a message from each stage to the next.
        replay: data parallelism, inside its context; None = it has no temporary buffers.
        repeat: slots that are skipped because those before them need the same memory.
        moments: receives two moments of every slot: the peak while it runs, and what remains.
    """
    walk = _Walk(program, rank, traces, message_bytes, replay)
    slots = program.ranks[rank]
    steps = zip(slots, early_receives(program, rank), _next_readers(slots, traces))
    for index, (slot, receives, next_reader) in enumerate(steps):
        if repeat is not None and repeat.start <= index < repeat.stop:
            if index == repeat.start:
                walk.skip(repeat)
            if moments is not None:
                moments += moments[-2 * repeat.length : 2 - 2 * repeat.length or None]
            continue
        walk.messages += sum(message_bytes[message.flow.boundary] for message in receives)
        # At first, nothing that was sent is known to have arrived.
        walk.see(slot[0], 0)
        if replay is not None:
            replay.expect(next_reader)
        running = [walk.run(action) for action in slot]
        while running:
            running = [action for action in running if next(action, None) is not None]
        if moments is not None:
            moments.append(walk.take_worst())
            walk.see(slot[-1], 0)
            moments.append(walk.take_worst())
    peaks = moments[::2] if moments else [walk.take_worst()]
    worst = max(peaks, key=lambda moment: moment.total)
    return replace(worst.by_kind(), host=walk.peak_host)


def _next_readers(slots: Sequence[Slot], traces: Mapping[int, StageTrace]) -> list[Slot]:
    """Maps each slot that reads weights to the actions of the next such slot.

    W and empty stages read no weights; their slots are mapped to no actions.
    """
    reading = [
        tuple(a for a in slot if a.op != "W" and not traces[a.stage].is_empty) for slot in slots
    ]
    indices = [index for index, actions in enumerate(reading) if actions]
    readers: list[Slot] = [()] * len(slots)
    for index, following in zip(indices, indices[1:]):
        readers[index] = reading[following]
    return readers


class _Walk:
    """Counts the bytes alive on one rank while its slots run.

    `messages` are those of sent and received messages, `stages` those of passes, without the
    buffers of the replay; `host` are bytes of offloaded activations.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        traces: Mapping[int, StageTrace],
        message_bytes: Sequence[int],
        replay: Replay | None,
    ) -> None:
        self.program, self.traces = program, traces
        self.message_bytes, self.replay = message_bytes, replay
        self.messages = self.stages = self.peak = self.host = self.peak_host = 0
        self._worst: _State | None = None
        self._completed = completed_sends(program, rank)
        # bytes of messages that may not have been sent yet
        self._sent: defaultdict[Flow, deque[int]] = defaultdict(deque)
        self._num_completed: Counter[Flow] = Counter()
        self._local: dict[InFlight, int] = {}  # bytes of outputs for another stage of this rank
        # number of completed steps of F, and of those with live activations
        self._forward: dict[InFlight, tuple[int, int]] = {}
        # by stage: host bytes after each number of steps
        self._host_bytes = {
            stage: [0, *accumulate(step.host for step in trace.passes["F"])]
            for stage, trace in traces.items()
        }
        self._kept: dict[tuple[int, int, int], Counter[str]] = {}  # results of `_kept_bytes`
        self._stashed: dict[InFlight, int] = {}
        self._shared: set[InFlight] = set()  # their input is another stage's output, counted there

    def skip(self, repeat: Repeat) -> None:
        """Skips slots that repeat those before them, with later micro-batches."""
        shift = repeat.times * repeat.shift

        def shifted(by_pass: dict[InFlight, Any]) -> dict[InFlight, Any]:
            return {(stage, m + shift): value for (stage, m), value in by_pass.items()}

        self._local, self._forward = shifted(self._local), shifted(self._forward)
        self._stashed = shifted(self._stashed)
        self._shared = {(stage, microbatch + shift) for stage, microbatch in self._shared}
        self._num_completed.update(repeat.sends)

    def run(self, action: Action) -> Iterator[bool]:
        """Runs one action, phase by phase."""
        op, stage, microbatch = action
        in_flight, trace = (stage, microbatch), self.traces[stage]
        self._take_input(action)
        num_forward, index, has_begun = len(trace.passes["F"]), 0, False
        for done, step in enumerate(trace.passes[op]):
            # As in the executor, the input arrives when the first phase runs.
            if step.kind != BOUNDARY:
                if has_begun:
                    yield True
                has_begun = True
            if op == "F":
                self._set_forward(in_flight, done, done)
            if step.kind == BOUNDARY or self.replay is None:
                self.see(action, step.rise)
                self.stages += step.delta
            else:
                self._run_phase(action, done, index, self.replay)
                index += 1
            # A phase's backward frees its activations; that of the last phase also the output.
            if step.frees:
                alive = self._forward[in_flight][1]
                alive = max(0, alive - (2 if alive == num_forward else 1))
                self._set_forward(in_flight, num_forward, alive)
        if op == "F":
            self._set_forward(in_flight, num_forward, num_forward)
            if in_flight in self._shared:
                self.stages -= self.message_bytes[stage - 1]
        elif op == "I":
            self._set_forward(in_flight, None)
            deltas = [step.delta for op in "FI" for step in trace.passes[op]]
            self._stashed[in_flight] = sum(deltas)
        else:
            self._set_forward(in_flight, None)
            self._stashed.pop(in_flight, None)
        if op in "IB" and in_flight in self._shared:
            self._shared.remove(in_flight)
            self.stages += self.message_bytes[stage - 1]
        self._pass_output(action, trace)

    def _set_forward(self, in_flight: InFlight, done: int | None, alive: int = 0) -> None:
        """Records the progress of a micro-batch.

        Args:
            done: number of completed steps of F; None = the backward is complete.
            alive: number of steps with live activations.
        """
        host_bytes = self._host_bytes[in_flight[0]]
        _, alive_before = self._forward.pop(in_flight, (0, 0))
        self.host += host_bytes[alive] - host_bytes[alive_before]
        self.peak_host = max(self.peak_host, self.host)
        if done is not None:
            self._forward[in_flight] = done, alive

    def _run_phase(self, action: Action, done: int, index: int, replay: Replay) -> None:
        """Runs one step of an action, and data parallelism before, in and after it.

        Args:
            done: number of steps before this one.
            index: the same, counted from the action's first phase.
        """
        trace = self.traces[action.stage]
        makes_copies = replay.before(action, index)
        step = (trace.making if makes_copies else trace.passes)[action.op][done]
        self.see(action, max(step.rise, replay.peak_bytes - replay.live_bytes))
        for bucket, rise in step.late:
            replay.allocate(action, index, bucket)
            self.see(action, rise)
        self.stages += step.delta
        replay.forget_peak()
        replay.after(action, index)
        self.see(action, replay.peak_bytes - replay.live_bytes)

    def _take_input(self, action: Action) -> None:
        """Takes an action's input, and frees messages whose arrival it proves (messages.py)."""
        for flow, count in self._completed.get(action, ()):
            while self._num_completed[flow] < count:
                self._num_completed[flow] += 1
                self.messages -= self._sent[flow].popleft()
        if action.op == "W":
            return
        message = input_of(self.program, action)
        if message is not None:
            self.messages -= self.message_bytes[message.flow.boundary]
        elif action.op == "F" and action.stage > 0:
            size = self._local.pop((action.stage - 1, action.microbatch))
            self.messages -= size
            # An empty stage keeps nothing of its input.
            if not size and not self.traces[action.stage].is_empty:
                self._shared.add((action.stage, action.microbatch))
        elif action.op != "F" and action.stage < self.program.num_stages - 1:
            self.messages -= self._local.pop((action.stage + 1, action.microbatch))

    def _pass_output(self, action: Action, trace: StageTrace) -> None:
        """Passes an action's output to the next stage, on this rank or in a message."""
        op, stage, microbatch = action
        is_last = stage == self.program.num_stages - 1 if op == "F" else stage == 0
        if op == "W" or is_last:
            return
        size = self.message_bytes[stage if op == "F" else stage - 1]
        if op == "F" and trace.output_kept:
            size = 0  # the stage's activations include it
        message = output_of(self.program, action)
        if message is None:
            self._local[stage, microbatch] = size
        else:
            self._sent[message.flow].append(size)
        self.messages += size

    def see(self, action: Action, rise: int) -> None:
        """Records the present state, with `rise` temporary bytes, if it is the worst so far."""
        units = 0 if self.replay is None else self.replay.live_bytes
        total = self.stages + self.messages + units + rise
        if total > self.peak:
            self.peak, stash = total, sum(self._stashed.values())
            shared = [stage for stage, m in self._shared if (stage, m) in self._forward]
            shared_bytes = sum(self.message_bytes[stage - 1] for stage in shared)
            forward = dict(self._forward)
            self._worst = _State(action, total, self.messages, units, stash, shared_bytes, forward)

    def take_worst(self) -> Moment:
        """The worst moment since the last call."""
        worst, self._worst, self.peak = self._worst, None, 0
        return Moment(worst.total if worst else 0, partial(self._by_kind, worst))

    def _by_kind(self, worst: _State | None) -> Peak:
        """Bytes of a state by kind."""
        if worst is None:
            return Peak()
        bytes_by_kind = Counter[str]()
        progress = Counter((stage, *steps) for (stage, _), steps in worst.forward.items())
        for (stage, done, alive), num_microbatches in progress.items():
            key = stage, done, alive
            if key not in self._kept:
                self._kept[key] = _kept_bytes(self.traces[stage].passes["F"][:done], alive)
            for kind, count in self._kept[key].items():
                bytes_by_kind[kind] += num_microbatches * count
        bytes_by_kind[BOUNDARY] -= min(bytes_by_kind[BOUNDARY], worst.shared)

        stash = worst.stash
        workspace = worst.total - sum(bytes_by_kind.values()) - stash - worst.messages - worst.units
        # The running phase may have freed some of its activations, or W some of the stash.
        freed, workspace = max(0, -workspace), max(0, workspace)
        if worst.action.op == "W":
            freed, stash = max(0, freed - stash), max(0, stash - freed)
        for kind, count in bytes_by_kind.most_common():
            bytes_by_kind[kind] -= min(count, freed)
            freed -= min(count, freed)
        activations = {kind: count for kind, count in bytes_by_kind.items() if count}
        return Peak(
            activations,
            stash - freed,
            worst.messages,
            worst.units,
            workspace,
            worst.action,
            len(worst.forward),
        )


class Moment(NamedTuple):
    """A moment of a step: bytes in total, and a function that gives them by kind."""

    total: int
    by_kind: Callable[[], Peak]


class _State(NamedTuple):
    """Live bytes in total and of some kinds, and the progress of every micro-batch (`_Walk`)."""

    action: Action
    total: int
    messages: int
    units: int
    stash: int
    shared: int  # of inputs that other stages count
    forward: dict[InFlight, tuple[int, int]]


def _kept_bytes(steps: Sequence[Step], alive: int) -> Counter[str]:
    """Bytes by kind of phase that the first `alive` steps of a forward keep when all are done.

    A step that frees bytes frees those of the latest steps before it.
    """
    stack: list[tuple[int, int]] = []  # index of a step, bytes
    for index, step in enumerate(steps):
        change = step.delta
        while change < 0 and stack:
            maker, count = stack.pop()
            change += count
            if change > 0:
                stack.append((maker, change))
                change = 0
        if change > 0:
            stack.append((index, change))
    bytes_by_kind = Counter[str]()
    for index, count in stack:
        if index < alive:
            bytes_by_kind[steps[index].kind] += count
    return bytes_by_kind

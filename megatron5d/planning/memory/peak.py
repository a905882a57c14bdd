"""The most memory that one rank needs during a step: walks through a Program, with what each pass
allocates.

Memory follows from the order in which the host runs a rank's passes. Activations are alive from
their F until their B or I, tensors of deferred weight gradients from I until W, a received message
from the moment its receive is posted, and a sent one until its send is known to have finished. Two
overlapped actions alternate phase by phase, as in the executor, so temporary tensors of one add to
the activations of the other.

Data parallelism takes part on the meta device (`Replay`): the GradSync that would train gathers,
allocates, reduces and frees its buffers as phases begin and end, and its bytes are counted. So
there is no second account of when a unit is whole. The FP8 copies of gathered weights are made here
too, when a phase reads them, and go with the unit; copies of other weights are made once a step,
and not counted.
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
    input_of,
    output_of,
    slot_messages,
)
from megatron5d.pipeline_parallel.program import Action, Program, Slot
from megatron5d.planning.memory.rank_memory import Peak
from megatron5d.planning.memory.repeat import Repeat
from megatron5d.planning.memory.trace import BOUNDARY, MemoryWatch, StageTrace, Step
from megatron5d.precision.fp8_recipes import is_quantized, quantized_copies
from megatron5d.topology.shard_spec import state_of


class Replay(MemoryWatch):
    """A context in which data parallelism goes through a step; `live_bytes` are its temporary
    buffers.

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
        self._sync, self._passes, self._phases, self._with_graphs = (
            sync,
            passes,
            phases,
            with_graphs,
        )
        # weights that are not gathered, and whose FP8 copies are still to be made
        staying = [
            weight
            for bucket in sync.buckets
            if not bucket.shards_weights
            for weight in bucket.parameters
        ]
        self._staying, self._unused = set(staying), set(staying)
        self._quantized = {
            phase: list(filter(is_quantized, phase.parameters()))
            for own in phases.values()
            for phase in own
        }
        self._gathers = any(bucket.shards_weights for bucket in sync.buckets)
        # a stage tells data parallelism the order of its phases when it is made
        self._steps = {stage: Stage(own, sync).steps for stage, own in phases.items()}

    def __enter__(self):
        entered = super().__enter__()
        self._sync.start_step(self._passes, self._with_graphs)
        return entered

    def expect(self, actions: Sequence[Action]) -> None:
        """Announces the next actions that read weights, which may be gathered early."""
        for action in actions if self._gathers else ():
            phases = self._phases[action.stage]
            self._sync.prefetch(phases[0 if action.op == "F" else -1], action.op == "F")

    def before(self, action: Action, step: int) -> bool:
        """Returns a step of an action, counted from its first phase, is about to run.

        Returns:
            Whether it makes FP8 copies of its weights.
        """
        self.forget_peak()
        kind, phase, *_ = self._steps[action.stage][action.op][step]
        if self._gathers:
            self._sync.before(phase, kind)
        return kind != "wgrad" and self._make_copies(phase, kind == "backward")

    def _make_copies(self, phase: Phase, backward: bool) -> bool:
        """Makes the FP8 copies that a phase reads, and returns whether some of them were not
        there."""
        makes = False
        for weight in self._quantized[phase]:
            if weight in self._staying:
                makes = makes or weight in self._unused
                self._unused.discard(weight)
                continue
            makes = makes or state_of(weight).fp8_copies is None
            pair = quantized_copies(weight)
            if backward and not pair.has_transposed:
                makes = pair.transposed is not None  # it is made when it is read
        return makes

    def allocate(self, action: Action, step: int, place: int) -> None:
        """Allocates the gradients of a bucket at its first weight gradient; `bucket` is its place
        among the phase's."""
        phase = self._steps[action.stage][action.op][step].phase
        bucket = self._sync.buckets[self._sync.uses[phase][place]]
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
    """Returns the worst moment of a step on one rank.

    Args:
        program: a verified Program.
        rank: the pipeline rank.
        traces: of every stage that the rank holds.
        message_bytes: of a message from each stage to the next.
        replay: data parallelism, inside its context; None = it has no temporary buffers.
        repeat: slots that are not walked through, since those before them need the same.
        moments: takes two moments of every slot: the worst while it runs, and what is held when it
            has run.
    """
    walk = _Walk(program, rank, traces, message_bytes, replay)
    line = list(slot_messages(program, rank))
    following = _following([each.slot for each in line], traces)
    for place, (each, after) in enumerate(zip(line, following)):
        if repeat is not None and repeat.start <= place < repeat.stop:
            if place == repeat.start:
                walk.skip(repeat)
            if moments is not None:
                moments += moments[-2 * repeat.length : 2 - 2 * repeat.length or None]
            continue
        walk.messages += sum(message_bytes[message.flow.boundary] for message in each.receives)
        walk.see(each.slot[0], 0)  # before its input has proved anything sent to have arrived
        if replay is not None:
            replay.expect(after)
        running = [walk.run(action) for action in each.slot]
        while running:
            running = [action for action in running if next(action, None) is not None]
        if moments is not None:
            moments.append(walk.noted())
            walk.see(each.slot[-1], 0)
            moments.append(walk.noted())
    worst = max(moments[::2], key=lambda moment: moment.total) if moments else walk.noted()
    return replace(worst.by_kind(), host=walk.most_host)


def _following(slots: Sequence[Slot], traces: Mapping[int, StageTrace]) -> list[Slot]:
    """Maps each slot that reads weights to the actions of the next such slot; W and empty stages
    read none."""
    reading = [
        tuple(a for a in slot if a.op != "W" and not traces[a.stage].is_empty) for slot in slots
    ]
    places = [place for place, actions in enumerate(reading) if actions]
    found: list[Slot] = [()] * len(slots)
    for place, after in zip(places, places[1:]):
        found[place] = reading[after]
    return found


class _Walk:
    """Counts the bytes alive on one rank while its slots run: `messages`, and `stages` for what is
    not the replay's."""

    def __init__(
        self,
        program: Program,
        rank: int,
        traces: Mapping[int, StageTrace],
        message_bytes: Sequence[int],
        replay: Replay | None,
    ) -> None:
        self.program, self.traces, self.message_bytes, self.replay = (
            program,
            traces,
            message_bytes,
            replay,
        )
        self.messages = self.stages = self.most = self.host = self.most_host = 0
        self._worst: _Moment | None = None
        self._proofs = completed_sends(program, rank)
        # bytes of messages not known to have been sent
        self._sent: defaultdict[Flow, deque[int]] = defaultdict(deque)
        self._settled: Counter[Flow] = Counter()
        self._local: dict[InFlight, int] = {}  # bytes of outputs for another stage of this rank
        # number of done steps of F; of how many something lives
        self._forward: dict[InFlight, tuple[int, int]] = {}
        self._hosts = {
            stage: [0, *accumulate(step.host for step in trace.passes["F"])]
            for stage, trace in traces.items()
        }
        # (stage, done, alive) -> what `_kept` says
        self._kept: dict[tuple[int, int, int], Counter[str]] = {}
        self._stashed: dict[InFlight, int] = {}
        self._shared: set[InFlight] = set()  # whose input is another stage's output, counted there

    def skip(self, repeat: Repeat) -> None:
        """Goes to the end of slots that repeat those before them: later micro-batches are as far as
        earlier ones."""
        later = repeat.times * repeat.shift

        def moved(held: dict[InFlight, Any]) -> dict[InFlight, Any]:
            return {(stage, microbatch + later): each for (stage, microbatch), each in held.items()}

        self._local, self._forward, self._stashed = (
            moved(self._local),
            moved(self._forward),
            moved(self._stashed),
        )
        self._shared = {(stage, microbatch + later) for stage, microbatch in self._shared}
        self._settled.update(repeat.sends)

    def run(self, action: Action) -> Iterator[bool]:
        """Runs one action, phase by phase."""
        op, stage, microbatch = action
        here, trace = (stage, microbatch), self.traces[stage]
        self._take(action)
        forward, place, begun = len(trace.passes["F"]), 0, False
        for done, step in enumerate(trace.passes[op]):
            # as in the executor: the input comes with the first phase's turn
            if step.kind != BOUNDARY:
                if begun:
                    yield True
                begun = True
            if op == "F":
                self._keep(here, done, done)
            if step.kind == BOUNDARY or self.replay is None:
                self.see(action, step.rise)
                self.stages += step.delta
            else:
                self._run_phase(action, done, place, self.replay)
                place += 1
            if step.frees:  # the activations of this phase; with the last phase, also its output
                alive = self._forward[here][1]
                self._keep(here, forward, max(0, alive - (2 if alive == forward else 1)))
        if op == "F":
            self._keep(here, forward, forward)
            if here in self._shared:
                self.stages -= self.message_bytes[stage - 1]
        elif op == "I":
            self._keep(here, None)
            self._stashed[here] = sum(step.delta for op in "FI" for step in trace.passes[op])
        else:
            self._keep(here, None)
            self._stashed.pop(here, None)
        if op in "IB" and here in self._shared:
            self._shared.remove(here)
            self.stages += self.message_bytes[stage - 1]
        self._hand_on(action, trace)

    def _keep(self, here: InFlight, done: int | None, alive: int = 0) -> None:
        """Sets how many steps of F are done, and of how many activations live from now on; None =
        the backward is done."""
        hosts = self._hosts[here[0]]
        self.host += hosts[alive] - hosts[self._forward.pop(here, (0, 0))[1]]
        self.most_host = max(self.most_host, self.host)
        if done is not None:
            self._forward[here] = done, alive

    def _run_phase(self, action: Action, done: int, place: int, replay: Replay) -> None:
        """Runs one step of an action, with what data parallelism does before, in and after it.

        Args:
            action: the action.
            done: steps before this one.
            place: the same, counted from the action's first phase.
            replay: data parallelism.
        """
        trace = self.traces[action.stage]
        makes_copies = replay.before(action, place)
        step = (trace.making if makes_copies else trace.passes)[action.op][done]
        self.see(action, max(step.rise, replay.peak_bytes - replay.live_bytes))
        for bucket, most in step.late:
            replay.allocate(action, place, bucket)
            self.see(action, most)
        self.stages += step.delta
        replay.forget_peak()
        replay.after(action, place)
        self.see(action, replay.peak_bytes - replay.live_bytes)

    def _take(self, action: Action) -> None:
        """Takes an action's input, and frees messages whose arrival it proves (messages.py)."""
        for flow, count in self._proofs.get(action, ()):
            while self._settled[flow] < count:
                self._settled[flow] += 1
                self.messages -= self._sent[flow].popleft()
        if action.op == "W":
            return
        message = input_of(self.program, action)
        if message is not None:
            self.messages -= self.message_bytes[message.flow.boundary]
        elif action.op == "F" and action.stage > 0:
            own = self._local.pop((action.stage - 1, action.microbatch))
            self.messages -= own
            if not own and not self.traces[action.stage].is_empty:  # which keeps nothing of it
                self._shared.add((action.stage, action.microbatch))
        elif action.op != "F" and action.stage < self.program.num_stages - 1:
            self.messages -= self._local.pop((action.stage + 1, action.microbatch))

    def _hand_on(self, action: Action, trace: StageTrace) -> None:
        """Passes an action's output to the next stage, on this rank or in a message."""
        op, stage, microbatch = action
        ends = stage == self.program.num_stages - 1 if op == "F" else stage == 0
        if op == "W" or ends:
            return
        extra = (
            0
            if op == "F" and trace.output_kept
            else self.message_bytes[stage if op == "F" else stage - 1]
        )
        message = output_of(self.program, action)
        if message is None:
            self._local[stage, microbatch] = extra
        else:
            self._sent[message.flow].append(extra)
        self.messages += extra

    def see(self, action: Action, rise: int) -> None:
        """Notes the present moment, with `rise` temporary bytes, if it needs more than any
        before."""
        units = 0 if self.replay is None else self.replay.live_bytes
        total = self.stages + self.messages + units + rise
        if total > self.most:
            self.most, stash = total, sum(self._stashed.values())
            elsewhere = sum(
                self.message_bytes[here[0] - 1] for here in self._shared if here in self._forward
            )
            self._worst = _Moment(
                action, total, self.messages, units, stash, elsewhere, dict(self._forward)
            )

    def noted(self) -> Moment:
        """Returns the worst moment since the last call, to be split by kind where that is
        wanted."""
        worst, self._worst, self.most = self._worst, None, 0
        return Moment(worst.total if worst else 0, partial(self._by_kind, worst))

    def _by_kind(self, worst: _Moment | None) -> Peak:
        """Splits a moment by kind."""
        if worst is None:
            return Peak()
        kept = Counter[str]()
        for (stage, done, alive), num in Counter(
            (here[0], *far) for here, far in worst.forward.items()
        ).items():
            known = stage, done, alive
            if known not in self._kept:
                self._kept[known] = _kept(self.traces[stage].passes["F"][:done], alive)
            for kind, count in self._kept[known].items():
                kept[kind] += num * count
        kept[BOUNDARY] -= min(kept[BOUNDARY], worst.elsewhere)
        stash = worst.stash
        rest = worst.total - sum(kept.values()) - stash - worst.messages - worst.units
        # the phase that runs may have freed some of its activations already, or W of what was
        # stashed
        freed, rest = max(0, -rest), max(0, rest)
        if worst.action.op == "W":
            freed, stash = max(0, freed - stash), max(0, stash - freed)
        for kind, count in kept.most_common():
            kept[kind] -= min(count, freed)
            freed -= min(count, freed)
        activations = {kind: count for kind, count in kept.items() if count}
        held = len(worst.forward)
        return Peak(
            activations, stash - freed, worst.messages, worst.units, rest, worst.action, held
        )


class Moment(NamedTuple):
    """A moment of a step: bytes in all, and by kind when asked."""

    total: int
    by_kind: Callable[[], Peak]


class _Moment(NamedTuple):
    """What is alive at a moment: bytes in all and of some kinds, and how far every micro-batch is
    (`_Walk`)."""

    action: Action
    total: int
    messages: int
    units: int
    stash: int
    elsewhere: int  # of inputs that other stages count
    forward: dict[InFlight, tuple[int, int]]


def _kept(steps: Sequence[Step], alive: int) -> Counter[str]:
    """Class of phase -> bytes that the first `alive` of these steps of a forward have left when all
    are done.

    What a step frees is what those before it made.
    """
    made: list[tuple[int, int]] = []  # which step, bytes
    for place, step in enumerate(steps):
        change = step.delta
        while change < 0 and made:
            before, count = made.pop()
            change += count
            if change > 0:
                made.append((before, change))
                change = 0
        if change > 0:
            made.append((place, change))
    kept = Counter[str]()
    for place, count in made:
        if place < alive:
            kept[steps[place].kind] += count
    return kept

"""The most that one rank holds during a step: a Program walked action by action, with what each pass allocates.

Memory follows from the order in which the host runs a rank's passes: an activation is there from its F until its B or
I, what deferred weight gradients need from I until W, a message from the moment its receive is posted, or until its
send is known to be over. Two overlapped actions take turns phase by phase, as in the executor, so what one needs for a
moment meets what the other keeps.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron5d.pipeline_parallel.program import Action, Program, Slot
from megatron5d.pipeline_parallel.receipts import receipts
from megatron5d.pipeline_parallel.transfers import Flow, input_of, output_of, steps
from megatron5d.plan.trace import BOUNDARY, StageTrace, Step

Passage = tuple[int, int]
"""(stage, micro-batch)."""


@dataclass(frozen=True)
class Peak:
    """What a rank holds at the worst moment of a step, in bytes.

    Args:
        activations: by class of phase: what micro-batches keep between their forward and their backward.
        stash: what deferred weight gradients keep between I and W.
        messages: of the pipeline, arrived or on their way.
        units: what data parallelism holds for a while: under ZeRO-2 and 3 gathered weights, gradients that are made or
            reduced; under ZeRO-1 slices reduced already.
        workspace: what the phase that runs needs for a moment, and the gradients on their way through the stage.
        action: during which; None = nothing ran.
        in_flight: micro-batches and stages whose activations are there.
        host: the most that activations take in the host's memory, not necessarily during that action; none of `total`.
    """

    activations: dict[str, int] = field(default_factory=dict)
    stash: int = 0
    messages: int = 0
    units: int = 0
    workspace: int = 0
    action: Action | None = None
    in_flight: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.activations.values()) + self.stash + self.messages + self.units + self.workspace


def find_peak(
    program: Program,
    rank: int,
    traces: Mapping[int, StageTrace],
    message_bytes: int,
    standing: int = 0,
    reduced: Mapping[int, Sequence[int]] | None = None,
) -> Peak:
    """
    Args:
        program: a verified Program.
        rank: the pipeline rank.
        traces: of every stage that the rank holds.
        message_bytes: of what travels between stages.
        standing: of data parallelism's buffers, left whole between passes.
        reduced: stage -> bytes that reducing each phase's gradients leaves until the end of the step, last phase first;
            reduced when the stage's last micro-batch has made them. None = nothing is left.
    """
    walk = _Walk(program, rank, traces, message_bytes, reduced or {})
    if not walk.begins_empty:
        walk.stages = walk.units = standing
    line = list(steps(program, rank))
    following = _following([step.slot for step in line], traces)
    for step, after in zip(line, following):
        walk.messages += message_bytes * len(step.receives)
        walk.expected = list(after)
        running = [walk.run(action) for action in step.slot]
        while running:
            running = [each for each in running if next(each, None) is not None]
    return replace(walk.peak, host=walk.most_host)


def _following(slots: Sequence[Slot], traces: Mapping[int, StageTrace]) -> list[Slot]:
    """For each slot that reads weights, the actions of the next one that does; W reads none, and a relay has none."""
    reading = [tuple(a for a in slot if a.op != "W" and not traces[a.stage].is_relay) for slot in slots]
    places = [place for place, actions in enumerate(reading) if actions]
    found: list[Slot] = [()] * len(slots)
    for place, after in zip(places, places[1:]):
        found[place] = reading[after]
    return found


class _Walk:
    """What is alive on one rank while its slots run: `messages`, and `stages`, all that its stages have allocated."""

    def __init__(
        self,
        program: Program,
        rank: int,
        traces: Mapping[int, StageTrace],
        message_bytes: int,
        reduced: Mapping[int, Sequence[int]],
    ) -> None:
        self.program, self.traces, self.message_bytes, self.reduced = program, traces, message_bytes, reduced
        self.messages = self.stages = self.units = self.most = self.host = self.most_host = 0
        self.peak = Peak()
        self.expected: list[Action] = []
        self._fetched: dict[Action, int] = {}  # bytes of weights that wait for an action to begin
        self._proofs = receipts(program, rank)
        self._sent: defaultdict[Flow, deque[int]] = defaultdict(deque)  # bytes of messages not known to be over
        self._settled: Counter[Flow] = Counter()
        self._here: dict[Passage, int] = {}  # bytes of values that go to another stage of this rank
        self._forward: dict[Passage, tuple[Step, ...]] = {}  # steps of F whose activations are there
        self._stashed: dict[Passage, int] = {}
        # a step's first backward is known where it is whole and of the rank's only stage; else buffers count throughout
        own = [stage for _, stage in program.placement.stages_of(rank)]
        ops = {action.op for slot in program.ranks[rank] for action in slot}
        self.begins_empty = len(own) == 1 and "B" in traces[own[0]].first and "I" not in ops
        self._begun: set[str] = set()  # operations that have run, where it begins empty
        self._shared: set[Passage] = set()  # whose input is another stage's output, counted there
        self._owed = Counter(
            action.stage for slot in program.ranks[rank] for action in slot if action.op in "BW"
        )  # micro-batches whose weight gradients a stage has not made

    def run(self, action: Action) -> Iterator[bool]:
        """One action, phase by phase."""
        op, stage, microbatch = action
        here, trace = (stage, microbatch), self.traces[stage]
        self._take(action)
        passes = self._passes(trace, op)
        forward, count = trace.passes["F"], len(passes)
        self._owed[stage] -= op in "BW"
        sums = iter(self.reduced.get(stage, ()) if op in "BW" and not self._owed[stage] else ())
        self._fetch(-self._fetched.pop(action, 0))
        for done, step in enumerate(passes):
            if done == count - 1 - trace.last_unit.get(op, 0):
                self._look_ahead(action, begun=True)
            if op == "F":
                self._keep(here, forward[:done])
            self._see(action, step.rise)
            self.stages += step.delta
            self.units += step.buffers
            if step.frees or (op == "W" and step.kind != BOUNDARY):
                self._fetch(next(sums, 0))
            if step.frees:  # the last phase, and with it the output that it has handed on
                self._keep(here, self._forward[here][: -2 if len(self._forward[here]) == len(forward) else -1])
            yield True
        self._look_ahead(action, begun=False)
        if op == "F":
            self._keep(here, forward)
            if here in self._shared:
                self.stages -= self.message_bytes
        elif op == "I":
            self._keep(here, None)
            self._stashed[here] = sum(step.delta - step.buffers for op in "FI" for step in trace.passes[op])
        else:
            self._keep(here, None)
            self._stashed.pop(here, None)
        if op in "IB" and here in self._shared:
            self._shared.remove(here)
            self.stages += self.message_bytes
        self._hand_on(action, trace)

    def _keep(self, here: Passage, steps: tuple[Step, ...] | None) -> None:
        """The steps of F whose activations are there from now on; None = its backward is over."""
        self.host += sum(step.host for step in steps or ()) - sum(step.host for step in self._forward.pop(here, ()))
        self.most_host = max(self.most_host, self.host)
        if steps is not None:
            self._forward[here] = steps

    def _passes(self, trace: StageTrace, op: str) -> tuple[Step, ...]:
        """The steps of one action; the first forward and backward of a step find no buffers of an earlier one."""
        if not self.begins_empty or op in self._begun:
            return trace.passes[op]
        self._begun.add(op)
        return trace.first[op]

    def _look_ahead(self, action: Action, begun: bool) -> None:
        """Fetches what the next actions read first, as the last unit of this one begins.

        What it reads itself is there already, and stays when it has ended.
        """
        if action.op == "W":
            return
        for after in list(self.expected):
            same = after.stage == action.stage and (action.op == "F") != (after.op == "F")
            if begun != same:
                self.expected.remove(after)
                self._fetched[after] = self.traces[after.stage].ahead.get(after.op, 0)
                self._fetch(self._fetched[after])

    def _fetch(self, num_bytes: int) -> None:
        """Counts weights that data parallelism gathers ahead."""
        self.stages += num_bytes
        self.units += num_bytes

    def _take(self, action: Action) -> None:
        """The action takes its input; messages are freed that this input proves to have arrived (receipts.py)."""
        for flow, count in self._proofs.get(action, ()):
            while self._settled[flow] < count:
                self._settled[flow] += 1
                self.messages -= self._sent[flow].popleft()
        if action.op == "W":
            return
        if input_of(self.program, action) is not None:
            self.messages -= self.message_bytes
        elif action.op == "F" and action.stage > 0:
            own = self._here.pop((action.stage - 1, action.microbatch))
            self.messages -= own
            if not own and not self.traces[action.stage].is_relay:  # which keeps nothing of it
                self._shared.add((action.stage, action.microbatch))
        elif action.op != "F" and action.stage < self.program.num_stages - 1:
            self.messages -= self._here.pop((action.stage + 1, action.microbatch))

    def _hand_on(self, action: Action, trace: StageTrace) -> None:
        op, stage, microbatch = action
        ends = stage == self.program.num_stages - 1 if op == "F" else stage == 0
        if op == "W" or ends:
            return
        extra = 0 if op == "F" and trace.output_kept else self.message_bytes
        message = output_of(self.program, action)
        if message is None:
            self._here[stage, microbatch] = extra
        else:
            self._sent[message.flow].append(extra)
        self.messages += extra

    def _see(self, action: Action, rise: int) -> None:
        total = self.stages + self.messages + rise
        if total <= self.most:
            return
        self.most = total
        activations: Counter[str] = Counter()
        for steps_there in self._forward.values():
            for step in steps_there:
                activations[step.kind] += step.delta - step.buffers
        activations[BOUNDARY] -= len([here for here in self._shared if here in self._forward]) * self.message_bytes
        stash = sum(self._stashed.values())
        kept = {kind: count for kind, count in activations.items() if count > 0}
        rest = total - sum(kept.values()) - stash - self.messages - self.units
        if rest < 0:  # the running phase has let go of some of its activations already
            kept[max(kept, key=kept.__getitem__)] += rest
            rest = 0
        self.peak = Peak(kept, stash, self.messages, self.units, rest, action, len(self._forward))

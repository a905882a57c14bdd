"""The messages of a Program: what each rank sends after which slot, and when it posts which
receive.

A *flow* is all messages from one rank to another across one boundary between two stages, in one
direction (F or B). Each flow is a channel of its own: within it messages keep their order, between
channels none is needed. A receive is posted two slots before its consumer: early enough that no
message waits for the receiver to get to it, and late enough that at most two messages per rank
arrive before their time (four around overlapped slots). With fewer channels (one per pair of ranks,
or one per direction) V-shaped, zigzag, bidirectional and looped zero-bubble schedules would
deadlock.

On a GPU a receive that waits is a kernel that runs, and the host waits until nothing runs where it
launches a new kernel, which CUDA loads then, and where it gives memory back. If the message depends
on what this very host has yet to launch, both wait for ever. Where that may be, `lockstep_receives`
posts a receive no earlier than its message has been sent.

A sent tensor may be freed once its send is complete. Polling costs a call into the backend in every
slot, and gloo does not answer. The Program proves it for free: if rank q consumes our message in
slot c and sends us another one after slot c, then our send is complete when q's message has
arrived.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megatron5d.pipeline_parallel.program import OPS, Action, Program, Slot

if TYPE_CHECKING:
    import numpy as np

SLOTS_AHEAD = 2
"""A receive is posted before the slot that stands this many places before its consumer."""

_DONE = object()


class Flow(NamedTuple):
    """One in-order channel."""

    source: int
    destination: int
    # "F": outputs go from stage `boundary` to `boundary` + 1; "B": their gradients come back
    kind: str
    boundary: int

    def __str__(self) -> str:
        arrow = ">" if self.kind == "F" else "<"
        return f"{self.kind} of stages {self.boundary}{arrow}{self.boundary + 1}, rank {self.source} to {self.destination}"


class Message(NamedTuple):
    """One micro-batch in one flow."""

    flow: Flow
    microbatch: int


class SlotMessages(NamedTuple):
    """One slot with its messages: post the receives, wait for the slot's own inputs, run it, send
    its outputs."""

    receives: tuple[Message, ...]
    slot: Slot
    sends: tuple[Message, ...]


def input_of(program: Program, action: Action) -> Message | None:
    """Returns the message that `action` waits for, or None where its input is made on the same rank
    or read as data."""
    if action.op == "W" or (action.op == "F" and action.stage == 0):
        return None
    if action.op == "F":
        return _message(program, "F", action.stage - 1, action.stage, action.microbatch)
    if action.stage == program.num_stages - 1:
        return None
    return _message(program, "B", action.stage + 1, action.stage, action.microbatch)


def output_of(program: Program, action: Action) -> Message | None:
    """Returns the message that `action` sends, or None where its output stays on the rank or ends
    the chain."""
    if action.op == "W" or (action.op == "F" and action.stage == program.num_stages - 1):
        return None
    if action.op == "F":
        return _message(program, "F", action.stage, action.stage + 1, action.microbatch)
    if action.stage == 0:
        return None
    return _message(program, "B", action.stage, action.stage - 1, action.microbatch)


def flows(program: Program) -> list[Flow]:
    """Returns every flow of the Program in one order that is the same on all ranks, to create its
    channels in."""
    found = set()
    for line in program.placement.route:
        for boundary, (near, far) in enumerate(zip(line, line[1:])):
            if near != far:
                found |= {Flow(near, far, "F", boundary), Flow(far, near, "B", boundary)}
    return sorted(found)


def slot_messages(program: Program, rank: int) -> Iterator[SlotMessages]:
    """Yields a rank's slots of a verified Program, the receives to post before and the sends to
    issue after each."""
    line = program.ranks[rank]
    inputs = [tuple(filter(None, (input_of(program, action) for action in slot))) for slot in line]
    for position, slot in enumerate(line):
        due = inputs[position + SLOTS_AHEAD if position else 0 : position + SLOTS_AHEAD + 1]
        sends = tuple(filter(None, (output_of(program, action) for action in slot)))
        yield SlotMessages(tuple(message for messages in due for message in messages), slot, sends)


def lockstep_receives(program: Program, rank: int) -> list[tuple[Message, ...]]:
    """Returns the receives to post before each slot of a rank where any host may wait at any time
    for its device.

    In rounds, every rank runs the next slot whose inputs are there; what the slots of a round send
    is received before the next slot. So slots and messages have one order in which a wait for all
    that came before always ends.
    """
    places, here = [0] * program.num_ranks, set[Message]()
    due: list[list[Message]] = [[] for _ in program.ranks[rank]]
    while slots := {
        each: line[place]
        for each, (line, place) in enumerate(zip(program.ranks, places))
        if place < len(line)
        and here.issuperset(filter(None, (input_of(program, action) for action in line[place])))
    }:
        for each in slots:
            places[each] += 1
        sent = [
            message
            for slot in slots.values()
            for action in slot
            if (message := output_of(program, action))
        ]
        here.update(sent)
        for message in sent:
            if message.flow.destination == rank:
                due[places[rank]].append(message)
    return [tuple(messages) for messages in due]


def finishes_with(program: Program, unproven: int) -> bool:
    """Returns whether all ranks finish if each waits after a message until all receives but the
    last are posted.

    Args:
        program: a verified Program.
        unproven: number of the last messages of a flow whose receives need not be posted yet.

    The two actions of a slot have their inputs before either one sends.
    """
    asked: Counter[Flow] = Counter()
    sent: Counter[Flow] = Counter()
    here: set[Message] = set()

    def walk(rank: int) -> Iterator[None]:
        for each in slot_messages(program, rank):
            asked.update(message.flow for message in each.receives)
            while not here.issuperset(
                filter(None, (input_of(program, action) for action in each.slot))
            ):
                yield
            for message in each.sends:
                here.add(message)
                sent[message.flow] += 1
                while sent[message.flow] - asked[message.flow] > unproven:
                    yield

    walks, before = [walk(rank) for rank in range(len(program.ranks))], (-1, -1)
    while walks and before != (before := (asked.total(), sent.total())):
        walks = [each for each in walks if next(each, _DONE) is not _DONE]
    return not walks


def _message(
    program: Program, kind: str, source: int, destination: int, microbatch: int
) -> Message | None:
    near, far = program.rank_of(source, microbatch), program.rank_of(destination, microbatch)
    return (
        None
        if near == far
        else Message(Flow(near, far, kind, min(source, destination)), microbatch)
    )


CompletedSends = dict[Action, list[tuple[Flow, int]]]
"""Action -> (flow, count): once the action's input has arrived, the first `count` sends of the flow are complete."""


@lru_cache(maxsize=1)
def _exchanged(program: Program) -> np.ndarray:
    """Returns `[messages, 7]` in the order of their sends, rank by rank: source, destination,
    whether it is a gradient, boundary, slots of the send and of the receive on their ranks, and the
    action that takes it, by place in the table."""
    import numpy as np

    table, m = program.table, program.num_microbatches
    cell, rank, found = table.stage.astype(np.int64) * m + table.microbatch, table.rank, []
    position = table.slot - table.rank_start[rank]
    for is_grad, ops, step, end in ((0, "F", 1, program.num_stages - 1), (1, "IB", -1, 0)):
        makes = np.flatnonzero(np.isin(table.op, [OPS.index(op) for op in ops]))
        at = np.zeros(program.num_stages * m, dtype=np.int64)
        at[cell[makes]] = makes
        sent = makes[table.stage[makes] != end]
        taken = at[cell[sent] + step * m]
        sent, taken = (each[rank[sent] != rank[taken]] for each in (sent, taken))
        boundary = np.minimum(table.stage[sent], table.stage[taken])
        found.append(
            np.stack(
                [
                    rank[sent],
                    rank[taken],
                    np.full(len(sent), is_grad),
                    boundary,
                    position[sent],
                    position[taken],
                    taken,
                    sent,
                ],
                1,
            )
        )
    messages = np.concatenate(found)
    return messages[np.argsort(messages[:, -1])][:, :-1]


@lru_cache(maxsize=1)
def completed_sends(program: Program, rank: int) -> CompletedSends:
    """Returns which sends of `rank` in a verified Program each action's input proves to be
    complete."""
    import numpy as np

    if program.num_ranks == 1:
        return {}
    messages, table = _exchanged(program), program.table
    sent, arriving = messages[messages[:, 0] == rank], messages[messages[:, 1] == rank]
    ops, stages, microbatches = table.op, table.stage, table.microbatch
    found: CompletedSends = defaultdict(list)
    for key in dict.fromkeys(map(tuple, sent[:, 1:4].tolist())):
        destination, is_grad, boundary = key
        consumed = sent[(sent[:, 1:4] == key).all(1), 5]
        back = arriving[arriving[:, 0] == destination]
        # of what the peer sends from each of its slots on, that which is consumed here first
        order = back[:, 5] * (len(back) + 1) + np.arange(len(back))
        earliest = np.minimum.accumulate(order[::-1])[::-1] % (len(back) + 1)
        index = np.searchsorted(back[:, 4], consumed, side="right")
        counts = np.arange(1, len(consumed) + 1)[index < len(back)]
        proofs = back[earliest[index[index < len(back)]], 6]
        flow = Flow(rank, destination, "FB"[is_grad], boundary)
        for place, count in dict(zip(proofs.tolist(), counts.tolist())).items():
            action = Action(OPS[ops[place]], int(stages[place]), int(microbatches[place]))
            found[action].append((flow, count))
    return dict(found)

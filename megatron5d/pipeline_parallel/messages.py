"""The messages of a Program: what each rank sends after which slot, and when it posts which
receive.

A *flow* is all messages from one rank to another across one boundary between two stages, in one
direction (F or B). Each flow is a separate channel: within it messages keep their order, between
channels no order is needed. A receive is posted two slots before its consumer: early enough that no
message waits for its receiver, and late enough that at most two messages per rank arrive early
(four around overlapped slots). With fewer channels (one per pair of ranks, or one per direction)
V-shaped, zigzag, bidirectional and looped zero-bubble schedules would deadlock.

On a GPU a pending receive is a running kernel, and the host waits until nothing runs when it
launches a kernel for the first time, which CUDA loads then, or when it returns memory to CUDA. If
the message depends on what this very host has yet to launch, both wait forever. A step in which
that may happen uses `lockstep_receives`, which posts a receive no earlier than its message has been
sent.

A sent tensor may be freed once its send is complete. Polling costs a call into the backend in every
slot, and gloo does not answer. The Program proves completion for free: if rank q consumes our
message in slot c and sends us another one after slot c, then our send is complete when q's message
has arrived.
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
"""Number of slots between posting a receive and the slot that consumes it."""

_DONE = object()


class Flow(NamedTuple):
    """One in-order channel."""

    source: int
    destination: int
    # "F": outputs pass from stage `boundary` to `boundary` + 1; "B": their gradients pass back
    kind: str
    boundary: int

    def __str__(self) -> str:
        arrow = ">" if self.kind == "F" else "<"
        stages = f"{self.boundary}{arrow}{self.boundary + 1}"
        return f"{self.kind} of stages {stages}, rank {self.source} to {self.destination}"


class Message(NamedTuple):
    """One micro-batch in one flow."""

    flow: Flow
    microbatch: int


def input_of(program: Program, action: Action) -> Message | None:
    """The message that `action` waits for; None if its input is local or read from the batch."""
    previous = action.stage - 1 if action.op == "F" else action.stage + 1
    return _message(program, action, previous, action.stage)


def output_of(program: Program, action: Action) -> Message | None:
    """The message that `action` sends; None if its output is local or ends the chain."""
    following = action.stage + 1 if action.op == "F" else action.stage - 1
    return _message(program, action, action.stage, following)


def _message(program: Program, action: Action, source: int, destination: int) -> Message | None:
    first, last = sorted((source, destination))
    if action.op == "W" or first < 0 or last == program.num_stages:
        return None
    sender = program.rank_of(source, action.microbatch)
    receiver = program.rank_of(destination, action.microbatch)
    if sender == receiver:
        return None
    return Message(
        Flow(sender, receiver, "F" if action.op == "F" else "B", first), action.microbatch
    )


def inputs_of(program: Program, slot: Slot) -> list[Message]:
    """The messages that a slot waits for."""
    return [message for action in slot if (message := input_of(program, action))]


def outputs_of(program: Program, slot: Slot) -> list[Message]:
    """The messages that a slot sends."""
    return [message for action in slot if (message := output_of(program, action))]


def flows(program: Program) -> list[Flow]:
    """Every flow of the Program, in one order on all ranks, in which channels are created."""
    unique = set()
    for route in program.placement.route:
        for boundary, (lower, upper) in enumerate(zip(route, route[1:])):
            if lower != upper:
                unique |= {Flow(lower, upper, "F", boundary), Flow(upper, lower, "B", boundary)}
    return sorted(unique)


def early_receives(program: Program, rank: int) -> list[list[Message]]:
    """The receives to post before each slot of a rank, SLOTS_AHEAD slots before their consumer."""
    inputs = [inputs_of(program, slot) for slot in program.ranks[rank]]
    first = [message for messages in inputs[: SLOTS_AHEAD + 1] for message in messages]
    later = inputs[SLOTS_AHEAD + 1 :]
    return [first, *later, *[[] for _ in inputs]][: len(inputs)]


def lockstep_receives(program: Program, rank: int) -> list[list[Message]]:
    """The receives to post before each slot of a rank when any host may wait for its device.

    In rounds, every rank runs its next slot if the inputs have arrived; what the slots of a round
    send is received before the next slot. So slots and messages have one order in which waiting for
    everything before always ends.
    """
    positions, arrived = [0] * program.num_ranks, set[Message]()
    receives: list[list[Message]] = [[] for _ in program.ranks[rank]]
    while slots := {
        runner: line[position]
        for runner, (line, position) in enumerate(zip(program.ranks, positions))
        if position < len(line) and arrived.issuperset(inputs_of(program, line[position]))
    }:
        for runner in slots:
            positions[runner] += 1
        sent = [message for slot in slots.values() for message in outputs_of(program, slot)]
        arrived.update(sent)
        for message in sent:
            if message.flow.destination == rank:
                receives[positions[rank]].append(message)
    return receives


def can_limit_sends(program: Program, max_incomplete: int) -> bool:
    """Whether all ranks finish if each waits until few of its messages have no posted receive.

    Args:
        program: a verified Program.
        max_incomplete: the most messages of a flow without a posted receive.

    The two actions of a slot have their inputs before either one sends.
    """
    posted: Counter[Flow] = Counter()
    sent: Counter[Flow] = Counter()
    arrived: set[Message] = set()

    def walk(rank: int) -> Iterator[None]:
        for receives, slot in zip(early_receives(program, rank), program.ranks[rank]):
            posted.update(message.flow for message in receives)
            while not arrived.issuperset(inputs_of(program, slot)):
                yield
            for message in outputs_of(program, slot):
                arrived.add(message)
                sent[message.flow] += 1
                while sent[message.flow] - posted[message.flow] > max_incomplete:
                    yield

    walks, progress = [walk(rank) for rank in range(program.num_ranks)], (-1, -1)
    while walks and progress != (progress := (posted.total(), sent.total())):
        walks = [steps for steps in walks if next(steps, _DONE) is not _DONE]
    return not walks


def senders_and_receivers(program: Program) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields for F and for B the actions that make a value, and those of the next stage that take
    it.

    Both are `[num_values]` indices into `program.table`; the Program must be complete.
    """
    import numpy as np

    table, m = program.table, program.num_microbatches
    for kind, ops, step, end in (("F", "F", 1, program.num_stages - 1), ("B", "IB", -1, 0)):
        makers = np.flatnonzero(np.isin(table.op, [OPS.index(op) for op in ops]))
        maker_of = np.zeros(program.num_stages * m, dtype=np.int64)
        maker_of[program.cell[makers]] = makers
        senders = makers[table.stage[makers] != end]
        yield kind, senders, maker_of[program.cell[senders] + step * m]


CompletedSends = dict[Action, list[tuple[Flow, int]]]
"""Action -> (flow, count): its input proves that the flow's first `count` sends are complete."""


class _Exchanges(NamedTuple):
    """`[messages]` of each column, in the order of their sends, rank by rank."""

    source: np.ndarray
    destination: np.ndarray
    is_grad: np.ndarray
    boundary: np.ndarray
    send_slot: np.ndarray  # position on the source
    receive_slot: np.ndarray  # position on the destination
    receiver: np.ndarray  # index in `program.table` of the action that takes the message

    def where(self, mask: np.ndarray) -> _Exchanges:
        return _Exchanges(*(column[mask] for column in self))


@lru_cache(maxsize=1)
def _exchanges(program: Program) -> _Exchanges:
    import numpy as np

    table, rank = program.table, program.table.rank
    position = table.slot - table.rank_start[rank]
    columns = []
    for kind, senders, receivers in senders_and_receivers(program):
        crosses = rank[senders] != rank[receivers]
        senders, receivers = senders[crosses], receivers[crosses]
        columns.append(
            (
                rank[senders],
                rank[receivers],
                np.full(len(senders), kind == "B"),
                np.minimum(table.stage[senders], table.stage[receivers]),
                position[senders],
                position[receivers],
                receivers,
                senders,
            )
        )
    *exchanges, senders = (np.concatenate(pair) for pair in zip(*columns))
    return _Exchanges(*exchanges).where(np.argsort(senders))


@lru_cache(maxsize=1)
def completed_sends(program: Program, rank: int) -> CompletedSends:
    """The sends of `rank` in a verified Program that each action's input proves to be complete."""
    if program.num_ranks == 1:
        return {}
    messages, table = _exchanges(program), program.table
    sent = messages.where(messages.source == rank)
    arriving = messages.where(messages.destination == rank)
    completed: CompletedSends = defaultdict(list)
    flow_keys = zip(
        *(column.tolist() for column in (sent.destination, sent.is_grad, sent.boundary))
    )
    for destination, is_grad, boundary in dict.fromkeys(flow_keys):
        in_flow = (sent.destination == destination) & (sent.is_grad == is_grad)
        consumed = sent.receive_slot[in_flow & (sent.boundary == boundary)]
        replies = arriving.where(arriving.source == destination)
        flow = Flow(rank, destination, "B" if is_grad else "F", boundary)
        for index, count in _proofs(consumed, replies).items():
            op, stage, microbatch = (column[index] for column in table[2:])
            completed[Action(OPS[op], int(stage), int(microbatch))].append((flow, count))
    return dict(completed)


def _proofs(receive_slots: np.ndarray, replies: _Exchanges) -> dict[int, int]:
    """Maps the index of an action to the number of sends that its input proves complete.

    Args:
        receive_slots: `[sends]` of one flow, on the destination.
        replies: from the destination of the flow to its source.
    """
    import numpy as np

    num_replies = len(replies.source)
    # For each reply, which of it and those after it this rank consumes first.
    order = replies.receive_slot * (num_replies + 1) + np.arange(num_replies)
    earliest = np.minimum.accumulate(order[::-1])[::-1] % (num_replies + 1)
    # For each send, the first reply that the peer sends after it has consumed the message.
    reply = np.searchsorted(replies.send_slot, receive_slots, side="right")
    has_reply = reply < num_replies
    counts = np.arange(1, len(receive_slots) + 1)[has_reply]
    proofs = replies.receiver[earliest[reply[has_reply]]]
    return dict(zip(proofs.tolist(), counts.tolist()))

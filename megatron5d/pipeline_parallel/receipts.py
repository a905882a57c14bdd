"""How a rank knows, without asking, that what it sent has arrived: by a message that the receiver sent later.

A sent tensor may be freed once its transfer is over. To ask the transfer costs a call into the backend in every slot,
and gloo does not answer. The Program tells it for free: if rank q consumes our message in slot c and sends us another
one after slot c, then ours had arrived by the time that we have q's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from megatron5d.pipeline_parallel.messages import Flow, Message, input_of, output_of
from megatron5d.pipeline_parallel.program import Action, Program

Receipts = dict[Action, list[tuple[Flow, int]]]
"""Action -> (flow, count): once the action's input is there, the first `count` messages of the flow have arrived."""


def receipts(program: Program, rank: int) -> Receipts:
    """What each action's input proves about messages that `rank` has sent.

    Args:
        program: a verified Program.
        rank: the pipeline rank that sends.
    """
    taken = {
        message: (position, action)
        for line in program.ranks
        for position, slot in enumerate(line)
        for action in slot
        if (message := input_of(program, action)) is not None
    }
    sent: dict[Flow, list[Message]] = defaultdict(list)
    proofs: dict[int, list[tuple[int, int, Action]]] = defaultdict(list)  # peer -> (sent there, taken here, by whom)
    for source, line in enumerate(program.ranks):
        for position, slot in enumerate(line):
            for action in slot:
                message = output_of(program, action)
                if message is None:
                    continue
                if source == rank:
                    sent[message.flow].append(message)
                elif message.flow.destination == rank:
                    proofs[source].append((position, *taken[message]))
    found: Receipts = defaultdict(list)
    for flow, messages in sent.items():
        earliest = _earliest(proofs[flow.destination])
        counts: dict[Action, int] = {}
        for count, message in enumerate(messages, start=1):
            consumed = taken[message][0]
            index = bisect_left(earliest, consumed + 1, key=lambda entry: entry[0])
            if index < len(earliest):
                counts[earliest[index][2]] = count
        for action, count in counts.items():
            found[action].append((flow, count))
    return dict(found)


def _earliest(proofs: list[tuple[int, int, Action]]) -> list[tuple[int, int, Action]]:
    """For every slot of the peer: of all that it sends from there on, what is taken here first."""
    ordered = sorted(proofs, key=lambda entry: entry[0])
    for index in range(len(ordered) - 2, -1, -1):
        if ordered[index + 1][1] < ordered[index][1]:
            ordered[index] = (ordered[index][0], *ordered[index + 1][1:])
    return ordered

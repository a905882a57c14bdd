"""Prove a Program before it runs: complete, in order, free of deadlock, with matching messages and
within its memory.

The channel model is the executor's: sends are asynchronous, each flow (see messages.py) is a
channel of its own, and a message blocks its channel until it has been received. Then a Program can
only hang if its actions wait for each other in a circle, or if one end of a channel takes messages
in another order than the other end sends them.

A fault names its place, its reason, and the schedule around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.messages import Flow
from megatron5d.pipeline_parallel.program import OPS, Action, Program
from megatron5d.pipeline_parallel.schedule_csv import slot_text
from megatron5d.pipeline_parallel.simulate import first_circle, held_activations, peak_memory

SHOWN = 3
"""How many slots before and after a fault its message shows."""


class ProgramError(ValueError):
    """A Program is wrong at one place.

    Args:
        rank: the rank of the fault.
        position: the slot on that rank; for a missing action, where it would be expected.
        reason: what is wrong, in words.
        others: further (rank, position) to show, such as the other end of a channel.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        position: int,
        reason: str,
        others: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.rank, self.position = rank, position
        places = [(rank, position), *others]
        shown = "\n".join(f"  {_around(program, *place)}" for place in places)
        super().__init__(f"{program.name}: rank {rank}, position {position}: {reason}\n{shown}")


def locate(program: Program, index: int) -> tuple[Action, int, int]:
    """Returns one action of the table with its rank and position."""
    table = program.table
    slot = int(np.searchsorted(table.slot_start, index, side="right")) - 1
    rank = int(np.searchsorted(table.rank_start, slot, side="right")) - 1
    position = slot - int(table.rank_start[rank])
    return program.ranks[rank][position][index - int(table.slot_start[slot])], rank, position


def slot_name(program: Program, rank: int, position: int) -> str:
    """Returns the actions of one slot for a message."""
    return "&".join(str(action) for action in program.ranks[rank][position])


def _around(program: Program, rank: int, position: int) -> str:
    """Returns the slots around one place, the place itself in brackets; `[]` where something is
    missing at the end."""
    cells = [slot_text(slot) for slot in program.ranks[rank]]
    before, here, after = (
        cells[:position],
        "".join(cells[position : position + 1]),
        cells[position + 1 :],
    )
    shown = ["…"] * (len(before) > SHOWN) + before[-SHOWN:] + [f"[{here}]"] + after[:SHOWN]
    return f"rank {rank}: {' '.join(shown)}{' …' if len(after) > SHOWN else ''}"


F, I, W, B = (OPS.index(op) for op in "FIWB")


@dataclass(frozen=True)
class Verified:
    """What a correct Program holds at most."""

    peak_activations: np.ndarray  # `[num_ranks]` in micro-batches of one rank's layers
    peak_stash: np.ndarray  # `[num_ranks]` deferred weight gradients, in the same unit


def verify(
    program: Program,
    memory: float | Sequence[float] | None = None,
    costs: Costs | StageCosts | None = None,
) -> Verified:
    """Checks a Program completely and returns its peaks.

    Args:
        memory: the most activations a rank may hold, in micro-batches of one rank's layers; one
            number, or one for every rank. None = no cap.
        costs: whose activation sizes to use; None = even stages.

    Raises:
        ProgramError: The first fault, with its rank, position and action, and the schedule around
            it.
    """
    _check_shape(program)
    _check_places(program)
    _check_complete(program)
    _check_order(program)
    _check_channels(program)
    circle = first_circle(program)
    if circle:
        waits = "; ".join(
            f"rank {rank} at {slot_name(program, rank, position)}" for rank, position in circle
        )
        raise ProgramError(
            program,
            *circle[0],
            f"deadlock: these wait for each other in a circle: {waits}",
            circle[1:],
        )
    sizes = costs if isinstance(costs, StageCosts) else (costs or Costs()).of(program.placement)
    if memory is not None:
        _check_memory(program, memory, sizes)
    return Verified(*peak_memory(program, sizes))


def _check_shape(program: Program) -> None:
    """Refuses whatever would make the integer arrays meaningless."""
    placement = program.placement
    num_ranks, num_stages, m = program.num_ranks, program.num_stages, program.num_microbatches
    if len(program.ranks) != num_ranks:
        raise ValueError(
            f"{program.name} has {len(program.ranks)} lists of slots, but pp={num_ranks}: one a rank"
        )
    for rank in range(num_ranks):
        held = len(placement.stages_of(rank))
        if held * num_ranks != num_stages * placement.copies:
            each = num_stages * placement.copies / num_ranks
            raise ValueError(
                f"{program.name}: rank {rank} holds {held} stages, but an even placement has {each:g}"
            )
    for microbatch, way in enumerate(program.direction):
        if not 0 <= way < placement.copies:
            raise ValueError(
                f"{program.name}: micro-batch {microbatch} has direction {way}, but each stage has {placement.copies} "
                f"copies; the direction must be below that"
            )
    for rank, line in enumerate(program.ranks):
        for position, slot in enumerate(line):
            if not 1 <= len(slot) <= 2:
                raise ProgramError(
                    program,
                    rank,
                    position,
                    f"{len(slot)} actions in a slot; one, or two that overlap",
                )
            for action in slot:
                if action.op not in OPS:
                    raise ProgramError(
                        program,
                        rank,
                        position,
                        f"{action}: {action.op!r} is none of {', '.join(OPS)}",
                    )
                if not 0 <= action.stage < num_stages:
                    raise ProgramError(
                        program, rank, position, f"{action}: the stages are 0 to {num_stages - 1}"
                    )
                if not 0 <= action.microbatch < m:
                    raise ProgramError(
                        program, rank, position, f"{action}: the micro-batches are 0 to {m - 1}"
                    )


def _check_places(program: Program) -> None:
    """Checks that every action is on the rank that holds its stage for its micro-batch's
    direction."""
    table = program.table
    route, direction = np.array(program.placement.route), np.array(program.direction)
    expected = route[direction[table.microbatch], table.stage]
    wrong = np.flatnonzero(expected != program.table.rank)
    if len(wrong):
        action, rank, position = locate(program, int(wrong[0]))
        way = f" for direction {program.direction[action.microbatch]}" if program.copies > 1 else ""
        holder = program.rank_of(action.stage, action.microbatch)
        raise ProgramError(
            program,
            rank,
            position,
            f"{action} is on rank {rank}, but rank {holder} holds its stage{way}",
        )


def _check_complete(program: Program) -> None:
    """Checks that every micro-batch meets every stage in one F, and in one B or in one I and one
    W."""
    table, m = program.table, program.num_microbatches
    cell = table.stage.astype(np.int64) * m + table.microbatch
    seen = np.bincount(
        cell * len(OPS) + table.op, minlength=program.num_stages * m * len(OPS)
    ).reshape(-1, len(OPS))
    repeated = np.argwhere(seen > 1)
    if len(repeated):
        where, op = repeated[0]
        first, second = np.flatnonzero((cell == where) & (table.op == op))[:2]
        action, rank, position = locate(program, int(second))
        earlier = locate(program, int(first))
        raise ProgramError(program, rank, position, f"{action} runs a second time", [earlier[1:]])
    mixed = np.flatnonzero((seen[:, B] > 0) & ((seen[:, I] > 0) | (seen[:, W] > 0)))
    if len(mixed):
        found = np.flatnonzero((cell == mixed[0]) & np.isin(table.op, (I, W)))[0]
        action, rank, position = locate(program, int(found))
        raise ProgramError(
            program,
            rank,
            position,
            f"{action} repeats a part of {action._replace(op='B')}, a full backward",
        )
    needed = np.array([True, True, True, False])
    absent = np.argwhere(
        (seen == 0) & needed & ~((seen[:, [B]] > 0) & np.array([False, True, True, False]))
    )
    if len(absent):
        where, op = absent[0]
        _report_missing(
            program,
            Action(OPS[op], int(where) // m, int(where) % m),
            split=bool(seen[where, [I, W]].any()),
        )


def _report_missing(program: Program, action: Action, split: bool) -> None:
    """Raises at the place where the missing action is expected: among those of its kind on the same
    stage."""
    rank = program.rank_of(action.stage, action.microbatch)
    name = (
        str(action)
        if split or action.op == "F"
        else f"{action._replace(op='B')} (or {action} and its W)"
    )
    like = action.op if action.op == "F" else action.op + "B"
    line = [
        (position, other) for position, slot in enumerate(program.ranks[rank]) for other in slot
    ]
    kin = [
        (position, other)
        for position, other in line
        if other.stage == action.stage and other.op in like
    ]
    after = [position for position, other in kin if other.microbatch < action.microbatch]
    before = [position for position, other in kin if other.microbatch > action.microbatch]
    position = after[-1] + 1 if after else min(before, default=len(program.ranks[rank]))
    raise ProgramError(program, rank, position, f"{name} is missing")


def _check_order(program: Program) -> None:
    """Checks that F comes before I or B, I before W, and that what depends on each other never
    overlaps."""
    table, m = program.table, program.num_microbatches
    slot = program.table.slot
    cell = table.stage.astype(np.int64) * m + table.microbatch
    at = np.full((len(OPS), program.num_stages * m), -1)
    at[table.op, cell] = slot
    _check_overlaps(program, slot)
    for first, then in ((F, I), (F, B), (I, W)):
        wrong = np.flatnonzero((at[then] >= 0) & (at[then] <= at[first]))
        if len(wrong):
            where = int(wrong[np.argmin(at[then][wrong])])
            early = int(np.flatnonzero((table.op == then) & (cell == where))[0])
            late = int(np.flatnonzero((table.op == first) & (cell == where))[0])
            action, rank, position = locate(program, early)
            earlier, *place = locate(program, late)
            raise ProgramError(
                program, rank, position, f"{action} runs before {earlier}", [(place[0], place[1])]
            )


def _check_overlaps(program: Program, slot: np.ndarray) -> None:
    """Checks that two actions of one micro-batch overlap only where neither needs the other's
    result.

    All forwards and input gradients of a micro-batch form one chain through the stages; a W hangs
    on its stage's I.
    """
    table = program.table
    same = np.flatnonzero((slot[1:] == slot[:-1]) & (table.microbatch[1:] == table.microbatch[:-1]))
    for index in same.tolist():
        one, rank, position = locate(program, index)
        two = locate(program, index + 1)[0]
        weight, other = (one, two) if one.op == "W" else (two, one)
        if weight.op == "W" and (
            other.op == "W" or (other.op in "IB" and other.stage < weight.stage)
        ):
            continue
        if one.stage == two.stage and "F" in (one.op, two.op):
            why = "a forward cannot overlap a backward of its own micro-batch"
        else:
            why = "one needs what the other makes, for they belong to one micro-batch"
        raise ProgramError(program, rank, position, f"{one} and {two} overlap: {why}")


def _check_channels(program: Program) -> None:
    """Checks that every flow receives its messages in the order in which they are sent."""
    table, m, num_stages = program.table, program.num_microbatches, program.num_stages
    index, stage = np.arange(len(table.op)), table.stage.astype(np.int64)
    cell = stage * m + table.microbatch
    direction = np.array(program.direction)[table.microbatch]
    for kind, ops, step, end in (("F", (F,), 1, num_stages - 1), ("B", (I, B), -1, 0)):
        makes = np.isin(table.op, ops)
        at = np.zeros(num_stages * m, dtype=np.int64)
        at[cell[makes]] = index[makes]
        senders = index[makes & (stage != end)]
        flow = direction[senders] * num_stages + stage[senders]
        order = np.lexsort((senders, flow))
        sent, flow = senders[order], flow[order]
        received = at[cell[sent] + step * m]
        crossed = np.flatnonzero((flow[1:] == flow[:-1]) & (received[1:] < received[:-1]))
        for found in crossed.tolist():
            _report_crossed(
                program,
                kind,
                sent[found : found + 2].tolist(),
                received[found : found + 2].tolist(),
            )


def _report_crossed(program: Program, kind: str, sent: list[int], received: list[int]) -> None:
    (one, source, here), (two, _, _) = (locate(program, index) for index in sent)
    (late, destination, _), (early, _, there) = (locate(program, index) for index in received)
    if source == destination:
        return
    flow = Flow(source, destination, kind, min(one.stage, late.stage))
    reason = f"messages cross in flow {flow}: sent {one} before {two}, but received for {early} before {late}"
    raise ProgramError(program, destination, there, reason, [(source, here)])


def _check_memory(program: Program, memory: float | Sequence[float], costs: StageCosts) -> None:
    caps = np.broadcast_to(np.asarray(memory, dtype=float), (program.num_ranks,))
    held = held_activations(program, costs)
    edges = program.table.rank_start.tolist()
    for rank, cap in enumerate(caps.tolist()):
        line = held[edges[rank] : edges[rank + 1]]
        over = np.flatnonzero(line > cap + 1e-9)
        if len(over):
            position = int(over[0])
            reason = (
                f"{slot_name(program, rank, position)} raises the activations to {line[position]:g} micro-batches of "
                f"one rank's layers, but the cap is {cap:g}; this Program needs a cap of {held.max():g}"
            )
            raise ProgramError(program, rank, position, reason)

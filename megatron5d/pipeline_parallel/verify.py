"""Proves a Program before it runs: complete, in order, free of deadlock, with matching messages and
within its memory.

The channel model is the executor's: sends are asynchronous, each flow (messages.py) is a channel of
its own, and a message blocks its channel until it has been received. Then a Program can only hang
if its actions wait for each other in a circle, or if one end of a channel takes messages in another
order than the other end sends them.

An error names its place, its reason, and the schedule around it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.messages import Flow, senders_and_receivers
from megatron5d.pipeline_parallel.program import OPS, Action, B, F, I, Program, W
from megatron5d.pipeline_parallel.schedule_csv import slot_text
from megatron5d.pipeline_parallel.simulate import (
    PeakMemory,
    activations_by_slot,
    find_cycle,
    peak_memory,
)

SHOWN = 3
"""Number of slots that a message shows before and after a fault."""


class Location(NamedTuple):
    """One slot of a Program; for a missing action, where it would be expected."""

    rank: int
    position: int


class ProgramError(ValueError):
    """A Program is wrong at one place.

    Args:
        program: the wrong one.
        reason: what is wrong, in words.
        location: of the fault.
        related: further places to show, such as the other end of a channel.
    """

    def __init__(
        self, program: Program, reason: str, location: Location, *related: Location
    ) -> None:
        self.rank, self.position = location
        shown = "\n".join(f"  {_surroundings(program, other)}" for other in (location, *related))
        super().__init__(
            f"{program.name}: rank {location.rank}, position {location.position}: {reason}\n{shown}"
        )


def _locate(program: Program, index: int) -> tuple[Action, Location]:
    """One action of the table, and its location."""
    table = program.table
    slot = int(np.searchsorted(table.slot_start, index, side="right")) - 1
    rank = int(np.searchsorted(table.rank_start, slot, side="right")) - 1
    position = slot - int(table.rank_start[rank])
    action = program.ranks[rank][position][index - int(table.slot_start[slot])]
    return action, Location(rank, position)


def _slot_name(program: Program, location: Location) -> str:
    return "&".join(str(action) for action in program.ranks[location.rank][location.position])


def _surroundings(program: Program, location: Location) -> str:
    """The slots around a location, the location itself in brackets; `[]` for one after the last."""
    cells = [slot_text(slot) for slot in program.ranks[location.rank]]
    before, after = cells[: location.position], cells[location.position + 1 :]
    bracketed = f"[{''.join(cells[location.position : location.position + 1])}]"
    shown = ["…"] * (len(before) > SHOWN) + before[-SHOWN:] + [bracketed] + after[:SHOWN]
    return f"rank {location.rank}: {' '.join(shown)}{' …' if len(after) > SHOWN else ''}"


def verify(
    program: Program,
    memory: float | Sequence[float] | None = None,
    costs: Costs | StageCosts | None = None,
) -> PeakMemory:
    """Checks a Program completely and returns its peaks.

    Args:
        program: any Program.
        memory: the most activations a rank may hold, in micro-batches of one rank's layers; one
            number, or one for every rank. None = no cap.
        costs: whose activation sizes to use; None = even stages.

    Raises:
        ProgramError: the first fault, with its rank, position and action, and the schedule around
            it.
        ValueError: the placement and the lists of slots do not match.
    """
    _check_shape(program)
    _check_ranks(program)
    counts = _counts(program)
    _check_repeated(program, counts)
    _check_missing(program, counts)
    _check_order(program)
    _check_channels(program)
    cycle = [Location(*location) for location in find_cycle(program)]
    if cycle:
        waits = "; ".join(
            f"rank {location.rank} at {_slot_name(program, location)}" for location in cycle
        )
        raise ProgramError(program, f"deadlock: these slots wait for each other: {waits}", *cycle)
    sizes = costs if isinstance(costs, StageCosts) else (costs or Costs()).of(program.placement)
    if memory is not None:
        _check_memory(program, memory, sizes)
    return peak_memory(program, sizes)


def _check_shape(program: Program) -> None:
    """Rejects whatever would make the integer arrays meaningless."""
    placement, num_ranks = program.placement, program.num_ranks
    if len(program.ranks) != num_ranks:
        raise ValueError(
            f"{program.name} has {len(program.ranks)} lists of slots, but pp={num_ranks}"
        )
    for rank in range(num_ranks):
        num_held = len(placement.stages_of(rank))
        if num_held * num_ranks != program.num_stages * placement.copies:
            raise ValueError(
                f"{program.name}: rank {rank} holds {num_held} stages, but an even placement has "
                f"{program.num_stages * placement.copies / num_ranks:g}"
            )
    for microbatch, direction in enumerate(program.direction):
        if not 0 <= direction < placement.copies:
            raise ValueError(
                f"{program.name}: micro-batch {microbatch} has direction {direction}, but each "
                f"stage has {placement.copies} copies; the direction must be below that"
            )
    for rank, line in enumerate(program.ranks):
        for position, slot in enumerate(line):
            if not 1 <= len(slot) <= 2:
                reason = f"{len(slot)} actions in a slot; it takes one, or two that overlap"
                raise ProgramError(program, reason, Location(rank, position))
            for action in slot:
                if reason := _out_of_range(program, action):
                    raise ProgramError(program, f"{action}: {reason}", Location(rank, position))


def _out_of_range(program: Program, action: Action) -> str:
    """Why an action cannot belong to the Program; empty if it can."""
    if action.op not in OPS:
        return f"{action.op!r} is none of {', '.join(OPS)}"
    if not 0 <= action.stage < program.num_stages:
        return f"the stages are 0 to {program.num_stages - 1}"
    if not 0 <= action.microbatch < program.num_microbatches:
        return f"the micro-batches are 0 to {program.num_microbatches - 1}"
    return ""


def _check_ranks(program: Program) -> None:
    """Checks that every action is on the rank that holds its stage in its direction."""
    table, route = program.table, np.array(program.placement.route)
    expected = route[program.action_direction, table.stage]
    wrong = np.flatnonzero(expected != table.rank)
    if len(wrong):
        action, location = _locate(program, int(wrong[0]))
        holder = program.rank_of(action.stage, action.microbatch)
        reason = f"{action} is on rank {location.rank}, but rank {holder} holds its stage"
        if program.copies > 1:
            reason += f" for direction {program.direction[action.microbatch]}"
        raise ProgramError(program, reason, location)


def _counts(program: Program) -> np.ndarray:
    """`[num_stages · num_microbatches, len(OPS)]` how often each op runs."""
    num_cells = program.num_stages * program.num_microbatches
    keys = program.cell * len(OPS) + program.table.op
    return np.bincount(keys, minlength=num_cells * len(OPS)).reshape(-1, len(OPS))


def _check_repeated(program: Program, counts: np.ndarray) -> None:
    """Checks that no action runs twice, and no I or W where there is a B."""
    table = program.table
    repeated = np.argwhere(counts > 1)
    if len(repeated):
        cell, op = repeated[0]
        first, second = np.flatnonzero((program.cell == cell) & (table.op == op))[:2]
        action, location = _locate(program, int(second))
        earlier = _locate(program, int(first))[1]
        raise ProgramError(program, f"{action} runs a second time", location, earlier)
    mixed = np.flatnonzero((counts[:, B] > 0) & (counts[:, [I, W]] > 0).any(1))
    if len(mixed):
        halves = np.flatnonzero((program.cell == mixed[0]) & np.isin(table.op, (I, W)))
        action, location = _locate(program, int(halves[0]))
        reason = f"{action} repeats a part of {action._replace(op='B')}, a full backward"
        raise ProgramError(program, reason, location)


def _check_missing(program: Program, counts: np.ndarray) -> None:
    """Checks that every micro-batch meets every stage in an F, and in a B or in an I and a W."""
    missing = counts[:, :B] == 0
    missing[:, [I, W]] &= counts[:, [B]] == 0
    if missing.any():
        cell, op = np.argwhere(missing)[0].tolist()
        action = Action(OPS[op], *divmod(cell, program.num_microbatches))
        _report_missing(program, action, is_split=bool(counts[cell, [I, W]].any()))


def _report_missing(program: Program, action: Action, is_split: bool) -> None:
    """Raises at the location where the missing action is expected, among those of its kind."""
    rank = program.rank_of(action.stage, action.microbatch)
    name = str(action)
    if action.op != "F" and not is_split:
        name = f"{action._replace(op='B')} (or {action} and its W)"
    kinds = action.op if action.op == "F" else action.op + "B"
    similar = [
        (position, other.microbatch)
        for position, slot in enumerate(program.ranks[rank])
        for other in slot
        if other.stage == action.stage and other.op in kinds
    ]
    earlier = [position for position, number in similar if number < action.microbatch]
    later = [position for position, number in similar if number > action.microbatch]
    position = earlier[-1] + 1 if earlier else min(later, default=len(program.ranks[rank]))
    raise ProgramError(program, f"{name} is missing", Location(rank, position))


def _check_order(program: Program) -> None:
    """Checks that F comes before I or B, I before W, and that dependent actions never overlap."""
    table, slot, cell = program.table, program.table.slot, program.cell
    slot_of = np.full((len(OPS), program.num_stages * program.num_microbatches), -1)
    slot_of[table.op, cell] = slot
    _check_overlaps(program, slot)
    for first, then in ((F, I), (F, B), (I, W)):
        wrong = np.flatnonzero((slot_of[then] >= 0) & (slot_of[then] <= slot_of[first]))
        if len(wrong):
            wrong_cell = wrong[np.argmin(slot_of[then][wrong])]
            (action, location), (earlier, earlier_location) = (
                _locate(program, int(np.flatnonzero((table.op == op) & (cell == wrong_cell))[0]))
                for op in (then, first)
            )
            raise ProgramError(
                program, f"{action} runs before {earlier}", location, earlier_location
            )


def _check_overlaps(program: Program, slot: np.ndarray) -> None:
    """Checks that two actions of one micro-batch overlap only if neither needs the other's result.

    All forwards and input gradients of a micro-batch form one chain through the stages; a W depends
    on its stage's I.
    """
    table = program.table
    same = np.flatnonzero((slot[1:] == slot[:-1]) & (table.microbatch[1:] == table.microbatch[:-1]))
    for index in same.tolist():
        one, location = _locate(program, index)
        two = _locate(program, index + 1)[0]
        weight, other = (one, two) if one.op == "W" else (two, one)
        if weight.op == "W" and (
            other.op == "W" or (other.op in "IB" and other.stage < weight.stage)
        ):
            continue
        if one.stage == two.stage and "F" in (one.op, two.op):
            reason = "a forward cannot overlap a backward of its own micro-batch"
        else:
            reason = "one needs the output of the other, as they belong to one micro-batch"
        raise ProgramError(program, f"{one} and {two} overlap: {reason}", location)


def _check_channels(program: Program) -> None:
    """Checks that every flow receives its messages in the order in which they are sent."""
    for kind, senders, receivers in senders_and_receivers(program):
        stage = program.table.stage[senders].astype(np.int64)
        flow = program.action_direction[senders] * program.num_stages + stage
        order = np.lexsort((senders, flow))
        senders, receivers, flow = senders[order], receivers[order], flow[order]
        crossed = np.flatnonzero((flow[1:] == flow[:-1]) & (receivers[1:] < receivers[:-1]))
        for index in crossed.tolist():
            pair = slice(index, index + 2)
            _report_crossed(program, kind, senders[pair].tolist(), receivers[pair].tolist())


def _report_crossed(program: Program, kind: str, senders: list[int], receivers: list[int]) -> None:
    """Raises if two messages of a flow cross; values that stay on a rank cannot."""
    (one, source), (two, _) = (_locate(program, index) for index in senders)
    (late, destination), (early, early_location) = (_locate(program, index) for index in receivers)
    if source.rank == destination.rank:
        return
    flow = Flow(source.rank, destination.rank, kind, min(one.stage, late.stage))
    reason = (
        f"messages cross in flow {flow}: sent {one} before {two}, but received for {early} "
        f"before {late}"
    )
    raise ProgramError(program, reason, early_location, source)


def _check_memory(program: Program, memory: float | Sequence[float], costs: StageCosts) -> None:
    caps = np.broadcast_to(np.asarray(memory, dtype=float), (program.num_ranks,))
    activations = activations_by_slot(program, costs)
    edges = program.table.rank_start.tolist()
    for rank, cap in enumerate(caps.tolist()):
        line = activations[edges[rank] : edges[rank + 1]]
        over = np.flatnonzero(line > cap + 1e-9)
        if len(over):
            location = Location(rank, int(over[0]))
            reason = (
                f"{_slot_name(program, location)} raises the activations to {line[over[0]]:g} "
                f"micro-batches of one rank's layers, but the cap is {cap:g}; this Program needs a "
                f"cap of {activations.max():g}"
            )
            raise ProgramError(program, reason, location)

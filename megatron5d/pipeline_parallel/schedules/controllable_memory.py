"""Schedules with controllable memory: a V of two chunks whose repeated building block determines
how long activations live.

Every micro-batch repeats one block of passes (forward and input gradient of two chunks, and their
weight gradients) in a period of six units. The number of units by which a pass shifts from one rank
to the next determines how long a rank holds the activation, and so its memory. Warm-up and
cool-down, where most of the period is idle, are then *squeezed*: every pass moves to the earliest
idle unit after its dependencies, unless the rank would hold more than in the steady state.

Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory (2405.15362), §3 and §4, which
    define the blocks; github.com/sail-sg/zero-bubble-pipeline-parallelism, scheduler/zbv_greedy.py,
    which defines the order of squeezing.
"""

from collections.abc import Sequence

from megatron5d.pipeline_parallel.program import (
    Action,
    Program,
    Slot,
    make_program,
    zigzag_placement,
)
from megatron5d.pipeline_parallel.registry import schedule

PERIOD = 6
PASSES = (("F", 0), ("F", 1), ("I", 1), ("I", 0))
"""Op and chunk of the passes of a micro-batch on one rank, in order."""
F0, F1, I1, I0, WEIGHT = range(5)
IDLE = -1

Times = list[list[list[int]]]
"""`[rank][pass][micro-batch]` the unit in which a pass runs; a WEIGHT frees the earliest I."""


@schedule("v_half", chunks=2)
def v_half(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """V-Half: half of 1F1B's memory, and no more than half of its bubble where F = I = W.

    Bubble (p − 1)(F + B)/2 less up to two units of F, B = I + W; activations p/2 + 1, rounded down.
    Source: Qi et al. 2024 (2405.15362), §3.2, Table 1.
    """
    p, pause = num_ranks, 3 * (num_ranks % 2 == 0)
    block = [
        [2 * r, 3 * p - r - 2, 3 * p + pause + 2 * r - 1, 6 * p + pause - r - 2] for r in range(p)
    ]
    return _from_block("v_half", block, num_microbatches)


@schedule("v_min", chunks=2)
def v_min(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """V-Min: a third of 1F1B's memory, and two thirds of its bubble where F = I = W.

    Bubble 2(p − 1)(F + B)/3 less up to one and a half units of F, B = I + W; activations (p + 1)/3
    + 1, rounded down. Its period has no slack: where F, I and W differ, or a message takes time,
    every micro-batch waits.
    Source: Qi et al. 2024 (2405.15362), §3.2, Table 1.
    """
    p, pause = num_ranks, 2 * (num_ranks % 3 == 0)
    block = [[r, 2 * p - r - 1, 2 * p + pause + r, 4 * p + pause - r - 1] for r in range(p)]
    return _from_block("v_min", block, num_microbatches)


def _from_block(name: str, block: Sequence[Sequence[int]], num_microbatches: int) -> Program:
    """Makes the Program of a block: `[rank][pass]` the units of the first micro-batch."""
    times = [
        [[unit + PERIOD * i for i in range(num_microbatches)] for unit in line] for line in block
    ]
    times = _without_idling(_squeezed([[*line, _weights(line)] for line in times]))
    times = _squeezed([line[:WEIGHT] for line in times])
    times = _without_idling([[*line, _weights(line)] for line in times])
    ranks = [_slots(rank, len(block), line[:WEIGHT]) for rank, line in enumerate(times)]
    return make_program(name, zigzag_placement(len(block)), [0] * num_microbatches, ranks)


def _grid(line: list[list[int]]) -> list[int]:
    """The pass in every unit of one rank, or IDLE."""
    grid = [IDLE] * (1 + max(units[-1] for units in line))
    for kind, units in enumerate(line):
        for unit in units:
            grid[unit] = kind
    return grid


def _weights(line: list[list[int]]) -> list[int]:
    """The units of the weight gradients: the first idle ones after their input gradients."""
    units, pending, grid = [], 0, _grid(line)
    for unit, kind in enumerate(grid):
        pending += kind in (I1, I0)
        if kind == IDLE and pending:
            units.append(unit)
            pending -= 1
    return units + [len(grid) + k for k in range(pending)]


class _Rank:
    """The passes and the memory of one rank while its passes move.

    Without explicit weight gradients, idle units run them.
    """

    def __init__(self, line: list[list[int]]) -> None:
        self.grid, self.weights_move = _grid(line), len(line) > WEIGHT
        # before each unit: activations, and input gradients whose weight gradient is pending
        self.activations, self.pending = [0] * (len(self.grid) + 1), [0] * (len(self.grid) + 1)
        for unit, kind in enumerate(self.grid):
            before = self.activations[unit], self.pending[unit]
            self.activations[unit + 1], self.pending[unit + 1] = self._after(kind, *before)

    def _after(self, kind: int, activations: int, pending: int) -> tuple[int, int]:
        """Activations and pending input gradients after a unit."""
        if kind in (F0, F1):
            return activations + 1, pending
        if kind in (I1, I0):
            return activations, pending + 1
        freed = kind == WEIGHT or (kind == IDLE and pending > 0 and not self.weights_move)
        return activations - freed, pending - freed

    def move(self, source: int, target: int, cap: int) -> bool:
        """Moves a pass to an earlier unit, unless the rank then holds more than `cap` chunks."""
        kinds = [self.grid[source], *self.grid[target + 1 : source], IDLE]
        states = [(self.activations[target], self.pending[target])]
        for kind in kinds:
            states.append(self._after(kind, *states[-1]))
        if max(activations for activations, _ in states) > cap:
            return False
        self.grid[target : source + 1] = kinds
        for unit, state in enumerate(states[1:], target + 1):
            self.activations[unit], self.pending[unit] = state
        # Later units change until the state is what it was before the move.
        for unit in range(source + 1, len(self.grid)):
            state = self._after(self.grid[unit], self.activations[unit], self.pending[unit])
            if state == (self.activations[unit + 1], self.pending[unit + 1]):
                break
            self.activations[unit + 1], self.pending[unit + 1] = state
        return True


def _in_order(times: Times) -> list[tuple[int, int, int, int]]:
    """(unit, rank, pass, micro-batch) of all passes by time."""
    return sorted(
        (unit, rank, kind, i)
        for rank, line in enumerate(times)
        for kind, units in enumerate(line)
        for i, unit in enumerate(units)
    )


def _dependencies(times: Times, rank: int, kind: int, i: int) -> list[int]:
    """Units of the passes that a pass waits for: earlier ones of its rank, and its sender."""
    line = times[rank]
    units = [line[kind][i - 1]] if i else []
    if kind == WEIGHT:
        return [*units, sorted(line[I1] + line[I0])[i]]
    if kind != F0:
        units.append(line[kind - 1][i])
    sender = rank - 1 if kind in (F0, I1) else rank + 1
    if 0 <= sender < len(times):
        units.append(times[sender][kind][i])
    return units


def _squeezed(times: Times) -> Times:
    """Moves passes of warm-up and cool-down to idle units, within the memory of the steady state.

    If `times` has no weight gradients, these run in idle units, and only the cool-down moves.
    """
    times = [[list(units) for units in line] for line in times]
    ranks = [_Rank(line) for line in times]
    cap = max(max(rank.activations) for rank in ranks)
    last = len(times[0][F0]) - 1
    warm_up, cool_down = True, False
    for unit, rank, kind, i in _in_order(times):
        warm_up = warm_up and (rank, kind) != (0, I0)
        if (warm_up and ranks[rank].weights_move) or cool_down:
            earliest = 1 + max(_dependencies(times, rank, kind, i), default=-1)
            idle = (u for u in range(earliest, unit) if ranks[rank].grid[u] == IDLE)
            times[rank][kind][i] = next((u for u in idle if ranks[rank].move(unit, u, cap)), unit)
        elif (kind, i) == (F0, last):
            cool_down = not warm_up
    return times


def _without_idling(times: Times) -> Times:
    """The earliest times that keep every rank's order, where every pass takes one unit."""
    earliest: Times = [[[0] * len(units) for units in line] for line in times]
    free = [0] * len(times)
    for _, rank, kind, i in _in_order(times):
        ready = [] if kind == WEIGHT else _dependencies(earliest, rank, kind, i)
        start = max([free[rank], *(1 + unit for unit in ready)])
        earliest[rank][kind][i] = start
        free[rank] = start + 1
    return earliest


def _slots(rank: int, num_ranks: int, line: list[list[int]]) -> list[Slot]:
    """The slots of a rank: passes as timed, and weight gradients in idle units, chunk 1 first."""
    stages = rank, 2 * num_ranks - 1 - rank
    slots: list[Slot] = []
    num_passes, num_weights, pending = [0] * WEIGHT, [0, 0], [0, 0]
    grid = _grid(line)
    for kind in [*grid, *[IDLE] * len(grid)]:
        if kind == IDLE:
            chunk = 1 if pending[1] else 0
            if pending[chunk]:
                slots.append((Action("W", stages[chunk], num_weights[chunk]),))
                num_weights[chunk] += 1
                pending[chunk] -= 1
            continue
        op, chunk = PASSES[kind]
        slots.append((Action(op, stages[chunk], num_passes[kind]),))
        num_passes[kind] += 1
        pending[chunk] += op == "I"
    return slots

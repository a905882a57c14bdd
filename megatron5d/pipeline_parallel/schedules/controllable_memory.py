"""Schedules with controllable memory: a V of two chunks whose repeated building block fixes how
long activations live.

Every micro-batch repeats one block of passes (forward and input gradient of two chunks, and their
weight gradients) in a period of six units. How many units a pass moves from one rank to the next
decides how long a rank holds the activation, and so its memory. Warm-up and cool-down, where most
of the period is idle, are then *squeezed*: every pass moves to the earliest idle unit behind what
it depends on, unless the rank would hold more than in the steady state.

Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory (2405.15362), §3 and §4, whose
    blocks these are;
github.com/sail-sg/zero-bubble-pipeline-parallelism, scheduler/zbv_greedy.py, whose order of
squeezing is kept.
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
"""What a rank does with a micro-batch, in this order: op and chunk."""
F0, F1, I1, I0, WEIGHT = range(5)
IDLE = -1

Times = list[list[list[int]]]
"""`[rank][pass][micro-batch]` the unit in which a pass runs; a pass WEIGHT frees whichever I came first."""


@schedule("v_half", chunks=2)
def v_half(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """Returns V-Half: half of 1F1B's memory, and no more than half of its bubble where F = I = W.

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
    """Returns V-Min: a third of 1F1B's memory, and two thirds of its bubble where F = I = W.

    Bubble 2(p − 1)(F + B)/3 less up to one and a half units of F, B = I + W; activations (p + 1)/3
    + 1, rounded down. Nothing slack is left in its period: where F, I and W differ, or a message
    takes time, every micro-batch waits.
    Source: Qi et al. 2024 (2405.15362), §3.2, Table 1.
    """
    p, pause = num_ranks, 2 * (num_ranks % 3 == 0)
    block = [[r, 2 * p - r - 1, 2 * p + pause + r, 4 * p + pause - r - 1] for r in range(p)]
    return _from_block("v_min", block, num_microbatches)


def _from_block(name: str, block: Sequence[Sequence[int]], num_microbatches: int) -> Program:
    """Returns the Program of a block: `[rank][pass]` the units of the first micro-batch."""
    times = [
        [[unit + PERIOD * i for i in range(num_microbatches)] for unit in line] for line in block
    ]
    times = _without_idling(_squeezed([[*line, _weights(line)] for line in times]))
    times = _squeezed([line[:WEIGHT] for line in times])
    times = _without_idling([[*line, _weights(line)] for line in times])
    ranks = [_slots(rank, len(block), line[:WEIGHT]) for rank, line in enumerate(times)]
    return make_program(name, zigzag_placement(len(block)), [0] * num_microbatches, ranks)


def _grid(line: list[list[int]]) -> list[int]:
    """Returns the pass in every unit of one rank, or IDLE."""
    grid = [IDLE] * (1 + max(units[-1] for units in line))
    for kind, units in enumerate(line):
        for unit in units:
            grid[unit] = kind
    return grid


def _weights(line: list[list[int]]) -> list[int]:
    """Returns the units of the weight gradients: the first idle ones behind their input
    gradients."""
    units, pending, grid = [], 0, _grid(line)
    for unit, kind in enumerate(grid):
        pending += kind in (I1, I0)
        if kind == IDLE and pending:
            units.append(unit)
            pending -= 1
    return units + [len(grid) + k for k in range(pending)]


class _Rank:
    """What one rank does and holds while its passes move; without explicit weight gradients, idle
    units run them."""

    def __init__(self, line: list[list[int]]) -> None:
        self.grid, self.weights_move = _grid(line), len(line) > WEIGHT
        self.held, self.pending = [0] * (len(self.grid) + 1), [0] * (len(self.grid) + 1)
        for unit, kind in enumerate(self.grid):
            self.held[unit + 1], self.pending[unit + 1] = self._after(unit, kind)

    def _after(self, unit: int, kind: int, at: tuple[int, int] | None = None) -> tuple[int, int]:
        """Returns activations held and input gradients pending behind a unit."""
        held, pending = at or (self.held[unit], self.pending[unit])
        if kind in (F0, F1):
            return held + 1, pending
        if kind in (I1, I0):
            return held, pending + 1
        freed = kind == WEIGHT or (kind == IDLE and pending > 0 and not self.weights_move)
        return held - freed, pending - freed

    def move(self, source: int, target: int, cap: int) -> bool:
        """Moves a pass to an earlier unit, unless the rank then holds more than `cap` chunks."""
        kind = self.grid[source]
        moved = [kind, *self.grid[target + 1 : source], IDLE]
        states = [(self.held[target], self.pending[target])]
        for unit, other in enumerate(moved, target):
            states.append(self._after(unit, other, states[-1]))
        if max(held for held, _ in states) > cap:
            return False
        self.grid[target : source + 1] = moved
        for unit, state in enumerate(states[1:], target + 1):
            self.held[unit], self.pending[unit] = state
        unit = source + 1
        while unit < len(self.grid):
            state = self._after(unit, self.grid[unit])
            if state == (self.held[unit + 1], self.pending[unit + 1]):
                break
            self.held[unit + 1], self.pending[unit + 1] = state
            unit += 1
        return True


def _in_order(times: Times) -> list[tuple[int, int, int, int]]:
    """Returns (unit, rank, pass, micro-batch) of all passes by time."""
    return sorted(
        (unit, rank, kind, i)
        for rank, line in enumerate(times)
        for kind, units in enumerate(line)
        for i, unit in enumerate(units)
    )


def _behind(times: Times, rank: int, kind: int, i: int) -> list[int]:
    """Returns the times of what a pass follows: its own rank's earlier passes, and the neighbour's
    that sends to it."""
    mine = times[rank]
    found = [mine[kind][i - 1]] if i else []
    if kind == WEIGHT:
        return [*found, sorted(mine[I1] + mine[I0])[i]]
    if kind != F0:
        found.append(mine[kind - 1][i])
    sender = rank - 1 if kind in (F0, I1) else rank + 1
    if 0 <= sender < len(times):
        found.append(times[sender][kind][i])
    return found


def _squeezed(times: Times) -> Times:
    """Returns the times in which passes of warm-up and cool-down have moved to idle units, as the
    memory admits.

    Where `times` has no weight gradients, these run in idle units, and only the cool-down moves.
    """
    times = [[list(units) for units in line] for line in times]
    ranks = [_Rank(line) for line in times]
    cap = max(max(rank.held) for rank in ranks)
    last = len(times[0][F0]) - 1
    warm_up, cool_down = True, False
    for unit, rank, kind, i in _in_order(times):
        warm_up = warm_up and (rank, kind) != (0, I0)
        if (warm_up and ranks[rank].weights_move) or cool_down:
            earliest = 1 + max(_behind(times, rank, kind, i), default=-1)
            idle = (u for u in range(earliest, unit) if ranks[rank].grid[u] == IDLE)
            times[rank][kind][i] = next((u for u in idle if ranks[rank].move(unit, u, cap)), unit)
        elif (kind, i) == (F0, last):
            cool_down = not warm_up
    return times


def _without_idling(times: Times) -> Times:
    """Returns the earliest times that keep every rank's order, where every pass takes one unit."""
    found: Times = [[[0] * len(units) for units in line] for line in times]
    free = [0] * len(times)
    for _, rank, kind, i in _in_order(times):
        behind = [] if kind == WEIGHT else _behind(found, rank, kind, i)
        start = found[rank][kind][i] = (
            max(free[rank], *(1 + unit for unit in behind)) if behind else free[rank]
        )
        free[rank] = start + 1
    return found


def _slots(rank: int, num_ranks: int, line: list[list[int]]) -> list[Slot]:
    """Returns what a rank runs: passes as timed, weight gradients in idle units, those of chunk 1
    first."""
    stages = rank, 2 * num_ranks - 1 - rank
    slots: list[Slot] = []
    done, weights, pending = [0] * WEIGHT, [0, 0], [0, 0]
    grid = _grid(line)
    for kind in [*grid, *[IDLE] * len(grid)]:
        if kind == IDLE:
            chunk = 1 if pending[1] else 0
            if pending[chunk]:
                slots.append((Action("W", stages[chunk], weights[chunk]),))
                weights[chunk] += 1
                pending[chunk] -= 1
            continue
        op, chunk = PASSES[kind]
        slots.append((Action(op, stages[chunk], done[kind]),))
        done[kind] += 1
        pending[chunk] += op == "I"
    return slots

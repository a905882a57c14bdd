"""How a fault in a Program is told: its place, its reason, and the schedule around it."""

from collections.abc import Sequence

import numpy as np

from megatron5d.pipeline_parallel.program import Action, Program
from megatron5d.pipeline_parallel.schedule_csv import slot_text

SHOWN = 3
"""How many slots before and after a fault its message shows."""


class ProgramError(ValueError):
    """A Program is wrong at one place.

    Args:
        program: the Program.
        rank: the rank of the fault.
        position: the slot on that rank; for a missing action, where it would be expected.
        reason: what is wrong, in words.
        others: further (rank, position) to show, such as the other end of a channel.
    """

    def __init__(
        self, program: Program, rank: int, position: int, reason: str, others: Sequence[tuple[int, int]] = ()
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
    """Returns the slots around one place, the place itself in brackets; `[]` where something is missing at the end."""
    cells = [slot_text(slot) for slot in program.ranks[rank]]
    before, here, after = cells[:position], "".join(cells[position : position + 1]), cells[position + 1 :]
    shown = ["…"] * (len(before) > SHOWN) + before[-SHOWN:] + [f"[{here}]"] + after[:SHOWN]
    return f"rank {rank}: {' '.join(shown)}{' …' if len(after) > SHOWN else ''}"

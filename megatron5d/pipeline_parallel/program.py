"""A pipeline schedule as data: which rank holds which stage, and what each rank does in which
order.

A stage is one slice of the model (stages run 0 … S−1 from the embedding to the loss). A `Placement`
assigns every stage to a rank; in a bidirectional schedule each stage has two copies, and
micro-batches of direction 0 and 1 take different routes through the ranks. A `Program` adds, for
each rank, an ordered list of slots; a slot is one action, or two that run interleaved so that the
communication of one hides under the compute of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # Functions below import numpy themselves, so that checking a configuration does not need it.
    import numpy as np

OPS = ("F", "I", "W", "B")
"""F forward; I backward of the input; W backward of the weights; B both at once, in one action."""
F, I, W, B = range(len(OPS))  # indices into OPS


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    op: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


Slot = tuple[Action, ...]


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage."""

    # `route[direction][stage]` is the rank; one direction, or two where every stage has two copies
    route: tuple[tuple[int, ...], ...]
    num_ranks: int  # pipeline ranks; all hold equally many stages

    @property
    def num_stages(self) -> int:
        return len(self.route[0])

    @property
    def copies(self) -> int:
        """Number of copies of every parameter over the pipeline."""
        return len(self.route)

    @property
    def chunks(self) -> int:
        """Number of stages in one rank's share (1/num_ranks) of the model, a second copy not
        counted."""
        return self.num_stages // self.num_ranks

    def stages_of(self, rank: int) -> list[tuple[int, int]]:
        """The local chunks of `rank`, as (direction, stage) pairs in this order."""
        return [
            (direction, stage)
            for direction, route in enumerate(self.route)
            for stage, holder in enumerate(route)
            if holder == rank
        ]


def loop_placement(num_ranks: int, chunks: int = 1) -> Placement:
    """The placement of stage s on rank s mod num_ranks (0 1 2 3 0 1 2 3)."""
    return Placement((tuple(range(num_ranks)) * chunks,), num_ranks)


def zigzag_placement(num_ranks: int, chunks: int = 2) -> Placement:
    """The placement that turns back at both ends (0 1 2 3 3 2 1 0 0 1 …); two chunks are the V."""
    down = tuple(range(num_ranks))
    legs = (down if chunk % 2 == 0 else down[::-1] for chunk in range(chunks))
    return Placement((tuple(rank for leg in legs for rank in leg),), num_ranks)


def mirrored_placement(num_ranks: int) -> Placement:
    """The bidirectional placement: stage s on rank s, and its copy on rank num_ranks − 1 − s."""
    down = tuple(range(num_ranks))
    return Placement((down, down[::-1]), num_ranks)


def placement_name(placement: Placement) -> str:
    """Name of a placement: loop, zigzag or mirrored, else `custom` with its routes."""
    num_ranks, chunks = placement.num_ranks, placement.chunks
    known = {
        "loop": loop_placement(num_ranks, chunks),
        "zigzag": zigzag_placement(num_ranks, chunks),
        "mirrored": mirrored_placement(num_ranks),
    }
    routes = " and ".join(" ".join(map(str, route)) for route in placement.route)
    return next((name for name, other in known.items() if other == placement), f"custom ({routes})")


class Table(NamedTuple):
    """Every action of a Program as integer arrays, rank by rank in program order."""

    # [num_ranks + 1] the slots of rank r are rank_start[r] … rank_start[r + 1] − 1
    rank_start: np.ndarray
    # [num_slots + 1] the actions of slot k are slot_start[k] … slot_start[k + 1] − 1
    slot_start: np.ndarray
    op: np.ndarray  # [num_actions] index into OPS
    stage: np.ndarray  # [num_actions]
    microbatch: np.ndarray  # [num_actions]

    @property
    def slot(self) -> np.ndarray:
        """`[num_actions]` the slot of every action."""
        import numpy as np

        return np.repeat(np.arange(len(self.slot_start) - 1), np.diff(self.slot_start))

    @property
    def rank(self) -> np.ndarray:
        """`[num_actions]` the rank of every action."""
        import numpy as np

        return np.repeat(
            np.arange(len(self.rank_start) - 1), np.diff(self.slot_start[self.rank_start])
        )


@dataclass(frozen=True)
class Program:
    """What every pipeline rank does in one step, as an ordered list of slots."""

    name: str  # of the Program in tables and messages
    placement: Placement  # which rank holds which stage
    # the direction of each micro-batch; all 0 where every stage has one copy
    direction: tuple[int, ...]
    # `ranks[r]` is the tuple of slots of rank r; a slot is one Action or two overlapped ones
    ranks: tuple[tuple[Slot, ...], ...]

    def __hash__(self) -> int:  # without the actions, of which there are many
        return hash((self.name, self.placement, self.direction))

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_microbatches(self) -> int:
        return len(self.direction)

    @property
    def copies(self) -> int:
        return self.placement.copies

    @property
    def chunks(self) -> int:
        return self.placement.chunks

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that runs `stage` for `microbatch`."""
        return self.placement.route[self.direction[microbatch]][stage]

    @cached_property
    def table(self) -> Table:
        """The same Program as integer arrays."""
        import numpy as np

        slots = [slot for line in self.ranks for slot in line]
        actions = [action for slot in slots for action in slot]
        code = {op: index for index, op in enumerate(OPS)}
        return Table(
            rank_start=_offsets(len(line) for line in self.ranks),
            slot_start=_offsets(len(slot) for slot in slots),
            op=np.array([code[action[0]] for action in actions], dtype=np.int8),
            stage=np.array([action[1] for action in actions], dtype=np.int32),
            microbatch=np.array([action[2] for action in actions], dtype=np.int32),
        )

    @cached_property
    def cell(self) -> np.ndarray:
        """`[num_actions]` stage · num_microbatches + micro-batch of every action of the table."""
        import numpy as np

        return self.table.stage.astype(np.int64) * self.num_microbatches + self.table.microbatch

    @cached_property
    def action_direction(self) -> np.ndarray:
        """`[num_actions]` direction of every action of the table."""
        import numpy as np

        return np.array(self.direction, dtype=np.int64)[self.table.microbatch]


def make_program(
    name: str, placement: Placement, direction: Sequence[int], ranks: Iterable[Iterable[Slot]]
) -> Program:
    """Makes a Program of any iterables of slots."""
    return Program(name, placement, tuple(direction), tuple(tuple(slots) for slots in ranks))


def program_from_table(
    name: str, placement: Placement, direction: Sequence[int], table: Table
) -> Program:
    """Makes the Program of a table, for schedules that compiled code has made."""
    columns = (table.op.tolist(), table.stage.tolist(), table.microbatch.tolist())
    actions = [Action(OPS[op], stage, microbatch) for op, stage, microbatch in zip(*columns)]
    edges = table.slot_start.tolist()
    slots = [tuple(actions[start:stop]) for start, stop in zip(edges, edges[1:])]
    edges = table.rank_start.tolist()
    ranks = (slots[start:stop] for start, stop in zip(edges, edges[1:]))
    return make_program(name, placement, direction, ranks)


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    import numpy as np

    return np.concatenate([[0], np.cumsum(np.fromiter(lengths, dtype=np.int64))]).astype(np.int64)

"""A Program as text: PyTorch's CSV, one row a rank and one cell an action, so that schedules
interchange.

A cell is `2F0` (stage, op, micro-batch); two overlapped actions are `(0F1;7B0)OVERLAP_F_B`. That is
PyTorch's only name for a pair, and its runtime runs whatever stands in the brackets, so every pair
is written so; any `OVERLAP_…` is read. PyTorch also writes empty cells and communication (SEND_F,
RECV_F, UNSHARD, …): here both follow from the actions, and are passed over. The placement and the
directions are inferred from where each micro-batch meets each stage.

Source: torch/distributed/pipelining/schedules.py, `_Action` and
    `_PipelineScheduleRuntime._load_csv`.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from megatron5d.pipeline_parallel.program import Action, Placement, Program, Slot, make_program

_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP\w*")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")


def slot_text(slot: Slot) -> str:
    """Returns the cell of one slot."""
    if len(slot) < 2:
        return "".join(map(str, slot))
    return f"({';'.join(str(action) for action in slot)})OVERLAP_F_B"


def write_program(program: Program) -> str:
    """Returns the Program as CSV, one row a rank."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [slot_text(slot) for slot in line] for line in program.ranks
    )
    return out.getvalue()


def read_file(
    path: Path, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> Program:
    """Returns the Program in a CSV file, called by its path; see `read_program`, also for what is
    refused.

    Args:
        chunks: stages per rank and copy that it must have (`parallel.vpp`); None = any.
    """
    # bytes that are no text end up in no action
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    program = read_program(text, str(path), num_ranks, num_microbatches)
    if chunks not in (None, found := program.placement.chunks):
        raise ValueError(
            f"{path} cuts the layers of a rank into {found}, but parallel.vpp={chunks}; set parallel.vpp={found}"
        )
    return program


def read_program(
    text: str, name: str, num_ranks: int | None = None, num_microbatches: int | None = None
) -> Program:
    """Returns the Program that a CSV describes, complete or not: `verify` judges it.

    Args:
        name: what the Program is called in messages, such as the file's name.
        num_ranks: pp, where known; otherwise the number of rows.
        num_microbatches: where known; otherwise the highest micro-batch + 1.

    Raises:
        ValueError: A cell that is no action; a number of rows other than `num_ranks`; a micro-batch
            beyond `num_microbatches`; more stages than actions; stages that do not divide over the
            ranks.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise ValueError(f"{name} is no CSV: {error}") from None
    ranks = [_read_row(row, rank, name) for rank, row in enumerate(rows)]
    actions = [
        (rank, action) for rank, line in enumerate(ranks) for slot in line for action in slot
    ]
    if not actions:
        raise ValueError(f"{name} holds no action: expected one row a rank with cells such as 2F0")
    if num_ranks is not None and len(ranks) != num_ranks:
        raise ValueError(
            f"{name} has {len(ranks)} rows, one a rank, but pp={num_ranks}; set parallel.pp={len(ranks)}"
        )
    num_stages = _num_stages(action for _, action in actions)
    if num_stages > len(actions):
        raise ValueError(
            f"{name} has stage {num_stages - 1}, but only {len(actions)} actions: each stage needs some"
        )
    seen = 1 + max(action.microbatch for _, action in actions)
    if num_microbatches is not None and seen > num_microbatches:
        rank, action = next(
            (rank, action) for rank, action in actions if action.microbatch >= num_microbatches
        )
        raise ValueError(
            f"{name}, rank {rank}: {action} is beyond num_microbatches={num_microbatches}; set it to {seen}"
        )
    if num_stages % len(ranks):
        raise ValueError(
            f"{name} has {num_stages} stages on {len(ranks)} ranks: a multiple of pp is needed, "
            f"such as {-(-num_stages // len(ranks)) * len(ranks)}"
        )
    placement, direction = _infer_routes(actions, len(ranks), num_stages, num_microbatches or seen)
    return make_program(name, placement, direction, ranks)


def _read_row(row: list[str], rank: int, name: str) -> list[Slot]:
    slots = []
    for column, cell in enumerate(part.strip() for part in row):
        pair = _PAIR.fullmatch(cell)
        parts = [part.strip() for part in pair[1].split(";")] if pair else [cell]
        found = [_ACTION.fullmatch(part) for part in parts]
        if all(found) and len(found) <= 2:
            slots.append(
                tuple(Action(match[2], int(match[1]), int(match[3])) for match in found if match)
            )
        elif cell and not _COMMUNICATION.fullmatch(cell):
            raise ValueError(
                f"{name}, rank {rank}, column {column}: {cell[:40]!r} is no action; write "
                "<stage><F|I|W|B><micro-batch> such as 2F0, or (0F1;7B0)OVERLAP_F_B"
            )
    return slots


def _num_stages(actions: Iterable[Action]) -> int:
    """Returns the number of stages; one that appears far less often than the others is a slip for
    `verify` to find."""
    counts = Counter(action.stage for action in actions)
    most = max(counts.values())
    return 1 + max(stage for stage, count in counts.items() if 2 * count >= most)


def _infer_routes(
    actions: list[tuple[int, Action]], num_ranks: int, num_stages: int, num_microbatches: int
) -> tuple[Placement, list[int]]:
    """Returns the placement and each micro-batch's direction, by majority, so that a misplaced
    action stands out."""
    holders: list[Counter[int]] = [Counter() for _ in range(num_stages)]
    meets: list[Counter[tuple[int, int]]] = [Counter() for _ in range(num_microbatches)]
    for rank, action in actions:
        if action.stage >= num_stages:
            continue
        holders[action.stage][rank] += 1
        meets[action.microbatch][action.stage, rank] += 1
    paths = Counter(path for path in (_path(found, num_stages) for found in meets) if path)
    if paths:
        down = paths.most_common(1)[0][0]
    else:
        down = tuple(held.most_common(1)[0][0] if held else 0 for held in holders)
    back = tuple(num_ranks - 1 - rank for rank in down)
    down, back = min(down, back), max(down, back)
    route = (down, back)
    votes = [
        [sum(found[stage, line[stage]] for stage in range(num_stages)) for line in route]
        for found in meets
    ]
    direction = [int(there > here) for here, there in votes]
    if len(set(direction)) == 2:
        return Placement(route, num_ranks), direction
    return Placement((route[direction[0]],), num_ranks), [0] * num_microbatches


def _path(found: Counter[tuple[int, int]], num_stages: int) -> tuple[int, ...] | None:
    """Returns the rank of every stage for one micro-batch, or None where some stage has none or
    several."""
    rank_of = dict(found.keys())
    return (
        tuple(rank_of[stage] for stage in range(num_stages))
        if len(found) == num_stages == len(rank_of)
        else None
    )

"""A Program as text: PyTorch's CSV, one row per rank and one cell per action, so that schedules
interchange.

A cell is `2F0` (stage, op, micro-batch); two overlapped actions are `(0F1;7B0)OVERLAP_F_B`.
PyTorch's runtime knows no other name for a pair and runs any two actions in the brackets, so every
pair is written with this name; any `OVERLAP_…` is read. PyTorch also writes empty cells and
communication (SEND_F, RECV_F, UNSHARD, …): here both follow from the actions, so they are skipped.
The placement and the directions are inferred from the ranks on which each micro-batch meets each
stage.

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
    """The cell of one slot."""
    if len(slot) < 2:
        return "".join(map(str, slot))
    return f"({';'.join(str(action) for action in slot)})OVERLAP_F_B"


def write_program(program: Program) -> str:
    """The Program as CSV, one row per rank."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [slot_text(slot) for slot in line] for line in program.ranks
    )
    return out.getvalue()


def read_file(
    path: Path, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> Program:
    """Reads the Program in a CSV file and names it after its path.

    Args:
        path: of the file.
        num_ranks: pp.
        num_microbatches: of one step.
        chunks: stages per rank and copy that it must have (`parallel.vpp`); None = any.

    Raises:
        ValueError: as `read_program`, or another number of chunks.
    """
    # Bytes that are not UTF-8 end up in cells that are not actions, whose error names the cell.
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    program = read_program(text, str(path), num_ranks, num_microbatches)
    if chunks not in (None, program.chunks):
        raise ValueError(
            f"{path} needs parallel.vpp={program.chunks} (got {chunks}); "
            f"set parallel.vpp={program.chunks}"
        )
    return program


def read_program(
    text: str, name: str, num_ranks: int | None = None, num_microbatches: int | None = None
) -> Program:
    """Reads the Program that a CSV describes, complete or not: `verify` judges it.

    Args:
        text: the CSV.
        name: of the Program in messages, such as the file's path.
        num_ranks: pp, where known; otherwise the number of rows.
        num_microbatches: where known; otherwise the highest micro-batch + 1.

    Raises:
        ValueError: a cell that is not an action; a number of rows other than `num_ranks`; a
            micro-batch beyond `num_microbatches`; more stages than actions; stages that do not
            divide over the ranks.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise ValueError(f"{name} is not a CSV file: {error}") from None
    ranks = [_read_row(row, rank, name) for rank, row in enumerate(rows)]
    actions = [
        (rank, action) for rank, line in enumerate(ranks) for slot in line for action in slot
    ]
    if not actions:
        raise ValueError(f"{name} has no actions: expected one row per rank with cells such as 2F0")
    if num_ranks is not None and len(ranks) != num_ranks:
        raise ValueError(
            f"{name} has {len(ranks)} rows, one per rank, but pp={num_ranks}; "
            f"set parallel.pp={len(ranks)}"
        )
    num_stages = _num_stages(action for _, action in actions)
    if num_stages > len(actions):
        raise ValueError(
            f"{name} has stage {num_stages - 1}, but only {len(actions)} actions: each stage "
            "needs some"
        )
    needed = 1 + max(action.microbatch for _, action in actions)
    if num_microbatches is not None and needed > num_microbatches:
        rank, action = next(entry for entry in actions if entry[1].microbatch >= num_microbatches)
        raise ValueError(
            f"{name}, rank {rank}: {action} is beyond num_microbatches={num_microbatches}; "
            f"set it to {needed}"
        )
    if num_stages % len(ranks):
        raise ValueError(
            f"{name} has {num_stages} stages on {len(ranks)} ranks: the number must be a multiple "
            f"of pp, such as {-(-num_stages // len(ranks)) * len(ranks)}"
        )
    placement, direction = _infer_routes(
        actions, len(ranks), num_stages, num_microbatches or needed
    )
    return make_program(name, placement, direction, ranks)


def _read_row(row: list[str], rank: int, name: str) -> list[Slot]:
    slots = []
    for column, cell in enumerate(map(str.strip, row)):
        pair = _PAIR.fullmatch(cell)
        texts = pair[1].split(";") if pair else [cell]
        matches = [_ACTION.fullmatch(text.strip()) for text in texts]
        if all(matches) and len(matches) <= 2:
            slots.append(
                tuple(Action(match[2], int(match[1]), int(match[3])) for match in matches if match)
            )
        elif cell and not _COMMUNICATION.fullmatch(cell):
            raise ValueError(
                f"{name}, rank {rank}, column {column}: {cell[:40]!r} is not an action; write "
                "<stage><F|I|W|B><micro-batch> such as 2F0, or (0F1;7B0)OVERLAP_F_B"
            )
    return slots


def _num_stages(actions: Iterable[Action]) -> int:
    """Number of stages, not counting one that appears far less often than the others: a typo,
    which `verify` reports."""
    counts = Counter(action.stage for action in actions)
    most = max(counts.values())
    return 1 + max(stage for stage, count in counts.items() if 2 * count >= most)


def _infer_routes(
    actions: list[tuple[int, Action]], num_ranks: int, num_stages: int, num_microbatches: int
) -> tuple[Placement, list[int]]:
    """The placement and each micro-batch's direction, by majority, so that a misplaced action
    stands out."""
    holders: list[Counter[int]] = [Counter() for _ in range(num_stages)]
    meetings: list[Counter[tuple[int, int]]] = [Counter() for _ in range(num_microbatches)]
    for rank, action in actions:
        if action.stage < num_stages:
            holders[action.stage][rank] += 1
            meetings[action.microbatch][action.stage, rank] += 1
    paths = Counter(path for path in (_path(met, num_stages) for met in meetings) if path)
    if paths:
        path = paths.most_common(1)[0][0]
    else:
        path = tuple(counts.most_common(1)[0][0] if counts else 0 for counts in holders)
    # The lower route is direction 0, its mirror image direction 1.
    route = tuple(sorted((path, tuple(num_ranks - 1 - rank for rank in path))))
    direction = []
    for met in meetings:
        votes = [sum(met[stage, line[stage]] for stage in range(num_stages)) for line in route]
        direction.append(int(votes[1] > votes[0]))
    if len(set(direction)) == 2:
        return Placement(route, num_ranks), direction
    return Placement((route[direction[0]],), num_ranks), [0] * num_microbatches


def _path(met: Counter[tuple[int, int]], num_stages: int) -> tuple[int, ...] | None:
    """The rank of every stage for one micro-batch; None if some stage has none or several."""
    rank_of = dict(met.keys())
    if not len(met) == num_stages == len(rank_of):
        return None
    return tuple(rank_of[stage] for stage in range(num_stages))

"""Did all ranks of a group call the same collectives with the same shapes?

Each rank writes a line to a file before it calls a collective; the files are compared afterwards. gloo itself returns
garbage for shapes that do not match, and waits forever for a rank that calls something else. torch's own check
(TORCH_DISTRIBUTED_DEBUG=DETAIL) exchanges a description before every collective, which costs more than the collective
and makes it blocking. Writing a line takes microseconds and changes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

# The methods of a process group that all its ranks must call together: all but send and receive.
_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "_allgather_base",
    "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "barrier",
    "monitored_barrier",
)  # fmt: skip
_UNEVEN = ("alltoall_base", "all_to_all_single")  # each rank may send and receive other numbers of rows
_ROOTED = {"gather": 1, "scatter": 0}  # index of the argument that every rank gives, not only the root


def begin(folder: Path, rank: int) -> None:
    """Appends a line to a file before each later collective of this process."""
    file = os.open(_notes(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for name in _COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _noted(name, getattr(dist.ProcessGroup, name), file))


def _noted(name: str, method: Callable[..., Any], file: int) -> Callable[..., Any]:
    @wraps(method)
    def call(group, *args, **kwargs):
        line = [group.group_name, dist.get_process_group_ranks(group), *_described(name, group.size(), args, kwargs)]
        os.write(file, (json.dumps(line) + "\n").encode())
        return method(group, *args, **kwargs)

    return call


def _described(name: str, size: int, args: tuple, kwargs: dict) -> tuple[str, list[list[int]]]:
    """Returns a call as text that must be the same on all ranks; for uneven ones also the rows to and from each
    rank."""
    rows: list[list[int]] = []
    if name in _UNEVEN:
        out, x, from_each, to_each = args[:4]
        rows = [list(split) or [t.shape[0] // size] * size for split, t in ((to_each, x), (from_each, out))]
        shapes = [f"{_dtype(x)}[:, {', '.join(map(str, x.shape[1:]))}]"]
    else:
        shapes = [f"{_dtype(t)}{list(t.shape)}" for t in _tensors(args[_ROOTED[name]] if name in _ROOTED else args)]
    options = [*args, *kwargs.values()]
    root = [f"root {o.rootRank}" for o in options if hasattr(o, "rootRank")]
    op = [o.reduceOp.op.name for o in options if hasattr(o, "reduceOp")]
    return " ".join([name, *shapes, *op, *root]), rows


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _notes(folder: Path, rank: int) -> Path:
    return folder / f"collectives{rank}"


def first_mismatch(folder: Path, world: int, ended: bool) -> str | None:
    """Compares the notes of all ranks, group by group in the order of the calls.

    Args:
        folder: of the notes; ranks without a process group have none.
        world: number of ranks.
        ended: every rank has finished, so that all of them must have made the same number of calls.

    Returns:
        None where all calls match, else a message: the first call of a group in which its ranks differ, and what each
        of them called.
    """
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list]] = {}
    for rank in range(world):
        path = _notes(folder, rank)
        for line in path.read_text().splitlines() if path.exists() else ():
            name, members, text, rows = json.loads(line)
            key = name, tuple(members)
            calls.setdefault(key, {member: [] for member in members})[rank].append((text, rows))
    for (name, members), lists in calls.items():
        for number, row in enumerate(zip_longest(*(lists[member] for member in members))):
            if not _agree(row, ended):
                told = "; ".join(
                    f"rank {rank}: {' '.join(str(part) for part in call if part) if call else 'nothing'}"
                    for rank, call in zip(members, row)
                )
                return f"collectives mismatch, call {number} of group {name} of ranks {list(members)}: {told}"
    return None


def _agree(row: tuple[tuple[str, list[list[int]]] | None, ...], ended: bool) -> bool:
    """Returns whether the ranks' calls match: the same text, and rank i sends to j as many rows as j expects from i.

    Args:
        row: the call of each rank; None where it has not made one (yet).
        ended: a missing call is a mismatch.
    """
    made = {rank: call for rank, call in enumerate(row) if call is not None}
    if ended and len(made) < len(row):
        return False
    if len({text for text, _ in made.values()}) > 1:
        return False
    splits = {rank: rows for rank, (_, rows) in made.items() if rows}
    return all(splits[i][0][j] == splits[j][1][i] for i in splits for j in splits)

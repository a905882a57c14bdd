"""The axes of this process: two views of one world, each line of ranks with its process group."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron5d.topology.axis import Axis, Recorder
from megatron5d.topology.grid import DENSE_LINES, EXPERT_LINES, Sizes, dense_grid, expert_grid

_PAIRED = ("dp_cp", "dp_shard_cp", "dp_replicate", "stage", "edp", "edp_shard", "edp_replicate")


class Mesh(Mapping[str, Axis]):
    """`mesh["tp"]`: the Axis of that name for this rank.

    Dense lines: tp, cp, pp, dp, dp_replicate, dp_cp (data × context), dp_shard_cp, cp_tp (who shares a micro-batch),
    stage (everybody with the same layers); expert lines: ep (ep_outer × ep_inner), etp, ep_etp, ep_inner_etp, edp,
    edp_replicate, edp_shard;
    `tp_kv`: the tensor-parallel ranks that hold copies of the same KV heads; `world`: everybody. The cp line is
    cp_outer × cp_inner ranks, inner fastest (context_parallel/layout.py).
    Where mirrored pipeline ranks (r and pp-1-r) hold parameters together: dp_cp_pair, dp_shard_cp_pair,
    dp_replicate_pair, stage_pair, edp_pair, edp_shard_pair and edp_replicate_pair, the lines of both.
    """

    def __init__(self, sizes: Sizes, axes: dict[str, Axis]) -> None:
        self.sizes = sizes
        self._axes = axes

    def __getitem__(self, name: str) -> Axis:
        return self._axes[name]

    def __iter__(self):
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def __repr__(self) -> str:
        return " ".join(map(repr, self._axes.values()))


def lines_of(sizes: Sizes, rank: int, num_kv_heads: int | None = None) -> dict[str, tuple[int, ...]]:
    """The ranks of every line through `rank`, by axis name; pure integers."""
    dense = dense_grid(sizes)
    expert = expert_grid(sizes, dense)
    lines = {name: dense.line(rank, *along) for name, along in DENSE_LINES.items()}
    lines |= {name: expert.line(rank, *along) for name, along in EXPERT_LINES.items()}
    lines["tp_kv"] = _kv_copies(lines["tp"], rank, num_kv_heads)
    for name in ("cp", "ep"):
        lines[f"{name}_outer"], lines[f"{name}_inner"] = _parts(lines[name], rank, getattr(sizes, f"{name}_inner"))
    _, lines["ep_inner_etp"] = _parts(lines["ep_etp"], rank, sizes.ep_inner * sizes.etp)
    lines["world"] = tuple(range(sizes.world))
    return lines


def pair_lines_of(sizes: Sizes, rank: int) -> dict[str, tuple[int, ...]]:
    """The lines of _PAIRED through a pipeline rank and through its mirror image as one; its own at the middle."""
    dense = dense_grid(sizes)
    mirror = dense.line(rank, "pp")[sizes.pp - 1 - dense.coordinate(rank, "pp")]
    mine, theirs = lines_of(sizes, rank), lines_of(sizes, mirror)
    return {f"{name}_pair": tuple(sorted({*mine[name], *theirs[name]})) for name in _PAIRED}


def _parts(line: tuple[int, ...], rank: int, inner: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The outer and the inner line of a rank on a line of outer × inner ranks, inner fastest."""
    first, place = divmod(line.index(rank), inner)
    return line[place::inner], line[first * inner : (first + 1) * inner]


def _kv_copies(tp: tuple[int, ...], rank: int, num_kv_heads: int | None) -> tuple[int, ...]:
    """Neighbours on the tp line that hold the same KV head, where there are fewer heads than ranks."""
    copies = max(1, len(tp) // num_kv_heads) if num_kv_heads else 1
    first = tp.index(rank) // copies * copies
    return tp[first : first + copies]


def group_settings(timeout_s: float | None) -> dict[str, Any]:
    """What every group but the world's is created with; `timeout_s` as of `build_mesh`."""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    return {"use_local_synchronization": True, "timeout": timeout}


def build_mesh(
    sizes: Sizes,
    rank: int = 0,
    *,
    num_kv_heads: int | None = None,
    pairs: bool = False,
    recorder: Recorder | None = None,
    timeout_s: float | None = None,
) -> Mesh:
    """Creates the process groups of all lines through this rank.

    Every rank must call it with the same sizes, after `init_process_group` (at world size 1 without it).
    Groups are created eagerly and in one order on all ranks; lines with the same ranks share a group.

    Args:
        sizes: of all axes.
        rank: this process.
        num_kv_heads: of the model, for `tp_kv`.
        pairs: mirrored pipeline ranks hold parameters together: make their lines.
        recorder: told about every collective.
        timeout_s: seconds after which a collective gives up (`parallel.timeout_s`); None = torch's own for its backend,
            for torch hands the world's on to no other group.

    Comm: one group creation per distinct line longer than 1.
    """
    lines = lines_of(sizes, rank, num_kv_heads)
    settings = group_settings(timeout_s)
    groups: dict[tuple[int, ...], object] = {lines["world"]: dist.group.WORLD}
    axes = {}
    for name, ranks in lines.items():
        if len(ranks) == 1:
            group = None
        else:
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks), group_desc=name, **settings)
            group = groups[ranks]
        axes[name] = Axis(name, ranks, ranks.index(rank), group, recorder)
    for name, ranks in pair_lines_of(sizes, rank).items() if pairs and sizes.pp > 1 else ():
        # never shared with another line: torch names a group by how many this rank has made, so the middle rank of an
        # odd pipeline must make as many as the others
        group = dist.new_group(list(ranks), group_desc=name, **settings)
        axes[name] = Axis(name, ranks, ranks.index(rank), group if len(ranks) > 1 else None, recorder)
    return Mesh(sizes, axes)


def planned_mesh(
    sizes: Sizes,
    rank: int = 0,
    *,
    num_kv_heads: int | None = None,
    pairs: bool = False,
    recorder: Recorder | None = None,
) -> Mesh:
    """The axes of any rank of any world, in this one process: nobody to talk to, for models on the meta device.

    Args:
        sizes, num_kv_heads, pairs, recorder: as in `build_mesh`.
        rank: whose.
    """
    lines = lines_of(sizes, rank, num_kv_heads)
    if pairs and sizes.pp > 1:
        lines |= pair_lines_of(sizes, rank)
    return Mesh(sizes, {name: Axis(name, ranks, ranks.index(rank), None, recorder) for name, ranks in lines.items()})

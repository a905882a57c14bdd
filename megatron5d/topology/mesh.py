"""The mesh: all axes of this process, in both views of the world, each with its process group."""

from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from megatron5d.topology.axis import Axis, Recorder
from megatron5d.topology.grid import (
    DENSE_GROUPS,
    EXPERT_GROUPS,
    SharedRanks,
    Sizes,
    dense_grid,
    expert_grid,
)

NO_SHARED_RANKS: SharedRanks = MappingProxyType({})
_PAIRED = ("dp_cp", "dp_shard_cp", "dp_replicate", "stage", "edp", "edp_shard", "edp_replicate")


class Mesh(Mapping[str, Axis]):
    """The axes of one rank by name, as in `mesh["tp"]`.

    Dense view: tp, cp (= cp_outer × cp_inner, inner fastest: context_parallel/zigzag.py), pp, dp,
    dp_replicate, dp_cp (data × context), dp_shard_cp, cp_tp (the ranks that share a micro-batch),
    stage (all ranks with the same layers). Expert view: ep (= ep_outer × ep_inner), etp, ep_etp,
    ep_inner_etp, edp, edp_replicate, edp_shard.
    Both: tp_kv (the tp ranks that hold copies of the same KV heads) and world (all ranks).
    Where several pipeline ranks hold parameters together, also the union of their groups:
    dp_cp_pair, dp_shard_cp_pair, dp_replicate_pair, stage_pair, edp_pair, edp_shard_pair and
    edp_replicate_pair of two that hold the same stages, dp_cp_tied and so on of all that hold the
    embedding.
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


@lru_cache(maxsize=8)
def groups_of(
    sizes: Sizes, rank: int, num_kv_heads: int | None = None
) -> Mapping[str, tuple[int, ...]]:
    """Global ranks of every process group of `rank`, by axis name.

    Args:
        num_kv_heads: of the model, for `tp_kv`; None = no rank shares KV heads with another.
    """
    dense = dense_grid(sizes)
    expert = expert_grid(sizes, dense)
    groups = {name: dense.group(rank, *axes) for name, axes in DENSE_GROUPS.items()}
    groups |= {name: expert.group(rank, *axes) for name, axes in EXPERT_GROUPS.items()}
    kv_copies = max(1, sizes.tp // num_kv_heads) if num_kv_heads else 1
    _, groups["tp_kv"] = _outer_and_inner(groups["tp"], rank, kv_copies)
    for name, inner in (("cp", sizes.cp_inner), ("ep", sizes.ep_inner)):
        outer_group, inner_group = _outer_and_inner(groups[name], rank, inner)
        groups[f"{name}_outer"], groups[f"{name}_inner"] = outer_group, inner_group
    _, groups["ep_inner_etp"] = _outer_and_inner(groups["ep_etp"], rank, sizes.ep_inner * sizes.etp)
    groups["world"] = tuple(range(sizes.world))
    return groups


def shared_groups_of(sizes: Sizes, rank: int, shared: SharedRanks) -> dict[str, tuple[int, ...]]:
    """For each name in _PAIRED, that group of `rank` joined with those of the ranks that share
    with it.

    Args:
        shared: suffix of the names -> disjoint sets of pipeline ranks; a rank in none of them has
            the groups of `groups_of`.
    """
    dense, unions = dense_grid(sizes), dict[str, tuple[int, ...]]()
    pp_group, pp_rank = dense.group(rank, "pp"), dense.coordinate(rank, "pp")
    for suffix, sets in shared.items():
        sharing = next((pp_ranks for pp_ranks in sets if pp_rank in pp_ranks), (pp_rank,))
        members = [groups_of(sizes, pp_group[sharer]) for sharer in sharing]
        for name in _PAIRED:
            union = {rank for groups in members for rank in groups[name]}
            unions[f"{name}_{suffix}"] = tuple(sorted(union))
    return unions


def _outer_and_inner(
    group: tuple[int, ...], rank: int, inner: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Outer and inner group of a rank in a group of outer × `inner` ranks, inner fastest."""
    outer_index, inner_index = divmod(group.index(rank), inner)
    return group[inner_index::inner], group[outer_index * inner : (outer_index + 1) * inner]


def group_settings(timeout_s: float | None) -> dict[str, Any]:
    """Keyword arguments of `dist.new_group` for all groups but the world's.

    Args:
        timeout_s: as in `build_mesh`.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    return {"use_local_synchronization": True, "timeout": timeout}


def build_mesh(
    sizes: Sizes,
    rank: int = 0,
    *,
    num_kv_heads: int | None = None,
    shared: SharedRanks = NO_SHARED_RANKS,
    recorder: Recorder | None = None,
    timeout_s: float | None = None,
) -> Mesh:
    """Creates the process groups of this rank.

    Every rank must call it with the same sizes, after `init_process_group` (at world size 1 without
    it). Groups are created eagerly and in one order on all ranks; axes with the same ranks share a
    group.

    Args:
        num_kv_heads: of the model, for `tp_kv`.
        shared: pipeline ranks that hold parameters together; their axes are made too.
        recorder: counts the collectives of all axes.
        timeout_s: seconds after which a collective fails (`parallel.timeout_s`); None = the
            backend's default (torch does not pass the world's timeout on to other groups).

    Comm: one group creation per distinct group of more than one rank.
    """
    ranks_by_name = groups_of(sizes, rank, num_kv_heads)
    settings = group_settings(timeout_s)
    groups: dict[tuple[int, ...], object] = {ranks_by_name["world"]: dist.group.WORLD}
    axes = {}
    for name, ranks in ranks_by_name.items():
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), group_desc=name, **settings)
        group = groups[ranks] if len(ranks) > 1 else None
        axes[name] = Axis(name, ranks, ranks.index(rank), group, recorder)
    for name, ranks in shared_groups_of(sizes, rank, shared).items():
        # Always a new group: torch names a group by how many groups this rank has made, so a rank
        # that shares with none must make the same number as the others.
        group = dist.new_group(list(ranks), group_desc=name, **settings)
        group = group if len(ranks) > 1 else None
        axes[name] = Axis(name, ranks, ranks.index(rank), group, recorder)
    return Mesh(sizes, axes)


def planned_mesh(
    sizes: Sizes,
    rank: int = 0,
    *,
    num_kv_heads: int | None = None,
    shared: SharedRanks = NO_SHARED_RANKS,
    recorder: Recorder | None = None,
) -> Mesh:
    """The axes of any rank of any world, without process groups: for models on the meta device.

    Args:
        sizes, num_kv_heads, shared, recorder: as in `build_mesh`.
    """
    groups = {**groups_of(sizes, rank, num_kv_heads), **shared_groups_of(sizes, rank, shared)}
    axes = {
        name: Axis(name, ranks, ranks.index(rank), None, recorder) for name, ranks in groups.items()
    }
    return Mesh(sizes, axes)

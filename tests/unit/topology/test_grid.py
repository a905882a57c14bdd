"""Process groups of every rank of large worlds, by integer arithmetic in one process."""

import itertools

import pytest

from megatron5d.topology.grid import (
    DENSE_AXES,
    DENSE_GROUPS,
    EXPERT_GROUPS,
    Grid,
    dense_grid,
    expert_grid,
    resolve,
)
from megatron5d.topology.mesh import groups_of


def test_dense_groups_by_hand():
    """8 ranks, pp 2 · dp 2 · tp 2, tp fastest."""
    grid = dense_grid(resolve(8, tp=2, pp=2))
    assert grid.group(5, "tp") == (4, 5)
    assert grid.group(5, "dp_shard") == (5, 7)
    assert grid.group(5, "pp") == (1, 5)
    assert grid.group(5, "dp_replicate", "dp_shard", "cp") == (5, 7)


def test_hsdp_splits_dp_with_the_shard_fastest():
    grid = dense_grid(resolve(8, dp_replicate=2))
    assert grid.group(5, "dp_shard") == (4, 5, 6, 7)
    assert grid.group(5, "dp_replicate") == (1, 5)


def test_experts_fold_over_dp_and_tp():
    """One stage of 8 ranks, dp 4 · tp 2, folded to edp 1 · ep 8 · etp 1."""
    sizes = resolve(8, tp=2, ep=8, etp=1)
    assert sizes.edp == 1
    assert expert_grid(sizes, dense_grid(sizes)).group(3, "ep") == tuple(range(8))


@pytest.mark.parametrize("order", list(itertools.permutations(DENSE_AXES)))
def test_groups_partition_16384_ranks_in_any_order(order):
    sizes = resolve(16384, tp=8, cp=2, pp=16, ep=64, etp=1, dp_replicate=4, order=order)
    dense = dense_grid(sizes)
    expert = expert_grid(sizes, dense)
    for grid, axes_by_name in ((dense, DENSE_GROUPS), (expert, EXPERT_GROUPS)):
        for name, axes in axes_by_name.items():
            groups = list(grid.groups(*axes))
            assert sorted(itertools.chain.from_iterable(groups)) == list(range(16384)), name
            assert len(set(map(len, groups))) == 1, name
    for rank in range(0, 16384, 1021):
        peers = [peer for axes in EXPERT_GROUPS.values() for peer in expert.group(rank, *axes)]
        stages = {dense.coordinate(peer, "pp") for peer in peers}
        assert stages == {dense.coordinate(rank, "pp")}, "experts never leave their pipeline stage"


def test_the_members_of_a_group_see_the_same_group():
    sizes = resolve(64, tp=4, cp=2, pp=2, ep=4, dp_replicate=2)
    groups = [groups_of(sizes, rank, num_kv_heads=2) for rank in range(64)]
    for rank in range(64):
        for name, ranks in groups[rank].items():
            assert rank in ranks
            assert all(groups[peer][name] == ranks for peer in ranks), name


def test_copies_of_kv_heads_are_neighbors_on_tp():
    sizes = resolve(8, tp=8)
    assert groups_of(sizes, 0, num_kv_heads=2)["tp_kv"] == (0, 1, 2, 3)
    assert groups_of(sizes, 5, num_kv_heads=2)["tp_kv"] == (4, 5, 6, 7)
    assert groups_of(sizes, 5, num_kv_heads=8)["tp_kv"] == (5,)


def test_a_grid_over_given_ranks():
    grid = Grid((("a", 2), ("b", 2)), ranks=(7, 5, 3, 1))
    assert grid.group(3, "a") == (7, 3)
    assert grid.coordinate(1, "b") == 1

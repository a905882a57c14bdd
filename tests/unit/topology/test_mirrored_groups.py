"""Groups that join a pipeline rank and its mirror image: a partition of the world, the same for
every member."""

import pytest
import torch
from ranks import run_ranks

from megatron5d.comm.collectives import all_reduce
from megatron5d.topology.grid import dense_grid, resolve
from megatron5d.topology.mesh import build_mesh, groups_of, shared_groups_of


def pairs(pp: int) -> dict[str, list[tuple[int, int]]]:
    return {"pair": [(rank, pp - 1 - rank) for rank in range(pp // 2)]}


LAYOUTS = [
    (16, {"pp": 4, "tp": 2}),
    (24, {"pp": 3, "tp": 2, "dp_replicate": 2}),
    (16, {"pp": 2, "cp": 2, "order": ("pp", "dp", "cp", "tp")}),
    (16, {"pp": 4, "tp": 2, "order": ("tp", "dp", "cp", "pp")}),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_each_group_joins_two_stages_and_is_the_same_for_its_members(world, layout):
    sizes = resolve(world, **layout)
    grid = dense_grid(sizes)
    unions = [shared_groups_of(sizes, rank, pairs(sizes.pp)) for rank in range(world)]
    for rank in range(world):
        stage = grid.coordinate(rank, "pp")
        stages = {stage, sizes.pp - 1 - stage}
        for name, union in unions[rank].items():
            group = groups_of(sizes, rank)[name.removesuffix("_pair")]
            assert list(union) == sorted(union)
            assert {grid.coordinate(peer, "pp") for peer in union} == stages
            assert len(union) == len(group) * len(stages)
            assert all(unions[peer][name] == union for peer in union)


@pytest.mark.parametrize("pp", [3, 4, 5])
def test_groups_made_later_still_match(pp):
    """The middle rank of an odd pipeline has no mirror image; torch must not confuse later
    groups."""

    def on_rank(rank, world):
        mesh = build_mesh(resolve(world, pp=pp), rank, shared=pairs(pp))
        members = [rank // 2 * 2, rank // 2 * 2 + 1]
        later = torch.distributed.new_group(members, use_local_synchronization=True)
        total = torch.ones(1) * rank
        torch.distributed.all_reduce(total, group=later)
        return all_reduce(torch.ones(1) * rank, mesh["dp_cp_pair"]).item(), total.item()

    sum_of = [2 * (2 * stage) + 1 for stage in range(pp)]  # of a stage's two ranks
    for rank, (pair_sum, later_sum) in enumerate(run_ranks(on_rank, 2 * pp)):
        stage = rank // 2
        assert pair_sum == sum(sum_of[member] for member in {stage, pp - 1 - stage})
        assert later_sum == sum_of[stage]


def test_the_embedding_may_lie_on_more_than_two_ranks():
    """Ranks 0, 1 and 3 of four hold it; rank 2 has groups of its own, as many as the others."""
    sizes = resolve(16, pp=4, tp=2)
    for rank in range(16):
        stages = [2] if rank // 4 == 2 else [0, 1, 3]
        union = shared_groups_of(sizes, rank, {"tied": [(0, 1, 3)]})["dp_cp_tied"]
        assert union == tuple(
            4 * stage + peer for stage in stages for peer in (rank % 2, rank % 2 + 2)
        )

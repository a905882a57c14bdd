"""Lines that join a pipeline rank and its mirror image: a partition of the world, the same seen
from every member."""

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
def test_each_line_joins_two_stages_and_all_of_its_members_see_it(world, layout):
    sizes = resolve(world, **layout)
    grid = dense_grid(sizes)
    for rank in range(world):
        here = grid.coordinate(rank, "pp")
        for name, ranks in shared_groups_of(sizes, rank, pairs(sizes.pp)).items():
            plain = name.removesuffix("_pair")
            assert list(ranks) == sorted(ranks)
            assert {grid.coordinate(other, "pp") for other in ranks} == {here, sizes.pp - 1 - here}
            assert len(ranks) == len(groups_of(sizes, rank)[plain]) * (
                1 if 2 * here == sizes.pp - 1 else 2
            )
            assert all(
                shared_groups_of(sizes, other, pairs(sizes.pp))[name] == ranks for other in ranks
            )


@pytest.mark.parametrize("pp", [3, 4, 5])
def test_groups_made_later_still_find_each_other(pp):
    """The middle rank of an odd pipeline has no mirror image; torch must not confuse the groups
    that come after."""

    def on_rank(rank, world):
        mesh = build_mesh(resolve(world, pp=pp), rank, shared=pairs(pp))
        later = torch.distributed.new_group(
            [rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True
        )
        total = torch.ones(1) * rank
        torch.distributed.all_reduce(total, group=later)
        return all_reduce(torch.ones(1) * rank, mesh["dp_cp_pair"]).item(), total.item()

    found = run_ranks(on_rank, 2 * pp)
    stage = [rank // 2 for rank in range(2 * pp)]
    for rank, (pair, later) in enumerate(found):
        ranks = [
            other for other in range(2 * pp) if stage[other] in (stage[rank], pp - 1 - stage[rank])
        ]
        assert pair == sum(ranks)
        assert later == sum(other for other in range(2 * pp) if stage[other] == stage[rank])


def test_the_embedding_may_lie_on_more_than_two_ranks():
    """Ranks 0, 1 and 3 of four hold it; rank 2 has groups of its own, as many as the others."""
    sizes = resolve(16, pp=4, tp=2)
    for rank in range(16):
        stage = rank // 4
        lines = {0: [0, 1, 3], 1: [0, 1, 3], 2: [2], 3: [0, 1, 3]}[stage]
        found = shared_groups_of(sizes, rank, {"tied": [(0, 1, 3)]})
        assert found["dp_cp_tied"] == tuple(
            4 * line + other for line in lines for other in (rank % 2, rank % 2 + 2)
        )

"""Which choices full experts refuse, against a queue in plain Python; the same on one rank and on
four."""

import math

import pytest
import torch
from ranks import run_ranks

from megatron5d.expert_parallel.router import within_capacity
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

E, K, N = 6, 2, 24


def choices(seed, padding=0):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(N)])
    experts[:, 0] = experts[:, 0] % 2 if seed % 2 else experts[:, 0]  # a crowd
    # many ties
    weights = torch.rand(N, K, dtype=torch.float64, generator=generator).mul(8).round() / 8
    order = torch.randperm(N, generator=generator)
    if padding:
        experts[order >= N - padding] = E
    return experts, weights, order


def by_hand(experts, weights, order, factor, by):
    total = int((experts < E).sum())
    limit = math.ceil(factor * total / E)
    keep = torch.zeros(N, K, dtype=torch.bool)
    for e in range(E):
        queue = [(int(order[t]), j, t) for t in range(N) for j in range(K) if experts[t, j] == e]
        queue.sort(
            key=lambda c: (-float(weights[c[2], c[1]]) if by == "probability" else 0, c[0], c[1])
        )
        for _, j, t in queue[:limit]:
            keep[t, j] = True
    return keep


@pytest.mark.parametrize("by", ["probability", "position"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 9.0])
@pytest.mark.parametrize(("seed", "padding"), [(0, 0), (1, 0), (2, 7), (3, N)])
def test_against_a_queue(by, factor, seed, padding):
    experts, weights, order = choices(seed, padding)
    keep = within_capacity(experts, weights, order, E, factor, by, Axis("cp_tp"))
    assert torch.equal(keep, by_hand(experts, weights, order, factor, by))


def test_the_same_on_four_ranks():
    experts, weights, order = choices(1, 5)
    whole = within_capacity(experts, weights, order, E, 1.0, "probability", Axis("cp_tp"))

    def share(rank, world):
        axis = build_mesh(resolve(world, tp=2, cp=2), rank)["cp_tp"]
        mine = slice(axis.rank * N // 4, (axis.rank + 1) * N // 4)
        return within_capacity(
            experts[mine], weights[mine], order[mine], E, 1.0, "probability", axis
        )

    assert torch.equal(torch.cat(run_ranks(share, 4)), whole)

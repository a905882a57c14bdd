"""Choices within the experts' capacity, compared with a queue in plain Python."""

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
    experts[:, 0] = experts[:, 0] % 2 if seed % 2 else experts[:, 0]  # overloads two experts
    # with many ties
    weights = torch.rand(N, K, dtype=torch.float64, generator=generator).mul(8).round() / 8
    order = torch.randperm(N, generator=generator)
    if padding:
        experts[order >= N - padding] = E
    return experts, weights, order


def keep_by_queue(experts, weights, order, factor, by):
    limit = math.ceil(factor * int((experts < E).sum()) / E)
    keep = torch.zeros(N, K, dtype=torch.bool)
    for e in range(E):
        queue = []
        for t, j in (experts == e).nonzero().tolist():
            priority = -float(weights[t, j]) if by == "probability" else 0
            queue.append((priority, int(order[t]), j, t))
        for *_, j, t in sorted(queue)[:limit]:
            keep[t, j] = True
    return keep


@pytest.mark.parametrize("by", ["probability", "position"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 9.0])
@pytest.mark.parametrize(("seed", "padding"), [(0, 0), (1, 0), (2, 7), (3, N)])
def test_against_a_queue(by, factor, seed, padding):
    experts, weights, order = choices(seed, padding)
    keep = within_capacity(experts, weights, order, E, factor, by, Axis("cp_tp"))
    assert torch.equal(keep, keep_by_queue(experts, weights, order, factor, by))


@pytest.mark.parametrize("unit", [2.0**-50, 2.0**-22])
def test_the_last_bits_of_equal_weights_do_not_choose(unit):
    """Wherever the weights lie: a border between rounded values would part some of these."""
    experts, weights, order = choices(1)
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        exact = (weights + 0.1) * (1 + torch.rand((), dtype=torch.float64, generator=generator))
        bits = torch.randint(-1, 2, weights.shape, generator=generator)
        for factor in (0.3, 1.0):
            keep = [
                within_capacity(experts, w, order, E, factor, "probability", Axis("cp_tp"))
                for w in (exact, exact * (1 + bits.double() * unit))
            ]
            assert torch.equal(*keep)
            assert torch.equal(keep[0], keep_by_queue(experts, exact, order, factor, "probability"))


def test_weights_that_differ_are_kept_by_size():
    """2^-19 apart, the later token more probable."""
    weights = 0.3 * (1 + torch.arange(8, dtype=torch.float64)[:, None] * 2.0**-19)
    experts, order = torch.zeros(8, 1, dtype=torch.int64), torch.arange(8)
    keep = within_capacity(experts, weights, order, 2, 1.0, "probability", Axis("cp_tp"))
    assert keep.flatten().tolist() == [False] * 4 + [True] * 4


def test_four_ranks_keep_the_same_choices_as_one():
    tensors = choices(1, 5)

    def on_rank(rank, world):
        axis = build_mesh(resolve(world, tp=2, cp=2), rank)["cp_tp"]
        share = (tensor.chunk(world)[axis.rank] for tensor in tensors)
        return within_capacity(*share, E, 1.0, "probability", axis)

    keep = within_capacity(*tensors, E, 1.0, "probability", Axis("cp_tp"))
    assert torch.equal(torch.cat(run_ranks(on_rank, 4)), keep)

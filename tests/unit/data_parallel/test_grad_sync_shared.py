"""Reductions that mirrored ranks share start in one order, however differently their stages
finish."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from megatron5d.data_parallel.bucketing import data_axes
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.phases.wgrad import grad_buffer
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, unsharded


class Unit(nn.Module):
    def __init__(self, name: str, shared: str, size: int = 5) -> None:
        super().__init__()
        spec = replace(ShardSpec(name, (size,), unsharded((size,))), shared=shared)
        self.weight = new_parameter((size,), spec, dtype=torch.float64, device="cpu")
        self.weight.data.zero_()


def finished(sync, units, order, rank):
    """Each phase gets one gradient of rank + 1, in the given order; returns the order in which
    reductions started."""
    started = []
    # the one that the mirror takes part in
    name = "start_reduce" if sync.zero == 1 else "start_sum_replicas"
    for index, bucket in enumerate(sync.buckets):
        begin = getattr(bucket, name)

        def start(begin=begin, index=index):
            started.append(index)
            return begin()

        setattr(bucket, name, start)
    sync.register(units)
    sync.start_step(dict.fromkeys(units, 1))
    for i in order:
        grad_buffer(units[i].weight).add_(rank + 1)
        sync.after(units[i], "wgrad")
    before_end = list(started)
    sync.finish_reduce()
    return before_end, started, [bucket.grads[:5].tolist() for bucket in sync.buckets]


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("checked", [False, True])
def test_mirrored_ranks_reduce_in_one_order(zero, checked, over_gloo):
    def on_rank(rank, world):
        if checked:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        mesh = build_mesh(resolve(world, pp=2), rank, shared={"pair": [(0, 1)]})
        units = [Unit("a", "pair"), Unit("own", ""), Unit("b", "pair")]
        sync = GradSync([[unit] for unit in units], mesh, zero, torch.float64)
        order = [0, 1, 2] if rank == 0 else [2, 1, 0]
        return finished(sync, units, order, rank)

    (first, one, grads), (second, two, theirs) = run_ranks(on_rank, 2)
    shared = [[index for index in started if index != 1] for started in (one, two)]
    assert shared == [[0, 2], [0, 2]]
    # a bucket of this rank alone waits for nobody, and under ZeRO-1 has no line to sum
    own = [] if zero == 1 else [1]
    if checked:
        assert first == second == own
    else:
        assert first == [0, *own, 2] and second == [*own, 0, 2]
    if zero != 1:
        assert grads[0] == theirs[0] == [3.0] * 5 and (grads[1], theirs[1]) == (
            [1.0] * 5,
            [2.0] * 5,
        )


def test_nobody_waits_for_the_mirror_before_the_step_ends():
    """Under ZeRO-1 with replicas: the mirror may first need this rank for something else."""

    def on_rank(rank, world):
        mesh = build_mesh(resolve(world, pp=2, dp_replicate=2), rank, shared={"pair": [(0, 1)]})
        units, waited, under_way = [Unit("a", "pair"), Unit("b", "pair")], [], []
        sync = GradSync([[unit] for unit in units], mesh, 1, torch.float64)
        for bucket in sync.buckets:
            bucket.finish_reduce = lambda finish=bucket.finish_reduce: (
                waited.append("a sum"),
                finish(),
            )
        sync.finish_reduce = lambda finish=sync.finish_reduce: (under_way.extend(waited), finish())
        early, started, _ = finished(sync, units, [0, 1], rank)
        owned = [
            bucket.grad_slice[slice(*each.owned)].tolist()
            for bucket in sync.buckets
            for each in bucket.segments()
        ]
        return early, started, under_way, owned

    for rank, (early, started, under_way, owned) in enumerate(run_ranks(on_rank, 4)):
        assert early == started == [0, 1] and not under_way, f"rank {rank} waited"
        assert all(set(values) == {10.0} for values in owned)


def test_a_shared_parameter_counts_its_mirror_as_data_parallel():
    def on_rank(rank, world):
        mesh = build_mesh(resolve(world, pp=2, dp_replicate=2), rank, shared={"pair": [(0, 1)]})
        return [
            tuple(axis.ranks for axis in data_axes(mesh, zero, shared))
            for zero in (0, 1, 2)
            for shared in ("", "pair")
        ]

    found = run_ranks(on_rank, 8)[5]  # pp rank 1 of 2, dp 4 = replicate 2 × shard 2
    assert found[0][1] == (4, 5, 6, 7)
    assert found[1][1] == tuple(range(8))
    assert found[2] == ((4, 5), (5, 7))
    assert found[3] == ((0, 1, 4, 5), (5, 7))
    assert found[4] == ((4, 5), (5, 7))
    assert found[5] == ((4, 5), (1, 3, 5, 7))

"""Mirrored ranks start their common reductions in one order, however their stages finish."""

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


def run_step(sync, units, order, rank):
    """Adds one gradient of rank + 1 to each unit, in the given order.

    Returns:
        Buckets whose common reductions started before the end of the step, and in all of it.
    """
    started = []
    name = "start_reduce" if sync.zero == 1 else "start_sum_replicas"  # the common reduction
    for index, bucket in enumerate(sync.buckets):
        original = getattr(bucket, name)

        def start(original=original, index=index):
            started.append(index)
            return original()

        setattr(bucket, name, start)
    sync.register(units)
    sync.start_step(dict.fromkeys(units, 1))
    for i in order:
        grad_buffer(units[i].weight).add_(rank + 1)
        sync.after(units[i], "wgrad")
    early = list(started)
    sync.finish_reduce()
    return early, started


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("debug", [False, True])
def test_mirrored_ranks_reduce_in_one_order(zero, debug, over_gloo):
    def on_rank(rank, world):
        if debug:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        mesh = build_mesh(resolve(world, pp=2), rank, shared={"pair": [(0, 1)]})
        units = [Unit("a", "pair"), Unit("local", ""), Unit("b", "pair")]
        sync = GradSync([[unit] for unit in units], mesh, zero, torch.float64)
        early, started = run_step(sync, units, [0, 1, 2] if rank == 0 else [2, 1, 0], rank)
        return early, started, [bucket.grads[:5].tolist() for bucket in sync.buckets]

    ranks = run_ranks(on_rank, 2)
    for _, started, _ in ranks:
        assert [index for index in started if index != 1] == [0, 2]
    # the local bucket waits for no other rank, and has no shard axis under ZeRO-1
    local = [] if zero == 1 else [1]
    (early_0, _, grads_0), (early_1, _, grads_1) = ranks
    if debug:
        assert early_0 == early_1 == local
    else:
        assert early_0 == [0, *local, 2] and early_1 == [*local, 0, 2]
    if zero != 1:
        assert grads_0[0] == grads_1[0] == [3.0] * 5
        assert (grads_0[1], grads_1[1]) == ([1.0] * 5, [2.0] * 5)


def test_a_rank_waits_for_its_mirror_only_at_the_end_of_the_step():
    """Under ZeRO-1 with replicas the mirror may wait for this rank in another collective first."""

    def on_rank(rank, world):
        mesh = build_mesh(resolve(world, pp=2, dp_replicate=2), rank, shared={"pair": [(0, 1)]})
        units, finished, early_finished = [Unit("a", "pair"), Unit("b", "pair")], [], []
        sync = GradSync([[unit] for unit in units], mesh, 1, torch.float64)
        for bucket in sync.buckets:
            bucket.finish_reduce = lambda finish=bucket.finish_reduce: (
                finished.append("a sum"),
                finish(),
            )
        sync.finish_reduce = lambda finish=sync.finish_reduce: (
            early_finished.extend(finished),
            finish(),
        )
        early, started = run_step(sync, units, [0, 1], rank)
        owned = [
            bucket.grad_slice[slice(*segment.owned)].tolist()
            for bucket in sync.buckets
            for segment in bucket.segments()
        ]
        return early, started, early_finished, owned

    for rank, (early, started, early_finished, owned) in enumerate(run_ranks(on_rank, 4)):
        assert early == started == [0, 1] and not early_finished, f"rank {rank} waited"
        assert all(set(values) == {10.0} for values in owned)


def test_a_shared_parameter_counts_its_mirror_as_data_parallel():
    def on_rank(rank, world):
        mesh = build_mesh(resolve(world, pp=2, dp_replicate=2), rank, shared={"pair": [(0, 1)]})
        return {
            (zero, shared): tuple(axis.ranks for axis in data_axes(mesh, zero, shared))
            for zero in (0, 1, 2)
            for shared in ("", "pair")
        }

    axes = run_ranks(on_rank, 8)[5]  # pp rank 1 of 2, dp 4 = replicate 2 × shard 2
    assert axes[0, ""][1] == (4, 5, 6, 7)
    assert axes[0, "pair"][1] == tuple(range(8))
    assert axes[1, ""] == axes[2, ""] == ((4, 5), (5, 7))
    assert axes[1, "pair"] == ((0, 1, 4, 5), (5, 7))
    assert axes[2, "pair"] == ((4, 5), (1, 3, 5, 7))

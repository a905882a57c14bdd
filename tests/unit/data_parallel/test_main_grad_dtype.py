"""Main gradients have the configured dtype, whatever dtype the weights have and however they are
sharded."""

import dataclasses

import pytest
import torch
from parity_configs import config_of
from rank_pool import run_on_pool

from megatron5d.config.schema import PrecisionConfig
from megatron5d.model.gpt import GPT
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import state_of
from megatron5d.train.build import build_sync, sizes_of


def dtypes(rank, world, config):
    model = GPT(
        config, build_mesh(sizes_of(config, world), rank, num_kv_heads=config.model.num_kv_heads)
    )
    model.initialize(1)
    sync = build_sync(config, build_mesh(sizes_of(config, world), rank), model)
    found = {bucket.grads.dtype for bucket in sync.buckets} | {
        bucket.grad_slice.dtype for bucket in sync.buckets
    }
    return found | {
        state_of(parameter).main_grad.dtype for parameter in model.parameters()
    }, sync.buckets[0].weights.dtype


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(
    ("dtype", "grads", "want"),
    [
        ("bf16", "fp32", torch.float32),
        ("bf16", "bf16", torch.bfloat16),
        ("fp64", "fp32", torch.float64),
    ],
)
def test_dtype(dtype, grads, want, zero):
    config = dataclasses.replace(
        config_of(zero=zero), precision=PrecisionConfig(dtype, grad_dtype=grads)
    )
    weights = torch.bfloat16 if dtype == "bf16" else torch.float64
    assert run_on_pool(dtypes, 2, config) == [({want}, weights)] * 2

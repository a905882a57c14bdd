"""Main gradients have the configured dtype, for any dtype of the weights and any ZeRO stage."""

import dataclasses

import pytest
import torch
from parity_configs import config_of
from rank_pool import run_on_pool
from training_rank import TrainingRank

from megatron5d.config.schema import PrecisionConfig
from megatron5d.topology.shard_spec import state_of


def dtypes(rank, world, config):
    run = TrainingRank(config, rank, world)
    grads = {tensor.dtype for b in run.sync.buckets for tensor in (b.grads, b.grad_slice)}
    grads |= {state_of(parameter).main_grad.dtype for parameter in run.model.parameters()}
    return grads, run.sync.buckets[0].weights.dtype


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "expected"),
    [
        ("bf16", "fp32", torch.float32),
        ("bf16", "bf16", torch.bfloat16),
        ("fp64", "fp32", torch.float64),
    ],
)
def test_dtype(dtype, grad_dtype, expected, zero):
    precision = PrecisionConfig(dtype, grad_dtype=grad_dtype)
    config = dataclasses.replace(config_of(zero=zero), precision=precision)
    weights = torch.bfloat16 if dtype == "bf16" else torch.float64
    assert run_on_pool(dtypes, 2, config) == [({expected}, weights)] * 2

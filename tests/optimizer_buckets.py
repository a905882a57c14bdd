"""Buckets of a few parameters, for tests of optimizers."""

import torch

from megatron5d.data_parallel.bucket import Bucket
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, unsharded

SHAPES = {"a": (7, 5), "b": (3,), "c": (2, 2), "d": (9, 4)}
ONE_SLICE = Axis("dp_shard_cp")


def seeded(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameters(dtype=torch.float32):
    """Parameters with the same random values, rounded to any dtype; vectors do not decay."""
    generator = torch.Generator().manual_seed(0)
    built = []
    for name, shape in SHAPES.items():
        spec = ShardSpec(name, shape, unsharded(shape), decay=len(shape) > 1)
        parameter = new_parameter(shape, spec, dtype, "cpu")
        parameter.data.copy_(torch.randn(shape, generator=generator))
        built.append(parameter)
    return built


def new_bucket(dtype=torch.float32, grad_dtype=None, shard=ONE_SLICE, replicate=None):
    """A bucket of `parameters`; gradients of bf16 weights are fp32 unless given."""
    if grad_dtype is None:
        grad_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    return Bucket(parameters(dtype), shard, replicate or Axis("dp_replicate"), grad_dtype)


def resumed(optimizer, new):
    """A new optimizer with what a checkpoint of another one contains."""
    for (_, tensor, _), (_, saved, _) in zip(new.tensors(), optimizer.tensors(), strict=True):
        tensor.copy_(saved)
    new.set_step_count(optimizer.step_count)
    return new

"""NVIDIA apex's FusedAdam where it is installed: here another stands for it, with its interface and
its limits."""

import sys
from types import ModuleType

import pytest
import torch

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.optim import adamw
from megatron5d.optim.adamw import AdamW, FusedAdamW
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, unsharded


class FusedAdam(torch.optim.Optimizer):
    """As apex's: the count of steps is the group's, begun by the first step; of its dtypes,
    float32; no empty group."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
    ):
        assert bias_correction and adam_w_mode and not amsgrad
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def step(self, closure=None):
        for group in self.param_groups:
            assert group["params"][0].dtype == torch.float32
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m, v = (
                    self.state[p].setdefault(kind, torch.zeros_like(p))
                    for kind in ("exp_avg", "exp_avg_sq")
                )
                m.lerp_(p.grad, 1 - beta1)
                v.lerp_(p.grad.square(), 1 - beta2)
                unbiased = (v / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                p.mul_(1 - lr * group["weight_decay"]).sub_(
                    lr / (1 - beta1 ** group["step"]) * m / unbiased
                )


@pytest.fixture(autouse=True)
def apex(monkeypatch):
    modules = {name: ModuleType(name) for name in ("apex", "apex.optimizers", "amp_C")}
    modules["apex.optimizers"].FusedAdam = FusedAdam
    modules["amp_C"].multi_tensor_adam = lambda: None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with monkeypatch.context() as with_gpu:
        with_gpu.setattr(torch.cuda, "is_available", lambda: True)
        found = adamw.apex_adam()
    assert found is FusedAdam
    monkeypatch.setattr(adamw, "apex_adam", lambda: found)


def bucket_of(dtype):
    generator, made = torch.Generator().manual_seed(0), []
    for name, shape in (("a", (7, 5)), ("b", (3,))):
        p = new_parameter(
            shape, ShardSpec(name, shape, unsharded(shape), decay=len(shape) > 1), dtype, "cpu"
        )
        p.data.copy_(torch.randn(shape, generator=generator))
        made.append(p)
    grads = torch.float32 if dtype == torch.bfloat16 else dtype
    return Bucket(made, Axis("dp_shard_cp"), Axis("dp_replicate"), grads)


def used(optimizer):
    return type(optimizer._optimizer)


def weights_after(how, stop, dtype=torch.float32, steps=4, seed=None):
    """The weights after some steps, the last of which a new optimiser makes with what the old one
    has saved."""
    bucket, config = bucket_of(dtype), OptimConfig(weight_decay=0.3, implementation=how)
    optimizer = AdamW([bucket], config, seed)
    for step in range(steps):
        if step == stop:
            old, optimizer = optimizer, AdamW([bucket], config, seed)
            for (_, tensor, _), (_, saved, _) in zip(
                optimizer.tensors(), old.tensors(), strict=True
            ):
                tensor.copy_(saved)
            optimizer.set_step_count(step)
        bucket.grads.copy_(torch.randn(bucket.numel, generator=torch.Generator().manual_seed(step)))
        optimizer.step(lr=0.1)
    return bucket.weights.clone(), used(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [None, 2])
def test_it_updates_as_torch_does_also_after_a_resume(dtype, stop):
    ours, kind = weights_after("auto", stop, dtype)
    truth, plain = weights_after("torch", None, dtype)
    assert (kind, plain) == (FusedAdam, FusedAdamW)
    torch.testing.assert_close(ours, truth)


def test_it_is_not_asked_for_what_it_cannot_do():
    assert weights_after("auto", None, torch.float64)[1] is FusedAdamW
    assert used(AdamW([bucket_of(torch.float32)], OptimConfig(offload=True))) is FusedAdamW
    for offload, dtype in ((False, torch.float64), (True, torch.float32)):
        config = OptimConfig(implementation="apex", offload=offload)
        with pytest.raises(ValueError, match="use optim.implementation=torch"):
            AdamW([bucket_of(dtype)], config)


def test_without_master_weights_it_has_nothing_to_do():
    weights_after("auto", None, torch.bfloat16, seed=1)

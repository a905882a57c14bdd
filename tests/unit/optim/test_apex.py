"""NVIDIA apex's FusedAdam if it is installed; here a class with its interface and limits stands
for it."""

import sys
from types import ModuleType

import pytest
import torch
from optimizer_buckets import new_bucket, resumed, seeded

from megatron5d.config.schema import OptimConfig
from megatron5d.optim import adamw
from megatron5d.optim.adamw import AdamW, FusedAdamW


class FusedAdam(torch.optim.Optimizer):
    """As apex's: groups count steps, beginning with the first one; float32 only; no empty
    group."""

    def __init__(self, params, lr, betas, eps, adam_w_mode):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

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
                denominator = (v / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr / (1 - beta1 ** group["step"]) * m / denominator)


@pytest.fixture(autouse=True)
def apex(monkeypatch):
    modules = {name: ModuleType(name) for name in ("apex", "apex.optimizers", "amp_C")}
    modules["apex.optimizers"].FusedAdam = FusedAdam
    modules["amp_C"].multi_tensor_adam = lambda: None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with monkeypatch.context() as with_gpu:
        with_gpu.setattr(torch.cuda, "is_available", lambda: True)
        assert adamw.apex_adam() is FusedAdam
    monkeypatch.setattr(adamw, "apex_adam", lambda: FusedAdam)


def train(implementation, resume_at=None, dtype=torch.float32, seed=None):
    """The weights after four steps, and the class that updates them."""
    bucket, config = new_bucket(dtype), OptimConfig(weight_decay=0.3, implementation=implementation)
    optimizer = AdamW([bucket], config, seed)
    for step in range(4):
        if step == resume_at:
            optimizer = resumed(optimizer, AdamW([bucket], config, seed))
        bucket.grads.copy_(seeded(bucket.numel, step))
        optimizer.step(lr=0.1)
    return bucket.weights.clone(), type(optimizer._optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resume_at", [None, 2])
def test_it_updates_like_torch_and_after_a_resume(dtype, resume_at):
    weights, apex_class = train("auto", resume_at, dtype)
    expected, torch_class = train("torch", None, dtype)
    assert (apex_class, torch_class) == (FusedAdam, FusedAdamW)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize(
    ("dtype", "offload", "requirement"),
    [
        (torch.float64, False, r"precision.dtype=fp32 or bf16 \(got fp64\)"),
        (torch.float32, True, r"optim.offload=false \(got true\)"),
    ],
)
def test_it_is_not_used_beyond_its_limits(dtype, offload, requirement):
    optimizer = AdamW([new_bucket(dtype)], OptimConfig(offload=offload))
    assert type(optimizer._optimizer) is FusedAdamW
    config = OptimConfig(implementation="apex", offload=offload)
    with pytest.raises(ValueError, match=f"apex requires {requirement}"):
        AdamW([new_bucket(dtype)], config)


def test_apex_must_be_installed(monkeypatch):
    monkeypatch.setattr(adamw, "apex_adam", lambda: None)
    with pytest.raises(ValueError, match="requires a CUDA device and NVIDIA apex"):
        AdamW([new_bucket()], OptimConfig(implementation="apex"))


def test_it_has_nothing_to_update_without_master_weights():
    assert train("auto", dtype=torch.bfloat16, seed=1)[1] is FusedAdamW

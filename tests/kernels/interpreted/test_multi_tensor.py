"""AdamW and the gradient norm over many tensors, against torch's optimizer."""

import pytest
import torch
from kernel_lab.accuracy import relative_error
from kernel_lab.bounds import allow_memory

from megatron5d.kernels.multi_tensor import AdamWSettings, TensorTable, adamw_step, squared_norm

pytestmark = [pytest.mark.alike, pytest.mark.interpreted]
SHAPES = [(1,), (7, 9), (127,), (3, 43, 2), (1025,)]
DECAYS = [0.0, 0.1, 0.0, 0.1, 0.2]


def zeros(dtype=torch.float32):
    return [torch.zeros(s, dtype=dtype) for s in SHAPES]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_copy", [False, True])
def test_adamw_equals_torch(grad_dtype, has_copy):
    masters, grads, copies = [torch.randn(s) for s in SHAPES], zeros(grad_dtype), []
    columns = {"master": masters, "grad": grads, "exp_avg": zeros(), "exp_avg_sq": zeros()}
    if has_copy:
        columns["copy"] = copies = zeros(torch.bfloat16)
    table = TensorTable(**columns)
    parameters = [master.double().requires_grad_() for master in masters]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(parameters, DECAYS)]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    factor, decays = torch.tensor(0.25), torch.tensor(DECAYS)
    for step in range(1, 4):
        for grad, p in zip(grads, parameters):
            grad.copy_(torch.randn(grad.shape))
            p.grad = grad.double() * 0.25
        optimizer.step()
        with allow_memory(*(t for tensors in columns.values() for t in tensors)):
            adamw_step(table, AdamWSettings(0.01, 0.9, 0.95, 1e-8, step), factor, decays)
    for master, p in zip(masters, parameters):
        torch.testing.assert_close(master.double(), p.detach(), rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, copies, (master.bfloat16() for master in masters)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_norm(dtype):
    grads = [torch.randn(s).to(dtype) for s in SHAPES]
    table, exact = TensorTable(grad=grads), sum(g.double().square().sum() for g in grads)
    with allow_memory(*grads):
        assert relative_error(squared_norm(table), exact) < 1e-6
        for value in (float("inf"), float("nan")):
            grads[3].view(-1)[-1] = value
            assert not squared_norm(table).isfinite()


def test_wide_loads_need_aligned_tensors():
    aligned, shifted = torch.zeros(8), torch.zeros(9)[1:]
    assert TensorTable(master=[aligned], grad=[aligned]).aligned
    assert not TensorTable(master=[aligned], grad=[shifted]).aligned


def test_invalid_tables_are_rejected():
    with pytest.raises(ValueError, match="same sizes"):
        TensorTable(a=[torch.zeros(3)], b=[torch.zeros(4)])
    with pytest.raises(ValueError, match="contiguous"):
        TensorTable(a=[torch.zeros(3, 4).t()])
    settings, table = AdamWSettings(0.1, 0.9, 0.9, 0.1, 1), TensorTable(grad=[torch.zeros(1)])
    with pytest.raises(ValueError, match="requires the columns master"):
        adamw_step(table, settings, torch.ones(()), torch.ones(1))

"""AdamW and the gradient norm over many tensors, against torch's optimizer."""

import pytest
import torch
from kernel_lab.bounds import allow_memory

from megatron5d.kernels.multi_tensor import AdamWSettings, TensorTable, adamw_step, squared_norm

pytestmark = [pytest.mark.alike, pytest.mark.interpreted]
SHAPES = [(1,), (7, 9), (127,), (3, 43, 2), (1025,)]
DECAYS = [0.0, 0.1, 0.0, 0.1, 0.2]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_copy", [False, True])
def test_adamw_follows_torch(grad_dtype, has_copy):
    masters = [torch.randn(s) for s in SHAPES]
    grads = [torch.zeros(s, dtype=grad_dtype) for s in SHAPES]
    moments = [[torch.zeros(s) for s in SHAPES] for _ in range(2)]
    copies = {"copy": [torch.zeros(s, dtype=torch.bfloat16) for s in SHAPES]} if has_copy else {}
    table = TensorTable(
        master=masters, grad=grads, exp_avg=moments[0], exp_avg_sq=moments[1], **copies
    )
    oracle = [m.double().requires_grad_() for m in masters]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(oracle, DECAYS)]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    factor = torch.tensor(0.25)
    everything = [t for column in table.columns.values() for t in column]
    for step in range(1, 4):
        for grad, p in zip(grads, oracle):
            grad.copy_(torch.randn(grad.shape))
            p.grad = grad.double() * 0.25
        optimizer.step()
        with allow_memory(*everything):
            adamw_step(
                table, AdamWSettings(0.01, 0.9, 0.95, 1e-8, step), factor, torch.tensor(DECAYS)
            )
    for i, p in enumerate(oracle):
        torch.testing.assert_close(masters[i].double(), p.detach(), rtol=1e-5, atol=1e-6)
        if has_copy:
            assert torch.equal(copies["copy"][i], masters[i].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_norm(dtype):
    grads = [torch.randn(s).to(dtype) for s in SHAPES]
    table = TensorTable(grad=grads)
    with allow_memory(*grads):
        got = squared_norm(table)
        torch.testing.assert_close(
            got, sum(g.double().square().sum() for g in grads), rtol=1e-6, atol=0
        )
        for bad in (float("inf"), float("nan")):
            grads[3].view(-1)[-1] = bad
            assert not squared_norm(table).isfinite()


def test_wide_loads_are_for_tables_that_are_aligned_throughout():
    whole, shifted = torch.zeros(8), torch.zeros(9)[1:]
    assert TensorTable(master=[whole], grad=[whole]).aligned
    assert not TensorTable(master=[whole], grad=[shifted]).aligned


def test_what_does_not_match_is_refused():
    with pytest.raises(ValueError, match="same sizes"):
        TensorTable(a=[torch.zeros(3)], b=[torch.zeros(4)])
    with pytest.raises(ValueError, match="contiguous"):
        TensorTable(a=[torch.zeros(3, 4).t()])
    with pytest.raises(ValueError, match="columns"):
        adamw_step(
            TensorTable(grad=[torch.zeros(1)]),
            AdamWSettings(0.1, 0.9, 0.9, 0.1, 1),
            torch.ones(()),
            torch.ones(1),
        )

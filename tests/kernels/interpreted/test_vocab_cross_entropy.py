"""The vocabulary kernels, whole and in shards, against torch's cross-entropy in float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron5d import kernels

pytestmark = pytest.mark.interpreted
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "rows, width, valid, shards",
    [(1, 7, 7, 1), (5, 129, 127, 1), (7, 300, 290, 3), (3, 512, 130, 2), (2, 4097, 4097, 1)],
)
def test_loss_and_gradient(rows, width, valid, shards, dtype):
    z_coef = 0.05
    logits = (torch.randn(rows, width * shards) * 4).to(dtype)
    valid_total = width * (shards - 1) + valid if shards > 1 else valid
    valid_total = min(valid_total, width * shards) if shards != 2 else valid
    labels = torch.randint(0, valid_total, (rows,))
    labels[rows // 2] = -100
    dloss = torch.rand(rows)
    exact = logits.double().requires_grad_()
    lse = exact[:, :valid_total].logsumexp(-1)
    want = F.cross_entropy(exact[:, :valid_total], labels, reduction="none") + (
        z_coef * lse**2
    ).where(labels >= 0, 0)
    want.backward(dloss.double())

    logits[:, valid_total:] = float("nan")  # padding must never be read as a number
    parts = [logits[:, i * width : (i + 1) * width].clone() for i in range(shards)]
    live = [max(0, min(width, valid_total - i * width)) for i in range(shards)]
    statistics = [
        kernels.vocab_statistics(p, labels, i * width, n)
        for i, (p, n) in enumerate(zip(parts, live))
    ]
    row_max = torch.stack([m for m, _, _ in statistics]).amax(0)
    row_sum = sum(s * (m - row_max).exp() for m, s, _ in statistics)
    merged = row_max + row_sum.log()
    loss = (merged - sum(t for _, _, t in statistics) + z_coef * merged**2).where(labels >= 0, 0)
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-5, atol=1e-5)
    for i, (p, n) in enumerate(zip(parts, live)):
        kernels.vocab_cross_entropy_backward(
            p, labels, row_max, row_sum, dloss, i * width, n, z_coef=z_coef
        )
    got = torch.cat(parts, 1).double()
    assert (got - exact.grad).norm() <= TOLERANCE[dtype] * exact.grad.norm()
    assert not got[:, valid_total:].any() and not got[rows // 2].any()


def test_the_whole_op():
    logits = torch.randn(6, 200).requires_grad_()
    labels = torch.randint(0, 200, (6,))
    kernels.cross_entropy(logits, labels).sum().backward()
    exact = logits.detach().double().requires_grad_()
    F.cross_entropy(exact, labels, reduction="sum").backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_a_row_whose_logits_are_all_very_negative():
    logits = torch.full((2, 130), -(2.0**100))
    row_max, row_sum, _ = kernels.vocab_statistics(
        logits, torch.zeros(2, dtype=torch.int64), 0, 130
    )
    assert row_max.tolist() == [-(2.0**100)] * 2 and row_sum.tolist() == [130.0] * 2

"""The vocabulary kernels, over a full vocabulary and in shards, against torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from kernel_lab.accuracy import relative_error
from kernel_lab.cross_entropy import exact_cross_entropy, sharded_cross_entropy

from megatron5d import kernels

pytestmark = pytest.mark.interpreted
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "rows, width, valid, shards",
    [(1, 7, 7, 1), (5, 129, 127, 1), (7, 300, 890, 3), (3, 512, 130, 2), (2, 4097, 4097, 1)],
)
def test_loss_and_gradient(rows, width, valid, shards, dtype):
    logits = (torch.randn(rows, width * shards) * 4).to(dtype)
    labels, dloss = torch.randint(0, valid, (rows,)), torch.rand(rows)
    labels[rows // 2] = -100
    exact_loss, exact_grad = exact_cross_entropy(logits, labels, dloss, valid, 0.05)
    logits[:, valid:] = float("nan")  # padding must not be read
    loss, grad = sharded_cross_entropy(logits, labels, dloss, valid, shards, 0.05)
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-5, atol=1e-5)
    assert relative_error(grad, exact_grad) <= TOLERANCE[dtype]
    assert not grad[:, valid:].any() and not grad[rows // 2].any()


def test_the_differentiable_operation():
    logits = torch.randn(6, 200).requires_grad_()
    labels = torch.randint(0, 200, (6,))
    kernels.cross_entropy(logits, labels).sum().backward()
    exact = logits.detach().double().requires_grad_()
    F.cross_entropy(exact, labels, reduction="sum").backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_a_row_whose_logits_are_all_very_negative():
    logits, labels = torch.full((2, 130), -(2.0**100)), torch.zeros(2, dtype=torch.int64)
    row_max, row_sum, _ = kernels.vocab_statistics(logits, labels, 0, 130)
    assert row_max.tolist() == [-(2.0**100)] * 2 and row_sum.tolist() == [130.0] * 2

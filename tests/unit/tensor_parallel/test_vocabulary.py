"""The sharded vocabulary: rows of each rank, and losses compared with plain torch."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from megatron5d.tensor_parallel.cross_entropy import SlicedLoss, vocab_parallel_cross_entropy
from megatron5d.tensor_parallel.embedding import VocabRange
from megatron5d.topology.axis import Axis

TP = Axis("tp")


@pytest.mark.parametrize(
    ("vocab_size", "starts", "valid"),
    [(61, [0, 16, 32, 48], [16, 16, 16, 13]), (20, [0, 8, 16, 20], [8, 8, 4, 0])],
)
def test_ranks_beyond_the_vocabulary_hold_only_padding(vocab_size, starts, valid):
    ranges = [VocabRange(vocab_size, Axis("tp", (0, 1, 2, 3), rank)) for rank in range(4)]
    assert [vocab.start for vocab in ranges] == starts
    assert [vocab.valid for vocab in ranges] == valid


# slices of one position, of several, of all
@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize(("softcap", "z_coef"), [(0.0, 0.0), (2.0, 0.3)])
def test_the_sliced_loss_is_the_loss(tokens, softcap, z_coef):
    s, b, h, v = 5, 2, 6, 11
    x = torch.randn(s, b, h, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(v, (s, b)).masked_fill(torch.arange(s * b).view(s, b) % 4 == 1, -100)
    share = torch.rand(s, b, dtype=torch.float64)  # of each token in the objective
    vocab = VocabRange(v, TP)
    weight = nn.Parameter(torch.randn(vocab.rows, h, dtype=torch.float64))
    loss, lse = SlicedLoss(vocab, TP, False, tokens, z_coef, softcap)(x, weight, labels)
    (loss * share).sum().backward()

    plain_x, plain_weight = (t.detach().clone().requires_grad_() for t in (x, weight[:v]))
    logits = plain_x @ plain_weight.t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    expected_lse = logits.logsumexp(-1)
    ((expected + z_coef * expected_lse.square() * (labels >= 0)) * share).sum().backward()
    torch.testing.assert_close((loss, lse), (expected, expected_lse))
    torch.testing.assert_close((x.grad, weight.grad[:v]), (plain_x.grad, plain_weight.grad))
    assert not weight.grad[v:].any(), "padding has a gradient"


def test_token_0_has_a_loss_and_a_negative_label_none():
    logits = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 4], [-1, 0]])
    loss, _ = vocab_parallel_cross_entropy(logits, labels, VocabRange(5, TP), TP)
    expected = cross_entropy(logits.movedim(-1, 1), labels, reduction="none", ignore_index=-1)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    assert torch.allclose(loss, expected)
    assert torch.allclose(torch.autograd.grad(loss.sum(), logits)[0], gradient)

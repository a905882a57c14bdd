"""What is cut along the vocabulary: whose rows are whose, and losses without logits against plain
torch."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from megatron5d.tensor_parallel.cross_entropy import SlicedLoss, vocab_parallel_cross_entropy
from megatron5d.tensor_parallel.embedding import VocabRange
from megatron5d.topology.axis import Axis


def test_ranks_beyond_the_vocabulary_hold_padding_alone():
    for size, starts, valid in (
        (61, [0, 16, 32, 48], [16, 16, 16, 13]),
        (20, [0, 8, 16, 20], [8, 8, 4, 0]),
    ):
        held = [VocabRange(size, Axis("tp", (0, 1, 2, 3), rank)) for rank in range(4)]
        assert [each.start for each in held] == starts and [each.valid for each in held] == valid


# fewer than a position has, one short of the whole, all at once
@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize(("softcap", "z_coef"), [(0.0, 0.0), (2.0, 0.3)])
def test_a_loss_in_slices_is_the_loss(tokens, softcap, z_coef):
    s, b, h, v = 5, 2, 6, 11
    x = torch.randn(s, b, h, dtype=torch.float64)
    labels = torch.randint(v, (s, b)).masked_fill(torch.arange(s * b).view(s, b) % 4 == 1, -100)
    share = torch.rand(s, b, dtype=torch.float64)  # of each token in the objective
    vocab = VocabRange(v, Axis("tp"))
    weight = nn.Parameter(torch.randn(vocab.rows, h, dtype=torch.float64))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, lse = SlicedLoss(vocab, Axis("tp"), False, tokens, z_coef, softcap)(mine, weight, labels)
    (loss * share).sum().backward()

    plain = weight.detach()[:v].clone().requires_grad_()
    logits = theirs @ plain.t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    wanted = cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    wanted_lse = logits.logsumexp(-1)
    ((wanted + z_coef * wanted_lse.square() * (labels >= 0)) * share).sum().backward()
    torch.testing.assert_close((loss, lse), (wanted, wanted_lse))
    torch.testing.assert_close((mine.grad, weight.grad[:v]), (theirs.grad, plain.grad))
    assert not weight.grad[v:].any(), "padding has a gradient"


def test_token_0_has_a_loss_and_a_negative_label_none():
    logits, labels = (
        torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True),
        torch.tensor([[0, 4], [-1, 0]]),
    )
    loss, _ = vocab_parallel_cross_entropy(
        logits, labels, VocabRange(5, Axis("tp", (0,), 0)), Axis("tp", (0,), 0)
    )
    expected = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-1
    ).view(2, 2)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    assert torch.allclose(loss, expected)
    assert torch.allclose(torch.autograd.grad(loss.sum(), logits)[0], gradient)

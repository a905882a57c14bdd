"""The fused head in slices against whole logits in float64; and the weight gradient it adds up with."""

import pytest
import torch

from kernels import linear_cross_entropy as module
from kernels.gemm import accumulate_weight_grad


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("tokens, slice_bytes", [(1, 1), (37, 1), (37, 2**20)])
def test_sum_losses_and_gradients(tokens, slice_bytes, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(module, "SLICE_BYTES", slice_bytes)
    x, weight = torch.randn(tokens, 24).to(dtype), torch.randn(136, 24).to(dtype)
    labels, token_weights = torch.randint(0, 136, (tokens,)), torch.rand(tokens, dtype=torch.float64)
    if tokens > 1:
        labels[3] = -100
    wide = [t.double().requires_grad_() for t in (x, weight)]
    want, want_losses = module.linear_cross_entropy_reference(*wide, labels, token_weights, z_coef=0.02)
    leaves = [t.requires_grad_() for t in (x, weight)]
    weights = token_weights.to(torch.float64 if dtype == torch.float64 else torch.float32)
    got, losses = module.linear_cross_entropy(*leaves, labels, weights, z_coef=0.02)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=0, check_dtype=False)
    torch.testing.assert_close(losses.double(), want_losses, rtol=10 * tolerance, atol=tolerance)
    wanted = torch.autograd.grad(3 * want, wide)
    plain, _ = module.linear_cross_entropy_reference(*leaves, labels, weights, z_coef=0.02)  # rounds its logits as well
    grads = zip(torch.autograd.grad(3 * got, leaves), torch.autograd.grad(3 * plain, leaves), wanted)
    for one, rounded, expected in grads:
        bound = tolerance * expected.norm() + (rounded.double() - expected).norm()
        assert one.dtype == dtype and (one.double() - expected).norm() < bound


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_a_vocabulary_in_two_shards_with_padding(dtype, tolerance, monkeypatch):
    """What each shard makes of its own rows and the merged statistics, against the whole vocabulary."""
    monkeypatch.setattr(module, "SLICE_BYTES", 1)
    x, weight = torch.randn(37, 24).to(dtype), torch.randn(100, 24).to(dtype)
    labels, token_weights = torch.randint(0, 100, (37,)), torch.rand(37, dtype=torch.float64)
    labels[5] = -100
    wide = [t.double().requires_grad_() for t in (x, weight)]
    want, want_losses = module.linear_cross_entropy_reference(*wide, labels, token_weights, z_coef=0.02)
    logits = (x @ weight.t()).double()
    whole = logits.amax(1), (logits - logits.amax(1, keepdim=True)).exp().sum(1), logits[range(37), labels.clamp_min(0)]
    found = []
    for start, rows in ((0, weight[:64]), (64, torch.cat((weight[64:], torch.full((12, 24), 9.0).to(dtype))))):
        slices, said = iter(torch.arange(37).split(16)), []

        def merge(row_max, row_sum, target, slices=slices, said=said):
            said.append((row_max, row_sum, target))
            at = next(slices)
            return tuple(each[at].to(row_max.dtype) for each in whole)

        leaves, shard = [x.clone().requires_grad_(), rows.clone().requires_grad_()], {"vocab_start": start}
        total, losses = module.linear_cross_entropy(
            *leaves, labels, token_weights.to(torch.promote_types(dtype, torch.float32)), z_coef=0.02, merge=merge,
            num_valid_columns=64 if start == 0 else 36, **shard,
        )  # fmt: skip
        torch.testing.assert_close(total.double(), want, rtol=tolerance, atol=0, check_dtype=False)
        torch.testing.assert_close(losses.double(), want_losses, rtol=10 * tolerance, atol=10 * tolerance)
        found.append((*torch.autograd.grad(total, leaves), [torch.cat(each).double() for each in zip(*said)]))
    (dx0, dw0, one), (dx1, dw1, other) = found
    peak = torch.maximum(one[0], other[0])
    merged = peak, sum(each[1] * (each[0] - peak).exp() for each in (one, other)), one[2] + other[2]
    for got, expected in zip(merged, whole):  # an ignored token has no target
        torch.testing.assert_close(got[labels >= 0], expected[labels >= 0], rtol=tolerance, atol=tolerance)
    assert not dw1[36:].any()
    wanted = torch.autograd.grad(want, wide)
    for got, expected in zip((dx0.double() + dx1.double(), torch.cat((dw0, dw1[:36])).double()), wanted):
        assert (got - expected).norm() < 3 * tolerance * expected.norm()


@pytest.mark.parametrize("n, out, inside", [(1, 8, 8), (7, 24, 136), (129, 72, 40), (64, 64, 64), (4097, 8, 16)])
def test_weight_grad_kernel(n, out, inside):
    main, dy, x = torch.randn(out, inside), torch.randn(n, out).bfloat16(), torch.randn(n, inside).bfloat16()
    want = main.double() + dy.double().t() @ x.double()
    where = main.data_ptr()
    accumulate_weight_grad(main, dy, x)
    assert main.data_ptr() == where and (main.double() - want).norm() < 1e-6 * want.norm()

"""8-bit quantisers against their definition, and products against the dequantised product in float64."""

import pytest
import torch

from kernels import fp8_matmul as module
from kernels.fp8_matmul import fp8_matmul
from kernels.fp8_quantize import E4M3, E5M2, quantize_blocks, quantize_rows, quantize_rows_both_ways, quantize_tensor


def by_definition(x, height, dtype):
    """Group by group: scale = amax / largest, values = nearest 8-bit float of x / scale."""
    rows, columns = x.shape
    values, scales = torch.empty(rows, columns), torch.empty(-(-rows // height), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * height, (i + 1) * height), slice(j * 128, (j + 1) * 128))
            amax = x[block].float().abs().max()
            scales[i, j] = amax / torch.finfo(dtype).max if amax > 0 else 1.0
            values[block] = (x[block].float() / scales[i, j]).to(dtype).float()
    return values, scales


def agree(got, x, height, dtype):
    values, scales = by_definition(x, height, dtype)
    torch.testing.assert_close(got.scales, scales, rtol=1e-6, atol=0)
    assert got.values.dtype == dtype
    # A quotient may round to the neighbour where the two divisions differ in the last bit: rare, and one step.
    wrong = got.values.float() != values
    assert wrong.float().mean() < 1e-3 and (got.values.float() - values).abs().max() <= values.abs().max() / 8


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (129, 127), (200, 300)])
def test_quantisers(shape, dtype):
    x = torch.randn(shape).bfloat16() * torch.logspace(-3, 3, shape[1])
    x[0, 0] = 0
    agree(quantize_rows(x, dtype), x, 1, dtype)
    straight, turned = quantize_rows_both_ways(x, dtype)
    agree(straight, x, 1, dtype)
    agree(turned, x.t(), 1, dtype)
    straight, turned = quantize_blocks(x, dtype)
    agree(straight, x, 128, dtype)
    assert torch.equal(turned.values.float(), straight.values.float().t()) and torch.equal(
        turned.scales, straight.scales.t()
    )


def test_zeros_quantise_to_zeros():
    q = quantize_rows(torch.zeros(3, 200))
    assert not q.values.float().any() and (q.scales == 1).all()


KINDS = {
    "tensorwise": (quantize_tensor, quantize_tensor),
    "forward": (quantize_rows, lambda w: quantize_blocks(w)[0]),
    "weight_gradient": (quantize_rows, quantize_rows),
    "mixed_formats": (lambda x: quantize_rows(x, E5M2), lambda w: quantize_blocks(w)[0]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m, n, k", [(1, 1, 16), (7, 130, 144), (129, 127, 256), (200, 260, 400)])
def test_matmul(kind, m, n, k):
    left, right = KINDS[kind]
    spread = torch.logspace(-2, 2, k)
    a, b = left(torch.randn(m, k) * spread), right(torch.randn(n, k) / spread)
    want = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    got = fp8_matmul(a, b, out_dtype=torch.float32)
    assert (got.double() - want).norm() < 1e-5 * want.norm()
    assert (fp8_matmul(a, b).double() - want).norm() < 5e-3 * want.norm()
    main = torch.randn(m, n)
    before = main.double()
    assert fp8_matmul(a, b, accumulate_into=main) is main
    assert (main.double() - before - want).norm() < 1e-5 * want.norm() + 1e-6 * before.norm()


def test_blockwise_is_closer_than_tensorwise_where_scales_differ():
    x, w = torch.randn(64, 512) * torch.logspace(-4, 4, 512), torch.randn(64, 512) / torch.logspace(-4, 4, 512)
    want = x.double() @ w.double().t()
    error = {name: (fp8_matmul(KINDS[name][0](x), KINDS[name][1](w)).double() - want).norm() for name in KINDS}
    assert error["forward"] < 0.5 * error["tensorwise"]


def test_what_does_not_fit_is_refused():
    a, b = quantize_rows(torch.randn(4, 128)), quantize_rows(torch.randn(4, 256))
    with pytest.raises(ValueError, match="contract"):
        fp8_matmul(a, b)
    with pytest.raises(ValueError, match="accumulate_into"):
        fp8_matmul(a, a, accumulate_into=torch.zeros(4, 5))


def test_the_kernel_really_runs(monkeypatch):
    monkeypatch.setattr(module, "_fp8_matmul_kernel", None)
    with pytest.raises(TypeError):
        fp8_matmul(quantize_rows(torch.randn(4, 128)), quantize_rows(torch.randn(4, 128)))

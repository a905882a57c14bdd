"""The repaired interpreter against torch: what is wrong without the repair.

The kernels' own tests cover loops, scans, integer atomics and descriptors.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.interpreted

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def arithmetic(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i, i < n, other=0)
    b = tl.load(y + i, i < n, other=0)
    tl.store(out + i, (a + b) * a - b, i < n)
    tl.store(out + n + i, tl.where(a > b, a, b), i < n)
    tl.store(out + 2 * n + i, a / (1.0 + b * b), i < n)
    tl.store(out + 3 * n, tl.sum(a, 0))
    tl.store(out + 3 * n + 1, tl.max(a, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic(dtype):
    x, y = torch.randn(100).to(dtype), torch.randn(100).to(dtype)
    out = torch.empty(302, dtype=dtype)
    arithmetic[(1,)](x, y, out, 100, BLOCK=128)
    assert torch.equal(out[:100], (x + y) * x - y)
    assert torch.equal(out[100:200], torch.maximum(x, y))
    torch.testing.assert_close(out[200:300], x / (1 + y * y), rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(out[300].float(), x.float().sum(), rtol=1e-2, atol=1e-1)
    assert out[301] == x.max()


@triton.jit
def extremes(x, y, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.maximum(a, b))
    tl.store(out + BLOCK + i, tl.minimum(a, b))
    tl.store(out + 2 * BLOCK + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extremes_ignore_nan_unless_it_is_to_propagate(dtype):
    nan = float("nan")
    x, y = (torch.tensor(v, dtype=dtype) for v in ([1, nan, 3, nan], [2, 5, nan, nan]))
    out = torch.empty(12, dtype=dtype)
    extremes[(1,)](x, y, out, BLOCK=4)
    expected = torch.cat([torch.fmax(x, y), torch.fmin(x, y), torch.maximum(x, y)])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def cast(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32, *FLOAT8])
def test_casts_equal_torch_bit_for_bit(source, target):
    x = torch.cat([torch.randn(4096) * s for s in (1e-3, 1e-1, 1.0, 30.0)]).to(source)
    out = torch.empty(x.shape, dtype=target)
    cast[(16,)](x, out, BLOCK=1024)
    assert torch.equal(out.view(torch.uint8), x.to(target).view(torch.uint8))


@pytest.mark.parametrize("target", FLOAT8)
def test_float8_saturates(target):
    x = torch.tensor([1e5, -1e5, float("inf"), 449.0, float("nan"), 0.0, -0.0, 1.0])
    out = torch.empty(8, dtype=target)
    cast[(1,)](x, out, BLOCK=8)
    largest = torch.finfo(target).max
    assert out.float()[:3].tolist() == [largest, -largest, largest] and out[4].float().isnan()


@triton.jit
def matmul(a, b, c, K, BLOCK: tl.constexpr):
    r = tl.arange(0, BLOCK)
    accumulator = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        x = tl.load(a + r[:, None] * K + (k + r)[None, :])
        y = tl.load(b + (k + r)[:, None] * BLOCK + r[None, :])
        accumulator = tl.dot(x, y, accumulator)
    tl.store(c + r[:, None] * BLOCK + r[None, :], accumulator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *FLOAT8])
def test_dot_accumulates_in_float32(dtype):
    a, b, c = torch.randn(32, 96).to(dtype), torch.randn(96, 32).to(dtype), torch.empty(32, 32)
    matmul[(1,)](a, b, c, 96, BLOCK=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


@triton.jit
def shifted(x, out, shift, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i + shift, i < n, other=0.0), i < n)


def test_out_of_bounds_raises():
    x, out = torch.randn(64), torch.empty(64)
    shifted[(1,)](x, out, 0, 64, BLOCK=64)
    for shift, n in ((1, 64), (-1, 64)):
        with pytest.raises(InterpreterError, match="load out of bounds"):
            shifted[(1,)](x, out, shift, n, BLOCK=64)
    with pytest.raises(InterpreterError, match="store out of bounds"):
        shifted[(1,)](torch.randn(128), out, 0, 65, BLOCK=128)


@triton.jit
def sum_without_other(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + i, i < n), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_masked_load_without_other_is_poison(dtype):
    out = torch.zeros(1, dtype=dtype)
    sum_without_other[(1,)](torch.ones(100, dtype=dtype), out, 100, BLOCK=128)
    assert out.isnan().all()


@triton.jit
def asserting(x):
    tl.device_assert(tl.load(x) > 0, "must be positive")


@triton.jit
def overflowing(out, stride):
    tl.store(out, (tl.program_id(0) + 3) * stride)


def test_asserts_and_overflow_fire():
    asserting[(1,)](torch.ones(1))
    with pytest.raises(InterpreterError, match="positive"):
        asserting[(1,)](torch.zeros(1))
    with pytest.raises(InterpreterError, match="overflow"):
        overflowing[(1,)](torch.zeros(1, dtype=torch.int64), 1 << 30)


@triton.jit
def add_into(x, out, BLOCK: tl.constexpr):
    tl.atomic_add(out + tl.arange(0, BLOCK) % 4, tl.load(x + tl.arange(0, BLOCK)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_atomics_meet_at_one_address(dtype):
    out = torch.zeros(4, dtype=dtype)
    add_into[(2,)](torch.ones(16, dtype=dtype), out, BLOCK=16)
    assert out.tolist() == [8.0] * 4


def test_types_made_once_are_checked_as_before():
    floats = tl.block_type(tl.float32, [4, 8])
    integers = tl.block_type(tl.int32, [tl.constexpr(4), 8])
    assert floats.shape is integers.shape and floats != integers
    assert str(integers) == "<['4', '8'], int32>" and integers.numel == 32
    assert integers == tl.block_type(tl.int32, [4, 8])
    assert list(floats.shape) == [4, 8] and floats.shape.type == tl.tuple([4, 8]).type
    for wrong in ([4.0, 8], [3, 8], [], (4, 8)):
        with pytest.raises((TypeError, ValueError, AssertionError)):
            tl.block_type(tl.float32, wrong)

"""The plain paths of every op against closed forms and torch's own functions."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron5d import kernels
from megatron5d.kernels import dispatch
from megatron5d.kernels.fp8.quantize_tensor import amax_of, quantize_tensor
from megatron5d.kernels.moe import permutation, permute
from megatron5d.kernels.tuning import readable

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def close(got, want, dtype):
    got, want = got.double(), want.double()
    assert got.shape == want.shape
    assert (got - want).norm() <= DTYPES[dtype] * want.norm() + 1e-300, float(
        (got - want).norm() / want.norm()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_torch(dtype):
    x, w, b = torch.randn(3, 5, 7).to(dtype), torch.randn(7).to(dtype), torch.randn(7).to(dtype)
    close(kernels.rms_norm(x, w, 1e-5), F.rms_norm(x.double(), (7,), w.double(), 1e-5), dtype)
    close(
        kernels.layer_norm(x, w, b, 1e-5),
        F.layer_norm(x.double(), (7,), w.double(), b.double(), 1e-5),
        dtype,
    )
    close(
        kernels.layer_norm(x, w, None, 1e-5),
        F.layer_norm(x.double(), (7,), w.double(), None, 1e-5),
        dtype,
    )


@pytest.mark.parametrize("layout", ["rows", "a part of each row", "transposed", "nothing"])
def test_the_gradient_of_a_norm_and_of_the_stream_beside_it(layout):
    wide = torch.randn(4, 3, 12, dtype=torch.float64)
    x = {"rows": wide[..., :7].contiguous(), "nothing": wide[:0, :, :7]}.get(layout, wide[..., 2:9])
    x = (x.transpose(0, 1) if layout == "transposed" else x).detach().requires_grad_()
    w = torch.randn(7, dtype=torch.float64, requires_grad=True)
    dy, dx = torch.randn(2, *x.shape, dtype=torch.float64)
    for used in ((0,), (1,), (0, 1)):
        ours, plain = kernels.add_rms_norm(x, None, w, 1e-3), (F.rms_norm(x, (7,), w, 1e-3), x)
        got, want = (
            torch.autograd.grad(
                [out[i] for i in used], (x, w), [(dy, dx)[i] for i in used], allow_unused=True
            )
            for out in (ours, plain)
        )
        for mine, theirs in zip(got, want):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                close(mine, theirs, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_equal_their_formulas(dtype):
    x = torch.randn(3, 10).to(dtype)
    gate, up = x.double().split(5, -1)
    close(kernels.activate(x, "swiglu"), gate / (1 + torch.exp(-gate)) * up, dtype)
    z = x.double()
    close(kernels.activate(x, "gelu"), z * 0.5 * (1 + torch.erf(z / math.sqrt(2))), dtype)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    close(kernels.activate(x, "gelu_tanh"), 0.5 * z * (1 + tanh), dtype)
    close(kernels.activate(x, "geglu_tanh"), 0.5 * gate * (1 + tanh[:, :5]) * up, dtype)
    x, gate, up = 8 * x, torch.minimum(8 * gate, torch.tensor(7.0)), (8 * up).clamp(-7, 7)
    assert (gate == 7).any() and (up == 7).any() and (up == -7).any()
    close(
        kernels.activate(x, "swiglu_clamped"),
        gate / (1 + torch.exp(-1.702 * gate)) * (up + 1),
        dtype,
    )


def test_odd_gate_up_is_refused():
    with pytest.raises(ValueError, match="even"):
        kernels.activate(torch.zeros(3, 5), "swiglu")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_a_complex_rotation(interleaved):
    q, k = torch.randn(5, 2, 4, 10).double(), torch.randn(5, 2, 1, 8).double()
    angle = torch.randn(5, 2, 3).double()

    def rotate(x):
        pairs = (
            x[..., :6].unflatten(-1, (3, 2)) if interleaved else x[..., :6].unflatten(-1, (2, 3)).mT
        )
        rotated = torch.view_as_real(
            torch.view_as_complex(pairs.contiguous())
            * torch.polar(torch.ones(1).double(), angle)[:, :, None]
        )
        flat = rotated.flatten(-2) if interleaved else rotated.mT.flatten(-2)
        return torch.cat((flat, x[..., 6:]), -1)

    got_q, got_k = kernels.apply_rope(q, k, angle.cos(), angle.sin(), interleaved)
    close(got_q, rotate(q), torch.float64)
    close(got_k, rotate(k), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 3])
def test_sharded_cross_entropy_equals_torch(dtype, shards):
    rows, columns, valid, z_coef = 11, 12, 10, 0.1
    logits = torch.randn(rows, columns).to(dtype) * 3
    labels = torch.randint(0, valid, (rows,))
    labels[4] = -100
    dloss = torch.rand(rows).double()
    exact = logits.double().requires_grad_()
    lse = exact[:, :valid].logsumexp(-1)
    want = F.cross_entropy(exact[:, :valid], labels, reduction="none") + (z_coef * lse**2).where(
        labels != -100, 0
    )
    want.backward(dloss)

    width = columns // shards
    parts = [logits[:, i * width : (i + 1) * width].clone() for i in range(shards)]
    live = [max(0, min(width, valid - i * width)) for i in range(shards)]
    stats = [
        kernels.vocab_statistics(p, labels, i * width, n)
        for i, (p, n) in enumerate(zip(parts, live))
    ]
    row_max = torch.stack([m for m, _, _ in stats]).amax(0)
    row_sum = sum(s * (m - row_max).exp() for m, s, _ in stats)
    target = sum(t for _, _, t in stats)
    merged = row_max + row_sum.log()
    loss = (merged - target + z_coef * merged**2).where(labels != -100, 0)
    close(loss, want.detach(), dtype)
    for i, (p, n) in enumerate(zip(parts, live)):
        out = kernels.vocab_cross_entropy_backward(
            p, labels, row_max, row_sum, dloss, i * width, n, z_coef=z_coef
        )
        assert out is p
    close(torch.cat(parts, 1), exact.grad, dtype)
    assert not torch.cat(parts, 1)[:, valid:].any()


def test_cross_entropy_is_differentiable():
    logits = torch.randn(6, 9).double().requires_grad_()
    labels = torch.tensor([0, 3, -100, 6, 2, 1])
    assert torch.autograd.gradcheck(
        lambda z: kernels.cross_entropy(z, labels, num_valid_columns=7, z_coef=0.01), logits
    )
    want = kernels.cross_entropy_reference(logits, labels, num_valid_columns=7, z_coef=0.01)
    close(
        kernels.cross_entropy(logits, labels, num_valid_columns=7, z_coef=0.01), want, torch.float64
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_grad_adds_in_place(dtype):
    main = torch.randn(5, 7, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    dy, x = torch.randn(9, 5).to(dtype), torch.randn(9, 7).to(dtype)
    want = main.double() + dy.double().t() @ x.double()
    where = main.data_ptr()
    kernels.accumulate_weight_grad(main, dy, x)
    assert main.data_ptr() == where
    close(main, want, torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_weight_grad_is_written_over_anything(dtype):
    main = torch.full(
        (5, 7), torch.nan, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    dy, x = torch.randn(9, 5).to(dtype), torch.randn(9, 7).to(dtype)
    kernels.accumulate_weight_grad(main, dy, x, accumulate=False)
    close(main, dy.double().t() @ x.double(), main.dtype)
    kernels.accumulate_weight_grad(main, dy[:0], x[:0], accumulate=False)
    assert not main.any()


def test_the_package_says_whose_it_is():
    assert kernels.OWNER == "megatron5d"


ONCE = {
    "attention": lambda x: kernels.attention(*x.view(4, 1, 1, 24).split(8, -1), scale=1.0)[0],
    "cross_entropy": lambda x: kernels.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "permute": lambda x: permute(x, permutation(torch.tensor([[1], [0], [1], [0]]), 2)).square(),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_second_derivative_is_refused(name):
    """It would lack what comes through the log-sum-exp, and nothing would tell."""
    x = torch.randn(4, 24, dtype=torch.float64, requires_grad=True)
    y = ONCE[name](x)
    with pytest.raises(
        RuntimeError, match="differentiable once|derivative for .* is not implemented"
    ):
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        dx.sum().backward()
    torch.autograd.grad(ONCE[name](x).sum(), x)


def test_a_tensor_of_another_gpu_is_refused(monkeypatch):
    class OfAnotherGpu(torch.Tensor):
        is_cuda, is_cpu = True, False

        def get_device(self):
            return 1

    x = torch.zeros(3, 8).as_subclass(OfAnotherGpu)
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"current device, cuda:0 \(got .* on cuda:1\)"):
        dispatch.runs_triton(x)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert dispatch.runs_triton(x)


def test_rows_are_copied_only_where_neighbours_lie_apart():
    x = torch.arange(24.0).view(4, 6)
    assert dispatch.rows_of(x[None, :, 2:]).data_ptr() == x[:, 2:].data_ptr()
    assert dispatch.rows_of(x[:, 3:4]).data_ptr() == x[:, 3:4].data_ptr()
    apart = dispatch.rows_of(x[1:2, ::2])
    assert apart.stride() == (3, 1) and apart.tolist() == [[6, 8, 10]]


def test_the_copy_engine_reads_what_begins_and_goes_on_at_multiples_of_16_bytes():
    x = torch.zeros(65, dtype=torch.bfloat16)
    assert readable(x[:64].view(4, 16)) and not readable(x[1:].view(4, 16))
    assert not readable(x[:48].view(4, 12)) and not readable(x[:64].view(16, 4).t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [0.0, 1e-39, math.inf, math.nan])
def test_one_scale_for_a_tensor_is_its_formula_bit_by_bit(dtype, odd):
    """scale = amax / largest, q = x · (1 / scale), each rounded once in float32; all NaN where x is
    not finite."""
    x = torch.randn(5, 9).to(dtype) if odd else torch.zeros(5, 9, dtype=dtype)
    x = x * odd if 0 < odd < 1 else x
    if not math.isfinite(odd):
        x[4, 8] = odd
    finite, wide = math.isfinite(odd), x.float()
    amax = wide.abs().max() if finite else torch.tensor(math.inf)
    assert torch.equal(amax_of(x), amax)
    for eight, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        scale = amax.clamp(min=2.0**-100) / largest if 0 < amax < math.inf else torch.tensor(1.0)
        want = (
            (wide * (1 / scale)).clamp(-largest, largest)
            if finite
            else torch.full_like(wide, math.nan)
        )
        got = quantize_tensor(x, eight)
        assert torch.equal(got.values.view(torch.uint8), want.to(eight).view(torch.uint8))
        assert torch.equal(got.scales, scale.reshape(1, 1))

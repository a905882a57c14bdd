"""The plain paths of all operations against closed forms and torch's own functions."""

import math

import pytest
import torch
import torch.nn.functional as F
from kernel_lab.accuracy import relative_error, same_bits
from kernel_lab.cross_entropy import exact_cross_entropy, sharded_cross_entropy

from megatron5d import kernels
from megatron5d.kernels import dispatch
from megatron5d.kernels.activation import activation_reference
from megatron5d.kernels.fp8.quantize_tensor import amax_of, quantize_tensor
from megatron5d.kernels.moe import permutation, permute
from megatron5d.kernels.tuning import readable

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def close(x, expected, dtype=torch.float64):
    assert x.shape == expected.shape
    assert relative_error(x, expected) <= DTYPES[dtype], relative_error(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_torch(dtype):
    x, w, b = torch.randn(3, 5, 7).to(dtype), torch.randn(7).to(dtype), torch.randn(7).to(dtype)
    wide_x, wide_w, wide_b = x.double(), w.double(), b.double()
    close(kernels.rms_norm(x, w, 1e-5), F.rms_norm(wide_x, (7,), wide_w, 1e-5), dtype)
    for bias, wide_bias in ((b, wide_b), (None, None)):
        expected = F.layer_norm(wide_x, (7,), wide_w, wide_bias, 1e-5)
        close(kernels.layer_norm(x, w, bias, 1e-5), expected, dtype)


@pytest.mark.parametrize("layout", ["rows", "a slice of each row", "transposed", "nothing"])
def test_the_gradient_of_a_norm_and_of_the_residual_stream(layout):
    wide = torch.randn(4, 3, 12, dtype=torch.float64)
    x = {"rows": wide[..., :7].contiguous(), "nothing": wide[:0, :, :7]}.get(layout, wide[..., 2:9])
    x = (x.transpose(0, 1) if layout == "transposed" else x).detach().requires_grad_()
    w = torch.randn(7, dtype=torch.float64, requires_grad=True)
    douts = torch.randn(2, *x.shape, dtype=torch.float64)
    for used in ((0,), (1,), (0, 1)):
        outputs = kernels.add_rms_norm(x, None, w, 1e-3), (F.rms_norm(x, (7,), w, 1e-3), x)
        grads, expected = (
            torch.autograd.grad(
                [out[i] for i in used], (x, w), [douts[i] for i in used], allow_unused=True
            )
            for out in outputs
        )
        for grad, expected_grad in zip(grads, expected):
            assert (grad is None) == (expected_grad is None)
            if grad is not None:
                close(grad, expected_grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_equal_their_formulas(dtype):
    x = torch.randn(3, 10).to(dtype)
    z, (gate, up) = x.double(), x.double().split(5, -1)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    clamped_gate, clamped_up = (8 * gate).clamp(max=7), (8 * up).clamp(-7, 7)
    assert (clamped_gate == 7).any() and (clamped_up == 7).any() and (clamped_up == -7).any()
    sigmoid = 1 / (1 + torch.exp(-1.702 * clamped_gate))
    formulas = {
        "swiglu": gate / (1 + torch.exp(-gate)) * up,
        "gelu": z * 0.5 * (1 + torch.erf(z / math.sqrt(2))),
        "gelu_tanh": 0.5 * z * (1 + tanh),
        "geglu_tanh": 0.5 * gate * (1 + tanh[:, :5]) * up,
    }
    for kind, expected in formulas.items():
        close(kernels.activate(x, kind), expected, dtype)
    expected = clamped_gate * sigmoid * (clamped_up + 1)
    close(kernels.activate(8 * x, "swiglu_clamped"), expected, dtype)


def test_odd_gate_up_is_refused():
    with pytest.raises(ValueError, match="even"):
        kernels.activate(torch.zeros(3, 5), "swiglu")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_a_complex_rotation(interleaved):
    q, k = torch.randn(5, 2, 4, 10).double(), torch.randn(5, 2, 1, 8).double()
    angle = torch.randn(5, 2, 3).double()

    def rotate(x):
        rotary = x[..., :6]
        pairs = rotary.unflatten(-1, (3, 2)) if interleaved else rotary.unflatten(-1, (2, 3)).mT
        factor = torch.polar(torch.ones_like(angle), angle)[:, :, None]
        rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factor)
        rotated = rotated if interleaved else rotated.mT
        return torch.cat((rotated.flatten(-2), x[..., 6:]), -1)

    for x, y in zip((q, k), kernels.apply_rope(q, k, angle.cos(), angle.sin(), interleaved)):
        close(y, rotate(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 3])
def test_sharded_cross_entropy_equals_torch(dtype, shards):
    logits, labels = torch.randn(11, 12).to(dtype) * 3, torch.randint(0, 10, (11,))
    labels[4] = -100
    dloss = torch.rand(11).double()
    loss, grad = sharded_cross_entropy(logits, labels, dloss, 10, shards, 0.1)
    exact_loss, exact_grad = exact_cross_entropy(logits, labels, dloss, 10, 0.1)
    close(loss, exact_loss, dtype)
    close(grad, exact_grad, dtype)
    assert not grad[:, 10:].any()


def test_cross_entropy_is_differentiable():
    logits = torch.randn(6, 9).double().requires_grad_()
    inputs = (torch.tensor([0, 3, -100, 6, 2, 1]),)
    options = {"num_valid_columns": 7, "z_coef": 0.01}
    assert torch.autograd.gradcheck(lambda z: kernels.cross_entropy(z, *inputs, **options), logits)
    expected = kernels.cross_entropy_reference(logits, *inputs, **options)
    close(kernels.cross_entropy(logits, *inputs, **options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [True, False])
def test_weight_grad_in_place(dtype, accumulate):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    main_grad = (
        torch.randn(5, 7, dtype=wide) if accumulate else torch.full((5, 7), torch.nan).to(wide)
    )
    dy, x = torch.randn(9, 5).to(dtype), torch.randn(9, 7).to(dtype)
    expected = dy.double().t() @ x.double() + (main_grad if accumulate else 0)
    address = main_grad.data_ptr()
    kernels.accumulate_weight_grad(main_grad, dy, x, accumulate=accumulate)
    assert main_grad.data_ptr() == address
    close(main_grad, expected, wide)
    kernels.accumulate_weight_grad(main_grad, dy[:0], x[:0], accumulate=False)
    assert not main_grad.any()


def test_the_package_says_whose_it_is():
    assert kernels.OWNER == "megatron5d"


ONCE = {
    "attention": lambda x: kernels.attention(*x.view(4, 1, 1, 24).split(8, -1), scale=1.0)[0],
    "cross_entropy": lambda x: kernels.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "permute": lambda x: permute(x, permutation(torch.tensor([[1], [0], [1], [0]]), 2)).square(),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_second_derivative_is_refused(name):
    """It would silently lack what passes through the log-sum-exp."""
    x = torch.randn(4, 24, dtype=torch.float64, requires_grad=True)
    y = ONCE[name](x)
    message = "differentiable once|derivative for .* is not implemented"
    with pytest.raises(RuntimeError, match=message):
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


def test_rows_are_copied_only_without_unit_stride():
    x = torch.arange(24.0).view(4, 6)
    assert dispatch.rows_of(x[None, :, 2:]).data_ptr() == x[:, 2:].data_ptr()
    assert dispatch.rows_of(x[:, 3:4]).data_ptr() == x[:, 3:4].data_ptr()
    copy = dispatch.rows_of(x[1:2, ::2])
    assert copy.stride() == (3, 1) and copy.tolist() == [[6, 8, 10]]


def test_the_copy_engine_reads_from_multiples_of_16_bytes():
    x = torch.zeros(65, dtype=torch.bfloat16)
    assert readable(x[:64].view(4, 16)) and not readable(x[1:].view(4, 16))
    assert not readable(x[:48].view(4, 12)) and not readable(x[:64].view(16, 4).t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [0.0, 1e-39, math.inf, math.nan])
def test_one_scale_for_a_tensor_is_its_formula_bit_by_bit(dtype, odd):
    """scale = amax / largest, q = x · (1 / scale), each rounded once in float32; all NaN if x is
    not finite."""
    x = torch.randn(5, 9).to(dtype) * (odd if odd < 1 else 1)
    finite = math.isfinite(odd)
    if not finite:
        x[4, 8] = odd
    amax = x.float().abs().max() if finite else torch.tensor(math.inf)
    assert torch.equal(amax_of(x), amax)
    for fp8, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        scale = amax.clamp(min=2.0**-100) / largest if 0 < amax < math.inf else torch.tensor(1.0)
        expected = (x.float() * (1 / scale)).clamp(-largest, largest)
        expected = expected if finite else torch.full_like(expected, math.nan)
        quantized = quantize_tensor(x, fp8)
        assert same_bits(quantized.values, expected.to(fp8))
        assert torch.equal(quantized.scales, scale.reshape(1, 1))


def test_clamped_swiglu_has_its_derivative_at_its_limits():
    """As in the kernel; that of `clamp` depends on the version of torch."""
    at = torch.tensor([[7.0, 7.0], [7.0, -7.0]], dtype=torch.float64, requires_grad=True)
    inside = (at.detach() * (1 - 1e-9)).requires_grad_()
    for x in (at, inside):
        activation_reference(x, "swiglu_clamped").sum().backward()
    assert torch.allclose(at.grad, inside.grad) and torch.all(at.grad != 0)

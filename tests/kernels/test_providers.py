"""Libraries behind our operations: the numbers of plain torch in float64, and only what each of
them supports."""

import json

import pytest
import torch
from kernel_lab.attention import attention_results, make_qkv
from libraries_on_cpu import counted, on_cpu

from megatron5d import kernels
from megatron5d.config.convert import described
from megatron5d.kernels import choice, gemm, tuning
from megatron5d.kernels.choice import (
    AttentionRequest,
    Fp8Request,
    GroupedRequest,
    NormRequest,
    Settings,
    provider_name,
)
from megatron5d.kernels.fp8.gemm import fp8_matmul, fp8_matmul_reference
from megatron5d.kernels.fp8.quantize import E5M2, quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import quantize_tensor
from megatron5d.kernels.norm import norm_reference
from megatron5d.kernels.providers import cudnn, flash_attention_4, torch_gemm

SHAPES = {
    "grouped heads": {"a": 4, "g": 2, "d": 32},
    "one key head": {"a": 4, "d": 16},
    "narrow values": {"g": 2, "d": 192, "dv": 128},
}
CUDNN = {"attention": "cudnn", "deterministic": False, "strict": True}
FA4 = {"attention": "fa4", "strict": True}
BOTH = pytest.mark.parametrize("options", [CUDNN, FA4], ids=["cudnn", "fa4"])


def qkv(s=24, a=4, g=1, d=32, **shape):
    return make_qkv(s=s, a=a, g=g, d=d, dtype=torch.float64, **shape)


def close(pairs):
    for x, exact in pairs:
        torch.testing.assert_close(x, exact, rtol=1e-11, atol=1e-11)


def assert_attention(options, inputs, **rule):
    """out, lse and all gradients equal those of plain autograd."""
    with on_cpu(**options) as settings:
        close(attention_results(*inputs, settings=settings, **rule))
        name = options["attention"]
        assert counted() == {f"{name} forward": 1, f"{name} backward": 1}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@BOTH
def test_attention_of_a_library(options, shape, causal):
    assert_attention(options, qkv(**shape), causal=causal)


@pytest.mark.parametrize(
    "rule",
    [
        {"window": 5},
        {"window": 5, "causal": False},
        {"softcap": 3.0},
        {"window": 7, "softcap": 2.0},
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_masks_of_flash_attention_4(rule, with_sinks):
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    assert_attention(FA4, qkv(g=2), sinks=sinks, **rule)


@BOTH
def test_a_backward_takes_the_global_out_and_lse(options):
    """Two blocks of keys, as in a ring; q is a view of a projection, dout has another layout."""
    q, k, v = qkv(t=48, g=2)
    q = torch.cat([q, q], 2)[:, :, :4]
    arguments = {"scale": 0.2, "causal": False}
    out, lse = kernels.attention(q, k, v, **arguments)
    dout = torch.randn(2, 24, 4, 32, dtype=torch.float64).transpose(0, 1)
    exact = kernels.attention_backward(dout, q, k, v, out, lse, **arguments)
    with on_cpu(**options) as settings:
        dqs, *dkv = zip(
            *(
                kernels.attention_backward(
                    dout, q, k[block], v[block], out, lse, settings=settings, **arguments
                )
                for block in (slice(24), slice(24, 48))
            )
        )
    close(zip((sum(dqs), *map(torch.cat, dkv)), exact))


def test_what_a_library_does_not_support_is_computed_elsewhere():
    documents = torch.tensor([[0] * 10 + [1] * 14] * 2)
    q, k, v = qkv(g=2)
    with on_cpu(attention="cudnn", deterministic=False) as settings:
        results = attention_results(q, k, v, grad=False, documents=documents, settings=settings)
        assert not counted()
    close(results)
    refused = pytest.raises(ValueError, match="cudnn: it does not support Attention")
    with on_cpu(**CUDNN) as settings, refused:
        kernels.attention(q, k, v, scale=0.2, documents=documents, settings=settings)


def test_only_deterministic_backwards_by_default():
    with on_cpu(attention="cudnn") as settings:
        attention_results(*qkv(g=2), settings=settings)
        assert counted() == {"cudnn forward": 1}


def test_flash_attention_4_on_blackwell():
    assert_attention({**FA4, "capability": 100}, qkv(a=2, g=2, d=64))


M, N, K = 64, 128, 512


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(0, 0), (1, 1), (1, 128), (128, 1)])
def test_fp8_by_torch(kinds, out_dtype):
    makers = {0: quantize_tensor, 1: quantize_rows, 128: lambda x: quantize_blocks(x)[0]}
    a, b = (makers[kind](torch.randn(size, K)) for kind, size in zip(kinds, (M, N)))
    exact = fp8_matmul_reference(a, b, torch.float64)
    ones, nans = (torch.full((M, N), fill, dtype=out_dtype) for fill in (1.0, torch.nan))
    with on_cpu(fp8="torch", strict=True) as settings:
        y = fp8_matmul(a, b, out_dtype=out_dtype, settings=settings)
        total = fp8_matmul(a, b, into=ones, settings=settings)
        written = fp8_matmul(a, b, into=nans, accumulate=False, settings=settings)
        assert counted() == {"scaled_mm": 3}
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[out_dtype]
    for x, expected in ((y, exact), (total, exact + 1)):
        assert (x.double() - expected).abs().max() <= tolerance * exact.abs().max()
    assert torch.equal(written, y)


def test_fp8_that_cublas_would_misread_is_left_to_triton():
    request = Fp8Request(90, (M, N, K), (1, 128), (torch.float8_e4m3fn,) * 2, torch.bfloat16)
    supported = [{}, {"rows": (0, 0), "capability": 100}]
    unsupported = [
        {"capability": 100},
        {"sizes": (M, N, 640)},  # five blocks of scales: 20 bytes
        {"sizes": (62, N, K)},
        {"rows": (128, 128)},
        {"dtypes": (E5M2, E5M2)},
        {"out_dtype": torch.float16},
    ]
    for expected, changes in ((True, supported), (False, unsupported)):
        for change in changes:
            assert torch_gemm.supports(request._replace(**change), True) == expected, change


def test_grouped_by_torch():
    """With an empty expert, and rows past the last one's, which torch leaves uninitialized."""
    offsets = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    leaves = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((16, 32), (3, 24, 32))
    ]
    exact = gemm.grouped_matmul_reference(*leaves, offsets)
    dy = torch.randn_like(exact)
    exact_grads = torch.autograd.grad(exact, leaves, dy)
    with on_cpu(grouped="torch", strict=True) as settings:
        y = gemm.grouped_matmul(*leaves, offsets, settings)
        close(zip((y, *torch.autograd.grad(y, leaves, dy)), (exact, *exact_grads)))
        assert counted() == {"grouped_mm": 2}


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms_by_torch(centered, with_residual):
    shapes = ((3, 4, 32), (3, 4, 32), (32,), (32,))
    tensors = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    x, residual, weight, bias = tensors
    leaves = [x, *([residual] if with_residual else []), weight, *([bias] if centered else [])]
    total = x + residual if with_residual else x * 1
    exact = norm_reference(total, weight, bias if centered else None, eps=1e-5, centered=centered)
    dy, dtotal = torch.randn_like(exact), torch.randn_like(exact)
    exact_grads = torch.autograd.grad((exact, total), leaves, (dy, dtotal))
    norm = kernels.add_layer_norm if centered else kernels.add_rms_norm
    added = residual if with_residual else None
    with on_cpu(norm="torch", strict=True) as settings:
        outputs = norm(x, added, weight, *([bias] if centered else []), 1e-5, settings)
        assert centered or counted() == {"rms_norm forward": 1}
        grads = torch.autograd.grad(outputs, leaves, (dy, dtotal))
        close(zip((*outputs, *grads), (exact, total, *exact_grads)))


REQUESTS = [
    AttentionRequest(90, False, torch.bfloat16, (8192, 1, 32, 128), (8192, 1, 8, 128), 128),
    Fp8Request(90, (8192, 4096, 4096), (1, 128), (torch.float8_e4m3fn,) * 2, torch.bfloat16),
    GroupedRequest(90, torch.bfloat16, 65536, 64, 1408, 2048),
    NormRequest(90, False, torch.bfloat16, torch.bfloat16, 4096, False),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.operation)
def test_auto_follows_the_default_order_unless_one_was_measured(request_, monkeypatch, tmp_path):
    family = choice.family_of(request_)
    with on_cpu():
        first = (*choice.DEFAULT_ORDER[request_.operation], choice.TRITON)[0]
        assert provider_name(request_, Settings()) == first
        assert provider_name(request_, Settings(**{family: "triton"})) == "triton"
        other = next(name for name in described(f"kernels.{family}").choices[1:] if name != first)
        (key, size), *_ = request_.key.items()
        entries = [
            {"up_to": {key: size - 1}, "config": {"order": [first]}},
            {"config": {"order": [other]}},
        ]
        (tmp_path / "providers").mkdir()
        (tmp_path / "providers/sm_90.json").write_text(json.dumps({request_.operation: entries}))
        monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
        tuning.table.cache_clear()
        assert provider_name(request_, Settings()) == other
        # nothing was measured on sm_80
        assert provider_name(request_._replace(capability=80), Settings()) in ("triton", "cudnn")
    tuning.table.cache_clear()


def test_head_dims_that_a_library_lacks(monkeypatch):
    def request(capability=90, d=192, dv=128):
        return AttentionRequest(
            capability, False, torch.bfloat16, (8192, 1, 32, d), (8192, 1, 8, d), dv
        )

    monkeypatch.setattr(cudnn, "version", lambda: 91000)
    assert not cudnn.supports(request(), False)
    monkeypatch.setattr(cudnn, "version", lambda: 91100)
    assert cudnn.supports(request(), False) and not cudnn.supports(request(80), False)
    assert not cudnn.supports(request(d=256, dv=256), False)
    assert flash_attention_4.supports(request(100), True)
    assert not flash_attention_4.supports(request(100, 256, 128), True)
    assert not flash_attention_4.supports(request(80, 128), True)


def test_nothing_is_chosen_without_a_gpu():
    cpu, meta = torch.empty(1), torch.empty(1, device="meta")
    assert choice.capability_of(cpu) == choice.capability_of(meta) == 0

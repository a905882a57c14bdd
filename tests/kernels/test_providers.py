"""Libraries behind our operations: the same numbers as in float64 by plain torch, and only what
each of them supports."""

import json
from dataclasses import replace

import pytest
import torch
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
from megatron5d.kernels.flash_attention.plain import AttentionRule
from megatron5d.kernels.fp8.gemm import fp8_matmul, fp8_matmul_reference
from megatron5d.kernels.fp8.quantize import E5M2, quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import quantize_tensor
from megatron5d.kernels.plain_norm import norm_reference
from megatron5d.kernels.providers import cudnn, flash_attention_4, torch_gemm

SHAPES = {
    "grouped heads": (4, 2, 32, 32),
    "one key head": (4, 1, 16, 16),
    "narrow values": (2, 2, 192, 128),
}
CUDNN = {"attention": "cudnn", "deterministic": False, "strict": True}
FA4 = {"attention": "fa4", "strict": True}


def qkv(heads, groups, dim, value_dim, s=24, t=24, b=2):
    sizes = ((s, b, heads, dim), (t, b, groups, dim), (t, b, groups, value_dim))
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def close(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)


def assert_attention(settings, inputs, sinks=None, **rule):
    """out, lse and all gradients equal those of plain autograd."""
    leaves = [*inputs, *([sinks] if sinks is not None else [])]
    scale = inputs[0].shape[-1] ** -0.5
    want, want_lse = kernels.attention_reference(*inputs, AttentionRule(scale, **rule), sinks)
    dout = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, leaves, dout)
    with on_cpu(**settings) as used:
        out, lse = kernels.attention(*inputs, scale=scale, sinks=sinks, **rule, settings=used)
        close([out, lse, *torch.autograd.grad(out, leaves, dout)], [want, want_lse, *want_grads])
        name = settings["attention"]
        assert counted() == {f"{name} forward": 1, f"{name} backward": 1}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("settings", [CUDNN, FA4], ids=["cudnn", "fa4"])
def test_attention_of_a_library(settings, shape, causal):
    assert_attention(settings, qkv(*shape), causal=causal)


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
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    assert_attention(FA4, qkv(4, 2, 32, 32), sinks, **rule)


@pytest.mark.parametrize("settings", [CUDNN, FA4], ids=["cudnn", "fa4"])
def test_a_backward_takes_the_global_out_and_lse(settings):
    """Two blocks of keys, as in a ring; q is a view of a projection, and dout comes in another
    layout."""
    q, k, v = (x.detach() for x in qkv(4, 2, 32, 32, t=48))
    q = torch.cat([q, q], 2)[:, :, :4]
    out, lse = kernels.attention(q, k, v, scale=0.2, causal=False)
    dout = torch.randn(2, 24, 4, 32, dtype=torch.float64).transpose(0, 1)
    want = kernels.attention_backward(dout, q, k, v, out, lse, scale=0.2, causal=False)
    with on_cpu(**settings) as used:
        options = {"scale": 0.2, "causal": False, "settings": used}
        halves = [
            kernels.attention_backward(dout, q, k[half], v[half], out, lse, **options)
            for half in (slice(24), slice(24, 48))
        ]
    close(
        [
            halves[0][0] + halves[1][0],
            *(torch.cat(pair) for pair in zip(halves[0][1:], halves[1][1:])),
        ],
        want,
    )


def test_what_a_library_does_not_take_is_computed_elsewhere():
    documents = torch.tensor([[0] * 10 + [1] * 14] * 2)
    inputs = qkv(4, 2, 32, 32)
    with on_cpu(attention="cudnn", deterministic=False) as settings:
        out, _ = kernels.attention(*inputs, scale=0.2, documents=documents, settings=settings)
        assert not counted()
    close([out], [kernels.attention_reference(*inputs, AttentionRule(0.2, documents=documents))[0]])
    refused = pytest.raises(ValueError, match="cudnn: it does not support Attention")
    with on_cpu(**CUDNN) as settings, refused:
        kernels.attention(*inputs, scale=0.2, documents=documents, settings=settings)


def test_only_deterministic_backwards_unless_asked():
    inputs = qkv(4, 2, 32, 32)
    with on_cpu(attention="cudnn") as settings:
        out, _ = kernels.attention(*inputs, scale=0.2, settings=settings)
        out.sum().backward()
        assert counted() == {"cudnn forward": 1}


def test_on_blackwell_too():
    assert_attention({**FA4, "capability": 100}, qkv(2, 2, 64, 64))


M, N, K = 64, 128, 512


def operands(kinds, n=N, k=K):
    x, w = torch.randn(M, k), torch.randn(n, k)
    makers = {0: quantize_tensor, 1: quantize_rows, 128: lambda x: quantize_blocks(x)[0]}
    return makers[kinds[0]](x), makers[kinds[1]](w)


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(0, 0), (1, 1), (1, 128), (128, 1)])
def test_fp8_by_torch(kinds, out_dtype):
    a, b = operands(kinds)
    want = fp8_matmul_reference(a, b, torch.float64)
    ones, nans = (torch.full((M, N), fill, dtype=out_dtype) for fill in (1.0, torch.nan))
    with on_cpu(fp8="torch", strict=True) as settings:
        got = fp8_matmul(a, b, out_dtype=out_dtype, settings=settings)
        total = fp8_matmul(a, b, into=ones, settings=settings)
        alone = fp8_matmul(a, b, into=nans, accumulate=False, settings=settings)
        assert counted() == {"scaled_mm": 3}
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[out_dtype]
    assert (got.double() - want).abs().max() <= tolerance * want.abs().max()
    assert (total.double() - want - 1).abs().max() <= tolerance * want.abs().max()
    assert torch.equal(alone, got)


def test_fp8_that_cublas_would_misread_is_left_to_triton():
    here = Fp8Request(90, (M, N, K), (1, 128), (torch.float8_e4m3fn,) * 2, torch.bfloat16)
    supports = torch_gemm.supports
    assert supports(here, True) and supports(here._replace(rows=(0, 0), capability=100), True)
    assert not supports(here._replace(capability=100), True)
    assert not supports(here._replace(sizes=(M, N, 640)), True)  # five blocks of scales: 20 bytes
    assert not supports(here._replace(sizes=(62, N, K)), True)
    assert not supports(here._replace(rows=(128, 128)), True)
    assert not supports(here._replace(dtypes=(E5M2, E5M2)), True)
    assert not supports(here._replace(out_dtype=torch.float16), True)


def test_grouped_by_torch():
    """Empty experts, and rows past the last one's, which torch leaves as they are."""
    offsets = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    x, weight = (
        torch.randn(16, 32, dtype=torch.float64),
        torch.randn(3, 24, 32, dtype=torch.float64),
    )
    x.requires_grad_(), weight.requires_grad_()
    want = gemm.grouped_matmul_reference(x, weight, offsets)
    dy = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, (x, weight), dy)
    with on_cpu(grouped="torch", strict=True) as settings:
        got = gemm.grouped_matmul(x, weight, offsets, settings)
        close([got, *torch.autograd.grad(got, (x, weight), dy)], [want, *want_grads])
        assert counted() == {"grouped_mm": 2}


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms_by_torch(centered, with_residual):
    x, residual = (torch.randn(3, 4, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(32, dtype=torch.float64, requires_grad=True) for _ in range(2))
    leaves = [x, *([residual] if with_residual else []), weight, *([bias] if centered else [])]
    total = x + residual if with_residual else x * 1
    want = norm_reference(total, weight, bias if centered else None, eps=1e-5, centered=centered)
    dy, dtotal = torch.randn_like(want), torch.randn_like(want)
    want_grads = torch.autograd.grad((want, total), leaves, (dy, dtotal))
    with on_cpu(norm="torch", strict=True) as settings:
        added = residual if with_residual else None
        if centered:
            got = kernels.add_layer_norm(x, added, weight, bias, 1e-5, settings)
        else:
            got = kernels.add_rms_norm(x, added, weight, 1e-5, settings)
            assert counted() == {"rms_norm forward": 1}
        close(
            [got[0], got[1], *torch.autograd.grad(got, leaves, (dy, dtotal))],
            [want, total, *want_grads],
        )


REQUESTS = [
    AttentionRequest(90, False, torch.bfloat16, (8192, 1, 32, 128), (8192, 1, 8, 128), 128),
    Fp8Request(90, (8192, 4096, 4096), (1, 128), (torch.float8_e4m3fn,) * 2, torch.bfloat16),
    GroupedRequest(90, torch.bfloat16, 65536, 64, 1408, 2048),
    NormRequest(90, False, torch.bfloat16, torch.bfloat16, 4096, False),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: each.operation)
def test_auto_goes_by_the_documented_order_and_then_by_what_was_measured(
    request_, monkeypatch, tmp_path
):
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
        # nothing was measured there
        assert provider_name(request_._replace(capability=80), Settings()) in ("triton", "cudnn")
    tuning.table.cache_clear()


def test_heads_that_a_library_lacks(monkeypatch):
    monkeypatch.setattr(cudnn, "version", lambda: 91000)
    wide = replace_dims(REQUESTS[0], 192, 128)
    assert not cudnn.supports(wide, False)
    monkeypatch.setattr(cudnn, "version", lambda: 91100)
    assert cudnn.supports(wide, False) and not cudnn.supports(wide._replace(capability=80), False)
    assert not cudnn.supports(replace_dims(REQUESTS[0], 256, 256), False)
    assert flash_attention_4.supports(wide._replace(capability=100), True)
    assert not flash_attention_4.supports(
        replace_dims(REQUESTS[0], 256, 128)._replace(capability=100), True
    )
    assert not flash_attention_4.supports(REQUESTS[0]._replace(capability=80), True)


def replace_dims(request, dim, value_dim):
    s, b, a, _ = request.q_shape
    return request._replace(q_shape=(s, b, a, dim), k_shape=(s, b, 8, dim), value_dim=value_dim)


def test_nothing_is_chosen_without_a_gpu():
    assert (
        choice.capability_of(torch.empty(1))
        == choice.capability_of(torch.empty(1, device="meta"))
        == 0
    )
    assert replace(Settings(), norm="torch") != Settings()

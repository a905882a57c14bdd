"""The CPU attention paths against a loop over single queries, and the ring's merge against the
whole."""

import itertools
import math

import pytest
import torch

from megatron5d import kernels
from megatron5d.kernels.flash_attention import plain as flash_attention_plain

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def brute_force(q, k, v, *, scale, sees, softcap=0.0, sinks=None):
    """One query, one head at a time, in float64; `sees(batch, query, key)` is the mask."""
    s, b, a, _ = q.shape
    t, g = k.shape[0], k.shape[2]
    out = torch.zeros(s, b, a, v.shape[-1], dtype=torch.float64)
    lse = torch.full((b, a, s), -math.inf, dtype=torch.float64)
    for i, n, h in itertools.product(range(s), range(b), range(a)):
        keys = [j for j in range(t) if sees(n, i, j)]
        logits = [
            scale * torch.dot(q[i, n, h].double(), k[j, n, h * g // a].double()).item()
            for j in keys
        ]
        if softcap:
            logits = [softcap * math.tanh(x / softcap) for x in logits]
        sink = [] if sinks is None else [float(sinks[h])]
        if not keys and not sink:
            continue
        top = max(logits + sink)
        total = sum(math.exp(x - top) for x in logits + sink)
        lse[n, h, i] = top + math.log(total)
        for j, x in zip(keys, logits):
            out[i, n, h] += math.exp(x - top) / total * v[j, n, h * g // a].double()
    return out, lse


def inputs(s=9, t=9, b=2, a=4, g=2, d=6, dv=6, dtype=torch.float64):
    torch.manual_seed(s * t + d)
    return [torch.randn(n, b, h, w).to(dtype) for n, h, w in ((s, a, d), (t, g, d), (t, g, dv))]


def check(q, k, v, sees, **options):
    want_out, want_lse = brute_force(
        q,
        k,
        v,
        scale=0.4,
        sees=sees,
        **{n: options[n] for n in ("softcap", "sinks") if n in options},
    )
    out, lse = kernels.attention(q, k, v, scale=0.4, **options)
    assert out.dtype == q.dtype and lse.dtype == (
        torch.float64 if q.dtype == torch.float64 else torch.float32
    )
    assert (out.double() - want_out).norm() <= TOLERANCE[q.dtype] * want_out.norm()
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=max(1e-12, TOLERANCE[q.dtype]))


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 9, 9, 9]])
CASES = {
    "causal": ({"causal": True}, lambda n, i, j: j <= i),
    "full": ({"causal": False}, lambda n, i, j: True),
    "window": ({"causal": True, "window": 3}, lambda n, i, j: i - 3 < j <= i),
    "two_sided_window": ({"causal": False, "window": 3}, lambda n, i, j: abs(i - j) < 3),
    "documents": (
        {"documents": DOCUMENTS},
        lambda n, i, j: j <= i and DOCUMENTS[n, i] == DOCUMENTS[n, j],
    ),
    "softcap": ({"softcap": 2.0}, lambda n, i, j: j <= i),
    "sinks": ({"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}, lambda n, i, j: j <= i),
    "positions": (
        {
            "q_positions": torch.tensor([0, 1, 2, 30, 31, 32, 33, 34, 35]),
            "k_positions": torch.arange(10, 19),
        },
        lambda n, i, j: i >= 3,
    ),
    "aligned_positions": (
        {"q_positions": torch.arange(40, 49), "k_positions": torch.arange(40, 49)},
        lambda n, i, j: j <= i,
    ),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_equals_brute_force(case, dtype):
    options, sees = CASES[case]
    check(*inputs(dtype=dtype), sees, **options)


@pytest.mark.parametrize(
    "shape",
    [
        {"s": 1, "t": 1},
        {"s": 7, "t": 3},
        {"s": 3, "t": 7},
        {"a": 6, "g": 1},
        {"d": 8, "dv": 4},
        {"d": 4, "dv": 8},
    ],
)
def test_odd_shapes(shape):
    check(*inputs(**shape), lambda n, i, j: j <= i)


@pytest.mark.parametrize("block", [1, 4, 256])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_autograd_of_the_reference(case, block, monkeypatch):
    monkeypatch.setattr(flash_attention_plain, "QUERY_BLOCK", block)
    options, _ = CASES[case]
    q, k, v = (x.requires_grad_() for x in inputs(dv=5))
    sinks = options.get("sinks")
    sinks = None if sinks is None else sinks.double().requires_grad_()
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    rule = flash_attention_plain.AttentionRule(
        0.4, **{n: x for n, x in options.items() if n != "sinks"}
    )
    want, _ = kernels.attention_reference(q, k, v, rule, sinks)
    got, _ = kernels.attention(q, k, v, scale=0.4, **{**options, "sinks": sinks})
    dout = torch.randn_like(want)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad(want, leaves, dout)
    for got_grad, want_grad in zip(torch.autograd.grad(got, leaves, dout), wanted):
        torch.testing.assert_close(got_grad, want_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_blocks_of_keys_merge_to_the_whole(documents):
    """What a ring does: partial outs merged by lse, then each block's gradient from the global out
    and lse."""
    q, k, v = inputs()
    options = {"scale": 0.4, "documents": documents}
    out, lse = kernels.attention(q, k, v, **options)
    dout = torch.randn_like(out)
    whole = kernels.attention_backward(dout, q, k, v, out, lse, **options)
    cuts = [slice(0, 3), slice(3, 9)]

    def block(keys):
        extra = {} if documents is None else {"k_documents": documents[:, keys]}
        return dict(options, k_positions=torch.arange(9)[keys], **extra)

    parts = [kernels.attention(q, k[c], v[c], **block(c)) for c in cuts]
    merged_lse = torch.logsumexp(torch.stack([p[1] for p in parts]), 0)
    merged = sum(p[0] * (p[1] - merged_lse).exp().permute(2, 0, 1).unsqueeze(-1) for p in parts)
    torch.testing.assert_close(merged, out, rtol=0, atol=1e-12)
    torch.testing.assert_close(merged_lse, lse, rtol=0, atol=1e-12)
    grads = [
        kernels.attention_backward(dout, q, k[c], v[c], merged, merged_lse, **block(c))
        for c in cuts
    ]
    torch.testing.assert_close(sum(g[0] for g in grads), whole[0], rtol=0, atol=1e-12)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([g[i] for g in grads]), whole[i], rtol=0, atol=1e-12)


def test_empty_inputs():
    q, k, v = inputs()
    out, lse = kernels.attention(q[:0], k, v, scale=1.0)
    assert out.shape == (0, 2, 4, 6) and lse.shape == (2, 4, 0)
    out, lse = kernels.attention(q, k[:0], v[:0], scale=1.0)
    assert not out.any() and bool((lse == -math.inf).all())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"a": 5}, "5 query heads"),
        ({"window": 0}, "window"),
        ({"t": 4, "documents": DOCUMENTS}, "k_documents"),
        ({"documents": DOCUMENTS[:1]}, r"documents requires shape \(2, 9\) \(got \(1, 9\)\)"),
        ({"k_positions": torch.arange(8)}, r"k_positions requires shape \(9,\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    shape = {n: x for n, x in change.items() if n in ("a", "t")}
    options = {n: x for n, x in change.items() if n not in shape}
    with pytest.raises(ValueError, match=message):
        kernels.attention(*inputs(**shape), scale=1.0, **options)


def test_cumulative_lengths_are_documents():
    """Lengths 3, 0, 1, 4 in a row of ten: the two tokens past the last boundary are by
    themselves."""
    boundaries = torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)
    documents = kernels.documents_from_cu_seqlens(boundaries, 10)
    assert documents.tolist() == [[1, 1, 1, 3, 4, 4, 4, 4, 5, 5]]
    q, k, v = inputs(s=10, t=10, b=1)
    out, lse = kernels.attention(q, k, v, scale=0.3, documents=documents)
    owner = documents[0].tolist()
    want = brute_force(q, k, v, scale=0.3, sees=lambda n, i, j: j <= i and owner[i] == owner[j])
    torch.testing.assert_close((out, lse), want, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="vector of integers"):
        kernels.documents_from_cu_seqlens(boundaries.float(), 10)

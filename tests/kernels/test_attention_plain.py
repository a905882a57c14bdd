"""The CPU attention paths against a loop over single queries; merged blocks of keys."""

import itertools
import math

import pytest
import torch
from kernel_lab.accuracy import relative_error
from kernel_lab.attention import attention_results, make_qkv

from megatron5d import kernels
from megatron5d.kernels.flash_attention import plain

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def brute_force(q, k, v, sees, softcap=0.0, sinks=None, scale=0.4):
    """One query, one head at a time, in float64; `sees(batch, query, key)` is the mask."""
    s, b, a, _ = q.shape
    t, g = k.shape[0], k.shape[2]
    out = torch.zeros(s, b, a, v.shape[-1], dtype=torch.float64)
    lse = torch.full((b, a, s), -math.inf, dtype=torch.float64)
    for i, n, h in itertools.product(range(s), range(b), range(a)):
        keys, head = [j for j in range(t) if sees(n, i, j)], h * g // a
        logits = [
            scale * torch.dot(q[i, n, h].double(), k[j, n, head].double()).item() for j in keys
        ]
        if softcap:
            logits = [softcap * math.tanh(x / softcap) for x in logits]
        exps = [math.exp(x) for x in [*logits, *([] if sinks is None else [float(sinks[h])])]]
        if not exps:
            continue
        lse[n, h, i] = math.log(sum(exps))
        for j, x in zip(keys, exps):
            out[i, n, h] += x / sum(exps) * v[j, n, head].double()
    return out, lse


def qkv(s=9, a=4, g=2, d=6, dtype=torch.float64, **shape):
    return make_qkv(s=s, a=a, g=g, d=d, dtype=dtype, **shape)


def check(q, k, v, sees, **options):
    of_scores = {name: options[name] for name in ("softcap", "sinks") if name in options}
    exact, exact_lse = brute_force(q, k, v, sees, **of_scores)
    out, lse = kernels.attention(q, k, v, scale=0.4, **options)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    assert out.dtype == q.dtype and lse.dtype == wide
    assert relative_error(out, exact) <= TOLERANCE[q.dtype]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=TOLERANCE[q.dtype])


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 9, 9, 9]])
ALIGNED = torch.arange(40, 49)


def is_causal(n, i, j):
    return j <= i


CASES = {
    "causal": ({"causal": True}, is_causal),
    "full": ({"causal": False}, lambda n, i, j: True),
    "window": ({"causal": True, "window": 3}, lambda n, i, j: i - 3 < j <= i),
    "two_sided_window": ({"causal": False, "window": 3}, lambda n, i, j: abs(i - j) < 3),
    "documents": (
        {"documents": DOCUMENTS},
        lambda n, i, j: j <= i and DOCUMENTS[n, i] == DOCUMENTS[n, j],
    ),
    "softcap": ({"softcap": 2.0}, is_causal),
    "sinks": ({"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}, is_causal),
    "positions": (
        {
            "q_positions": torch.tensor([0, 1, 2, 30, 31, 32, 33, 34, 35]),
            "k_positions": torch.arange(10, 19),
        },
        lambda n, i, j: i >= 3,
    ),
    "aligned_positions": ({"q_positions": ALIGNED, "k_positions": ALIGNED}, is_causal),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_equals_brute_force(case, dtype):
    options, sees = CASES[case]
    check(*qkv(dtype=dtype), sees, **options)


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
    check(*qkv(**shape), is_causal)


@pytest.mark.parametrize("block", [1, 4, 256])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_autograd_of_the_reference(case, block, monkeypatch):
    monkeypatch.setattr(plain, "QUERY_BLOCK", block)
    options, _ = CASES[case]
    if "sinks" in options:
        options = {"sinks": options["sinks"].double()}
    for x, exact in attention_results(*qkv(dv=5), **options):
        torch.testing.assert_close(x, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_blocks_of_keys_merge_to_all_keys(documents):
    """As in a ring: partial outs merged by lse, then each block's gradient from the merged out."""
    q, k, v = qkv()
    options = {"scale": 0.4, "documents": documents}
    out, lse = kernels.attention(q, k, v, **options)
    dout = torch.randn_like(out)
    exact = out, lse, *kernels.attention_backward(dout, q, k, v, out, lse, **options)
    blocks = []
    for keys in (slice(0, 3), slice(3, 9)):
        k_documents = None if documents is None else documents[:, keys]
        more = {"k_positions": torch.arange(9)[keys], "k_documents": k_documents}
        blocks.append((k[keys], v[keys], options | more))
    outs, lses = zip(*(kernels.attention(q, k, v, **options) for k, v, options in blocks))
    merged_lse = torch.logsumexp(torch.stack(lses), 0)
    weights = [(block_lse - merged_lse).exp().permute(2, 0, 1)[..., None] for block_lse in lses]
    merged = sum(block_out * weight for block_out, weight in zip(outs, weights))
    dqs, *dkv = zip(
        *(
            kernels.attention_backward(dout, q, k, v, merged, merged_lse, **options)
            for k, v, options in blocks
        )
    )
    results = merged, merged_lse, sum(dqs), *map(torch.cat, dkv)
    torch.testing.assert_close(results, exact, rtol=0, atol=1e-12)


def test_empty_inputs():
    q, k, v = qkv()
    out, lse = kernels.attention(q[:0], k, v, scale=1.0)
    assert out.shape == (0, 2, 4, 6) and lse.shape == (2, 4, 0)
    out, lse = kernels.attention(q, k[:0], v[:0], scale=1.0)
    assert not out.any() and bool((lse == -math.inf).all())


@pytest.mark.parametrize(
    "shape, options, message",
    [
        ({"a": 5}, {}, "5 query heads"),
        ({}, {"window": 0}, "at least 1 token"),
        ({"t": 4}, {"documents": DOCUMENTS}, "require k_documents"),
        ({}, {"documents": DOCUMENTS[:1]}, r"shape \(2, 9\) \(got \(1, 9\)\)"),
        ({}, {"k_positions": torch.arange(8)}, r"k_positions requires shape \(9,\)"),
    ],
)
def test_what_does_not_fit_is_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        kernels.attention(*qkv(**shape), scale=1.0, **options)


def test_cumulative_lengths_are_documents():
    """Lengths 3, 0, 1, 4 in a row of ten: the two tokens past the last boundary form a document."""
    boundaries = torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)
    documents = kernels.documents_from_cu_seqlens(boundaries, 10)
    owner = [1, 1, 1, 3, 4, 4, 4, 4, 5, 5]
    assert documents.tolist() == [owner]
    sees = lambda n, i, j: j <= i and owner[i] == owner[j]  # noqa: E731
    check(*qkv(s=10, b=1), sees, documents=documents)
    with pytest.raises(ValueError, match="vector of integers"):
        kernels.documents_from_cu_seqlens(boundaries.float(), 10)

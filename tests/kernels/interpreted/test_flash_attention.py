"""Attention kernels against the whole score matrix in float64."""

import gc
import itertools
import math
import mmap
import os

import pytest
import torch

from megatron5d import kernels
from megatron5d.kernels import tuning
from megatron5d.kernels.flash_attention import backward as flash_attention_backward
from megatron5d.kernels.flash_attention import forward as flash_attention_forward
from megatron5d.kernels.flash_attention.mask import mask_data, spans_of
from megatron5d.kernels.flash_attention.plain import AttentionRule

TOLERANCE = 6e-3
MAP_NORESERVE = 0x4000  # of Linux; the module names it from Python 3.13 on


def relative(got, want):
    return float(
        (got.detach().double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    )


def inputs(s=97, t=None, b=2, a=2, g=1, d=32, dv=None, dtype=torch.bfloat16):
    generator = torch.Generator(torch.get_default_device()).manual_seed(s + d)
    t, dv = t or s, dv or d
    shapes = ((s, b, a, d), (t, b, g, d), (t, b, g, dv))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def check(q, k, v, backward=True, **options):
    sinks = options.pop("sinks", None)
    scale = q.shape[-1] ** -0.5
    leaves = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    rule = AttentionRule(scale, **options)
    want, want_lse = kernels.attention_reference(
        *wide[:3], rule, wide[3] if sinks is not None else None
    )
    got, lse = kernels.attention(q, k, v, scale=scale, sinks=sinks, **options)
    assert got.dtype == q.dtype and lse.dtype == torch.float32
    assert relative(got, want.detach()) < TOLERANCE
    torch.testing.assert_close(lse.double(), want_lse.detach(), rtol=0, atol=2e-3)
    if not backward:
        return
    dout = torch.randn(want.shape).to(q.dtype)
    wanted = torch.autograd.grad(want, wide, dout.double())
    for one, expected in zip(torch.autograd.grad(got, leaves, dout), wanted):
        assert one.shape == expected.shape
        # Where the gradient is exactly zero (one key, say) only rounding is left: of each row,
        # where rows are added up.
        rounding = 1e-3 * (math.sqrt(q.shape[0] * q.shape[1]) if one.dim() == 1 else 1.0)
        assert (one.double() - expected).norm() < 2 * TOLERANCE * expected.norm() + rounding


DOCUMENTS = torch.tensor([0] * 20 + [1] * 40 + [2] * 37)
SHUFFLED = torch.tensor([3] * 30 + [1] * 30 + [3] * 37)
RULES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 17},
    "window_of_itself": {"window": 1},
    "window_of_everything": {"window": 2**31 - 1},
    "two_sided_window": {"causal": False, "window": 40},
    "documents": {"documents": torch.stack((DOCUMENTS, SHUFFLED))},
    "documents_full": {"documents": torch.stack((DOCUMENTS, SHUFFLED)), "causal": False},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.7, -2.0])},
    "positions": {
        "q_positions": torch.arange(60, 157),
        "k_positions": torch.arange(97).flip(0) * 2,
    },
    "all_at_once": {
        "documents": torch.stack((DOCUMENTS, SHUFFLED)),
        "window": 33,
        "softcap": 5.0,
        "sinks": torch.zeros(2),
    },
}


ON_EVERY_GPU = ("all_at_once",)  # others are of the same code


@pytest.fixture(params=["a program a block", "shares"])
def keys_by(request, monkeypatch):
    """How dk and dv are spread over processors, whatever their number."""
    monkeypatch.setattr(
        flash_attention_backward, "in_shares", lambda *sizes: request.param == "shares"
    )


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[pytest.mark.hopper] * (rule not in ON_EVERY_GPU)) for rule in RULES],
)
def test_every_rule(rule, keys_by):
    check(*inputs(), **RULES[rule])


TWO = torch.tensor([[0] * 400 + [1] * 120])
ZIGZAG = torch.cat((torch.arange(0, 260), torch.arange(780, 1040)))


@pytest.mark.hopper
@pytest.mark.parametrize(
    "rule",
    [
        {"window": 270},
        {"causal": False, "window": 270},
        {"documents": TWO},
        {"causal": False, "documents": TWO, "window": 270},
        {"q_positions": ZIGZAG, "k_positions": ZIGZAG},
        {"q_positions": ZIGZAG, "k_positions": ZIGZAG, "window": 300},
    ],
)
def test_blocks_seen_whole_between_blocks_seen_in_part(rule, keys_by):
    check(*inputs(s=520, b=1, a=1), **rule)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "s, t", [(1, 1), (7, 7), (127, 127), (129, 129), (64, 32), (33, 130), (130, 33)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_odd_lengths(s, t, causal):
    check(*inputs(s=s, t=t, b=1), causal=causal)


def test_one_key():
    """Beside itself a key has no gradient: what is left of p (dp - delta) shows."""
    check(*inputs(s=8, t=1, b=2, a=2, g=2, d=128))


def test_more_keys_than_a_few_blocks():
    check(*inputs(s=1, t=4097, b=1, a=1), backward=False, causal=False)


@pytest.mark.parametrize(
    "d, dv",
    [
        *(pytest.param(d, d, marks=pytest.mark.hopper) for d in (64, 96, 128, 256)),
        pytest.param(16, 48, marks=pytest.mark.hopper),
        (192, 128),
    ],
)
def test_head_dims(d, dv):
    check(*inputs(s=70, b=1, d=d, dv=dv))


@pytest.mark.hopper
@pytest.mark.parametrize("a, g", [(1, 1), (4, 4), (6, 2), (4, 1)])
def test_grouped_heads(a, g):
    check(*inputs(s=40, a=a, g=g))


@pytest.mark.hopper
def test_float16():
    check(*inputs(dtype=torch.float16))


@pytest.mark.hopper
def test_views_into_one_qkv():
    qkv = torch.randn(50, 2, 6, 32).bfloat16()
    check(*(x.detach() for x in qkv.split((4, 1, 1), dim=2)))
    check(*(x.transpose(0, 1) for x in inputs(s=2, b=50)))


@pytest.mark.hopper
@pytest.mark.parametrize("s", [1, 40])
def test_what_begins_anywhere_and_dims_of_size_one_with_any_stride(s):
    """Both are contiguous to torch, and not for the copy engine; what arrives in the backward
    too."""
    anywhere = [torch.randn(s * 32 + 1).bfloat16()[1:].view(s, 1, 1, 32) for _ in range(4)]
    odd = [torch.randn(s, 32).bfloat16().as_strided((s, 1, 1, 32), (32, 1, 3, 1)) for _ in range(4)]
    for *leaves, dout in (anywhere, odd):
        check(*leaves)
        q, k, v = (x.detach() for x in leaves)
        out, lse = kernels.attention(q, k, v, scale=0.2)
        plain = dout.clone(memory_format=torch.contiguous_format)
        found, wanted = (
            kernels.attention_backward(each, q, k, v, out, lse, scale=0.2) for each in (dout, plain)
        )
        assert all(map(torch.equal, found, wanted))


@pytest.mark.hopper
def test_keys_in_two_parts_as_on_a_ring():
    """Each part alone, merged by their log-sum-exp; then the gradients of each part from the merged
    out."""
    q, k, v = inputs(s=50, b=1)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want, _ = kernels.attention_reference(*wide, AttentionRule(0.2))
    parts = [
        {"k_positions": torch.arange(50)[cut], "scale": 0.2}
        for cut in (slice(0, 30), slice(30, 50))
    ]
    halves = [(k[:30], v[:30]), (k[30:], v[30:])]
    partial = [kernels.attention(q, *half, **part) for half, part in zip(halves, parts)]
    lse = torch.logaddexp(partial[0][1], partial[1][1])
    shares = [(one - lse).exp().permute(2, 0, 1)[..., None] for _, one in partial]
    out = sum(share * one.float() for share, (one, _) in zip(shares, partial)).bfloat16()
    assert relative(out, want.detach()) < TOLERANCE
    dout = torch.randn(want.shape).bfloat16()
    grads = [
        kernels.attention_backward(dout, q, *half, out, lse, **part)
        for half, part in zip(halves, parts)
    ]
    got = (
        grads[0][0].float() + grads[1][0].float(),
        *(torch.cat([g[i] for g in grads]) for i in (1, 2)),
    )
    for one, expected in zip(got, torch.autograd.grad(want, wide, dout.double())):
        assert relative(one, expected) < 2 * TOLERANCE


def test_queries_that_see_nothing():
    q, k, v = inputs(s=40, b=1)
    out, lse = kernels.attention(q, k, v, scale=1.0, q_positions=torch.arange(40) - 20)
    assert (
        not out[:20].any()
        and bool((lse[..., :20] == float("-inf")).all())
        and bool(lse[..., 20:].isfinite().all())
    )


@pytest.mark.parametrize("causal", [True, False])
def test_scores_far_below_zero(causal):
    """What lies past the last key has score 0, and would be infinitely likely beside them."""
    q, k, v = inputs(s=37, b=1)
    leaves = [x.bfloat16().requires_grad_() for x in (q.abs() + 3, -k.abs() - 3, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want, _ = kernels.attention_reference(*wide, AttentionRule(0.2, causal))
    got, _ = kernels.attention(*leaves, scale=0.2, causal=causal)
    dout = torch.randn(want.shape).bfloat16()
    wanted = torch.autograd.grad(want, wide, dout.double())
    for one, expected in zip(torch.autograd.grad(got, leaves, dout), wanted):
        # every key is nearly the same: differences of large numbers
        assert relative(one, expected) < 5e-2


def test_the_kernel_really_runs(monkeypatch):
    monkeypatch.setattr(flash_attention_forward, "_forward_kernel", None)
    with pytest.raises(TypeError, match="NoneType"):
        kernels.attention(*inputs(), scale=1.0)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name", [name for name in RULES if "documents" in name or "positions" in name]
)
def test_spans_hold_what_is_visible(name):
    """And no block more at either end, where documents are one after the other; blocks seen whole,
    if side by side."""
    rule = AttentionRule(0.1, **RULES[name])
    seen = rule.visible(slice(0, 97), 97, torch.get_default_device())[:, 0, 0]
    mask = mask_data(rule, torch.zeros(1))
    for sizes in ((32, 64), (64, 16), (8, 8)):
        for queries, visible, (own, other) in ((True, seen, sizes), (False, seen.mT, sizes[::-1])):
            spans = spans_of(rule, mask, (97, 97), sizes, queries=queries)
            assert spans.dtype == torch.int32 and spans.shape == (len(seen), -(-97 // own), 4)
            for batch, block in itertools.product(range(len(seen)), range(spans.shape[1])):
                mine = visible[batch, block * own : (block + 1) * own]
                met = mine.any(0).nonzero().flatten().tolist()
                start, left, right, stop = spans[batch, block].tolist()
                if met:
                    tight = met[0] // other * other, min((met[-1] // other + 1) * other, 97)
                    assert start <= tight[0] and stop >= tight[1]
                    assert batch or (start, stop) == tight or "documents" not in name
                whole = [
                    i * other
                    for i in range(97 // other)
                    if mine[:, i * other : (i + 1) * other].all()
                ]
                if whole and whole[-1] - whole[0] == (len(whole) - 1) * other:
                    assert (left, right) == (whole[0], whole[-1] + other)
                else:
                    assert left == right == start


@pytest.fixture
def by_pointers(monkeypatch):
    """As on GPUs without a copy engine."""
    select = tuning.select

    def pointed(operation, device, **key):
        config = select(operation, device, **key)
        return config | {"DESCRIBED": False} if "DESCRIBED" in config else config

    monkeypatch.setattr(tuning, "select", pointed)


@pytest.mark.hopper
@pytest.mark.parametrize("shape", [{}, {"s": 1}, {"s": 65, "t": 33, "d": 48, "dv": 24}])
def test_by_pointers(shape, by_pointers):
    check(*inputs(**shape))
    check(*inputs(**shape), causal=False)


@pytest.mark.hopper
@pytest.mark.skipif(os.environ.get("MEGATRON5D_KERNELS") == "gpu", reason="takes the host's memory")
def test_tokens_far_apart_by_pointers(by_pointers):
    """More than 2^31 elements from the first to the last token of a tile; the memory between them
    is never touched."""
    apart = 2**25 + 2**20
    with mmap.mmap(
        -1, 2 * (63 * apart + 32), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    ) as memory:
        q, k, v = inputs(s=64, b=1, a=1)
        far = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided(q.shape, (apart, 32, 32, 1))
        far.copy_(q)
        got, want = (kernels.attention(x, k, v, scale=0.2)[0] for x in (far, q))
        assert torch.equal(got, want)
        del far
        gc.collect()

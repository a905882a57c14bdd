"""Attention kernels against the full score matrix in float64."""

import gc
import itertools
import math
import mmap
import os

import pytest
import torch
from kernel_lab.accuracy import relative_error
from kernel_lab.attention import attention_results, make_qkv

from megatron5d import kernels
from megatron5d.kernels import tuning
from megatron5d.kernels.flash_attention import backward as flash_attention_backward
from megatron5d.kernels.flash_attention import forward as flash_attention_forward
from megatron5d.kernels.flash_attention.mask import mask_data, spans_of
from megatron5d.kernels.flash_attention.plain import AttentionRule

TOLERANCE = 6e-3
MAP_NORESERVE = 0x4000  # of Linux; the module names it from Python 3.13 on


def check(q, k, v, **options):
    (out, exact), (lse, exact_lse), *grads = attention_results(q, k, v, **options)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert relative_error(out, exact) < TOLERANCE
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-3)
    for grad, exact_grad in grads:
        assert grad.shape == exact_grad.shape
        # Where the gradient is exactly zero (with one key, for example) only rounding remains: of
        # each row for sinks, whose gradients sum over rows.
        rounding = 1e-3 * (math.sqrt(q.shape[0] * q.shape[1]) if grad.dim() == 1 else 1.0)
        error = (grad.double() - exact_grad).norm()
        assert error < 2 * TOLERANCE * exact_grad.norm() + rounding


DOCUMENTS = torch.tensor([0] * 20 + [1] * 40 + [2] * 37)
SHUFFLED = torch.tensor([3] * 30 + [1] * 30 + [3] * 37)
BOTH = torch.stack((DOCUMENTS, SHUFFLED))
RULES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 17},
    "window_of_itself": {"window": 1},
    "window_of_everything": {"window": 2**31 - 1},
    "two_sided_window": {"causal": False, "window": 40},
    "documents": {"documents": BOTH},
    "documents_full": {"documents": BOTH, "causal": False},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.7, -2.0])},
    "positions": {
        "q_positions": torch.arange(60, 157),
        "k_positions": torch.arange(97).flip(0) * 2,
    },
    "all_at_once": {"documents": BOTH, "window": 33, "softcap": 5.0, "sinks": torch.zeros(2)},
}
ON_EVERY_GPU = ("all_at_once",)  # others run the same code


@pytest.fixture(params=["a program a block", "shares"])
def keys_by(request, monkeypatch):
    """Chooses how dk and dv are spread over processors, whatever their number."""
    monkeypatch.setattr(
        flash_attention_backward, "in_shares", lambda *sizes: request.param == "shares"
    )


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[pytest.mark.hopper] * (rule not in ON_EVERY_GPU)) for rule in RULES],
)
def test_every_rule(rule, keys_by):
    check(*make_qkv(), **RULES[rule])


TWO = torch.tensor([[0] * 400 + [1] * 120])
ZIGZAG = torch.cat((torch.arange(0, 260), torch.arange(780, 1040)))
IN_ZIGZAG = {"q_positions": ZIGZAG, "k_positions": ZIGZAG}


@pytest.mark.hopper
@pytest.mark.parametrize(
    "rule",
    [
        {"window": 270},
        {"causal": False, "window": 270},
        {"documents": TWO},
        {"causal": False, "documents": TWO, "window": 270},
        IN_ZIGZAG,
        {**IN_ZIGZAG, "window": 300},
    ],
)
def test_fully_visible_blocks_between_partly_visible_ones(rule, keys_by):
    check(*make_qkv(s=520, b=1, a=1), **rule)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "s, t", [(1, 1), (7, 7), (127, 127), (129, 129), (64, 32), (33, 130), (130, 33)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_odd_lengths(s, t, causal):
    check(*make_qkv(s=s, t=t, b=1), causal=causal)


def test_one_key():
    """With one key the gradients of q and k are zero, so what remains of p (dp - delta) shows."""
    check(*make_qkv(s=8, t=1, g=2, d=128))


def test_more_keys_than_a_few_blocks():
    check(*make_qkv(s=1, t=4097, b=1, a=1), grad=False, causal=False)


@pytest.mark.parametrize(
    "d, dv",
    [
        *(pytest.param(d, d, marks=pytest.mark.hopper) for d in (64, 96, 128, 256)),
        pytest.param(16, 48, marks=pytest.mark.hopper),
        (192, 128),
    ],
)
def test_head_dims(d, dv):
    check(*make_qkv(s=70, b=1, d=d, dv=dv))


@pytest.mark.hopper
@pytest.mark.parametrize("a, g", [(1, 1), (4, 4), (6, 2), (4, 1)])
def test_grouped_heads(a, g):
    check(*make_qkv(s=40, a=a, g=g))


@pytest.mark.hopper
def test_float16():
    check(*make_qkv(dtype=torch.float16))


@pytest.mark.hopper
def test_views_into_one_qkv():
    qkv = torch.randn(50, 2, 6, 32).bfloat16()
    check(*qkv.split((4, 1, 1), dim=2))
    check(*(x.transpose(0, 1) for x in make_qkv(s=2, b=50)))


@pytest.mark.hopper
@pytest.mark.parametrize("s", [1, 40])
def test_any_start_address_and_any_stride_of_dims_of_size_one(s):
    """torch calls both contiguous, the copy engine does not; dout in the backward as well."""
    anywhere = [torch.randn(s * 32 + 1).bfloat16()[1:].view(s, 1, 1, 32) for _ in range(4)]
    odd = [torch.randn(s, 32).bfloat16().as_strided((s, 1, 1, 32), (32, 1, 3, 1)) for _ in range(4)]
    for q, k, v, dout in (anywhere, odd):
        check(q, k, v)
        out, lse = kernels.attention(q, k, v, scale=0.2)
        copy = dout.clone(memory_format=torch.contiguous_format)
        grads, expected = (
            kernels.attention_backward(x, q, k, v, out, lse, scale=0.2) for x in (dout, copy)
        )
        assert all(map(torch.equal, grads, expected))


@pytest.mark.hopper
def test_two_blocks_of_keys_as_on_a_ring():
    """Each block alone, merged by log-sum-exp; then the gradients of each from the merged out."""
    q, k, v = make_qkv(s=50, b=1)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact, _ = kernels.attention_reference(*wide, AttentionRule(0.2))
    cuts = slice(0, 30), slice(30, 50)
    options = [{"k_positions": torch.arange(50)[cut], "scale": 0.2} for cut in cuts]
    blocks = [(k[cut], v[cut]) for cut in cuts]
    outs, lses = zip(
        *(kernels.attention(q, *block, **option) for block, option in zip(blocks, options))
    )
    lse = torch.logaddexp(*lses)
    weights = [(block_lse - lse).exp().permute(2, 0, 1)[..., None] for block_lse in lses]
    out = sum(weight * block_out.float() for weight, block_out in zip(weights, outs)).bfloat16()
    assert relative_error(out, exact) < TOLERANCE
    dout = torch.randn(exact.shape).bfloat16()
    dqs, *dkv = zip(
        *(
            kernels.attention_backward(dout, q, *block, out, lse, **option)
            for block, option in zip(blocks, options)
        )
    )
    grads = (dqs[0].float() + dqs[1].float(), *map(torch.cat, dkv))
    for grad, exact_grad in zip(grads, torch.autograd.grad(exact, wide, dout.double())):
        assert relative_error(grad, exact_grad) < 2 * TOLERANCE


def test_queries_that_see_nothing():
    q, k, v = make_qkv(s=40, b=1)
    out, lse = kernels.attention(q, k, v, scale=1.0, q_positions=torch.arange(40) - 20)
    assert not out[:20].any() and (lse[..., :20] == float("-inf")).all()
    assert lse[..., 20:].isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_scores_far_below_zero(causal):
    """Padding past the last key has score 0, and would be infinitely more likely than they are."""
    q, k, v = make_qkv(s=37, b=1)
    _, _, *grads = attention_results(q.abs() + 3, -k.abs() - 3, v, scale=0.2, causal=causal)
    for grad, exact in grads:  # every key is nearly the same: differences of large numbers
        assert relative_error(grad, exact) < 5e-2


def test_the_kernel_runs(monkeypatch):
    monkeypatch.setattr(flash_attention_forward, "_forward_kernel", None)
    with pytest.raises(TypeError, match="NoneType"):
        kernels.attention(*make_qkv(), scale=1.0)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name", [name for name in RULES if "documents" in name or "positions" in name]
)
def test_spans_contain_what_is_visible(name):
    """They begin and end at visible blocks if documents are contiguous; fully visible blocks count
    if they are adjacent."""
    rule = AttentionRule(0.1, **RULES[name])
    visible_to_queries = rule.visible(slice(0, 97), 97, torch.get_default_device())[:, 0, 0]
    mask = mask_data(rule, torch.zeros(1))
    for sizes, queries in itertools.product(((32, 64), (64, 16), (8, 8)), (True, False)):
        size, other_size = sizes if queries else sizes[::-1]
        visible = visible_to_queries if queries else visible_to_queries.mT
        spans = spans_of(rule, mask, (97, 97), sizes, queries=queries)
        assert spans.dtype == torch.int32 and spans.shape == (len(visible), -(-97 // size), 4)
        for batch, block in itertools.product(range(len(visible)), range(spans.shape[1])):
            rows = visible[batch, block * size : (block + 1) * size]
            tokens = rows.any(0).nonzero().flatten().tolist()
            start, left, right, stop = spans[batch, block].tolist()
            if tokens:
                first = tokens[0] // other_size * other_size
                last = min((tokens[-1] // other_size + 1) * other_size, 97)
                assert start <= first and stop >= last
                contiguous = not batch and "documents" in name
                assert not contiguous or (start, stop) == (first, last)
            starts = range(0, 97 - other_size + 1, other_size)
            full = [first for first in starts if rows[:, first : first + other_size].all()]
            if full and full[-1] - full[0] == (len(full) - 1) * other_size:
                assert (left, right) == (full[0], full[-1] + other_size)
            else:
                assert left == right == start


@pytest.fixture
def by_pointers(monkeypatch):
    """Loads tiles as on GPUs without a copy engine."""
    select = tuning.select

    def without_descriptors(operation, device, **key):
        config = select(operation, device, **key)
        return config | {"DESCRIBED": False} if "DESCRIBED" in config else config

    monkeypatch.setattr(tuning, "select", without_descriptors)


@pytest.mark.hopper
@pytest.mark.parametrize("shape", [{}, {"s": 1}, {"s": 65, "t": 33, "d": 48, "dv": 24}])
def test_by_pointers(shape, by_pointers):
    check(*make_qkv(**shape))
    check(*make_qkv(**shape), causal=False)


@pytest.mark.hopper
@pytest.mark.skipif(os.environ.get("MEGATRON5D_KERNELS") == "gpu", reason="takes the host's memory")
def test_tokens_far_apart_by_pointers(by_pointers):
    """The tokens of a tile span more than 2^31 elements; the memory between them is not touched."""
    stride = 2**25 + 2**20
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    with mmap.mmap(-1, 2 * (63 * stride + 32), flags=flags) as memory:
        q, k, v = make_qkv(s=64, b=1, a=1)
        far = torch.frombuffer(memory, dtype=torch.bfloat16)
        far = far.as_strided(q.shape, (stride, 32, 32, 1))
        far.copy_(q)
        out, expected = (kernels.attention(x, k, v, scale=0.2)[0] for x in (far, q))
        assert torch.equal(out, expected)
        del far
        gc.collect()

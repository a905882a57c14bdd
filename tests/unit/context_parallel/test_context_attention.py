"""Every method compared with one process: output and gradients in fp64, bytes in closed form."""

import math
from functools import partial

import pytest
import torch
from rank_pool import run_on_pool
from ranks import run_ranks

from megatron5d.comm.collectives import Pending
from megatron5d.comm.ledger import Ledger
from megatron5d.context_parallel import attention as context_attention
from megatron5d.context_parallel.attention import ContextAttention
from megatron5d.context_parallel.block_attention import MergedAttention, Planner
from megatron5d.context_parallel.zigzag import SequenceLayout
from megatron5d.kernels import attention
from megatron5d.topology.axis import Axis

S, B, A, D, DV = 48, 2, 8, 6, 4
# the second row has a document that padding interrupts
DOCUMENTS = torch.tensor(
    [[0] * 5 + [1] + [2] * 30 + [3] * 12, [0] + [1] + [2] * 7 + [3] * 13 + [2] * 9 + [3] * 17]
)
MASKS = {
    "causal": {},
    "window": {"window": 7},
    "documents": {"documents": DOCUMENTS},
    "window and documents": {"window": 9, "documents": DOCUMENTS},
    "full": {"causal": False},
    "full, window and documents": {"causal": False, "window": 9, "documents": DOCUMENTS},
}


def inputs(num_kv_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (S, B, A, D), (S, B, num_kv_heads, D), (S, B, num_kv_heads, DV), (S, B, A, DV), (A,)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    ]


def reference(num_kv_heads, mask, softcap, with_sinks):
    """Output and gradients of plain attention in one process."""
    q, k, v, dout, sinks = inputs(num_kv_heads)
    leaves = [t.requires_grad_() for t in (q, k, v, sinks)]
    queries_per_kv = A // num_kv_heads
    scores = torch.einsum("sbad,tbad->bast", q, k.repeat_interleave(queries_per_kv, 2)) * 0.3
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    rows = torch.arange(S)
    hidden = (rows[:, None] < rows[None]) & mask.get("causal", True)
    if mask.get("window"):
        hidden = hidden | ((rows[:, None] - rows[None]).abs() >= mask["window"])
    hidden = hidden.expand(B, 1, S, S)
    documents = mask.get("documents")
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    scores = scores.masked_fill(hidden, float("-inf"))
    if with_sinks:
        scores = torch.cat((scores, sinks.view(1, A, 1, 1).expand(B, A, S, 1)), -1)
    weights = scores.softmax(-1)[..., :S]
    out = torch.einsum("bast,tbad->sbad", weights, v.repeat_interleave(queries_per_kv, 2))
    out.backward(dout)
    return out.detach(), [t.grad for t in leaves]


def run_method(
    rank, size, method, inner, num_kv_heads, mask, softcap, with_sinks, *, dtype=torch.float64
):
    """Rows, output and gradients of a rank, and bytes that it sends forward and backward."""
    ledger = Ledger()
    inner = {"ulysses": size, "two_level": inner}.get(method, 1)
    layout = SequenceLayout(S, size // inner, inner)
    outer_rank, inner_rank = divmod(rank, layout.inner)

    def axis(name, ranks):
        group = (
            torch.distributed.new_group(list(ranks), use_local_synchronization=True)
            if len(ranks) > 1
            else None
        )
        return Axis(name, ranks, ranks.index(rank), group, ledger)

    outer = axis("cp_outer", tuple(range(inner_rank, size, layout.inner)))
    first = outer_rank * layout.inner
    inner_axis = axis("cp_inner", tuple(range(first, first + layout.inner)))
    masks = {name: value for name, value in mask.items() if name != "documents"}
    plan = Planner(layout, rank, **masks)(mask.get("documents"))
    rows = plan.local_rows
    q, k, v, dout, sinks = inputs(num_kv_heads, dtype)
    leaves = [t[rows].clone().requires_grad_() for t in (q, k, v)] + [sinks.requires_grad_()]
    attend = ContextAttention(method, outer, inner_axis)
    out = attend(
        *leaves[:3], plan, scale=0.3, softcap=softcap, sinks=leaves[3] if with_sinks else None
    )
    totals = {key: t.num_bytes for key, t in ledger.totals.items()}
    ledger.clear()
    out.backward(dout[rows])
    backward = {key: t.num_bytes for key, t in ledger.totals.items()}
    return rows, out.detach(), [t.grad for t in leaves], totals, backward


def check(method, size, inner, num_kv_heads, mask, softcap=0.0, with_sinks=False):
    """Compares all ranks with the reference; returns (forward, backward) bytes of rank 0."""
    out, grads = reference(num_kv_heads, mask, softcap, with_sinks)
    results = run_on_pool(run_method, size, method, inner, num_kv_heads, mask, softcap, with_sinks)
    dsinks = 0
    for rows, local_out, local_grads, _, _ in results:
        torch.testing.assert_close(local_out, out[rows], rtol=1e-11, atol=1e-13)
        for grad, expected in zip(local_grads[:3], grads):
            torch.testing.assert_close(grad, expected[rows], rtol=1e-10, atol=1e-12)
        dsinks = dsinks + local_grads[3] if with_sinks else 0
    if with_sinks:
        torch.testing.assert_close(dsinks, grads[3], rtol=1e-10, atol=1e-12)
    return results[0][3:]


METHODS = [
    ("ring", 2, 1),
    ("ring", 4, 1),
    ("allgather", 2, 1),
    ("allgather", 4, 1),
    ("ulysses", 4, 1),
    ("two_level", 4, 2),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("method", "size", "inner"), METHODS)
def test_masks(method, size, inner, mask):
    check(method, size, inner, 2, MASKS[mask])


@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize(("method", "size", "inner"), METHODS)
def test_heads(method, size, inner, num_kv_heads):
    check(method, size, inner, num_kv_heads, {})


@pytest.mark.parametrize(("method", "size", "inner"), METHODS)
def test_softcap_and_sinks(method, size, inner):
    check(method, size, inner, 2, MASKS["window and documents"], softcap=2.0, with_sinks=True)


def test_bytes_are_the_closed_forms():
    g, block = 8, (S // 4) * B * 8 * (D + DV) * 8
    forward, backward = check("ring", 4, 1, g, {})
    assert forward == {("cp_outer", "shift"): 3 * block}
    assert backward == {("cp_outer", "shift"): 2 * 3 * block}
    forward, backward = check("allgather", 4, 1, g, {})
    assert forward == {("cp_outer", "all_gather"): 3 * block}
    assert backward == forward | {("cp_outer", "reduce_scatter"): 3 * block}
    forward, backward = check("ulysses", 4, 1, g, {})
    # q, k, v to the inner ranks, the output back
    exchanged = (S // 4) * B * 8 * (D + D + DV + DV) * 8 * 3 // 4
    assert forward == backward == {("cp_inner", "all_to_all"): exchanged}


def test_head_groups_hold_each_head_once():
    for count in range(1, 10):
        groups = context_attention._head_groups(count)
        heads = [head for group in groups for head in range(group.start, group.stop)]
        assert heads == list(range(count))


HOP = 3 * (S // 4) * B * 8 * (D + DV)


@pytest.mark.parametrize(
    ("method", "sent"),
    [
        ("ring", {("cp_outer", "shift"): HOP * (2 + 4)}),
        (
            "allgather",
            {("cp_outer", "all_gather"): HOP * 2, ("cp_outer", "reduce_scatter"): HOP * 4},
        ),
    ],
)
def test_gradients_are_sent_in_fp32(method, sent):
    """Keys and values are sent in bf16, but every rank that adds to a bf16 gradient would round."""
    in_bf16 = partial(run_method, dtype=torch.bfloat16)
    *_, backward = run_ranks(in_bf16, 4, method, 1, 8, {}, 0.0, False)[0]
    assert backward == sent


def test_blocks_merge_in_fp32():
    """Any number of blocks of ones merges to one; bf16 would round the weight of each block."""
    merged = MergedAttention(torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16), 2)
    for _ in range(50):
        merged.add((0, 1), torch.ones(1, 1, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 1, 1))
    torch.testing.assert_close(merged.out, torch.ones(1, 1, 1, 2))
    torch.testing.assert_close(merged.lse, torch.full((1, 1, 1), math.log(50)))


def test_one_rank_is_plain_attention():
    q, k, v, _, _ = inputs(2)
    plan = Planner(SequenceLayout(S), 0)(None)
    out = ContextAttention("ring", Axis("cp_outer"), Axis("cp_inner"))(q, k, v, plan, scale=0.3)
    torch.testing.assert_close(out, attention(q, k, v, scale=0.3)[0])


def ring_events(rank, size, mask):
    """Events of a rank's forward in order: "start" and "wait" of hops, and numbers of calls."""
    events = []

    def record(event_of, function):
        def recorded(*args, **kwargs):
            events.append(event_of(args))
            return function(*args, **kwargs)

        return recorded

    with pytest.MonkeyPatch.context() as patch:
        start = record(lambda args: "start", context_attention.start_shift)
        attend = record(lambda args: len(args[1].calls[args[2]]), context_attention.attend_block)
        patch.setattr(context_attention, "start_shift", start)
        patch.setattr(context_attention, "attend_block", attend)
        patch.setattr(Pending, "wait", record(lambda args: "wait", Pending.wait))
        axis = Axis("cp_outer", tuple(range(size)), rank, torch.distributed.group.WORLD)
        plan = Planner(SequenceLayout(S, size), rank, window=mask.get("window"))
        plan = plan(mask.get("documents"))
        q, k, v = (tensor[plan.local_rows] for tensor in inputs(2)[:3])
        ContextAttention("ring", axis, Axis("cp_inner"))(q, k, v, plan, scale=0.3)
    return events


def test_a_hop_overlaps_with_attention_to_the_block_before_it():
    hops = ["start", 3, "wait", "start", 1, "wait", "start", 1, "wait", 1]
    assert run_on_pool(ring_events, 4, {}) == [hops] * 4


def test_a_ring_makes_only_the_hops_that_some_rank_needs():
    """A window of 7 in shares of 12 rows needs one hop; documents within a share need none."""
    for rank, events in enumerate(run_on_pool(ring_events, 4, {"window": 7})):
        assert events == ["start", 3, "wait", int(rank > 0)]
    documents = torch.arange(S)[None] // 6
    assert run_on_pool(ring_events, 4, {"documents": documents}) == [[2]] * 4

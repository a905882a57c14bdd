"""Every method against one process: out and all gradients in fp64, and the bytes against the closed
forms."""

import math
from functools import partial

import pytest
import torch
from rank_pool import run_on_pool
from ranks import run_ranks

from megatron5d.comm.collectives import Shift
from megatron5d.comm.ledger import Ledger
from megatron5d.context_parallel import attention as context_attention
from megatron5d.context_parallel.attention import ContextAttention
from megatron5d.context_parallel.block_attention import Merge, Planner
from megatron5d.context_parallel.zigzag import SequenceLayout
from megatron5d.kernels import attention
from megatron5d.topology.axis import Axis

S, B, A, D, DV = 48, 2, 8, 6, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 30 + [3] * 12, [0] * 1 + [1] * 1 + [2] * 46])
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


def truth(num_kv_heads, mask, softcap, with_sinks):
    q, k, v, dout, sinks = inputs(num_kv_heads)
    leaves = [t.requires_grad_() for t in (q, k, v, sinks)]
    share = A // num_kv_heads
    scores = torch.einsum("sbad,tbad->bast", q, k.repeat_interleave(share, 2)) * 0.3
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    rows = torch.arange(S)
    hidden = (rows[:, None] < rows[None]) & mask.get("causal", True)
    if mask.get("window"):
        hidden = hidden | ((rows[:, None] - rows[None]).abs() >= mask["window"])
    hidden = hidden.expand(B, 1, S, S)
    if mask.get("documents") is not None:
        hidden = hidden | (
            mask["documents"][:, None, :, None] != mask["documents"][:, None, None, :]
        )
    scores = scores.masked_fill(hidden, float("-inf"))
    if with_sinks:
        scores = torch.cat((scores, sinks.view(1, A, 1, 1).expand(B, A, S, 1)), -1)
    weights = scores.softmax(-1)[..., :S]
    out = torch.einsum("bast,tbad->sbad", weights, v.repeat_interleave(share, 2))
    out.backward(dout)
    return out.detach(), [t.grad for t in leaves]


def run_method(
    rank, size, method, inner, num_kv_heads, mask, softcap, with_sinks, *, dtype=torch.float64
):
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
    inner_axis = axis(
        "cp_inner", tuple(range(outer_rank * layout.inner, (outer_rank + 1) * layout.inner))
    )
    masks = {name: value for name, value in mask.items() if name != "documents"}
    plan = Planner(layout, rank, **masks)(mask.get("documents"))
    rows = plan.own_rows
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
    out, grads = truth(num_kv_heads, mask, softcap, with_sinks)
    results = run_on_pool(run_method, size, method, inner, num_kv_heads, mask, softcap, with_sinks)
    dsinks = 0
    for rows, local, found, _, _ in results:
        torch.testing.assert_close(local, out[rows], rtol=1e-11, atol=1e-13)
        for mine, expected in zip(found[:3], grads):
            torch.testing.assert_close(mine, expected[rows], rtol=1e-10, atol=1e-12)
        dsinks = dsinks + found[3] if with_sinks else 0
    if with_sinks:
        torch.testing.assert_close(dsinks, grads[3], rtol=1e-10, atol=1e-12)
    return results


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
    ring = check("ring", 4, 1, g, {})[0]
    assert ring[3] == {("cp_outer", "shift"): 3 * block}
    assert ring[4] == {("cp_outer", "shift"): 2 * 3 * block}
    gathered = check("allgather", 4, 1, g, {})[0]
    assert gathered[3] == {("cp_outer", "all_gather"): 3 * block}
    assert gathered[4] == {
        ("cp_outer", "all_gather"): 3 * block,
        ("cp_outer", "reduce_scatter"): 3 * block,
    }
    ulysses = check("ulysses", 4, 1, g, {})[0]
    one_way = (S // 4) * B * 8 * (D + D + DV + DV) * 8 * 3 // 4  # q, k, v there, out back
    assert ulysses[3] == {("cp_inner", "all_to_all"): one_way}
    assert ulysses[4] == ulysses[3]


def test_groups_of_heads_hold_each_head_once():
    for count in range(1, 10):
        held = [
            head
            for group in context_attention._groups(count)
            for head in range(group.start, group.stop)
        ]
        assert held == list(range(count))


def test_gradients_travel_in_fp32():
    """In bf16 keys and values are sent as they are. Their gradients are not: every rank that adds
    would round."""
    hop = 3 * (S // 4) * B * 8 * (D + DV)
    for method, sent in (
        ("ring", {("cp_outer", "shift"): hop * (2 + 4)}),
        (
            "allgather",
            {("cp_outer", "all_gather"): hop * 2, ("cp_outer", "reduce_scatter"): hop * 4},
        ),
    ):
        in_bf16 = partial(run_method, dtype=torch.bfloat16)
        *_, num_bytes = run_ranks(in_bf16, 4, method, 1, 8, {}, 0.0, False)[0]
        assert num_bytes == sent, method


def test_blocks_merge_in_fp32():
    """Blocks of ones are a one, however many there are: bf16 would round the weights of each."""
    merge = Merge(torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16), 2)
    for _ in range(50):
        merge.add((0, 1), torch.ones(1, 1, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 1, 1))
    torch.testing.assert_close(merge.out, torch.ones(1, 1, 1, 2))
    torch.testing.assert_close(merge.lse, torch.full((1, 1, 1), math.log(50)))


def test_one_rank_is_plain_attention():
    q, k, v, _, _ = inputs(2)
    plan = Planner(SequenceLayout(S), 0)(None)
    out = ContextAttention("ring", Axis("cp_outer"), Axis("cp_inner"))(q, k, v, plan, scale=0.3)
    torch.testing.assert_close(out, attention(q, k, v, scale=0.3)[0])


def ring_events(rank, size, mask):
    """What a rank's ring does in its forward, in order: (event, number of attention calls)."""
    events = []
    with pytest.MonkeyPatch.context() as patch:
        start, attend, wait = (
            context_attention.start_shift,
            context_attention.attend_block,
            Shift.wait,
        )

        def recorded(name, function, count=lambda args: 0):
            return lambda *args, **kwargs: (
                events.append((name, count(args))),
                function(*args, **kwargs),
            )[1]

        patch.setattr(context_attention, "start_shift", recorded("start", start))
        patch.setattr(
            context_attention,
            "attend_block",
            recorded("attend", attend, lambda a: len(a[1].calls[a[2]])),
        )
        patch.setattr(Shift, "wait", recorded("wait", wait))
        layout = SequenceLayout(S, size)
        axis = Axis("cp_outer", tuple(range(size)), rank, torch.distributed.group.WORLD)
        plan = Planner(layout, rank, window=mask.get("window"))(mask.get("documents"))
        q, k, v, _, _ = (t[plan.own_rows] if t.shape[0] == S else t for t in inputs(2))
        ContextAttention("ring", axis, Axis("cp_inner"))(q, k, v, plan, scale=0.3)
    return events


def test_a_hop_is_under_way_while_the_block_before_it_is_attended_to():
    for rank, events in enumerate(run_on_pool(ring_events, 4, {})):
        assert [name for name, _ in events] == ["start", "attend", "wait"] * 3 + ["attend"]
        assert [calls for name, calls in events if name == "attend"] == [3, 1, 1, 1], rank


def test_a_ring_turns_no_further_than_somebody_sees():
    """A window of 7 in shares of 12 rows: one hop; documents within a share: none."""
    for rank, events in enumerate(run_on_pool(ring_events, 4, {"window": 7})):
        assert [name for name, _ in events] == ["start", "attend", "wait", "attend"]
        assert [calls for name, calls in events if name == "attend"] == [3, int(rank > 0)]
    apart = torch.arange(S)[None] // 6
    assert run_on_pool(ring_events, 4, {"documents": apart}) == [[("attend", 2)]] * 4

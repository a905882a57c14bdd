"""Rows, blocks and balance by brute force over every pair of rows."""

import time
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from megatron5d.context_parallel.block_attention import Planner, imbalance
from megatron5d.context_parallel.zigzag import (
    Mask,
    SequenceLayout,
    chunk_pairs,
    even_layout,
    num_hops,
    plan_calls,
    visible_pairs,
)

DOCUMENTS = [[0] * 5 + [1] * 1 + [2] * 20 + [3] * 22, [0] * 48]
MASKS = [
    Mask(causal, window, documents)
    for causal in (True, False)
    for window, documents in ((None, None), (7, None), (None, DOCUMENTS), (5, DOCUMENTS), (1, None))
]


@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (3, 2)])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(documents=DOCUMENTS)])
def test_every_row_is_held_once(outer, inner, mask):
    layout = even_layout(SequenceLayout(48, outer, inner), mask)
    held = [layout.rows(rank).tolist() for rank in range(layout.size)]
    assert sorted(row for rows in held for row in rows) == list(range(48))
    assert len({len(rows) for rows in held}) == 1


def test_zigzag_by_hand():
    def rows(*sizes):
        return [SequenceLayout(8, *sizes).rows(r).tolist() for r in (0, 1)]

    assert rows(2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows(1, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows(2, 2) == [[0, 1], [6, 7]]


def seen(q, k, mask, row):
    near = mask.window is None or abs(q - k) < mask.window
    return near and (k <= q or not mask.causal) and row[q] == row[k]


def anybody_sees(q, k, mask):
    return any(seen(q, k, mask, row) for row in mask.documents or [[0] * 48])


@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("deal", ["zigzag", "even"])
def test_calls_cover_what_is_seen_and_nothing_twice(outer, mask, deal):
    layout = SequenceLayout(48, outer)
    layout = even_layout(layout, mask) if deal == "even" else layout
    everything = mask.documents or [[0] * 48]
    furthest = 0
    for rank in range(outer):
        mine = layout.outer_rows(rank).tolist()
        for other, calls in enumerate(plan_calls(layout, rank, mask)):
            theirs = layout.outer_rows(other).tolist()
            times = torch.zeros(48, 48)
            for call in calls:
                furthest = max(furthest, (rank - other) % outer)
                for q in mine[slice(*call.queries)]:
                    for k in theirs[slice(*call.keys)]:
                        times[q, k] += 1
                        if not call.masked:
                            visible = [seen(q, k, mask, row) for row in everything]
                            assert all(visible) or (call.causal and k > q), (q, k, call)
            assert times.max() <= 1
            for q in mine:
                for k in theirs:
                    if anybody_sees(q, k, mask):
                        assert times[q, k] == 1, (rank, other, q, k)
    assert num_hops(layout, mask) == furthest


def test_blocks_that_a_mask_empties_are_skipped():
    layout = SequenceLayout(64, 4)
    short = [[i // 8 for i in range(64)]]  # documents of one chunk each
    plan = plan_calls(layout, 1, Mask(documents=short))
    assert [len(calls) for calls in plan] == [0, 2, 0, 0]
    assert num_hops(layout, Mask(documents=short)) == 0


def test_without_a_mask_the_work_is_even_and_in_few_calls():
    layout = SequenceLayout(64, 4)
    assert even_layout(layout, Mask()) == layout
    assert len(set(visible_pairs(layout, Mask()))) == 1
    for rank in range(4):
        plan = plan_calls(layout, rank, Mask())
        assert [len(calls) for calls in plan] == [1] * rank + [3] + [1] * (3 - rank)


@pytest.mark.parametrize("mask", [Mask(causal=False), Mask(window=8), Mask(causal=False, window=5)])
def test_where_zigzag_helps_nobody_ranks_hold_neighbours(mask):
    """And keys go no further than the next rank needs them."""
    layout = even_layout(SequenceLayout(64, 4), mask)
    assert layout.order == tuple(range(8))
    # backwards by one is forwards by three
    assert num_hops(layout, mask) == (1 if mask.causal else 3)


@pytest.mark.parametrize("mask", MASKS)
def test_no_other_deal_of_two_chunks_a_rank_is_more_even(mask):
    layout = SequenceLayout(48, 3)
    found = max(visible_pairs(even_layout(layout, mask), mask))
    assert found == min(
        max(visible_pairs(replace(layout, order=order), mask)) for order in permutations(range(6))
    )


@pytest.mark.parametrize("mask", MASKS)
def test_pairs_are_counted(mask):
    layout = SequenceLayout(48, 3)
    everything = mask.documents or [[0] * 48]
    counted = [
        sum(seen(q, k, mask, row) for row in everything for k in range(48)) for q in range(48)
    ]
    assert chunk_pairs(layout, mask).tolist() == np.array(counted).reshape(6, 8).sum(1).tolist()
    for rank, count in enumerate(visible_pairs(layout, mask)):
        assert count == sum(counted[q] for q in layout.outer_rows(rank))


def rows_of_200_documents():
    s = 131072
    lengths = torch.randint(1, 4000, (200,), generator=torch.Generator().manual_seed(0))
    return SequenceLayout(s, 16), torch.repeat_interleave(torch.arange(200), lengths)[:s][None]


def test_a_plan_of_128k_rows_is_balanced():
    layout, documents = rows_of_200_documents()
    plan = Planner(layout, 3)(documents)
    in_document = (documents[0] == documents[0].unique()[:, None]).sum(1)
    assert sum(plan.visible_pairs) == (in_document * (in_document + 1) // 2).sum()
    zigzag = visible_pairs(layout, Mask(documents=documents.numpy()))
    assert max(plan.visible_pairs) < 0.8 * max(zigzag), "documents make zigzag uneven"


@pytest.mark.timing
def test_a_plan_of_128k_rows_costs_milliseconds():
    """The loader makes one per micro-batch; a Python loop over the rows would be 100 times slower."""
    layout, documents = rows_of_200_documents()
    planner = Planner(layout, 3)
    start = time.process_time()
    planner(documents)
    assert time.process_time() - start < 0.1


def test_balance_is_the_waiting_time():
    """Two micro-batches of two ranks: 3 + 6 pairs of the busiest where 2 + 5 would do."""
    plan = Planner(SequenceLayout(8, 2), 0)(None)
    assert imbalance([plan]) == 1
    plans = [replace(plan, visible_pairs=[3, 1]), replace(plan, visible_pairs=[4, 6])]
    assert imbalance(plans) == (3 + 6) / (2 + 5)
    packed = Planner(SequenceLayout(8, 2), 0)(torch.tensor([[0, 0, 1, 2, 3, 4, 4, 4]]))
    # chunks of 1 + 2, 1 + 1, 1 + 1 and 2 + 3 pairs
    assert sorted(packed.visible_pairs) == [3 + 2, 5 + 2]
    assert imbalance([packed]) == 7 / 6

"""Rows, calls and balance of context parallelism, by brute force over every pair of rows."""

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

# the second row is one document with padding before, within and behind it
DOCUMENTS = [
    [0] * 5 + [1] * 1 + [2] * 20 + [3] * 22,
    [1] * 3 + [0] * 8 + [1] * 14 + [0] * 6 + [1] * 1 + [0] * 6 + [1] * 10,
]
MASKS = [
    Mask(causal, window, documents)
    for causal in (True, False)
    for window, documents in ((None, None), (7, None), (None, DOCUMENTS), (5, DOCUMENTS), (1, None))
]


@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (3, 2)])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(documents=DOCUMENTS)])
def test_every_row_is_on_one_rank(outer, inner, mask):
    layout = even_layout(SequenceLayout(48, outer, inner), mask)
    rows = np.stack([layout.rows(rank) for rank in range(layout.size)])
    assert sorted(rows.flatten().tolist()) == list(range(48))


def test_zigzag_by_hand():
    def rows(*sizes):
        return [SequenceLayout(8, *sizes).rows(rank).tolist() for rank in (0, 1)]

    assert rows(2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows(1, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows(2, 2) == [[0, 1], [6, 7]]


def visible(mask):
    """Bool `[b, 48, 48]`: whether a query sees a key."""
    documents = np.asarray(mask.documents or [[0] * 48])
    distance = np.arange(48)[:, None] - np.arange(48)
    sees = np.abs(distance) < (mask.window or 48)
    sees &= (distance >= 0) | (not mask.causal)
    return sees & (documents[:, :, None] == documents[:, None])


@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("order", ["zigzag", "even"])
def test_calls_cover_each_visible_pair_once(outer, mask, order):
    layout = SequenceLayout(48, outer)
    layout = even_layout(layout, mask) if order == "even" else layout
    sees, computed, hops = visible(mask), np.zeros((48, 48), int), 0
    for rank in range(outer):
        rows = layout.outer_rows(rank)
        for source, calls in enumerate(plan_calls(layout, rank, mask)):
            for call in calls:
                hops = max(hops, (rank - source) % outer)
                queries, keys = rows[slice(*call.queries)], layout.outer_rows(source)
                queries, keys = np.ix_(queries, keys[slice(*call.keys)])
                computed[queries, keys] += 1
                hidden = ~sees[:, queries, keys].all(0)
                assert call.masked or not (hidden & ~(call.causal & (keys > queries))).any(), call
    assert computed.max() <= 1 and (computed[sees.any(0)] == 1).all()
    assert num_hops(layout, mask) == hops


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
def test_ranks_hold_adjacent_chunks_where_zigzag_does_not_help(mask):
    """Then keys are sent only to the next rank, or without causality to the previous one too."""
    layout = even_layout(SequenceLayout(64, 4), mask)
    assert layout.order == tuple(range(8))
    # one hop backward is three hops forward
    assert num_hops(layout, mask) == (1 if mask.causal else 3)


@pytest.mark.parametrize("mask", MASKS)
def test_no_other_order_of_the_chunks_is_more_even(mask):
    layout = SequenceLayout(48, 3)
    busiest = max(visible_pairs(even_layout(layout, mask), mask))
    orders = permutations(range(6))
    assert busiest == min(max(visible_pairs(replace(layout, order=o), mask)) for o in orders)


@pytest.mark.parametrize("mask", MASKS)
def test_visible_pairs_are_counted(mask):
    layout = SequenceLayout(48, 3)
    by_query = visible(mask).sum((0, 2))
    assert chunk_pairs(layout, mask).tolist() == by_query.reshape(6, 8).sum(1).tolist()
    for rank, count in enumerate(visible_pairs(layout, mask)):
        assert count == by_query[layout.outer_rows(rank)].sum()


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
    """The loader makes a plan per micro-batch; a loop over rows in Python would be 100× slower."""
    layout, documents = rows_of_200_documents()
    planner = Planner(layout, 3)
    start = time.process_time()
    planner(documents)
    assert time.process_time() - start < 0.1


def test_imbalance_is_the_waiting_time():
    """Two micro-batches: the busiest ranks have 3 and 6 pairs, the means are 2 and 5."""
    plan = Planner(SequenceLayout(8, 2), 0)(None)
    assert imbalance([plan]) == 1
    plans = [replace(plan, visible_pairs=[3, 1]), replace(plan, visible_pairs=[4, 6])]
    assert imbalance(plans) == (3 + 6) / (2 + 5)
    packed = Planner(SequenceLayout(8, 2), 0)(torch.tensor([[0, 0, 1, 2, 3, 4, 4, 4]]))
    # chunks of 1 + 2, 1 + 1, 1 + 1 and 2 + 3 pairs
    assert sorted(packed.visible_pairs) == [3 + 2, 5 + 2]
    assert imbalance([packed]) == 7 / 6

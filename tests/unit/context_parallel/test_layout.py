"""Rows, blocks and balance by brute force over every pair of rows."""

import time
from dataclasses import replace

import pytest
import torch

from megatron5d.context_parallel.layout import SequenceLayout, layout_of, plan_calls, unmasked_pairs
from megatron5d.context_parallel.plan import Planner, balance

DOCUMENTS = [[0] * 5 + [1] * 1 + [2] * 20 + [3] * 22, [0] * 48]
CASES = [(None, None), (7, None), (None, DOCUMENTS), (5, DOCUMENTS), (1, None)]


@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (3, 2)])
def test_every_row_is_held_once(outer, inner):
    layout = SequenceLayout(48, outer, inner)
    held = [layout.rows(rank) for rank in range(layout.size)]
    assert sorted(row for rows in held for row in rows) == list(range(48))
    assert len({len(rows) for rows in held}) == 1


def test_zigzag_by_hand():
    assert [SequenceLayout(8, 2).rows(r) for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [SequenceLayout(8, 1, 2).rows(r) for r in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [SequenceLayout(8, 2, 2).rows(r) for r in (0, 1)] == [[0, 1], [6, 7]]


def seen(q, k, window, row):
    return k <= q and (window is None or q - k < window) and row[q] == row[k]


@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize(("window", "documents"), CASES)
def test_calls_cover_what_is_seen_and_nothing_twice(outer, window, documents):
    layout = SequenceLayout(48, outer)
    everything = documents or [[0] * 48]
    for rank in range(outer):
        mine = [row for span in layout.chunks(rank) for row in range(*span)]
        for other, calls in enumerate(plan_calls(layout, rank, window=window, documents=documents)):
            theirs = [row for span in layout.chunks(other) for row in range(*span)]
            times = torch.zeros(48, 48)
            for call in calls:
                for q in mine[slice(*call.queries)]:
                    for k in theirs[slice(*call.keys)]:
                        times[q, k] += 1
                        if not call.masked:
                            visible = [seen(q, k, window, row) for row in everything]
                            assert all(visible) or (call.causal and k > q), (q, k, call)
            assert times.max() <= 1
            for q in mine:
                for k in theirs:
                    if any(seen(q, k, window, row) for row in everything):
                        assert times[q, k] == 1, (rank, other, q, k)


def test_blocks_that_a_mask_empties_are_skipped():
    layout = SequenceLayout(64, 4)
    short = [[i // 8 for i in range(64)]]  # documents of one chunk each
    plan = plan_calls(layout, 1, documents=short)
    assert [len(calls) for calls in plan] == [0, 2, 0, 0]


def test_without_a_mask_the_work_is_even_and_in_few_calls():
    layout = SequenceLayout(64, 4)
    assert len(set(unmasked_pairs(layout))) == 1
    for rank in range(4):
        plan = plan_calls(layout, rank)
        assert [len(calls) for calls in plan] == [1] * rank + [3] + [1] * (3 - rank)


@pytest.mark.parametrize(("window", "documents"), CASES)
def test_pairs_are_counted(window, documents):
    layout = SequenceLayout(48, 3)
    everything = documents or [[0] * 48]
    for rank, count in enumerate(unmasked_pairs(layout, window=window, documents=documents)):
        mine = [row for span in layout.chunks(rank) for row in range(*span)]
        assert count == sum(seen(q, k, window, row) for row in everything for q in mine for k in range(48))


def test_a_plan_of_128k_rows_costs_milliseconds():
    """The loader makes one per micro-batch; a Python loop over the rows would take a hundred times longer."""
    s = 131072
    lengths = torch.randint(1, 4000, (200,), generator=torch.Generator().manual_seed(0))
    documents = torch.repeat_interleave(torch.arange(200), lengths)[:s][None]
    planner = Planner(SequenceLayout(s, 16), 3)
    start = time.process_time()
    plan = planner(documents)
    assert time.process_time() - start < 0.1
    in_document = (documents[0] == documents[0].unique()[:, None]).sum(1)
    assert sum(plan.pairs) == (in_document * (in_document + 1) // 2).sum()


def test_balance_is_the_waiting_time():
    """Two micro-batches of two ranks: 3 + 6 pairs of the busiest where 2 + 5 would do."""
    plan = Planner(SequenceLayout(8, 2), 0)(None)
    assert balance([plan]) == 1
    plans = [replace(plan, pairs=[3, 1]), replace(plan, pairs=[4, 6])]
    assert balance(plans) == (3 + 6) / (2 + 5)
    packed = Planner(SequenceLayout(8, 2), 0)(torch.tensor([[0, 0, 1, 2, 3, 4, 4, 4]]))
    assert packed.pairs == [1 + 2 + 2 + 3, 1 + 1 + 1 + 1]  # rows 0, 1, 6, 7 and 2 to 5
    assert balance([packed]) == 8 / 6


def test_what_does_not_divide_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"train.seq_len = 20 .* by 8 \(parallel.cp = 4.* 16 or 24"):
        layout_of("ring", 4, 20)
    with pytest.raises(ValueError, match="parallel.cp_inner = 3 does not divide parallel.cp = 4"):
        layout_of("two_level", 4, 64, 3)

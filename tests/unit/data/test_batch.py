"""Micro-batches: labels, masks, documents and positions against loops that say what they mean."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron5d.data.batch import look_ahead, make_micro_batch
from megatron5d.phases.phase import IGNORED

EOD = 0
rows_of_tokens = st.integers(1, 4).flatmap(
    lambda b: st.integers(2, 12).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=b, max_size=b
        )
    )
)


@settings(max_examples=80, deadline=None)
@given(rows_of_tokens)
def test_documents_and_positions_restart_after_each_eod(rows):
    batch = make_micro_batch(torch.tensor(rows), document_mask=True, eod=EOD)
    for r, row in enumerate(rows):
        document = position = 0
        for p in range(len(row) - 1):
            if p and row[p - 1] == EOD:
                document, position = document + 1, 0
            assert batch.tokens[r, p] == row[p] and batch.labels[r, p] == row[p + 1]
            assert batch.documents[r, p] == document and batch.positions[r, p] == position
            assert batch.loss_mask[r, p] == 1  # the prediction across the border counts
            position += 1


@settings(max_examples=80, deadline=None)
@given(rows_of_tokens)
def test_boundaries_of_the_index_say_the_same_as_eods(rows):
    starts = [
        np.array([p + 1 for p, t in enumerate(row[:-1]) if t == EOD], dtype=np.int64)
        for row in rows
    ]
    by_index = make_micro_batch(torch.tensor(rows), document_mask=True, document_starts=starts)
    by_token = make_micro_batch(torch.tensor(rows), document_mask=True, eod=EOD)
    assert torch.equal(by_index.documents, by_token.documents)
    assert torch.equal(by_index.positions, by_token.positions)


def test_without_document_mask_positions_run_through():
    batch = make_micro_batch(torch.tensor([[1, 0, 2, 3], [4, 5, 0, 0]]), eod=EOD)
    assert batch.documents is None
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.num_targets == 6
    assert [t.dtype for t in (batch.tokens, batch.labels, batch.positions, batch.loss_mask)] == [
        torch.int64
    ] * 3 + [torch.float32]


def test_eod_mask_loss_drops_the_prediction_made_at_eod():
    batch = make_micro_batch(torch.tensor([[1, 0, 2, 0, 0, 3]]), eod=EOD, eod_mask_loss=True)
    assert batch.loss_mask.tolist() == [[1, 0, 1, 0, 0]]
    assert batch.labels.tolist() == [[0, 2, 0, 0, 3]]


def test_padding_has_no_loss_and_a_legal_input():
    batch = make_micro_batch(torch.tensor([[7, 8, IGNORED, IGNORED]]))
    assert batch.tokens.tolist() == [[7, 8, 0]]
    assert batch.labels.tolist() == [[8, IGNORED, IGNORED]]
    assert batch.loss_mask.tolist() == [[1, 0, 0]]
    logits = torch.randn(3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = (
        torch.nn.functional.cross_entropy(logits, batch.labels[0], reduction="none")
        * batch.loss_mask[0]
    ).sum()
    assert torch.equal(
        ours / batch.num_targets, torch.nn.functional.cross_entropy(logits, batch.labels[0])
    )


def test_padding_is_no_end_of_document():
    batch = make_micro_batch(
        torch.tensor([[7, IGNORED, IGNORED, IGNORED]]), document_mask=True, eod=EOD
    )
    assert batch.documents.tolist() == [[0, 0, 0]]


def test_missing_eod_is_named():
    rows = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"eod_mask_loss=true requires data\.eod"):
        make_micro_batch(rows, eod_mask_loss=True)
    with pytest.raises(ValueError, match=r"document_mask=true requires data\.eod"):
        make_micro_batch(rows, document_mask=True)


def test_moves_as_a_whole():
    batch = make_micro_batch(torch.tensor([[1, 0, 2]]), document_mask=True, eod=EOD).to("meta")
    assert {t.device.type for t in vars(batch).values() if t is not None} == {"meta"}
    assert make_micro_batch(torch.tensor([[1, 0, 2]])).to("meta").documents is None


@settings(max_examples=80, deadline=None)
@given(rows_of_tokens, st.booleans(), st.booleans(), st.booleans())
def test_padding_neither_predicts_nor_is_seen(rows, causal, document_mask, eod_mask_loss):
    rows = torch.tensor(rows)
    rows[rows == 4] = IGNORED
    depths = min(2, rows.shape[1] - 2)
    options = {
        "causal": causal,
        "document_mask": document_mask,
        "eod": EOD,
        "eod_mask_loss": eod_mask_loss,
    }
    batch = look_ahead(make_micro_batch(rows, **options), depths)
    real, (b, s) = rows != IGNORED, batch.tokens.shape
    speaks = real & (rows != EOD) if eod_mask_loss else real
    documents = torch.zeros(b, s) if batch.documents is None else batch.documents
    owner = torch.zeros(b, s)
    if document_mask:
        owner[:, 1:] = (rows[:, : s - 1] == EOD).cumsum(1)
    for r in range(b):
        for p in range(s):
            assert batch.loss_mask[r, p] == (speaks[r, p] and real[r, p + 1])
            for k in range(1, depths + 1):
                alike = p + k < s and owner[r, p] == owner[r, p + k]
                assert batch.ahead_mask[k - 1, r, p] == (
                    alike and bool(speaks[r, p + k]) and bool(real[r, p : p + k + 2].all())
                )
            for other in range(p + 1 if causal else s):
                seen = real[r, other] and owner[r, p] == owner[r, other]
                assert not real[r, p] or (documents[r, p] == documents[r, other]) == seen
            if real[r, p]:
                first = (real[r, :s] & (owner[r] == owner[r, p])).nonzero()[0]
                assert batch.positions[r, p] == (p - first if document_mask else p)

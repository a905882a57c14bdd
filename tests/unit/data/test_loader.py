"""The loader: every layout reads the same global batches, and one number resumes it."""

import threading

import numpy as np
import pytest
import torch

from megatron5d.config.derived import samples_of_steps
from megatron5d.data.batch import Loader
from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.data.samples import open_samples


@pytest.fixture
def samples(tmp_path):
    writer = IndexedWriter(tmp_path / "a", np.uint16)
    random = np.random.default_rng(0)
    for _ in range(60):
        writer.add_document(np.append(random.integers(1, 1000, size=random.integers(3, 40)), 0))
    writer.finalize()
    return open_samples([str(tmp_path / "a")], seq_len=8, seed=3)


def rows(batches):
    """All rows of a step as tuples of seq_len + 1 tokens."""
    return [
        tuple(t.tolist()) for b in batches for t in torch.cat([b.tokens, b.labels[:, -1:]], dim=1)
    ]


@pytest.mark.parametrize(("mbs", "dp"), [(1, 1), (12, 1), (1, 12), (2, 3), (3, 2), (6, 2)])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_global_batches_are_the_same_under_any_layout(samples, mbs, dp, prefetch):
    loaders = [
        Loader(samples, batches=[(0, 12)], mbs=mbs, dp_rank=r, dp_size=dp, prefetch=prefetch)
        for r in range(dp)
    ]
    for step in range(4):
        ranks = [next(loader) for loader in loaders]
        assert {len(batches) for batches in ranks} == {12 // (mbs * dp)}
        assert {batch.tokens.shape for batches in ranks for batch in batches} == {(mbs, 8)}
        in_order = [row for micro in zip(*ranks) for row in rows(micro)]
        assert in_order == [tuple(samples[i].tolist()) for i in range(12 * step, 12 * step + 12)]
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("batches", [[(0, 12)], [(0, 4), (15, 8), (30, 12)]])
def test_resume_is_exact_at_every_step(samples, batches):
    whole = Loader(samples, batches=batches, mbs=2, dp_rank=1, dp_size=2)
    steps = [rows(next(whole)) for _ in range(8)]
    assert whole.consumed_samples == samples_of_steps(8, batches)  # read ahead, but not counted
    whole.close()
    for start in range(8):
        consumed = samples_of_steps(start, batches)
        rest = Loader(
            samples, batches=batches, mbs=2, dp_rank=1, dp_size=2, consumed_samples=consumed
        )
        assert [rows(next(rest)) for _ in range(start, 8)] == steps[start:]
        rest.close()


def test_ramp_changes_the_number_of_micro_batches(samples):
    loader = Loader(samples, batches=[(0, 4), (12, 8), (24, 12)], mbs=2, dp_size=2, prefetch=1)
    assert [len(next(loader)) for _ in range(6)] == [1, 1, 1, 2, 2, 3]
    loader.close()


def test_reads_ahead_no_further_than_told(samples):
    read = []
    original = type(samples).__getitem__

    class Counting(type(samples)):
        def __getitem__(self, i):
            read.append(i)
            return original(self, i)

    counting = Counting(samples.streams, samples._route, samples.seq_len, None)
    loader = Loader(counting, batches=[(0, 4)], mbs=4, prefetch=3)
    next(loader)
    threading.Event().wait(0.3)
    # the step taken, three in the queue, one waiting to enter it
    assert 4 * 2 <= len(read) <= 4 * (1 + 3 + 1)
    loader.close()


def test_documents_from_eods_and_from_the_index_agree(samples):
    by_token = next(
        Loader(samples, batches=[(0, 12)], mbs=12, document_mask=True, eod=0, prefetch=0)
    )[0]
    by_index = next(Loader(samples, batches=[(0, 12)], mbs=12, document_mask=True, prefetch=0))[0]
    assert by_token.documents.max() > 0
    assert torch.equal(by_token.documents, by_index.documents)
    assert torch.equal(by_token.positions, by_index.positions)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_tokens_beyond_the_vocabulary_are_refused_where_they_are_asked_for(samples, prefetch):
    loader = Loader(samples, batches=[(0, 12)], mbs=12, vocab_size=100, prefetch=prefetch)
    with pytest.raises(
        ValueError, match=r"a: sample \d+ requires ids below model\.vocab_size = 100 \(got \d+\)"
    ):
        next(loader)
    assert loader.consumed_samples == 0
    good = Loader(samples, batches=[(0, 12)], mbs=12, vocab_size=1000, prefetch=prefetch)
    next(good)
    good.close()


def test_negative_ids_other_than_padding_are_refused(tmp_path):
    """An embedding that is cut over tp would take them for zeros, and the loss would look good."""
    writer = IndexedWriter(tmp_path / "a", np.int32)
    writer.add_document(np.arange(1, 100))
    writer.finalize()
    for token, refused in ((-100, False), (-1, True)):
        (tmp_path / "a.bin").write_bytes(np.array([*range(1, 99), token], "<i4").tobytes())
        loader = Loader(
            open_samples([str(tmp_path / "a")], seq_len=98),
            batches=[(0, 1)],
            mbs=1,
            vocab_size=100,
            prefetch=0,
        )
        if refused:
            with pytest.raises(
                ValueError, match=r"a: sample 0 requires ids .*\(got -1\); ids begin at 0"
            ):
                next(loader)
        else:
            assert next(loader)[0].loss_mask.sum() == 97


def test_an_order_that_ends_is_refused_only_when_its_end_is_asked_for(tmp_path, samples):
    finite = open_samples(
        [samples.streams[0].dataset.prefix], seq_len=8, order="megatron", num_samples=24
    )
    loader = Loader(finite, batches=[(0, finite.num_samples)], mbs=1)
    assert len(next(loader)) == finite.num_samples
    with pytest.raises(IndexError, match="data.order=megatron was built for"):
        next(loader)


def test_close_ends_the_thread_even_while_it_waits(samples):
    loader = Loader(samples, batches=[(0, 4)], mbs=1, prefetch=1)
    next(loader)
    thread = loader._thread
    loader.close()
    loader.close()
    assert not thread.is_alive()

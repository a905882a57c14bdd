"""Our own orders: what sample i is, that an epoch is complete, and that a blend keeps its
proportions."""

import numpy as np
import pytest

from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.data.samples import open_samples

LENGTHS = [4, 9, 1, 0, 30, 12, 7, 25, 3, 9]  # 100 tokens


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "a", LENGTHS)


def write(prefix, lengths, first_id=0):
    writer = IndexedWriter(prefix, np.int32)
    for length in lengths:
        writer.add_document(range(first_id, first_id + length))
        first_id += length
    writer.finalize()
    return str(prefix)


@pytest.mark.parametrize("seq_len", [1, 7, 10, 33, 99])
def test_sequential_is_the_concatenation_cut_and_wrapped(prefix, seq_len):
    samples = open_samples([prefix], seq_len=seq_len, order="sequential")
    per_epoch = (100 - 1) // seq_len
    for i in range(3 * per_epoch + 1):
        start = (i % per_epoch) * seq_len
        assert samples[i].tolist() == list(range(start, start + seq_len + 1))
        assert samples[i].dtype == np.int64


def test_shuffled_is_each_chunk_once_per_epoch_in_another_order(prefix):
    samples = open_samples([prefix], seq_len=3, order="shuffled", seed=5)
    epochs = [[samples[33 * epoch + i].tolist() for i in range(33)] for epoch in range(3)]
    chunks = [list(range(3 * j, 3 * j + 4)) for j in range(33)]
    assert all(sorted(epoch) == chunks for epoch in epochs)
    assert epochs[0] != chunks and len({str(epoch) for epoch in epochs}) == 3


def test_shuffled_depends_on_seed_and_index_alone(prefix):
    first = open_samples([prefix], seq_len=3, seed=5)
    expected = [first[i].tolist() for i in range(200)]
    again = open_samples([prefix], seq_len=3, seed=5)
    for i in np.random.default_rng(0).permutation(200).tolist():  # any order of asking
        assert again[i].tolist() == expected[i]
    other = open_samples([prefix], seq_len=3, seed=6)
    assert [other[i].tolist() for i in range(200)] != expected


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_split_parts_never_share_a_token(prefix, order):
    seen = []
    for part in ("train", "valid"):
        samples = open_samples([prefix], seq_len=5, order=order, split="70,30,0", split_name=part)
        seen.append(
            {t for i in range(samples.streams[0].samples_per_epoch) for t in samples[i].tolist()}
        )
    assert max(seen[0]) < sum(LENGTHS[:7]) <= min(seen[1])


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_blend_takes_each_dataset_in_proportion_and_in_its_own_order(tmp_path, order):
    prefixes = [write(tmp_path / f"d{k}", [400], 1000 * k) for k in range(3)]
    weights = [0.6, 0.3, 0.1]
    sources = [f"{w} {p}" for w, p in zip(weights, prefixes)]
    samples = open_samples(sources, seq_len=3, order=order, seed=1)
    streams = [samples.locate(i)[0] for i in range(70_000)]  # beyond one cycle of the mixture
    took = np.array([samples.streams.index(stream) for stream in streams])
    for length in (10, 1000, 70_000):
        shares = np.bincount(took[:length], minlength=3)
        assert np.abs(shares - np.array(weights) * length).max() <= 2
    for d in range(3):
        rows = [samples[i].tolist() for i in np.flatnonzero(took == d)[:266]]
        chunks = [list(range(1000 * d + 3 * j, 1000 * d + 3 * j + 4)) for j in range(133)]
        if order == "sequential":
            assert rows == chunks + chunks
        else:
            assert (
                sorted(rows[:133]) == chunks
                and sorted(rows[133:]) == chunks
                and rows[:133] != rows[133:]
            )
    # the borders between cycles lose nothing either
    for d, first in ((0, 39_000), (2, 6500)):
        numbers = [samples.locate(int(i))[1] for i in np.flatnonzero(took == d)]
        assert numbers == list(range(len(numbers))) and len(numbers) > first


@pytest.mark.parametrize("order", ["shuffled", "sequential", "megatron"])
def test_a_list_without_weights_is_mixed_by_size(tmp_path, order):
    """And with data.weights=equal, or beside a weight, each entry weighs 1."""
    prefixes = [
        write(tmp_path / f"d{k}", [tokens], 1000 * k) for k, tokens in enumerate((601, 301, 101))
    ]
    settings = {"seq_len": 3, "order": order, "seed": 1, "cache_dir": tmp_path / "cache"}

    def taken(sources, n, **more):
        samples = open_samples(sources, num_samples=n, **settings, **more)
        return [samples.streams.index(samples.locate(i)[0]) for i in range(n)], samples

    took, samples = taken(prefixes, 333)
    assert np.abs(np.bincount(took) - [200, 100, 33]).max() <= 1
    assert len({tuple(samples[i].tolist()) for i in range(333)}) >= 331  # each sample once
    assert np.abs(np.bincount(took[:100], minlength=3) - [60, 30, 10]).max() <= 1
    assert np.abs(np.bincount(taken(prefixes, 999)[0]) - [600, 300, 99]).max() <= 2
    assert np.abs(np.bincount(taken(prefixes, 300, unweighted="equal")[0]) - 100).max() <= 2
    assert (
        np.abs(
            np.bincount(taken([prefixes[0], f"1 {prefixes[1]}", prefixes[2]], 300)[0]) - 100
        ).max()
        <= 2
    )
    if order == "megatron":
        assert np.bincount(took).tolist() == [200, 100, 33]
        # the text: for i = 0 ... size-1 the first of those furthest below weight * max(i, 1)
        counts, expected = [0, 0, 0], []
        for i in range(250):
            lags = [w / 333 * max(i, 1) - c for w, c in zip((200, 100, 33), counts)]
            expected.append(lags.index(max(lags)))
            counts[expected[-1]] += 1
        assert taken(prefixes, 250)[0] == expected
        assert open_samples(prefixes, **settings).num_samples == 333


def test_the_same_file_twice_is_read_in_two_orders(prefix):
    samples = open_samples([prefix, prefix], seq_len=3, seed=5)
    assert [samples[i].tolist() for i in range(0, 60, 2)] != [
        samples[i].tolist() for i in range(1, 60, 2)
    ]


def test_document_starts_are_those_of_the_index(prefix):
    begins = {sum(LENGTHS[:d]) for d in range(len(LENGTHS)) if LENGTHS[d]}
    samples = open_samples([prefix], seq_len=12, seed=2)
    for i in range(8):
        tokens = samples[i].tolist()
        assert samples.document_starts(i).tolist() == [
            p for p, t in enumerate(tokens) if p and t in begins
        ]


def test_wrong_settings_name_the_knob_and_a_legal_value(prefix, tmp_path):
    with pytest.raises(
        ValueError, match=r"train\.seq_len \+ 1 = 101 tokens .*have 100.*at most 99"
    ):
        open_samples([prefix], seq_len=100)
    with pytest.raises(ValueError, match="nowhere.idx: no such file"):
        open_samples([str(tmp_path / "nowhere")], seq_len=3)
    with pytest.raises(ValueError, match="number of samples"):
        open_samples([f"1 {prefix}", prefix], seq_len=3, order="megatron")

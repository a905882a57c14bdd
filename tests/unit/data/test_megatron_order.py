"""Megatron's order against a slow transcription of its description, token by token."""

import multiprocessing
import stat
import time

import numpy as np
import pytest

from megatron5d.data import megatron_order as index_cache
from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.data.megatron_order import build_sample_order
from megatron5d.data.samples import open_samples


def write(prefix, lengths, first_id=0):
    """Documents whose tokens are all different, so that every token tells where it came from."""
    writer = IndexedWriter(prefix, np.int32)
    for length in lengths:
        writer.add_document(range(first_id, first_id + length))
        first_id += length
    writer.finalize()
    return str(prefix)


def slow_samples(documents, seq_len, num_samples, seed):
    """The samples of a list of token lists, as the description says it and nothing cleverer.

    E epochs of the documents, the least number with E·T >= N·seq_len + 1; shuffled (the last epoch
    by itself when fewer than int(0.8 · samples per epoch) samples come from it); cut every seq_len
    tokens into seq_len + 1; shuffled again.
    """
    tokens_per_epoch = sum(len(d) for d in documents)
    epochs = 1
    while num_samples is not None and epochs * tokens_per_epoch < num_samples * seq_len + 1:
        epochs += 1
    random = np.random.RandomState(seed)
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_len
    apart = epochs > 1 and num_samples - before_last < int(
        0.8 * ((tokens_per_epoch - 1) // seq_len)
    )
    order = []
    for repeats in [epochs - 1, 1] if apart else [epochs]:
        part = np.array(list(range(len(documents))) * repeats, dtype=np.int32)
        random.shuffle(part)
        order += part.tolist()
    stream = [token for d in order for token in documents[d]]
    cut = []
    while len(cut) * seq_len + seq_len + 1 <= len(stream):
        cut.append(stream[len(cut) * seq_len : len(cut) * seq_len + seq_len + 1])
    shuffled = []
    for low, high in [(0, before_last), (before_last, len(cut))] if apart else [(0, len(cut))]:
        part = np.arange(low, high, dtype=np.uint32)
        random.shuffle(part)
        shuffled += [cut[j] for j in part]
    return shuffled, apart


CASES = [
    (lengths_seed, seq_len, num_samples, seed)
    for lengths_seed in range(4)
    for seq_len in (1, 3, 8, 50)
    for num_samples in (None, 1, 20, 77, 400)
    for seed in (1, 1234)
]


def test_equals_the_slow_transcription(tmp_path):
    apart_seen = set()
    for case, (lengths_seed, seq_len, num_samples, seed) in enumerate(CASES):
        random = np.random.default_rng(lengths_seed)
        # some documents are empty
        lengths = random.integers(0, 25, size=int(random.integers(12, 40))).tolist()
        prefix = (
            write(tmp_path / f"d{lengths_seed}", lengths)
            if case % 40 == 0
            else str(tmp_path / f"d{lengths_seed}")
        )
        ends = np.cumsum(lengths)
        documents = [list(range(end - length, end)) for length, end in zip(lengths, ends)]
        expected, apart = slow_samples(documents, seq_len, num_samples, seed)
        apart_seen.add(apart)
        samples = open_samples(
            [prefix],
            seq_len=seq_len,
            order="megatron",
            seed=seed,
            num_samples=num_samples,
            cache_dir=tmp_path / "c",
        )
        assert samples.num_samples == len(expected)
        assert [samples[i].tolist() for i in range(len(expected))] == expected
        begins = {end - length for length, end in zip(lengths, ends) if length}
        for i in range(0, len(expected), 7):
            inside = [p for p, token in enumerate(expected[i]) if p and token in begins]
            assert samples.document_starts(i).tolist() == inside
    assert apart_seen == {True, False}


def test_the_first_sample_begins_with_the_first_document_even_if_that_is_empty():
    """As in the index that Megatron stores; elsewhere empty ones are stepped over."""
    order = build_sample_order(np.array([0, 0, 4], np.int32), (0, 3), 1, None, seed=1)
    assert order.document_index.tolist() == [0, 2, 1]
    assert order.sample_index.tolist() == [[0, 0], [1, 1], [1, 2], [1, 3]]


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_splits_are_document_ranges(tmp_path, part):
    lengths = [5] * 40
    prefix = write(tmp_path / "d", lengths)
    low, high = {"train": (0, 32), "valid": (32, 38), "test": (38, 40)}[part]
    expected, _ = slow_samples([list(range(5 * d, 5 * d + 5)) for d in range(low, high)], 4, 30, 7)
    samples = open_samples(
        [prefix],
        seq_len=4,
        order="megatron",
        seed=7,
        num_samples=30,
        split="80,15,5",
        split_name=part,
    )
    assert [samples[i].tolist() for i in range(len(expected))] == expected
    # beside the data, by default
    (built,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert stat.S_IMODE(built.stat().st_mode) == 0o755, "others may train on the same data"


def test_blend_of_weighted_files(tmp_path):
    files = {"a": [7, 3, 9] * 30, "b": [11, 2] * 50, "c": [40] * 20}
    prefixes = [
        write(tmp_path / name, lengths, 10**5 * k)
        for k, (name, lengths) in enumerate(files.items())
    ]
    weights, num_samples = [0.5, 0.2, 0.3], 97
    samples = open_samples(
        [f"{w} {p}" for w, p in zip(weights, prefixes)],
        seq_len=6,
        order="megatron",
        seed=3,
        num_samples=num_samples,
    )
    streams = []
    for k, (weight, lengths) in enumerate(zip(weights, files.values())):
        starts = (10**5 * k + np.cumsum(lengths) - lengths).tolist()
        documents = [list(range(start, start + length)) for start, length in zip(starts, lengths)]
        wanted = -(-num_samples * weight // 1)  # ceil
        streams.append(slow_samples(documents, 6, int(np.ceil(wanted * 1.005)), 3)[0])
    taken = [0, 0, 0]
    for i in range(samples.num_samples):
        lags = [w * max(i, 1) - t for w, t in zip(weights, taken)]
        d = lags.index(max(lags))
        assert samples[i].tolist() == streams[d][taken[d]]
        taken[d] += 1
    assert samples.num_samples == sum(int(np.ceil(num_samples * w)) for w in weights)
    with pytest.raises(
        IndexError, match="built for 98 samples|built for 99 samples|built for 97 samples"
    ):
        samples[samples.num_samples]


def test_one_weighted_file_is_a_blend_only_under_a_split(tmp_path):
    prefix = write(tmp_path / "a", [9] * 200)
    sizes = {}
    for entry in (prefix, f"1.0 {prefix}"):
        for split in (None, "1,0,0"):
            samples = open_samples(
                [entry], seq_len=8, order="megatron", seed=3, num_samples=230, split=split
            )
            sizes[entry == prefix, split] = (
                len(samples.streams[0].order.shuffle_index),
                samples.num_samples,
            )
    # 230 samples take two epochs of 225; a blend asks for 232 and shows 230
    assert sizes[True, None] == sizes[True, "1,0,0"] == sizes[False, None] == (449, 449)
    assert sizes[False, "1,0,0"] == (449, 230)


def test_dtypes_are_megatrons():
    order = build_sample_order(np.full(10, 7, np.int32), (0, 10), 3, 50, 1)
    assert [a.dtype for a in vars(order).values()] == [np.int32, np.int32, np.uint32]
    assert order.sample_index[0].tolist() == [0, 0]


@pytest.mark.parametrize(("lengths", "num_samples"), [([0, 0], 5), ([3, 4], None)])
def test_too_few_tokens_are_refused(tmp_path, lengths, num_samples):
    prefix = write(tmp_path / "a", lengths)
    with pytest.raises(
        ValueError, match=r"a: its 2 documents hold . tokens.* train\.seq_len \+ 1 = 8"
    ):
        open_samples([prefix], seq_len=7, order="megatron", num_samples=num_samples)


@pytest.mark.timing
def test_a_billion_tokens_take_seconds():
    lengths = np.random.default_rng(0).integers(1, 2000, size=1_000_000).astype(np.int32)
    started = time.process_time()
    order = build_sample_order(lengths, (0, len(lengths)), 1024, 970_000, 1)
    seconds = time.process_time() - started
    assert lengths.sum() > 0.99e9
    assert len(order.shuffle_index) >= 970_000
    assert seconds < 10, f"{seconds:.1f} s of CPU"
    # spot checks: each sample starts j·seq_len tokens into the stream
    for j in (0, 1, 1000, len(order.shuffle_index)):
        position, offset = order.sample_index[j]
        assert lengths[order.document_index[:position]].sum() + offset == 1024 * j


def build_slowly(folder, result):
    def build():
        time.sleep(0.3)
        with open(f"{folder}/built", "a") as file:
            file.write("x")
        return {"a": np.arange(1000), "b": np.ones((3, 2), np.int16)}

    arrays = index_cache.cached_arrays(f"{folder}/cache", {"seed": 1}, "ab", build)
    result.put((int(arrays["a"].sum()), arrays["b"].shape, str(arrays["b"].dtype)))


def test_many_ranks_starting_at_once_build_one_index(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=build_slowly, args=(tmp_path, results)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    assert {results.get(timeout=60) for _ in ranks} == {(499500, (3, 2), "int16")}
    for rank in ranks:
        rank.join()
    assert (tmp_path / "built").read_text() == "x"
    # no half-built folders
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1


def test_without_locks_the_first_to_finish_wins(tmp_path, monkeypatch):
    calls = []

    def build_while_another_finishes():
        calls.append("ours")
        if len(calls) == 1:
            index_cache._store(target, {"a": np.zeros(3)}, "{}")
        return {"a": np.ones(3)}

    target = tmp_path / "d9"
    index_cache._store(target, build_while_another_finishes(), "{}")
    assert index_cache._load(target, "a")["a"].tolist() == [0, 0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["d9"]


def test_other_inputs_get_another_index(tmp_path):
    def made(**inputs):
        return index_cache.cached_arrays(
            tmp_path, inputs, "a", lambda: {"a": np.array([inputs["seed"]])}
        )["a"].tolist()

    assert (made(seed=1), made(seed=2), made(seed=1)) == ([1], [2], [1])
    assert index_cache.cached_arrays(
        tmp_path, {"seed": 1}, "a", lambda: pytest.fail("built again")
    )["a"].tolist() == [1]


def test_rewritten_data_is_not_read_through_an_old_index(tmp_path):
    for lengths in ([5] * 20, [3] * 40):
        prefix = write(tmp_path / "a", lengths)
        samples = open_samples([prefix], seq_len=4, order="megatron", seed=1, num_samples=20)
        documents = [list(range(k * n, k * n + n)) for k, n in enumerate(lengths)]
        expected, _ = slow_samples(documents, 4, 20, 1)
        assert [samples[i].tolist() for i in range(20)] == expected[:20]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    prefix = write(tmp_path / "a", [5] * 20)
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="data.cache_dir"):
        samples = open_samples(
            [prefix], seq_len=4, order="megatron", num_samples=9, cache_dir=tmp_path / "file"
        )
    again = open_samples([prefix], seq_len=4, order="megatron", num_samples=9)
    assert [samples[i].tolist() for i in range(9)] == [again[i].tolist() for i in range(9)]


@pytest.mark.parametrize("kept", [0, 90, 130])
def test_a_damaged_cache_is_named(tmp_path, kept):
    """Cut off in its header or behind it, as a copy of the folder or a loss of power leaves it."""

    def build():
        return {"a": np.arange(1000)}

    index_cache.cached_arrays(tmp_path, {}, "a", build)
    (file,) = tmp_path.glob("*/a.npy")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        ValueError, match=f"{file.parent} is damaged .*; remove it, and it is built again"
    ):
        index_cache.cached_arrays(tmp_path, {}, "a", build)


def test_what_was_deleted_from_a_cache_is_built_again(tmp_path):
    prefix = write(tmp_path / "a", [5] * 20)

    def rows():
        samples = open_samples(
            [prefix], seq_len=4, order="megatron", num_samples=9, cache_dir=tmp_path / "cache"
        )
        return [samples[i].tolist() for i in range(9)]

    first = rows()
    (file,) = (tmp_path / "cache").glob("*/shuffle_index.npy")
    file.unlink()
    assert rows() == first
    assert file.is_file()

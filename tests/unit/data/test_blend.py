"""Sources, splits and mixtures, against slow transcriptions of their definitions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from megatron5d.config.derived import Source, source_of
from megatron5d.data import megatron_order
from megatron5d.data.megatron_order import megatron_blend, megatron_sizes
from megatron5d.data.samples import mixing_cycle, normalized, split_range


def test_sources_are_weight_and_prefix():
    assert [
        source_of(entry) for entry in ["0.3 /a/b", "0.3\t/a/b", " 7   c d ", "plain", "./3"]
    ] == [
        Source("/a/b", 0.3, True),
        Source("/a/b", 0.3, True),
        Source("c d", 7.0, True),
        Source("plain", 1.0, False),
        Source("./3", 1.0, False),
    ]


def test_a_number_before_a_space_is_no_weight_of_files_that_are_not_there(tmp_path):
    entry = f"2024 {tmp_path.name}/x"
    assert source_of(entry) == Source(f"{tmp_path.name}/x", 2024.0, True)
    (tmp_path / "2024 crawl").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        (tmp_path / "2024 crawl" / "x.idx").touch()
        assert source_of("2024 crawl/x") == Source("2024 crawl/x", 1.0, False)
        (tmp_path / "crawl").mkdir()
        (tmp_path / "crawl" / "x.idx").touch()
        assert source_of("2024 crawl/x") == Source("crawl/x", 2024.0, True)


@pytest.mark.parametrize("entry", ["", "0.3", "0 a", "-1 a", "nan a", "inf a"])
def test_bad_sources_are_not_legal(entry):
    assert source_of("0.3 a").is_legal and not source_of(entry).is_legal


@pytest.mark.parametrize(
    "split", ["969,30,1", "1,1,1", "80,20", "100", "0,1,0", "0.5,0.25,0.25", "98.5,1,0.5"]
)
@pytest.mark.parametrize("num", [1, 7, 40, 1000, 12345])
def test_split_parts_are_contiguous_and_complete(split, num):
    shares = [Fraction(s) for s in split.split(",")] + [Fraction(0)] * (3 - split.count(",") - 1)
    borders = [sum(shares[:k], Fraction(0)) / sum(shares) * num for k in range(4)]
    for part, low, high in zip(("train", "valid", "test"), borders, borders[1:]):
        if round(low) == round(high):
            with pytest.raises(ValueError, match=f"data.split='{split}' gives {part} 0 of {num}"):
                split_range(split, part, num)
        else:
            begin, end = split_range(split, part, num)
            assert abs(begin - low) <= 0.5 + 1e-9 and abs(end - high) <= 0.5 + 1e-9


def test_no_split_gives_everything():
    assert split_range(None, "valid", 5) == (0, 5)


@pytest.mark.parametrize("split", ["", "a,b,c", "1,2,3,4", "-1,2", "0,0,0", "1;2"])
def test_bad_splits_are_refused(split):
    with pytest.raises(ValueError, match="data.split="):
        split_range(split, "train", 10)


def test_more_datasets_than_16_bits_count_keep_their_numbers():
    ids = mixing_cycle([1.0] * 40_000)[0]
    assert ids.min() == 0 and ids.max() == 39_999
    assert megatron_blend([1.0] * 9, 9)[0].dtype == np.int16  # as Megatron stores it
    ids, numbers = megatron_blend([0.0] * 39_999 + [1.0], 300)
    assert (
        ids.dtype == np.int32
        and ids.tolist() == [39_999, 0, *[39_999] * 298]
        and numbers[-1] == 298
    )


def greedy(weights, size):
    """The text: for i = 0 … size−1 the dataset that maximises w_d · max(i, 1) − taken_d, the first
    maximum wins."""
    taken = [0] * len(weights)
    result = []
    for i in range(size):
        lags = [w * max(i, 1) - t for w, t in zip(weights, taken)]
        d = lags.index(max(lags))
        result.append((d, taken[d]))
        taken[d] += 1
    return result


def test_weights_whose_sum_is_beyond_floats_are_shares_all_the_same():
    assert normalized([1e308, 1e308, 5e307]) == pytest.approx([0.4, 0.4, 0.2])


@pytest.mark.parametrize(
    "weights", [[1], [1, 1], [3, 7], [1, 1, 1], [0.1, 0.2, 0.3, 0.4], [5, 0.001, 2], [1] * 7]
)
def test_megatron_blend_is_the_greedy_rule(weights):
    weights = normalized(weights)
    ids, numbers = megatron_blend(weights, 3000)
    assert (ids.dtype, numbers.dtype) == (np.int16, np.int64)
    assert list(zip(ids.tolist(), numbers.tolist())) == greedy(weights, 3000)


@pytest.mark.parametrize("kind", range(6))
def test_stretches_computed_side_by_side_are_the_greedy_rule(kind, monkeypatch):
    """Weights of all sizes; guesses that are wrong, and parts of a few lanes, too."""
    random = np.random.default_rng(kind)
    weights = normalized(
        random.dirichlet(np.full([2, 3, 4, 9, 20, 4][kind], [1, 1, 0.05, 0.2, 0.1, 1][kind])) + 1e-6
    )
    expected = greedy(weights, 5000)
    if kind == 5:
        monkeypatch.setattr(
            megatron_order, "_near", lambda shares, at: np.zeros((len(shares), len(at)))
        )
    for states in (1, 40, 1 << 14):
        monkeypatch.setattr(megatron_order, "STATES", states)
        for size in (1, 255, 257, 5000):
            ids, numbers = megatron_blend(weights, size)
            assert list(zip(ids.tolist(), numbers.tolist())) == expected[:size]


def test_megatron_sizes_carry_the_surplus():
    assert megatron_sizes([0.3, 0.7], 1000, 0.005) == [302, 704]
    assert megatron_sizes([0.3, 0.7], 1001, 0.0) == [301, 701]
    assert megatron_sizes([1.0], 10, 0.005) == [11]


@pytest.mark.parametrize(
    "weights", [[1], [1, 1], [0.3, 0.7], [0.1, 0.2, 0.3, 0.4], [1, 1e-9], [2, 3, 5, 7, 11, 13]]
)
def test_mixing_cycle_is_even_at_every_length(weights):
    cycle = 4096
    ids, numbers, counts = mixing_cycle(weights, cycle)
    assert len(ids) == cycle and counts.sum() == cycle and counts.min() >= 1
    for d, weight in enumerate(weights):
        exact = weight / math.fsum(weights) * cycle
        assert abs(counts[d] - exact) <= 1 + len(weights) * exact / cycle + (exact < 1)
        mine = ids == d
        assert numbers[mine].tolist() == list(range(counts[d]))  # each sample once, in order
        away = np.abs(np.cumsum(mine) - counts[d] * np.arange(1, cycle + 1) / cycle)
        assert away.max() <= max(1, len(weights) / 2)


def test_the_order_of_a_cycle_is_what_it_always_was():
    """The k-th of c samples belongs at (k + ½)/c of the cycle; resumed runs rely on it."""
    assert mixing_cycle([3, 1], cycle=8)[0].tolist() == [0, 0, 1, 0, 0, 0, 1, 0]


def test_many_datasets_all_take_part():
    _, _, counts = mixing_cycle([1.0] * 500, cycle=100)
    assert counts.tolist() == [1] * 500

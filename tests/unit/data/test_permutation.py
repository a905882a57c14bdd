"""The hash_key permutation: a bijection for every n and key, and a good shuffle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron5d.data.sample_order import Permutation, hash_key


@pytest.mark.parametrize("n", [*range(1, 40), 97, 256, 1000, 2311])
def test_is_a_bijection(n):
    for key in (0, 1, hash_key(7, n)):
        permuted = Permutation(n, key)
        assert sorted(permuted(x) for x in range(n)) == list(range(n))


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), at=st.floats(0, 1, exclude_max=True))
def test_inverse_undoes_it_for_huge_n(n, key, at):
    permuted, inverse, x = Permutation(n, key), Permutation(n, key), min(int(at * n), n - 1)
    inverse._rounds.reverse()  # each is its own inverse
    assert 0 <= permuted(x) < n
    assert inverse(permuted(x)) == x


def test_all_orders_of_four_are_equally_frequent():
    counts: dict[tuple[int, ...], int] = {}
    rounds = 4800
    for key in range(rounds):
        permuted = Permutation(4, hash_key(key))
        order = tuple(permuted(x) for x in range(4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    expected = rounds / 24
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    # 23 degrees of freedom, p = 0.001; the keys are fixed, so this cannot flicker
    assert chi_squared < 49.7


def test_neighbors_are_scattered_and_keys_are_unrelated():
    n = 5000
    a, b = (np.array([Permutation(n, hash_key(key))(x) for x in range(0, n, 10)]) for key in (1, 2))
    identity = np.arange(0, n, 10)
    for one, other in [
        (a, identity),
        (b, identity),
        (a, b),
        (np.diff(a)[1:], np.diff(a)[:-1] * -1),
    ]:
        # differences of a random order correlate by -1/2
        limit = 0.62 if one.shape != a.shape else 0.15
        assert abs(np.corrcoef(one, other)[0, 1]) < limit
    assert np.count_nonzero(a == b) < 5


def test_keys_depend_on_each_part_and_on_their_order():
    keys = [
        hash_key(),
        hash_key(0),
        hash_key(1),
        hash_key(0, 0),
        hash_key(0, 1),
        hash_key(1, 0),
        hash_key(-1),
        hash_key(2**64 - 1),
    ]
    assert len(set(keys)) == len(keys) - 1  # -1 and 2^64 - 1 are the same 64 bits

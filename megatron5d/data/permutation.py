"""A keyed permutation of 0 … n−1 that is computed, not stored: the order of a billion samples in no memory.

Swap-or-not: each round pairs x with (k − x) mod n and swaps the pair or not by one bit that both members compute alike.
Every round is its own inverse, so the whole is a bijection for any n, with no table and no retries.

Source: Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012, Figure 1.
"""

from __future__ import annotations

ROUNDS = 64  # the paper's bound: the distance to a random order shrinks by about sqrt(2) a round; 6·log2(n) and more
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """Scatter 64 bits: the finaliser of SplitMix64.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (mix64variant13).
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def keyed(*parts: int) -> int:
    """One 64-bit key from several integers, each of which changes all of it."""
    key = 0
    for part in parts:
        key = mix((key + 0x9E3779B97F4A7C15 + (part & MASK)) & MASK)
    return key


class Permutation:
    """The permutation of 0 … n−1 that belongs to a key.

    Args:
        n: number of elements, at least 1.
        key: 64 bits, see `keyed`.
    """

    def __init__(self, n: int, key: int) -> None:
        assert n >= 1, n
        self.n = n
        self._rounds = [(keyed(key, 2 * r) % n, keyed(key, 2 * r + 1)) for r in range(ROUNDS)]

    def __call__(self, x: int) -> int:
        """Where `x` goes."""
        return self._walk(x, self._rounds)

    def inverse(self, y: int) -> int:
        """What goes to `y`: the rounds backwards."""
        return self._walk(y, self._rounds[::-1])

    def _walk(self, x: int, rounds: list[tuple[int, int]]) -> int:
        assert 0 <= x < self.n, (x, self.n)
        for k, round_key in rounds:
            partner = (k - x) % self.n
            if mix((max(x, partner) + round_key) & MASK) & 1:
                x = partner
        return x

"""A keyed permutation of 0 … n−1 that is computed and not stored, so shuffling a billion samples takes no memory.

Swap-or-not: each round pairs x with (k − x) mod n, and swaps the pair if a bit that both of them compute is set. Each
round is its own inverse, so the whole is a bijection for any n.

Source: Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012, Figure 1.
"""

from __future__ import annotations

ROUNDS = 64  # the paper suggests 6·log2(n) or more: each round divides the distance to a random order by about sqrt(2)
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """A bijective hash of 64 bits: the finaliser of SplitMix64.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (mix64variant13).
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hash_key(*parts: int) -> int:
    """One 64-bit key from several integers and their order."""
    key = 0
    for part in parts:
        key = mix((key + 0x9E3779B97F4A7C15 + (part & MASK)) & MASK)
    return key


class Permutation:
    """The permutation of 0 … n−1 that belongs to a key.

    Args:
        n: number of elements, at least 1.
        key: 64 bits, see `hash_key`.
    """

    def __init__(self, n: int, key: int) -> None:
        assert n >= 1, n
        self.n = n
        self._rounds = [(hash_key(key, 2 * r) % n, hash_key(key, 2 * r + 1)) for r in range(ROUNDS)]

    def __call__(self, x: int) -> int:
        """The position that `x` is mapped to."""
        assert 0 <= x < self.n, (x, self.n)
        for k, round_key in self._rounds:
            partner = (k - x) % self.n
            if mix((max(x, partner) + round_key) & MASK) & 1:
                x = partner
        return x

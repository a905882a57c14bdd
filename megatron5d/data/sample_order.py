"""Samples from the concatenated documents of one dataset, in sequential or shuffled order.

Sample j of an epoch is tokens j·seq_len to (j+1)·seq_len, both included: one more than seq_len,
because the last input needs a label, so that adjacent samples share a token. `sequential` takes j =
0, 1, 2 …; `shuffled` permutes them by a function of seed and epoch, so that no index is built,
stored or exchanged between ranks.

That function is a keyed permutation of 0 … n−1, swap-or-not: each round pairs x with (k − x) mod n,
and swaps the pair if a bit that both of them compute is set. Each round is its own inverse, so that
their composition is a bijection for any n.
Source: Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012, Figure
    1.

The state of the whole data pipeline is one number, `consumed_samples`. A step takes the next gbs
samples of the global order, so that its set of samples depends on neither dp nor mbs. Each
micro-step takes the next mbs·dp of them, of which rank r gets the r-th mbs, as in Megatron.
"""

import numpy as np

from megatron5d.data.indexed_dataset import IndexedDataset

# The paper suggests 6·log2(n) or more: each round divides the distance to a random order by about
# sqrt(2).
ROUNDS = 64
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """Bijective hash of 64 bits: the finalizer of SplitMix64.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014
        (mix64variant13).
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hash_key(*integers: int) -> int:
    """One 64-bit key from several integers and their order."""
    key = 0
    for integer in integers:
        key = mix((key + 0x9E3779B97F4A7C15 + (integer & MASK)) & MASK)
    return key


class Permutation:
    """Permutation of 0 … n−1, determined by a key.

    Args:
        n: number of elements, at least 1.
        key: 64 bits, see `hash_key`.
    """

    def __init__(self, n: int, key: int) -> None:
        assert n >= 1, n
        self.n = n
        self._rounds = [(hash_key(key, 2 * r) % n, hash_key(key, 2 * r + 1)) for r in range(ROUNDS)]

    def __call__(self, x: int) -> int:
        """Position that `x` is mapped to."""
        assert 0 <= x < self.n, (x, self.n)
        for k, round_key in self._rounds:
            partner = (k - x) % self.n
            if mix((max(x, partner) + round_key) & MASK) & 1:
                x = partner
        return x


class PackedStream:
    """Samples of one dataset, for an unlimited number of epochs.

    Args:
        documents: (begin, end) of the documents to use.
        seq_len: tokens of a sample, without the extra one.
        key: 64 bits that choose the permutation; None = sequential.

    Raises:
        ValueError: the documents have fewer than seq_len + 1 tokens.
    """

    num_samples = None  # no limit

    def __init__(
        self, dataset: IndexedDataset, documents: tuple[int, int], seq_len: int, key: int | None
    ) -> None:
        self.dataset = dataset
        self.seq_len = seq_len
        self.start = dataset.document_start(documents[0])
        self.num_tokens = dataset.document_start(documents[1]) - self.start
        self.samples_per_epoch = (self.num_tokens - 1) // seq_len
        if self.samples_per_epoch < 1:
            first, last = documents
            fix = "add documents"
            if self.num_tokens > 1:
                fix = f"lower train.seq_len to at most {self.num_tokens - 1}, or {fix}"
            raise ValueError(
                f"{dataset.prefix}: a sample requires train.seq_len + 1 = {seq_len + 1} tokens "
                f"(documents {first} to {last - 1} have {self.num_tokens}); {fix}"
            )
        self._key = key
        self._epoch: tuple[int, Permutation] | None = None

    def tokens(self, k: int) -> np.ndarray:
        """Ids of sample `k`, `[seq_len + 1]` in the file's dtype."""
        return self.dataset.tokens(self._position(k), self.seq_len + 1)

    def document_starts(self, k: int) -> np.ndarray:
        """Offsets in sample `k` at which documents begin, int64, each at least 1."""
        return self.dataset.document_starts(self._position(k), self.seq_len + 1)

    def _position(self, k: int) -> int:
        """Index in the file of the first token of sample `k`."""
        epoch, j = divmod(k, self.samples_per_epoch)
        if self._key is not None:
            if self._epoch is None or self._epoch[0] != epoch:
                self._epoch = epoch, Permutation(self.samples_per_epoch, hash_key(self._key, epoch))
            j = self._epoch[1](j)
        return self.start + j * self.seq_len


def micro_batch_samples(
    consumed_samples: int, gbs: int, mbs: int, dp_rank: int, dp_size: int
) -> list[range]:
    """Samples of one step that belong to one data-parallel rank.

    Args:
        consumed_samples: sequences of all earlier steps.
        gbs: this step's global batch, in sequences.
        mbs: micro-batch, in sequences.
        dp_rank: 0 … dp_size − 1.

    Returns:
        One range of mbs sample numbers per micro-batch, gbs/(mbs·dp) of them.
    """
    assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
    assert gbs % (mbs * dp_size) == 0, (gbs, mbs, dp_size)
    starts = range(consumed_samples + dp_rank * mbs, consumed_samples + gbs, mbs * dp_size)
    return [range(start, start + mbs) for start in starts]

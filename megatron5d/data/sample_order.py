"""Samples from the concatenated documents of one dataset, in our own two orders: sequential and shuffled.

Sample j of an epoch is tokens j·seq_len to (j+1)·seq_len, both included: one more than seq_len, because the last input
needs a label, so neighbouring samples share a token. `sequential` takes j = 0, 1, 2 …; `shuffled` permutes them by a
function of seed and epoch, so nothing is built, stored or exchanged between ranks.
"""

from __future__ import annotations

import numpy as np

from megatron5d.data.indexed_dataset import IndexedDataset
from megatron5d.data.permutation import Permutation, hash_key


class PackedStream:
    """The samples of one dataset, epoch after epoch without end.

    Args:
        dataset: where the tokens are.
        documents: (begin, end) of the documents to use.
        seq_len: tokens of a sample, without the extra one.
        key: 64 bits that choose the permutation; None = sequential.

    Raises:
        ValueError: the documents have fewer than seq_len + 1 tokens.
    """

    num_samples = None  # no limit

    def __init__(self, dataset: IndexedDataset, documents: tuple[int, int], seq_len: int, key: int | None) -> None:
        self.dataset = dataset
        self.seq_len = seq_len
        self.start = dataset.document_start(documents[0])
        self.num_tokens = dataset.document_start(documents[1]) - self.start
        self.samples_per_epoch = (self.num_tokens - 1) // seq_len
        if self.samples_per_epoch < 1:
            way_out = f"lower train.seq_len to at most {self.num_tokens - 1}, or " if self.num_tokens > 1 else ""
            raise ValueError(
                f"{dataset.prefix}: documents {documents[0]} to {documents[1] - 1} hold {self.num_tokens} tokens, "
                f"and one sample takes train.seq_len + 1 = {seq_len + 1}; {way_out}take more"
            )
        self._key = key
        self._epoch: tuple[int, Permutation] | None = None

    def tokens(self, k: int) -> np.ndarray:
        """The ids of sample `k`, `[seq_len + 1]` in the file's dtype."""
        return self.dataset.tokens(self._position(k), self.seq_len + 1)

    def document_starts(self, k: int) -> np.ndarray:
        """Offsets in sample `k` at which a document begins, int64, each at least 1."""
        return self.dataset.document_starts(self._position(k), self.seq_len + 1)

    def _position(self, k: int) -> int:
        """The first token of sample `k` in the file."""
        epoch, j = divmod(k, self.samples_per_epoch)
        if self._key is not None:
            if self._epoch is None or self._epoch[0] != epoch:
                self._epoch = epoch, Permutation(self.samples_per_epoch, hash_key(self._key, epoch))
            j = self._epoch[1](j)
        return self.start + j * self.seq_len

"""Samples from the documents of one dataset: in our own two orders, sequential and shuffled, and in Megatron's.

Sample j of an epoch is tokens j·seq_len to (j+1)·seq_len, both included: one more than seq_len, because the last input
needs a label, so neighbouring samples share a token. `sequential` takes j = 0, 1, 2 …; `shuffled` permutes them by a
function of seed and epoch, so nothing is built, stored or exchanged between ranks.

A keyed permutation of 0 … n−1 that is computed and not stored, so shuffling a billion samples takes no memory.

Swap-or-not: each round pairs x with (k − x) mod n, and swaps the pair if a bit that both of them compute is set. Each
round is its own inverse, so the whole is a bijection for any n.

Source: Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012, Figure 1.

The numbers of the samples that a step takes, and of those that a data-parallel rank takes of them.

The state of the whole data pipeline is one number, `consumed_samples`. A step takes the next gbs samples of the global
order, so its set of samples depends on neither dp nor mbs. Each micro-step takes the next mbs·dp of them, of which rank
r gets the r-th mbs, as in Megatron.

The order of Megatron's GPTDataset, exactly. The sequences of a dataset (Megatron calls them documents) are repeated for
as many epochs as the run needs, and shuffled. A sample begins every seq_len tokens of that stream, and the samples are
shuffled again. No Python loop runs over tokens, documents or samples. The arrays are built once per node and mapped by
every rank, under a name made of all they were built from.

Source: NVIDIA Megatron-LM, megatron/core/datasets/gpt_dataset.py and helpers.cpp (core 0.16).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron5d.data.indexed_dataset import IndexedDataset

ROUNDS = 64  # the paper suggests 6·log2(n) or more: each round divides the distance to a random order by about sqrt(2)
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """Returns a bijective hash of 64 bits: the finaliser of SplitMix64.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (mix64variant13).
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hash_key(*parts: int) -> int:
    """Returns one 64-bit key from several integers and their order."""
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
        """Returns the position that `x` is mapped to."""
        assert 0 <= x < self.n, (x, self.n)
        for k, round_key in self._rounds:
            partner = (k - x) % self.n
            if mix((max(x, partner) + round_key) & MASK) & 1:
                x = partner
        return x


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
        """Returns the ids of sample `k`, `[seq_len + 1]` in the file's dtype."""
        return self.dataset.tokens(self._position(k), self.seq_len + 1)

    def document_starts(self, k: int) -> np.ndarray:
        """Returns the offsets in sample `k` at which a document begins, int64, each at least 1."""
        return self.dataset.document_starts(self._position(k), self.seq_len + 1)

    def _position(self, k: int) -> int:
        """Returns the first token of sample `k` in the file."""
        epoch, j = divmod(k, self.samples_per_epoch)
        if self._key is not None:
            if self._epoch is None or self._epoch[0] != epoch:
                self._epoch = epoch, Permutation(self.samples_per_epoch, hash_key(self._key, epoch))
            j = self._epoch[1](j)
        return self.start + j * self.seq_len


def micro_batch_samples(consumed_samples: int, gbs: int, mbs: int, dp_rank: int, dp_size: int) -> list[range]:
    """Returns the samples of one step that belong to one data-parallel rank.

    Args:
        consumed_samples: sequences of all earlier steps.
        gbs: this step's global batch, in sequences.
        mbs: micro-batch, in sequences.
        dp_rank: 0 … dp_size − 1.
        dp_size: data-parallel ranks.

    Returns:
        One range of mbs sample numbers per micro-batch, gbs/(mbs·dp) of them.
    """
    assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
    assert gbs % (mbs * dp_size) == 0, (gbs, mbs, dp_size)
    starts = range(consumed_samples + dp_rank * mbs, consumed_samples + gbs, mbs * dp_size)
    return [range(start, start + mbs) for start in starts]


LAST_EPOCH_THRESHOLD = 0.80  # a last epoch of which a smaller share is needed is shuffled separately


@dataclass(frozen=True)
class SampleOrder:
    """The three indices that Megatron stores, with its dtypes."""

    document_index: np.ndarray  # int32 [epochs·sequences]: sequences in the order in which they are read
    sample_index: np.ndarray  # int32 or int64 [samples + 1, 2]: (position in document_index, offset in that sequence)
    shuffle_index: np.ndarray  # uint32 or int64 [samples]: sample i is number shuffle_index[i] of sample_index


def build_sample_order(
    lengths: np.ndarray, sequences: tuple[int, int], seq_len: int, num_samples: int | None, seed: int
) -> SampleOrder:
    """Builds Megatron's document, sample and shuffle index.

    Args:
        lengths: tokens of each sequence of the whole dataset, int32.
        sequences: (begin, end) of the split's sequences.
        seq_len: tokens of a sample, without the extra one.
        num_samples: samples that the run needs; None = one epoch.
        seed: of numpy's RandomState, 0 … 2³² − 1.

    Returns:
        The order; it has at least num_samples samples.

    Raises:
        ValueError: the split has no tokens, or fewer than seq_len + 1 where one epoch is asked for.
    """
    ids = np.arange(*sequences, dtype=np.int32)
    tokens_per_epoch = int(np.sum(lengths[sequences[0] : sequences[1]], dtype=np.int64))
    if tokens_per_epoch == 0 or (num_samples is None and tokens_per_epoch <= seq_len):
        raise ValueError(
            f"its {len(ids)} documents hold {tokens_per_epoch} tokens, a sample needs train.seq_len + 1 = {seq_len + 1}"
        )
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_len + 1) // tokens_per_epoch))
    total = (epochs * tokens_per_epoch - 1) // seq_len
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_len
    last_apart = False  # the last epoch is shuffled separately
    if epochs > 1:
        assert num_samples is not None
        samples_per_epoch = (tokens_per_epoch - 1) // seq_len
        last_apart = num_samples - before_last < int(LAST_EPOCH_THRESHOLD * samples_per_epoch)

    # The order of these random draws is part of the format.
    random = np.random.RandomState(seed)
    document_index = _shuffled_epochs(ids, epochs, last_apart, random)
    sample_index = _cut_samples(lengths, document_index, seq_len, total)
    shuffle_index = _shuffled_range(total, before_last if last_apart else total, random)
    return SampleOrder(document_index, sample_index, shuffle_index)


def _shuffled_epochs(ids: np.ndarray, epochs: int, last_apart: bool, random: np.random.RandomState) -> np.ndarray:
    """Returns the document index: `ids` repeated for all epochs and shuffled, the last epoch perhaps separately."""
    index = np.tile(ids, epochs)
    border = len(index) - len(ids) * last_apart
    _shuffle(index[:border], random)
    _shuffle(index[border:], random)
    return index


def _shuffle(part: np.ndarray, random: np.random.RandomState) -> None:
    """Shuffles in place; in 8 bytes, which numpy swaps faster, where those stay in the cache."""
    wide = part.astype(np.int64) if len(part) <= 1 << 19 else part
    random.shuffle(wide)
    part[:] = wide


def _cut_samples(lengths: np.ndarray, document_index: np.ndarray, seq_len: int, total: int) -> np.ndarray:
    """Returns the sample index: where token j·seq_len of the shuffled stream is, for each sample j and the end."""
    lengths = lengths.astype(np.int32)  # aligned
    ends = np.cumsum(lengths.take(document_index, mode="clip"), dtype=np.int64)
    ended = np.searchsorted(ends, total * seq_len, side="right")
    samples = ends[:ended] + (seq_len - 1)
    samples //= seq_len  # the first that begins where each sequence ends, or behind it
    position = np.bincount(samples, minlength=total + 1)
    np.cumsum(position, out=position)  # sequences that have ended; empty ones are skipped
    position[0] = 0  # as Megatron does, even if the first sequence is empty
    before = ends[position - 1]
    before[: np.searchsorted(position, 1)] = 0
    largest = max(len(document_index), int(lengths.max()))
    index = np.empty((total + 1, 2), np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    index[:, 0] = position
    np.subtract(np.arange(0, (total + 1) * seq_len, seq_len), before, out=index[:, 1], casting="unsafe")
    return index


def _shuffled_range(total: int, first: int, random: np.random.RandomState) -> np.ndarray:
    """Returns the shuffle index: 0 ... total-1, of which the first `first` and the rest are shuffled separately."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    index = np.arange(total, dtype=dtype)
    _shuffle(index[:first], random)
    _shuffle(index[first:], random)
    return index


class MegatronStream:
    """The samples of one dataset in Megatron's order.

    Args:
        dataset: where the tokens are.
        order: its three indices.
        seq_len: tokens of a sample, without the extra one.
    """

    def __init__(self, dataset: IndexedDataset, order: SampleOrder, seq_len: int) -> None:
        self.dataset, self.order, self.seq_len = dataset, order, seq_len
        self.num_samples = len(order.shuffle_index)

    def tokens(self, k: int) -> np.ndarray:
        """Returns the ids of sample `k`, `[seq_len + 1]` in the file's dtype."""
        return np.concatenate([self.dataset.tokens(start, count) for start, count in self._pieces(k)])

    def document_starts(self, k: int) -> np.ndarray:
        """Returns the offsets in sample `k` at which a document begins, int64, each at least 1."""
        counts = [count for _, count in self._pieces(k)]
        return np.cumsum(counts[:-1], dtype=np.int64)

    def _pieces(self, k: int) -> list[tuple[int, int]]:
        """Returns (first token in the file, number of tokens) of each sequence that the sample takes tokens from."""
        self.dataset.check_index()
        j = int(self.order.shuffle_index[k])
        (first, offset), (last, end) = self.order.sample_index[j].tolist(), self.order.sample_index[j + 1].tolist()
        pieces = []
        for sequence in self.order.document_index[first : last + 1].tolist():
            start = self.dataset.sequence_start(sequence)
            pieces.append([start, self.dataset.sequence_start(sequence + 1) - start])
        pieces[-1][1] = end + 1  # the label of the last input
        pieces[0] = [pieces[0][0] + offset, pieces[0][1] - offset]
        return [(start, count) for start, count in pieces if count]


Arrays = dict[str, np.ndarray]


def cached_arrays(
    folder: str | os.PathLike[str], inputs: dict, names: Collection[str], build: Callable[[], Arrays]
) -> Arrays:
    """Returns `build()`, from disk where somebody has built it before.

    Many ranks may call this at once: one builds under a lock while the others wait, and where the file system has no
    locks all build and the first to rename wins. A folder gets its final name when it is whole; where files have been
    deleted from it since, as clusters do on scratch file systems, it is built again.

    Args:
        folder: of the cache; made when missing.
        inputs: everything the arrays depend on, as JSON values.
        names: of the arrays.
        build: makes the arrays.

    Returns:
        name -> array; mapped read-only where the folder can be written, else in memory.

    Raises:
        ValueError: what was built before is damaged; names its folder.
    """
    folder = Path(folder)
    text = json.dumps(inputs, sort_keys=True)
    target = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    if _has_all(target, names):
        return _load(target, names)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            if not _has_all(target, names):
                shutil.rmtree(target, ignore_errors=True)
                _store(target, build(), text)
    except OSError as error:
        warnings.warn(
            f"data.cache_dir: {folder} cannot be written ({error}); every rank builds its own sample index in memory",
            stacklevel=2,
        )
        return build()
    return _load(target, names)


def _has_all(target: Path, names: Collection[str]) -> bool:
    return all((target / f"{name}.npy").is_file() for name in names)


def _load(target: Path, names: Collection[str]) -> Arrays:
    try:
        return {name: np.load(target / f"{name}.npy", mmap_mode="r") for name in names}
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"data.cache_dir: {target} is damaged ({error}); remove it, and it is built again") from error


def _store(target: Path, arrays: Arrays, inputs: str) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private, but the cache is shared with other users of the data
        for name, array in arrays.items():
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())  # a loss of power could otherwise keep the name and lose the content
        (temporary / "inputs.json").write_text(inputs)
        os.rename(temporary, target)
    except OSError:
        if not target.is_dir():  # else another rank was first, which is as good
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an advisory lock that dies with its process; does nothing where there are no locks."""
    with path.open("a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # renaming is atomic anyway: the lock only saves work
        yield

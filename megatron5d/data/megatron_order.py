"""The order of Megatron's GPTDataset, exactly: the tokens of sample i, for a seed and a number of
samples.

The sequences of a dataset (Megatron calls them documents) are repeated for the epochs that the
run needs, and shuffled. A sample begins every seq_len tokens of that stream, and the samples are
shuffled again. No Python loop runs over tokens, documents or samples: an index over 10⁹ tokens
takes a tenth of a second. The indices are built once per node and mapped by every rank, from files
named after all that they were built from.

Source: NVIDIA Megatron-LM, megatron/core/datasets/gpt_dataset.py and helpers.cpp (core 0.16).
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron5d.data.indexed_dataset import IndexedDataset

# a last epoch of which a smaller share is needed is shuffled separately
LAST_EPOCH_THRESHOLD = 0.80


@dataclass(frozen=True)
class SampleOrder:
    """The three indices that Megatron stores, with its dtypes."""

    # int32 [epochs·sequences]: sequences in the order in which they are read
    document_index: np.ndarray
    # int32 or int64 [samples + 1, 2]: (position in document_index, offset in that sequence)
    sample_index: np.ndarray
    # uint32 or int64 [samples]: sample i is number shuffle_index[i] of sample_index
    shuffle_index: np.ndarray


def build_sample_order(
    lengths: np.ndarray,
    sequences: tuple[int, int],
    seq_len: int,
    num_samples: int | None,
    seed: int,
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
    ids = np.arange(*sequences)
    tokens_per_epoch = int(np.sum(lengths[sequences[0] : sequences[1]], dtype=np.int64))
    if tokens_per_epoch == 0 or (num_samples is None and tokens_per_epoch <= seq_len):
        raise ValueError(
            f"its {len(ids)} documents hold {tokens_per_epoch} tokens, a sample needs "
            f"train.seq_len + 1 = {seq_len + 1}"
        )
    epochs = (
        1 if num_samples is None else max(1, -(-(num_samples * seq_len + 1) // tokens_per_epoch))
    )
    total = (epochs * tokens_per_epoch - 1) // seq_len
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_len
    last_apart = False  # the last epoch is shuffled separately
    if epochs > 1:
        assert num_samples is not None
        samples_per_epoch = (tokens_per_epoch - 1) // seq_len
        last_apart = num_samples - before_last < int(LAST_EPOCH_THRESHOLD * samples_per_epoch)

    # The order of these random draws is part of the format.
    random = np.random.RandomState(seed)
    document_index = np.tile(ids, epochs) if epochs > 1 else ids
    _shuffle_parts(document_index, len(document_index) - len(ids) * last_apart, random)
    sample_index = _cut_samples(lengths, document_index, seq_len, total)
    shuffle_index = np.arange(total)
    _shuffle_parts(shuffle_index, before_last if last_apart else total, random)
    narrow = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    return SampleOrder(document_index.astype(np.int32), sample_index, shuffle_index.astype(narrow))


def _shuffle_parts(index: np.ndarray, border: int, random: np.random.RandomState) -> None:
    """Shuffles what is before `border` and what is behind it, in place; int64, which numpy swaps
    fastest."""
    random.shuffle(index[:border])
    random.shuffle(index[border:])


def _cut_samples(
    lengths: np.ndarray, document_index: np.ndarray, seq_len: int, total: int
) -> np.ndarray:
    """Sample index: where token j·seq_len of the shuffled stream is, for each sample j
    and the end."""
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
    np.subtract(
        np.arange(0, (total + 1) * seq_len, seq_len), before, out=index[:, 1], casting="unsafe"
    )
    return index


class MegatronStream:
    """The samples of one dataset in Megatron's order.

    Args:
        seq_len: tokens of a sample, without the extra one.
    """

    def __init__(self, dataset: IndexedDataset, order: SampleOrder, seq_len: int) -> None:
        self.dataset, self.order, self.seq_len = dataset, order, seq_len
        self.num_samples = len(order.shuffle_index)

    def tokens(self, k: int) -> np.ndarray:
        """Ids of sample `k`, `[seq_len + 1]` in the file's dtype."""
        return np.concatenate(
            [self.dataset.tokens(start, count) for start, count in self._pieces(k)]
        )

    def document_starts(self, k: int) -> np.ndarray:
        """Offsets in sample `k` at which a document begins, int64, each at least 1."""
        counts = [count for _, count in self._pieces(k)]
        return np.cumsum(counts[:-1], dtype=np.int64)

    def _pieces(self, k: int) -> list[tuple[int, int]]:
        """(first token in the file, number of tokens) of each sequence that the sample
        takes tokens from."""
        self.dataset.check_index()
        j = int(self.order.shuffle_index[k])
        (first, offset), (last, end) = (
            self.order.sample_index[j].tolist(),
            self.order.sample_index[j + 1].tolist(),
        )
        pieces = []
        for sequence in self.order.document_index[first : last + 1].tolist():
            start = self.dataset.sequence_start(sequence)
            pieces.append([start, self.dataset.sequence_start(sequence + 1) - start])
        pieces[-1][1] = end + 1  # the label of the last input
        pieces[0] = [pieces[0][0] + offset, pieces[0][1] - offset]
        return [(start, count) for start, count in pieces if count]


Arrays = dict[str, np.ndarray]


def cached_arrays(
    folder: str | os.PathLike[str],
    inputs: dict,
    names: Collection[str],
    build: Callable[[], Arrays],
) -> Arrays:
    """Returns `build()`, from disk where somebody has built it before.

    Many ranks may call this at once: one builds under a lock while the others wait, and where the
    file system has no locks all build and the first to rename wins. A folder gets its final name
    when it is whole; where files have been deleted from it since, as clusters do on scratch file
    systems, it is built again.

    Args:
        folder: of the cache; made when missing.
        inputs: everything the arrays depend on, as JSON values.

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
            (
                f"data.cache_dir: {folder} cannot be written ({error}); every rank builds its own "
                "sample index in memory"
            ),
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
        raise ValueError(
            f"data.cache_dir: {target} is damaged ({error}); remove it, and it is built again"
        ) from error


def _store(target: Path, arrays: Arrays, inputs: str) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        # mkdtemp makes it private, but the cache is shared with other users of the data
        temporary.chmod(0o755)
        for name, array in arrays.items():
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                # a loss of power could otherwise keep the name and lose the content
                os.fsync(file.fileno())
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


# share by which Megatron draws more samples of each dataset of a blend than it expects to need
SURPLUS = 0.005
# samples of a blend that one lane computes, and before that to come into step
LANE, WARM_UP = 256, 32
STATES = 1 << 14  # of lanes and datasets that are computed side by side


def megatron_sizes(weights: Sequence[float], num_samples: int, surplus: float) -> list[int]:
    """Samples that Megatron requests from each dataset of a blend.

    Args:
        weights: one per dataset, normalized.
        surplus: share added to each; 0 gives what the blend is expected to take.
    """
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def megatron_blend(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Megatron's mixture: sample i comes from the dataset furthest below weight·max(i, 1),
    the first of equals.

    Many stretches are computed side by side. The rule forgets where it began, within a few samples:
    two states that are both near the exact shares become one. So each stretch begins from a guess a
    little earlier, and the result is exact once every one begins as the one before has ended; those
    that do not are computed again.

    Args:
        weights: one per dataset, normalized.
        size: samples of the blend.

    Returns:
        dataset of each sample int16 `[size]` (int32 beyond Megatron's 32,767 datasets), its number
        within the dataset int64 `[size]`.
    """
    shares, counts = np.array(weights, np.float64), np.zeros(len(weights))
    datasets = np.empty(size, np.int16 if len(weights) <= np.iinfo(np.int16).max else np.int32)
    numbers = np.empty(size, np.int64)
    stride = LANE * max(1, STATES // len(weights))
    for begin in range(0, size, stride):
        chunk = slice(begin, min(begin + stride, size))
        counts = _blend_part(shares, counts, begin, datasets[chunk], numbers[chunk])
    return datasets, numbers


def _blend_part(
    shares: np.ndarray, before: np.ndarray, begin: int, datasets: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
    """Fills a part of a blend from sample `begin` on, when `before` are taken; returns what is
    after it."""
    first = np.arange(begin, begin + len(datasets), LANE)
    counts = _near(shares, first - WARM_UP)
    counts[:, 1:] = _run_lanes(shares, counts[:, 1:], first[1:] - WARM_UP, WARM_UP)[2]
    counts[:, 0] = before
    sampled, ends = np.empty((2, len(first), LANE), np.int64), counts.copy()
    # lanes to compute: all, then those that did not begin where the one before ended
    wrong = np.arange(len(first))
    while len(wrong):
        *choices, ends[:, wrong] = _run_lanes(shares, counts[:, wrong], first[wrong], LANE)
        sampled[:, wrong] = np.transpose(choices, (0, 2, 1))
        wrong = 1 + np.flatnonzero((counts[:, 1:] != ends[:, :-1]).any(0))
        counts[:, wrong] = ends[:, wrong - 1]
    datasets[:], numbers[:] = sampled.reshape(2, -1)[:, : len(datasets)]
    return ends[:, -1]


def _near(shares: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Samples of each dataset that may have been taken before each sample of `at`: exact
    shares, rounded."""
    exact = shares[:, None] * at
    counts = np.floor(exact)
    rank = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0)
    return counts + (rank < at - counts.sum(0))


def _run_lanes(
    shares: np.ndarray, counts: np.ndarray, first: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Datasets and numbers of `count` samples from each of `first` on, and what is taken
    after them."""
    counts = counts.copy()
    datasets, numbers = np.empty((2, count, len(first)), np.int64)
    # flat: a view
    flat, lanes, lags = counts.reshape(-1), np.arange(len(first)), np.empty_like(counts)
    for i in range(count):
        np.multiply(shares[:, None], np.maximum(first + i, 1), out=lags)
        lags -= counts
        index = lags.argmax(axis=0, out=datasets[i]) * len(first) + lanes
        numbers[i] = before = flat[index]
        flat[index] = before + 1
    return datasets, numbers, counts

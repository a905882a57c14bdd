"""Which dataset the i-th sample comes from, by the weights of the datasets.

There are two rules: our own repeats one evenly mixed cycle (a small index, any number of samples); Megatron's is greedy
and sequential (an index as long as the run).

The weights of datasets, and the documents that a split gives to a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron5d.config.derived import Source, split_shares

PARTS = ("train", "valid", "test")


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in Megatron's arithmetic (numpy fp64), so that ties are resolved as it does."""
    array = np.array(weights, dtype=np.float64)
    with np.errstate(over="ignore"):
        total = np.sum(array)
    return (array / total).tolist() if np.isfinite(total) else normalised(array / array.max())


def mixing_weights(sources: Sequence[Source], sizes: Sequence[int], unweighted: str) -> list[float]:
    """The weight of each dataset of a list, on any scale.

    Args:
        sources: entries of the list.
        sizes: tokens or samples of each.
        unweighted: data.weights: what a list without any weight means, size or equal. Beside others that have one, a
            bare prefix weighs 1.
    """
    if unweighted == "size" and not any(source.weighted for source in sources):
        return [float(size) for size in sizes]
    return [source.weight for source in sources]


def split_range(split: str | None, part: str, num_items: int) -> tuple[int, int]:
    """The contiguous range of items that a split string gives to one part.

    Args:
        split: as in `split_shares`; None = everything belongs to every part.
        part: train, valid or test.
        num_items: documents or sequences of the dataset.

    Returns:
        (begin, end) of the part; both are rounded half to even, as in Megatron.

    Raises:
        ValueError: the string is not up to three numbers, or gives the part nothing.
    """
    assert part in PARTS, part
    if split is None:
        return 0, num_items
    borders = [0.0]
    for share in normalised(split_shares(split)):
        borders.append(borders[-1] + share)
    low, high = borders[PARTS.index(part)], borders[PARTS.index(part) + 1]
    begin, end = round(low * num_items), round(high * num_items)
    if begin >= end:
        raise ValueError(
            f"data.split={split!r} gives {part} {end - begin} of {num_items} documents; "
            f"raise its share to at least 1/{num_items}, or name files in data.{part}"
        )
    return begin, end


CYCLE = 1 << 16  # samples after which our own mixture repeats; weights are exact to 1 / CYCLE
SURPLUS = 0.005  # share by which Megatron draws more samples of each dataset of a blend than it expects to need
COMPILE_ABOVE = 5_000_000  # comparisons; below, plain Python is faster than compiling


def mixing_cycle(weights: Sequence[float], cycle: int = CYCLE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One cycle of our own mixture, in which every stretch has the datasets in proportion to their weights.

    The k-th of a dataset's c samples belongs at time (k + ½)/c of the cycle; sorting all times gives the order. Within
    any prefix a dataset is then less than one sample per competitor away from its exact share.

    Args:
        weights: one per dataset, any positive scale.
        cycle: samples in a cycle.

    Returns:
        dataset of each sample int32 `[cycle]`, its number within the dataset int64 `[cycle]`, and samples of each
        dataset per cycle int64 `[datasets]`.
    """
    num = len(weights)
    cycle = max(cycle, num)
    shares = np.array(normalised(weights)) * (cycle - num)
    counts = np.floor(shares).astype(np.int64) + 1  # at least one sample of each, however small its weight
    by_remainder = np.argsort(np.floor(shares) - shares, kind="stable")
    counts[by_remainder[: cycle - counts.sum()]] += 1
    ids = np.repeat(np.arange(num), counts)
    rank = np.arange(cycle) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((ids, (rank + 0.5) / counts[ids]))
    return ids[order].astype(np.int32), rank[order], counts


def megatron_sizes(weights: Sequence[float], num_samples: int, surplus: float) -> list[int]:
    """Samples that Megatron requests from each dataset of a blend.

    Args:
        weights: one per dataset, normalised.
        num_samples: of the whole blend.
        surplus: share added to each; 0 gives what the blend is expected to take.
    """
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def megatron_blend(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Megatron's mixture: sample i comes from the dataset furthest below weight·max(i, 1), the first of equals.

    Args:
        weights: one per dataset, normalised.
        size: samples of the blend.

    Returns:
        dataset of each sample int16 `[size]` (int32 beyond Megatron's 32,767 datasets), its number within the dataset
        int64 `[size]`.
    """
    dtype = np.int16 if len(weights) <= np.iinfo(np.int16).max else np.int32
    datasets, numbers = np.zeros(size, dtype), np.zeros(size, np.int64)
    shares, taken = np.array(weights, np.float64), np.zeros(len(weights), np.int64)
    if size * len(weights) > COMPILE_ABOVE:
        try:
            import numba

            numba.njit(_fill_blend)(shares, taken, datasets, numbers)
            return datasets, numbers
        except ImportError:
            pass  # the same loop uncompiled: a tenth of a microsecond per sample and dataset
    _fill_blend(shares.tolist(), taken.tolist(), datasets, numbers)
    return datasets, numbers


def _fill_blend(weights, taken, datasets, numbers) -> None:
    """Fills `datasets` and `numbers`; `taken` counts samples by dataset. Plain loops, so that numba can compile it."""
    for i in range(len(datasets)):
        at = max(float(i), 1.0)
        chosen, lag = 0, weights[0] * at - taken[0]
        for d in range(1, len(weights)):
            other = weights[d] * at - taken[d]
            if other > lag:
                chosen, lag = d, other
        datasets[i] = chosen
        numbers[i] = taken[chosen]
        taken[chosen] += 1

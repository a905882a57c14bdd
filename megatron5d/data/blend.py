"""Which dataset the i-th sample comes from: weights, mixing, and the cut into train, valid and test.

Two rules of mixing: our own repeats one evenly spread cycle (no index, any length), Megatron's is greedy and sequential
(an index of the run's length). Both depend on the weights alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PARTS = ("train", "valid", "test")
CYCLE = 1 << 16  # samples after which our own mixture repeats; weights are exact to 1 / CYCLE
SURPLUS = 0.005  # Megatron draws so many more samples of each blended dataset than it expects to need
COMPILE_ABOVE = 5_000_000  # comparisons; below, plain Python is faster than compiling


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.valid`."""

    prefix: str
    weight: float
    weighted: bool  # the weight was written, not assumed


def parse_sources(entries: Sequence[str], knob: str = "data.train") -> list[Source]:
    """Read a list of `weight prefix` strings; a bare prefix weighs 1.

    Args:
        entries: e.g. `["0.3 /data/wiki", "0.7 /data/web"]`.
        knob: config key for messages.

    Returns:
        The sources, in order.

    Raises:
        ValueError: the list is empty, or a weight is not a positive finite number.
    """
    if isinstance(entries, str):
        raise ValueError(f"{knob}={entries!r} is one string; it is a list: {knob}=['{entries}']")
    sources = []
    for entry in entries:
        first, _, rest = entry.strip().partition(" ")
        try:
            weight, prefix, weighted = float(first), rest.strip(), True
        except ValueError:
            weight, prefix, weighted = 1.0, entry.strip(), False
        if not prefix:
            raise ValueError(f"{knob}: {entry!r} names no file; an entry is 'weight prefix' or 'prefix'")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"{knob}: the weight of {entry!r} is {weight}; it must be above 0, or leave the entry out")
        sources.append(Source(prefix, weight, weighted))
    if not sources:
        raise ValueError(f"{knob} is empty; name at least one 'weight prefix' of a .bin/.idx pair")
    return sources


def named_entries(entries: Sequence[str]) -> dict[str, list[str]]:
    """The entries of `data.valid_sets` by name: what stands behind the name is an entry as `parse_sources` reads it.

    Args:
        entries: e.g. `["web /data/web", "code 0.7 /data/c", "code 0.3 /data/py"]`.
    """
    found: dict[str, list[str]] = {}
    for name, _, entry in (text.strip().partition(" ") for text in entries):
        found.setdefault(name, []).append(entry.strip())
    return found


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in the arithmetic Megatron uses (numpy fp64), so that its ties fall alike."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def split_shares(split: str) -> list[float]:
    """What a split string gives to train, valid and test, on a scale of its own; missing ones are 0.

    Raises:
        ValueError: the string is not up to three numbers of positive sum.
    """
    numbers = split.split(",")
    if len(numbers) > 3 or not all(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", number) for number in numbers):
        raise ValueError(f"data.split={split!r}: up to three numbers 'train,valid,test', such as '969,30,1'")
    shares = [float(number) for number in numbers] + [0.0] * (3 - len(numbers))
    if sum(shares) == 0:
        raise ValueError(f"data.split={split!r} sums to 0; '1,0,0' gives everything to train")
    return shares


def split_range(split: str | None, part: str, num_items: int) -> tuple[int, int]:
    """The contiguous range of items that a split string gives to one part.

    Args:
        split: e.g. "969,30,1" (train, valid, test; missing ones are 0); None = everything belongs to every part.
        part: train, valid or test.
        num_items: sequences of the dataset.

    Returns:
        (begin, end) of the part; both borders rounded half to even as Megatron does.

    Raises:
        ValueError: the string is not up to three numbers, or gives the part nothing.
    """
    assert part in PARTS, part
    if split is None:
        return 0, num_items
    shares = split_shares(split)
    borders = [0.0]
    for share in normalised(shares):
        borders.append(borders[-1] + share)
    low, high = borders[PARTS.index(part)], borders[PARTS.index(part) + 1]
    begin, end = round(low * num_items), round(high * num_items)
    if begin >= end:
        raise ValueError(
            f"data.split={split!r} gives {part} {end - begin} of {num_items} documents; "
            f"raise its share to at least 1/{num_items}, or name files in data.{part}"
        )
    return begin, end


def mixing_cycle(weights: Sequence[float], cycle: int = CYCLE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One cycle of our own mixture: every stretch of it holds the datasets in proportion to their weights.

    The k-th of a dataset's c samples belongs at time (k + ½)/c of the cycle; sorting all times gives the order. Within
    any prefix a dataset is then less than one sample per competitor away from its exact share.

    Args:
        weights: one per dataset, any positive scale.
        cycle: samples in a cycle.

    Returns:
        dataset of each slot int16 `[cycle]`, its running number within the dataset int64 `[cycle]`,
        and samples of each dataset per cycle int64 `[datasets]`.
    """
    num = len(weights)
    cycle = max(cycle, num)
    shares = np.array(normalised(weights)) * (cycle - num)
    counts = np.floor(shares).astype(np.int64) + 1  # nobody disappears, however small its weight
    by_remainder = np.argsort(np.floor(shares) - shares, kind="stable")
    counts[by_remainder[: cycle - counts.sum()]] += 1
    ids = np.repeat(np.arange(num), counts)
    rank = np.arange(cycle) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((ids, (rank + 0.5) / counts[ids]))
    return ids[order].astype(np.int16), rank[order], counts


def megatron_sizes(weights: Sequence[float], num_samples: int, surplus: float) -> list[int]:
    """Samples Megatron asks of each dataset of a blend.

    Args:
        weights: normalised.
        num_samples: of the whole blend.
        surplus: share added, 0 for what the blend is expected to take.

    Returns:
        Samples per dataset.
    """
    return [math.ceil(math.ceil(num_samples * weight) * (1 + surplus)) for weight in weights]


def megatron_blend(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Megatron's mixture: sample i goes to the dataset that lags furthest behind w·max(i, 1), the first of equals.

    Args:
        weights: normalised.
        size: samples of the blend.

    Returns:
        dataset of each sample int16 `[size]`, its running number within the dataset int64 `[size]`.
    """
    datasets, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
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

"""The strings that name data in a configuration: weighted prefixes, named sets, and the split into parts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.valid`."""

    prefix: str
    weight: float
    weighted: bool  # the weight was written, not assumed


def parse_sources(entries: Sequence[str], knob: str = "data.train") -> list[Source]:
    """Read a list of `weight prefix` strings; a prefix alone has the weight 1.

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
    """The entries of `data.valid_sets`, grouped by their name.

    Args:
        entries: e.g. `["web /data/web", "code 0.7 /data/c", "code 0.3 /data/py"]`.

    Returns:
        name -> entries without the name, for `parse_sources`.
    """
    found: dict[str, list[str]] = {}
    for name, _, entry in (text.strip().partition(" ") for text in entries):
        found.setdefault(name, []).append(entry.strip())
    return found


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in Megatron's arithmetic (numpy fp64), so that ties are resolved as it does."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def split_shares(split: str) -> list[float]:
    """The shares of train, valid and test in a split string, not normalised; missing ones are 0.

    Args:
        split: e.g. "969,30,1".

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

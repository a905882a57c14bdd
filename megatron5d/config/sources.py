"""The strings that name data in a configuration: weighted prefixes, named sets, and shares of a split."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One `weight prefix` of .bin and .idx."""

    prefix: str
    weight: float
    weighted: bool  # the weight was written, not assumed

    @property
    def is_legal(self) -> bool:
        """Whether it names something, with a finite weight above 0."""
        return self.prefix != "" and 0 < self.weight < math.inf


def source_of(entry: str) -> Source:
    """An entry of `data.train`, such as "0.3 /data/wiki"; a prefix alone has the weight 1."""
    first, _, rest = entry.strip().partition(" ")
    try:
        return Source(rest.strip(), float(first), True)
    except ValueError:
        return Source(entry.strip(), 1.0, False)


def named_entries(entries: Sequence[str]) -> list[tuple[str, str]]:
    """(name, `weight prefix`) of each entry of `data.valid_sets`, such as "code 0.7 /data/c"."""
    pairs = [text.strip().partition(" ") for text in entries]
    return [(name, entry.strip()) for name, _, entry in pairs]


def split_shares(split: str | None) -> list[float]:
    """The shares of train, valid and test in a split string such as "969,30,1", not normalised; missing ones are 0.

    Raises:
        ValueError: the string is not one to three numbers of positive sum.
    """
    if split is None:
        return [1.0, 0.0, 0.0]
    numbers = split.split(",")
    if len(numbers) > 3 or not all(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", number) for number in numbers):
        raise ValueError(f"data.split={split!r}: one to three numbers 'train,valid,test', such as '969,30,1'")
    shares = [float(number) for number in numbers] + [0.0] * (3 - len(numbers))
    if sum(shares) == 0:
        raise ValueError(f"data.split={split!r} sums to 0; '1,0,0' gives everything to train")
    return shares

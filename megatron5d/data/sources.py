"""The weights of datasets, and the documents that a split gives to a part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron5d.config.sources import split_shares

PARTS = ("train", "valid", "test")


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in Megatron's arithmetic (numpy fp64), so that ties are resolved as it does."""
    array = np.array(weights, dtype=np.float64)
    with np.errstate(over="ignore"):
        total = np.sum(array)
    return (array / total).tolist() if np.isfinite(total) else normalised(array / array.max())


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

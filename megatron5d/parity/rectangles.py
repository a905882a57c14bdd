"""Rectangles of global tensors, and the elements of gradients in which there is only rounding."""

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING = 1e-13  # of the largest gradient: what remains of zero in sums of this length

# global name, first index in the global tensor, values
Rectangles = list[tuple[str, tuple[int, ...], Tensor]]
Vanishing = dict[int, dict[str, Tensor]]
"""Step -> name -> elements of the gradient that are zero but for rounding, bool."""


def joined(rectangles: Rectangles) -> dict[str, Tensor]:
    """Global tensors, fp64, from the rectangles of one process."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, offset, values in rectangles:
        end = tuple(o + n for o, n in zip(offset, values.shape))
        sizes[name] = tuple(map(max, end, sizes.get(name, end)))
    tensors = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    for name, offset, values in rectangles:
        tensors[name][index_of(offset, values)] = values.double()
    return tensors


def index_of(offset: Sequence[int], values: Tensor) -> tuple[slice, ...]:
    """Index of a rectangle in its global tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offset, values.shape))


def vanishing_elements(gradients: Rectangles) -> dict[str, Tensor]:
    """Elements of the gradients of one process that are zero but for rounding.

    An optimizer that normalizes its updates, such as Muon, would make of them an update as large as
    any other, and arbitrary: everything after it would differ between correct layouts.
    """
    limit = rounding_of(gradients)
    masks = {name: tensor.abs() <= limit for name, tensor in joined(gradients).items()}
    return {name: mask for name, mask in masks.items() if mask.any()}


def rounding_of(gradients: Rectangles) -> float:
    """Size of what may remain of zero in the gradients of one process."""
    maxima = [values.abs().max().item() for _, _, values in gradients if values.numel()]
    return ROUNDING * max(maxima, default=0.0)


def masked(rectangles: Rectangles, masks: dict[str, Tensor], limit: float) -> Rectangles:
    """Rectangles in which masked elements of at most this size are zero."""
    return [
        (name, at, _masked(values, masks[name][index_of(at, values)], limit))
        if name in masks
        else (name, at, values)
        for name, at, values in rectangles
    ]


def _masked(values: Tensor, mask: Tensor, limit: float) -> Tensor:
    return values.masked_fill(mask & (values.abs() <= limit), 0.0)

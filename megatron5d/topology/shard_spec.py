"""Which part of the global tensor each local parameter holds: nothing else decides sharding.

A local parameter is a stack of pieces along its dim 0. Each piece is a rectangle of one global
tensor, here of the fused q, k, v on rank r of tp (d: head dim; a query heads, g KV heads):

    local rows            global tensor
    0 .. 2d      q heads  rows  2dr .. 2dr+2d
    2d .. 3d     k head   rows  a·d + ...          copies on `tp_kv` where g is less than tp
    3d .. 4d     v head   rows  (a+g)·d + ...

Rows that no piece covers are padding: they are zero, receive no gradient and are never saved.
Initialization, gradient reduction, the gradient norm, ZeRO, checkpoints and Hugging Face conversion
all read this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Piece:
    """A rectangle of the global tensor and the local rows that hold it."""

    offset: tuple[int, ...]  # first index in each dim of the global tensor
    # extent in each dim; all elements of a local row belong to the rectangle
    shape: tuple[int, ...]
    row: int = 0  # first local row (dim 0) of the rectangle
    # axes, except for data parallelism, whose ranks hold the same rectangle and a partial gradient
    # each, to be summed
    summed: tuple[str, ...] = ()
    # whether this rank is the first of those that hold the rectangle; only the owner counts the
    # piece in norms and writes it to disk
    owner: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def flat(self) -> tuple[int, int]:
        """Start and end (exclusive) of the piece in the flattened local tensor."""
        start = self.row * prod(self.shape[1:])
        return start, start + self.numel


@dataclass(frozen=True)
class ShardSpec:
    """Which part of its global tensor one parameter holds, and how the tensor is initialized."""

    name: str  # global name, the same on any layout
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # those on this rank
    expert: bool = False  # replicated over edp (True) or over dp·cp (False)
    init: float | str = "zeros"  # standard deviation of the normal distribution, "ones" or "zeros"
    decay: bool = True  # whether weight decay applies
    # "pair" where the mirrored pipeline rank holds the parameter too (the second copy of a
    # bidirectional schedule), "tied" where several do (an embedding whose uses are on different
    # ranks), and they count as data parallel; otherwise ""
    shared: str = ""
    # global rows of each of several matrices stacked in this parameter (q, k and v; gate and up),
    # which Muon orthogonalizes one by one; () = one matrix
    stack: tuple[int, ...] = ()
    # rows of a head in each of them, for optim.muon_per_head; () = they have no heads
    head_rows: tuple[int, ...] = ()


def unsharded(
    shape: tuple[int, ...], summed: tuple[str, ...] = (), owner: bool = True
) -> tuple[Piece]:
    """The single piece of a tensor that this rank holds entirely; arguments as in `Piece`."""
    return (Piece((0,) * len(shape), shape, 0, summed, owner),)


class Fp8Copies(Protocol):
    """FP8 copies of a weight: `QuantizedPair` in precision/fp8_weights.py."""

    is_gathered: bool  # whether they are views of what ZeRO-3 has gathered

    def forget_transposed(self) -> None:
        """Drops the transposed copy; it is made again when it is read."""


@dataclass(slots=True, eq=False)
class ParameterState:
    """All that the code records about one parameter, read by `state_of`.

    `main_grad` to `frozen` are set by data_parallel/bucket.py and read by phases/wgrad.py; `gemms`
    and `overlap` are set by model/gpt.py.
    """

    spec: ShardSpec | None = None  # set by `new_parameter`
    # view of the bucket's buffer in which gradients are summed; None = `.grad`, as usual in torch
    main_grad: torch.Tensor | None = None
    allocate_main_grad: Callable[[], None] | None = None  # allocates that buffer (ZeRO-2 and 3)
    # False: `main_grad` has last step's values or none; the next gradient overwrites it
    holds_grad: bool = True
    frozen: bool = False  # never updated, so that no weight gradient is computed
    # `Gemms`, of experts `ExpertGemms` (precision/gemm.py); None = in the weight's own dtype
    gemms: Any = None
    # `Overlap` of GEMMs and collectives (tensor_parallel/overlap.py); None = one after the other
    overlap: Any = None
    fp8_copies: Fp8Copies | None = None  # kept from the first use until the weight changes


def state_of(parameter: torch.Tensor) -> ParameterState:
    """State of a parameter or buffer; an empty one is attached to a tensor that has none."""
    state = getattr(parameter, "state", None)
    if state is None:
        state = parameter.state = ParameterState()  # type: ignore[attr-defined]
    return state


_WITHOUT_MEMORY = ContextVar("parameters without memory", default=False)


@contextmanager
def without_memory() -> Iterator[None]:
    """Makes new parameters with a shape but no memory; a flat buffer gives it to them later.

    This way no rank ever holds more of the model than its own slices (data_parallel/bucket.py).
    """
    token = _WITHOUT_MEMORY.set(True)
    try:
        yield
    finally:
        _WITHOUT_MEMORY.reset(token)


def has_memory(parameter: torch.Tensor) -> bool:
    """Whether a parameter has memory, unlike one made `without_memory` and not in a buffer yet."""
    return parameter.is_contiguous()


def new_parameter(
    local_shape: tuple[int, ...], spec: ShardSpec, dtype: torch.dtype, device
) -> torch.nn.Parameter:
    """Makes a local parameter with a spec; its pieces are uninitialized, its padding is 0."""
    if _WITHOUT_MEMORY.get():
        # one expanded element, because torch does not let a parameter leave the meta device
        values = torch.zeros((), dtype=dtype, device=device).expand(local_shape)
    else:
        padded = sum(piece.numel for piece in spec.pieces) < prod(local_shape)
        values = (torch.zeros if padded else torch.empty)(local_shape, dtype=dtype, device=device)
    parameter = torch.nn.Parameter(values)
    state_of(parameter).spec = spec
    return parameter


def spec_of(parameter: torch.Tensor) -> ShardSpec:
    """Spec of a parameter that `new_parameter` made."""
    spec = state_of(parameter).spec
    assert spec is not None, "not made by new_parameter"
    return spec


def rectangles(
    shape: tuple[int, ...], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divides the flat range [start, stop) of a row-major tensor into at most 2·ndim-1 rectangles.

    Args:
        start, stop: flat element range.

    Returns:
        (offset, extent) pairs, in flat order; their elements are contiguous in the flat range.
    """
    if stop <= start:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row_size = prod(shape[1:])
    first, last = -(-start // row_size), stop // row_size  # whole rows: first ... last-1

    def in_row(index: int, start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        inner = rectangles(shape[1:], start, stop)
        return [((index, *offset), (1, *extent)) for offset, extent in inner]

    if first > last or (first == last and start // row_size == (stop - 1) // row_size):
        index = start // row_size
        return in_row(index, start - index * row_size, stop - index * row_size)
    rows = [((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))]
    return [
        *in_row(first - 1, start - (first - 1) * row_size, row_size),
        *(rows if last > first else []),
        *in_row(last, 0, stop - last * row_size),
    ]

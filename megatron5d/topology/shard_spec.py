"""The part of the global tensor that a parameter holds: nothing else decides sharding.

A local parameter is a stack of pieces along its dim 0. Each piece is a rectangle of one global tensor:

    local rows            global tensor  (fused q, k, v on rank r of tp)
    0 .. 2d      q heads  rows  2dr .. 2dr+2d
    2d .. 3d     k head   rows  a·d + ...          copies on `tp_kv` where heads are fewer than ranks
    3d .. 4d     v head   rows  (a+g)·d + ...      (d: head dim; a query heads, g KV heads)

Rows that no piece covers are padding: they are zero, receive no gradient and are never saved.
Initialisation, gradient reduction, the gradient norm, ZeRO, checkpoints and Hugging Face conversion
all read this. `ParameterState` is everything that the code records about a parameter, its ShardSpec
among it.
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
    # extent in each dim; all of a local row's elements belong to the rectangle
    shape: tuple[int, ...]
    row: int = 0  # first local row (dim 0) of the rectangle
    # axes (data parallelism aside) whose ranks hold the same rectangle and each a part of its
    # gradient, to be added up
    summed: tuple[str, ...] = ()
    # this rank is the first of those that hold the rectangle; only it counts the piece in norms and
    # writes it to disk
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
    """The place of one parameter in the whole model."""

    name: str  # global name, the same on any layout
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # what this rank holds of it
    expert: bool = False  # replicated over edp (True) or over dp·cp (False)
    # standard deviation of the normal initialisation, or "ones" / "zeros"
    init: float | str = "zeros"
    decay: bool = True  # whether weight decay applies
    # "pair" where the mirrored pipeline rank holds the parameter too (the second copy of a
    # bidirectional schedule), "tied" where several do (an embedding whose uses are on different
    # ranks), and they count as data parallel; otherwise ""
    shared: str = ""
    # global rows of each of several matrices stacked in this parameter (q, k and v; gate and up),
    # which Muon orthogonalises one by one; () = one matrix
    stack: tuple[int, ...] = ()
    # rows of a head in each of them, for optim.muon_per_head; () = they have no heads
    head_rows: tuple[int, ...] = ()


def unsharded(
    shape: tuple[int, ...], summed: tuple[str, ...] = (), owner: bool = True
) -> tuple[Piece]:
    """Returns the only piece of a tensor that this rank holds entirely; the arguments are those of
    `Piece`."""
    return (Piece((0,) * len(shape), shape, 0, summed, owner),)


class Fp8Copies(Protocol):
    """FP8 copies of a weight: `QuantizedPair` in precision/fp8_tensor.py."""

    is_gathered: bool  # they are views of what ZeRO-3 has gathered

    def forget_transposed(self) -> None:
        """Drops the transposed copy; it is made again when it is read."""


@dataclass(slots=True, eq=False)
class ParameterState:
    """What the code records about one parameter; `state_of` returns it, nothing else is attached.

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
    """Makes new parameters with a shape but no memory in this context; a flat buffer gives it to
    them later.

    This way no rank ever holds more of the model than the slices that it keeps
    (data_parallel/bucket.py).
    """
    token = _WITHOUT_MEMORY.set(True)
    try:
        yield
    finally:
        _WITHOUT_MEMORY.reset(token)


def has_memory(parameter: torch.Tensor) -> bool:
    """Says if a parameter has memory, unlike one that was made `without_memory` and not put into a
    buffer yet."""
    return parameter.is_contiguous()


def new_parameter(
    local_shape: tuple[int, ...], spec: ShardSpec, dtype: torch.dtype, device
) -> torch.nn.Parameter:
    """Makes a local parameter with a spec; its pieces are not initialized, its padding is 0."""
    if _WITHOUT_MEMORY.get():
        # one expanded element; torch does not let a parameter change from the meta device to
        # another
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
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last or (first == last and start // row == (stop - 1) // row):
        index = start // row
        inner = rectangles(shape[1:], start - index * row, stop - index * row)
        return [((index, *offset), (1, *extent)) for offset, extent in inner]
    parts = []
    if start < first * row:
        inner = rectangles(shape[1:], start - (first - 1) * row, row)
        parts += [((first - 1, *offset), (1, *extent)) for offset, extent in inner]
    if last > first:
        parts.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if stop > last * row:
        inner = rectangles(shape[1:], 0, stop - last * row)
        parts += [((last, *offset), (1, *extent)) for offset, extent in inner]
    return parts

"""FP8 copies of weights, and the quantization of flat slices of a weight by several ranks.

Ranks quantize their flat slices of a weight to the numbers of the whole weight. A weight, or a
stack of them (experts), is divided into blocks of 128×128. Each rank finds the largest magnitude of
each block in its slice; the maximum over ranks is that of the whole weight. So the quantized slices
are slices of the quantized weight (data_parallel/fp8_all_gather.py gathers them). A `Band` is the
part of a slice in some adjacent block rows. If its first or last row is incomplete, zeros fill it,
which change no maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron5d.kernels.dispatch import cdiv
from megatron5d.kernels.fp8.quantize import E4M3, GROUP, Quantized, cast_scaled, magnitude_of
from megatron5d.kernels.fp8.transpose import transpose_values
from megatron5d.topology.shard_spec import spec_of, state_of

Stack = tuple[int, int, int]
"""Shape of a matrix or stack of experts: (matrices, rows of one, columns)."""
_CHUNK = 1 << 22  # elements quantized at a time, so that float32 temporaries take tens of MB


class QuantizedPair:
    """A quantized weight `[out, in]` and its transpose `[in, out]`, perhaps stacked by expert.

    Args:
        plain: the weight.
        transposed: its transpose; None = computed from `plain` when first read.
        is_gathered: `plain` is a view of what ZeRO-3 has gathered.
    """

    def __init__(
        self, plain: Quantized, transposed: Quantized | None = None, *, is_gathered: bool = False
    ) -> None:
        self.plain, self._transposed, self.is_gathered = plain, transposed, is_gathered
        self.made_from: tuple[int, int] | None = None  # `_version_of` the weight

    @property
    def transposed(self) -> Quantized:
        """The transpose, for input gradients."""
        if self._transposed is None:
            values, scales = transpose_values(self.plain.values), self.plain.scales.mT.contiguous()
            self._transposed = Quantized(values, scales, self.plain.rows_per_scale)
        return self._transposed

    @property
    def has_transposed(self) -> bool:
        """Whether the transpose has been computed."""
        return self._transposed is not None

    def forget_transposed(self) -> None:
        """Drops the transpose; it is computed again when it is read."""
        self._transposed = None

    @property
    def tensors(self) -> list[Tensor]:
        """Values and scales of both."""
        return [x for q in (self.plain, self.transposed) for x in (q.values, q.scales)]


def _version_of(weight: Tensor) -> tuple[int, int]:
    """Two numbers that change when a weight is changed through torch."""
    return weight.data_ptr(), weight._version


def quantized_weight(weight: Tensor, quantize: Callable[[], QuantizedPair]) -> QuantizedPair:
    """FP8 copies of a weight, computed at the first use after a change and stored with it.

    A change through the parameter itself is noticed. Code that writes its memory otherwise
    (optimizer, gathering) must call `forget_copies`.
    """
    pair = state_of(weight).fp8_copies
    if not isinstance(pair, QuantizedPair) or pair.made_from != _version_of(weight):
        pair = quantize()
        set_copies(weight, pair)
    return pair


def set_copies(weight: Tensor, pair: QuantizedPair) -> None:
    """Stores a weight's FP8 copies, which are valid until it changes."""
    pair.made_from = _version_of(weight)
    state_of(weight).fp8_copies = pair


def stack_shape(parameter: Tensor) -> Stack:
    """Shape of a local matrix or stack of experts."""
    spec = spec_of(parameter)
    count = 1
    if spec.expert:
        experts = {piece.offset[0] + i for piece in spec.pieces for i in range(piece.shape[0])}
        count = len(experts)
    columns = parameter.shape[-1]
    return count, prod(parameter.shape) // (count * columns), columns


def gathered_pair(weight: Tensor, values: Tensor, scales: Tensor) -> QuantizedPair:
    """Builds the FP8 copies of a weight from its gathered elements, without a copy.

    Args:
        values: its elements in e4m3 as bytes, flat.
        scales: of every block, `[matrices, blocks down, blocks across]` float32.
    """
    stack = stack_shape(weight)
    shape = stack if spec_of(weight).expert else stack[1:]
    plain = state_of(weight).gemms.gathered(values.view(E4M3).view(shape), scales)
    return QuantizedPair(plain, is_gathered=True)


def block_grid(stack: Stack) -> Stack:
    """Number of 128×128 blocks of a stack: (matrices, blocks down, blocks across)."""
    count, rows, columns = stack
    return count, cdiv(rows, GROUP), cdiv(columns, GROUP)


@dataclass(frozen=True)
class Band:
    """A flat range of a stack of matrices, within adjacent block rows of one of them."""

    row: int  # its first block row, counted over all matrices
    origin: int  # flat index at which that block row begins
    start: int
    stop: int
    columns: int

    def blocks(self, values: Tensor) -> Tensor:
        """Arranges the band's `values` as `[block rows, 128, block columns, 128]` float32, with
        zeros in the missing places."""
        # Zeros fill the first block row before the band, and the last one after it.
        before, rows = self.start - self.origin, cdiv(self.stop - self.origin, self.columns)
        rows += -rows % GROUP
        wide = pad(values.float(), (before, rows * self.columns - before - values.numel()))
        wide = pad(wide.view(rows, self.columns), (0, -self.columns % GROUP))
        return wide.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))

    def flat(self, blocks: Tensor) -> Tensor:
        """Extracts the flat values of the band from the form that `blocks` returns."""
        rows = blocks.flatten(2, 3).flatten(0, 1)[:, : self.columns].reshape(-1)
        return rows[self.start - self.origin : self.stop - self.origin]


def bands(stack: Stack, start: int, stop: int) -> Iterator[Band]:
    """Divides a flat range of a stack into bands of about `_CHUNK` elements, each within one
    matrix."""
    count, rows, columns = stack
    if rows % GROUP == 0:  # no block row spans two matrices: the stack is one tall matrix
        count, rows = 1, count * rows
    height = GROUP * columns
    while start < stop:
        matrix, offset = divmod(start, rows * columns)
        row = offset // height
        origin = matrix * rows * columns + row * height
        end = min(stop, (matrix + 1) * rows * columns, origin + max(1, _CHUNK // height) * height)
        yield Band(matrix * cdiv(rows, GROUP) + row, origin, start, end, columns)
        start = end


def block_maxima(values: Tensor, stack: Stack, start: int) -> Tensor:
    """Finds the largest magnitude of a flat slice in each block of a stack; 0 in blocks outside the
    slice.

    Args:
        stack: shape of the stack.
        start: flat index of the slice's first element in the stack.

    Returns:
        float32 `[matrices, blocks down, blocks across]`; infinite where an element is not finite.
    """
    maxima = torch.zeros(block_grid(stack), device=values.device)
    rows = maxima.view(-1, maxima.shape[-1])
    for band in bands(stack, start, start + values.numel()):
        blocks = band.blocks(values[band.start - start : band.stop - start])
        rows[band.row : band.row + len(blocks)] = magnitude_of(blocks).amax((1, 3))
    return maxima


def quantize_slice(
    values: Tensor, stack: Stack, start: int, maxima: Tensor, scales: Tensor, out: Tensor
) -> None:
    """Quantizes a flat slice of a stack to e4m3.

    Args:
        values, stack, start: as in `block_maxima`.
        maxima, scales: of every block, `[matrices, blocks down, blocks across]` float32.
        out: uint8, one byte for each of the values.
    """
    maxima, scales = (x.flatten(0, 1)[:, None, :, None] for x in (maxima, scales))
    for band in bands(stack, start, start + values.numel()):
        span = slice(band.start - start, band.stop - start)
        blocks = band.blocks(values[span])
        rows = slice(band.row, band.row + len(blocks))
        fp8 = cast_scaled(blocks, maxima[rows], scales[rows], E4M3)
        out[span] = band.flat(fp8.view(torch.uint8))

"""The FP8 copies of a weight, and the quantisation of its flat slices on several ranks to the same numbers.

A weight, or a stack of them (experts), is divided into blocks of 128×128. Each rank finds the largest magnitude of each
block in its slice; the maximum over ranks is that of the whole weight. So the quantised slices are slices of the
quantised weight (data_parallel/fp8_all_gather.py gathers them). A `Band` is the part of a slice in some adjacent block
rows. Where its first and last row are not whole, zeros fill them, which change no maximum.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron5d.kernels.fp8.quantize import E4M3, GROUP, Quantized, cast_scaled, magnitude_of, transpose_values
from megatron5d.topology.shard_spec import spec_of

_CHUNK = 1 << 22  # elements quantised at a time, so that float32 temporaries take some tens of MB


class QuantizedPair:
    """A quantised weight `[out, in]` and its transpose `[in, out]`, perhaps stacked by expert.

    Args:
        plain: the weight.
        transposed: its transpose; None = made from `plain` when first read.
    """

    def __init__(self, plain: Quantized, transposed: Quantized | None = None) -> None:
        self.plain, self._transposed = plain, transposed

    @property
    def transposed(self) -> Quantized:
        """The transpose, with which input gradients are computed."""
        if self._transposed is None:
            values, scales = transpose_values(self.plain.values), self.plain.scales.mT.contiguous()
            self._transposed = Quantized(values, scales, self.plain.rows_per_scale)
        return self._transposed

    @property
    def has_transposed(self) -> bool:
        """Whether the transpose has been made."""
        return self._transposed is not None

    def forget_transposed(self) -> None:
        """Drops the transpose; it is made again when it is read."""
        self._transposed = None

    @property
    def parts(self) -> list[Tensor]:
        """Values and scales of both."""
        return [part for each in (self.plain, self.transposed) for part in (each.values, each.scales)]


def _state(weight: Tensor) -> tuple[int, int]:
    """Returns what changes when a weight is changed through torch."""
    return weight.data_ptr(), weight._version


def quantized_weight(weight: Tensor, make: Callable[[], QuantizedPair]) -> QuantizedPair:
    """Returns a weight's FP8 copies, made at the first use after a change and kept on the parameter.

    A change through the parameter itself is noticed. Code that writes its memory otherwise (optimiser, gathering) must
    call `forget_copies`.

    Args:
        weight: the parameter.
        make: quantises it.
    """
    held = getattr(weight, "quantized", None)
    if held is None or held[0] != _state(weight):
        hold_quantized(weight, make())
    return weight.quantized[1]  # type: ignore[attr-defined]


def hold_quantized(weight: Tensor, pair: QuantizedPair) -> None:
    """Sets a weight's FP8 copies, which are valid until it changes."""
    weight.quantized = _state(weight), pair  # type: ignore[attr-defined]


def stack_of(parameter: Tensor) -> tuple[int, int, int]:
    """Returns the shape of a local matrix or stack of experts: (matrices, rows of one, columns)."""
    spec = spec_of(parameter)
    held = {piece.offset[0] + i for piece in spec.pieces for i in range(piece.shape[0])} if spec.expert else {0}
    columns = parameter.shape[-1]
    return len(held), prod(parameter.shape) // (len(held) * columns), columns


def stored_pair(weight: Tensor, values: Tensor, scales: Tensor) -> QuantizedPair:
    """Makes the FP8 copies of a weight from its elements; the transpose is made when first read.

    Args:
        weight: the parameter.
        values: its elements in e4m3 as bytes, flat.
        scales: of every block, `[matrices, blocks down, blocks across]` float32.
    """
    stack = stack_of(weight)
    shape = stack if spec_of(weight).expert else stack[1:]
    return QuantizedPair(weight.gemms.stored(values.view(E4M3).view(shape), scales))  # type: ignore[attr-defined]


def blocks_in(stack: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns the number of 128×128 blocks of a stack: (matrices, blocks down, blocks across)."""
    count, rows, columns = stack
    return count, -(-rows // GROUP), -(-columns // GROUP)


@dataclass(frozen=True)
class Band:
    """A flat range of a stack of matrices, within adjacent block rows of one of them.

    Args:
        row: its first block row, counted over all matrices.
        origin: flat index at which that block row begins.
        start, stop: the flat range.
        columns: of the matrices.
    """

    row: int
    origin: int
    start: int
    stop: int
    columns: int

    def blocks(self, values: Tensor) -> Tensor:
        """Returns the band's `values` as `[block rows, 128, block columns, 128]` float32, zeros where it has none."""
        ahead, rows = self.start - self.origin, -(-(self.stop - self.origin) // self.columns)
        rows += -rows % GROUP
        wide = torch.nn.functional.pad(values.float(), (ahead, rows * self.columns - ahead - values.numel()))
        wide = torch.nn.functional.pad(wide.view(rows, self.columns), (0, -self.columns % GROUP))
        return wide.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))

    def flat(self, blocks: Tensor) -> Tensor:
        """Returns the flat values of the band from what `blocks` returned."""
        rows = blocks.flatten(2, 3).flatten(0, 1)[:, : self.columns].reshape(-1)
        return rows[self.start - self.origin : self.stop - self.origin]


def bands(stack: tuple[int, int, int], start: int, stop: int) -> Iterator[Band]:
    """Divides a flat range of a stack into bands of about `_CHUNK` elements, none of which crosses into a new matrix.

    Args:
        stack: (matrices, rows of one, columns).
        start, stop: the range.
    """
    count, rows, columns = stack
    if rows % GROUP == 0:  # a block row lies in one matrix: the stack is one tall matrix
        count, rows = 1, count * rows
    height = GROUP * columns
    while start < stop:
        matrix, within = divmod(start, rows * columns)
        row = within // height
        origin = matrix * rows * columns + row * height
        end = min(stop, (matrix + 1) * rows * columns, origin + max(1, _CHUNK // height) * height)
        yield Band(matrix * -(-rows // GROUP) + row, origin, start, end, columns)
        start = end


def block_maxima(values: Tensor, stack: tuple[int, int, int], start: int) -> Tensor:
    """Finds the largest magnitude of a flat slice in each block of a stack; 0 in blocks outside the slice.

    Args:
        values: the slice, flat.
        stack: (matrices, rows of one, columns).
        start: flat index of its first element in the stack.

    Returns:
        float32 `[matrices, blocks down, blocks across]`; infinite where an element is not finite.
    """
    found = torch.zeros(blocks_in(stack), device=values.device)
    rows = found.view(-1, found.shape[-1])
    for band in bands(stack, start, start + values.numel()):
        most = magnitude_of(band.blocks(values[band.start - start : band.stop - start])).amax((1, 3))
        rows[band.row : band.row + most.shape[0]] = most
    return found


def quantize_slice(
    values: Tensor, stack: tuple[int, int, int], start: int, maxima: Tensor, scales: Tensor, out: Tensor
) -> None:
    """Quantises a flat slice of a stack to e4m3.

    Args:
        values, stack, start: as in `block_maxima`.
        maxima, scales: of every block, `[matrices, blocks down, blocks across]` float32.
        out: uint8, one byte for each of the values.
    """
    maxima, scales = (each.flatten(0, 1)[:, None, :, None] for each in (maxima, scales))
    for band in bands(stack, start, start + values.numel()):
        span = slice(band.start - start, band.stop - start)
        blocks = band.blocks(values[span])
        rows = slice(band.row, band.row + blocks.shape[0])
        fp8 = cast_scaled(blocks, maxima[rows], scales[rows], E4M3)
        out[span] = band.flat(fp8.view(torch.uint8))

"""The 8-bit copies of a weight, and how they are made of flat slices of it, each on another rank.

A weight, or a stack of them (experts), is cut into blocks of 128×128. Every rank finds the largest magnitudes in its
slice; their maximum over ranks is what the whole weight would have given, so that slices quantised with it are slices
of the whole weight quantised (data_parallel/eight_bits.py gathers them). `Band` is a run of block rows that a slice
meets: at most two of its rows are not whole, and it is padded with zeros, which no maximum notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kernels.fp8_quantize import E4M3, GROUP, Quantized, cast_scaled, magnitude_of
from megatron5d.topology.shard import spec_of

_CHUNK = 1 << 22  # elements quantised at a time, so that float32 scratch stays at some tens of MB


class Pair:
    """A quantised weight `[out, in]` and its transpose `[in, out]`, perhaps stacked by expert.

    Args:
        straight: the weight.
        turned: its transpose; None = made of `straight` by the first input gradient.
    """

    def __init__(self, straight: Quantized, turned: Quantized | None = None) -> None:
        self.straight, self._turned = straight, turned

    @property
    def turned(self) -> Quantized:
        if self._turned is None:
            values, scales = self.straight.values.mT.contiguous(), self.straight.scales.mT.contiguous()
            self._turned = Quantized(values, scales, self.straight.rows_per_scale)
        return self._turned


def _state(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def quantized_weight(weight: Tensor, make: Callable[[], Pair]) -> Pair:
    """A weight's 8-bit copies, made by the first use after a change and kept on the parameter.

    A change that goes through the parameter is noticed by its version; whoever writes its memory in another way
    (optimiser, gathering) says so by `forget_quantized`.
    """
    held = getattr(weight, "quantized", None)
    if held is None or held[0] != _state(weight):
        hold_quantized(weight, make())
    return weight.quantized[1]  # type: ignore[attr-defined]


def hold_quantized(weight: Tensor, pair: Pair) -> None:
    """Hands a weight its 8-bit copies; they count until it changes."""
    weight.quantized = _state(weight), pair  # type: ignore[attr-defined]


def forget_quantized(parameters: Iterable[Tensor]) -> None:
    """Drops the 8-bit copies of parameters whose values have changed, or whose memory is wanted."""
    for parameter in parameters:
        if hasattr(parameter, "quantized"):
            del parameter.quantized


def stack_of(parameter: Tensor) -> tuple[int, int, int]:
    """A local matrix, or stack of experts, as (matrices, rows of one, columns)."""
    spec = spec_of(parameter)
    held = {piece.offset[0] + i for piece in spec.pieces for i in range(piece.shape[0])} if spec.expert else {0}
    columns = parameter.shape[-1]
    return len(held), prod(parameter.shape) // (len(held) * columns), columns


def blocks_in(stack: tuple[int, int, int]) -> tuple[int, int, int]:
    """How many blocks of 128×128 there are: (matrices, down, across)."""
    count, rows, columns = stack
    return count, -(-rows // GROUP), -(-columns // GROUP)


@dataclass(frozen=True)
class Band:
    """A flat range of a stack of matrices that lies in whole block rows of one of them.

    Args:
        row: its first block row, those of all matrices counted.
        origin: flat index where that block row begins.
        start, stop: flat range.
        columns: of the matrices.
    """

    row: int
    origin: int
    start: int
    stop: int
    columns: int

    def blocks(self, values: Tensor) -> Tensor:
        """The band's `values` as `[block rows, 128, block columns, 128]` float32, zeros around them."""
        ahead, rows = self.start - self.origin, -(-(self.stop - self.origin) // self.columns)
        rows += -rows % GROUP
        wide = torch.nn.functional.pad(values.float(), (ahead, rows * self.columns - ahead - values.numel()))
        wide = torch.nn.functional.pad(wide.view(rows, self.columns), (0, -self.columns % GROUP))
        return wide.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))

    def flat(self, blocks: Tensor) -> Tensor:
        """The transpose of `blocks`."""
        rows = blocks.flatten(2, 3).flatten(0, 1)[:, : self.columns].reshape(-1)
        return rows[self.start - self.origin : self.stop - self.origin]


def bands(stack: tuple[int, int, int], start: int, stop: int) -> Iterator[Band]:
    """Cuts a flat range of a stack of matrices where a matrix ends in the middle of a block, and into pieces of a size.

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
    """The largest magnitude in each block of a stack, as far as a flat slice holds it; 0 elsewhere.

    Args:
        values: flat, elements `start` ... of the stack.
        stack: (matrices, rows of one, columns).
        start: flat index of the first.

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
    """A flat slice of a stack in e4m3.

    Args:
        values, stack, start: as of `block_maxima`.
        maxima, scales: of every block, `[matrices, blocks down, blocks across]` float32.
        out: bytes, one for each of the values.
    """
    maxima, scales = (each.flatten(0, 1)[:, None, :, None] for each in (maxima, scales))
    for band in bands(stack, start, start + values.numel()):
        span = slice(band.start - start, band.stop - start)
        blocks = band.blocks(values[span])
        rows = slice(band.row, band.row + blocks.shape[0])
        eight = cast_scaled(blocks, maxima[rows], scales[rows], E4M3)
        out[span] = band.flat(eight.view(torch.uint8))

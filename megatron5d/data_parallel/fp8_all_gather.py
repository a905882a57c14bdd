"""The FP8 gather format of ZeRO-3: gathers the weights of FP8 GEMMs in half the bytes of bf16.

    slice    | bytes of the owned elements |   stays in memory; quantized after every update
    buffer   | p0 | p1 | ... | pad |           in memory while the unit computes; read by GEMMs
    scales   float32, one per 128×128 block    stay in memory on every rank

The values equal those of gathering bf16 weights and quantizing them: each rank finds the largest
magnitude of each block within its slice, one all_reduce computes the maximum over the full block,
and the scale depends only on that maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor, nn

from megatron5d.comm.collectives import Pending, all_reduce, start_all_gather
from megatron5d.comm.ledger import Exposure
from megatron5d.data_parallel.temporary_buffer import TemporaryBuffer
from megatron5d.kernels.fp8.quantize import E4M3, scales_of
from megatron5d.precision.fp8_recipes import is_quantized
from megatron5d.precision.fp8_weights import (
    block_grid,
    block_maxima,
    gathered_pair,
    quantize_slice,
    set_copies,
    stack_shape,
)
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import state_of


class Fp8ShardedWeights:
    """The `GatherFormat` of a bucket whose parameters are all multiplied in FP8.

    Args:
        parameters: of the bucket.
        offsets: the first element of each parameter in the bucket.
        weight_slice: the owned slice of the weights, flat, in the model's dtype.
        shard: the ranks that own one slice each.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        offsets: Sequence[int],
        weight_slice: Tensor,
        shard: Axis,
    ) -> None:
        self.shard, self._weight_slice = shard, weight_slice
        self._parameters, self._offsets = parameters, offsets
        self._first = shard.rank * weight_slice.numel()
        self._stacks = [stack_shape(parameter) for parameter in parameters]
        self.slice = torch.zeros(
            weight_slice.numel(), dtype=torch.uint8, device=weight_slice.device
        )
        self.buffer = TemporaryBuffer(
            weight_slice.numel() * shard.size, torch.uint8, weight_slice.device
        )
        self.buffer.free()
        self.scales = [
            torch.ones(block_grid(stack), device=weight_slice.device) for stack in self._stacks
        ]
        self.is_stale = True  # the weights have changed since they were quantized

    @staticmethod
    def accepts(parameter: nn.Parameter) -> bool:
        """Whether a parameter is multiplied in FP8."""
        return is_quantized(parameter)

    @property
    def resident(self) -> list[Tensor]:
        """The owned slice and all scales."""
        return [self.slice, *self.scales]

    def owned(self, index: int) -> tuple[slice, int]:
        """A parameter's range in the owned slice, perhaps empty, and its first element there."""
        offset, numel = self._offsets[index], self._parameters[index].numel()
        start = min(max(offset, self._first), offset + numel)
        stop = max(min(offset + numel, self._first + self._weight_slice.numel()), start)
        return slice(start - self._first, stop - self._first), start - offset

    def maxima(self) -> list[Tensor]:
        """Largest magnitude of every block of each parameter within this rank's slice."""
        maxima = []
        for index, stack in enumerate(self._stacks):
            span, first = self.owned(index)
            maxima.append(block_maxima(self._weight_slice[span], stack, first))
        return maxima

    def recipes(self) -> list:
        """The FP8 GEMMs of each parameter (precision/fp8_recipes.py)."""
        return [state_of(parameter).gemms for parameter in self._parameters]

    def quantize(self, maxima: Sequence[Tensor]) -> None:
        """Quantizes the slice.

        Args:
            maxima: for each parameter, the maxima that its scales derive from; they broadcast over
                its blocks.
        """
        parameters = zip(self._stacks, maxima, self.recipes(), self.scales)
        for index, (stack, maximum, recipe, scales) in enumerate(parameters):
            span, first = self.owned(index)
            maximum = maximum.expand(block_grid(stack))
            scales.copy_(scales_of(maximum, E4M3, recipe.powers_of_two))
            quantize_slice(
                self._weight_slice[span], stack, first, maximum, scales, self.slice[span]
            )
        self.is_stale = False

    def start_gather(self) -> Pending:
        """Starts gathering the slices of all ranks, and gives each parameter its FP8 copy.

        Comm: all_gather over `shard`, (n-1)/n·N bytes.
        """
        assert not self.is_stale, "weights have changed since they were quantized"
        self.buffer.allocate()
        for parameter, offset, scales in zip(self._parameters, self._offsets, self.scales):
            values = self.buffer.flat[offset : offset + parameter.numel()]
            set_copies(parameter, gathered_pair(parameter, values, scales))
        return start_all_gather(self.slice, self.shard, out=self.buffer.flat)

    def drop(self) -> None:
        """Frees the gathered weights; the caller drops the parameters' copies (`forget_copies`)."""
        self.buffer.free()

    @staticmethod
    def refresh(stale: Sequence[Fp8ShardedWeights], exposure: Exposure) -> None:
        """Quantizes the slices of several buckets with one reduction for all their maxima.

        Args:
            stale: formats of the buckets whose weights have changed.
            exposure: measures the waits for other ranks.

        Comm: all_reduce over each shard axis of a number for every 128×128 block; with the
            tensorwise recipe another over tp (experts: etp) of a number for every matrix.
        """
        maxima = [weights.maxima() for weights in stale]
        for axis in dict.fromkeys(weights.shard for weights in stale):
            on_axis = [blocks for weights, blocks in zip(stale, maxima) if weights.shard is axis]
            reduce_max = partial(all_reduce, axis=axis, op="max")
            _reduce_together(list(chain.from_iterable(on_axis)), reduce_max, exposure)
        recipes = list(chain.from_iterable(weights.recipes() for weights in stale))
        scale_maxima = [
            recipe.weight_maxima(blocks)
            for recipe, blocks in zip(recipes, chain.from_iterable(maxima))
        ]
        for recipe in dict.fromkeys(recipes):
            views = [view for r, view in zip(recipes, scale_maxima) if r is recipe]
            _reduce_together(views, recipe.max_over_ranks, exposure)
        remaining = iter(scale_maxima)
        for weights in stale:
            weights.quantize(list(islice(remaining, len(weights.scales))))


def _reduce_together(
    views: list[Tensor], reduce: Callable[[Tensor], Tensor], exposure: Exposure
) -> None:
    """Reduces several tensors in place, with one call of `reduce`."""
    reduced = exposure.time_call(partial(reduce, torch.cat([view.flatten() for view in views])))
    for view, values in zip(views, reduced.split([view.numel() for view in views])):
        view.copy_(values.view(view.shape))

"""The FP8 gather format of ZeRO-3: weights of FP8 GEMMs are gathered in FP8, half the bytes of
bf16.

    slice    | bytes of the owned elements |           stays in memory; quantised once after every update
    whole    | p0 | p1 | ... | pad |                   in memory while the unit computes; read by the GEMMs
    scales   one for each 128×128 block, float32       stay in memory on every rank

The numbers are those of gathering bf16 weights and quantising them: each rank finds the largest
magnitude of each block in its slice, one all_reduce gives the maximum over the whole block, and the
scale depends only on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from megatron5d.comm.collectives import Pending, all_reduce, start_all_gather
from megatron5d.comm.ledger import Exposure
from megatron5d.data_parallel.temporary_buffer import TemporaryBuffer
from megatron5d.kernels.fp8.quantize import E4M3, scales_of
from megatron5d.precision.fp8_recipes import is_quantized
from megatron5d.precision.fp8_tensor import (
    block_maxima,
    blocks_in,
    hold_quantized,
    quantize_slice,
    stack_of,
    stored_pair,
)
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import state_of


class Fp8ShardedWeights:
    """The `GatherFormat` of a bucket whose parameters are all multiplied in FP8.

    Args:
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
        self._stacks = [stack_of(parameter) for parameter in parameters]
        self.slice = torch.zeros(
            weight_slice.numel(), dtype=torch.uint8, device=weight_slice.device
        )
        self.buffer = TemporaryBuffer(
            weight_slice.numel() * shard.size, torch.uint8, weight_slice.device
        )
        self.buffer.free()
        self.scales = [
            torch.ones(blocks_in(stack), device=weight_slice.device) for stack in self._stacks
        ]
        self.is_stale = True  # the weights have changed since they were quantised

    @staticmethod
    def accepts(parameter: nn.Parameter) -> bool:
        """Says whether a parameter is multiplied in FP8."""
        return is_quantized(parameter)

    @property
    def resident(self) -> list[Tensor]:
        """The owned slice and all scales."""
        return [self.slice, *self.scales]

    def owned(self, index: int) -> tuple[slice, int]:
        """Returns (the range of the owned slice with a parameter, perhaps empty; its first element
        there)."""
        offset, numel = self._offsets[index], self._parameters[index].numel()
        start = min(max(offset, self._first), offset + numel)
        stop = max(min(offset + numel, self._first + self._weight_slice.numel()), start)
        return slice(start - self._first, stop - self._first), start - offset

    def maxima(self) -> list[Tensor]:
        """Finds for each parameter the largest magnitude of each of its blocks in this rank's
        slice."""
        found = []
        for index, stack in enumerate(self._stacks):
            span, first = self.owned(index)
            found.append(block_maxima(self._weight_slice[span], stack, first))
        return found

    def gemms(self) -> list:
        """Returns each parameter's recipe (precision/fp8_recipes.py)."""
        return [state_of(parameter).gemms for parameter in self._parameters]

    def quantize(self, maxima: Sequence[Tensor]) -> None:
        """Quantises the slice anew.

        Args:
            maxima: for each parameter, the magnitudes of its scales, which broadcast over its
                blocks.
        """
        for index, (stack, most, gemms) in enumerate(zip(self._stacks, maxima, self.gemms())):
            span, first = self.owned(index)
            most = most.expand(blocks_in(stack))
            self.scales[index].copy_(scales_of(most, E4M3, gemms.powers_of_two))
            quantize_slice(
                self._weight_slice[span], stack, first, most, self.scales[index], self.slice[span]
            )
        self.is_stale = False

    def start_gather(self) -> Pending:
        """Starts gathering the slices of all ranks, and gives each parameter its FP8 copy; complete
        after `wait`.

        Comm: all_gather over `shard`, (n-1)/n·N bytes.
        """
        assert not self.is_stale, "weights have changed since they were quantised"
        self.buffer.allocate()
        for parameter, offset, scales in zip(self._parameters, self._offsets, self.scales):
            values = self.buffer.flat[offset : offset + parameter.numel()]
            hold_quantized(parameter, stored_pair(parameter, values, scales))
        return start_all_gather(self.slice, self.shard, out=self.buffer.flat)

    def drop(self) -> None:
        """Frees the whole weights. The caller removes the parameters' references to them
        (`forget_copies`)."""
        self.buffer.free()

    @staticmethod
    def refresh(stale: Sequence[Fp8ShardedWeights], exposure: Exposure) -> None:
        """Quantises the slices of several buckets with one reduction of maxima for all of them.

        Args:
            exposure: measures the waits for other ranks.

        Comm: all_reduce over each shard axis of a number for every 128×128 block; tensorwise, another over tp (experts:
        etp) of a number for every matrix.
        """
        maxima = [each.maxima() for each in stale]
        for axis in dict.fromkeys(each.shard for each in stale):
            views = [
                most for each, found in zip(stale, maxima) if each.shard is axis for most in found
            ]
            _reduce_together(views, partial(all_reduce, axis=axis, op="max"), exposure)
        gemms = [each.gemms() for each in stale]
        for_scales = [
            [g.weight_maxima(most) for g, most in zip(*pair)] for pair in zip(gemms, maxima)
        ]
        for recipe in dict.fromkeys(chain.from_iterable(gemms)):
            views = [
                most for pair in zip(gemms, for_scales) for g, most in zip(*pair) if g is recipe
            ]
            _reduce_together(views, recipe.over_ranks, exposure)
        for each, found in zip(stale, for_scales):
            each.quantize(found)


def _reduce_together(
    views: list[Tensor], reduce: Callable[[Tensor], Tensor], exposure: Exposure
) -> None:
    """Reduces several tensors, in place, with one call of `reduce`."""
    reduced = exposure.time_call(partial(reduce, torch.cat([view.flatten() for view in views])))
    for view, part in zip(views, reduced.split([view.numel() for view in views])):
        view.copy_(part.view(view.shape))

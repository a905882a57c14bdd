"""Weights under ZeRO-3 that are gathered in the 8 bits in which they are multiplied: half the bytes of bf16.

    slice    | bytes of the owned elements |           resident, quantised once after every change
    whole    | p0 | p1 | ... | pad |                   while the unit computes; the products read it as it is
    scales   one for each 128×128 block, float32       resident on every rank

The numbers are the same as if bf16 weights had been gathered and then quantised: each rank finds the largest magnitude
of each block in its slice, one all_reduce gives that of whole blocks, and scales follow from it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kernels.fp8_quantize import E4M3, scales_of
from megatron5d.comm.collectives import Pending, all_reduce, start_all_gather
from megatron5d.data_parallel.residence import give_back, take
from megatron5d.precision.fp8_weights import (
    Pair,
    block_maxima,
    blocks_in,
    hold_quantized,
    quantize_slice,
    stack_of,
)
from megatron5d.topology.axis import Axis


class EightBitWeights:
    """The 8-bit side of a bucket.

    Args:
        parameters: all multiplied in 8 bits.
        offsets: where they begin in the bucket.
        slice_of: the owned slice of the weights, flat; read whenever they have changed.
        shard: ranks among which the slices are dealt out, in the order of their places in the bucket.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], offsets: Sequence[int], slice_of: Tensor, shard: Axis
    ) -> None:
        self.shard, self._wide = shard, slice_of
        self._parameters, self._offsets = parameters, offsets
        self._first = shard.rank * slice_of.numel()
        self._stacks = [stack_of(parameter) for parameter in parameters]
        self.slice = torch.zeros(slice_of.numel(), dtype=torch.uint8, device=slice_of.device)
        self.whole = torch.empty(slice_of.numel() * shard.size, dtype=torch.uint8, device=slice_of.device)
        give_back(self.whole)
        self.scales = [torch.ones(blocks_in(stack), device=slice_of.device) for stack in self._stacks]
        self.is_held = False
        self.is_stale = True  # the weights have changed since they were quantised

    def owned(self, index: int) -> tuple[slice, int]:
        """Where a parameter lies in the owned slice (perhaps nowhere), and which of its elements is the first there."""
        offset, numel = self._offsets[index], self._parameters[index].numel()
        start = min(max(offset, self._first), offset + numel)
        stop = max(min(offset + numel, self._first + self._wide.numel()), start)
        return slice(start - self._first, stop - self._first), start - offset

    def maxima(self) -> list[Tensor]:
        """For each parameter, the largest magnitude of each of its blocks in this rank's slice."""
        found = []
        for index, stack in enumerate(self._stacks):
            span, first = self.owned(index)
            found.append(block_maxima(self._wide[span], stack, first))
        return found

    def recipes(self) -> list:
        """For each parameter, how it is multiplied (precision/gemms.py)."""
        return [parameter.gemms for parameter in self._parameters]  # type: ignore[attr-defined]

    def quantize(self, maxima: Sequence[Tensor]) -> None:
        """Renews the slice and the scales from the maxima that scales are made of, which broadcast over blocks."""
        for index, (stack, most, gemms) in enumerate(zip(self._stacks, maxima, self.recipes())):
            span, first = self.owned(index)
            most = most.expand(blocks_in(stack))
            self.scales[index].copy_(scales_of(most, E4M3, gemms.powers_of_two))
            quantize_slice(self._wide[span], stack, first, most, self.scales[index], self.slice[span])
        self.is_stale = False

    def start_gather(self) -> Pending:
        """Collects everybody's slices, and hands each parameter its 8-bit copy; whole after `wait`.

        Comm: all_gather over `shard`, (n-1)/n·N bytes.
        """
        assert not self.is_stale, "weights have changed since they were quantised"
        if not self.is_held:
            take(self.whole)
            self.is_held = True
        for parameter, offset, stack, scales, gemms in zip(
            self._parameters, self._offsets, self._stacks, self.scales, self.recipes()
        ):
            shape = stack if parameter.spec.expert else stack[1:]  # type: ignore[attr-defined]
            values = self.whole[offset : offset + parameter.numel()].view(E4M3).view(shape)
            hold_quantized(parameter, Pair(gemms.stored(values, scales)))
        return start_all_gather(self.slice, self.shard, out=self.whole)

    def drop(self) -> None:
        """Gives the whole back; whoever calls makes the parameters forget their copies."""
        give_back(self.whole)
        self.is_held = False


def quantize_anew(stale: Sequence[EightBitWeights]) -> None:
    """Quantises the slices of weights that have changed, all of them together.

    Comm: all_reduce over each shard axis of a number for every 128×128 block; tensorwise, another over tp (experts:
    etp) of a number for every matrix.
    """
    maxima = [each.maxima() for each in stale]
    for axis in dict.fromkeys(each.shard for each in stale):
        views = [most for each, found in zip(stale, maxima) if each.shard is axis for most in found]
        _reduce_together(views, partial(all_reduce, axis=axis, op="max"))
    recipes = [gemms for each in stale for gemms in each.recipes()]
    narrow = [gemms.weight_maxima(most) for gemms, most in zip(recipes, (most for found in maxima for most in found))]
    for gemms in dict.fromkeys(recipes):
        _reduce_together([most for each, most in zip(recipes, narrow) if each is gemms], gemms.over_ranks)
    rest = iter(narrow)
    for each, found in zip(stale, maxima):
        each.quantize([next(rest) for _ in found])


def _reduce_together(views: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
    """Reduces several tensors in one call, in place."""
    reduced = reduce(torch.cat([view.flatten() for view in views]))
    for view, part in zip(views, reduced.split([view.numel() for view in views])):
        view.copy_(part.view(view.shape))

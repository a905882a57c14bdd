"""A bucket: the parameters of one unit in a flat buffer, and their main gradients in another.

Each bucket is gathered and reduced by one collective.

    weights    | p0 | p1 | ... | pad |     dtype of the model; each parameter is a view
    grads      | p0 | p1 | ... | pad |     main-gradient dtype; each parameter's main gradient is a view

Both buffers are divided into n = `shard.size` equal slices, of which each rank owns one. A rank
receives the reduced gradient of its slice in `grad_slice`, keeps the optimiser state for it,
updates `weight_slice`, and gathers the other ranks' slices of the weights. With n = 1 the slice is
the whole buffer.

What is in memory, in elements per bucket; N = `numel` (each parameter padded to 16 elements, the whole to 16·n):

    zero   weights                                 grads
    0      N (n = 1)                               N
    1      N, the slice a view of them             N, the slice a view of them
    2      N, the slice a view of them             N/n, and N while the unit's gradient is computed and reduced
    3      N/n, and N while the unit computes      N/n, and N while the unit's gradient is computed and reduced

The storage of a temporary buffer (temporary_buffer.py) is resized in place, so that parameters, and
what autograd or a deferred weight gradient has saved, remain views of it. A bucket with a gather
format (fp8_all_gather.py) is gathered in that.

Over which ranks a bucket is sharded and replicated: with `dp_replicate` (HSDP) slices are
distributed over dp_shard·cp, and their gradients summed over dp_replicate once a step. Gradients of
experts are summed over edp, their slices distributed over edp_shard. If a bidirectional pipeline
(DualPipe) holds a parameter on two ranks (`ShardSpec.shared`), both count as data parallel: under
ZeRO-1 slices are distributed over the shard axes of both; under ZeRO-2 and 3 each rank is a replica
of the other, since they reach a unit at different times. Gradients of copies (norms under sp) are
summed last, on the slices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron5d.comm.collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron5d.comm.ledger import Exposure
from megatron5d.data_parallel.temporary_buffer import TemporaryBuffer
from megatron5d.phases.wgrad import grad_buffer
from megatron5d.precision.gemm import forget_copies
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import Piece, ShardSpec, has_memory, spec_of, state_of

_ALIGNMENT = 16  # elements: each parameter starts at a multiple of this, for aligned vector loads


class GatherFormat(Protocol):
    """The weights of a bucket as ZeRO-3 gathers them where that is not the model's dtype."""

    buffer: TemporaryBuffer  # of the gathered weights
    is_stale: bool  # the weights have changed since the owned slice was converted

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        offsets: Sequence[int],
        weight_slice: Tensor,
        shard: Axis,
    ) -> None: ...

    @staticmethod
    def accepts(parameter: nn.Parameter) -> bool:
        """Says whether a parameter is gathered in this format."""

    @staticmethod
    def refresh(stale: Sequence[Any], exposure: Exposure) -> None:
        """Converts the owned slices of several buckets whose weights have changed."""

    @property
    def resident(self) -> list[Tensor]:
        """The tensors that stay in memory between uses."""

    def start_gather(self) -> Pending:
        """Starts gathering the slices of all ranks into the buffer."""

    def drop(self) -> None:
        """Frees the buffer."""


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that lies in this rank's owned slice."""

    spec: ShardSpec
    local: tuple[int, int]  # flat range (start, stop) within the local parameter
    owned: tuple[int, int]  # the same elements as a flat range within the owned slice

    def pieces(self) -> list[tuple[Piece, tuple[int, int]]]:
        """Returns the pieces that overlap the segment, each with its flat range in the owned
        slice."""
        shift = self.owned[0] - self.local[0]
        found = []
        for piece in self.spec.pieces:
            start, stop = max(piece.flat[0], self.local[0]), min(piece.flat[1], self.local[1])
            if start < stop:
                found.append((piece, (start + shift, stop + shift)))
        return found


class Bucket:
    """The flat buffers of one unit.

    Args:
        parameters: of the unit; they become views of the weights and get a main gradient. Their
            values are copied in. Parameters built `without_memory` have none yet: they are zero,
            and are initialised in `weight_slice`.
        shard: the ranks that own one slice each.
        replicate: the ranks that own the same slice.
        zero: ZeRO stage, 0 ... 3.
        gather_format: in which ZeRO-3 gathers the weights; None = in their dtype.
        frozen: the parameters are never updated: they have no main gradient.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shard: Axis,
        replicate: Axis,
        grad_dtype: torch.dtype,
        zero: int = 0,
        gather_format: type[GatherFormat] | None = None,
        frozen: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.shard, self.replicate = shard, replicate
        self.offsets: list[int] = []
        end = 0
        for parameter in self.parameters:
            self.offsets.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        first = self.parameters[0]
        self.slice_numel = -(-end // (shard.size * _ALIGNMENT)) * _ALIGNMENT
        self.numel = self.slice_numel * shard.size
        self.frozen = frozen
        self.shards_weights = zero == 3 and shard.size > 1
        self.shards_grads = zero >= 2 and shard.size > 1 and not frozen
        values = [parameter.data for parameter in self.parameters]
        self.weight_slice, self._whole_weights = self._buffer(
            first.dtype, self.shards_weights, self._bind_weights
        )
        self._copy_in(values)
        # freed before the gradients are there, so that both are never together
        if self._whole_weights is not None:
            self._whole_weights.free()
        if frozen:
            self.grads = self.grad_slice = torch.empty(0, dtype=grad_dtype, device=first.device)
            self._whole_grads: TemporaryBuffer | None = None
        else:
            self.grad_slice, self._whole_grads = self._buffer(
                grad_dtype, self.shards_grads, self._bind_grads
            )
        for parameter in self.parameters:
            if frozen:
                state_of(parameter).frozen = True
            elif self.shards_grads:
                state_of(parameter).allocate_main_grad = self.allocate_grads
        if self._whole_grads is not None:
            self._whole_grads.free()
        self._adds_to_zeros = False  # the first gradient of a step
        self._reducing: Pending | None = None
        self.format: GatherFormat | None = None
        if self.shards_weights and gather_format is not None:
            self.format = gather_format(self.parameters, self.offsets, self.weight_slice, shard)

    def _buffer(
        self, dtype: torch.dtype, temporary: bool, bind: Callable[[Tensor], None]
    ) -> tuple[Tensor, TemporaryBuffer | None]:
        """Makes a whole buffer for `bind`; returns (owned slice, what gives the whole its memory if
        it is temporary).

        The slice is a view of the whole, or has its own memory.
        """
        device = self.parameters[0].device
        if temporary:
            whole = TemporaryBuffer(self.numel, dtype, device, bind)
            return torch.zeros(self.slice_numel, dtype=dtype, device=device), whole
        flat = torch.zeros(self.numel, dtype=dtype, device=device)
        bind(flat)
        return flat[self.owned], None

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields each parameter with the part of a flat buffer that belongs to it, in its shape."""
        for parameter, offset in zip(self.parameters, self.offsets):
            yield parameter, flat[offset : offset + parameter.numel()].view(parameter.shape)

    def _bind_weights(self, flat: Tensor) -> None:
        self.weights = flat
        for parameter, view in self._views(flat):
            parameter.data = view

    def _bind_grads(self, flat: Tensor) -> None:
        self.grads = flat
        for parameter, view in self._views(flat):
            state_of(parameter).main_grad = view

    def _copy_in(self, values: Sequence[Tensor]) -> None:
        """Copies in the values of parameters that have memory."""
        segments = {id(parameter): segment for parameter, segment in self._owned_parts()}
        for parameter, each in zip(self.parameters, values):
            if not has_memory(each):
                continue
            if not self.shards_weights:
                parameter.data.copy_(each)
            elif id(parameter) in segments:
                segment = segments[id(parameter)]
                self.weight_slice[slice(*segment.owned)] = each.reshape(-1)[slice(*segment.local)]

    @property
    def temporary_buffers(self) -> list[TemporaryBuffer]:
        """Those that are in memory only while they are used."""
        formatted = None if self.format is None else self.format.buffer
        return [
            each for each in (self._whole_weights, formatted, self._whole_grads) if each is not None
        ]

    @property
    def holds_weights(self) -> bool:
        """Whether the whole weights are in memory, in the model's dtype."""
        return self._whole_weights is None or self._whole_weights.is_held

    @property
    def holds_grads(self) -> bool:
        """Whether the whole main gradients are in memory."""
        return self._whole_grads is None or self._whole_grads.is_held

    @property
    def owned(self) -> slice:
        """This rank's slice of the buffers."""
        start = self.shard.rank * self.slice_numel
        return slice(start, start + self.slice_numel)

    @property
    def resident_weights(self) -> list[Tensor]:
        """The tensors of the weights that stay in memory between uses."""
        if self.format is not None:
            return [self.weight_slice, *self.format.resident]
        return [self.weight_slice if self.shards_weights else self.weights]

    @property
    def resident_grads(self) -> Tensor:
        """The buffer of main gradients that stays in memory between uses."""
        return self.grad_slice if self.shards_grads else self.grads

    def segments(self) -> list[Segment]:
        """Returns the parts of parameters that lie in the owned slice, in its order."""
        return [segment for _, segment in self._owned_parts()]

    def _owned_parts(self) -> list[tuple[nn.Parameter, Segment]]:
        begin, end = self.owned.start, self.owned.stop
        parts = []
        for parameter, offset in zip(self.parameters, self.offsets):
            start, stop = max(offset, begin), min(offset + parameter.numel(), end)
            if start < stop:
                local, owned = (start - offset, stop - offset), (start - begin, stop - begin)
                parts.append((parameter, Segment(spec_of(parameter), local, owned)))
        return parts

    def shares(self) -> list[list[tuple[int, int]]]:
        """Returns for each parameter the flat range of it that each rank of `shard` owns; it may be
        empty."""
        edges = [rank * self.slice_numel for rank in range(self.shard.size + 1)]
        shares = []
        for parameter, offset in zip(self.parameters, self.offsets):
            cuts = [min(max(edge - offset, 0), parameter.numel()) for edge in edges]
            shares.append(list(zip(cuts, cuts[1:])))
        return shares

    @cached_property
    def counted_spans(self) -> list[tuple[int, int]]:
        """Flat ranges of the owned slice that this rank counts in norms: the pieces of which it has
        the first copy."""
        if self.frozen:
            return []
        return [
            span for segment in self.segments() for piece, span in segment.pieces() if piece.owner
        ]

    @cached_property
    def partial_grads(self) -> list[tuple[str, Tensor]]:
        """(axis, view of `grad_slice`) of gradients still to be summed over an axis of copies
        (norms under sp)."""
        return [
            (name, self.grad_slice[start:stop])
            for segment in self.segments()
            for piece, (start, stop) in segment.pieces()
            for name in (() if self.frozen else piece.summed)
        ]

    def clear_grads(self, zeros: bool = False) -> None:
        """Forgets the last step's main gradients, which the first new ones are written over.

        With `zeros` those are added to zeros instead, as graphs that are replayed do.
        """
        self._adds_to_zeros = zeros
        if zeros or self.shards_grads:
            self.resident_grads.zero_()
        else:
            self._expect_grads()

    def _expect_grads(self) -> None:
        """Has the next gradient of each parameter written over its main gradient
        (phases/wgrad.py)."""
        for parameter in () if self.frozen else self.parameters:
            state_of(parameter).holds_grad = False

    def settle_grads(self) -> None:
        """Sets the main gradients of parameters that have got none to zero; called before any is
        read."""
        for parameter in self.parameters if self.holds_grads else ():
            if not state_of(parameter).holds_grad:
                grad_buffer(parameter)  # fills it with zeros

    def allocate_grads(self) -> None:
        """Allocates the buffer of main gradients, if it is not there, without values; nobody reads
        its padding."""
        if self._reducing is not None:
            self.finish_reduce()
        if self._whole_grads is None or self._whole_grads.is_held:
            return
        self._whole_grads.allocate()
        if self._adds_to_zeros:
            self.grads.zero_()
        else:
            self._expect_grads()

    def drop_grads(self) -> None:
        """Frees the buffer of main gradients; the owned slice stays."""
        assert self._whole_grads is not None
        self._whole_grads.free()

    def start_reduce(self) -> None:
        """Starts summing the main gradients over `shard`; `finish_reduce` puts the sum into the
        owned slice.

        Comm: reduce_scatter over `shard`, (n-1)/n·N elements.
        """
        self.settle_grads()
        if self.shard.size > 1 and self.holds_grads:
            assert self._reducing is None, "the last reduction of this bucket has not been finished"
            self._reducing = start_reduce_scatter(self.grads, self.shard)

    def finish_reduce(self) -> None:
        """Waits for the sum, puts it into the owned slice, and frees the main gradients if they are
        temporary."""
        if self._reducing is None:
            return
        reduced, self._reducing = self._reducing.wait(), None
        if self.shards_grads:
            self.grad_slice.add_(reduced)
            self.drop_grads()
        else:
            self.grad_slice.copy_(reduced)

    def start_sum_replicas(self) -> Pending:
        """Starts summing the owned slice of the gradients over the ranks that own the same slice.

        Comm: all_reduce over `replicate` of N/n elements.
        """
        self.settle_grads()
        return start_all_reduce(self.grad_slice, self.replicate)

    def holds(self, wide: bool) -> bool:
        """Says whether the whole weights are in memory: as the phases read them, or (wide) in the
        model's dtype."""
        return self.holds_weights if self.format is None or wide else self.format.buffer.is_held

    def start_gather(self, wide: bool = False) -> Pending:
        """Allocates the whole weights and starts gathering the slices of all ranks; they are
        complete after `wait`.

        Args:
            wide: in the model's dtype even if the phases read another format.

        Comm: all_gather over `shard`, (n-1)/n·N elements.
        """
        if self.format is not None and not wide:
            return self.format.start_gather()
        if self._whole_weights is not None:
            self._whole_weights.allocate()
        # a slice that is a view of the output buffer is sent from a copy
        sent = self.weight_slice if self.shards_weights else self.weight_slice.clone()
        return start_all_gather(sent, self.shard, out=self.weights)

    def drop_weights(self) -> None:
        """Frees the whole weights and the copies made of them; the owned slice stays."""
        assert self._whole_weights is not None
        forget_copies(self.parameters)
        self._whole_weights.free()
        if self.format is not None:
            self.format.drop()

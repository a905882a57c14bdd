"""A bucket: the parameters of one unit in a flat buffer, and their main gradients in another.

One collective gathers or reduces a bucket.

    weights    | p0 | p1 | ... | pad |     dtype of the model; each parameter is a view
    grads      | p0 | p1 | ... | pad |     main-gradient dtype; each main gradient is a view

Both buffers are divided into n = `shard.size` equal slices, and each rank owns one. It receives the
reduced gradient of its slice in `grad_slice`, keeps the optimizer state for it, updates
`weight_slice`, and gathers the other ranks' slices of the weights. With n = 1 the slice is the full
buffer.

Memory in elements per bucket; N = `numel`, with each parameter padded to 16 elements and the buffer
to 16·n; (*) while the unit's gradient is computed and reduced:

    zero   weights                               grads
    0      N (n = 1)                             N
    1      N, including the slice                N, including the slice
    2      N, including the slice                N/n, and N (*)
    3      N/n, and N while the unit computes    N/n, and N (*)

The storage of a temporary buffer (temporary_buffer.py) is resized in place. So parameters, and
tensors that autograd or a deferred weight gradient has saved, stay views of it. A bucket with a
gather format (fp8_all_gather.py) is gathered in that format.

With `dp_replicate` (HSDP) slices are sharded over dp_shard·cp, and their gradients are summed over
dp_replicate once a step. Gradients of experts are summed over edp, and their slices sharded over
edp_shard. If a bidirectional pipeline (DualPipe) holds a parameter on two ranks
(`ShardSpec.shared`), both count as data parallel: under ZeRO-1 slices are sharded over the shard
axes of both; under ZeRO-2 and 3 each rank is a replica of the other, because they reach a unit at
different times. Gradients of copies (norms under sp) are summed last, on the slices.
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
    """A format other than the model's dtype in which ZeRO-3 gathers a bucket's weights."""

    buffer: TemporaryBuffer  # the gathered weights
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
        """Whether a parameter is gathered in this format."""

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
    """The part of one parameter within this rank's owned slice."""

    spec: ShardSpec
    local: tuple[int, int]  # flat range (start, stop) within the local parameter
    owned: tuple[int, int]  # the same elements as a flat range within the owned slice

    def pieces(self) -> list[tuple[Piece, tuple[int, int]]]:
        """The pieces that overlap the segment, each with its flat range in the owned slice."""
        shift = self.owned[0] - self.local[0]
        overlapping = []
        for piece in self.spec.pieces:
            start, stop = max(piece.flat[0], self.local[0]), min(piece.flat[1], self.local[1])
            if start < stop:
                overlapping.append((piece, (start + shift, stop + shift)))
        return overlapping


class Bucket:
    """The flat buffers of one unit.

    Args:
        parameters: of the unit; they become views of the weights and get a main gradient. Their
            values are copied into the buffer. Those built `without_memory` have no values yet:
            they are zero until `weight_slice` is initialized.
        shard: the ranks that own one slice each.
        replicate: the ranks that own the same slice.
        grad_dtype: of main gradients.
        zero: ZeRO stage, 0 ... 3.
        gather_format: of the weights under ZeRO-3; None = their dtype.
        frozen: the parameters are never updated, and have no main gradient.
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
        self.slice_numel = -(-end // (shard.size * _ALIGNMENT)) * _ALIGNMENT
        self.numel = self.slice_numel * shard.size
        self.frozen = frozen
        self.shards_weights = zero == 3 and shard.size > 1
        self.shards_grads = zero >= 2 and shard.size > 1 and not frozen
        # The full weights are freed first, so that they never share the memory with gradients.
        self._build_weights()
        self._build_grads(grad_dtype)
        self._adds_to_zeros = False  # whether a step's first gradient is added to zeros
        self._reducing: Pending | None = None
        self.format: GatherFormat | None = None
        if self.shards_weights and gather_format is not None:
            self.format = gather_format(self.parameters, self.offsets, self.weight_slice, shard)

    def _build_weights(self) -> None:
        values = [parameter.data for parameter in self.parameters]
        self.weight_slice, self._weight_buffer = self._allocate_buffer(
            values[0].dtype, self.shards_weights, self._bind_weights
        )
        self._copy_in(values)
        if self._weight_buffer is not None:
            self._weight_buffer.free()

    def _build_grads(self, dtype: torch.dtype) -> None:
        self._grad_buffer: TemporaryBuffer | None = None
        if self.frozen:
            self.grads = self.grad_slice = self.weight_slice.new_empty(0, dtype=dtype)
            for parameter in self.parameters:
                state_of(parameter).frozen = True
            return
        self.grad_slice, self._grad_buffer = self._allocate_buffer(
            dtype, self.shards_grads, self._bind_grads
        )
        if self._grad_buffer is not None:
            for parameter in self.parameters:
                state_of(parameter).allocate_main_grad = self.allocate_grads
            self._grad_buffer.free()

    def _allocate_buffer(
        self, dtype: torch.dtype, temporary: bool, bind: Callable[[Tensor], None]
    ) -> tuple[Tensor, TemporaryBuffer | None]:
        """Allocates the owned slice, and the full buffer, which it passes to `bind`.

        Returns:
            The owned slice, and the full buffer if that is temporary. The slice has memory of its
            own then, and is a view of the full buffer otherwise.
        """
        device = self.parameters[0].device
        if temporary:
            buffer = TemporaryBuffer(self.numel, dtype, device, bind)
            return torch.zeros(self.slice_numel, dtype=dtype, device=device), buffer
        flat = torch.zeros(self.numel, dtype=dtype, device=device)
        bind(flat)
        return flat[self.owned], None

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields each parameter with its view of a flat buffer, in its shape."""
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
        segments = {id(parameter): segment for parameter, segment in self._owned_segments()}
        for parameter, value in zip(self.parameters, values):
            if not has_memory(value):
                continue
            if not self.shards_weights:
                parameter.data.copy_(value)
            elif id(parameter) in segments:
                segment = segments[id(parameter)]
                self.weight_slice[slice(*segment.owned)] = value.reshape(-1)[slice(*segment.local)]

    @property
    def temporary_buffers(self) -> list[TemporaryBuffer]:
        """The buffers that are in memory only while they are used."""
        formatted = None if self.format is None else self.format.buffer
        buffers = (self._weight_buffer, formatted, self._grad_buffer)
        return [buffer for buffer in buffers if buffer is not None]

    @property
    def holds_weights(self) -> bool:
        """Whether all weights are in memory, in the model's dtype."""
        return self._weight_buffer is None or self._weight_buffer.is_allocated

    @property
    def holds_grads(self) -> bool:
        """Whether all main gradients are in memory."""
        return self._grad_buffer is None or self._grad_buffer.is_allocated

    @property
    def owned(self) -> slice:
        """This rank's slice of the buffers."""
        start = self.shard.rank * self.slice_numel
        return slice(start, start + self.slice_numel)

    @property
    def resident_weights(self) -> list[Tensor]:
        """The weights that stay in memory between uses."""
        if self.format is not None:
            return [self.weight_slice, *self.format.resident]
        return [self.weight_slice if self.shards_weights else self.weights]

    @property
    def resident_grads(self) -> Tensor:
        """The main gradients that stay in memory between uses."""
        return self.grad_slice if self.shards_grads else self.grads

    def segments(self) -> list[Segment]:
        """The parts of parameters within the owned slice, in its order."""
        return [segment for _, segment in self._owned_segments()]

    def _owned_segments(self) -> list[tuple[nn.Parameter, Segment]]:
        begin, end = self.owned.start, self.owned.stop
        segments = []
        for parameter, offset in zip(self.parameters, self.offsets):
            start, stop = max(offset, begin), min(offset + parameter.numel(), end)
            if start < stop:
                local, owned = (start - offset, stop - offset), (start - begin, stop - begin)
                segments.append((parameter, Segment(spec_of(parameter), local, owned)))
        return segments

    def shares(self) -> list[list[tuple[int, int]]]:
        """The flat ranges of each parameter that the ranks of `shard` own, some perhaps empty."""
        edges = [rank * self.slice_numel for rank in range(self.shard.size + 1)]
        shares = []
        for parameter, offset in zip(self.parameters, self.offsets):
            cuts = [min(max(edge - offset, 0), parameter.numel()) for edge in edges]
            shares.append(list(zip(cuts, cuts[1:])))
        return shares

    @cached_property
    def counted_spans(self) -> list[tuple[int, int]]:
        """Flat ranges of the owned slice that this rank counts in norms: the pieces it owns."""
        if self.frozen:
            return []
        return [
            span for segment in self.segments() for piece, span in segment.pieces() if piece.owner
        ]

    @cached_property
    def partial_grads(self) -> list[tuple[str, Tensor]]:
        """(axis, view of `grad_slice`) of gradients that copies sum (norms under sp)."""
        return [
            (name, self.grad_slice[start:stop])
            for segment in self.segments()
            for piece, (start, stop) in segment.pieces()
            for name in (() if self.frozen else piece.summed)
        ]

    def clear_grads(self, zeros: bool = False) -> None:
        """Discards the last step's main gradients; each parameter's next one overwrites them.

        With `zeros` the next ones are added to zeros instead, because CUDA graphs replay the same
        additions for every micro-batch.
        """
        self._adds_to_zeros = zeros
        if zeros or self.shards_grads:
            self.resident_grads.zero_()
        else:
            self._overwrite_grads()

    def _overwrite_grads(self) -> None:
        """Makes each parameter's next gradient overwrite its main gradient (phases/wgrad.py)."""
        for parameter in () if self.frozen else self.parameters:
            state_of(parameter).holds_grad = False

    def zero_missing_grads(self) -> None:
        """Zeroes the main gradients of parameters that received none, before they are read."""
        for parameter in self.parameters if self.holds_grads else ():
            if not state_of(parameter).holds_grad:
                grad_buffer(parameter)  # zeroes it

    def allocate_grads(self) -> None:
        """Allocates the buffer of main gradients, unless it is allocated; its values are undefined.

        Its padding is never read.
        """
        if self._reducing is not None:
            self.finish_reduce()
        if self._grad_buffer is None or self._grad_buffer.is_allocated:
            return
        self._grad_buffer.allocate()
        if self._adds_to_zeros:
            self.grads.zero_()
        else:
            self._overwrite_grads()

    def drop_grads(self) -> None:
        """Frees the buffer of main gradients; the owned slice stays."""
        assert self._grad_buffer is not None
        self._grad_buffer.free()

    def start_reduce(self) -> None:
        """Starts summing the main gradients over `shard`.

        Comm: reduce_scatter over `shard`, (n-1)/n·N elements.
        """
        self.zero_missing_grads()
        if self.shard.size > 1 and self.holds_grads:
            assert self._reducing is None, "the last reduction of this bucket has not finished"
            self._reducing = start_reduce_scatter(self.grads, self.shard)

    def finish_reduce(self) -> None:
        """Waits for the sum, stores it in the owned slice, and frees temporary main gradients."""
        if self._reducing is None:
            return
        reduced, self._reducing = self._reducing.wait(), None
        if self.shards_grads:
            self.grad_slice.add_(reduced)
            self.drop_grads()
        else:
            self.grad_slice.copy_(reduced)

    def start_sum_replicas(self) -> Pending:
        """Starts summing the owned gradients over the ranks that own the same slice.

        Comm: all_reduce over `replicate` of N/n elements.
        """
        self.zero_missing_grads()
        return start_all_reduce(self.grad_slice, self.replicate)

    def is_gathered(self, in_model_dtype: bool) -> bool:
        """Whether all weights are in memory, in the format that phases read or in the model's
        dtype."""
        if self.format is None or in_model_dtype:
            return self.holds_weights
        return self.format.buffer.is_allocated

    def start_gather(self, in_model_dtype: bool = False) -> Pending:
        """Allocates the full weights and starts gathering the slices of all ranks.

        Args:
            in_model_dtype: even if the phases read another format.

        Comm: all_gather over `shard`, (n-1)/n·N elements.
        """
        if self.format is not None and not in_model_dtype:
            return self.format.start_gather()
        if self._weight_buffer is not None:
            self._weight_buffer.allocate()
        # A slice that is a view of the output buffer is sent from a copy.
        sent = self.weight_slice if self.shards_weights else self.weight_slice.clone()
        return start_all_gather(sent, self.shard, out=self.weights)

    def drop_weights(self) -> None:
        """Frees the full weights and the copies made of them; the owned slice stays."""
        assert self._weight_buffer is not None
        forget_copies(self.parameters)
        self._weight_buffer.free()
        if self.format is not None:
            self.format.drop()

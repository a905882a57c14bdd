"""One unit's parameters in one flat buffer, their main gradients in another: what is reduced and sharded at once.

    weights    | p0 | p1 | ... | pad |     dtype of the model; each parameter is a view
    gradients  | p0 | p1 | ... | pad |     main-gradient dtype; each parameter's .main_grad is a view

The buffer is cut into `shard.size` equal slices. A rank owns its slice: it reduces into it, keeps the optimiser state
of it, and gathers the others' slices back. Without sharding the slice is the whole buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron5d.comm.collectives import start_all_reduce, start_reduce_scatter
from megatron5d.precision.gradient import move_to_main_grad
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard import Piece, ShardSpec, spec_of

_ALIGNMENT = 16  # elements: each parameter starts on a boundary that vector loads like


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that lies in this rank's owned slice.

    Args:
        spec: of the parameter.
        local: flat range within the local parameter.
        owned: the same elements as a flat range within the owned slice.
    """

    spec: ShardSpec
    local_shape: tuple[int, ...]
    local: tuple[int, int]
    owned: tuple[int, int]

    def counted(self) -> list[tuple[int, int]]:
        """Flat ranges of the owned slice that this rank counts: in a piece, and first among its copies."""
        return [span for piece, span in self.pieces() if piece.owner]

    def pieces(self) -> list[tuple[Piece, tuple[int, int]]]:
        """Each piece that meets the segment, with the meeting as a flat range of the owned slice."""
        shift = self.owned[0] - self.local[0]
        met = []
        for piece in self.spec.pieces:
            start, stop = max(piece.flat[0], self.local[0]), min(piece.flat[1], self.local[1])
            if start < stop:
                met.append((piece, (start + shift, stop + shift)))
        return met


class Bucket:
    """Flat buffers of one unit.

    Args:
        parameters: of the unit; their data moves into the buffer and they get `.main_grad`.
        shard: ranks among which the slices are dealt out.
        replicate: ranks that hold the same slice.
        grad_dtype: of the main gradients.
        axes: by name, for gradients that are summed over copies (norms under sp, shared KV heads).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shard: Axis, replicate: Axis, grad_dtype: torch.dtype,
        axes: dict[str, Axis],
    ) -> None:  # fmt: skip
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
        self.weights = torch.zeros(self.numel, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.numel, dtype=grad_dtype, device=first.device)
        self._adopt()
        self._copies = self._gradients_summed_over_copies(axes)

    def _adopt(self) -> None:
        for parameter, offset in zip(self.parameters, self.offsets):
            span = slice(offset, offset + parameter.numel())
            self.weights[span].copy_(parameter.data.reshape(-1))
            parameter.data = self.weights[span].view(parameter.shape)
            parameter.main_grad = self.grads[span].view(parameter.shape)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(move_to_main_grad)

    def _gradients_summed_over_copies(self, axes: dict[str, Axis]) -> list[tuple[Axis, list[Tensor]]]:
        found: dict[str, list[Tensor]] = {}
        for parameter, offset in zip(self.parameters, self.offsets):
            for piece in spec_of(parameter).pieces:
                for name in piece.summed:
                    start, stop = piece.flat
                    found.setdefault(name, []).append(self.grads[offset + start : offset + stop])
        return [(axes[name], views) for name, views in found.items() if axes[name].size > 1]

    @property
    def owned(self) -> slice:
        """This rank's slice of the buffers."""
        start = self.shard.rank * self.slice_numel
        return slice(start, start + self.slice_numel)

    def segments(self) -> list[Segment]:
        """What of each parameter lies in the owned slice, in order."""
        begin, end = self.owned.start, self.owned.stop
        segments = []
        for parameter, offset in zip(self.parameters, self.offsets):
            start, stop = max(offset, begin), min(offset + parameter.numel(), end)
            if start < stop:
                local, owned = (start - offset, stop - offset), (start - begin, stop - begin)
                segments.append(Segment(spec_of(parameter), tuple(parameter.shape), local, owned))
        return segments

    def sum_copies(self) -> None:
        """Adds up the gradients of parameters whose copies each saw a part of the work.

        Comm: one all_reduce per axis of copies, of those gradients' elements.
        """
        for axis, views in self._copies:
            flat = torch.cat(views)
            start_all_reduce(flat, axis).wait()
            torch._foreach_copy_(views, list(flat.split([view.numel() for view in views])))

    def start_reduce(self) -> PendingReduce:
        """Sums the gradients over data parallelism; the owned slice is complete after `wait`.

        Comm: reduce_scatter over `shard` of numel elements, then all_reduce over `replicate` of numel/shard.size.
        """
        self.sum_copies()
        if self.shard.size > 1:
            return PendingReduce(self, start_reduce_scatter(self.grads, self.shard))
        return PendingReduce(self, start_all_reduce(self.grads, self.replicate))


class PendingReduce:
    """A bucket's gradient reduction under way."""

    def __init__(self, bucket: Bucket, pending) -> None:
        self._bucket, self._pending = bucket, pending

    def wait(self) -> None:
        bucket = self._bucket
        reduced = self._pending.wait()
        if bucket.shard.size > 1:
            start_all_reduce(reduced, bucket.replicate).wait()
            bucket.grads[bucket.owned].copy_(reduced)

"""Gathers matrices that are sharded over ranks, each whole on one rank, and sends the results back.

A matrix is sharded twice: by tp (experts: etp) into the parameters of several ranks, and each parameter by ZeRO into
flat slices over the shard axis of its bucket. So two all-to-alls gather it, and two send the result back:

    slices  --shard-->  parameter of one tp rank  --tp-->  whole matrix  --tp-->  --shard-->  slices

The matrices are assigned to the ranks of shard × tp in rounds of one matrix per rank, largest first. So a rank works
on 1/(shard·tp) of them, while other ranks work on matrices of about the same size, and holds one whole matrix at a
time. Ranks that own the same slices (`Bucket.replicate`) all do the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron5d.comm.all_to_all import start_all_to_all
from megatron5d.comm.collectives import gather_objects
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import Piece, ShardSpec

Work = Callable[[ShardSpec, Tensor], None]  # changes a whole parameter in place


@dataclass(frozen=True)
class CutMatrix:
    """A sharded parameter of two and more dims, and what this rank sends and receives of it.

    Args:
        spec: of the parameter.
        shape: of the local parameter, the same on every rank of tp.
        shares: flat range of the local parameter that each rank of the shard axis owns.
        read: gives the input for this rank's share, flat.
        write: takes the result for this rank's share, flat.
    """

    spec: ShardSpec
    shape: tuple[int, ...]
    shares: list[tuple[int, int]]
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]

    def share(self, rank: int) -> int:
        """Returns number of elements that a rank of the shard axis owns."""
        start, stop = self.shares[rank]
        return stop - start

    @property
    def numel(self) -> int:
        """Elements of the local parameter."""
        return prod(self.shape)

    def place(self, piece: Piece) -> tuple[slice, ...]:
        """Returns the index of a piece, of any rank, in the gathered parameter (`whole_shape`)."""
        first = _rows_of(self.spec)[0] if len(self.spec.shape) > 2 else 0
        offset = (piece.offset[0] - first, *piece.offset[1:])
        return tuple(slice(o, o + n) for o, n in zip(offset, piece.shape))


def _rows_of(spec: ShardSpec) -> tuple[int, int]:
    """Returns (start, stop) of the indices of dim 0 that this rank has a part of."""
    spans = [(piece.offset[0], piece.offset[0] + piece.shape[0]) for piece in spec.pieces]
    return min((start for start, _ in spans), default=0), max((stop for _, stop in spans), default=0)


def whole_shape(spec: ShardSpec) -> tuple[int, ...]:
    """Returns the shape of a gathered parameter: the global one, for experts with only those that this rank has a
    part of."""
    *lead, rows, cols = spec.shape
    first, last = _rows_of(spec)
    return (last - first, rows, cols) if lead else (rows, cols)


class MatrixGather:
    """Matrices that are sharded over the same two axes.

    Args:
        matrices: this rank's parts; every rank of both axes has the same matrices.
        shard: the shard axis of their buckets.
        cut: tp; for experts etp.

    Comm: all_gather over `cut` of the matrices' pieces, once.
    """

    def __init__(self, matrices: Sequence[CutMatrix], shard: Axis, cut: Axis) -> None:
        self.matrices = sorted(matrices, key=lambda each: (-each.numel, each.spec.name))
        self.shard, self.cut = shard, cut
        mine = [[(piece.offset, piece.shape, piece.row) for piece in matrix.spec.pieces] for matrix in self.matrices]
        self._pieces = {
            matrix.spec.name: [
                [Piece(tuple(offset), tuple(shape), row) for offset, shape, row in part] for part in parts
            ]
            for matrix, parts in zip(self.matrices, zip(*gather_objects(mine, cut)))
        }

    def transform(self, work: Work) -> None:
        """Applies `work` to each whole matrix and gives every rank its part of the result.

        Comm: for each round of shard·tp matrices two all_to_alls over `shard` of this rank's shares, and two over `cut`
        of a local parameter to each rank of it.
        """
        together = self.shard.size * self.cut.size
        for start in range(0, len(self.matrices), together):
            self._round(self.matrices[start : start + together], work)

    def _round(self, batch: Sequence[CutMatrix], work: Work) -> None:
        """Runs one round: up to shard·tp matrices, of which each rank gathers at most one."""
        size = self.shard.size
        owned = [batch[rank::size] for rank in range(size)]  # those of a rank of `shard`, one per rank of `cut`
        mine = owned[self.shard.rank]
        sent_counts = [sum(matrix.share(self.shard.rank) for matrix in each) for each in owned]
        received_counts = [sum(matrix.share(rank) for matrix in mine) for rank in range(size)]
        order = [matrix for each in owned for matrix in each]
        sent = torch.cat([matrix.read() for matrix in order])
        flat = start_all_to_all(sent, self.shard, sent_counts, received_counts).wait()
        del sent
        if mine:
            flat = self._over_cut(mine, flat, work)
        made = start_all_to_all(flat, self.shard, received_counts, sent_counts).wait()
        for matrix, part in zip(order, made.split([matrix.share(self.shard.rank) for matrix in order])):
            matrix.write(part)

    def _over_cut(self, mine: Sequence[CutMatrix], flat: Tensor, work: Work) -> Tensor:
        """Gathers parameters from their slices and applies `work`.

        Args:
            mine: up to one matrix for each rank of `cut`.
            flat: slices of their local parameters, ordered by rank of `shard`, then matrix.
            work: applied to each whole matrix.

        Returns:
            The results in the form of `flat`.
        """
        lengths = [matrix.share(rank) for rank in range(self.shard.size) for matrix in mine]
        slices = flat.split(lengths)
        flat = torch.cat([part for k in range(len(mine)) for part in slices[k :: len(mine)]])
        sent_counts = [matrix.numel for matrix in mine] + [0] * (self.cut.size - len(mine))
        received_counts = [sent_counts[self.cut.rank]] * self.cut.size
        parts = start_all_to_all(flat, self.cut, sent_counts, received_counts).wait()
        del flat, slices
        if self.cut.rank < len(mine):
            self._whole(mine[self.cut.rank], parts, work)
        made = start_all_to_all(parts, self.cut, received_counts, sent_counts).wait().split(sent_counts)
        by_matrix = [part.split([matrix.share(rank) for rank in range(self.shard.size)])
                     for matrix, part in zip(mine, made)]  # fmt: skip
        return torch.cat([shares[rank] for rank in range(self.shard.size) for shares in by_matrix])

    def _whole(self, matrix: CutMatrix, parts: Tensor, work: Work) -> None:
        """Gathers one matrix from the local parameters of all ranks of `cut`, and writes the result over them."""
        local = parts.view(self.cut.size, *matrix.shape)
        whole = parts.new_empty(whole_shape(matrix.spec))
        places = [
            (matrix.place(piece), local[rank][piece.row : piece.row + piece.shape[0]])
            for rank, pieces in enumerate(self._pieces[matrix.spec.name])
            for piece in pieces
        ]
        for place, part in places:
            whole[place] = part
        work(matrix.spec, whole)
        for place, part in places:
            part.copy_(whole[place])

"""Muon: the update of a matrix is its momentum, orthogonalised. AdamW updates all other parameters.

    m ← μ·m + g;   O = NewtonSchulz(g + μ·m);   w ← w·(1 - lr·weight_decay) - lr·0.2·√max(rows, cols)·O

with g the reduced and clipped gradient. A full-rank O has a root mean square of 1/√max(rows, cols),
so that of every update is 0.2·lr, about the same as AdamW's: both use the same learning rate and
weight decay.

q, k and v of a fused projection are separate matrices, and so are gate and up (`ShardSpec.stack`)
and those of each expert; MLA's projections are one matrix each. With optim.muon_per_head each head
of q, k and v (MLA: of the up-projections) is a matrix of its own. Norms, biases and what
`optim.muon_exclude` names are updated by AdamW.

The momentum is kept in slices, in fp32 (fp64 with fp64), like AdamW's moments. Each matrix is
orthogonalised whole, on one rank, in the dtype of the weights, so the numbers are the same on any
layout.
Source: Jordan et al. 2024; Liu et al. 2025 (arXiv:2502.16982, Moonlight), sections 2.2 and 2.3;
    Kimi K2.

NewtonSchulz approximates the nearest orthogonal matrix with GEMMs only: X ← a·X + (b·XXᵀ +
c·(XXᵀ)²)·X maps every singular value x of X to a·x + b·x³ + c·x⁵ and keeps the singular vectors.
The coefficients enlarge small values quickly (by a⁵ ≈ 485 in five steps) and keep large ones within
[0.68, 1.14].
Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

A matrix is sharded twice: by tp (experts: etp) into the parameters of several ranks, and each
parameter by ZeRO into flat slices over the shard axis of its bucket. So two all-to-alls gather it,
and two send the result back:

    slices  --shard-->  parameter of one tp rank  --tp-->  whole matrix  --tp-->  --shard-->  slices

The matrices are assigned to the ranks of shard × tp in rounds of one matrix per rank, largest
first. So a rank works on 1/(shard·tp) of them, while other ranks work on matrices of about the same
size, and holds one whole matrix at a time. Ranks that own the same slices (`Bucket.replicate`) all
do the same work.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from megatron5d.comm.all_to_all import start_all_to_all
from megatron5d.comm.collectives import gather_objects
from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.bucket import Bucket, Segment
from megatron5d.optim.sharded_state import (
    SliceOptimizer,
    SliceState,
    decay_of,
    scale_of,
    store_rounded,
)
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import Piece, ShardSpec, spec_of

Work = Callable[[ShardSpec, Tensor], None]  # changes a whole parameter in place


@dataclass(frozen=True)
class CutMatrix:
    """A sharded parameter of two and more dims, and what this rank sends and receives of it."""

    spec: ShardSpec
    shape: tuple[int, ...]  # of the local parameter, the same on every rank of tp
    # flat range of the local parameter that each rank of the shard axis owns
    shares: list[tuple[int, int]]
    read: Callable[[], Tensor]  # gives the input for this rank's share, flat
    write: Callable[[Tensor], None]  # takes the result for this rank's share, flat

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
    return min((start for start, _ in spans), default=0), max(
        (stop for _, stop in spans), default=0
    )


def whole_shape(spec: ShardSpec) -> tuple[int, ...]:
    """Returns the shape of a gathered parameter: the global one, but of experts only those of this
    rank."""
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
        mine = [
            [(piece.offset, piece.shape, piece.row) for piece in matrix.spec.pieces]
            for matrix in self.matrices
        ]
        self._pieces = {
            matrix.spec.name: [
                [Piece(tuple(offset), tuple(shape), row) for offset, shape, row in part]
                for part in parts
            ]
            for matrix, parts in zip(self.matrices, zip(*gather_objects(mine, cut)))
        }

    def transform(self, work: Work) -> None:
        """Applies `work` to each whole matrix and gives every rank its part of the result.

        Comm: for each round of shard·tp matrices two all_to_alls over `shard` of this rank's
            shares, and two over `cut`
        of a local parameter to each rank of it.
        """
        together = self.shard.size * self.cut.size
        for start in range(0, len(self.matrices), together):
            self._round(self.matrices[start : start + together], work)

    def _round(self, batch: Sequence[CutMatrix], work: Work) -> None:
        """Runs one round: up to shard·tp matrices, of which each rank gathers at most one."""
        size = self.shard.size
        # those of a rank of `shard`, one per rank of `cut`
        owned = [batch[rank::size] for rank in range(size)]
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
        for matrix, part in zip(
            order, made.split([matrix.share(self.shard.rank) for matrix in order])
        ):
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
        made = (
            start_all_to_all(parts, self.cut, received_counts, sent_counts)
            .wait()
            .split(sent_counts)
        )
        by_matrix = [
            part.split([matrix.share(rank) for rank in range(self.shard.size)])
            for matrix, part in zip(mine, made)
        ]
        return torch.cat([shares[rank] for rank in range(self.shard.size) for shares in by_matrix])

    def _whole(self, matrix: CutMatrix, parts: Tensor, work: Work) -> None:
        """Gathers one matrix from the local parameters of all ranks of `cut`, and writes the result
        over them."""
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


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7  # added to the norm, so that a matrix of zeros stays zero


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Approximates U·Vᵀ of each matrix U·S·Vᵀ, with singular values near 1.

    Args:
        matrices: `[n, rows, cols]`; all arithmetic is in their dtype.

    Returns:
        `[n, rows, cols]`, a new tensor.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]  # the Gram matrix of the short side is smaller
    x = matrices.mT if tall else matrices
    # no singular value above 1
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + _EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


_RMS = 0.2  # root mean square of an update at rate 1, about the same as AdamW's


def replace_by_update(spec: ShardSpec, whole: Tensor, steps: int, per_head: bool) -> None:
    """Replaces each matrix of a whole parameter's momentum by its update at rate 1, in place.

    Args:
        whole: `[rows, cols]`, or `[experts, rows, cols]`; `spec.stack` divides the rows into
            matrices.
        per_head: `spec.head_rows` divides each of these further.
    """
    matrices = whole if whole.ndim == 3 else whole[None]
    row, heights = 0, spec.stack or (matrices.shape[1],)
    for height, head in zip(heights, spec.head_rows if per_head and spec.head_rows else heights):
        matrix = matrices[:, row : row + height].unflatten(1, (-1, head)).flatten(0, 1)
        scale = _RMS * math.sqrt(max(matrix.shape[1:]))
        matrix.copy_(orthogonalize(matrix, steps).mul_(scale))
        row += height


class Muon(SliceOptimizer):
    """Muon on the owned slices of buckets.

    Args:
        buckets: all their parameters are matrices (`takes_muon`).
        config: momentum, ns_steps, weight_decay, decay_exclude, scales; with offload, master
            weights and momentum stay on the host, and matrices are copied to the device to be
            orthogonalised.
        mesh: its tp and etp axes shard the matrices.

    Comm: as in `MatrixGather`, once.
    """

    kinds = ("momentum",)

    def __init__(
        self,
        buckets: Sequence[Bucket],
        config: OptimConfig,
        mesh: Mesh,
        rounding_seed: int | None = None,
    ) -> None:
        super().__init__(buckets, config, rounding_seed)
        groups: dict[tuple[str, str], tuple[list[CutMatrix], Axis, Axis]] = {}
        for state in self.slices:
            owned = {segment.spec.name: segment for segment in state.segments}
            for parameter, shares in zip(state.bucket.parameters, state.bucket.shares()):
                spec, shard = spec_of(parameter), state.bucket.shard
                cut = mesh["etp" if spec.expert else "tp"]
                segment = owned.get(spec.name)
                read, write = (
                    partial(self._nesterov_momentum, state, segment),
                    partial(self._apply_update, state, segment),
                )
                matrices, _, _ = groups.setdefault((shard.name, cut.name), ([], shard, cut))
                matrices.append(CutMatrix(spec, tuple(parameter.shape), shares, read, write))
        # in the same order on every rank, so that no two wait for each other
        self._gathers = [MatrixGather(*groups[key]) for key in sorted(groups)]
        self._rate = 0.0

    def step(self, lr: float, scale: float | None = None) -> None:
        """Updates as SliceOptimizer does. Comm: `MatrixGather.transform`'s, for each pair of axes
        that cut matrices."""
        self._take_grads(scale)
        self.step_count += 1
        self._rate = lr
        for state in self.slices:
            state.moments["momentum"].mul_(self.config.momentum).add_(state.grads)
        for gather in self._gathers:
            work = partial(
                replace_by_update, steps=self.config.ns_steps, per_head=self.config.muon_per_head
            )
            gather.transform(work)
        self.masters_to_weights()

    def allocate_temporaries(self) -> None:
        self.step(0.0)

    def _nesterov_momentum(self, state: SliceState, segment: Segment | None) -> Tensor:
        """Returns g + μ·m of a segment, flat, in the weights' dtype and on their device; empty
        without a segment."""
        weights = state.bucket.weight_slice
        if segment is None:
            return weights.new_empty(0)
        span = slice(*segment.owned)
        return torch.add(
            state.grads[span], state.moments["momentum"][span], alpha=self.config.momentum
        ).to(weights)

    def _apply_update(self, state: SliceState, segment: Segment | None, update: Tensor) -> None:
        """Applies weight decay and the update to a segment; weights without masters are rounded
        stochastically."""
        if segment is None:
            return
        span = slice(*segment.owned)
        wide = state.master[span].float() if state.rounded else state.master[span]
        rate = self._rate * scale_of(segment.spec, self.config.lr_scale)
        if decay := decay_of(segment.spec, self.config):
            wide.mul_(1 - rate * decay)
        wide.add_(update.to(wide.device), alpha=-rate)
        if state.rounded:
            assert self.rounding_seed is not None
            weights = state.bucket.weight_slice[span]
            store_rounded(wide, weights, segment, self.rounding_seed, self.step_count)

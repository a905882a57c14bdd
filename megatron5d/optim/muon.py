"""Muon: the update of a matrix is its orthogonalized momentum. AdamW updates other parameters.

    m ← μ·m + g;   O = NewtonSchulz(g + μ·m)
    w ← w·(1 - lr·weight_decay) - lr·0.2·√max(rows, cols)·O

with g the reduced and clipped gradient. A full-rank O has a root mean square of 1/√max(rows, cols),
so that of every update is 0.2·lr, about the same as AdamW's: both use the same learning rate and
weight decay.

q, k and v of a fused projection are separate matrices, and so are gate and up (`ShardSpec.stack`)
and those of each expert; MLA's projections are one matrix each. With optim.muon_per_head each head
of q, k and v (MLA: of the up-projections) is a separate matrix. AdamW updates norms, biases and
what `optim.muon_exclude` names.

The momentum is kept in slices, in fp32 (fp64 with fp64), like AdamW's moments. Each matrix is
gathered on one rank and orthogonalized there in the dtype of the weights, so the numbers are the
same on any layout.
Source: Jordan et al. 2024; Liu et al. 2025 (arXiv:2502.16982, Moonlight), sections 2.2 and 2.3;
    Kimi K2.

NewtonSchulz approximates the nearest orthogonal matrix with GEMMs only: X ← a·X + (b·XXᵀ +
c·(XXᵀ)²)·X maps every singular value x of X to a·x + b·x³ + c·x⁵ and keeps the singular vectors.
The coefficients enlarge small values quickly (by a⁵ ≈ 485 in five steps) and keep large ones within
[0.68, 1.14].
Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

A matrix is sharded twice: by tp (experts: etp) into the parameters of several ranks, and each
parameter by ZeRO into flat slices over the shard axis of its bucket. Two all-to-alls gather it, and
two send the result back:

    slices  --shard-->  parameter of one tp rank  --tp-->  matrix  --tp-->  --shard-->  slices

The matrices are assigned to the ranks of shard × tp in rounds of one matrix per rank, largest
first. A rank thus processes 1/(shard·tp) of them, at the same time as other ranks process matrices
of about the same size, and holds one gathered matrix at a time. Ranks that own the same slices
(`Bucket.replicate`) repeat the same work.
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

Transform = Callable[[ShardSpec, Tensor], None]  # changes a gathered parameter in place


@dataclass(frozen=True)
class ShardedMatrix:
    """A sharded parameter of two or more dims, and how to read and write this rank's slice of
    it."""

    spec: ShardSpec
    shape: tuple[int, ...]  # of the local parameter, the same on every rank of tp
    # flat range of the local parameter that each rank of the shard axis owns
    owned: list[tuple[int, int]]
    read: Callable[[], Tensor]  # returns the input for this rank's slice, flat
    write: Callable[[Tensor], None]  # receives the result for this rank's slice, flat

    def num_owned(self, rank: int) -> int:
        """Number of elements owned by a rank of the shard axis."""
        start, stop = self.owned[rank]
        return stop - start

    @property
    def numel(self) -> int:
        """Number of elements of the local parameter."""
        return prod(self.shape)

    def index_of(self, piece: Piece) -> tuple[slice, ...]:
        """Index of any rank's piece in the gathered parameter (`gathered_shape`)."""
        first = _first_dim_range(self.spec)[0] if len(self.spec.shape) > 2 else 0
        offset = (piece.offset[0] - first, *piece.offset[1:])
        return tuple(slice(start, start + size) for start, size in zip(offset, piece.shape))


def _first_dim_range(spec: ShardSpec) -> tuple[int, int]:
    """Range (start, stop) of the indices of dim 0 in this rank's pieces."""
    starts = [piece.offset[0] for piece in spec.pieces]
    stops = [piece.offset[0] + piece.shape[0] for piece in spec.pieces]
    return min(starts, default=0), max(stops, default=0)


def gathered_shape(spec: ShardSpec) -> tuple[int, ...]:
    """Shape of a gathered parameter: the global one, but with this rank's experts only."""
    *lead, rows, cols = spec.shape
    first, last = _first_dim_range(spec)
    return (last - first, rows, cols) if lead else (rows, cols)


class MatrixGather:
    """Matrices that are sharded over the same two axes.

    Args:
        matrices: with this rank's slices; every rank of both axes has the same matrices.
        shard: the shard axis of their buckets.
        tp: the axis that cuts the parameters; for experts etp.

    Comm: all_gather over `tp` of the matrices' pieces, once.
    """

    def __init__(self, matrices: Sequence[ShardedMatrix], shard: Axis, tp: Axis) -> None:
        self.matrices = sorted(matrices, key=lambda matrix: (-matrix.numel, matrix.spec.name))
        self.shard, self.tp = shard, tp
        local_pieces = [
            [(piece.offset, piece.shape, piece.row) for piece in matrix.spec.pieces]
            for matrix in self.matrices
        ]
        # the pieces of every rank of tp, by matrix
        self._pieces = {
            matrix.spec.name: [
                [Piece(tuple(offset), tuple(shape), row) for offset, shape, row in pieces]
                for pieces in pieces_by_rank
            ]
            for matrix, pieces_by_rank in zip(self.matrices, zip(*gather_objects(local_pieces, tp)))
        }

    def apply(self, transform: Transform) -> None:
        """Transforms each gathered matrix and gives every rank its slice of the result.

        Comm: for each round of shard·tp matrices two all_to_alls over `shard` of this rank's
            slices, and two over `tp` of a local parameter to each of its ranks.
        """
        size = self.shard.size * self.tp.size
        for start in range(0, len(self.matrices), size):
            self._run_round(self.matrices[start : start + size], transform)

    def _run_round(self, batch: Sequence[ShardedMatrix], transform: Transform) -> None:
        """Transforms up to shard·tp matrices, of which each rank gathers at most one."""
        size, rank = self.shard.size, self.shard.rank
        # the matrices of each rank of `shard`, one per rank of `tp`
        assigned = [batch[i::size] for i in range(size)]
        local = assigned[rank]
        # Over shard: slices of every matrix to the rank that it is assigned to.
        sent_counts = [sum(matrix.num_owned(rank) for matrix in group) for group in assigned]
        received_counts = [sum(matrix.num_owned(i) for matrix in local) for i in range(size)]
        order = [matrix for group in assigned for matrix in group]
        sent = torch.cat([matrix.read() for matrix in order])
        flat = start_all_to_all(sent, self.shard, sent_counts, received_counts).wait()
        del sent
        if local:
            flat = self._apply_over_tp(local, flat, transform)
        # Send the results back to the owners of the slices.
        results = start_all_to_all(flat, self.shard, received_counts, sent_counts).wait()
        sizes = [matrix.num_owned(rank) for matrix in order]
        for matrix, result in zip(order, results.split(sizes)):
            matrix.write(result)

    def _apply_over_tp(
        self, local: Sequence[ShardedMatrix], flat: Tensor, transform: Transform
    ) -> Tensor:
        """Joins slices to local parameters, and transforms one matrix on each rank of `tp`.

        Args:
            local: up to one matrix for each rank of `tp`.
            flat: slices of their local parameters, ordered by rank of `shard`, then matrix.
            transform: applied to each gathered matrix.

        Returns:
            The results in the form of `flat`.
        """
        ranks = range(self.shard.size)
        slices = flat.split([matrix.num_owned(rank) for rank in ranks for matrix in local])
        # From the order (rank, matrix) to (matrix, rank).
        flat = torch.cat([x for k in range(len(local)) for x in slices[k :: len(local)]])
        # Over tp: each local parameter to one rank.
        sent_counts = [matrix.numel for matrix in local] + [0] * (self.tp.size - len(local))
        received_counts = [sent_counts[self.tp.rank]] * self.tp.size
        parameters = start_all_to_all(flat, self.tp, sent_counts, received_counts).wait()
        del flat, slices
        if self.tp.rank < len(local):
            self._transform_matrix(local[self.tp.rank], parameters, transform)
        results = start_all_to_all(parameters, self.tp, received_counts, sent_counts).wait()
        # Back to the order (rank, matrix).
        by_matrix = [
            result.split([matrix.num_owned(rank) for rank in ranks])
            for matrix, result in zip(local, results.split(sent_counts))
        ]
        return torch.cat([by_rank[rank] for rank in ranks for by_rank in by_matrix])

    def _transform_matrix(
        self, matrix: ShardedMatrix, parameters: Tensor, transform: Transform
    ) -> None:
        """Transforms one matrix, given as the local parameters of all ranks of `tp`, in place."""
        by_rank = parameters.view(self.tp.size, *matrix.shape)
        gathered = parameters.new_empty(gathered_shape(matrix.spec))
        pieces = [
            (matrix.index_of(piece), by_rank[rank][piece.row : piece.row + piece.shape[0]])
            for rank, pieces in enumerate(self._pieces[matrix.spec.name])
            for piece in pieces
        ]
        for index, rows in pieces:
            gathered[index] = rows
        transform(matrix.spec, gathered)
        for index, rows in pieces:
            rows.copy_(gathered[index])


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7  # added to the norm, so that a matrix of zeros stays zero


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Approximates U·Vᵀ of each matrix U·S·Vᵀ, with singular values near 1.

    Args:
        matrices: `[n, rows, cols]`; all arithmetic is in their dtype.
        steps: iterations of NewtonSchulz.

    Returns:
        `[n, rows, cols]`, a new tensor.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]  # the short side has the smaller Gram matrix
    x = matrices.mT if is_tall else matrices
    # The Frobenius norm bounds the singular values by 1.
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + _EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


_RMS = 0.2  # root mean square of an update at rate 1, about the same as AdamW's


def replace_by_update(spec: ShardSpec, momentum: Tensor, steps: int, per_head: bool) -> None:
    """Replaces each matrix of a gathered momentum by its update at rate 1, in place.

    Args:
        spec: `spec.stack` divides the rows into matrices.
        momentum: `[rows, cols]`, or `[experts, rows, cols]`.
        steps: iterations of NewtonSchulz.
        per_head: `spec.head_rows` divides the matrices further.
    """
    stack = momentum if momentum.ndim == 3 else momentum[None]
    row, heights = 0, spec.stack or (stack.shape[1],)
    for height, head in zip(heights, spec.head_rows if per_head and spec.head_rows else heights):
        matrices = stack[:, row : row + height].unflatten(1, (-1, head)).flatten(0, 1)
        scale = _RMS * math.sqrt(max(matrices.shape[1:]))
        matrices.copy_(orthogonalize(matrices, steps).mul_(scale))
        row += height


class Muon(SliceOptimizer):
    """Muon on the owned slices of buckets.

    Args:
        buckets: all their parameters are matrices (`uses_muon`).
        config: momentum, ns_steps, weight_decay, decay_exclude, scales; with offload, master
            weights and momentum stay on the host, and matrices are copied to the device to be
            orthogonalized.
        mesh: its tp and etp axes shard the matrices.
        rounding_seed: as in `SliceOptimizer`.

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
        groups: dict[tuple[str, str], tuple[list[ShardedMatrix], Axis, Axis]] = {}
        for state in self.slices:
            segments = {segment.spec.name: segment for segment in state.segments}
            for parameter, owned in zip(state.bucket.parameters, state.bucket.shares()):
                spec, shard = spec_of(parameter), state.bucket.shard
                tp, segment = mesh["etp" if spec.expert else "tp"], segments.get(spec.name)
                read = partial(self._nesterov_momentum, state, segment)
                write = partial(self._apply_update, state, segment)
                matrices, _, _ = groups.setdefault((shard.name, tp.name), ([], shard, tp))
                matrices.append(ShardedMatrix(spec, tuple(parameter.shape), owned, read, write))
        # Sorted, so that all ranks enter the collectives in the same order.
        self._gathers = [MatrixGather(*groups[key]) for key in sorted(groups)]
        self._rate = 0.0

    def step(self, lr: float, scale: float | None = None) -> None:
        """Updates as SliceOptimizer does.

        Comm: that of `MatrixGather.apply`, for each pair of axes that shard matrices.
        """
        self._prepare_grads(scale)
        self.step_count += 1
        self._rate = lr
        config = self.config
        # Slice by slice; the matrices of the momentum are gathered below.
        for state in self.slices:
            state.moments["momentum"].mul_(config.momentum).add_(state.grads)
        update = partial(replace_by_update, steps=config.ns_steps, per_head=config.muon_per_head)
        for gather in self._gathers:
            gather.apply(update)
        self.masters_to_weights()

    def allocate_temporaries(self) -> None:
        self.step(0.0)

    def _nesterov_momentum(self, state: SliceState, segment: Segment | None) -> Tensor:
        """Computes g + μ·m of a segment, flat, in the weights' dtype and on their device; empty
        without a segment."""
        weights = state.bucket.weight_slice
        if segment is None:
            return weights.new_empty(0)
        span = slice(*segment.owned)
        grads, momentum = state.grads[span], state.moments["momentum"][span]
        return torch.add(grads, momentum, alpha=self.config.momentum).to(weights)

    def _apply_update(self, state: SliceState, segment: Segment | None, update: Tensor) -> None:
        """Applies weight decay and the update to a segment; weights without masters are rounded
        stochastically."""
        if segment is None:
            return
        span = slice(*segment.owned)
        wide = state.master[span].float() if state.is_rounded else state.master[span]
        rate = self._rate * scale_of(segment.spec, self.config.lr_scale)
        if decay := decay_of(segment.spec, self.config):
            wide.mul_(1 - rate * decay)
        wide.add_(update.to(wide.device), alpha=-rate)
        if state.is_rounded:
            assert self.rounding_seed is not None
            weights = state.bucket.weight_slice[span]
            store_rounded(wide, weights, segment, self.rounding_seed, self.step_count)

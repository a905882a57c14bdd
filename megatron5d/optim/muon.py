"""Muon: the update of a matrix is its momentum, orthogonalised. AdamW updates all other parameters.

    m ← μ·m + g;   O = NewtonSchulz(g + μ·m);   w ← w·(1 - lr·weight_decay) - lr·0.2·√max(rows, cols)·O

with g the reduced and clipped gradient. A full-rank O has a root mean square of 1/√max(rows, cols), so that of every
update is 0.2·lr, about the same as AdamW's: both use the same learning rate and weight decay.

q, k and v of a fused projection are separate matrices, and so are gate and up (`ShardSpec.stack`) and those of each
expert; MLA's projections are one matrix each. With optim.muon_per_head each head of q, k and v (MLA: of the
up-projections) is a matrix of its own. Norms, biases and what `optim.muon_exclude` names are updated by AdamW.

The momentum is kept in slices, in fp32 (fp64 with fp64), like AdamW's moments. Each matrix is orthogonalised whole, on
one rank, in the dtype of the weights (matrix_gather.py), so the numbers are the same on any layout.
Source: Jordan et al. 2024; Liu et al. 2025 (arXiv:2502.16982, Moonlight), sections 2.2 and 2.3; Kimi K2.

Newton-Schulz iteration: approximates the nearest orthogonal matrix, with GEMMs only.

X ← a·X + (b·XXᵀ + c·(XXᵀ)²)·X maps every singular value x of X to a·x + b·x³ + c·x⁵ and keeps the singular vectors.
The coefficients enlarge small values quickly (by a⁵ ≈ 485 in five steps) and keep large ones within [0.68, 1.14].
Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.bucket import Bucket, Segment
from megatron5d.optim.matrix_gather import CutMatrix, MatrixGather
from megatron5d.optim.sharded_state import SliceOptimizer, SliceState, decay_of, scale_of, store_rounded
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import ShardSpec, spec_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7  # added to the norm, so that a matrix of zeros stays zero


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Approximates U·Vᵀ of each matrix U·S·Vᵀ, with singular values near 1.

    Args:
        matrices: `[n, rows, cols]`; all arithmetic is in their dtype.
        steps: of the iteration.

    Returns:
        `[n, rows, cols]`, a new tensor.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]  # the Gram matrix of the short side is smaller
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + _EPS)  # no singular value above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


_RMS = 0.2  # root mean square of an update at rate 1, about the same as AdamW's


def replace_by_update(spec: ShardSpec, whole: Tensor, steps: int, per_head: bool) -> None:
    """Replaces each matrix of a whole parameter's momentum by its update at rate 1, in place.

    Args:
        spec: of the parameter.
        whole: `[rows, cols]`, or `[experts, rows, cols]`; `spec.stack` divides the rows into matrices.
        steps: of the Newton-Schulz iteration.
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
        config: momentum, ns_steps, weight_decay, decay_exclude, scales; with offload, master weights and momentum stay
            on the host, and matrices are copied to the device to be orthogonalised.
        mesh: its tp and etp axes shard the matrices.
        rounding_seed: as in SliceOptimizer.

    Comm: as in `MatrixGather`, once.
    """

    kinds = ("momentum",)

    def __init__(
        self, buckets: Sequence[Bucket], config: OptimConfig, mesh: Mesh, rounding_seed: int | None = None
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
        """Updates as SliceOptimizer does. Comm: `MatrixGather.transform`'s, for each pair of axes that cut matrices."""
        self._take_grads(scale)
        self.step_count += 1
        self._rate = lr
        for state in self.slices:
            state.moments["momentum"].mul_(self.config.momentum).add_(state.grads)
        for gather in self._gathers:
            work = partial(replace_by_update, steps=self.config.ns_steps, per_head=self.config.muon_per_head)
            gather.transform(work)
        self.masters_to_weights()

    def allocate_temporaries(self) -> None:
        self.step(0.0)

    def _nesterov_momentum(self, state: SliceState, segment: Segment | None) -> Tensor:
        """Returns g + μ·m of a segment, flat, in the weights' dtype and on their device; empty without a segment."""
        weights = state.bucket.weight_slice
        if segment is None:
            return weights.new_empty(0)
        span = slice(*segment.owned)
        return torch.add(state.grads[span], state.moments["momentum"][span], alpha=self.config.momentum).to(weights)

    def _apply_update(self, state: SliceState, segment: Segment | None, update: Tensor) -> None:
        """Applies weight decay and the update to a segment; weights without masters are rounded stochastically."""
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

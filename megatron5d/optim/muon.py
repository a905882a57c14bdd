"""Muon: the momentum of a matrix, made orthogonal, is its update. For the matrices of the layers; AdamW has the rest.

    m ← μ·m + g;   O = NewtonSchulz(g + μ·m);   w ← w·(1 - lr·weight_decay) - lr·0.2·√max(rows, cols)·O

with g the reduced and clipped gradient. A full-rank O has a root mean square of 1/√max(rows, cols), so every update
has 0.2, about AdamW's: one rate and one decay serve both.

What a matrix is: each of q, k and v in a fused projection, each of gate and up (`ShardSpec.stack`), each expert's own;
what models keep as one (MLA's projections) is one. Norms, biases and what `optim.muon_exclude` names are AdamW's.

The momentum is kept in slices, in fp32 (fp64 with fp64), as AdamW's moments are. What is orthogonalised travels and is
computed in the dtype of the weights, whole, once (assembly.py): the same numbers on any layout.
Source: Jordan et al. 2024; Liu et al. 2025 (arXiv:2502.16982, Moonlight), sections 2.2 and 2.3; Kimi K2.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.buckets import Bucket, Segment
from megatron5d.optim.assembly import Assembly, CutMatrix
from megatron5d.optim.newton_schulz import orthogonalize
from megatron5d.optim.rounding import store_rounded
from megatron5d.optim.slices import SliceOptimizer, SliceState, decays
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard import ShardSpec, spec_of

_RMS = 0.2  # of an update, as AdamW's usually is


def takes_muon(spec: ShardSpec, config: OptimConfig) -> bool:
    """Under optim.name=muon: a parameter of two and more dims that no glob of optim.muon_exclude names."""
    excluded = any(fnmatch.fnmatch(spec.name, glob) for glob in config.muon_exclude)
    return config.name == "muon" and len(spec.shape) >= 2 and not excluded


def to_update(spec: ShardSpec, whole: Tensor, steps: int) -> None:
    """Each matrix of a whole parameter `[..., rows, cols]` becomes its update at rate 1."""
    matrices = whole if whole.ndim == 3 else whole[None]
    row = 0
    for height in spec.stack or (matrices.shape[1],):
        matrix = matrices[:, row : row + height]
        scale = _RMS * math.sqrt(max(matrix.shape[1:]))
        matrix.copy_(orthogonalize(matrix, steps).mul_(scale))
        row += height


class Muon(SliceOptimizer):
    """
    Args:
        buckets: of matrices alone.
        config: momentum, ns_steps, weight_decay, decay_exclude; offload keeps master weights and momentum on the host,
            from where what is orthogonalised travels to the device and back.
        mesh: whose tp and etp cut the matrices.
        rounding_seed: as of SliceOptimizer.
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
                read, write = partial(self._direction, state, segment), partial(self._move, state, segment)
                matrices, _, _ = groups.setdefault((shard.name, cut.name), ([], shard, cut))
                matrices.append(CutMatrix(spec, tuple(parameter.shape), shares, read, write))
        # every rank comes to its groups in one order: none waits for one that waits for it
        self._assemblies = [Assembly(*groups[key]) for key in sorted(groups)]
        self._rate = 0.0

    def step(self, lr: float, scale: float | None = None) -> None:
        """As of SliceOptimizer. Comm: as of `Assembly.transform`, for each pair of axes that cut matrices."""
        self._take_grads(scale)
        self.step_count += 1
        self._rate = lr
        for state in self.slices:
            state.moments["momentum"].mul_(self.config.momentum).add_(state.grads)
        for assembly in self._assemblies:
            assembly.transform(partial(to_update, steps=self.config.ns_steps))
        self.masters_to_weights()

    def rehearse(self) -> None:
        self.step(0.0)
        self.step_count -= 1

    def _direction(self, state: SliceState, segment: Segment | None) -> Tensor:
        """g + μ·m of a segment, flat, as it is orthogonalised: in the dtype and on the device of the weights."""
        weights = state.bucket.weight_slice
        if segment is None:
            return weights.new_empty(0)
        span = slice(*segment.owned)
        return torch.add(state.grads[span], state.moments["momentum"][span], alpha=self.config.momentum).to(weights)

    def _move(self, state: SliceState, segment: Segment | None, update: Tensor) -> None:
        """Decays the weights of a segment and takes the update off; those without masters are rounded at random."""
        if segment is None:
            return
        span = slice(*segment.owned)
        wide = state.master[span].float() if state.rounded else state.master[span]
        if decays(segment.spec, self.config.decay_exclude):
            wide.mul_(1 - self._rate * self.config.weight_decay)
        wide.add_(update.to(wide.device), alpha=-self._rate)
        if state.rounded:
            assert self.rounding_seed is not None
            weights = state.bucket.weight_slice[span]
            store_rounded(wide, weights, segment, self.rounding_seed, self.step_count)

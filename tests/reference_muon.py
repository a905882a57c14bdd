"""Muon on one page, for whole tensors of one process: the reference of the parity tests.

It finds fused matrices, and those that Muon leaves to AdamW, by name, and so independently of the
ShardSpecs that the product reads.
"""

from __future__ import annotations

import math
from fnmatch import fnmatch

import torch

from megatron5d.config.schema import Config


def newton_schulz(g: torch.Tensor, steps: int) -> torch.Tensor:
    """One matrix; as published: X ← aX + (bA + cA²)X with A = XXᵀ, on the short side."""
    x = g / (g.norm() + 1e-7)
    if x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def matrices(name: str, tensor: torch.Tensor, config: Config) -> list[torch.Tensor]:
    """Views of the matrices of a parameter."""
    experts = tensor if ".experts." in name else [tensor]
    return [matrix for rows in experts for matrix in _matrices_of_rows(name, rows, config)]


def _matrices_of_rows(name, rows, config):
    m, per_head = config.model, config.optim.muon_per_head
    if name.endswith(".qkv.weight"):
        if per_head:
            return rows.split(m.head_dim)
        q, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        return rows.split([q, kv, kv, *([q] if m.attention_gate else [])])
    if per_head and name.endswith((".q.weight", ".q_up.weight")):
        return rows.split(m.qk_nope_head_dim + m.qk_rope_head_dim)
    if per_head and name.endswith(".kv_up.weight"):
        return rows.split(m.qk_nope_head_dim + m.v_head_dim)
    if name.endswith(".up.weight") and m.gated:
        return rows.chunk(2)
    return [rows]


class Muon:
    """Updates the weights in `names`, which is empty with optim.name=adamw."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        decay: dict[str, float],
        scale: dict[str, float],
        config: Config,
    ) -> None:
        excluded = config.optim.muon_exclude if config.optim.name == "muon" else ["*"]
        self.names = {
            name
            for name, weight in weights.items()
            if weight.ndim > 1 and not any(fnmatch(name, glob) for glob in ("*.bias", *excluded))
        }
        self.weights, self.decay, self.scale, self.config = weights, decay, scale, config
        self.momenta = {name: torch.zeros_like(weights[name]) for name in self.names}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        mu, steps = self.config.optim.momentum, self.config.optim.ns_steps
        for name in self.names:
            weight, momentum = self.weights[name], self.momenta[name]
            momentum.mul_(mu).add_(weight.grad)
            rate = lr * self.scale[name]
            weight.mul_(1 - rate * self.decay[name])
            nesterov = weight.grad + mu * momentum
            for matrix, update in zip(
                matrices(name, weight, self.config), matrices(name, nesterov, self.config)
            ):
                size = 0.2 * math.sqrt(max(matrix.shape))
                matrix -= rate * size * newton_schulz(update, steps)

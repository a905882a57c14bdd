"""Muon on one page, for whole tensors of one process: the oracle of the parity tests.

It knows by name what is fused and what Muon leaves to AdamW, and nothing of the ShardSpecs that the
real one goes by.
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
    """Views of the matrices that a parameter is made of."""
    m, per_head = config.model, config.optim.muon_per_head
    if ".experts." in name:
        return [part for expert in tensor for part in _parts(name, expert, m, per_head)]
    return _parts(name, tensor, m, per_head)


def _parts(name, tensor, m, per_head):
    if name.endswith(".qkv.weight"):
        if per_head:
            return list(tensor.split(m.head_dim))
        q, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        return list(tensor.split([q, kv, kv, *([q] if m.attention_gate else [])]))
    if per_head and name.endswith((".q.weight", ".q_up.weight")):
        return list(tensor.split(m.qk_nope_head_dim + m.qk_rope_head_dim))
    if per_head and name.endswith(".kv_up.weight"):
        return list(tensor.split(m.qk_nope_head_dim + m.v_head_dim))
    if name.endswith(".up.weight") and m.gated:
        return [tensor[: len(tensor) // 2], tensor[len(tensor) // 2 :]]
    return [tensor]


class Muon:
    """Nobody's where optim.name=adamw: `names` is empty then."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        decay: dict[str, float],
        scale: dict[str, float],
        config: Config,
    ) -> None:
        excluded = config.optim.muon_exclude if config.optim.name == "muon" else ["*"]
        self.names = {
            n
            for n, w in weights.items()
            if w.ndim > 1
            and not n.endswith(".bias")
            and not any(fnmatch(n, glob) for glob in excluded)
        }
        self.weights, self.decay, self.scale, self.config = weights, decay, scale, config
        self.momenta = {name: torch.zeros_like(weights[name]) for name in self.names}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        mu, steps = self.config.optim.momentum, self.config.optim.ns_steps
        for name in self.names:
            w, momentum = self.weights[name], self.momenta[name]
            momentum.mul_(mu).add_(w.grad)
            rate = lr * self.scale[name]
            w.mul_(1 - rate * self.decay[name])
            ahead = w.grad + mu * momentum
            for part, update in zip(
                matrices(name, w, self.config), matrices(name, ahead, self.config)
            ):
                part -= rate * 0.2 * math.sqrt(max(part.shape)) * newton_schulz(update, steps)

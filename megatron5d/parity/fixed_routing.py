"""Lets one run repeat another's choices of experts, so that rounding cannot send a token another way."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron5d.expert_parallel.load_balancing import Tokens
from megatron5d.expert_parallel.router import scores_of, weights_of
from megatron5d.model.gpt import Gpt
from megatron5d.model.moe import MoeDispatch

Choices = dict[int, tuple[Tensor, Tensor]]
"""Layer -> by sample·seq_len + position, int64 `[n+1, k]` chosen experts and bool `[n+1, k]` those within the capacity;
the last row is for what pads to equal shares."""


def fix_routing(model: Gpt, choices: Choices, num_samples: int, seq_len: int) -> Choices:
    """Lets the routers of a rank note their choices, or repeat those of another run.

    Args:
        model: of this rank.
        choices: to repeat; empty = note them.
        num_samples: of the run.
        seq_len: tokens of a sample.

    Returns:
        What is noted while the model runs, or `choices`.
    """
    noted: Choices = {}
    for phase in model.modules():
        if isinstance(phase, MoeDispatch):
            shape = num_samples * seq_len + 1, phase.config.top_k
            empty = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
            noted[phase.layer] = choices[phase.layer] if choices else empty
            _fix_phase(phase, *noted[phase.layer], bool(choices), seq_len)
    return noted


def _fix_phase(phase: MoeDispatch, chosen: Tensor, kept: Tensor, repeat: bool, seq_len: int) -> None:
    """Replaces what chooses in one phase by what notes its choice, or repeats the one in the tables."""
    model, router, choose, limit = phase.config, phase.router, phase.router.forward, phase.limit_capacity
    routed = torch.zeros(0, dtype=torch.int64)  # rows of the tables that are routed now

    def start(_, arguments) -> None:
        nonlocal routed
        x, batch, *_ = arguments
        tokens = phase.share.tokens(x.shape, batch)
        row = batch.samples[tokens.sequence] * seq_len + tokens.order // tokens.num_sequences
        missing = tokens.order >= seq_len * tokens.num_sequences
        routed = row.masked_fill(missing, len(chosen) - 1)

    def forward(logits: Tensor) -> tuple[Tensor, Tensor]:
        if repeat:
            scores = scores_of(logits, model.router_score)
            return chosen[routed], weights_of(scores, chosen[routed], model)
        experts, weights = choose(logits)
        chosen[routed] = experts
        return experts, weights

    def limited(experts: Tensor, weights: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        if not repeat:
            taken, weights, dropped = limit(experts, weights, tokens)
            kept[routed] = taken == experts
            return taken, weights, dropped
        keep = kept[routed] | (experts == model.num_experts)  # padding has no choice to drop
        dropped = None if phase.moe.capacity_factor is None else (~keep).sum()
        return experts.masked_fill(~keep, model.num_experts), weights * keep.to(weights.dtype), dropped

    phase.register_forward_pre_hook(start)
    router.forward = forward  # type: ignore[method-assign]
    phase.limit_capacity = limited  # type: ignore[method-assign]

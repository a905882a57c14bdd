"""Lets one run repeat another's choices of experts, so that rounding cannot send a token another way."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron5d.expert_parallel.load_balancing import Tokens
from megatron5d.expert_parallel.router import scores_of, weights_of
from megatron5d.model.gpt import GPT
from megatron5d.model.moe import MoEDispatch

Choices = dict[int, dict[str, Tensor]]
"""Layer -> by sample·seq_len + position, int64 `[n+1, k]` chosen experts and those chosen by plain scores, and bool
`[n+1, k]` whether a choice is within the capacity; the last row is for what pads to equal shares."""


def fix_routing(model: GPT, choices: Choices, num_samples: int, seq_len: int) -> Choices:
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
        if isinstance(phase, MoEDispatch):
            shape = num_samples * seq_len + 1, phase.config.top_k
            empty = {name: torch.zeros(shape, dtype=torch.int64) for name in ("chosen", "plain", "kept")}
            noted[phase.layer] = choices[phase.layer] if choices else empty
            _fix_phase(phase, noted[phase.layer], bool(choices), seq_len)
    return noted


def _fix_phase(phase: MoEDispatch, table: dict[str, Tensor], repeat: bool, seq_len: int) -> None:
    """Replaces what chooses in one phase by what notes its choice, or repeats the one in the tables."""
    model, choose, limit = phase.config, phase.router.forward, phase.limit_capacity
    plainly = type(phase.balancer).plain_choice
    rows = torch.zeros(0, dtype=torch.int64)  # of the tables: what is routed now

    def start(_, arguments) -> None:
        nonlocal rows
        x, batch, *_ = arguments
        tokens = phase.share.tokens(x.shape, batch)
        rows = batch.samples[tokens.sequence] * seq_len + tokens.order // tokens.num_sequences
        rows = rows.masked_fill(tokens.order >= seq_len * tokens.num_sequences, len(table["chosen"]) - 1)
        phase.balancer.plain_choice = plain_choice  # type: ignore[method-assign]

    def forward(logits: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not repeat:
            experts, weights = choose(logits, forced)
            table["chosen"][rows] = experts
            return experts, weights
        experts = table["chosen"][rows]
        return experts, weights_of(scores_of(logits, model.router_score), experts, model)

    def plain_choice(logits: Tensor, experts: Tensor, tokens: Tokens) -> Tensor:
        if not repeat:
            table["plain"][rows] = plainly(phase.balancer, logits, experts, tokens)
        return table["plain"][rows].masked_fill(experts == model.num_experts, model.num_experts)

    def limited(experts: Tensor, weights: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        if not repeat:
            taken, weights, dropped = limit(experts, weights, tokens)
            table["kept"][rows] = (taken == experts).long()
            return taken, weights, dropped
        keep = (table["kept"][rows] > 0) | (experts == model.num_experts)  # padding has no choice to drop
        dropped = None if phase.moe.capacity_factor is None else (~keep).sum()
        return experts.masked_fill(~keep, model.num_experts), weights * keep.to(weights.dtype), dropped

    phase.register_forward_pre_hook(start)
    phase.router.forward = forward  # type: ignore[method-assign]
    phase.limit_capacity = limited  # type: ignore[method-assign]

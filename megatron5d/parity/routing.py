"""Records which experts the routers of one run choose, and repeats those choices in another.

Rounding may send a token to another expert, after which two runs have nothing left to compare. A
run that repeats the choices of the other one differs from it by rounding only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron5d.expert_parallel.router import scores_of, weights_of
from megatron5d.expert_parallel.token_share import Tokens
from megatron5d.model.gpt import GPT
from megatron5d.model.moe import MoEDispatch

Choices = dict[int, dict[str, Tensor]]
"""Layer -> tables by sample·seq_len + position, int64 `[n+1, k]`.

"chosen" holds the experts, "plain" those that the scores alone would choose, and "kept" is 1 for a
choice within the capacity. The last row belongs to the padding up to equal shares.
"""


def fix_routing(model: GPT, choices: Choices, num_samples: int, seq_len: int) -> Choices:
    """Makes the routers of a rank record their choices, or repeat those of another run.

    Returns:
        Tables that fill while the model runs, or `choices` where these are given.
    """
    recorded: Choices = {}
    for phase in model.modules():
        if isinstance(phase, MoEDispatch):
            shape = num_samples * seq_len + 1, phase.config.top_k
            empty = {
                name: torch.zeros(shape, dtype=torch.int64) for name in ("chosen", "plain", "kept")
            }
            recorded[phase.layer] = choices[phase.layer] if choices else empty
            _FixedRouting(phase, recorded[phase.layer], bool(choices), seq_len)
    return recorded


def replace_method(owner: Any, name: str, replacement: Callable) -> None:
    """Replaces a method of one object by a function without `self`."""
    assert callable(getattr(owner, name))
    setattr(owner, name, replacement)


class _FixedRouting:
    """Replaces what chooses experts in one dispatch phase.

    Args:
        table: of this layer; read if `repeat`, else written.
    """

    def __init__(
        self, phase: MoEDispatch, table: dict[str, Tensor], repeat: bool, seq_len: int
    ) -> None:
        self.phase, self.table, self.repeat, self.seq_len = phase, table, repeat, seq_len
        self.num_experts = phase.config.num_experts
        self.rows = torch.zeros(0, dtype=torch.int64)  # of the tables, for the current tokens
        self.route, self.limit_capacity = phase.router.forward, phase.limit_capacity
        self.plain_choice = type(phase.balancer).unbiased_choices
        phase.register_forward_pre_hook(self._select_rows)
        replace_method(phase.router, "forward", self._forward)
        replace_method(phase, "limit_capacity", self._limit_capacity)

    def _select_rows(self, _, arguments) -> None:
        state, batch, *_ = arguments
        x = state[1] if isinstance(state, tuple) else state  # two in a parallel block
        tokens = self.phase.token_share.tokens(x.shape, batch)
        rows = batch.samples[tokens.sequence] * self.seq_len
        rows = rows + tokens.order // tokens.num_sequences
        is_padding = tokens.order >= self.seq_len * tokens.num_sequences
        self.rows = rows.masked_fill(is_padding, len(self.table["chosen"]) - 1)
        # The balancer may be replaced between steps.
        replace_method(self.phase.balancer, "unbiased_choices", self._plain_choice)

    def _forward(self, logits: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not self.repeat:
            experts, weights = self.route(logits, forced)
            self.table["chosen"][self.rows] = experts
            return experts, weights
        experts, model = self.table["chosen"][self.rows], self.phase.config
        return experts, weights_of(scores_of(logits, model.router_score), experts, model)

    def _plain_choice(self, logits: Tensor, experts: Tensor, tokens: Tokens) -> Tensor:
        if not self.repeat:
            plain = self.plain_choice(self.phase.balancer, logits, experts, tokens)
            self.table["plain"][self.rows] = plain
        is_padding = experts == self.num_experts
        return self.table["plain"][self.rows].masked_fill(is_padding, self.num_experts)

    def _limit_capacity(
        self, experts: Tensor, weights: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not self.repeat:
            limited, weights, dropped = self.limit_capacity(experts, weights, tokens)
            self.table["kept"][self.rows] = (limited == experts).long()
            return limited, weights, dropped
        # Padding has no choice that could be dropped.
        keep = (self.table["kept"][self.rows] > 0) | (experts == self.num_experts)
        dropped = None if self.phase.moe.capacity_factor is None else (~keep).sum()
        return (
            experts.masked_fill(~keep, self.num_experts),
            weights * keep.to(weights.dtype),
            dropped,
        )

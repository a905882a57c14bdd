"""Experts with a limited capacity: which choices of a micro-batch they drop.

The limit is for the whole micro-batch, wherever its tokens lie, so that no layout changes what is dropped:
ceil(factor · T·k/E) choices per expert, T tokens that are not padding. Source: Fedus et al. 2021 (arXiv:2101.03961),
section 2.2; by probability: Megatron-Core's `moe_token_drop_policy=probs`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron5d.comm.collectives import all_gather
from megatron5d.topology.axis import Axis


def within_capacity(
    experts: Tensor, weights: Tensor, order: Tensor, num_experts: int, factor: float, by: str, axis: Axis
) -> Tensor:
    """Which choices are within the experts' capacity.

    Args:
        experts: int64 `[n, k]`; `num_experts` where there is no choice (padding).
        weights: `[n, k]`.
        order: int64 `[n]`, place of each token in the micro-batch; different for all of its tokens.
        num_experts: how many experts there are.
        factor: moe.capacity_factor.
        by: probability or position; of equal probabilities the earlier token stays.
        axis: ranks that share the micro-batch's tokens, the same number each.

    Returns:
        bool `[n, k]`; False for padding.

    Comm: all_gather of 2k+1 fp64 numbers a token.
    """
    n, k = experts.shape
    mine = torch.cat((experts.double(), weights.detach().double(), order[:, None].double()), dim=1)
    everybody = all_gather(mine, axis)  # [n, 2k+1] -> [N, 2k+1]  all_gather cp_tp
    in_order = everybody[:, -1].argsort()
    choices = everybody[in_order]
    taken = _taken(choices[:, :k].long().flatten(), choices[:, k : 2 * k].flatten(), num_experts, factor, by)
    keep = torch.empty(everybody.shape[0], k, dtype=torch.bool, device=experts.device)
    keep[in_order] = taken.view(-1, k)
    return keep[axis.rank * n : (axis.rank + 1) * n]


def _taken(experts: Tensor, weights: Tensor, num_experts: int, factor: float, by: str) -> Tensor:
    """bool per choice, choices in the order of their tokens."""
    if by == "probability":
        line = weights.argsort(descending=True, stable=True)
    else:
        line = torch.arange(experts.numel(), device=experts.device)
    line = line[experts[line].argsort(stable=True)]  # by expert, and for each expert those it keeps longest first
    queue = experts[line]
    bounds = torch.searchsorted(queue, torch.arange(num_experts + 1, device=queue.device))
    place = torch.arange(queue.numel(), device=queue.device) - bounds[queue]
    limit = torch.ceil(factor * bounds[-1].double() / num_experts)  # bounds[-1] = T·k
    taken = torch.empty_like(queue, dtype=torch.bool)
    taken[line] = (place < limit) & (queue < num_experts)
    return taken

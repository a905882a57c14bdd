"""Which experts a token goes to, how much each of them counts, and which choices a limited capacity
drops.

    logits   x·Wᵀ, plus a trained bias where there is one, in fp32 (fp64 for a model in fp64)
    scores   softmax over the experts, or sigmoid of each
    choice   the k best scores, plus the bias where there is one, among the experts of the best groups
    weights  the chosen scores without the bias, divided by their sum if so configured, times the scaling factor

Source: Shazeer et al. 2017 (arXiv:1701.06538); groups: DeepSeek-V2 (arXiv:2405.04434), section
    2.2.2; sigmoid scores
and the bias: Wang et al. 2024 (arXiv:2408.15664), DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.

The limit of a capacity is for the whole micro-batch, wherever its tokens lie, so that no layout
changes what is
dropped: ceil(factor · T·k/E) choices per expert, T tokens that are not padding. Source: Fedus et
    al. 2021
(arXiv:2101.03961), section 2.2; by probability: Megatron-Core's `moe_token_drop_policy=probs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron5d.comm.collectives import all_gather
from megatron5d.config.schema import ModelConfig
from megatron5d.kernels.dispatch import FirstOrderFunction, runs_triton, statistics_dtype
from megatron5d.kernels.gemm import accumulate_weight_grad
from megatron5d.kernels.routing import route, top_experts
from megatron5d.phases.wgrad import Defer, defer_weight_grad, grad_target, run_now
from megatron5d.topology.axis import Axis
from megatron5d.topology.init_weights import stream_key, uniform
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, state_of, unsharded


@dataclass(frozen=True)
class Jitter:
    """Multiplies what routers read by random factors, one for every token and feature.

    A factor depends on the seed, the layer, the token's sequence and place in it, and the feature:
    so it is the same on any layout, and when a forward is repeated. Source: Fedus et al. 2021
    (arXiv:2101.03961), appendix C.
    """

    amount: float  # factors lie between 1 - amount and 1 + amount
    seed: int  # of the run
    seq_len: int  # tokens of a sequence

    def __call__(self, x: Tensor, name: str, sample: Tensor, position: Tensor) -> Tensor:
        """
        Args:
            x: `[n, h]`.
            name: of the router.
            sample, position: int64 `[n]`, each token's sequence among all of the run, and its place
                in it.
        """
        token = sample * self.seq_len + position
        index = token[:, None] * x.shape[1] + torch.arange(x.shape[1], device=x.device)
        factors = 1 + self.amount * (
            2 * uniform(stream_key(self.seed, f"{name}.jitter"), index) - 1
        )
        return x * factors.to(x.dtype)


class _RouterLinear(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, weight, defer: Defer):
        ctx.weight, ctx.defer = weight, defer
        ctx.save_for_backward(x)
        wide = statistics_dtype(x.dtype)
        if x.dtype != wide:
            x, weight = x.to(wide), weight.to(wide)
        return F.linear(x, weight)  # [n, h] -> [n, E]

    @staticmethod
    def backward(ctx, dlogits):
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        wide = weight if weight.dtype == dlogits.dtype else weight.to(dlogits.dtype)
        dx = (dlogits @ wide).to(x.dtype)

        def weight_half():
            main_grad, accumulate = grad_target(weight)
            dtype = main_grad.dtype
            accumulate_weight_grad(main_grad, dlogits.to(dtype), x.to(dtype), accumulate=accumulate)

        defer_weight_grad(weight, ctx.defer, weight_half)
        return dx, None, None


class Router(nn.Module):
    """Scores every token's experts.

    Args:
        name: global name of the router.
        tp: ranks that hold the weight and see different tokens.
        biased: there is a bias per expert: a buffer, which balancing changes and no gradient.
        owner: this rank writes the bias to checkpoints.
    """

    bias: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        tp: Axis,
        *,
        biased: bool,
        owner: bool,
        dtype: torch.dtype,
        device,
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.num_experts, config.hidden_size)
        axes = (tp.name,) if tp.size > 1 else ()
        spec = ShardSpec(
            f"{name}.weight",
            shape,
            unsharded(shape, summed=axes, owner=tp.rank == 0),
            init=config.init_std,
        )
        self.weight = new_parameter(shape, spec, dtype, device)
        self.linear_bias = None
        if config.router_linear_bias:
            pieces = unsharded(shape[:1], summed=axes, owner=tp.rank == 0)
            spec = ShardSpec(f"{name}.linear_bias", shape[:1], pieces, decay=False)
            self.linear_bias = new_parameter(shape[:1], spec, dtype, device)
        bias = None
        if biased:
            bias = torch.zeros(config.num_experts, dtype=statistics_dtype(dtype), device=device)
            pieces = unsharded(tuple(bias.shape), owner=owner)
            spec = ShardSpec(f"{name}.bias", tuple(bias.shape), pieces, decay=False)
            state_of(bias).spec = spec
        self.register_buffer("bias", bias)

    def logits(self, x: Tensor, defer: Defer = run_now) -> Tensor:
        """Maps `[n, h]` -> `[n, E]` in fp32 or fp64."""
        logits = _RouterLinear.apply(x, self.weight, defer)
        return logits if self.linear_bias is None else logits + self.linear_bias.to(logits.dtype)

    def forward(self, logits: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """
        Args:
            logits: `[n, E]`.
            forced: int64 `[n, k]`, the experts to choose; None = by the scores.

        Returns:
            experts int64 `[n, k]`, the best first, and weights `[n, k]`, differentiable in the
            logits.
        """
        c = self.config
        if runs_triton(logits):
            if forced is None and c.top_groups < c.num_groups:
                forced = choose(scores_of(logits.detach(), c.router_score), c, self.bias)
            return route(
                logits,
                c.top_k,
                c.router_score,
                c.norm_topk_prob,
                c.routed_scaling_factor,
                self.bias,
                forced,
            )
        scores = scores_of(logits, c.router_score)
        experts = choose(scores, c, self.bias) if forced is None else forced
        return experts, weights_of(scores, experts, c)

    def extra_repr(self) -> str:
        c = self.config
        return f"{c.hidden_size} -> {c.top_k} of {c.num_experts}, {c.router_score}, bias={self.bias is not None}"


def scores_of(logits: Tensor, kind: str) -> Tensor:
    """Returns `[n, E]` scores: softmax, or sigmoid of each."""
    return torch.softmax(logits, dim=-1) if kind == "softmax" else torch.sigmoid(logits)


def choose(scores: Tensor, config: ModelConfig, bias: Tensor | None = None) -> Tensor:
    """Returns the k experts of each token, the best first; among equals the one with the lower
    index comes first.

    Args:
        scores: `[n, E]`.
        config: top_k and groups.
        bias: `[E]`, added for the choice.

    Returns:
        int64 `[n, k]`.
    """
    ranked = scores.detach()  # a choice has no gradient
    if bias is not None:
        ranked = ranked + bias
    if config.top_groups < config.num_groups:
        ranked = ranked.masked_fill(~in_best_groups(ranked, config), -torch.inf)
    return top_experts(ranked, config.top_k)


def round_robin(tokens: Tensor, config: ModelConfig) -> Tensor:
    """Returns the experts of tokens under moe.force_balanced: token i takes the k after those of
    token i - 1.

    Args:
        tokens: int64 `[n]`, their numbers.
        config: top_k and num_experts.

    Returns:
        int64 `[n, k]`.
    """
    return (
        tokens[:, None] * config.top_k + torch.arange(config.top_k, device=tokens.device)
    ) % config.num_experts


def in_best_groups(ranked: Tensor, config: ModelConfig) -> Tensor:
    """Returns bool `[n, E]`: whether an expert is in one of the groups that the token may choose
    from."""
    groups = ranked.unflatten(-1, (config.num_groups, -1))  # [n, G, E/G]
    if config.group_score == "max":
        worth = groups.amax(-1)
    else:
        worth = groups.topk(2, dim=-1).values.sum(-1)
    groups_taken = top_experts(worth, config.top_groups)  # [n, top_groups]
    allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, groups_taken, True)
    return allowed.repeat_interleave(groups.shape[-1], dim=1)


def weights_of(scores: Tensor, experts: Tensor, config: ModelConfig) -> Tensor:
    """Returns `[n, k]`: the weight of each chosen expert."""
    weights = scores.gather(1, experts)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (
        weights if config.routed_scaling_factor == 1.0 else weights * config.routed_scaling_factor
    )


def within_capacity(
    experts: Tensor,
    weights: Tensor,
    order: Tensor,
    num_experts: int,
    factor: float,
    by: str,
    axis: Axis,
) -> Tensor:
    """Returns which choices are within the experts' capacity.

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
    taken = _taken(
        choices[:, :k].long().flatten(), choices[:, k : 2 * k].flatten(), num_experts, factor, by
    )
    keep = torch.empty(everybody.shape[0], k, dtype=torch.bool, device=experts.device)
    keep[in_order] = taken.view(-1, k)
    return keep[axis.rank * n : (axis.rank + 1) * n]


def _taken(experts: Tensor, weights: Tensor, num_experts: int, factor: float, by: str) -> Tensor:
    """Returns bool per choice, choices in the order of their tokens."""
    if by == "probability":
        line = weights.argsort(descending=True, stable=True)
    else:
        line = torch.arange(experts.numel(), device=experts.device)
    # by expert, and for each expert those it keeps longest first
    line = line[experts[line].argsort(stable=True)]
    queue = experts[line]
    bounds = torch.searchsorted(queue, torch.arange(num_experts + 1, device=queue.device))
    place = torch.arange(queue.numel(), device=queue.device) - bounds[queue]
    limit = torch.ceil(factor * bounds[-1].double() / num_experts)  # bounds[-1] = T·k
    taken = torch.empty_like(queue, dtype=torch.bool)
    taken[line] = (place < limit) & (queue < num_experts)
    return taken

"""Chooses the experts of each token, weights them, and drops choices beyond a limited capacity.

    logits   x·Wᵀ, plus a trained bias if there is one, in fp32 (fp64 for a model in fp64)
    scores   softmax over the experts, or sigmoid of each
    choices  the k best scores, plus the bias if there is one, among experts of the best groups
    weights  the scores of the choices without the bias, optionally divided by their sum, times the
             scaling factor

Source: Shazeer et al. 2017 (arXiv:1701.06538); groups: DeepSeek-V2 (arXiv:2405.04434), section
    2.2.2; sigmoid scores and the bias: Wang et al. 2024 (arXiv:2408.15664), DeepSeek-V3
    (arXiv:2412.19437), section 2.1.2.

The capacity limits choices of the entire micro-batch, so that no layout changes which are dropped:
ceil(factor · T·k/E) choices per expert, for T tokens without padding. Tokens of equal states, such
as the first ones of documents, have equal probabilities up to the last bits, which depend on the
layout. So probabilities within 2⁻²⁰ of the last one that fits count as equal to it, and of these
choices those of earlier tokens are kept.
Source: Fedus et al. 2021 (arXiv:2101.03961), section 2.2; by probability: Megatron-Core's
    `moe_token_drop_policy=probs`.
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

SAME_PROBABILITY = 2.0**-20  # relative difference


@dataclass(frozen=True)
class Jitter:
    """Multiplies the routers' inputs by random factors, one for every token and feature.

    A factor depends on the seed, the layer, the token's sequence and position, and the feature. So
    no layout changes it, and a repeated forward uses it again. Source: Fedus et al. 2021
    (arXiv:2101.03961), appendix C.
    """

    amount: float  # factors are between 1 - amount and 1 + amount
    seed: int  # of the run
    seq_len: int  # tokens of a sequence

    def __call__(self, x: Tensor, name: str, sample: Tensor, position: Tensor) -> Tensor:
        """Multiplies x.

        Args:
            x: `[n, h]`.
            name: of the router.
            sample, position: int64 `[n]`, the number of each token's sequence among all of the run,
                and its position in it.
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

        def add_grad() -> None:
            main_grad, accumulate = grad_target(weight)
            dtype = main_grad.dtype
            accumulate_weight_grad(main_grad, dlogits.to(dtype), x.to(dtype), accumulate=accumulate)

        defer_weight_grad(weight, ctx.defer, add_grad)
        return dx, None, None


class Router(nn.Module):
    """Chooses and weights every token's experts.

    Args:
        config: of the model.
        name: global name of the router.
        tp: ranks that hold the weight and see different tokens.
        biased: whether each expert has a bias, a buffer that balancing changes, not a gradient.
        owner: whether this rank writes the bias to checkpoints.
        dtype, device: of the weight.
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
        summed = (tp.name,) if tp.size > 1 else ()  # each tp rank routes other tokens
        spec = ShardSpec(
            f"{name}.weight",
            shape,
            unsharded(shape, summed, owner=tp.rank == 0),
            init=config.init_std,
        )
        self.weight = new_parameter(shape, spec, dtype, device)
        self.linear_bias = None
        if config.router_linear_bias:
            pieces = unsharded(shape[:1], summed, owner=tp.rank == 0)
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
        """Computes logits: `[n, h]` -> `[n, E]` in fp32 or fp64."""
        logits = _RouterLinear.apply(x, self.weight, defer)
        return logits if self.linear_bias is None else logits + self.linear_bias.to(logits.dtype)

    def forward(self, logits: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chooses experts.

        Args:
            logits: `[n, E]`.
            forced: int64 `[n, k]`, the experts to choose; None = by their scores.

        Returns:
            Experts int64 `[n, k]`, the best first, and weights `[n, k]`, differentiable in the
            logits.
        """
        c = self.config
        if runs_triton(logits):
            if forced is None and c.top_groups < c.num_groups:
                forced = self.choose(logits)
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
        experts = choose_experts(scores, c, self.bias) if forced is None else forced
        return experts, weights_of(scores, experts, c)

    def choose(self, logits: Tensor) -> Tensor:
        """Chooses experts by their scores: `[n, E]` -> int64 `[n, k]`, the best first."""
        return choose_experts(
            scores_of(logits.detach(), self.config.router_score), self.config, self.bias
        )

    def extra_repr(self) -> str:
        c, has_bias = self.config, self.bias is not None
        return f"{c.hidden_size} -> {c.top_k} of {c.num_experts}, {c.router_score}, bias={has_bias}"


def scores_of(logits: Tensor, kind: str) -> Tensor:
    """Scores `[n, E]`: softmax over the experts, or sigmoid of each."""
    return torch.softmax(logits, dim=-1) if kind == "softmax" else torch.sigmoid(logits)


def choose_experts(scores: Tensor, config: ModelConfig, bias: Tensor | None = None) -> Tensor:
    """Chooses the k experts of each token, the best first; `top_experts` says which of equal ones.

    Args:
        scores: `[n, E]`.
        config: top_k and groups.
        bias: `[E]`, added for the choice only.

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
    """Experts under moe.force_balanced: token i takes the k experts after those of token i - 1.

    Args:
        tokens: int64 `[n]`, their indices.
        config: top_k and num_experts.

    Returns:
        int64 `[n, k]`.
    """
    choices = torch.arange(config.top_k, device=tokens.device)
    return (tokens[:, None] * config.top_k + choices) % config.num_experts


def in_best_groups(ranked: Tensor, config: ModelConfig) -> Tensor:
    """Whether each expert is in one of the token's best groups, bool `[n, E]`."""
    groups = ranked.unflatten(-1, (config.num_groups, -1))  # [n, G, E/G]
    if config.group_score == "max":
        group_scores = groups.amax(-1)
    else:
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
    best_groups = top_experts(group_scores, config.top_groups)  # [n, top_groups]
    is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, True)
    return is_best.repeat_interleave(groups.shape[-1], dim=1)


def weights_of(scores: Tensor, experts: Tensor, config: ModelConfig) -> Tensor:
    """Weights of the chosen experts, `[n, k]`."""
    weights = scores.gather(1, experts)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    factor = config.routed_scaling_factor
    return weights if factor == 1.0 else weights * factor


def within_capacity(
    experts: Tensor,
    weights: Tensor,
    order: Tensor,
    num_experts: int,
    factor: float,
    by: str,
    axis: Axis,
) -> Tensor:
    """Whether each choice is within its expert's capacity.

    Args:
        experts: int64 `[n, k]`; `num_experts` for no choice (padding).
        weights: `[n, k]`.
        order: int64 `[n]`, index of each token in the micro-batch, different for all of its tokens.
        num_experts: E.
        factor: moe.capacity_factor.
        by: which choices are kept: "probability" the most probable, of equal ones (up to
            SAME_PROBABILITY) those of earlier tokens; "position" those of earlier tokens.
        axis: ranks that share the micro-batch's tokens equally.

    Returns:
        bool `[n, k]`; False for padding.

    Comm: all_gather of 2k+1 fp64 numbers a token.
    """
    n, k = experts.shape
    local = torch.cat((experts.double(), weights.detach().double(), order[:, None].double()), dim=1)
    gathered = all_gather(local, axis)  # [n, 2k+1] -> [N, 2k+1]  all_gather cp_tp
    by_token = gathered[:, -1].argsort()
    choices = gathered[by_token]
    all_experts, all_weights = choices[:, :k].long().flatten(), choices[:, k : 2 * k].flatten()
    keep = torch.empty(gathered.shape[0], k, dtype=torch.bool, device=experts.device)
    keep[by_token] = _keep_choices(all_experts, all_weights, num_experts, factor, by).view(-1, k)
    return keep[axis.rank * n : (axis.rank + 1) * n]


def _keep_choices(
    experts: Tensor, weights: Tensor, num_experts: int, factor: float, by: str
) -> Tensor:
    """`within_capacity` of all choices `[N·k]`, in the order of their tokens."""
    if by == "position":
        weights = torch.zeros_like(weights)
    ranking = _ranking(experts, weights)
    all_experts = torch.arange(num_experts + 1, device=experts.device)
    starts = torch.searchsorted(experts[ranking], all_experts)
    limit = torch.ceil(factor * starts[-1].double() / num_experts).long()  # starts[-1] = T·k
    # The weight at the end of each expert's capacity; any other one if the expert is not full.
    ends = (starts + limit - 1).clamp(0, experts.numel() - 1)
    threshold = weights[ranking[ends]][experts]
    is_equal = (weights - threshold).abs() <= SAME_PROBABILITY * threshold
    ranking = _ranking(experts, torch.where(is_equal, threshold, weights))
    ranked_experts = experts[ranking]
    rank = torch.arange(experts.numel(), device=experts.device) - starts[ranked_experts]
    keep = torch.empty_like(ranked_experts, dtype=torch.bool)
    keep[ranking] = (rank < limit) & (ranked_experts < num_experts)
    return keep


def _ranking(experts: Tensor, weights: Tensor) -> Tensor:
    """Order of choices by expert, and of each expert by weight, the first to keep first."""
    ranking = weights.argsort(descending=True, stable=True)
    return ranking[experts[ranking].argsort(stable=True)]

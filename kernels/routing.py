"""Chooses experts: scores of a router's logits, the k best of each token, and their weights.

Of equal scores the lower expert wins, on every device. NaN counts as infinity. The last bits of a
score depend on the order of sums, and thus on the layout. So scores within `tolerance` of the best
count as equal to it. Rounding them instead could part two scores that are one bit apart.
"""

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import (
    FirstOrderFunction,
    jit,
    load_float32,
    next_power_of_2,
    rows_of,
    tl,
)


def tolerance(dtype: torch.dtype) -> float:
    """Relative difference up to which scores of a dtype count as equal; 8 units in fp32."""
    return 2.0**-40 if dtype == torch.float64 else 2.0**-20


@jit
def _scores(logits, KIND: tl.constexpr):
    """Computes the scores of a row of experts; lanes without an expert hold -inf as logits."""
    if KIND == "softmax":
        scores = tl.exp(logits - tl.max(logits, 0))
        scores /= tl.sum(scores, 0)
    elif KIND == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    return scores


@jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    num_experts,
    stride,
    scale,
    KIND: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BIASED: tl.constexpr,
    FORCED: tl.constexpr,
    TOLERANCE: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Finds the K best experts of a row, the best first, and their weights."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + row * stride + lane, lane < num_experts, other=float("-inf")).to(
        tl.float32
    )
    scores = _scores(logits, KIND)
    ranked = scores
    if BIASED:
        ranked += load_float32(bias_ptr + lane, lane < num_experts)
    # NaN equals nothing: without this, a row of NaN would choose an expert that does not exist, and
    # tokens would be copied from arbitrary memory.
    ranked = tl.where(ranked == ranked, ranked, float("inf"))
    is_used = lane >= num_experts
    slot = tl.arange(0, SLOTS)
    weights = tl.zeros((SLOTS,), tl.float32)
    # Take the best unused expert, K times.
    for j in tl.static_range(K):
        if FORCED:
            index = tl.load(experts_ptr + row * K + j).to(tl.int32)
        else:
            best = tl.max(tl.where(is_used, float("-inf"), ranked), 0)
            # An infinite best has no neighbors: inf - inf is NaN.
            is_best = (ranked >= best - TOLERANCE * tl.abs(best)) | (ranked == best)
            # Only unused lanes, so that a row of -inf still yields K different experts.
            index = tl.min(tl.where(is_best & ~is_used, lane, EXPERTS), 0)
            tl.store(experts_ptr + row * K + j, index)
            is_used = is_used | (lane == index)
        weights = tl.where(slot == j, tl.sum(tl.where(lane == index, scores, 0.0), 0), weights)
    if NORMALIZED:
        weights /= tl.sum(weights, 0) + 1e-20
    weights *= scale
    tl.store(weights_ptr + row * K + slot, weights, slot < K)


@jit
def _route_backward_kernel(
    logits_ptr,
    experts_ptr,
    dweights_ptr,
    dlogits_ptr,
    num_experts,
    stride,
    scale,
    KIND: tl.constexpr,
    NORMALIZED: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Computes the gradient of a row's logits from that of its weights.

    The weights are w = scale · s, or scale · s / (sum of s) if NORMALIZED, for the scores s of the
    chosen experts.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    scores = _scores(
        tl.load(logits_ptr + row * stride + lane, lane < num_experts, other=float("-inf")), KIND
    )
    gradient = tl.zeros((EXPERTS,), tl.float32)
    is_chosen = lane < 0
    for j in tl.static_range(K):
        is_choice = lane == tl.load(experts_ptr + row * K + j)
        gradient = tl.where(is_choice, tl.load(dweights_ptr + row * K + j) * scale, gradient)
        is_chosen = is_chosen | is_choice
    if NORMALIZED:
        # w = s / sum(s): dw/ds of the quotient, for the chosen experts only.
        total = tl.sum(tl.where(is_chosen, scores, 0.0), 0) + 1e-20
        gradient = tl.where(is_chosen, gradient - tl.sum(gradient * scores, 0) / total, 0.0) / total
    # Through the scores to the logits.
    if KIND == "softmax":
        gradient = scores * (gradient - tl.sum(gradient * scores, 0))
    else:
        gradient = scores * (1.0 - scores) * gradient
    tl.store(dlogits_ptr + row * num_experts + lane, gradient, lane < num_experts)


def _launch_route(
    logits: Tensor,
    k: int,
    kind: str,
    normalized: bool,
    scale: float,
    bias: Tensor | None,
    forced: Tensor | None,
) -> tuple[Tensor, Tensor]:
    n, num_experts = logits.shape
    weights = logits.new_empty(n, k)
    experts = weights.new_empty(n, k, dtype=torch.int64) if forced is None else forced.contiguous()
    pointers = (logits, logits if bias is None else bias, experts, weights)
    sizes = (num_experts, logits.stride(0), scale)
    config = _launch_config(num_experts, k, logits)
    config |= {"KIND": kind, "NORMALIZED": normalized, "FORCED": forced is not None}
    config["TOLERANCE"] = tolerance(torch.float32)
    config["BIASED"] = bias is not None and forced is None
    _route_kernel[(n,)](*pointers, *sizes, **config)
    return experts, weights


def _launch_config(num_experts: int, k: int, x: Tensor) -> dict:
    lanes = {"K": k, "EXPERTS": next_power_of_2(num_experts), "SLOTS": next_power_of_2(k)}
    return lanes | tuning.select("moe_topk", x.device)


class _Route(FirstOrderFunction):
    @staticmethod
    def forward(ctx, logits, *options):
        logits = rows_of(logits)
        experts, weights = _launch_route(logits, *options)
        ctx.options = options[:4]
        ctx.save_for_backward(logits, experts)
        ctx.mark_non_differentiable(experts)
        return experts, weights

    @staticmethod
    def backward(ctx, _, dweights):
        (logits, experts), (k, kind, normalized, scale) = ctx.saved_tensors, ctx.options
        n, num_experts = logits.shape
        dlogits = logits.new_empty(n, num_experts)
        pointers = (logits, experts, dweights.contiguous(), dlogits)
        config = _launch_config(num_experts, k, logits)
        config |= {"KIND": kind, "NORMALIZED": normalized}
        _route_backward_kernel[(n,)](*pointers, num_experts, logits.stride(0), scale, **config)
        return dlogits, *[None] * 6


def route(
    logits: Tensor,
    k: int,
    kind: str,
    normalized: bool,
    scale: float,
    bias: Tensor | None = None,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses experts by their scores and weights them, where `runs_triton` is true of the logits;
    `router.py` has the same in plain torch.

    Args:
        logits: `[n, E]`, fp32.
        k: number of experts per token.
        kind: softmax or sigmoid.
        normalized: the weights of a token add up to `scale`.
        scale: factor of the weights.
        bias: `[E]`, added to the scores for the choice only.
        forced: int64 `[n, k]`, the experts to choose; None = those of the largest scores.

    Returns:
        experts int64 `[n, k]`, the best first, and their weights `[n, k]`, differentiable in the
        logits.
    """
    return _Route.apply(logits, k, kind, normalized, scale, bias, forced)


def top_experts(scores: Tensor, k: int) -> Tensor:
    """Experts of each token's k largest scores, without a gradient.

    Args:
        scores: `[n, E]`, any floating dtype.
        k: number of experts per token, at most E.

    Returns:
        int64 `[n, k]`, the largest score first; of equal scores, up to `tolerance`, the lower
        expert wins, on every device.
    """
    if dispatch.runs_triton(scores):
        return _launch_route(rows_of(scores), k, "none", False, 1.0, None, None)[0]
    largest = torch.finfo(scores.dtype).max / 2
    ranked = scores.nan_to_num(largest, largest, -largest)
    experts = torch.empty(*scores.shape[:1], k, dtype=torch.int64, device=scores.device)
    for slot in range(k):
        best = ranked.amax(-1, keepdim=True)
        is_best = ranked >= best - tolerance(scores.dtype) * best.abs()
        experts[:, slot] = is_best.to(torch.uint8).argmax(-1)  # the first one
        ranked = ranked.scatter(-1, experts[:, slot, None], -torch.inf)
    return experts

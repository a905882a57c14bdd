"""Choosing experts: the scores of a router's logits, the k best of each token, and their weights.

Of equal scores the lower expert wins, on every device. NaN counts as infinity.
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


@jit
def _scores(logits, KIND: tl.constexpr):
    """Returns what a row of logits says of each expert; lanes without an expert hold -inf."""
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
    NORMALISED: tl.constexpr,
    BIASED: tl.constexpr,
    FORCED: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Finds the K best of a row, the best first, and their weights; of equals the one with the
    lower index.

    NaN counts as infinity.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + row * stride + lane, lane < num_experts, other=float("-inf")).to(
        tl.float32
    )
    scores = _scores(logits, KIND)
    ranked = scores
    if BIASED:
        ranked += load_float32(bias_ptr + lane, lane < num_experts)
    # NaN equals nothing, so a row of it would choose an expert that does not exist, whose rows lie
    # anywhere.
    ranked = tl.where(ranked == ranked, ranked, float("inf"))
    taken = lane >= num_experts
    slot = tl.arange(0, SLOTS)
    weights = tl.zeros((SLOTS,), tl.float32)
    for j in tl.static_range(K):
        if FORCED:
            index = tl.load(experts_ptr + row * K + j).to(tl.int32)
        else:
            best = tl.max(tl.where(taken, float("-inf"), ranked), 0)
            # Among the free lanes, so that a row of -inf still yields K different experts.
            index = tl.min(tl.where((ranked == best) & ~taken, lane, EXPERTS), 0)
            tl.store(experts_ptr + row * K + j, index)
            taken = taken | (lane == index)
        weights = tl.where(slot == j, tl.sum(tl.where(lane == index, scores, 0.0), 0), weights)
    if NORMALISED:
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
    NORMALISED: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Computes the gradient of a row's logits from that of its weights, w = s / sum of s for s of
    the chosen."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    scores = _scores(
        tl.load(logits_ptr + row * stride + lane, lane < num_experts, other=float("-inf")), KIND
    )
    gradient = tl.zeros((EXPERTS,), tl.float32)
    member = lane < 0
    for j in tl.static_range(K):
        mine = lane == tl.load(experts_ptr + row * K + j)
        gradient = tl.where(mine, tl.load(dweights_ptr + row * K + j) * scale, gradient)
        member = member | mine
    if NORMALISED:
        total = tl.sum(tl.where(member, scores, 0.0), 0) + 1e-20
        gradient = tl.where(member, gradient - tl.sum(gradient * scores, 0) / total, 0.0) / total
    if KIND == "softmax":
        gradient = scores * (gradient - tl.sum(gradient * scores, 0))
    else:
        gradient = scores * (1.0 - scores) * gradient
    tl.store(dlogits_ptr + row * num_experts + lane, gradient, lane < num_experts)


def _launch_route(logits: Tensor, k: int, kind: str, normalised: bool, scale: float, bias, forced):
    n, num_experts = logits.shape
    experts = (
        torch.empty(n, k, dtype=torch.int64, device=logits.device)
        if forced is None
        else forced.contiguous()
    )
    weights = torch.empty(n, k, dtype=logits.dtype, device=logits.device)
    inputs = (
        logits,
        logits if bias is None else bias,
        experts,
        weights,
        num_experts,
        logits.stride(0),
        scale,
    )
    flags = {"KIND": kind, "NORMALISED": normalised, "FORCED": forced is not None}
    flags["BIASED"] = bias is not None and forced is None
    _route_kernel[(n,)](*inputs, **flags, **_lanes(num_experts, k, logits))
    return experts, weights


def _lanes(num_experts: int, k: int, x: Tensor) -> dict[str, int]:
    lanes = {"K": k, "EXPERTS": next_power_of_2(num_experts), "SLOTS": next_power_of_2(k)}
    return lanes | tuning.select("moe_topk", x.device)


class _Route(FirstOrderFunction):
    @staticmethod
    def forward(ctx, logits, *how):
        logits = rows_of(logits)
        experts, weights = _launch_route(logits, *how)
        ctx.how = how[:4]
        ctx.save_for_backward(logits, experts)
        ctx.mark_non_differentiable(experts)
        return experts, weights

    @staticmethod
    def backward(ctx, _, dweights):
        (logits, experts), (k, kind, normalised, scale) = ctx.saved_tensors, ctx.how
        n, num_experts = logits.shape
        dlogits = torch.empty(n, num_experts, dtype=logits.dtype, device=logits.device)
        inputs = (
            logits,
            experts,
            dweights.contiguous(),
            dlogits,
            num_experts,
            logits.stride(0),
            scale,
        )
        _route_backward_kernel[(n,)](
            *inputs, KIND=kind, NORMALISED=normalised, **_lanes(num_experts, k, logits)
        )
        return dlogits, None, None, None, None, None, None


def route(
    logits: Tensor,
    k: int,
    kind: str,
    normalised: bool,
    scale: float,
    bias: Tensor | None = None,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses experts by their scores and weighs them, for tensors that `runs_triton`; `router.py`
    says it in torch.

    Args:
        logits: `[n, E]`, fp32.
        k: how many experts a token chooses.
        kind: softmax or sigmoid.
        normalised: the weights of a token add up to `scale`.
        scale: of the weights.
        bias: `[E]`, added to the scores for the choice.
        forced: int64 `[n, k]`, the experts to choose; None = the best.

    Returns:
        experts int64 `[n, k]`, the best first, and their weights `[n, k]`, differentiable in the
        logits.
    """
    return _Route.apply(logits, k, kind, normalised, scale, bias, forced)


def best(scores: Tensor, k: int) -> Tensor:
    """Returns the experts of each token's k largest scores, without a gradient.

    Args:
        scores: `[n, E]`, any floating dtype.
        k: how many experts a token chooses, at most E.

    Returns:
        int64 `[n, k]`, of the largest first; of equal scores the lower expert wins, on every
        device.
    """
    if dispatch.runs_triton(scores):
        return _launch_route(rows_of(scores), k, "none", False, 1.0, None, None)[0]
    return torch.sort(scores, dim=-1, descending=True, stable=True)[1][:, :k].contiguous()

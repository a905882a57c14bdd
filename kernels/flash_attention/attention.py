"""Attention without a stored score matrix, with its log-sum-exp, forward and backward.

The mathematics and the plain path are in `plain.py`. Forward and backward are linked by (out, lse)
alone: a ring of context-parallel ranks merges the partial outs by their lse, then asks for the
gradient of each block with the merged out and lse (Liu et al., arXiv:2310.01889, sec. 3).
"""

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from megatron5d.kernels import choice, dispatch
from megatron5d.kernels.choice import AUTO, AttentionRequest, Settings
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.kernels.flash_attention import plain
from megatron5d.kernels.flash_attention.plain import AttentionRule


def _check(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> None:
    (s, b, a, d), (t, _, g, _) = q.shape, k.shape
    if a % g or g != v.shape[2]:
        raise ValueError(
            f"{a} query heads require a divisor of {a} as the number of key and value heads "
            f"(got {g} and {v.shape[2]})"
        )
    if d != k.shape[3] or b != k.shape[1] or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            "attention requires q [s, b, a, d], k [t, b, g, d], v [t, b, g, dv] "
            f"(got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)})"
        )
    if rule.window is not None and rule.window < 1:
        raise ValueError(f"a sliding window requires at least 1 token (got {rule.window})")
    if rule.documents is not None and rule.k_documents is None and t != s:
        raise ValueError(f"documents of {s} queries and {t} keys require k_documents as well")
    # Kernels read this many elements, whatever the tensors hold.
    shapes = {"documents": (b, s), "k_documents": (b, t), "q_positions": (s,), "k_positions": (t,)}
    for name, shape in shapes.items():
        tensor = getattr(rule, name)
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} requires shape {shape} (got {tuple(tensor.shape)})")


def _without_idle_window(rule: AttentionRule, s: int, t: int) -> AttentionRule:
    """Drops a window that hides nothing: it could overflow sums with positions, and costs time."""
    if rule.window is None or rule.window < max(s, t):
        return rule
    has_positions = rule.q_positions is not None or rule.k_positions is not None
    return rule if has_positions else replace(rule, window=None)


def _without_idle_positions(rule: AttentionRule, s: int, t: int) -> AttentionRule:
    """Drops positions that mean an aligned causal mask, or none, which the fast kernels support."""
    if not rule.causal or rule.window is not None or not s or not t:
        return rule
    if rule.q_positions is rule.k_positions is None:
        return rule
    q_at = torch.arange(s) if rule.q_positions is None else rule.q_positions
    k_at = torch.arange(t) if rule.k_positions is None else rule.k_positions
    if q_at.is_meta or k_at.is_meta:
        return rule
    if k_at.max() <= q_at.min():
        return replace(rule, causal=False, q_positions=None, k_positions=None)
    in_order = bool((q_at[1:] - q_at[:-1] == 1).all() and (k_at[1:] - k_at[:-1] == 1).all())
    if in_order and q_at[0] == k_at[0]:
        return replace(rule, q_positions=None, k_positions=None)
    return rule


def _runs_cpu_flash(q: Tensor) -> bool:
    """Whether torch's CPU kernel runs: on the CPU, and on meta tensors if no GPU is planned for."""
    return q.is_cpu or (q.is_meta and dispatch.PLANNED.get() is None)


def _runs_triton(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    if not (dispatch.runs_triton(q) and k.numel()):
        return False
    # The files of kernels are imported where they run: a run on CPUs does without them.
    from megatron5d.kernels.flash_attention.tiles import supports

    return supports(q, v, rule)


def _library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    settings: Settings,
    *,
    sinks: bool,
    backward: bool,
) -> ModuleType | None:
    """Module of the library that computes this (`providers/`); None = Triton or the plain path."""
    if not (capability := choice.capability_of(q)) or not k.numel():
        return None
    request = AttentionRequest(
        capability,
        backward,
        q.dtype,
        tuple(q.shape),
        tuple(k.shape),
        v.shape[3],
        rule.causal,
        rule.window,
        rule.softcap,
        rule.documents is not None,
        rule.q_positions is not None or rule.k_positions is not None,
        sinks,
    )
    return choice.provider(request, settings)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    library = _library(q, k, v, rule, settings, sinks=sinks is not None, backward=False)
    if library is not None:
        return library.forward(q, k, v, rule, sinks)
    if _runs_triton(q, k, v, rule):
        from megatron5d.kernels.flash_attention import forward as triton_forward

        return triton_forward.forward(q, k, v, rule, sinks)
    if q.numel() and k.numel() and _runs_cpu_flash(q):
        rule = _without_idle_positions(rule, q.shape[0], k.shape[0])
        if rule.is_plain and sinks is None:
            return plain.cpu_flash_forward(q, k, v, rule)
    return plain.chunked_forward(q, k, v, rule, sinks)


def _backward(
    dout, q, k, v, out, lse, rule: AttentionRule, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    library = _library(q, k, v, rule, settings, sinks=False, backward=True)
    if library is not None:
        return library.backward(dout, q, k, v, out, lse, rule, settings.deterministic)
    if _runs_triton(q, k, v, rule):
        from megatron5d.kernels.flash_attention import backward as triton_backward

        return triton_backward.backward(dout, q, k, v, out, lse, rule)
    if q.numel() and k.numel() and _runs_cpu_flash(q):
        rule = _without_idle_positions(rule, q.shape[0], k.shape[0])
        if rule.is_plain and (lse.is_meta or bool(lse.isfinite().all())):
            return plain.cpu_flash_backward(dout, q, k, v, out, lse, rule)
    return plain.chunked_backward(dout, q, k, v, out, lse, rule)


class _Attention(FirstOrderFunction):
    @staticmethod
    def forward(ctx, q, k, v, sinks, rule, settings):
        out, lse = _forward(q, k, v, rule, sinks, settings)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.rule, ctx.settings = rule, settings
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward(dout, q, k, v, out, lse, ctx.rule, ctx.settings)
        dsinks = None if sinks is None else sink_gradient(dout, out, lse, sinks)
        return dq, dk, dv, dsinks, None, None


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of sinks: -sum of probability · delta, with probability exp(sink - lse), value 0."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).permute(1, 2, 0)  # [b, a, s]
    probability = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)


def documents_from_cu_seqlens(cu_seqlens: Tensor, length: int) -> Tensor:
    """`documents` of one packed row from its cumulative lengths, without a host sync.

    Args:
        cu_seqlens: `[n + 1]` int32 or int64, not decreasing from 0; document i holds tokens
            [cu_seqlens[i], cu_seqlens[i + 1]).
        length: tokens of the row; those past the last boundary form one more document.

    Returns:
        int32 `[1, length]` on the same device.

    Raises:
        ValueError: cu_seqlens is not a vector of integers.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            "cu_seqlens requires a vector of integers "
            f"(got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)})"
        )
    at = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, at, right=True, out_int32=True)[None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    settings: Settings = AUTO,
) -> tuple[Tensor, Tensor]:
    """Computes scaled dot-product attention with grouped heads, and its log-sum-exp.

    Args:
        q: `[s, b, a, d]`.
        k: `[t, b, g, d]`; g divides a, query head i uses key head i // (a/g).
        v: `[t, b, g, dv]`; dv may differ from d.
        scale: factor on the scores, usually 1/sqrt(d).
        causal: a query sees keys at its position and before.
        documents: `[b, s]` integers: a query sees only keys of the same document
            (`documents_from_cu_seqlens`).
        k_documents: `[b, t]`, where the keys are other tokens than the queries.
        window: a query sees keys less than this many positions away.
        softcap: if not 0, scores become softcap · tanh(score / softcap).
        sinks: `[a]` logits of a key without value that every query sees.
        q_positions: `[s]` integers, default 0, 1, ...; used by `causal` and `window`.
        k_positions: `[t]` integers, default 0, 1, ...
        settings: which library may compute it on a GPU.

    Returns:
        out `[s, b, a, dv]` in the dtype of q, differentiable; lse `[b, a, s]` float32 (float64 for
        float64), natural logarithm, not differentiable. A query that sees nothing has out 0 and lse
        -inf.

    Raises:
        ValueError: the shapes do not fit, or the window is empty.
    """
    rule = AttentionRule(
        scale, causal, window, softcap, documents, k_documents, q_positions, k_positions
    )
    _check(q, k, v, rule)
    rule = _without_idle_window(rule, q.shape[0], k.shape[0])
    # With torch's own CPU kernel autograd does without a Function of ours: every query sees a key.
    # Not in half precision, whose backward `cpu_flash_backward` computes in float32.
    on_cpu = _runs_cpu_flash(q) and not (choice.capability_of(q) or dispatch.runs_triton(q))
    on_cpu = on_cpu and q.dtype not in dispatch.HALF_DTYPES
    if on_cpu and sinks is None and rule.is_plain and q.numel() and k.numel():
        return plain.cpu_flash_forward(q, k, v, rule)
    return _Attention.apply(q, k, v, sinks, rule, settings)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool = True,
    documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    settings: Settings = AUTO,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dk, dv and the contribution to dq of these keys, given the *global* out and lse.

    Args:
        dout: `[s, b, a, dv]`, gradient of the global out.
        q: as in `attention`; so are k, v and the keyword arguments.
        k: `[t, b, g, d]`, all keys or a block of those that `out` attends to.
        v: `[t, b, g, dv]`.
        out: `[s, b, a, dv]`, merged over all keys.
        lse: `[b, a, s]`, merged over all keys.

    Returns:
        dq (to be summed over blocks of keys), dk, dv, in the dtypes of q, k, v.
    """
    rule = AttentionRule(
        scale, causal, window, softcap, documents, k_documents, q_positions, k_positions
    )
    _check(q, k, v, rule)
    rule = _without_idle_window(rule, q.shape[0], k.shape[0])
    return _backward(dout, q, k, v, out, lse, rule, settings)

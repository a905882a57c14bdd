"""Attention that never holds the score matrix, with its log-sum-exp, forward and backward.

The math and the plain path stand in `plain.py`. Forward and backward both speak in (out, lse): a
ring of context-parallel ranks merges the partial outs by their lse and then asks for the gradient
of each block with the merged out and lse (Liu et al., arXiv:2310.01889, sec. 3).
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
    if q.shape[2] % k.shape[2] or k.shape[2] != v.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key and {v.shape[2]} value heads evenly"
        )
    if q.shape[3] != k.shape[3] or q.shape[1] != k.shape[1] or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not belong together"
        )
    if rule.window is not None and rule.window < 1:
        raise ValueError(f"a sliding window holds at least the token itself; {rule.window} < 1")
    if rule.documents is not None and rule.k_documents is None and k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{q.shape[0]} queries and {k.shape[0]} keys: give k_documents beside documents"
        )
    if rule.documents is rule.k_documents is rule.q_positions is rule.k_positions is None:
        return
    (s, b), t = q.shape[:2], k.shape[0]
    shapes = {"documents": (b, s), "k_documents": (b, t), "q_positions": (s,), "k_positions": (t,)}
    for name, shape in shapes.items():  # kernels read as much as that, whatever is there
        given = getattr(rule, name)
        if given is not None and given.shape != shape:
            raise ValueError(
                f"{name} must be {shape} for q {tuple(q.shape)} and k {tuple(k.shape)}: {tuple(given.shape)}"
            )


def _open(rule: AttentionRule, s: int, t: int) -> AttentionRule:
    """Drops a window that closes nowhere: its sums with positions could overflow, and its mask
    costs time."""
    hides_nothing = rule.window is not None and rule.window >= max(s, t)
    return (
        replace(rule, window=None)
        if hides_nothing and rule.q_positions is rule.k_positions is None
        else rule
    )


def _aligned(rule: AttentionRule, s: int, t: int) -> AttentionRule:
    """Drops the positions where they mean no more than an aligned causal mask, or none: the fast
    kernels know those."""
    if (
        not rule.causal
        or rule.window is not None
        or (rule.q_positions is None and rule.k_positions is None)
    ):
        return rule
    q_at = torch.arange(s) if rule.q_positions is None else rule.q_positions
    k_at = torch.arange(t) if rule.k_positions is None else rule.k_positions
    if not s or not t or q_at.is_meta or k_at.is_meta:
        return rule
    if k_at.max() <= q_at.min():
        return replace(rule, causal=False, q_positions=None, k_positions=None)
    in_order = bool((q_at[1:] - q_at[:-1] == 1).all() and (k_at[1:] - k_at[:-1] == 1).all())
    starts_alike = in_order and bool(q_at[0] == k_at[0])
    return replace(rule, q_positions=None, k_positions=None) if starts_alike else rule


def _runs_cpu_flash(q: Tensor) -> bool:
    """Says whether torch's CPU kernel runs: on the CPU, and on the meta device if no GPU is planned
    for."""
    return q.is_cpu or (q.is_meta and dispatch.PLANNED.get() is None)


def _runs_triton(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    if not (dispatch.runs_triton(q) and k.numel()):
        return False
    from megatron5d.kernels.flash_attention.tiles import takes

    return takes(q, v, rule)


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
    """Returns the file of the library that computes this (`providers/`); None = Triton, or the
    plain path."""
    if not (capability := choice.capability_of(q)) or not k.numel():
        return None
    positions = rule.q_positions is not None or rule.k_positions is not None
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
        positions,
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
        rule = _aligned(rule, q.shape[0], k.shape[0])
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
        rule = _aligned(rule, q.shape[0], k.shape[0])
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
    """Computes -sum of probability · delta: a sink has probability exp(sink - lse) and value 0."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).permute(1, 2, 0)  # [b, a, s]
    probability = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)


def documents_from_cu_seqlens(cu_seqlens: Tensor, length: int) -> Tensor:
    """Returns the `documents` of one packed row whose boundaries are given as cumulative lengths,
    without a host sync.

    Args:
        cu_seqlens: `[n + 1]` int32 or int64, not decreasing from 0; document i holds tokens
            cu_seqlens[i] to cu_seqlens[i + 1], that one not included.
        length: tokens of the row; those past the last boundary make one document more.

    Returns:
        int32 `[1, length]` on the same device.

    Raises:
        ValueError: not a vector of integers.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens is a vector of integers, not {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
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
        causal: a query sees keys at its own position and before.
        documents: `[b, s]` integers: a query sees only keys of its own document
            (`documents_from_cu_seqlens`).
        k_documents: `[b, t]`, where the keys are not the queries' own tokens.
        window: a query sees keys less than this many positions away, itself counted.
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
        ValueError: shapes that do not belong together, or an empty window.
    """
    rule = AttentionRule(
        scale, causal, window, softcap, documents, k_documents, q_positions, k_positions
    )
    _check(q, k, v, rule)
    rule = _open(rule, q.shape[0], k.shape[0])
    on_cpu = _runs_cpu_flash(q) and not (choice.capability_of(q) or dispatch.runs_triton(q))
    on_cpu = on_cpu and q.dtype not in dispatch.HALF_DTYPES  # whose backward is in float32
    if on_cpu and sinks is None and rule.is_plain and q.numel() and k.numel():
        # differentiable as it is: every query sees a key
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
    """Computes the share of dq, and the dk and dv, that come from these keys, given the *global*
    out and lse.

    Args:
        dout: `[s, b, a, dv]`, gradient of the global out.
        q: as in `attention`; so are k, v and the keyword arguments.
        k: `[t, b, g, d]`, perhaps only a part of the keys that made `out`.
        v: `[t, b, g, dv]`.
        out: `[s, b, a, dv]`, merged over all keys.
        lse: `[b, a, s]`, merged over all keys.

    Returns:
        dq (to be summed over the parts), dk, dv, in the dtypes of q, k, v.
    """
    rule = AttentionRule(
        scale, causal, window, softcap, documents, k_documents, q_positions, k_positions
    )
    _check(q, k, v, rule)
    rule = _open(rule, q.shape[0], k.shape[0])
    return _backward(dout, q, k, v, out, lse, rule, settings)

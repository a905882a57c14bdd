"""Attention in plain torch: a reference, and paths for the CPU that use bounded memory.

    scores = cap(scale · q kᵀ) where visible, -inf elsewhere
    out = softmax(scores) v,  lse = logsumexp(scores)
Backward from out and lse (Dao, arXiv:2307.08691, algorithm 2), with P = exp(scores - lse) and
delta = rowsum(dout ∘ out):
    dv = Pᵀ dout,   dS = P ∘ (dout vᵀ - delta),   dq = scale · dS k,   dk = scale · dSᵀ q
Because P follows from lse alone, the same formulas give the contribution of one block of keys when
out and lse are merged over all blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.kernels.dispatch import statistics_dtype

QUERY_BLOCK = 256
_FLASH = torch._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class AttentionRule:
    """Mask, scale and soft-cap of an attention, as in `flash_attention.attention`.

    `documents` are those of the queries, `k_documents` of the keys (None = the queries');
    positions default to 0, 1, 2, ...
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float = 0.0
    documents: Tensor | None = None
    k_documents: Tensor | None = None
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the mask is an aligned causal one or none, without a soft-cap."""
        positions = self.causal and (self.q_positions is not None or self.k_positions is not None)
        return (
            self.window is None and self.softcap == 0.0 and self.documents is None and not positions
        )

    def visible(self, queries: slice, num_keys: int, device: torch.device) -> Tensor | None:
        """Mask `[b|1, 1, 1, queries, t]` bool of a slice of queries; None if they see all keys."""
        if not self.causal and self.window is None and self.documents is None:
            return None
        shape = (1, 1, 1, queries.stop - queries.start, num_keys)
        mask = torch.ones(shape, dtype=torch.bool, device=device)
        q_at = torch.arange(queries.start, queries.stop, device=device)
        if self.q_positions is not None:
            q_at = self.q_positions[queries]
        k_at = (
            torch.arange(num_keys, device=device) if self.k_positions is None else self.k_positions
        )
        distance = q_at[:, None] - k_at[None, :]
        if self.causal:
            mask = mask & (distance >= 0)
        if self.window is not None:
            mask = mask & (distance.abs() < self.window)
        if self.documents is not None:
            k_documents = self.documents if self.k_documents is None else self.k_documents
            q_documents = self.documents[:, None, None, queries, None]
            mask = mask & (q_documents == k_documents[:, None, None, None, :])
        return mask


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None = None
):
    """Computes attention from the full score matrix, by autograd: the other paths' reference.

    Args:
        q: `[s, b, a, d]`.
        k: `[t, b, g, d]`.
        v: `[t, b, g, dv]`.
        rule: mask, scale and soft-cap.
        sinks: `[a]` logits of a key that every query sees and that has no value, or None.

    Returns:
        out `[s, b, a, dv]`, lse `[b, a, s]` in float32 (float64 for float64).
        A query that sees nothing has out 0, lse -inf.
    """
    wide = statistics_dtype(q.dtype)
    s, b, a, _ = q.shape
    t, g = k.shape[0], k.shape[2]
    grouped_q = q.to(wide).unflatten(2, (g, a // g))
    scores, _ = _block_scores(grouped_q, k.to(wide), rule, slice(0, s))
    if sinks is not None:
        sink_scores = sinks.to(wide).view(1, g, a // g, 1, 1).expand(b, g, a // g, s, 1)
        scores = torch.cat((scores, sink_scores), dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    finite = lse.isfinite()
    probabilities = (scores - lse.where(finite, 0).unsqueeze(-1)).exp()[..., :t]
    out = torch.einsum("bgrst,tbgd->sbgrd", probabilities, v.to(wide))
    return out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2)


def _block_scores(
    q: Tensor, k: Tensor, rule: AttentionRule, queries: slice
) -> tuple[Tensor, Tensor | None]:
    """Masked scores `[b, g, r, block, t]` of some queries, and tanh(score / softcap) or None."""
    scores = torch.einsum("sbgrd,tbgd->bgrst", q, k) * rule.scale
    tanh = None
    if rule.softcap:
        tanh = torch.tanh(scores / rule.softcap)
        scores = rule.softcap * tanh
    mask = rule.visible(queries, k.shape[0], q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores, tanh


def _query_blocks(s: int):
    return (slice(lo, min(lo + QUERY_BLOCK, s)) for lo in range(0, s, QUERY_BLOCK))


def chunked_forward(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None):
    """Computes `attention_reference` without autograd, with the scores of `QUERY_BLOCK` queries at
    a time."""
    wide = statistics_dtype(q.dtype)
    s, b, a, _ = q.shape
    g = k.shape[2]
    out = torch.zeros(s, b, a, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full((b, a, s), float("-inf"), dtype=wide, device=q.device)
    k, v = k.to(wide), v.to(wide)
    for queries in _query_blocks(s):
        scores, _ = _block_scores(q[queries].to(wide).unflatten(2, (g, a // g)), k, rule, queries)
        block_lse = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            block_lse = torch.logaddexp(block_lse, sinks.to(wide).view(1, g, a // g, 1))
        p = (scores - block_lse.where(block_lse.isfinite(), 0).unsqueeze(-1)).exp_()
        out[queries] = torch.einsum("bgrst,tbgd->sbgrd", p, v).flatten(2, 3).to(q.dtype)
        lse[:, :, queries] = block_lse.flatten(1, 2)
    return out, lse


def chunked_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionRule
):
    """Computes dq, dk, dv of a block of keys from the global out and lse, `QUERY_BLOCK` queries at
    a time."""
    wide = statistics_dtype(q.dtype)
    a, g = q.shape[2], k.shape[2]
    heads = (g, a // g)
    dq = torch.empty_like(q)
    wide_k, wide_v = k.to(wide), v.to(wide)
    dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for queries in _query_blocks(q.shape[0]):
        block_q = _grouped(q[queries], wide, heads)
        block_dout = _grouped(dout[queries], wide, heads)
        delta = (block_dout * _grouped(out[queries], wide, heads)).sum(-1).permute(1, 2, 3, 0)
        scores, tanh = _block_scores(block_q, wide_k, rule, queries)
        p = _probabilities(scores, lse[:, :, queries].to(wide).unflatten(1, heads))
        dv += torch.einsum("bgrst,sbgrd->tbgd", p, block_dout)
        ds = p * (torch.einsum("sbgrd,tbgd->bgrst", block_dout, wide_v) - delta.unsqueeze(-1))
        if tanh is not None:
            ds = ds * (1 - tanh.square())
        ds = ds * rule.scale
        dq[queries] = torch.einsum("bgrst,tbgd->sbgrd", ds, wide_k).flatten(2, 3).to(q.dtype)
        dk += torch.einsum("bgrst,sbgrd->tbgd", ds, block_q)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _grouped(x: Tensor, dtype: torch.dtype, heads: tuple[int, int]) -> Tensor:
    """`[s, b, a, d]` -> `[s, b, g, a/g, d]`, in another dtype."""
    return x.to(dtype).unflatten(2, heads)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores − lse), 0 in rows that see nothing; overwrites no argument."""
    return (scores - lse.where(lse.isfinite(), float("inf")).unsqueeze(-1)).exp_()


def _heads_first(x: Tensor, dim: int) -> Tensor:
    """Permutes `[s, b, a, d]` -> `[b, a, s, dim]`, zero-padded to one head dim for all."""
    x = x.permute(1, 2, 0, 3)
    return x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1]))


def cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule):
    """Runs torch's own CPU flash kernel, for a plain rule, in O(s) memory."""
    dim, value_dim = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = _heads_first(q, dim), _heads_first(k, dim), _heads_first(v, dim)
    out, lse = _FLASH(q, k, v, 0.0, rule.causal, scale=rule.scale)
    out = out if value_dim == dim else out[..., :value_dim]
    return out.permute(2, 0, 1, 3).contiguous(), lse


def cpu_flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionRule
):
    """Computes the backward of `cpu_flash_forward` from a given out and lse, at least in float32.

    torch's bfloat16 backward takes up to fifteen times as long on a CPU without bfloat16 units.
    """
    dim, wide = max(q.shape[-1], v.shape[-1]), statistics_dtype(q.dtype)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_heads_first(x, dim).to(wide) for x in (dout, q, k, v, out)),
        lse,
        0.0,
        rule.causal,
        scale=rule.scale,
    )
    pairs = ((dq, q), (dk, k), (dv, v))
    return tuple(
        d[..., : x.shape[-1]].permute(2, 0, 1, 3).to(x.dtype).contiguous() for d, x in pairs
    )

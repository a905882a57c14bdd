"""The forward of attention in Triton: one program per block of queries and head, walking over
blocks of keys.

Online softmax (Milakov & Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691, algorithm 1), in base
2: with c = scale / ln 2,
    m' = max(m, c max_j s_j),  l' = l 2^(m - m') + sum_j 2^(c s_j - m'),  o' = o 2^(m - m') + sum_j 2^(c s_j - m') v_j
    out = o / l,  lse = ln 2 (m + log2 l)
A sink is a key of known logit and no value: it only sets the first m and l.
"""

import torch
from torch import Tensor

from megatron5d.kernels import tuning
from megatron5d.kernels.dispatch import cdiv, jit, next_power_of_2, tl
from megatron5d.kernels.flash_attention.mask import (
    among_keys,
    at_edges,
    documents,
    key_range,
    key_spans,
    loop_bounds,
    needs_spans,
    positions,
    up_to_last_key,
    visible,
)
from megatron5d.kernels.flash_attention.plain import AttentionRule
from megatron5d.kernels.flash_attention.tiles import (
    COUNTS,
    aligned,
    capped,
    flags,
    kernel_scale,
    mask_inputs,
    reach,
    sources,
    tile,
    tuning_key,
)


@jit
def _following(place, span, MASKED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Finds the first key of the block that is attended to after that at `place`: edges first, then
    those between."""
    following = place + BLOCK_N
    if MASKED:
        if SPLIT:
            following = at_edges(following, span)
        following = tl.where(following < span[3], following, span[1])
    return tl.multiple_of(following, BLOCK_N)


@jit
def _attend(
    out,
    total,
    peak,
    scores,
    q,
    k_source,
    k_layout,
    v_source,
    v_layout,
    batch,
    k_head,
    span,
    num_keys,
    q_at,
    q_document,
    k_at_ptr,
    k_document_ptr,
    scale,
    softcap,
    window,
    MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_K_POSITIONS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    """Adds the keys of a span to the running out, total and peak: its edges where MASKED, else what
    lies between them.

    With AHEAD `scores` are those of the first block of keys, and on return those of the block after
    the last one: while the tensor cores multiply queries with the next block of keys, the other
    units take this one's exponentials.
    """
    begin, end = loop_bounds(span, MASKED, SPLIT, True)
    for place in tl.range(begin, end, BLOCK_N):
        first = tl.multiple_of(at_edges(place, span) if MASKED and SPLIT else place, BLOCK_N)
        needed = _following(place, span, MASKED, SPLIT, BLOCK_N) if AHEAD else first
        if MASKED:
            key = first + tl.arange(0, BLOCK_N)
            k_at = positions(k_at_ptr, key, num_keys, HAS_K_POSITIONS)[None, :]
            k_document = documents(k_document_ptr, batch, key, num_keys, -2, HAS_DOCUMENTS)[None, :]
            seen = visible(
                q_at, k_at, q_document, k_document, window, CAUSAL, HAS_WINDOW, HAS_DOCUMENTS
            )
            seen = among_keys(seen, key, num_keys, CAUSAL, HAS_WINDOW, HAS_K_POSITIONS)
        multiplied = tl.dot(q, tile(k_source, k_layout, needed, batch, k_head, BLOCK_N, D, REACH).T)
        if not AHEAD:
            scores = multiplied
        if HAS_SOFTCAP:
            scores = capped(scores, scale, softcap, True)
        if MASKED:
            scores = tl.where(seen, scores, float("-inf"))
        # The scale is positive: it may wait for the maximum, and then costs nothing beside the
        # subtraction.
        factor = 1.0 if HAS_SOFTCAP else scale
        grown = tl.maximum(peak, tl.max(scores, 1) * factor)
        # A query that has seen nothing yet has peak -inf; taking it as 0 keeps 2^(-inf - -inf) out.
        base = tl.where(grown == float("-inf"), 0.0, grown) if MASKED else grown
        p = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, 1)
        out = out * shrink[:, None]
        v = tile(v_source, v_layout, first, batch, k_head, BLOCK_N, DV, REACH)
        out = tl.dot(p.to(v.dtype), v, out)
        peak = grown
        scores = multiplied
    return out, total, peak, scores


@jit(do_not_specialize=COUNTS)
def _forward_kernel(
    q_source,
    q_layout,
    k_source,
    k_layout,
    v_source,
    v_layout,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    q_at_ptr,
    k_at_ptr,
    q_document_ptr,
    k_document_ptr,
    spans_ptr,
    span_stride,
    num_queries,
    num_keys,
    num_batch,
    num_heads,
    group,
    v_dim,
    scale,
    softcap,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_Q_POSITIONS: tl.constexpr,
    HAS_K_POSITIONS: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    # Under a causal mask the last queries see most keys: they start first, so that no long program
    # is left for the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    k_head = head // group
    first = block * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    q = tile(q_source, q_layout, first, batch, head, BLOCK_M, D, REACH)
    q_at = positions(q_at_ptr, query, num_queries, HAS_Q_POSITIONS)[:, None]
    q_at = up_to_last_key(q_at, num_keys, CAUSAL, HAS_WINDOW, HAS_K_POSITIONS)
    q_document = documents(q_document_ptr, batch, query, num_queries, -1, HAS_DOCUMENTS)[:, None]

    out = tl.zeros((BLOCK_M, DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if HAS_SINKS:
        peak = (
            tl.zeros((BLOCK_M,), tl.float32)
            + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        )
        total += 1.0

    span = key_range(
        spans_ptr,
        span_stride,
        batch,
        block,
        num_keys,
        window,
        CAUSAL,
        HAS_WINDOW,
        HAS_SPANS,
        BLOCK_M,
        BLOCK_N,
    )
    SPLIT: tl.constexpr = HAS_WINDOW or HAS_SPANS
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if AHEAD:
        begin, _ = loop_bounds(span, True, SPLIT, True)
        needed = _following(begin - BLOCK_N, span, True, SPLIT, BLOCK_N)
        scores = tl.dot(q, tile(k_source, k_layout, needed, batch, k_head, BLOCK_N, D, REACH).T)
    out, total, peak, scores = _attend(
        out,
        total,
        peak,
        scores,
        q,
        k_source,
        k_layout,
        v_source,
        v_layout,
        batch,
        k_head,
        span,
        num_keys,
        q_at,
        q_document,
        k_at_ptr,
        k_document_ptr,
        scale,
        softcap,
        window,
        True,
        AHEAD,
        SPLIT,
        CAUSAL,
        HAS_WINDOW,
        HAS_SOFTCAP,
        HAS_DOCUMENTS,
        HAS_K_POSITIONS,
        BLOCK_N,
        D,
        DV,
        REACH,
    )
    out, total, peak, scores = _attend(
        out,
        total,
        peak,
        scores,
        q,
        k_source,
        k_layout,
        v_source,
        v_layout,
        batch,
        k_head,
        span,
        num_keys,
        q_at,
        q_document,
        k_at_ptr,
        k_document_ptr,
        scale,
        softcap,
        window,
        False,
        AHEAD,
        SPLIT,
        CAUSAL,
        HAS_WINDOW,
        HAS_SOFTCAP,
        HAS_DOCUMENTS,
        HAS_K_POSITIONS,
        BLOCK_N,
        D,
        DV,
        REACH,
    )

    saw_nothing = total == 0.0
    out = out / tl.where(saw_nothing, 1.0, total)[:, None]
    lse = tl.where(
        saw_nothing,
        float("-inf"),
        (peak + tl.log2(tl.where(saw_nothing, 1.0, total))) * 0.6931471805599453,
    )
    is_query = query < num_queries
    row = (query.to(tl.int64) * num_batch + batch) * num_heads + head
    column = tl.arange(0, DV)
    live = is_query[:, None] & (column < v_dim)[None, :]
    tl.store(
        out_ptr + row[:, None] * v_dim + column[None, :], out.to(out_ptr.dtype.element_ty), live
    )
    tl.store(lse_ptr + (batch.to(tl.int64) * num_heads + head) * num_queries + query, lse, is_query)


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes out `[s, b, a, dv]` and lse `[b, a, s]` float32, as `flash_attention.attention`
    describes them."""
    q, k, v = (aligned(x) for x in (q, k, v))
    s, b, a, d = q.shape
    t, g, dv = k.shape[0], k.shape[2], v.shape[3]
    config = tuning.select("attention_forward", q.device, **tuning_key(d, dv, rule))
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    out = torch.empty(s, b, a, dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, a, s, dtype=torch.float32, device=q.device)
    mask = mask_inputs(rule, lse)
    spans = key_spans(rule, mask, s, t, block_m, block_n) if needs_spans(rule) else lse
    span_stride = spans.stride(0) if spans.shape[0] > 1 else 0
    mode = reach([q, k, v], config.pop("DESCRIBED"))
    (q_tiles, k_tiles, v_tiles), layouts = sources([q, k, v], [block_m, block_n, block_n], mode)
    tiles = (q_tiles, layouts[0], k_tiles, layouts[1], v_tiles, layouts[2])
    extra = (lse if sinks is None else sinks, *mask, spans, span_stride)
    sizes = (s, t, b, a, a // g, dv, kernel_scale(rule), rule.softcap, rule.window or 0)
    dims = {"D": next_power_of_2(d), "DV": next_power_of_2(dv), "REACH": mode}
    grid = (cdiv(s, block_m), a, b)
    _forward_kernel[grid](
        *tiles,
        out,
        lse,
        *extra,
        *sizes,
        **flags(rule),
        HAS_SINKS=sinks is not None,
        **dims,
        **config,
    )
    return out, lse

"""The forward of attention in Triton: one program per block of queries and head, looping over
blocks of keys.

Online softmax (Milakov & Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691, algorithm 1), in base
2: with c = scale / ln 2,
    m' = max(m, c max_j s_j)
    l' = l 2^(m - m') + sum_j 2^(c s_j - m')
    o' = o 2^(m - m') + sum_j 2^(c s_j - m') v_j
    out = o / l,  lse = ln 2 (m + log2 l)
A sink is a key of known logit without a value: it only sets the first m and l.
"""

from itertools import chain

import torch
from torch import Tensor

from megatron5d.kernels import tuning
from megatron5d.kernels.dispatch import cdiv, jit, next_power_of_2, tl
from megatron5d.kernels.flash_attention.mask import (
    at_edges,
    block_start,
    flags_of,
    key_range,
    loop_bounds,
    mask_data,
    queries_at,
    span_arguments,
    up_to_last_key,
    visible_keys,
)
from megatron5d.kernels.flash_attention.plain import AttentionRule
from megatron5d.kernels.flash_attention.tiles import (
    COUNTS,
    aligned,
    capped,
    kernel_scale,
    load_tile,
    reach,
    sources,
    tuning_key,
)


@jit
def _next_block(offset, span, MASKED: tl.constexpr, FLAGS: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key of the block that follows the one at `offset`: edges first, then those between."""
    following = offset + BLOCK_N
    if MASKED:
        if FLAGS.window or FLAGS.spans:
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
    k_tiles,
    v_tiles,
    batch,
    k_head,
    span,
    num_keys,
    queries,
    mask,
    scale,
    softcap,
    window,
    MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    """Adds the keys of a span to the running out, total and peak: its edges if MASKED, else the
    blocks between them.

    With AHEAD `scores` are those of the first block of keys, and on return those of the block after
    the last one: while the tensor cores multiply queries with the next block of keys, the other
    units compute this one's exponentials.
    """
    begin, end = loop_bounds(span, MASKED, FLAGS, True)
    for offset in tl.range(begin, end, BLOCK_N):
        first = block_start(offset, span, MASKED, FLAGS, BLOCK_N)
        multiplied = _next_block(offset, span, MASKED, FLAGS, BLOCK_N) if AHEAD else first
        if MASKED:
            key = first + tl.arange(0, BLOCK_N)
            is_visible = visible_keys(queries, mask, batch, key, num_keys, window, FLAGS)
        k = load_tile(k_tiles, multiplied, batch, k_head, BLOCK_N, D, REACH)
        product = tl.dot(q, k.T)
        if not AHEAD:
            scores = product
        if FLAGS.softcap:
            scores = capped(scores, scale, softcap, True)
        if MASKED:
            scores = tl.where(is_visible, scores, float("-inf"))
        # The scale is positive, so it may follow the maximum, where it is fused with the
        # subtraction.
        factor = 1.0 if FLAGS.softcap else scale
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        # A query that has seen no key has peak -inf; taking it as 0 avoids 2^(-inf - -inf).
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        p = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, 1)
        out = out * shrink[:, None]
        v = load_tile(v_tiles, first, batch, k_head, BLOCK_N, DV, REACH)
        out = tl.dot(p.to(v.dtype), v, out)
        peak = new_peak
        scores = product
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
    mask,
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
    FLAGS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    # Under a causal mask the last queries see the most keys: they start first, so that no long
    # program runs alone at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    k_head = head // group
    first = block * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    q = load_tile((q_source, q_layout), first, batch, head, BLOCK_M, D, REACH)
    q_at, q_document = queries_at(mask, batch, query, num_queries, FLAGS)
    queries = up_to_last_key(q_at[:, None], num_keys, FLAGS), q_document[:, None]

    out = tl.zeros((BLOCK_M, DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        peak = tl.zeros((BLOCK_M,), tl.float32) + sink
        total += 1.0

    span = key_range(
        spans_ptr, span_stride, batch, block, num_keys, window, FLAGS, BLOCK_M, BLOCK_N
    )
    k_tiles, v_tiles = (k_source, k_layout), (v_source, v_layout)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if AHEAD:
        begin, _ = loop_bounds(span, True, FLAGS, True)
        start = _next_block(begin - BLOCK_N, span, True, FLAGS, BLOCK_N)
        scores = tl.dot(q, load_tile(k_tiles, start, batch, k_head, BLOCK_N, D, REACH).T)
    for MASKED in tl.static_range(1, -1, -1):
        out, total, peak, scores = _attend(
            out,
            total,
            peak,
            scores,
            q,
            k_tiles,
            v_tiles,
            batch,
            k_head,
            span,
            num_keys,
            queries,
            mask,
            scale,
            softcap,
            window,
            MASKED,
            AHEAD,
            FLAGS,
            BLOCK_N,
            D,
            DV,
            REACH,
        )

    saw_nothing = total == 0.0
    total = tl.where(saw_nothing, 1.0, total)
    out = out / total[:, None]
    lse = (peak + tl.log2(total)) * 0.6931471805599453
    lse = tl.where(saw_nothing, float("-inf"), lse)
    is_query = query < num_queries
    row = (query.to(tl.int64) * num_batch + batch) * num_heads + head
    column = tl.arange(0, DV)
    live = is_query[:, None] & (column < v_dim)[None, :]
    tl.store(out_ptr + row[:, None] * v_dim + column[None, :], out, live)
    tl.store(lse_ptr + (batch.to(tl.int64) * num_heads + head) * num_queries + query, lse, is_query)


def _outputs(q: Tensor, dv: int) -> tuple[Tensor, Tensor]:
    s, b, a, _ = q.shape
    out = torch.empty(s, b, a, dv, dtype=q.dtype, device=q.device)
    return out, torch.empty(b, a, s, dtype=torch.float32, device=q.device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes out `[s, b, a, dv]` and lse `[b, a, s]` float32, as `flash_attention.attention`
    describes them."""
    q, k, v = (aligned(x) for x in (q, k, v))
    s, b, a, d = q.shape
    t, g, dv = k.shape[0], k.shape[2], v.shape[3]
    flags = flags_of(rule)
    config = tuning.select("attention_forward", q.device, **tuning_key(d, dv, flags))
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    out, lse = _outputs(q, dv)
    mask = mask_data(rule, lse)
    span_inputs = span_arguments(rule, mask, lse, (s, t), (block_m, block_n), queries=True)
    mode = reach([q, k, v], config.pop("DESCRIBED"))
    *tiles, layouts = sources([q, k, v], [block_m, block_n, block_n], mode)
    _forward_kernel[(cdiv(s, block_m), a, b)](
        *chain.from_iterable(zip(tiles, layouts)),
        out,
        lse,
        lse if sinks is None else sinks,
        mask,
        *span_inputs,
        *(s, t, b, a, a // g, dv),
        *(kernel_scale(rule), rule.softcap, rule.window or 0),
        FLAGS=flags,
        HAS_SINKS=sinks is not None,
        D=next_power_of_2(d),
        DV=next_power_of_2(dv),
        REACH=mode,
        **config,
    )
    return out, lse

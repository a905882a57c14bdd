"""The backward of attention in Triton, from a global out and log-sum-exp, without atomics: the same
bits every time.

Dao, arXiv:2307.08691, algorithm 2, in two kernels. With P = exp(S - lse), dP = dout vᵀ, delta = rowsum(dout ∘ out):
    backward_keys.py:                  dv = Pᵀ dout,  dk = scale · (P ∘ (dP - delta))ᵀ q   over the queries of all heads
    one program per block of queries:  dq = scale · (P ∘ (dP - delta)) k
The scores are computed twice; in return nothing is added up in an order that depends on timing.
"""

import torch
from torch import Tensor

from megatron5d.kernels import tuning
from megatron5d.kernels.dispatch import cdiv, jit, next_power_of_2, num_processors, tl
from megatron5d.kernels.flash_attention.backward_keys import in_shares, launch_keys, uncapped
from megatron5d.kernels.flash_attention.mask import (
    among_keys,
    at_edges,
    documents,
    key_range,
    key_spans,
    loop_bounds,
    needs_spans,
    positions,
    query_spans,
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

PADDING = 128  # of the rows' statistics; a multiple of every block of queries


@jit(do_not_specialize=COUNTS)
def _delta_kernel(
    dout_ptr,
    out_ptr,
    lse_ptr,
    peak_ptr,
    delta_ptr,
    num_queries,
    padded,
    num_batch,
    dim,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """Makes for some queries of a head: lse in units of log2, and rowsum(dout ∘ out) from
    contiguous `[s, b, a, d]`.

    A query that saw nothing, or lies past the end, gets lse +inf: probability 0.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    line = batch * tl.num_programs(1) + head
    row = (query.to(tl.int64) * num_batch + batch) * tl.num_programs(1) + head
    at = row[:, None] * dim + column[None, :]
    live = (query < num_queries)[:, None] & (column < dim)[None, :]
    dout = tl.load(dout_ptr + at, live, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, live, other=0.0).to(tl.float32)
    tl.store(delta_ptr + line * padded + query, tl.sum(dout * out, 1))
    lse = tl.load(lse_ptr + line * num_queries + query, query < num_queries, other=float("-inf"))
    peak = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(peak_ptr + line * padded + query, peak)


@jit
def _collect_keys(
    dq,
    q,
    dout,
    sources,
    layouts,
    lse,
    delta,
    batch,
    k_head,
    span,
    num_keys,
    sizes,
    mask,
    q_at,
    q_document,
    FLAGS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    """Adds what the keys of a span give to dq: its edges where MASKED, else what lies between
    them."""
    _, _, _, scale, softcap, window = sizes
    CAUSAL: tl.constexpr = FLAGS[0]
    HAS_WINDOW: tl.constexpr = FLAGS[1]
    HAS_SOFTCAP: tl.constexpr = FLAGS[2]
    HAS_DOCUMENTS: tl.constexpr = FLAGS[3]
    HAS_K_POSITIONS: tl.constexpr = FLAGS[5]
    SPLIT: tl.constexpr = HAS_WINDOW or FLAGS[6]
    begin, end = loop_bounds(span, MASKED, SPLIT, True)
    for place in tl.range(begin, end, BLOCK_N):
        first = tl.multiple_of(at_edges(place, span) if MASKED and SPLIT else place, BLOCK_N)
        k = tile(sources[2], layouts[2], first, batch, k_head, BLOCK_N, D, REACH)
        v = tile(sources[3], layouts[3], first, batch, k_head, BLOCK_N, DV, REACH)
        scores = capped(tl.dot(q, k.T), scale, softcap, HAS_SOFTCAP)
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            key = first + tl.arange(0, BLOCK_N)
            k_at = positions(mask[2], key, num_keys, HAS_K_POSITIONS)[None, :]
            k_document = documents(mask[3], batch, key, num_keys, -2, HAS_DOCUMENTS)[None, :]
            seen = visible(
                q_at, k_at, q_document, k_document, window, CAUSAL, HAS_WINDOW, HAS_DOCUMENTS
            )
            seen = among_keys(seen, key, num_keys, CAUSAL, HAS_WINDOW, HAS_K_POSITIONS)
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(dout, v.T)
        ds = uncapped(p * (dp - delta[:, None]), scores, softcap, HAS_SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


# of one key Triton 3.6 unrolls the loop, and reuses tensor memory too early
@jit(do_not_specialize=COUNTS)
def _query_kernel(
    q_source,
    dout_source,
    k_source,
    v_source,
    layouts,
    rows,
    mask,
    dq_ptr,
    spans_ptr,
    span_stride,
    num_queries,
    padded,
    num_heads,
    scale,
    softcap,
    window,
    num_keys,
    num_batch,
    group,
    dims,
    natural_scale,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    # a launch takes no descriptors inside a tuple
    sources = (q_source, dout_source, k_source, v_source)
    CAUSAL: tl.constexpr = FLAGS[0]
    HAS_WINDOW: tl.constexpr = FLAGS[1]
    HAS_DOCUMENTS: tl.constexpr = FLAGS[3]
    HAS_Q_POSITIONS: tl.constexpr = FLAGS[4]
    HAS_K_POSITIONS: tl.constexpr = FLAGS[5]
    HAS_SPANS: tl.constexpr = FLAGS[6]
    sizes = (num_queries, padded, num_heads, scale, softcap, window)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    k_head = head // group
    first = block * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    q = tile(sources[0], layouts[0], first, batch, head, BLOCK_M, D, REACH)
    dout = tile(sources[1], layouts[1], first, batch, head, BLOCK_M, DV, REACH)
    row = tl.multiple_of((batch.to(tl.int64) * num_heads + head) * padded, 128)
    lse = tl.load(rows[0] + row + query)
    delta = tl.load(rows[1] + row + query)
    q_at = positions(mask[0], query, num_queries, HAS_Q_POSITIONS)[:, None]
    q_at = up_to_last_key(q_at, num_keys, CAUSAL, HAS_WINDOW, HAS_K_POSITIONS)
    q_document = documents(mask[1], batch, query, num_queries, -1, HAS_DOCUMENTS)[:, None]
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
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    dq = _collect_keys(
        dq,
        q,
        dout,
        sources,
        layouts,
        lse,
        delta,
        batch,
        k_head,
        span,
        num_keys,
        sizes,
        mask,
        q_at,
        q_document,
        FLAGS,
        True,
        BLOCK_N,
        D,
        DV,
        REACH,
    )
    dq = _collect_keys(
        dq,
        q,
        dout,
        sources,
        layouts,
        lse,
        delta,
        batch,
        k_head,
        span,
        num_keys,
        sizes,
        mask,
        q_at,
        q_document,
        FLAGS,
        False,
        BLOCK_N,
        D,
        DV,
        REACH,
    )
    column = tl.arange(0, D)
    at = ((query.to(tl.int64) * num_batch + batch) * num_heads + head)[:, None] * dims[0] + column[
        None, :
    ]
    live = (query < num_queries)[:, None] & (column < dims[0])[None, :]
    tl.store(dq_ptr + at, (dq * natural_scale).to(dq_ptr.dtype.element_ty), live)


def _row_statistics(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Makes lse in units of log2, and delta: `[2, b, a, s]`, with s rounded up to whole blocks of
    queries."""
    s, b, a, dv = out.shape
    padded = cdiv(s, PADDING) * PADDING
    rows = torch.empty(2, b, a, padded, dtype=torch.float32, device=out.device)
    config = tuning.select("attention_delta", out.device)
    inputs = (dout, out, lse, *rows, s, padded, b, dv)
    _delta_kernel[(padded // config["ROWS"], a, b)](*inputs, D=next_power_of_2(dv), **config)
    return rows


def backward(dout, q, k, v, out, lse, rule: AttentionRule) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dq, dk, dv as `flash_attention.attention_backward` describes them."""
    q, k, v = (aligned(x) for x in (q, k, v))
    dout, lse = aligned(dout.contiguous()), lse.contiguous()
    rows = _row_statistics(dout, out.contiguous(), lse)
    s, b, a, d = q.shape
    t, g, dv_dim = k.shape[0], k.shape[2], v.shape[3]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    key = tuning_key(d, dv_dim, rule)
    inputs = mask_inputs(rule, lse)
    mask = _mask_order(inputs)
    sizes = (s, rows.shape[3], a, kernel_scale(rule), rule.softcap, rule.window or 0)
    constants = {
        "FLAGS": tuple(flags(rule).values()),
        "D": next_power_of_2(d),
        "DV": next_power_of_2(dv_dim),
    }

    def prepared(operation, spans_of, **more):
        config = tuning.select(operation, q.device, **key, **more)
        block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
        assert PADDING % block_m == 0, "the rows' statistics end with a block of queries"
        mode = reach([q, dout, k, v], config.pop("DESCRIBED"))
        tiles, layouts = sources([q, dout, k, v], [block_m, block_m, block_n, block_n], mode)
        spans = spans_of(rule, inputs, s, t, block_m, block_n) if needs_spans(rule) else lse
        stride = spans.stride(0) if spans.shape[0] > 1 else 0
        rest = (spans, stride, *sizes, t, b, a // g, (d, dv_dim), rule.scale)
        return (*tiles, layouts, tuple(rows), mask), rest, {"REACH": mode, **constants, **config}

    cut = in_shares(t, b * g, next_power_of_2(max(d, dv_dim)), num_processors(q.device))
    before, rest, config = prepared("attention_backward_keys", query_spans, shares=int(cut))
    launch_keys(before, rest, config, (dk, dv), cut)
    before, rest, config = prepared("attention_backward_queries", key_spans)
    _query_kernel[(cdiv(s, config["BLOCK_M"]), a, b)](*before, dq, *rest, **config)
    return dq, dk, dv


def _mask_order(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Orders (q positions, k positions, q documents, k documents) as the kernels index them:
    queries first."""
    q_at, k_at, q_documents, k_documents = inputs
    return q_at, q_documents, k_at, k_documents

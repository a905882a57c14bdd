"""The backward of attention in Triton, from a global out and log-sum-exp, without atomics: the same
bits every time.

Dao, arXiv:2307.08691, algorithm 2, in two kernels. With P = exp(S - lse), dP = dout vᵀ and
delta = rowsum(dout ∘ out):
    dv = Pᵀ dout,  dk = scale · (P ∘ (dP - delta))ᵀ q    over the queries of all heads
                                                         (backward_keys.py)
    dq = scale · (P ∘ (dP - delta)) k                    one program per block of queries
The scores are computed twice; in return no sum depends on the order in which programs run.
"""

import torch
from torch import Tensor

from megatron5d.kernels import tuning
from megatron5d.kernels.dispatch import (
    cdiv,
    jit,
    load_float32,
    next_power_of_2,
    num_processors,
    tl,
)
from megatron5d.kernels.flash_attention.backward_keys import in_shares, launch_keys, uncapped
from megatron5d.kernels.flash_attention.mask import (
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

PADDING = 128  # of row statistics; a multiple of every block of queries


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
    """Computes lse in units of log2, and rowsum(dout ∘ out), for some queries of a head.

    dout and out are contiguous `[s, b, a, d]`. A query that saw nothing, or lies past the end, gets
    lse +inf: probability 0.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    line = batch * tl.num_programs(1) + head
    row = (query.to(tl.int64) * num_batch + batch) * tl.num_programs(1) + head
    at = row[:, None] * dim + column[None, :]
    live = (query < num_queries)[:, None] & (column < dim)[None, :]
    dout, out = load_float32(dout_ptr + at, live), load_float32(out_ptr + at, live)
    tl.store(delta_ptr + line * padded + query, tl.sum(dout * out, 1))
    lse = tl.load(lse_ptr + line * num_queries + query, query < num_queries, other=float("-inf"))
    peak = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(peak_ptr + line * padded + query, peak)


@jit
def _collect_keys(
    dq,
    q,
    dout,
    k_tiles,
    v_tiles,
    lse,
    delta,
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
    FLAGS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    """Adds to dq what the keys of a span contribute: its edges if MASKED, else the blocks between
    them."""
    begin, end = loop_bounds(span, MASKED, FLAGS, True)
    for offset in tl.range(begin, end, BLOCK_N):
        first = block_start(offset, span, MASKED, FLAGS, BLOCK_N)
        k = load_tile(k_tiles, first, batch, k_head, BLOCK_N, D, REACH)
        v = load_tile(v_tiles, first, batch, k_head, BLOCK_N, DV, REACH)
        scores = capped(tl.dot(q, k.T), scale, softcap, FLAGS.softcap)
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            key = first + tl.arange(0, BLOCK_N)
            is_visible = visible_keys(queries, mask, batch, key, num_keys, window, FLAGS)
            p = tl.where(is_visible, p, 0.0)
        dp = tl.dot(dout, v.T)
        ds = uncapped(p * (dp - delta[:, None]), scores, softcap, FLAGS.softcap)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


# With one key Triton 3.6 would unroll the loop, and reuse tensor memory too early.
@jit(do_not_specialize=COUNTS)
def _query_kernel(
    q_source,
    dout_source,
    k_source,
    v_source,
    layouts,
    statistics,
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
    q_layout, dout_layout, k_layout, v_layout = layouts
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    k_head = head // group
    first = block * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    q = load_tile((q_source, q_layout), first, batch, head, BLOCK_M, D, REACH)
    dout = load_tile((dout_source, dout_layout), first, batch, head, BLOCK_M, DV, REACH)
    row = tl.multiple_of((batch.to(tl.int64) * num_heads + head) * padded, 128)
    lse = tl.load(statistics[0] + row + query)
    delta = tl.load(statistics[1] + row + query)
    q_at, q_document = queries_at(mask, batch, query, num_queries, FLAGS)
    queries = up_to_last_key(q_at[:, None], num_keys, FLAGS), q_document[:, None]
    span = key_range(
        spans_ptr, span_stride, batch, block, num_keys, window, FLAGS, BLOCK_M, BLOCK_N
    )
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for MASKED in tl.static_range(1, -1, -1):
        dq = _collect_keys(
            dq,
            q,
            dout,
            (k_source, k_layout),
            (v_source, v_layout),
            lse,
            delta,
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
            FLAGS,
            BLOCK_N,
            D,
            DV,
            REACH,
        )
    column = tl.arange(0, D)
    row = ((query.to(tl.int64) * num_batch + batch) * num_heads + head)[:, None]
    live = (query < num_queries)[:, None] & (column < dims[0])[None, :]
    tl.store(dq_ptr + row * dims[0] + column[None, :], dq * natural_scale, live)


def _row_statistics(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """lse in units of log2, and delta: `[2, b, a, s]`, s rounded up to whole blocks of queries."""
    s, b, a, dv = out.shape
    padded = cdiv(s, PADDING) * PADDING
    rows = torch.empty(2, b, a, padded, dtype=torch.float32, device=out.device)
    config = tuning.select("attention_delta", out.device)
    inputs = (dout, out, lse, *rows, s, padded, b, dv)
    _delta_kernel[(padded // config["ROWS"], a, b)](*inputs, D=next_power_of_2(dv), **config)
    return rows


def _launch_arguments(
    operation: str,
    tensors: list[Tensor],
    rows: Tensor,
    rule: AttentionRule,
    unused: Tensor,
    *,
    queries: bool,
    **more_keys: int,
) -> tuple[tuple, tuple, dict]:
    """Arguments before and after the outputs, and constants, of one of the two kernels.

    Args:
        tensors: q, dout, k, v.
        rows: from `_row_statistics`.
        unused: in place of absent data of the mask.
        queries: the kernel's blocks are of queries, else of keys.
        more_keys: of the tuning table.
    """
    q, _, k, v = tensors
    (s, b, a, d), (t, g), dv = q.shape, k.shape[::2], v.shape[3]
    flags, mask = flags_of(rule), mask_data(rule, unused)
    config = tuning.select(operation, q.device, **tuning_key(d, dv, flags), **more_keys)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    assert PADDING % block_m == 0, "row statistics end with a block of queries"
    mode = reach(tensors, config.pop("DESCRIBED"))
    tiles = sources(tensors, [block_m, block_m, block_n, block_n], mode)
    spans = span_arguments(rule, mask, unused, (s, t), (block_m, block_n), queries=queries)
    score = (kernel_scale(rule), rule.softcap, rule.window or 0)
    sizes = (s, rows.shape[3], a, *score, t, b, a // g, (d, dv), rule.scale)
    config |= {"FLAGS": flags, "D": next_power_of_2(d), "DV": next_power_of_2(dv)}
    return (*tiles, tuple(rows), mask), (*spans, *sizes), {"REACH": mode, **config}


def backward(dout, q, k, v, out, lse, rule: AttentionRule) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dq, dk, dv as `flash_attention.attention_backward` describes them."""
    q, k, v = (aligned(x) for x in (q, k, v))
    dout, lse = aligned(dout.contiguous()), lse.contiguous()
    rows = _row_statistics(dout, out.contiguous(), lse)
    (s, b, a, d), (t, g) = q.shape, k.shape[::2]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tensors = [q, dout, k, v]

    width = next_power_of_2(max(d, v.shape[3]))
    cut = in_shares(t, b * g, width, num_processors(q.device))
    inputs, sizes, config = _launch_arguments(
        "attention_backward_keys", tensors, rows, rule, lse, queries=False, shares=int(cut)
    )
    launch_keys(inputs, sizes, config, (dk, dv), cut)
    inputs, sizes, config = _launch_arguments(
        "attention_backward_queries", tensors, rows, rule, lse, queries=True
    )
    _query_kernel[(cdiv(s, config["BLOCK_M"]), a, b)](*inputs, dq, *sizes, **config)
    return dq, dk, dv

"""The keys' half of the backward of attention: dk and dv, by a program a block of keys, or by equal
shares of the work.

A block of keys of one KV head meets the queries of its group of heads that may see it. Where there
are several blocks for each processor, a program takes one; a causal mask makes the first of them
the longest, which suits the scheduler. With few heads a rank has fewer blocks than the GPU
processors, and one program a block would take four times as long as need be (Llama 3 8B, tp 8,
8,192 tokens). There the tiles of all blocks stand in one row, ordered by batch entry, block, head
and query, and program p takes tiles [p·share, (p+1)·share) of it (stream-K: Osama et al.,
arXiv:2301.03598), however masks, documents and positions distribute them. A block within one share
is stored at once. Of one that is cut each program stores its part in float32, and
`_sum_parts_kernel` adds the parts up in the order of the queries: the same bits every time. On an
H200, 8,192 causal tokens, the shares are slower for 8 KV heads (3.9 ms against 3.1) and faster for
2 (1.0 against 1.1).

The kernel works on transposed tiles, so that P and dS enter the second GEMM from registers.
"""

import torch
from torch import Tensor

from megatron5d.kernels.dispatch import cdiv, jit, next_power_of_2, num_processors, tl
from megatron5d.kernels.flash_attention.mask import (
    at_edges,
    documents,
    loop_bounds,
    positions,
    query_range,
    visible,
)
from megatron5d.kernels.flash_attention.tiles import COUNTS, capped, tile

ROWS = 16  # that a program adds up
# head dim: wider heads need all registers for dk and dv, and are mostly many; a program a block
LARGEST_CUT = 128
COUNTED = 64  # keys of a block, when blocks are counted to choose between programs and shares
BLOCKS_A_PROCESSOR = 3  # fewer, of unequal length, leave processors idle at the end
LEAST_ENTRIES = 128  # fewer take as long, and would be binaries of their own
# of a share: below them loading keys and adding up parts takes longer
LEAST_QUERIES = tl.constexpr(256)


@jit
def uncapped(d_scores, scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Returns the gradient before the soft-cap: d tanh = 1 - tanh²."""
    if HAS_SOFTCAP:
        share = scores / (softcap * 1.4426950408889634)
        d_scores = d_scores * (1.0 - share * share)
    return d_scores


@jit
def _collect_queries(
    dk,
    dv,
    k,
    v,
    sources,
    layouts,
    rows,
    batch,
    head,
    span,
    sizes,
    mask,
    k_at,
    k_document,
    FLAGS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    """Adds what queries of one head give to dk and dv: a span's edges where MASKED, else what lies
    between them."""
    num_queries, padded, num_heads, scale, softcap, window = sizes
    CAUSAL: tl.constexpr = FLAGS[0]
    HAS_WINDOW: tl.constexpr = FLAGS[1]
    HAS_SOFTCAP: tl.constexpr = FLAGS[2]
    HAS_DOCUMENTS: tl.constexpr = FLAGS[3]
    HAS_Q_POSITIONS: tl.constexpr = FLAGS[4]
    row = tl.multiple_of((batch.to(tl.int64) * num_heads + head) * padded, 128)
    SPLIT: tl.constexpr = HAS_WINDOW or FLAGS[6]
    begin, end = loop_bounds(span, MASKED, SPLIT, False)
    for place in tl.range(begin, end, BLOCK_M):
        first = tl.multiple_of(at_edges(place, span) if MASKED and SPLIT else place, BLOCK_M)
        query = first + tl.arange(0, BLOCK_M)
        q = tile(sources[0], layouts[0], first, batch, head, BLOCK_M, D, REACH)
        scores = capped(tl.dot(k, q.T), scale, softcap, HAS_SOFTCAP)
        p = tl.exp2(scores - tl.load(rows[0] + row + query)[None, :])
        if MASKED:
            q_at = positions(mask[0], query, num_queries, HAS_Q_POSITIONS)[None, :]
            q_document = documents(mask[1], batch, query, num_queries, -1, HAS_DOCUMENTS)[None, :]
            seen = visible(
                q_at, k_at, q_document, k_document, window, CAUSAL, HAS_WINDOW, HAS_DOCUMENTS
            )
            p = tl.where(seen, p, 0.0)
        dout = tile(sources[1], layouts[1], first, batch, head, BLOCK_M, DV, REACH)
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        dp = tl.dot(v, dout.T)
        delta = tl.load(rows[1] + row + query)
        ds = uncapped(p * (dp - delta[None, :]), scores, softcap, HAS_SOFTCAP)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@jit
def _num_tiles(
    spans_ptr,
    span_stride,
    batch,
    block,
    num_queries,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Counts the tiles of queries that a block of keys meets; one for a block that none sees, which
    stores zeros."""
    start, _, _, stop = query_range(
        spans_ptr,
        span_stride,
        batch,
        block,
        num_queries,
        window,
        CAUSAL,
        HAS_WINDOW,
        HAS_SPANS,
        BLOCK_M,
        BLOCK_N,
    )
    return tl.maximum((stop - start + BLOCK_M - 1) // BLOCK_M, 1)


@jit
def _shares(
    spans_ptr,
    span_stride,
    sizes,
    blocks,
    num_batch,
    shares,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Returns the tiles of all heads before each entry (a block of keys of a batch entry), in it,
    and of a share."""
    lane = tl.arange(0, ENTRIES)
    real = lane < num_batch * blocks
    known = tl.where(real, lane, 0)
    tiles = _num_tiles(
        spans_ptr,
        span_stride,
        known // blocks,
        known % blocks,
        sizes[0],
        sizes[5],
        FLAGS[0],
        FLAGS[1],
        FLAGS[6],
        BLOCK_M,
        BLOCK_N,
    )
    tiles = tl.where(real, tiles * sizes[2], 0)
    ends = tl.cumsum(tiles, 0)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), shares), LEAST_QUERIES // BLOCK_M)
    return ends - tiles, tiles, share


@jit
def _entry_of(place, before, tiles):
    """Returns the entry to which a tile belongs, and the first tile of that entry."""
    entry = tl.sum((before + tiles <= place).to(tl.int32), 0)
    return entry, tl.max(tl.where(before <= place, before, 0), 0)


@jit
def _cut(place, low, high):
    """Moves a place into [low, high]."""
    return tl.minimum(tl.maximum(place, low), high)


@jit
def _store(outputs, dk, dv, key, num_keys, where, dims, scale):
    """Stores rows of dk, times `scale`, and of dv: contiguous `[t, b, g, d]`."""
    batch, num_batch, k_head, num_k_heads = where
    row = ((key.to(tl.int64) * num_batch + batch) * num_k_heads + k_head)[:, None]
    column, v_column = tl.arange(0, dk.shape[1])[None, :], tl.arange(0, dv.shape[1])[None, :]
    is_key = (key < num_keys)[:, None]
    dk_at, dv_at = row * dims[0] + column, row * dims[1] + v_column
    tl.store(
        outputs[0] + dk_at,
        (dk * scale).to(outputs[0].dtype.element_ty),
        is_key & (column < dims[0]),
    )
    tl.store(outputs[1] + dv_at, dv.to(outputs[1].dtype.element_ty), is_key & (v_column < dims[1]))


@jit
def _keys(
    sources,
    layouts,
    mask,
    num_keys,
    batch,
    block,
    k_head,
    FLAGS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    """Loads a block of keys: k, v, their positions and documents."""
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tile(sources[2], layouts[2], block * BLOCK_N, batch, k_head, BLOCK_N, D, REACH)
    v = tile(sources[3], layouts[3], block * BLOCK_N, batch, k_head, BLOCK_N, DV, REACH)
    k_at = positions(mask[2], key, num_keys, FLAGS[5])[:, None]
    return k, v, k_at, documents(mask[3], batch, key, num_keys, -2, FLAGS[3])[:, None]


@jit
def _collect_head(
    dk,
    dv,
    keys,
    sources,
    layouts,
    rows,
    batch,
    head,
    span,
    sizes,
    mask,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    """Adds what the queries of a span of one head give to dk and dv."""
    k, v, k_at, k_document = keys
    if FLAGS[0] or FLAGS[1] or FLAGS[6]:
        dk, dv = _collect_queries(
            dk,
            dv,
            k,
            v,
            sources,
            layouts,
            rows,
            batch,
            head,
            span,
            sizes,
            mask,
            k_at,
            k_document,
            FLAGS,
            True,
            BLOCK_M,
            D,
            DV,
            REACH,
        )
    return _collect_queries(
        dk,
        dv,
        k,
        v,
        sources,
        layouts,
        rows,
        batch,
        head,
        span,
        sizes,
        mask,
        k_at,
        k_document,
        FLAGS,
        False,
        BLOCK_M,
        D,
        DV,
        REACH,
    )


# a multiple of 16 saves registers
@jit(do_not_specialize=[name for name in COUNTS if name != "num_queries"])
def _key_value_kernel(
    q_source,
    dout_source,
    k_source,
    v_source,
    layouts,
    rows,
    mask,
    outputs,
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
    parts_ptr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
    ENTRIES: tl.constexpr,
    CUT: tl.constexpr,
):
    """Computes one share: the end of a block of keys, whole blocks, the beginning of a block; or,
    not CUT, a block."""
    # a launch takes no descriptors inside a tuple
    sources = (q_source, dout_source, k_source, v_source)
    sizes = (num_queries, padded, num_heads, scale, softcap, window)
    CAUSAL: tl.constexpr = FLAGS[0]
    HAS_WINDOW: tl.constexpr = FLAGS[1]
    HAS_SPANS: tl.constexpr = FLAGS[6]
    program = tl.program_id(0)
    blocks = tl.cdiv(num_keys, BLOCK_N)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, DV), tl.float32)
    if not CUT:
        num_k_heads = sizes[2] // group
        k_head = program % num_k_heads
        block = program // num_k_heads % blocks
        batch = program // num_k_heads // blocks
        span = query_range(
            spans_ptr,
            span_stride,
            batch,
            block,
            sizes[0],
            sizes[5],
            CAUSAL,
            HAS_WINDOW,
            HAS_SPANS,
            BLOCK_M,
            BLOCK_N,
        )
        keys = _keys(
            sources, layouts, mask, num_keys, batch, block, k_head, FLAGS, BLOCK_N, D, DV, REACH
        )
        for head in range(k_head * group, k_head * group + group):
            dk, dv = _collect_head(
                dk,
                dv,
                keys,
                sources,
                layouts,
                rows,
                batch,
                head,
                span,
                sizes,
                mask,
                FLAGS,
                BLOCK_M,
                D,
                DV,
                REACH,
            )
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        _store(
            outputs,
            dk,
            dv,
            key,
            num_keys,
            (batch, num_batch, k_head, num_k_heads),
            dims,
            natural_scale,
        )
        return
    before, tiles, share = _shares(
        spans_ptr,
        span_stride,
        sizes,
        blocks,
        num_batch,
        tl.num_programs(0),
        FLAGS,
        BLOCK_M,
        BLOCK_N,
        ENTRIES,
    )
    first = program * share
    last = tl.minimum(first + share, tl.sum(tiles, 0))
    entry, origin = _entry_of(first, before, tiles)
    place = first
    # one head of queries at a time; few numbers live through the GEMMs, which need all registers
    while place < last:
        batch = entry // blocks
        block = entry % blocks
        span = query_range(
            spans_ptr,
            span_stride,
            batch,
            block,
            sizes[0],
            sizes[5],
            CAUSAL,
            HAS_WINDOW,
            HAS_SPANS,
            BLOCK_M,
            BLOCK_N,
        )
        length = tl.maximum((span[3] - span[0] + BLOCK_M - 1) // BLOCK_M, 1)
        head = (place - origin) // length
        low = span[0] + (place - origin - head * length) * BLOCK_M
        end = tl.minimum(last, origin + (head + 1) * length)
        high = low + (end - place) * BLOCK_M
        mine = (low, _cut(span[1], low, high), _cut(span[2], low, high), _cut(span[3], low, high))
        keys = _keys(
            sources,
            layouts,
            mask,
            num_keys,
            batch,
            block,
            head // group,
            FLAGS,
            BLOCK_N,
            D,
            DV,
            REACH,
        )
        dk, dv = _collect_head(
            dk,
            dv,
            keys,
            sources,
            layouts,
            rows,
            batch,
            head,
            mine,
            sizes,
            mask,
            FLAGS,
            BLOCK_M,
            D,
            DV,
            REACH,
        )
        place = end
        ends = (place - origin) % (length * group) == 0
        begins = origin + head // group * (length * group) >= first
        if ends & begins:
            key = entry % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
            where = entry // blocks, num_batch, head // group, sizes[2] // group
            _store(outputs, dk, dv, key, num_keys, where, dims, natural_scale)
        elif ends | (place == last):
            part = parts_ptr + (2 * program + begins).to(tl.int64) * BLOCK_N * (D + DV)
            line = part + tl.arange(0, BLOCK_N)[:, None] * (D + DV)
            tl.store(line + tl.arange(0, D)[None, :], dk)
            tl.store(line + D + tl.arange(0, DV)[None, :], dv)
        dk = tl.where(ends, 0.0, dk)
        dv = tl.where(ends, 0.0, dv)
        if place - origin == length * sizes[2]:
            origin = place
            entry += 1


@jit(do_not_specialize=COUNTS)
def _sum_parts_kernel(
    outputs,
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
    parts_ptr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds up some rows of the block that begins in this program's share and ends in a later one,
    if there is one."""
    program = tl.program_id(0)
    blocks = tl.cdiv(num_keys, BLOCK_N)
    sizes = (num_queries, padded, num_heads, scale, softcap, window)
    before, tiles, share = _shares(
        spans_ptr,
        span_stride,
        sizes,
        blocks,
        num_batch,
        tl.num_programs(0),
        FLAGS,
        BLOCK_M,
        BLOCK_N,
        ENTRIES,
    )
    last = (program + 1) * share
    if last >= tl.sum(tiles, 0):
        return
    entry, origin = _entry_of(last - 1, before, tiles)
    length = tl.sum(tl.where(before == origin, tiles, 0), 0) // sizes[2] * group
    start = origin + (last - 1 - origin) // length * length
    stop = start + length
    if (start < program * share) | (stop == last):
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    line = row[:, None] * (D + DV)
    dk = tl.zeros((ROWS, D), tl.float32)
    dv = tl.zeros((ROWS, DV), tl.float32)
    for other in range(program, (stop - 1) // share + 1):
        part = parts_ptr + (2 * other + (other == program)).to(tl.int64) * BLOCK_N * (D + DV) + line
        dk += tl.load(part + tl.arange(0, D)[None, :])
        dv += tl.load(part + D + tl.arange(0, DV)[None, :])
    key = entry % blocks * BLOCK_N + row
    where = entry // blocks, num_batch, (start - origin) // length, sizes[2] // group
    _store(outputs, dk, dv, key, num_keys, where, dims, natural_scale)


def in_shares(num_keys: int, heads: int, width: int, processors: int) -> bool:
    """Says whether the work is cut into shares, one a processor.

    Args:
        num_keys: of one batch entry.
        heads: KV heads of all batch entries.
        width: the greater head dim, of k or v.
        processors: of the GPU.
    """
    return (
        width <= LARGEST_CUT and cdiv(num_keys, COUNTED) * heads < BLOCKS_A_PROCESSOR * processors
    )


def launch_keys(
    before: tuple, rest: tuple, config: dict, outputs: tuple[Tensor, Tensor], cut: bool
) -> None:
    """Computes dk and dv, from the arguments of the kernel before and after its outputs; `cut`:
    `in_shares`."""
    num_queries, num_heads, num_keys, num_batch, group = rest[2], rest[4], *rest[8:11]
    entries = num_batch * cdiv(num_keys, config["BLOCK_N"])
    if not cut:
        grid = (entries * (num_heads // group),)
        _key_value_kernel[grid](*before, outputs, *rest, outputs[0], ENTRIES=1, CUT=False, **config)
        return
    assert entries * cdiv(num_queries, config["BLOCK_M"]) * num_heads < 2**31, (
        "tiles are counted in 32 bits"
    )
    shares, width = num_processors(outputs[0].device), config["D"] + config["DV"]
    parts = torch.empty(
        2 * shares, config["BLOCK_N"], width, dtype=torch.float32, device=outputs[0].device
    )
    config["ENTRIES"] = max(next_power_of_2(entries), LEAST_ENTRIES)
    _key_value_kernel[(shares,)](*before, outputs, *rest, parts, CUT=True, **config)
    constants = {
        name: config[name] for name in ("FLAGS", "BLOCK_M", "BLOCK_N", "D", "DV", "ENTRIES")
    }
    told = (6,) if config["FLAGS"][6] else (0, 1)  # what says which queries a block meets
    constants["FLAGS"] = tuple(flag and at in told for at, flag in enumerate(config["FLAGS"]))
    _sum_parts_kernel[(shares, config["BLOCK_N"] // ROWS)](
        outputs, *rest, parts, **constants, ROWS=ROWS
    )

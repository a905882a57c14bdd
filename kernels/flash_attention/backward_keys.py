"""The keys' half of the backward of attention: dk and dv, by a program per block of keys, or by
equal shares of the work.

A block of keys of one KV head meets the queries of its group of heads that may see it. Where there
are several blocks for each processor, a program takes one; a causal mask makes the first of them
the longest, which suits the scheduler. With few heads a rank has fewer blocks than the GPU has
processors, and one program per block would take four times as long as necessary (Llama 3 8B, tp 8,
8,192 tokens). There the tiles of all blocks form one sequence, ordered by batch entry, block, head
and query, and program p takes tiles [p·share, (p+1)·share) of it (stream-K: Osama et al.,
arXiv:2301.03598), however masks, documents and positions distribute them. A block within one share
is stored at once. If several programs share a block, each stores its partial sums in float32, and
`_sum_parts_kernel` adds them in the order of the queries: the same bits every time. On an H200 with
8,192 causal tokens the shares are slower for 8 KV heads (3.9 ms instead of 3.1) and faster for 2
(1.0 instead of 1.1).

The kernel works on transposed tiles, so that P and dS enter the second GEMM from registers.
"""

import torch
from torch import Tensor

from megatron5d.kernels.dispatch import cdiv, jit, next_power_of_2, num_processors, tl
from megatron5d.kernels.flash_attention.mask import (
    Flags,
    block_start,
    keys_at,
    loop_bounds,
    queries_at,
    query_range,
    visible,
)
from megatron5d.kernels.flash_attention.tiles import COUNTS, capped, load_tile

ROWS = 16  # that a program of `_sum_parts_kernel` adds up
# Wider heads need all registers for dk and dv, and models have many of them: a program per block.
LARGEST_CUT_DIM = 128
COUNTED_KEYS = 64  # of a block, when blocks are counted to choose between blocks and shares
BLOCKS_PER_PROCESSOR = 3  # fewer, of unequal length, leave processors idle at the end
LEAST_ENTRIES = 128  # fewer take as long, and would be separate binaries
# Of a share: with fewer queries, loading keys and adding up partial sums takes longer.
LEAST_QUERIES = tl.constexpr(256)


@jit
def uncapped(d_scores, scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Gradient before the soft-cap: d tanh = 1 - tanh²."""
    if HAS_SOFTCAP:
        tanh = scores / (softcap * 1.4426950408889634)
        d_scores = d_scores * (1.0 - tanh * tanh)
    return d_scores


@jit
def _collect_queries(
    dk,
    dv,
    keys,
    tiles,
    statistics,
    batch,
    head,
    span,
    sizes,
    mask,
    MASKED: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
):
    """Adds to dk and dv what queries of one head contribute: a span's edges if MASKED, else the
    blocks between them."""
    k, v, k_at, k_document = keys
    num_queries, padded, num_heads, scale, softcap, window = sizes
    row = tl.multiple_of((batch.to(tl.int64) * num_heads + head) * padded, 128)
    begin, end = loop_bounds(span, MASKED, FLAGS, False)
    for offset in tl.range(begin, end, BLOCK_M):
        first = block_start(offset, span, MASKED, FLAGS, BLOCK_M)
        query = first + tl.arange(0, BLOCK_M)
        q = load_tile(tiles[0], first, batch, head, BLOCK_M, D, REACH)
        scores = capped(tl.dot(k, q.T), scale, softcap, FLAGS.softcap)
        p = tl.exp2(scores - tl.load(statistics[0] + row + query)[None, :])
        if MASKED:
            q_at, q_document = queries_at(mask, batch, query, num_queries, FLAGS)
            is_visible = visible(
                q_at[None, :], k_at, q_document[None, :], k_document, window, FLAGS
            )
            p = tl.where(is_visible, p, 0.0)
        dout = load_tile(tiles[1], first, batch, head, BLOCK_M, DV, REACH)
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        dp = tl.dot(v, dout.T)
        delta = tl.load(statistics[1] + row + query)
        ds = uncapped(p * (dp - delta[None, :]), scores, softcap, FLAGS.softcap)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@jit
def _collect_head(
    dk,
    dv,
    keys,
    tiles,
    statistics,
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
    """Adds to dk and dv what the queries of a span of one head contribute."""
    for MASKED in tl.static_range(1, -1, -1):
        if not MASKED or FLAGS.causal or FLAGS.window or FLAGS.spans:
            dk, dv = _collect_queries(
                dk,
                dv,
                keys,
                tiles,
                statistics,
                batch,
                head,
                span,
                sizes,
                mask,
                MASKED,
                FLAGS,
                BLOCK_M,
                D,
                DV,
                REACH,
            )
    return dk, dv


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
    """Tiles of all heads before each entry (a block of keys of a batch entry), in it, and of a
    share."""
    num_queries, _, num_heads, _, _, window = sizes
    lane = tl.arange(0, ENTRIES)
    is_entry = lane < num_batch * blocks
    entry = tl.where(is_entry, lane, 0)
    start, _, _, stop = query_range(
        spans_ptr,
        span_stride,
        entry // blocks,
        entry % blocks,
        num_queries,
        window,
        FLAGS,
        BLOCK_M,
        BLOCK_N,
    )
    # A block that no query sees has one tile, which stores zeros.
    tiles = tl.maximum((stop - start + BLOCK_M - 1) // BLOCK_M, 1)
    tiles = tl.where(is_entry, tiles * num_heads, 0)
    ends = tl.cumsum(tiles, 0)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), shares), LEAST_QUERIES // BLOCK_M)
    return ends - tiles, tiles, share


@jit
def _entry_of(tile, before, tiles):
    """Entry to which a tile belongs, and the first tile of that entry."""
    entry = tl.sum((before + tiles <= tile).to(tl.int32), 0)
    return entry, tl.max(tl.where(before <= tile, before, 0), 0)


@jit
def _store(outputs, dk, dv, key, num_keys, coordinates, dims, scale):
    """Stores rows of dk, times `scale`, and of dv: contiguous `[t, b, g, d]`."""
    batch, num_batch, k_head, num_k_heads = coordinates
    row = ((key.to(tl.int64) * num_batch + batch) * num_k_heads + k_head)[:, None]
    column, v_column = tl.arange(0, dk.shape[1])[None, :], tl.arange(0, dv.shape[1])[None, :]
    is_key = (key < num_keys)[:, None]
    dk_at, dv_at = row * dims[0] + column, row * dims[1] + v_column
    tl.store(outputs[0] + dk_at, dk * scale, is_key & (column < dims[0]))
    tl.store(outputs[1] + dv_at, dv, is_key & (v_column < dims[1]))


@jit
def _keys(
    k_tiles,
    v_tiles,
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
    first = block * BLOCK_N
    key = first + tl.arange(0, BLOCK_N)
    k = load_tile(k_tiles, first, batch, k_head, BLOCK_N, D, REACH)
    v = load_tile(v_tiles, first, batch, k_head, BLOCK_N, DV, REACH)
    k_at, k_document = keys_at(mask, batch, key, num_keys, FLAGS)
    return k, v, k_at[:, None], k_document[:, None]


# Multiples of 16 queries have a separate binary, which takes fewer registers.
@jit(do_not_specialize=[name for name in COUNTS if name != "num_queries"])
def _key_value_kernel(
    q_source,
    dout_source,
    k_source,
    v_source,
    layouts,
    statistics,
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
    partials_ptr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    REACH: tl.constexpr,
    ENTRIES: tl.constexpr,
    CUT: tl.constexpr,
):
    """Computes one block of keys; or, if CUT, one share: the end of a block, whole blocks, the
    beginning of a block."""
    q_layout, dout_layout, k_layout, v_layout = layouts
    tiles = (q_source, q_layout), (dout_source, dout_layout)
    k_tiles, v_tiles = (k_source, k_layout), (v_source, v_layout)
    sizes = num_queries, padded, num_heads, scale, softcap, window
    program = tl.program_id(0)
    blocks = tl.cdiv(num_keys, BLOCK_N)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, DV), tl.float32)
    if not CUT:
        num_k_heads = num_heads // group
        k_head = program % num_k_heads
        block = program // num_k_heads % blocks
        batch = program // num_k_heads // blocks
        span = query_range(
            spans_ptr, span_stride, batch, block, num_queries, window, FLAGS, BLOCK_M, BLOCK_N
        )
        keys = _keys(
            k_tiles, v_tiles, mask, num_keys, batch, block, k_head, FLAGS, BLOCK_N, D, DV, REACH
        )
        for head in range(k_head * group, k_head * group + group):
            dk, dv = _collect_head(
                dk,
                dv,
                keys,
                tiles,
                statistics,
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
        coordinates = batch, num_batch, k_head, num_k_heads
        _store(outputs, dk, dv, key, num_keys, coordinates, dims, natural_scale)
        return
    before, entry_tiles, share = _shares(
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
    last = tl.minimum(first + share, tl.sum(entry_tiles, 0))
    entry, origin = _entry_of(first, before, entry_tiles)
    tile = first
    # One head of queries at a time: few numbers live through the GEMMs, which need all registers.
    while tile < last:
        batch = entry // blocks
        block = entry % blocks
        start, left, right, stop = query_range(
            spans_ptr, span_stride, batch, block, num_queries, window, FLAGS, BLOCK_M, BLOCK_N
        )
        # The tiles of this head that lie in this share, and their queries [low, high).
        length = tl.maximum((stop - start + BLOCK_M - 1) // BLOCK_M, 1)
        head = (tile - origin) // length
        low = start + (tile - origin - head * length) * BLOCK_M
        end = tl.minimum(last, origin + (head + 1) * length)
        high = low + (end - tile) * BLOCK_M
        left = tl.minimum(tl.maximum(left, low), high)
        right = tl.minimum(tl.maximum(right, low), high)
        span = low, left, right, tl.minimum(tl.maximum(stop, low), high)
        k_head = head // group
        keys = _keys(
            k_tiles, v_tiles, mask, num_keys, batch, block, k_head, FLAGS, BLOCK_N, D, DV, REACH
        )
        dk, dv = _collect_head(
            dk,
            dv,
            keys,
            tiles,
            statistics,
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
        tile = end
        # Store a block that lies in this share, or this share's part of a block.
        ends = (tile - origin) % (length * group) == 0
        begins = origin + head // group * (length * group) >= first
        if ends & begins:
            key = entry % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
            coordinates = entry // blocks, num_batch, head // group, num_heads // group
            _store(outputs, dk, dv, key, num_keys, coordinates, dims, natural_scale)
        elif ends | (tile == last):
            partial = partials_ptr + (2 * program + begins).to(tl.int64) * BLOCK_N * (D + DV)
            line = partial + tl.arange(0, BLOCK_N)[:, None] * (D + DV)
            tl.store(line + tl.arange(0, D)[None, :], dk)
            tl.store(line + D + tl.arange(0, DV)[None, :], dv)
        dk = tl.where(ends, 0.0, dk)
        dv = tl.where(ends, 0.0, dv)
        if tile - origin == length * num_heads:
            origin = tile
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
    partials_ptr,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds up some rows of the block, if any, that begins in this program's share and ends in a
    later one."""
    program = tl.program_id(0)
    blocks = tl.cdiv(num_keys, BLOCK_N)
    sizes = num_queries, padded, num_heads, scale, softcap, window
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
    length = tl.sum(tl.where(before == origin, tiles, 0), 0) // num_heads * group
    start = origin + (last - 1 - origin) // length * length
    stop = start + length
    if (start < program * share) | (stop == last):
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    line = row[:, None] * (D + DV)
    dk = tl.zeros((ROWS, D), tl.float32)
    dv = tl.zeros((ROWS, DV), tl.float32)
    for other in range(program, (stop - 1) // share + 1):
        partial = (
            partials_ptr + (2 * other + (other == program)).to(tl.int64) * BLOCK_N * (D + DV) + line
        )
        dk += tl.load(partial + tl.arange(0, D)[None, :])
        dv += tl.load(partial + D + tl.arange(0, DV)[None, :])
    key = entry % blocks * BLOCK_N + row
    coordinates = entry // blocks, num_batch, (start - origin) // length, num_heads // group
    _store(outputs, dk, dv, key, num_keys, coordinates, dims, natural_scale)


def in_shares(num_keys: int, heads: int, width: int, processors: int) -> bool:
    """Whether the work is cut into shares, one per processor.

    Args:
        num_keys: of one batch entry.
        heads: KV heads of all batch entries.
        width: the greater head dim, of k or v.
        processors: of the GPU.
    """
    blocks = cdiv(num_keys, COUNTED_KEYS) * heads
    return width <= LARGEST_CUT_DIM and blocks < BLOCKS_PER_PROCESSOR * processors


def launch_keys(
    inputs: tuple, sizes: tuple, config: dict, outputs: tuple[Tensor, Tensor], cut: bool
) -> None:
    """Computes dk and dv.

    Args:
        inputs, sizes: the kernel's arguments before and after its outputs.
        config: its constants and launch options.
        cut: from `in_shares`.
    """
    num_queries, num_heads, num_keys, num_batch, group = sizes[2], sizes[4], *sizes[8:11]
    entries = num_batch * cdiv(num_keys, config["BLOCK_N"])
    if not cut:
        programs = entries * (num_heads // group)
        _key_value_kernel[(programs,)](
            *inputs, outputs, *sizes, outputs[0], ENTRIES=1, CUT=False, **config
        )
        return
    tiles = entries * cdiv(num_queries, config["BLOCK_M"]) * num_heads
    assert tiles < 2**31, "tiles are counted in 32 bits"
    shares, width = num_processors(outputs[0].device), config["D"] + config["DV"]
    shape = (2 * shares, config["BLOCK_N"], width)
    partials = torch.empty(shape, dtype=torch.float32, device=outputs[0].device)
    config["ENTRIES"] = max(next_power_of_2(entries), LEAST_ENTRIES)
    _key_value_kernel[(shares,)](*inputs, outputs, *sizes, partials, CUT=True, **config)
    constants = {
        name: config[name] for name in ("FLAGS", "BLOCK_M", "BLOCK_N", "D", "DV", "ENTRIES")
    }
    constants["FLAGS"] = _of_ranges(config["FLAGS"])
    grid = (shares, config["BLOCK_N"] // ROWS)
    _sum_parts_kernel[grid](outputs, *sizes, partials, **constants, ROWS=ROWS)


def _of_ranges(flags: Flags) -> Flags:
    """Flags that `query_range` reads, so that rules with the same ranges share a binary."""
    spans = flags.spans
    return Flags(
        flags.causal and not spans, flags.window and not spans, False, False, False, False, spans
    )

"""Which keys a block of queries sees: as a mask of a tile, and as ranges of blocks to visit."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron5d.kernels.dispatch import cdiv, jit, tl
from megatron5d.kernels.flash_attention.plain import AttentionRule

_TOKENS_LOADED = 2048  # by a program of `_spans_kernel` at a time


class Flags(NamedTuple):
    """Features of a rule that select code in the kernels, as their constant `FLAGS`.

    Since Triton 3.8 kernels see the fields alone, no properties. Blocks that a mask cuts lie at
    both edges of a range if there is a window or there are spans.
    """

    causal: bool
    window: bool
    softcap: bool
    documents: bool
    q_positions: bool
    k_positions: bool
    spans: bool  # the blocks to visit depend on data (documents, positions), not on indices alone


def flags_of(rule: AttentionRule) -> Flags:
    """Flags of a rule."""
    documents = rule.documents is not None
    q_positions, k_positions = rule.q_positions is not None, rule.k_positions is not None
    return Flags(
        rule.causal,
        rule.window is not None,
        rule.softcap != 0.0,
        documents,
        q_positions,
        k_positions,
        documents or q_positions or k_positions,
    )


class MaskData(NamedTuple):
    """int32 positions `[s]`, `[t]` and documents `[b, s]`, `[b, t]` of queries and keys."""

    q_positions: Tensor
    q_documents: Tensor
    k_positions: Tensor
    k_documents: Tensor


def mask_data(rule: AttentionRule, unused: Tensor) -> MaskData:
    """Positions and documents of queries and keys; `unused` where the rule has none."""
    k_documents = rule.documents if rule.k_documents is None else rule.k_documents
    tensors = (rule.q_positions, rule.documents, rule.k_positions, k_documents)
    return MaskData(*(unused if x is None else x.to(torch.int32).contiguous() for x in tensors))


@jit
def _positions(pointer, index, count, GIVEN: tl.constexpr):
    """Positions of the tokens at `index`: loaded if GIVEN, else the index itself."""
    return tl.load(pointer + index, index < count, other=0) if GIVEN else index


@jit
def _documents(pointer, batch, index, count, BEYOND: tl.constexpr, GIVEN: tl.constexpr):
    """Documents of the tokens at `index`; tokens past the end belong to document `BEYOND`."""
    if GIVEN:
        index = tl.load(pointer + batch.to(tl.int64) * count + index, index < count, other=BEYOND)
    return index


@jit
def queries_at(mask, batch, query, num_queries, FLAGS: tl.constexpr):
    """Positions and documents of queries."""
    position = _positions(mask.q_positions, query, num_queries, FLAGS.q_positions)
    return position, _documents(mask.q_documents, batch, query, num_queries, -1, FLAGS.documents)


@jit
def keys_at(mask, batch, key, num_keys, FLAGS: tl.constexpr):
    """Positions and documents of keys; past the end they belong to no document of a query."""
    position = _positions(mask.k_positions, key, num_keys, FLAGS.k_positions)
    return position, _documents(mask.k_documents, batch, key, num_keys, -2, FLAGS.documents)


@jit
def visible(q_at, k_at, q_document, k_document, window, FLAGS: tl.constexpr):
    """Mask of a tile; positions and documents broadcast, in either orientation."""
    if not FLAGS.causal:
        mask = (q_at == q_at) & (k_at == k_at)
    elif q_at.shape[0] == 1 and not FLAGS.documents:
        # In tiles with rows of keys the difference takes fewer registers than a comparison.
        mask = q_at - k_at >= 0
    else:
        mask = q_at >= k_at
    # A shifted side is computed once a row or column, a distance once a score.
    if FLAGS.window:
        mask &= q_at - window < k_at
        if not FLAGS.causal:
            mask &= k_at - window < q_at
    if FLAGS.documents:
        mask &= q_document == k_document
    return mask


@jit
def up_to_last_key(q_at, num_keys, FLAGS: tl.constexpr):
    """Clamps positions of queries to the last key's, so that a causal mask alone hides what lies
    past it."""
    if FLAGS.causal and not (FLAGS.window or FLAGS.k_positions):
        q_at = tl.minimum(q_at, num_keys - 1)
    return q_at


@jit
def visible_keys(queries, mask, batch, key, num_keys, window, FLAGS: tl.constexpr):
    """Mask `[queries, keys]` of a tile whose queries went through `up_to_last_key`."""
    q_at, q_document = queries
    k_at, k_document = keys_at(mask, batch, key, num_keys, FLAGS)
    tile = visible(q_at, k_at[None, :], q_document, k_document[None, :], window, FLAGS)
    if FLAGS.window or FLAGS.k_positions or not FLAGS.causal:
        tile &= (key < num_keys)[None, :]
    return tile


@jit
def _load_span(spans_ptr, span_stride, batch, block):
    span = spans_ptr + batch * span_stride + block * 4
    return tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)


@jit
def key_range(
    spans_ptr,
    span_stride,
    batch,
    block,
    num_keys,
    window,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys [start, stop) that a block of queries sees; all its queries see all of [left, right)."""
    if FLAGS.spans:
        start, left, right, stop = _load_span(spans_ptr, span_stride, batch, block)
    else:
        first = block * BLOCK_M
        start = 0
        left = 0
        right = num_keys
        stop = num_keys
        if FLAGS.causal:
            right = tl.minimum(right, first)
            stop = tl.minimum(stop, first + BLOCK_M)
        if FLAGS.window:
            start = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
            left = tl.cdiv(tl.maximum(first + BLOCK_M - window, 0), BLOCK_N) * BLOCK_N
            right = tl.minimum(right, first + window)
            stop = tl.minimum(stop, first + BLOCK_M - 1 + window)
        right = tl.maximum(right // BLOCK_N * BLOCK_N, start)
        left = tl.minimum(tl.maximum(left, start), right)
    return start, left, right, stop


@jit
def query_range(
    spans_ptr,
    span_stride,
    batch,
    block,
    num_queries,
    window,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Queries [start, stop) that see a block of keys; all of [left, right) see all its keys."""
    if FLAGS.spans:
        start, left, right, stop = _load_span(spans_ptr, span_stride, batch, block)
    else:
        first = block * BLOCK_N
        start = 0
        left = 0
        right = num_queries
        stop = num_queries
        if FLAGS.causal:
            start = first // BLOCK_M * BLOCK_M
            left = tl.cdiv(first + BLOCK_N - 1, BLOCK_M) * BLOCK_M
        if FLAGS.window:
            if not FLAGS.causal:
                start = tl.maximum(first - window + 1, 0) // BLOCK_M * BLOCK_M
                left = tl.cdiv(tl.maximum(first + BLOCK_N - window, 0), BLOCK_M) * BLOCK_M
            right = tl.minimum(right, (first + window) // BLOCK_M * BLOCK_M)
            stop = tl.minimum(stop, first + BLOCK_N - 1 + window)
        right = tl.maximum(right, start)
        left = tl.minimum(tl.maximum(left, start), right)
    return start, left, right, stop


@jit
def at_edges(offset, span):
    """Token at an offset that does not count [left, right), whose blocks are fully visible."""
    _, left, right, _ = span
    return tl.where(offset < left, offset, offset + right - left)


@jit
def block_start(offset, span, MASKED: tl.constexpr, FLAGS: tl.constexpr, BLOCK: tl.constexpr):
    """First token of the block at an offset of a loop between `loop_bounds`."""
    if MASKED and (FLAGS.window or FLAGS.spans):
        offset = at_edges(offset, span)
    return tl.multiple_of(offset, BLOCK)


@jit
def loop_bounds(span, MASKED: tl.constexpr, FLAGS: tl.constexpr, LATE: tl.constexpr):
    """Bounds of a loop over a span: over its edges if MASKED (`at_edges`), else between them.

    Without a window and spans there is only one edge, whose offsets are the tokens themselves:
    behind `right` if LATE, else before `left`.
    """
    start, left, right, stop = span
    if not MASKED:
        begin, end = left, right
    elif FLAGS.window or FLAGS.spans:
        begin, end = start, stop - (right - left)
    elif LATE:
        begin, end = right, stop
    else:
        begin, end = start, left
    return begin, end


@jit
def _extremes(pointer, batch, index, count, BATCHED: tl.constexpr, GIVEN: tl.constexpr):
    """Least and greatest value of each row of tokens; past the end the last token counts."""
    index = tl.minimum(index, count - 1)
    if GIVEN:
        at = pointer + index
        if BATCHED:
            at += batch.to(tl.int64) * count
        index = tl.load(at)
    return tl.min(index, 1), tl.max(index, 1)


@jit(do_not_specialize=["anchor_count", "candidate_count", "window", "causal", "queries"])
def _spans_kernel(
    anchors,
    candidates,
    spans_ptr,
    anchor_count,
    candidate_count,
    window,
    causal,
    queries,
    HAS_DOCUMENTS: tl.constexpr,
    ANCHOR_POSITIONS: tl.constexpr,
    CANDIDATE_POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATE_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Finds the blocks of candidates that an anchor, a block of queries (or of keys), may see.

    The span reaches from the first to past the last visible block, and between them from the first
    to past the last fully visible one, if all blocks in between are fully visible too. `anchors`
    and `candidates` are (positions, documents) of the two sides.
    """
    block = tl.program_id(0)
    batch = tl.program_id(1)
    token = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    low, high = _extremes(anchors[0], batch, token, anchor_count, False, ANCHOR_POSITIONS)
    first_document, last_document = _extremes(
        anchors[1], batch, token, anchor_count, True, HAS_DOCUMENTS
    )
    blocks = tl.cdiv(candidate_count, CANDIDATE_BLOCK)
    start = blocks + tl.zeros((1,), tl.int32)
    left = start
    right = tl.zeros((1,), tl.int32)
    stop = right
    full_blocks = right
    for chunk in range(0, blocks, CHUNK):
        candidate = chunk + tl.arange(0, CHUNK)
        tokens = candidate[:, None] * CANDIDATE_BLOCK + tl.arange(0, CANDIDATE_BLOCK)[None, :]
        least, greatest = _extremes(
            candidates[0], batch, tokens, candidate_count, False, CANDIDATE_POSITIONS
        )
        partly = candidate < blocks
        fully = candidate < candidate_count // CANDIDATE_BLOCK
        if causal:
            partly &= tl.where(queries != 0, least <= high, low <= greatest)
            fully &= tl.where(queries != 0, greatest <= low, high <= least)
        if window:
            partly &= (low - greatest < window) & (least - high < window)
            fully &= (high - least < window) & (greatest - low < window)
        if HAS_DOCUMENTS:
            first, last = _extremes(candidates[1], batch, tokens, candidate_count, True, True)
            partly &= (first_document <= last) & (first <= last_document)
            fully &= (first_document == last) & (first == last_document) & (first == last)
        start = tl.minimum(start, tl.min(tl.where(partly, candidate, blocks), 0))
        left = tl.minimum(left, tl.min(tl.where(fully, candidate, blocks), 0))
        right = tl.maximum(right, tl.max(tl.where(fully, candidate + 1, 0), 0))
        stop = tl.maximum(stop, tl.max(tl.where(partly, candidate + 1, 0), 0))
        full_blocks += tl.sum(fully.to(tl.int32), 0)
    adjacent = (full_blocks > 0) & (right - left == full_blocks)
    start = tl.where(stop > 0, start, 0)
    row = batch.to(tl.int64) * tl.num_programs(0) + block
    span = spans_ptr + row * 4 + tl.zeros((1,), tl.int32)
    tl.store(span, start * CANDIDATE_BLOCK)
    tl.store(span + 1, tl.where(adjacent, left, start) * CANDIDATE_BLOCK)
    tl.store(span + 2, tl.where(adjacent, right, start) * CANDIDATE_BLOCK)
    tl.store(span + 3, tl.minimum(stop * CANDIDATE_BLOCK, candidate_count))


def spans_of(
    rule: AttentionRule,
    mask: MaskData,
    counts: tuple[int, int],
    blocks: tuple[int, int],
    *,
    queries: bool,
) -> Tensor:
    """Spans of every block of queries, as `key_range` gives them, or of keys, as `query_range`.

    Args:
        mask: from `mask_data`.
        counts: s and t.
        blocks: BLOCK_M and BLOCK_N.
        queries: the spans are those of blocks of queries.

    Returns:
        int32 `[b|1, blocks, 4]`; zeros for a block that sees nothing.
    """
    flags = flags_of(rule)
    sides, has_positions = [mask[:2], mask[2:]], [flags.q_positions, flags.k_positions]
    anchor, candidate = (0, 1) if queries else (1, 0)
    num_blocks = cdiv(counts[anchor], blocks[anchor])
    num_batch = 1 if rule.documents is None else rule.documents.shape[0]
    spans = torch.empty(num_batch, num_blocks, 4, dtype=torch.int32, device=mask[0].device)
    _spans_kernel[(num_blocks, num_batch)](
        sides[anchor],
        sides[candidate],
        spans,
        counts[anchor],
        counts[candidate],
        rule.window or 0,
        int(rule.causal),
        int(queries),
        HAS_DOCUMENTS=flags.documents,
        ANCHOR_POSITIONS=has_positions[anchor],
        CANDIDATE_POSITIONS=has_positions[candidate],
        BLOCK=blocks[anchor],
        CANDIDATE_BLOCK=blocks[candidate],
        CHUNK=cdiv(_TOKENS_LOADED, blocks[candidate]),
    )
    return spans


def span_arguments(
    rule: AttentionRule,
    mask: MaskData,
    unused: Tensor,
    counts: tuple[int, int],
    blocks: tuple[int, int],
    *,
    queries: bool,
) -> tuple[Tensor, int]:
    """Spans as of `spans_of`, or `unused` where the rule needs none, and their stride over b."""
    spans = unused
    if flags_of(rule).spans:
        spans = spans_of(rule, mask, counts, blocks, queries=queries)
    return spans, spans.stride(0) if spans.shape[0] > 1 else 0

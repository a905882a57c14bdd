"""Which keys a block of queries sees: elementwise in a kernel, and as ranges of blocks worth
visiting."""

import torch
from torch import Tensor

from megatron5d.kernels.dispatch import cdiv, jit, tl
from megatron5d.kernels.flash_attention.plain import AttentionRule

_LOADED = 2048  # tokens that a program looks at together


@jit
def visible(
    q_at,
    k_at,
    q_document,
    k_document,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Returns the mask of a tile; positions and documents broadcast against each other, in either
    orientation."""
    if not CAUSAL:
        seen = (q_at == q_at) & (k_at == k_at)
    elif (
        q_at.shape[0] == 1 and not HAS_DOCUMENTS
    ):  # rows of keys: the difference takes fewer registers there
        seen = q_at - k_at >= 0
    else:
        seen = q_at >= k_at
    # one side of a comparison is made once for a row or a column, a distance for each score
    if HAS_WINDOW:
        seen &= q_at - window < k_at
        if not CAUSAL:
            seen &= k_at - window < q_at
    if HAS_DOCUMENTS:
        seen &= q_document == k_document
    return seen


@jit
def positions(pointer, index, count, GIVEN: tl.constexpr):
    """Positions of the tokens at `index`: read where they are given, the index itself where not."""
    return tl.load(pointer + index, index < count, other=0) if GIVEN else index


@jit
def up_to_last_key(
    q_at, num_keys, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_K_POSITIONS: tl.constexpr
):
    """Positions of queries, cut at the last key's, where a causal mask then hides what lies past it
    by itself."""
    if CAUSAL and not (HAS_WINDOW or HAS_K_POSITIONS):
        q_at = tl.minimum(q_at, num_keys - 1)
    return q_at


@jit
def among_keys(
    seen,
    key,
    num_keys,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_K_POSITIONS: tl.constexpr,
):
    """Returns the mask of a tile without columns past the last key, where `up_to_last_key` has not
    hidden them."""
    if HAS_WINDOW or HAS_K_POSITIONS or not CAUSAL:
        seen &= (key < num_keys)[None, :]
    return seen


@jit
def documents(pointer, batch, index, count, BEYOND: tl.constexpr, GIVEN: tl.constexpr):
    """Documents of the tokens at `index`; past the end all belong to document `BEYOND`, unlike
    any."""
    if GIVEN:
        index = tl.load(pointer + batch.to(tl.int64) * count + index, index < count, other=BEYOND)
    return index


@jit
def key_range(
    spans_ptr,
    span_stride,
    batch,
    block,
    num_keys,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns what a block of queries meets: the keys [start, stop); all its queries see all of
    [left, right)."""
    if HAS_SPANS:
        span = spans_ptr + batch * span_stride + block * 4
        start, left, right, stop = (
            tl.load(span),
            tl.load(span + 1),
            tl.load(span + 2),
            tl.load(span + 3),
        )
    else:
        first = block * BLOCK_M
        start = 0
        left = 0
        right = num_keys
        stop = num_keys
        if CAUSAL:
            right = tl.minimum(right, first)
            stop = tl.minimum(stop, first + BLOCK_M)
        if HAS_WINDOW:
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
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns what a block of keys meets: the queries [start, stop); all of [left, right) see all
    its keys."""
    if HAS_SPANS:
        span = spans_ptr + batch * span_stride + block * 4
        start, left, right, stop = (
            tl.load(span),
            tl.load(span + 1),
            tl.load(span + 2),
            tl.load(span + 3),
        )
    else:
        first = block * BLOCK_N
        start = 0
        left = 0
        right = num_queries
        stop = num_queries
        if CAUSAL:
            start = first // BLOCK_M * BLOCK_M
            left = tl.cdiv(first + BLOCK_N - 1, BLOCK_M) * BLOCK_M
        if HAS_WINDOW:
            if not CAUSAL:
                start = tl.maximum(first - window + 1, 0) // BLOCK_M * BLOCK_M
                left = tl.cdiv(tl.maximum(first + BLOCK_N - window, 0), BLOCK_M) * BLOCK_M
            right = tl.minimum(right, (first + window) // BLOCK_M * BLOCK_M)
            stop = tl.minimum(stop, first + BLOCK_N - 1 + window)
        right = tl.maximum(right, start)
        left = tl.minimum(tl.maximum(left, start), right)
    return start, left, right, stop


@jit
def at_edges(place, span):
    """Finds the `place`-th token, counted without those in [left, right), which is where blocks are
    seen whole."""
    _, left, right, _ = span
    return tl.where(place < left, place, place + right - left)


@jit
def loop_bounds(span, MASKED: tl.constexpr, SPLIT: tl.constexpr, LATE: tl.constexpr):
    """Computes [begin, end) of a loop over a span: its edges if MASKED (`at_edges`), else what lies
    between them.

    Without SPLIT there is only one edge, and its places are the tokens themselves: LATE is that
    behind `right`.
    """
    start, left, right, stop = span
    if not MASKED:
        begin, end = left, right
    elif SPLIT:
        begin, end = start, stop - (right - left)
    elif LATE:
        begin, end = right, stop
    else:
        begin, end = start, left
    return begin, end


@jit
def _extremes(pointer, batch, index, count, BATCHED: tl.constexpr, GIVEN: tl.constexpr):
    """Finds the least and greatest token of each row of `index`; the last token stands for those
    past it."""
    index = tl.minimum(index, count - 1)
    if GIVEN:
        at = pointer + index
        if BATCHED:
            at += batch.to(tl.int64) * count
        index = tl.load(at)
    return tl.min(index, 1), tl.max(index, 1)


@jit(do_not_specialize=["own_count", "other_count", "window", "causal", "queries"])
def _spans_kernel(
    own,
    other,
    spans_ptr,
    own_count,
    other_count,
    window,
    causal,
    queries,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Finds what a block of queries (or of keys) may meet: from the first to past the last block of
    the other side.

    Between them, from the first to past the last block that it sees entirely, if all blocks between
    are such. `own` and `other` are positions and documents of the block's side and of the other
    one.
    """
    block = tl.program_id(0)
    batch = tl.program_id(1)
    token = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    low, high = _extremes(own[0], batch, token, own_count, False, HAS_OWN)
    first_document, last_document = _extremes(own[1], batch, token, own_count, True, HAS_DOCUMENTS)
    blocks = tl.cdiv(other_count, OTHER_BLOCK)
    start = blocks + tl.zeros((1,), tl.int32)
    left = start
    right = tl.zeros((1,), tl.int32)
    stop = right
    clear_blocks = right
    for chunk in range(0, blocks, CHUNK):
        candidate = chunk + tl.arange(0, CHUNK)
        tokens = candidate[:, None] * OTHER_BLOCK + tl.arange(0, OTHER_BLOCK)[None, :]
        other_low, other_high = _extremes(other[0], batch, tokens, other_count, False, HAS_OTHER)
        meet = candidate < blocks
        clear = candidate < other_count // OTHER_BLOCK
        if causal:
            meet &= tl.where(queries != 0, other_low <= high, low <= other_high)
            clear &= tl.where(queries != 0, other_high <= low, high <= other_low)
        if window:
            meet &= (low - other_high < window) & (other_low - high < window)
            clear &= (high - other_low < window) & (other_high - low < window)
        if HAS_DOCUMENTS:
            other_first, other_last = _extremes(other[1], batch, tokens, other_count, True, True)
            meet &= (first_document <= other_last) & (other_first <= last_document)
            clear &= (
                (first_document == other_last)
                & (other_first == last_document)
                & (other_first == other_last)
            )
        start = tl.minimum(start, tl.min(tl.where(meet, candidate, blocks), 0))
        left = tl.minimum(left, tl.min(tl.where(clear, candidate, blocks), 0))
        right = tl.maximum(right, tl.max(tl.where(clear, candidate + 1, 0), 0))
        stop = tl.maximum(stop, tl.max(tl.where(meet, candidate + 1, 0), 0))
        clear_blocks += tl.sum(clear.to(tl.int32), 0)
    together = (clear_blocks > 0) & (right - left == clear_blocks)
    start = tl.where(stop > 0, start, 0)
    span = (
        spans_ptr + (batch.to(tl.int64) * tl.num_programs(0) + block) * 4 + tl.zeros((1,), tl.int32)
    )
    tl.store(span, start * OTHER_BLOCK)
    tl.store(span + 1, tl.where(together, left, start) * OTHER_BLOCK)
    tl.store(span + 2, tl.where(together, right, start) * OTHER_BLOCK)
    tl.store(span + 3, tl.minimum(stop * OTHER_BLOCK, other_count))


def needs_spans(rule: AttentionRule) -> bool:
    """Says whether the blocks to visit depend on data (documents, positions), not on indices
    alone."""
    return (
        rule.documents is not None or rule.q_positions is not None or rule.k_positions is not None
    )


def _spans(
    rule: AttentionRule,
    own: tuple,
    other: tuple,
    counts: tuple[int, int],
    blocks: tuple[int, int],
    queries: bool,
) -> Tensor:
    num_blocks = cdiv(counts[0], blocks[0])
    num_batch = 1 if rule.documents is None else rule.documents.shape[0]
    spans = torch.empty(num_batch, num_blocks, 4, dtype=torch.int32, device=own[0].device)
    given = rule.q_positions is not None, rule.k_positions is not None
    _spans_kernel[(num_blocks, num_batch)](
        own,
        other,
        spans,
        *counts,
        rule.window or 0,
        int(rule.causal),
        int(queries),
        HAS_DOCUMENTS=rule.documents is not None,
        HAS_OWN=given[0 if queries else 1],
        HAS_OTHER=given[1 if queries else 0],
        BLOCK=blocks[0],
        OTHER_BLOCK=blocks[1],
        CHUNK=cdiv(_LOADED, blocks[1]),
    )
    return spans


def key_spans(
    rule: AttentionRule, inputs: tuple[Tensor, ...], s: int, t: int, block_m: int, block_n: int
) -> Tensor:
    """Makes for each block of queries `[b|1, query blocks, 4]` int32 what `key_range` gives; zeros
    if it sees no key.

    `inputs` are int32: positions of queries and keys, documents of queries and keys.
    """
    q_at, k_at, q_documents, k_documents = inputs
    return _spans(rule, (q_at, q_documents), (k_at, k_documents), (s, t), (block_m, block_n), True)


def query_spans(
    rule: AttentionRule, inputs: tuple[Tensor, ...], s: int, t: int, block_m: int, block_n: int
) -> Tensor:
    """Makes for each block of keys `[b|1, key blocks, 4]` int32 what `query_range` gives, as
    `key_spans`."""
    q_at, k_at, q_documents, k_documents = inputs
    return _spans(rule, (k_at, k_documents), (q_at, q_documents), (t, s), (block_n, block_m), False)

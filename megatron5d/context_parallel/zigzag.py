"""The rows of a sequence that each cp rank holds, and the attention calls that a rank makes.

A cp axis is outer × inner ranks, inner fastest. The inner ranks exchange heads for sequence
(Ulysses); the outer ranks exchange keys and values (ring, allgather):

    ring, allgather   outer = cp, inner = 1
    ulysses           outer = 1, inner = cp
    two_level         both

The sequence is cut into 2·outer chunks, and every outer rank gets two, chosen so that all have
about the same number of visible query-key pairs (`even_layout`). Under a causal mask rank r gets
chunks r and 2·outer-1-r (zigzag; Brandon et al. 2023, arXiv:2311.09431). Where all chunks cost the
same, as under a window or a full mask, it gets two adjacent ones. The rows of an outer rank are cut
contiguously over its inner ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

Documents = Sequence[Sequence[int]] | np.ndarray


@dataclass(frozen=True)
class Mask:
    """The keys that a query sees."""

    causal: bool = True  # only keys at or before the query
    window: int | None = None  # only keys less than this many rows away; None = at any distance
    # `[b, s]`: the number of each row's document, at least 0; a query sees only keys of its
    # document, which padding may interrupt; None = one document
    documents: Documents | None = None


@dataclass(frozen=True)
class SequenceLayout:
    """How a sequence is cut over outer and inner ranks (`config.derived.split_of`)."""

    seq_len: int  # rows of the sequence
    outer: int = 1  # ranks that exchange keys and values
    inner: int = 1  # ranks that exchange heads for sequence
    order: tuple[int, ...] = ()  # two chunks for each outer rank; () = zigzag

    def __post_init__(self) -> None:
        multiple = self.num_chunks * self.inner
        assert self.seq_len % multiple == 0, (self.seq_len, multiple)
        if not self.order:
            object.__setattr__(self, "order", zigzag(self.outer))

    @property
    def size(self) -> int:
        """Number of ranks of the cp axis."""
        return self.outer * self.inner

    @property
    def num_chunks(self) -> int:
        """Number of chunks: two for each outer rank, but one for a single outer rank."""
        return 2 * self.outer if self.outer > 1 else 1

    @property
    def chunk_rows(self) -> int:
        """Number of rows of a chunk."""
        return self.seq_len // self.num_chunks

    def chunks(self, outer_rank: int) -> tuple[int, ...]:
        """Indices of an outer rank's chunks, in its order."""
        return self.order[2 * outer_rank : 2 * outer_rank + 2] if self.outer > 1 else (0,)

    def outer_rows(self, outer_rank: int) -> np.ndarray:
        """Rows of an outer rank, that is, of all its inner ranks, in its order."""
        n = self.chunk_rows
        return np.concatenate([np.arange(c * n, (c + 1) * n) for c in self.chunks(outer_rank)])

    def rows(self, rank: int) -> np.ndarray:
        """Rows of one rank of the cp axis, in its order."""
        outer_rank, inner_rank = divmod(rank, self.inner)
        rows = self.outer_rows(outer_rank)
        n = len(rows) // self.inner
        return rows[inner_rank * n : (inner_rank + 1) * n]


def zigzag(outer: int) -> tuple[int, ...]:
    """Chunks r and 2·outer-1-r for rank r."""
    return tuple(c for r in range(outer) for c in (r, 2 * outer - 1 - r))


def even_layout(layout: SequenceLayout, mask: Mask) -> SequenceLayout:
    """The same cut, with the chunks assigned so that the busiest outer rank sees the fewest pairs.

    Pairing the heaviest chunk with the lightest, and so on, is optimal for two chunks per rank. Of
    equally good orders adjacent chunks come first, whose keys are needed by the fewest ranks, then
    zigzag.

    Args:
        layout: how the sequence is cut.
        mask: of one micro-batch, the same on all ranks.
    """
    if layout.outer == 1:
        return layout
    pairs = chunk_pairs(layout, mask)
    by_weight = np.argsort(-pairs, kind="stable").tolist()
    heavy, light = by_weight[: layout.outer], reversed(by_weight)
    balanced = [chunk for pair in zip(heavy, light) for chunk in sorted(pair)]
    orders = [tuple(range(layout.num_chunks)), zigzag(layout.outer), tuple(balanced)]

    def busiest(order: tuple[int, ...]) -> int:
        return pairs[list(order)].reshape(-1, 2).sum(1).max()

    return replace(layout, order=min(orders, key=busiest))


@dataclass(frozen=True)
class Call:
    """One attention of a span of local queries to a span of a block's keys.

    Args:
        queries, keys: spans within the rows of the two ranks.
        causal: the spans have the same positions, and the kernel hides later keys. False: no key is
            later than a query, or the mask is not causal.
        masked: a window or documents hide some of the pairs, so that the kernel needs positions and
            documents.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    masked: bool


def plan_calls(layout: SequenceLayout, rank: int, mask: Mask) -> list[list[Call]]:
    """Attention calls of an outer rank, without pairs of chunks that see nothing of each other.

    Args:
        layout: how the sequence is cut.
        rank: outer rank of the queries.
        mask: of one micro-batch.

    Returns:
        For each outer rank of keys, its calls.
    """
    n, sees_any, sees_all = layout.chunk_rows, _sees_any(layout, mask), _sees_all(layout, mask)
    plan = []
    for source in range(layout.outer):
        calls = [
            Call(
                (i * n, (i + 1) * n),
                (j * n, (j + 1) * n),
                causal=mask.causal and query == key,
                masked=not sees_all[query, key],
            )
            for i, query in enumerate(layout.chunks(rank))
            for j, key in enumerate(layout.chunks(source))
            if sees_any[query, key]
        ]
        plan.append(_merge_calls(calls))
    return plan


def num_hops(layout: SequenceLayout, mask: Mask) -> int:
    """Number of hops after which every outer rank has received the keys it sees."""
    if layout.outer == 1:
        return 0
    owner = np.argsort(layout.order) // 2  # outer rank that holds each chunk
    hops = (owner[:, None] - owner[None]) % layout.outer
    return int((hops * _sees_any(layout, mask)).max())


def _chunk_distances(layout: SequenceLayout) -> np.ndarray:
    """Int `[chunks, chunks]`, in chunks; positive where the keys precede the queries."""
    chunks = np.arange(layout.num_chunks)
    return chunks[:, None] - chunks[None]


def _chunk_documents(layout: SequenceLayout, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest document of each chunk, `[b, chunks]` each."""
    by_chunk = np.asarray(documents).reshape(-1, layout.num_chunks, layout.chunk_rows)
    return by_chunk.min(2), by_chunk.max(2)


def _sees_any(layout: SequenceLayout, mask: Mask) -> np.ndarray:
    """Bool `[chunks, chunks]`: some query of the first chunk sees some key of the second."""
    n, distance = layout.chunk_rows, _chunk_distances(layout)
    sees = distance >= 0 if mask.causal else np.ones_like(distance, bool)
    if mask.window is not None:
        sees = (sees & ((np.abs(distance) - 1) * n + 1 < mask.window)) | (distance == 0)
    if mask.documents is not None:
        first, last = _chunk_documents(layout, mask.documents)
        overlaps = (first[:, :, None] <= last[:, None]) & (first[:, None] <= last[:, :, None])
        sees = sees & overlaps.any(0)
    return sees


def _sees_all(layout: SequenceLayout, mask: Mask) -> np.ndarray:
    """Bool `[chunks, chunks]`: only causality hides pairs of the two chunks."""
    n, distance = layout.chunk_rows, _chunk_distances(layout)
    sees = np.ones_like(distance, bool)
    if mask.window is not None:
        sees &= (np.abs(distance) + 1) * n - 1 < mask.window
    if mask.documents is not None:
        first, last = _chunk_documents(layout, mask.documents)
        is_one = (first[:, :, None] == last[:, None]) & (first[:, None] == last[:, :, None])
        sees &= is_one.all(0)
    return sees


def _merge_calls(calls: list[Call]) -> list[Call]:
    """Merges unmasked calls of adjacent spans into fewer, larger calls."""
    merged: list[Call] = []
    for call in calls:
        last = merged[-1] if merged else call
        if not (call.causal or call.masked or last.causal or last.masked):
            if last.queries == call.queries and last.keys[1] == call.keys[0]:
                merged[-1] = Call(call.queries, (last.keys[0], call.keys[1]), False, False)
                continue
            if last.keys == call.keys and last.queries[1] == call.queries[0]:
                merged[-1] = Call((last.queries[0], call.queries[1]), call.keys, False, False)
                continue
        merged.append(call)
    return merged


def chunk_pairs(layout: SequenceLayout, mask: Mask) -> np.ndarray:
    """Number of visible query-key pairs of each chunk's queries, int64 `[chunks]`."""
    rows = np.arange(layout.seq_len)
    # the first and the end of the rows that a row may see
    first, end = np.zeros_like(rows), np.full_like(rows, rows.size)
    if mask.causal:
        end = rows + 1
    if mask.window is not None:
        first, end = np.maximum(first, rows - mask.window + 1), np.minimum(end, rows + mask.window)
    counts = end - first
    if mask.documents is not None:
        # Rows of one document and sequence are adjacent in `ordered`, by their position.
        numbers = np.asarray(mask.documents)
        sequences = np.arange(len(numbers))[:, None]
        origin = (sequences * (numbers.max() + 1) + numbers) * rows.size
        ordered = np.sort(origin + rows, axis=None)
        counts = np.searchsorted(ordered, origin + end) - np.searchsorted(ordered, origin + first)
        counts = counts.sum(0)
    return counts.reshape(layout.num_chunks, -1).sum(1)


def visible_pairs(layout: SequenceLayout, mask: Mask) -> list[int]:
    """Number of visible query-key pairs of each outer rank's queries."""
    pairs = chunk_pairs(layout, mask)
    return [int(pairs[list(layout.chunks(rank))].sum()) for rank in range(layout.outer)]

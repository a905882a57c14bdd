"""Which rows of a sequence each cp rank holds, and which blocks of queries and keys meet; integers
only.

A cp axis is outer × inner ranks, inner fastest. The inner ranks exchange heads for sequence
(Ulysses); over the outer ranks keys and values travel (ring, allgather):

    ring, allgather   outer = cp, inner = 1         ulysses   outer = 1, inner = cp         two_level   both

The sequence is cut into 2·outer chunks, and every outer rank gets two, chosen so that all have
about the same number of visible query-key pairs (`even_layout`). Under a causal mask rank r gets
chunks r and 2·outer-1-r (zigzag; Brandon et al. 2023, arXiv:2311.09431). Where all chunks are
equally much work, as under a window or a full mask, it gets neighbours. The rows of an outer rank
are cut contiguously over its inner ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

Documents = Sequence[Sequence[int]] | np.ndarray


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees."""

    causal: bool = True  # only keys at or before its own position
    # only keys less than this many rows away, itself included; None = any
    window: int | None = None
    # `[b, s]`, the number of each row's document, rising along a sequence: only keys of its own
    # document; None = one document
    documents: Documents | None = None


@dataclass(frozen=True)
class SequenceLayout:
    """How a valid sequence is cut; `config.derived.split_of` says into how many outer and inner
    ranks."""

    seq_len: int  # rows of the whole sequence
    outer: int = 1  # ranks among which keys and values travel
    inner: int = 1  # ranks that exchange heads for sequence
    order: tuple[int, ...] = ()  # the chunks, two for each outer rank; zigzag if not said

    def __post_init__(self) -> None:
        pieces = 2 * self.outer * self.inner if self.outer > 1 else self.inner
        assert self.seq_len % pieces == 0, (self.seq_len, pieces)
        if not self.order:
            object.__setattr__(self, "order", zigzag(self.outer))

    @property
    def size(self) -> int:
        """Ranks of the whole cp axis."""
        return self.outer * self.inner

    @property
    def num_chunks(self) -> int:
        """Equal pieces that the outer ranks share: two each, or one where there is a single outer
        rank."""
        return 2 * self.outer if self.outer > 1 else 1

    def held(self, outer_rank: int) -> tuple[int, ...]:
        """Returns numbers of the chunks of an outer rank."""
        return self.order[2 * outer_rank : 2 * outer_rank + 2] if self.outer > 1 else (0,)

    def chunks(self, outer_rank: int) -> list[tuple[int, int]]:
        """Spans of rows that an outer rank holds, in the order in which it holds them."""
        n = self.seq_len // self.num_chunks
        return [(c * n, (c + 1) * n) for c in self.held(outer_rank)]

    def outer_rows(self, outer_rank: int) -> np.ndarray:
        """Returns rows of an outer rank, those of all its inner ranks, in the order in which it
        holds them."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.chunks(outer_rank)])

    def rows(self, rank: int) -> np.ndarray:
        """Returns rows of one rank of the whole cp axis, in the order in which it holds them."""
        outer_rank, inner_rank = divmod(rank, self.inner)
        held = self.outer_rows(outer_rank)
        n = len(held) // self.inner
        return held[inner_rank * n : (inner_rank + 1) * n]


def zigzag(outer: int) -> tuple[int, ...]:
    """Chunks r and 2·outer-1-r for rank r."""
    return tuple(c for r in range(outer) for c in (r, 2 * outer - 1 - r))


def even_layout(layout: SequenceLayout, mask: Mask) -> SequenceLayout:
    """Returns the same cut, dealt out so that the busiest outer rank has as few visible pairs as
    two chunks a rank allow.

    The heaviest chunk goes with the lightest, the next with the next: no other pairs are better. Of
    deals that are as good, neighbours come first, whose keys have the shortest way, and then
    zigzag.

    Args:
        layout: says how the sequence is cut.
        mask: of one micro-batch, the same on all ranks.
    """
    if layout.outer == 1:
        return layout
    pairs = chunk_pairs(layout, mask)
    heaviest = np.argsort(-pairs, kind="stable").tolist()
    paired = [c for two in zip(heaviest[: layout.outer], reversed(heaviest)) for c in sorted(two)]
    deals = [tuple(range(layout.num_chunks)), zigzag(layout.outer), tuple(paired)]
    return replace(
        layout, order=min(deals, key=lambda order: pairs[list(order)].reshape(-1, 2).sum(1).max())
    )


@dataclass(frozen=True)
class Call:
    """One attention over a span of local queries and a span of a block's keys.

    Args:
        queries, keys: spans within the local rows of the two ranks.
        causal: the two spans are the same positions, under a causal mask: the kernel hides later
            keys. False: no key is later than a query, or later ones are seen too.
        masked: some, but not all, pairs are hidden by a window or by documents: pass positions and
            documents.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    masked: bool


def plan_calls(layout: SequenceLayout, rank: int, mask: Mask) -> list[list[Call]]:
    """Returns what an outer rank computes with each outer rank's keys; pairs of chunks that see
    nothing are left out.

    Args:
        rank: outer rank of the queries.

    Returns:
        For each outer rank of keys, the calls.
    """
    n, meets, whole = (
        layout.seq_len // layout.num_chunks,
        _meets(layout, mask),
        _whole(layout, mask),
    )
    plan = []
    for other in range(layout.outer):
        calls = [
            Call(
                (i * n, (i + 1) * n),
                (j * n, (j + 1) * n),
                causal=mask.causal and q == k,
                masked=not whole[q, k],
            )
            for i, q in enumerate(layout.held(rank))
            for j, k in enumerate(layout.held(other))
            if meets[q, k]
        ]
        plan.append(_joined(calls))
    return plan


def num_hops(layout: SequenceLayout, mask: Mask) -> int:
    """Returns how many outer ranks keys travel until all who see them have met them; at most outer
    - 1."""
    if layout.outer == 1:
        return 0
    owner = np.argsort(layout.order) // 2  # outer rank that holds each chunk
    way = (owner[:, None] - owner[None]) % layout.outer
    return int((way * _meets(layout, mask)).max())


def _meets(layout: SequenceLayout, mask: Mask) -> np.ndarray:
    """Returns bool `[chunks, chunks]`: some query of the one sees some key of the other."""
    n, c = layout.seq_len // layout.num_chunks, np.arange(layout.num_chunks)
    distance = c[:, None] - c[None]  # in chunks; positive where the keys come before the queries
    seen = distance >= 0 if mask.causal else np.ones_like(distance, bool)
    if mask.window is not None:
        seen = (seen & ((np.abs(distance) - 1) * n + 1 < mask.window)) | (distance == 0)
    if mask.documents is not None:
        numbers = np.asarray(mask.documents)
        first, last = numbers[:, c * n], numbers[:, c * n + n - 1]  # [b, chunks]
        seen = seen & (
            (first[:, :, None] <= last[:, None]) & (first[:, None] <= last[:, :, None])
        ).any(0)
    return seen


def _whole(layout: SequenceLayout, mask: Mask) -> np.ndarray:
    """Returns bool `[chunks, chunks]`: nothing but causality hides any pair of the two."""
    n, c = layout.seq_len // layout.num_chunks, np.arange(layout.num_chunks)
    whole = np.ones((len(c), len(c)), bool)
    if mask.window is not None:
        whole &= (np.abs(c[:, None] - c[None]) + 1) * n - 1 < mask.window
    if mask.documents is not None:
        numbers = np.asarray(mask.documents)
        first, last = numbers[:, c * n], numbers[:, c * n + n - 1]
        whole &= ((first[:, :, None] == last[:, None]) & (first[:, None] == last[:, :, None])).all(
            0
        )
    return whole


def _joined(calls: list[Call]) -> list[Call]:
    """Returns fewer, larger calls: neighbouring spans without a mask become one."""
    joined: list[Call] = []
    for call in calls:
        if joined and not (call.causal or call.masked or joined[-1].causal or joined[-1].masked):
            last = joined[-1]
            if last.queries == call.queries and last.keys[1] == call.keys[0]:
                joined[-1] = Call(call.queries, (last.keys[0], call.keys[1]), False, False)
                continue
            if last.keys == call.keys and last.queries[1] == call.queries[0]:
                joined[-1] = Call((last.queries[0], call.queries[1]), call.keys, False, False)
                continue
        joined.append(call)
    return joined


def chunk_pairs(layout: SequenceLayout, mask: Mask) -> np.ndarray:
    """Returns the query-key pairs that no mask hides, of each chunk's queries: int64 `[chunks]`."""
    rows = np.arange(layout.seq_len)
    # of each row's document
    first, end = np.zeros((1, rows.size), rows.dtype), np.full((1, rows.size), rows.size)
    if mask.documents is not None:
        numbers = np.asarray(mask.documents)
        begins = np.concatenate(
            (np.ones_like(numbers[:, :1], bool), numbers[:, 1:] != numbers[:, :-1]), 1
        )
        first = np.maximum.accumulate(np.where(begins, rows, 0), 1)
        later = np.where(begins, rows, rows.size)[:, :0:-1]
        end = np.concatenate(
            (np.minimum.accumulate(later, 1)[:, ::-1], np.full_like(first[:, :1], rows.size)), 1
        )
    if mask.causal:
        end = np.minimum(end, rows + 1)
    if mask.window is not None:
        first, end = np.maximum(first, rows - mask.window + 1), np.minimum(end, rows + mask.window)
    return (end - first).sum(0).reshape(layout.num_chunks, -1).sum(1)


def visible_pairs(layout: SequenceLayout, mask: Mask) -> list[int]:
    """Returns `chunk_pairs` of each outer rank's queries."""
    pairs = chunk_pairs(layout, mask)
    return [int(pairs[list(layout.held(rank))].sum()) for rank in range(layout.outer)]

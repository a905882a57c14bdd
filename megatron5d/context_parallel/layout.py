"""Which rows of a sequence each rank holds, and which blocks of queries and keys meet; integers only.

A cp axis is outer × inner ranks, inner fastest. Heads are exchanged for sequence over the inner ranks (Ulysses), keys
and values travel over the outer ones (ring, allgather):

    ring, allgather   outer = cp, inner = 1         ulysses   outer = 1, inner = cp         two_level   both

Over the outer ranks the sequence is cut into 2·outer chunks, and rank r holds chunks r and 2·outer-1-r: under a causal
mask all ranks then have the same work (zigzag; Brandon et al. 2023, arXiv:2311.09431). Over the inner ranks, which see
whole sequences while they attend, the outer rank's rows are cut contiguously.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Documents = Sequence[Sequence[int]] | np.ndarray


@dataclass(frozen=True)
class SequenceLayout:
    """
    Args:
        seq_len: rows of the whole sequence.
        outer: ranks among which keys and values travel.
        inner: ranks that exchange heads for sequence.
    """

    seq_len: int
    outer: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        pieces = 2 * self.outer * self.inner if self.outer > 1 else self.inner
        if self.seq_len % pieces:
            low = self.seq_len // pieces * pieces
            raise ValueError(
                f"train.seq_len = {self.seq_len} is not divisible by {pieces} (parallel.cp = {self.size}: "
                f"{'2·' if self.outer > 1 else ''}{self.outer}·{self.inner}); nearest that fit: "
                f"{low or pieces} or {low + pieces}"
            )

    @property
    def size(self) -> int:
        return self.outer * self.inner

    def chunks(self, outer_rank: int) -> list[tuple[int, int]]:
        """Spans of rows that an outer rank holds, in the order in which it holds them."""
        if self.outer == 1:
            return [(0, self.seq_len)]
        n = self.seq_len // (2 * self.outer)
        return [(c * n, (c + 1) * n) for c in (outer_rank, 2 * self.outer - 1 - outer_rank)]

    def rows(self, rank: int) -> list[int]:
        """Rows of one rank of the whole cp axis, in the order in which it holds them."""
        outer_rank, inner_rank = divmod(rank, self.inner)
        held = [row for start, stop in self.chunks(outer_rank) for row in range(start, stop)]
        n = len(held) // self.inner
        return held[inner_rank * n : (inner_rank + 1) * n]


def layout_of(method: str, cp: int, seq_len: int, inner: int = 1) -> SequenceLayout:
    """The layout that a method wants.

    Args:
        method: parallel.cp_method.
        cp: size of the axis.
        seq_len: rows of the whole sequence.
        inner: parallel.cp_inner, for two_level.
    """
    if method == "ulysses":
        return SequenceLayout(seq_len, 1, cp)
    if method == "two_level":
        if cp % inner:
            raise ValueError(f"parallel.cp_inner = {inner} does not divide parallel.cp = {cp}")
        return SequenceLayout(seq_len, cp // inner, inner)
    return SequenceLayout(seq_len, cp, 1)


@dataclass(frozen=True)
class Call:
    """One attention over a span of local queries and a span of a block's keys.

    Args:
        queries, keys: spans within the local rows of the two ranks.
        causal: the two spans are the same rows: the diagonal; else every query is behind every key.
        masked: some, but not all, pairs are hidden by a window or by documents: pass positions and documents.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    masked: bool


def plan_calls(
    layout: SequenceLayout, rank: int, *, window: int | None = None, documents: Documents | None = None
) -> list[list[Call]]:
    """What an outer rank computes with each outer rank's keys; pairs of chunks that see nothing are left out.

    Args:
        layout: of the sequence.
        rank: outer rank of the queries.
        window: keys that a query sees, itself included; None = all before it.
        documents: number of the document of each row, `[b, s]`, rising along a row; None = one document.

    Returns:
        For each outer rank of keys, the calls.
    """
    mine = layout.chunks(rank)
    plan = []
    for other in range(layout.outer):
        calls = []
        at = 0
        for q in mine:
            k_at = 0
            for k in layout.chunks(other):
                if _sees(q, k, window, documents):
                    masked = not _whole(q, k, window, documents)
                    spans = (at, at + q[1] - q[0]), (k_at, k_at + k[1] - k[0])
                    calls.append(Call(*spans, causal=q == k, masked=masked))
                k_at += k[1] - k[0]
            at += q[1] - q[0]
        plan.append(_joined(calls))
    return plan


def _sees(q: tuple[int, int], k: tuple[int, int], window: int | None, documents: Documents | None) -> bool:
    """Some query of the span sees some key of the other."""
    if k[0] > q[1] - 1 or (window is not None and q[0] - (k[1] - 1) >= window):
        return False
    if documents is None or q == k:
        return True
    return any(row[k[1] - 1] >= row[q[0]] for row in documents)


def _whole(q: tuple[int, int], k: tuple[int, int], window: int | None, documents: Documents | None) -> bool:
    """Nothing but causality hides any pair of the two spans."""
    if window is not None and q[1] - 1 - k[0] >= window:
        return False
    return documents is None or all(row[k[0]] == row[q[1] - 1] for row in documents)


def _joined(calls: list[Call]) -> list[Call]:
    """Fewer, larger calls: neighbouring spans without a mask become one."""
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


def unmasked_pairs(
    layout: SequenceLayout, *, window: int | None = None, documents: Documents | None = None
) -> list[int]:
    """Query-key pairs that no mask hides, for each outer rank's queries: milliseconds for 128k rows.

    Args:
        layout, window, documents: as in plan_calls.
    """
    rows = np.arange(layout.seq_len)
    first = np.zeros((1, layout.seq_len), dtype=rows.dtype)  # row that the document of each row begins with
    if documents is not None:
        numbers = np.asarray(documents)
        begins = np.concatenate((np.ones_like(numbers[:, :1], bool), numbers[:, 1:] != numbers[:, :-1]), 1)
        first = np.maximum.accumulate(np.where(begins, rows, 0), 1)
    seen = rows - first + 1
    if window is not None:
        seen = np.minimum(seen, window)
    before = np.concatenate(([0], np.cumsum(seen.sum(0))))
    return [
        sum(int(before[stop] - before[start]) for start, stop in layout.chunks(rank)) for rank in range(layout.outer)
    ]

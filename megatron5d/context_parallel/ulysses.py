"""Ulysses: exchange a share of the sequence for a share of the heads, and back.

Each exchange sends (s/n)·b·heads·d·(n-1)/n elements per rank; the backward of one is the other.
Source: Jacobs et al. 2023 (arXiv:2309.14509).
"""

from __future__ import annotations

from torch import Tensor

from megatron5d.comm.all_to_all import all_to_all
from megatron5d.topology.axis import Axis


def heads_for_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Maps `[s/n, b, a, d]` -> `[s, b, a/n, d]`: all rows, in rank order, of this rank's share of the heads.

    Comm: all_to_all / all_to_all.
    """
    n = axis.size
    if n == 1:
        return x
    rows, b, heads, d = x.shape  # s/n, b, a, d
    by_rank = x.view(rows, b, n, heads // n, d).permute(2, 0, 1, 3, 4)  # [n (heads), s/n, b, a/n, d]
    collected = all_to_all(by_rank, axis)  # -> [n (sequence), s/n, b, a/n, d]  all_to_all
    return collected.reshape(n * rows, b, heads // n, d)


def sequence_for_heads(x: Tensor, axis: Axis) -> Tensor:
    """Maps `[s, b, a/n, d]` -> `[s/n, b, a, d]`: this rank's rows of all heads. Comm: all_to_all / all_to_all."""
    n = axis.size
    if n == 1:
        return x
    s, b, heads, d = x.shape  # s, b, a/n, d
    by_rank = x.view(n, s // n, b, heads, d)  # [n (sequence), s/n, b, a/n, d]
    collected = all_to_all(by_rank, axis)  # -> [n (heads), s/n, b, a/n, d]  all_to_all
    return collected.permute(1, 2, 0, 3, 4).reshape(s // n, b, n * heads, d)


def shared_heads(x: Tensor, axis: Axis) -> Tensor:
    """Repeats KV heads until there is one for every rank: `[s, b, g, d]` -> `[s, b, max(g, n), d]`."""
    n, g = axis.size, x.shape[2]
    if g >= n:
        return x
    assert n % g == 0, (n, g)
    return x.repeat_interleave(n // g, dim=2)

"""Stochastic rounding of float32 to bfloat16: up or down with the chances that make the mean right.

A master-free update w ← bf16(w - u) is lost whenever u is below half a step of w; rounded at random it happens with
the chance u / step, and nothing is lost in the mean (Gupta et al. 2015, arXiv:1502.02551).

The random bits are a function of seed, step, global name and global index of an element (topology/rng.py): slices,
copies and resumed runs draw the same.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from megatron5d.data_parallel.buckets import Segment
from megatron5d.topology.rng import hash_bits, stream_key
from megatron5d.topology.shard import Piece

_CHUNK = 1 << 22  # elements at a time: indices and bits take 16 bytes each
_LOST = 0xFFFF  # the bits of float32 that bfloat16 lacks


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """float32 -> bfloat16, away from zero where the lost bits and random ones carry.

    Args:
        x: float32; what is not finite stays.
        bits: integers of the same shape, of which 16 bits are used, uniform.
    """
    raised = (x.view(torch.int32) + (bits & _LOST).to(torch.int32)) & ~_LOST
    return torch.where(x.isfinite(), raised.view(torch.float32), x).to(torch.bfloat16)


def global_index(piece: Piece, shape: tuple[int, ...], start: int, stop: int, device: torch.device) -> Tensor:
    """Flat index in the whole tensor of a flat range of a piece.

    Args:
        piece: a rectangle of the tensor.
        shape: of the whole tensor.
        start, stop: flat range within the piece.
        device: of the result.

    Returns:
        int64 `[stop - start]`.
    """
    rest = torch.arange(start, stop, device=device)
    index = torch.zeros_like(rest)
    for dim in range(len(shape)):
        inner = prod(piece.shape[dim + 1 :])
        index = index * shape[dim] + rest // inner + piece.offset[dim]
        rest = rest % inner
    return index


def store_rounded(wide: Tensor, into: Tensor, segment: Segment, seed: int, step: int) -> None:
    """Rounds the updated values of a segment into its weights.

    Args:
        wide: float32 `[n]`, the segment's values.
        into: bfloat16 `[n]`, the segment's weights.
        segment: where they lie; padding between pieces is rounded to nearest.
        seed: of the run.
        step: the update, from 1.
    """
    key = stream_key(seed, f"{segment.spec.name}/{step}")
    into.copy_(wide)
    for piece, (first, last) in segment.pieces():
        behind = piece.flat[0] - segment.local[0]  # of the piece's first element, from the segment's
        for start in range(first - segment.owned[0], last - segment.owned[0], _CHUNK):
            stop = min(start + _CHUNK, last - segment.owned[0])
            index = global_index(piece, segment.spec.shape, start - behind, stop - behind, wide.device)
            into[start:stop] = round_stochastically(wide[start:stop], hash_bits(key, index))

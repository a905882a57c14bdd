"""Stochastic rounding of float32 to bfloat16: up or down with the probabilities whose mean is the exact value.

Without master weights, an update w ← bf16(w - u) is lost whenever u is below half the spacing of bf16 numbers near w.
Rounded stochastically it happens with the probability u / spacing, and nothing is lost on average (Gupta et al. 2015,
arXiv:1502.02551).

The random bits depend only on seed, step, global name and global index of an element (topology/init_weights.py), so slices,
copies and resumed runs use the same.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from megatron5d.data_parallel.bucket import Segment
from megatron5d.topology.init_weights import hash_bits, stream_key
from megatron5d.topology.shard_spec import Piece

_CHUNK = 1 << 22  # elements at a time; index and random bits take 16 bytes for each
_LOST = 0xFFFF  # the low bits of float32, which bfloat16 does not have


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """float32 -> bfloat16: rounds away from zero where the sum of the lost bits and the random bits carries.

    Args:
        x: float32; values that are not finite are kept.
        bits: uniform random integers of the same shape, of which 16 bits are used.
    """
    raised = (x.view(torch.int32) + (bits & _LOST).to(torch.int32)) & ~_LOST
    return torch.where(x.isfinite(), raised.view(torch.float32), x).to(torch.bfloat16)


def global_index(piece: Piece, shape: tuple[int, ...], start: int, stop: int, device: torch.device) -> Tensor:
    """The flat indices in the global tensor of a flat range of a piece.

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
    """Rounds the updated values of a segment stochastically and stores them in its weights.

    Args:
        wide: float32 `[n]`, the updated values.
        into: bfloat16 `[n]`, the weights.
        segment: of the bucket; padding between its pieces is rounded to nearest.
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

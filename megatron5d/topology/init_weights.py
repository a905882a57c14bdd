"""Random numbers that depend only on (seed, global name, global index): the same initial weights on
any layout.

A counter-based generator: element i of the tensor called `name` is hash(seed, name, i), so each
rank computes only its own rectangle and no rank ever holds a whole large weight. The finalizer of
SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators") gives 64 random
bits per element; Box-Muller turns them into normal deviates.
"""

import hashlib
from math import pi, prod

import torch

from megatron5d.topology.shard_spec import ShardSpec, spec_of

_MASK = (1 << 64) - 1
_CHUNK = 1 << 22  # elements hashed at a time, so that the int64 temporaries take about 100 MB


def _signed(x: int) -> int:
    """The low 64 bits of an integer as int64."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's >> on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hash_bits(key: int, index: torch.Tensor) -> torch.Tensor:
    """64 random bits per index.

    Args:
        key: 64-bit key of the stream.
        index: int64, any shape.

    Returns:
        int64 of the same shape, all bits used.
    """
    x = index * _signed(0x9E3779B97F4A7C15) + _signed(key)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def stream_key(seed: int, name: str) -> int:
    """64-bit key of the stream for a name, such as that of a parameter."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(key: int, index: torch.Tensor) -> torch.Tensor:
    """Uniform deviates in [0, 1), fp64, one per element of `index` (int64, any shape)."""
    return _shift(hash_bits(key, index), 11).double() * 2.0**-53


def normal(key: int, index: torch.Tensor) -> torch.Tensor:
    """Standard normal deviates, fp64, one per element of `index` (int64, any shape)."""
    bits = hash_bits(key, index)
    radius = (_shift(bits, 32).double() + 0.5) * 2.0**-32  # in (0, 1), so its logarithm is finite
    angle = (bits & 0xFFFFFFFF).double() * 2.0**-32
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2 * pi * angle)


@torch.no_grad()
def initialize(parameter: torch.nn.Parameter, seed: int) -> None:
    """Fills a parameter with the values that its ShardSpec defines; padding rows become zero."""
    parameter.zero_()
    spec = spec_of(parameter)
    for piece in spec.pieces:
        rows = parameter[piece.row : piece.row + piece.shape[0]] if piece.shape else parameter
        initialize_rectangle(rows, piece.offset, spec, seed)


@torch.no_grad()
def initialize_rectangle(
    local: torch.Tensor, offset: tuple[int, ...], spec: ShardSpec, seed: int
) -> None:
    """Fills a rectangle of a global tensor.

    Args:
        offset: its first index in each dim of the global tensor.
        spec: of the tensor; `init` is a standard deviation, "ones" or "zeros".
    """
    if spec.init == "ones":
        local.fill_(1.0)
    elif spec.init == "zeros":
        local.zero_()
    elif not local.is_meta:
        _fill_normal(local, offset, spec.shape, stream_key(seed, spec.name), float(spec.init))


def _fill_normal(
    local: torch.Tensor,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    key: int,
    std: float,
    first: int = 0,
) -> None:
    """Sets local[i...] = std · normal(first + flat index of offset + i within `shape`), a few rows
    at a time."""
    row_stride, device = prod(shape[1:]), local.device
    if local.dim() > 2:  # matrix by matrix, because each may be larger than a chunk
        for i, matrix in enumerate(local):
            start = first + (offset[0] + i) * row_stride
            _fill_normal(matrix, offset[1:], shape[1:], key, std, start)
        return
    start, width = (first + offset[1], local.shape[1]) if local.dim() == 2 else (first, 1)
    columns = torch.arange(start, start + width, device=device)
    chunk = max(1, _CHUNK // max(1, local[0].numel()))
    for row in range(0, local.shape[0], chunk):
        rows = torch.arange(row, min(row + chunk, local.shape[0]), device=device) + offset[0]
        index = rows[:, None] * row_stride + columns
        local[row : row + chunk].copy_((normal(key, index) * std).view(-1, *local.shape[1:]))

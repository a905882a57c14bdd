"""A GEMM fused with its reduce_scatter: tiles are sent to the ranks that own their rows, which sum what they receive.

    buffer of rank at owner = x[owner] Wᵀ      for rank + 1, rank + 2, ..., the own chunk last
    y = sum over sources of their buffers      in the order of the sources, in float32, rounded once
Tiles are stored in their owner's memory. The last tile of a chunk to finish raises the owner's flag, and the owner adds
up the terms while later chunks are multiplied elsewhere.
Source: Chang et al. 2024, "FLUX: fast software-based communication overlap on GPUs" (arXiv:2406.06858), sec. 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.all_gather_gemm import fast, weight_matrix, weight_tile, weight_tiles
from megatron5d.kernels.dispatch import TRITON_DTYPES, cdiv, jit, statistics_dtype, tl
from megatron5d.kernels.symm_mem_flags import Arrivals, raise_flag, raise_flags, wait_flag, wait_for
from megatron5d.kernels.tuning import by_pointers, matrix, readable, swizzled, tiles_of


@dataclass(frozen=True)
class PeerBuffers:
    """The memory of each rank of an axis into which one rank writes, in the order of the axis.

    Args:
        buffers: `[rows, n]` each, contiguous.
        flags: one int32 each, raised when the buffer is full.
        buffer_addresses, flag_addresses: `[size]` int64 on the device, of the same.
        finished: `[size]` int32 on this rank, zero between uses: tiles that are done.
    """

    buffers: Sequence[Tensor]
    flags: Sequence[Tensor]
    buffer_addresses: Tensor
    flag_addresses: Tensor
    finished: Tensor


def gemm_reduce_scatter_reference(
    x: Tensor, weight: Tensor, out: PeerBuffers, epoch: int, rank: int, transposed: bool
) -> None:
    """Computes one GEMM of plain torch per owner."""
    size = x.shape[0]
    for step in range(size):
        owner = (rank + 1 + step) % size
        out.buffers[owner].copy_(x[owner] @ (weight if transposed else weight.t()))
        raise_flags([out.flags[owner]], out.flag_addresses[owner : owner + 1], epoch)


@jit(do_not_specialize=["epoch", "rank"])
def _gemm_reduce_scatter_kernel(
    x_tiles,
    w_tiles,
    buffer_addresses_ptr,
    flag_addresses_ptr,
    finished_ptr,
    epoch,
    rank,
    size,
    rows,
    n,
    k,
    TRANSPOSED: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    POINTERS: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    chunk_tiles = tiles_m * tiles_n
    owner = (rank + 1 + tl.program_id(0) // chunk_tiles) % size
    tile_m, tile_n = swizzled(tl.program_id(0) % chunk_tiles, tiles_m, tiles_n, BAND)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    x_matrix = matrix(x_tiles, size * rows, k, BLOCK_M, BLOCK_K, POINTERS)
    weight = weight_matrix(w_tiles, n, k, TRANSPOSED, BLOCK_N, BLOCK_K, POINTERS)
    tl.assume(k > 0)  # a branch around the loop would make the assembler wait for each MMA
    for start in range(0, k, BLOCK_K):
        x = x_matrix.load([owner * rows + tile_m * BLOCK_M, start])
        total = tl.dot(x, weight_tile(weight, start, tile_n, TRANSPOSED, BLOCK_N), total)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    buffer_ptr = tl.multiple_of(tl.load(buffer_addresses_ptr + owner).to(tl.pointer_type(DTYPE)), 16)
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(buffer_ptr + at, total.to(DTYPE), (row < rows)[:, None] & (column < n)[None, :])
    # The last program of the chunk has seen every other's count, and with it their tiles; its release covers them all.
    tl.debug_barrier()
    if tl.atomic_add(finished_ptr + owner, 1, sem="acq_rel", scope="sys") == chunk_tiles - 1:
        tl.store(finished_ptr + owner, 0)
        raise_flag(tl.load(flag_addresses_ptr + owner).to(tl.pointer_type(tl.int32)), epoch)


@jit(do_not_specialize=["epoch"])
def _sum_kernel(terms_ptr, y_ptr, flags_ptr, patience, epoch, size, count, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for source in range(size):
        wait_for(flags_ptr, source, epoch, patience)
    total = tl.zeros((BLOCK,), tl.float32)
    for source in range(size):
        term = terms_ptr + tl.cast(source, tl.int64) * stride
        total += tl.load(term + at, at < count, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), at < count)


def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, out: PeerBuffers, epoch: int, rank: int, transposed: bool = False
) -> None:
    """Writes `x[owner] Wᵀ` into the owner's memory and raises its flag there, for every owner.

    Args:
        x: `[size, rows, k]`.
        weight: `[n, k]`; transposed: `[k, n]`.
        out: buffers of `[rows, n]` in the dtype of x.
        epoch: what the flags are raised to.
        rank: of the writer, whose own chunk comes last.
        transposed: the GEMM is `x[owner] W`.
    """
    size, rows, k = x.shape
    flat = x.reshape(size * rows, k)
    if not (fast(x, weight) and readable(flat)):
        gemm_reduce_scatter_reference(x, weight, out, epoch, rank, transposed)
        return
    n = weight.shape[1 if transposed else 0]
    config = tuning.select("gemm_reduce_scatter", x.device)
    operands = tiles_of(flat, [config["BLOCK_M"], config["BLOCK_K"]]), weight_tiles(weight, config, transposed)
    grid = (size * cdiv(rows, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]),)
    tables = (out.buffer_addresses, out.flag_addresses, out.finished)
    sizes = (epoch, rank, size, rows, n, k)
    flags = {"TRANSPOSED": transposed, "DTYPE": TRITON_DTYPES[x.dtype], "POINTERS": by_pointers(x.device)}
    _gemm_reduce_scatter_kernel[grid](*operands, *tables, *sizes, **flags, **config)


def sum_arrived_reference(terms: Tensor, arrivals: Arrivals) -> Tensor:
    """Sums in plain torch."""
    for source in range(terms.shape[0]):
        wait_flag(arrivals, source)
    return terms.to(statistics_dtype(terms.dtype)).sum(0).to(terms.dtype)


def sum_arrived(terms: Tensor, arrivals: Arrivals) -> Tensor:
    """Sums the buffers of all sources, each once it is full.

    Args:
        terms: `[size, ...]`, each contiguous, written by the other ranks.
        arrivals: of the buffers.

    Returns:
        `[...]` in the dtype of terms, added in float32 (float64 for float64) in the order of the sources.

    Raises:
        TimeoutError: a buffer was not filled within the patience of `arrivals`; on a GPU a later call raises it.
    """
    if not (dispatch.runs_triton(terms) and terms[0].is_contiguous()):
        return sum_arrived_reference(terms, arrivals)
    y = torch.empty(terms.shape[1:], dtype=terms.dtype, device=terms.device)
    config = tuning.select("sum_arrived", terms.device)
    patience, sizes = arrivals.patience, (arrivals.epoch, terms.shape[0], y.numel(), terms.stride(0))
    waiting = (arrivals.flags, patience.kernel_arguments)
    _sum_kernel[(cdiv(y.numel(), config["BLOCK"]),)](terms, y, *waiting, *sizes, **config)
    patience.check()
    return y

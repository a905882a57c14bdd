"""GEMMs fused with a collective: the all_gather of their rows, or the reduce_scatter of their
results.

`all_gather_gemm` multiplies rows as they arrive:

    y[source] = x[source] Wᵀ     for this rank's chunk, then those of rank - 1, rank - 2, ...,
                                 the order in which ranks send
Each tile waits for the flag of its chunk, and tiles start in the order of arrival: while the
tiles of one chunk are multiplied, the copy engines receive the next. One launch keeps every
multiprocessor busy across chunks; with a GEMM per chunk, each chunk would end in a wave that tiles
do not fill.

`gemm_reduce_scatter` sends tiles to the ranks that own their rows, which sum what they receive:

    buffer of rank at owner = x[owner] Wᵀ      for rank + 1, rank + 2, ..., this rank's chunk last
    y = sum over sources of their buffers      in the order of the sources, in float32, rounded once
Tiles are stored in their owner's memory. The last tile of a chunk to finish raises the owner's
flag, and the owner adds up the terms while other ranks still multiply later chunks.
Source: Chang et al. 2024, "FLUX: fast software-based communication overlap on GPUs"
    (arXiv:2406.06858), sec. 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import (
    HALF_DTYPES,
    TRITON_DTYPES,
    cdiv,
    jit,
    load_float32,
    statistics_dtype,
    tl,
)
from megatron5d.kernels.symm_mem_flags import Arrivals, raise_flag, raise_flags, wait_flag, wait_for
from megatron5d.kernels.tuning import by_pointers, matrix, readable, swizzled, tiles_of


def all_gather_gemm_reference(
    x: Tensor, weight: Tensor, arrivals: Arrivals, rank: int, transposed: bool = False
) -> Tensor:
    """Computes one GEMM per chunk in plain torch, in the order of arrival."""
    size, rows, _ = x.shape
    matrix = weight.t() if not transposed else weight
    y = torch.empty(size, rows, matrix.shape[1], dtype=x.dtype, device=x.device)
    for step in range(size):
        source = (rank - step) % size
        wait_flag(arrivals, source)
        torch.mm(x[source], matrix, out=y[source])
    return y


@jit
def weight_matrix(
    w_tiles,
    n,
    k,
    TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    POINTERS: tl.constexpr,
):
    """W `[n, k]`, transposed `[k, n]`, for `weight_tile`."""
    if TRANSPOSED:
        weight = matrix(w_tiles, k, n, BLOCK_K, BLOCK_N, POINTERS)
    else:
        weight = matrix(w_tiles, n, k, BLOCK_N, BLOCK_K, POINTERS)
    return weight


@jit
def weight_tile(weight, start, tile_n, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Loads `[BLOCK_K, BLOCK_N]` of Wᵀ from column (transposed: of W from row) `start` of W."""
    if TRANSPOSED:
        tile = weight.load([start, tile_n * BLOCK_N])
    else:
        tile = weight.load([tile_n * BLOCK_N, start]).T
    return tile


def weight_tiles(weight: Tensor, config: dict, transposed: bool):
    """Argument of `weight_matrix`."""
    tile = [config["BLOCK_N"], config["BLOCK_K"]]
    return tiles_of(weight, tile[::-1] if transposed else tile)


@jit(do_not_specialize=["epoch", "rank"])
def _all_gather_gemm_kernel(
    x_ptr,
    w_tiles,
    y_ptr,
    flags_ptr,
    timeout,
    epoch,
    rank,
    size,
    rows,
    n,
    k,
    x_stride,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    POINTERS: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    chunk_tiles = tiles_m * tiles_n
    source = (rank + size - tl.program_id(0) // chunk_tiles) % size
    tile_m, tile_n = swizzled(tl.program_id(0) % chunk_tiles, tiles_m, tiles_n, BAND)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    wait_for(flags_ptr, source, epoch, timeout)
    # Ordinary loads: the copy engine reads through a separate proxy, which the acquire of the
    # flag does not order.
    x_row = x_ptr + source.to(tl.int64) * x_stride + row.to(tl.int64)[:, None] * k
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    weight = weight_matrix(w_tiles, n, k, TRANSPOSED, BLOCK_N, BLOCK_K, POINTERS)
    # A branch around the loop would make the assembler wait for each MMA.
    tl.assume(k > 0)
    for start in range(0, k, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        live = (row < rows)[:, None] & (column < k)[None, :]
        x = tl.load(x_row + column[None, :], live, other=0.0)
        total = tl.dot(x, weight_tile(weight, start, tile_n, TRANSPOSED, BLOCK_N), total)
    out = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = (source.to(tl.int64) * rows + row)[:, None] * n + out[None, :]
    tl.store(y_ptr + at, total, (row < rows)[:, None] & (out < n)[None, :])


def fast(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels support this GEMM: half precision, a weight the copy engine can read."""
    return (
        dispatch.runs_triton(x)
        and x.dtype == weight.dtype
        and x.dtype in HALF_DTYPES
        and readable(weight)
    )


def all_gather_gemm(
    x: Tensor, weight: Tensor, arrivals: Arrivals, rank: int, transposed: bool = False
) -> Tensor:
    """Computes `x[source] Wᵀ` for every source, each as soon as its rows have arrived.

    Args:
        x: `[size, rows, k]`, chunks contiguous, written by the other ranks while this runs.
        weight: `[n, k]`; transposed: `[k, n]`.
        arrivals: flags of the rows of each source.
        transposed: the GEMM is `x[source] W`.

    Returns:
        `[size, rows, n]` in the dtype of x.

    Raises:
        TimeoutError: a chunk did not arrive within the timeout of `arrivals`; on a GPU a later
            call raises it.
    """
    if not fast(x, weight) or x.stride()[1:] != (x.shape[2], 1):
        return all_gather_gemm_reference(x, weight, arrivals, rank, transposed)
    size, rows, k = x.shape
    n = weight.shape[1 if transposed else 0]
    y = torch.empty(size, rows, n, dtype=x.dtype, device=x.device)
    config = tuning.select("all_gather_gemm", x.device)
    grid = (size * cdiv(rows, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]),)
    _all_gather_gemm_kernel[grid](
        x,
        weight_tiles(weight, config, transposed),
        y,
        arrivals.flags,
        arrivals.timeout.kernel_arguments,
        arrivals.epoch,
        rank,
        size,
        rows,
        n,
        k,
        x.stride(0),
        TRANSPOSED=transposed,
        POINTERS=by_pointers(x.device),
        **config,
    )
    arrivals.timeout.check()
    return y


@dataclass(frozen=True)
class PeerBuffers:
    """Memory on each rank of an axis into which one rank writes, in the order of the axis.

    Args:
        buffers: `[rows, n]` each, contiguous.
        flags: one int32 each, raised when the buffer is full.
        buffer_addresses, flag_addresses: `[size]` int64 on the device, addresses of these.
        finished: `[size]` int32 on this rank, zero between uses: counts finished tiles.
    """

    buffers: Sequence[Tensor]
    flags: Sequence[Tensor]
    buffer_addresses: Tensor
    flag_addresses: Tensor
    finished: Tensor


def gemm_reduce_scatter_reference(
    x: Tensor, weight: Tensor, out: PeerBuffers, epoch: int, rank: int, transposed: bool
) -> None:
    """Computes one GEMM per owner in plain torch."""
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
    # A branch around the loop would make the assembler wait for each MMA.
    tl.assume(k > 0)
    for start in range(0, k, BLOCK_K):
        x = x_matrix.load([owner * rows + tile_m * BLOCK_M, start])
        total = tl.dot(x, weight_tile(weight, start, tile_n, TRANSPOSED, BLOCK_N), total)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    buffer_ptr = tl.multiple_of(
        tl.load(buffer_addresses_ptr + owner).to(tl.pointer_type(DTYPE)), 16
    )
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(buffer_ptr + at, total, (row < rows)[:, None] & (column < n)[None, :])
    # The last program of the chunk has acquired the counts of all others, and with them their
    # tiles; its release covers them all.
    tl.debug_barrier()
    if tl.atomic_add(finished_ptr + owner, 1, sem="acq_rel", scope="sys") == chunk_tiles - 1:
        tl.store(finished_ptr + owner, 0)
        raise_flag(tl.load(flag_addresses_ptr + owner).to(tl.pointer_type(tl.int32)), epoch)


@jit(do_not_specialize=["epoch"])
def _sum_kernel(
    terms_ptr, y_ptr, flags_ptr, timeout, epoch, size, count, stride, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for source in range(size):
        wait_for(flags_ptr, source, epoch, timeout)
    total = tl.zeros((BLOCK,), tl.float32)
    for source in range(size):
        term = terms_ptr + tl.cast(source, tl.int64) * stride
        total += load_float32(term + at, at < count)
    tl.store(y_ptr + at, total, at < count)


def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, out: PeerBuffers, epoch: int, rank: int, transposed: bool = False
) -> None:
    """Writes `x[owner] Wᵀ` into the owner's memory and raises its flag there, for every owner.

    Args:
        x: `[size, rows, k]`.
        weight: `[n, k]`; transposed: `[k, n]`.
        out: buffers of `[rows, n]` in the dtype of x.
        epoch: value to which the flags are raised.
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
    grid = (size * cdiv(rows, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]),)
    _gemm_reduce_scatter_kernel[grid](
        tiles_of(flat, [config["BLOCK_M"], config["BLOCK_K"]]),
        weight_tiles(weight, config, transposed),
        out.buffer_addresses,
        out.flag_addresses,
        out.finished,
        epoch,
        rank,
        size,
        rows,
        n,
        k,
        TRANSPOSED=transposed,
        DTYPE=TRITON_DTYPES[x.dtype],
        POINTERS=by_pointers(x.device),
        **config,
    )


def sum_arrived_reference(terms: Tensor, arrivals: Arrivals) -> Tensor:
    """Computes the sum in plain torch."""
    for source in range(terms.shape[0]):
        wait_flag(arrivals, source)
    return terms.to(statistics_dtype(terms.dtype)).sum(0).to(terms.dtype)


def sum_arrived(terms: Tensor, arrivals: Arrivals) -> Tensor:
    """Sums the buffers of all sources, waiting for each to be full.

    Args:
        terms: `[size, ...]`, each contiguous, written by the other ranks.

    Returns:
        `[...]` in the dtype of terms, added in float32 (float64 for float64) in the order of the
        sources.

    Raises:
        TimeoutError: a buffer was not filled within the timeout of `arrivals`; on a GPU a later
            call raises it.
    """
    if not (dispatch.runs_triton(terms) and terms[0].is_contiguous()):
        return sum_arrived_reference(terms, arrivals)
    y = torch.empty(terms.shape[1:], dtype=terms.dtype, device=terms.device)
    config = tuning.select("sum_arrived", terms.device)
    timeout, grid = arrivals.timeout, (cdiv(y.numel(), config["BLOCK"]),)
    waits = (arrivals.flags, timeout.kernel_arguments, arrivals.epoch)
    sizes = (terms.shape[0], y.numel(), terms.stride(0))
    _sum_kernel[grid](terms, y, *waits, *sizes, **config)
    timeout.check()
    return y

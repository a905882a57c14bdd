"""128×128 tiles as 16 slices, so that a kernel can store a transpose 16 bytes at a time.

Exchanging or storing single bytes would take one instruction each, and 16 times the bandwidth of
shared memory. Here each thread holds 16 adjacent rows of its columns, and exchanges and stores 16
bytes at a time, with a single barrier.
"""

from megatron5d.kernels.dispatch import jit, tl


@jit
def load_slices(x_ptr, stride, first_row, first_column, rows, columns, GROUP: tl.constexpr):
    """Loads a tile as 16 slices: slice j has rows j, j + 16, j + 32, …

    A thread then holds 16 adjacent elements of each of its columns.
    """
    x_ptr += first_row * stride + first_column  # 64-bit once; within the tile 32 bits suffice
    rows, columns = (rows - first_row).to(tl.int32), (columns - first_column).to(tl.int32)
    column = tl.arange(0, GROUP)[None, :]
    row = 16 * tl.arange(0, GROUP // 16)[:, None]
    slices: tl.tuple = ()
    for j in tl.static_range(16):
        pointers = x_ptr + (row + j) * stride + column
        slices += (tl.load(pointers, (row + j < rows) & (column < columns), other=0.0),)
    return slices


@jit
def amax_of_slices(slices):
    """Computes the largest |x| over 16 slices of float32, element by element."""
    amax = tl.abs(slices[0]).to(tl.int32, bitcast=True)
    for j in tl.static_range(1, 16):
        amax = tl.maximum(amax, tl.abs(slices[j]).to(tl.int32, bitcast=True))
    return amax.to(tl.float32, bitcast=True)


@jit
def join_four(a, b, c, d):
    """Joins four tiles along two new last dims, which index them in this order."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@jit
def store_transposed(
    out_ptr, slices, first_column, columns, stride, count, DTYPE: tl.constexpr, GROUP: tl.constexpr
):
    """Casts 16 slices to FP8 and stores them as rows of the transpose, 16 bytes per thread.

    The cast is here, on pairs of adjacent elements: where a thread stores values cast row by row as
    well and takes them apart for the transpose, ptxas 12.8 miscompiles (docs/notes/kernels.md).

    Args:
        out_ptr: the tile's first byte in the first row of the transpose.
        slices: from `load_slices`; FP8 values keep their bits.
        first_column, columns: of the matrix: rows of the transpose at which the tile begins, and in
            all.
        stride: bytes between rows of the transpose, a multiple of 16.
        count: bytes that may be stored in each row, a multiple of 16.
    """
    quarters: tl.tuple = ()
    for j in tl.static_range(4):
        quarters += (join_four(slices[j], slices[4 + j], slices[8 + j], slices[12 + j]),)
    tile = join_four(quarters[0], quarters[1], quarters[2], quarters[3])
    tile = tl.reshape(tile, (GROUP // 16, GROUP, 16)).to(DTYPE)
    tile = tl.permute(tile, (1, 0, 2)).reshape(GROUP, GROUP)
    out_ptr += first_column * stride
    column, byte = tl.arange(0, GROUP)[:, None], tl.arange(0, GROUP)[None, :]
    columns = (columns - first_column).to(tl.int32)
    tl.store(out_ptr + column * stride + byte, tile, (column < columns) & (byte < count))

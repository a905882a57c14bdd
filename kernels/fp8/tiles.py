"""128×128 tiles in 16 parts, so that a thread can write 16 neighbours of a column: what kernels
that transpose need.

A byte that is exchanged between threads, or stored, by itself takes an instruction of its own and
16 times the bandwidth of shared memory. Here each thread holds 16 rows of its columns, and
exchanges and stores 16 bytes at a time, behind one barrier.
"""

from megatron5d.kernels.dispatch import jit, tl


@jit
def row_slices(x_ptr, stride, first_row, first_column, rows, columns, GROUP: tl.constexpr):
    """Loads a tile of 128 rows as 16 tiles, of every 16th row: a thread then holds 16 neighbours of
    each column."""
    x_ptr += first_row * stride + first_column  # 64 bits once; within the tile 32 suffice
    rows, columns = (rows - first_row).to(tl.int32), (columns - first_column).to(tl.int32)
    column = tl.arange(0, GROUP)[None, :]
    row = 16 * tl.arange(0, GROUP // 16)[:, None]
    slices: tl.tuple = ()
    for j in tl.static_range(16):
        slices += (
            tl.load(
                x_ptr + (row + j) * stride + column,
                (row + j < rows) & (column < columns),
                other=0.0,
            ),
        )
    return slices


@jit
def largest_of(slices):
    """Returns the largest |x| of 16 tiles of float32, element by element."""
    amax = tl.abs(slices[0]).to(tl.int32, bitcast=True)
    for j in tl.static_range(1, 16):
        amax = tl.maximum(amax, tl.abs(slices[j]).to(tl.int32, bitcast=True))
    return amax.to(tl.float32, bitcast=True)


@jit
def joined(a, b, c, d):
    """Joins four tiles along two new dims at the end, which index them in this order."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@jit
def store_transposed(
    out_ptr, slices, first_column, columns, stride, count, DTYPE: tl.constexpr, GROUP: tl.constexpr
):
    """Casts 16 tiles from `row_slices` to FP8, and stores them as rows of the transpose, 16 bytes
    from a thread.

    They are cast here, in pairs of neighbours: where a thread stores casts by rows, too, and takes
    them apart for this, ptxas 12.8 makes wrong values of them (docs/notes/kernels.md).

    Args:
        out_ptr: the tile's first byte in the transpose's first row.
        slices: the tiles; those of FP8 keep their bits.
        first_column, columns: where the tile begins in these rows of the transpose, and how many
            there are.
        stride: bytes from one row of the transpose to the next, a multiple of 16.
        count: bytes that may be stored in each row, a multiple of 16.
    """
    parts: tl.tuple = ()
    for j in tl.static_range(4):
        parts += (joined(slices[j], slices[4 + j], slices[8 + j], slices[12 + j]),)
    every = joined(parts[0], parts[1], parts[2], parts[3])
    tile = tl.reshape(every, (GROUP // 16, GROUP, 16)).to(DTYPE)
    tile = tl.permute(tile, (1, 0, 2)).reshape(GROUP, GROUP)
    out_ptr += first_column * stride
    column, byte = tl.arange(0, GROUP)[:, None], tl.arange(0, GROUP)[None, :]
    columns = (columns - first_column).to(tl.int32)
    tl.store(out_ptr + column * stride + byte, tile, (column < columns) & (byte < count))

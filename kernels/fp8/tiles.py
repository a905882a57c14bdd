"""128×128 tiles in 16 parts, so that a thread can write 16 neighbours of a column: what kernels that transpose need.

A byte that is exchanged between threads, or stored, by itself takes an instruction of its own and 16 times the
bandwidth of shared memory. Here each thread holds 16 rows of its columns, packs them into words, and exchanges and
stores 16 bytes at a time, behind one barrier.
"""

from megatron5d.kernels.dispatch import jit, tl


@jit
def row_slices(x_ptr, stride, first_row, first_column, rows, columns, GROUP: tl.constexpr):
    """Loads a tile of 128 rows as 16 tiles, of every 16th row: a thread then holds 16 neighbours of each column."""
    x_ptr += first_row * stride + first_column  # 64 bits once; within the tile 32 suffice
    rows, columns = (rows - first_row).to(tl.int32), (columns - first_column).to(tl.int32)
    column = tl.arange(0, GROUP)[None, :]
    row = 16 * tl.arange(0, GROUP // 16)[:, None]
    slices = ()
    for j in tl.static_range(16):
        slices += (tl.load(x_ptr + (row + j) * stride + column, (row + j < rows) & (column < columns), other=0.0),)  # type: ignore[assignment]
    return slices


@jit
def largest_of(slices):
    """Returns the largest |x| of 16 tiles of float32, element by element."""
    amax = tl.abs(slices[0]).to(tl.int32, bitcast=True)
    for j in tl.static_range(1, 16):
        amax = tl.maximum(amax, tl.abs(slices[j]).to(tl.int32, bitcast=True))
    return amax.to(tl.float32, bitcast=True)


@jit
def store_transposed(words_ptr, slices, first_column, columns, stride, count, GROUP: tl.constexpr):
    """Stores 16 tiles from `row_slices`, of FP8, as rows of the transpose: whole words, 16 bytes from a thread.

    Bytes by themselves would each be exchanged between threads by an instruction of their own.

    Args:
        words_ptr: int32, the tile's first word in the transpose's first row.
        slices: the tiles.
        first_column, columns: where the tile begins in these rows of the transpose, and how many there are.
        stride: words from one row of the transpose to the next.
        count: words that may be stored in each row.
    """
    words = ()
    for j in tl.static_range(4):
        word = slices[4 * j].to(tl.uint8, bitcast=True).to(tl.int32)
        for n in tl.static_range(1, 4):
            word |= slices[4 * j + n].to(tl.uint8, bitcast=True).to(tl.int32) << (8 * n)
        words += (word,)  # type: ignore[assignment]
    four = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))  # type: ignore[misc]
    tile = tl.permute(tl.reshape(four, (GROUP // 16, GROUP, 4)), (1, 0, 2)).reshape(GROUP, GROUP // 4)
    words_ptr += first_column * stride
    column = tl.arange(0, GROUP)[:, None]
    columns = (columns - first_column).to(tl.int32)
    word = tl.arange(0, GROUP // 4)[None, :]
    tl.store(words_ptr + column * stride + word, tile, (column < columns) & (word < count))

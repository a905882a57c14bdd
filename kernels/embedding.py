"""The gradient of an embedding: rows added to the rows of a matrix that tokens select.

On a GPU torch's `index_add_` adds in whatever order its programs run: the sum of a token that
occurs more than once differs from run to run. Here tokens are sorted, and the program of the first
of several equal ones adds up all their rows in order.
"""

from torch import Tensor

from megatron5d.kernels import dispatch
from megatron5d.kernels.dispatch import cdiv, jit, load_float32, rows_of, tl

COLUMNS, ROWS = 512, 8  # that a program adds up at a time


@jit
def _accumulate_kernel(
    into_ptr,
    id_ptr,
    order_ptr,
    rows_ptr,
    num_ids,
    num_rows,
    width,
    rows_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(0)
    row = tl.load(id_ptr + first)
    previous = tl.load(id_ptr + first - 1, first > 0, other=-1)
    if (row != previous) & (row < num_rows):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        start = first
        equal = row
        while equal == row:
            index = start + tl.arange(0, ROWS)
            is_equal = tl.load(id_ptr + index, index < num_ids, other=-1) == row
            token = tl.load(order_ptr + index, is_equal, other=0)
            live = is_equal[:, None] & (column < width)[None, :]
            total += tl.sum(
                load_float32(rows_ptr + token[:, None] * rows_stride + column[None, :], live), 0
            )
            start += ROWS
            equal = tl.load(id_ptr + start, start < num_ids, other=-1)
        target = into_ptr + row * width + column
        total += load_float32(target, column < width)
        tl.store(target, total, column < width)


def accumulate_rows(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Adds each row to the row of a matrix that its id selects, in place, with reproducible bits.

    Args:
        into: `[v, h]`, contiguous.
        ids: int64 `[n]`; rows whose id is not in [0, v) are skipped.
        rows: `[n, h]`.
    """
    outside = (ids < 0) | (ids >= into.shape[0])
    if not dispatch.runs_triton(rows):
        rows = rows.masked_fill(outside[:, None], 0).to(into.dtype)
        into.index_add_(0, ids.masked_fill(outside, 0), rows)
        return
    ids, order = ids.masked_fill(outside, into.shape[0]).sort(stable=True)
    rows = rows_of(rows)
    grid = (ids.numel(), cdiv(rows.shape[1], COLUMNS))
    sizes = (ids.numel(), *into.shape, rows.stride(0))
    _accumulate_kernel[grid](into, ids, order, rows, *sizes, ROWS=ROWS, COLUMNS=COLUMNS)

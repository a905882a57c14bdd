"""The gradient of an embedding: rows added to those of a matrix that tokens name.

On a GPU torch's `index_add_` adds in whatever order its programs come: the sum of a token that is
there more than once differs from run to run. Here tokens are sorted, and the first of equal ones
adds up the rows of all in their order.
"""

from torch import Tensor

from megatron5d.kernels import dispatch
from megatron5d.kernels.dispatch import cdiv, jit, rows_of, tl

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
    before = tl.load(id_ptr + first - 1, first > 0, other=-1)
    if (row != before) & (row < num_rows):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        place = first
        equal = row
        while equal == row:
            places = place + tl.arange(0, ROWS)
            mine = tl.load(id_ptr + places, places < num_ids, other=-1) == row
            token = tl.load(order_ptr + places, mine, other=0)
            live = mine[:, None] & (column < width)[None, :]
            x = tl.load(rows_ptr + token[:, None] * rows_stride + column[None, :], live, other=0.0)
            total += tl.sum(x.to(tl.float32), 0)
            place += ROWS
            equal = tl.load(id_ptr + place, place < num_ids, other=-1)
        target = into_ptr + row * width + column
        total += tl.load(target, column < width, other=0.0).to(tl.float32)
        tl.store(target, total.to(into_ptr.dtype.element_ty), column < width)


def accumulate_rows(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Adds each row to the row of a matrix that its id names, in place, with the same bits whenever
    it is called.

    Args:
        into: `[v, h]`, contiguous.
        ids: int64 `[n]`; rows whose id is not one of 0 … v-1 are left out.
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

"""Norms of rows that do not fit into a program's registers: the kernels of norm.py for wide rows.

A row is read twice, CHUNK columns at a time, the second time from the L2 cache. Partial sums of dw
live there as well, in float32. The backward takes two rows at a time where L2 holds the rows of all
programs.
"""

from megatron5d.kernels.dispatch import jit, load_float32, tl


@jit
def store_sum(x, residual, sum_ptr, mask):
    """Stores x + residual and returns it as stored: the statistics must be those of the rounded
    values, which the backward reads."""
    total = (x + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr, total, mask)
    return total.to(tl.float32)


@jit
def _wide_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    width,
    x_stride,
    residual_stride,
    eps,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Processes one row, CHUNK columns at a time.

    For LayerNorm, each lane keeps a running mean and the sum of squares about it; the lanes are
    merged at the end. One pass yields both statistics, without the cancellation of
    mean(x²) - mean(x)² (Chan, Golub & LeVeque 1983, sec. 2).
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    lane_mean = tl.zeros((CHUNK,), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float32)
    # First pass: the statistics.
    for start in range(0, width, CHUNK):
        column = start + lane
        mask = column < width
        x = load_float32(x_ptr + row * x_stride + column, mask)
        if HAS_RESIDUAL:
            residual = load_float32(residual_ptr + row * residual_stride + column, mask)
            x = store_sum(x, residual, sum_ptr + row * width + column, mask)
        if CENTERED:
            delta = x - lane_mean
            new_mean = lane_mean + delta / (start // CHUNK + 1)
            squares += tl.where(mask, delta * (x - new_mean), 0.0)
            lane_mean = tl.where(mask, new_mean, lane_mean)
        else:
            squares += x * x
    # Merge the lanes.
    mean = 0.0
    if CENTERED:
        count = (width - lane + CHUNK - 1) // CHUNK  # columns of this lane
        mean = tl.sum(lane_mean * count, 0) / width
        squares += count * (lane_mean - mean) * (lane_mean - mean)
        tl.store(mean_ptr + row, mean)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    # Second pass: normalize.
    row_ptr = x_ptr + row * x_stride
    if HAS_RESIDUAL:
        row_ptr = sum_ptr + row * width
        # The loop below reads sums that other threads of this program have stored.
        tl.debug_barrier()
    for start in range(0, width, CHUNK):
        column = start + lane
        mask = column < width
        y = (load_float32(row_ptr + column, mask) - mean) * rstd
        y *= load_float32(weight_ptr + column, mask)
        if HAS_BIAS:
            y += load_float32(bias_ptr + column, mask)
        tl.store(y_ptr + row * width + column, y, mask)


@jit
def _wide_backward_kernel(
    dy_ptr,
    dstream_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    width,
    dy_stride,
    dstream_stride,
    x_stride,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DSTREAM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Processes many rows, ROWS at a time, and keeps partial sums of dw and db in memory."""
    partial = tl.program_id(0).to(tl.int64) * width
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = (tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        row_mask = row < num_rows
        rstd = load_float32(rstd_ptr + row, row_mask)
        mean = load_float32(mean_ptr + row, row_mask) if CENTERED else 0.0
        # First pass: the row means of g·n and g.
        g_normal = tl.zeros((ROWS, CHUNK), tl.float32)
        g_total = tl.zeros((ROWS, CHUNK), tl.float32)
        for start in range(0, width, CHUNK):
            column = (start + tl.arange(0, CHUNK))[None, :]
            column_mask = column < width
            mask = row_mask & column_mask
            x = load_float32(x_ptr + row * x_stride + column, mask)
            g = load_float32(dy_ptr + row * dy_stride + column, mask)
            g *= load_float32(weight_ptr + column, column_mask)
            g_normal += g * ((x - mean) * rstd)
            g_total += g
        mean_g_normal = tl.sum(g_normal, 1)[:, None] / width
        mean_g = tl.sum(g_total, 1)[:, None] / width if CENTERED else 0.0
        # Second pass: dx, and the partial sums.
        for start in range(0, width, CHUNK):
            column = (start + tl.arange(0, CHUNK))[None, :]
            column_mask = column < width
            mask = row_mask & column_mask
            x = load_float32(x_ptr + row * x_stride + column, mask)
            dy = load_float32(dy_ptr + row * dy_stride + column, mask)
            weight = load_float32(weight_ptr + column, column_mask)
            normal = (x - mean) * rstd
            dx = (dy * weight - normal * mean_g_normal - mean_g) * rstd
            if HAS_DSTREAM:
                dx += load_float32(dstream_ptr + row * dstream_stride + column, mask)
            tl.store(dx_ptr + row * width + column, dx, mask)
            add_rows(dweight_ptr + partial + column, dy * normal, column_mask)
            if HAS_BIAS:
                add_rows(dbias_ptr + partial + column, dy, column_mask)


@jit
def add_rows(sum_ptr, rows, column_mask):
    """Adds the sum of rows to a float32 row in memory."""
    tl.store(sum_ptr, load_float32(sum_ptr, column_mask) + tl.sum(rows, 0)[None, :], column_mask)

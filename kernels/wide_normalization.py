"""RMSNorm and LayerNorm of rows too wide for the registers of a program: two walks over a row, the second from cache.

Passes over the memory of the device: forward, x is read and y is written (with a residual, it is read and the sum is
written too); backward, x and dy are read and dx is written. That holds as long as the rows that are being worked on
stay in the second-level cache, through which they pass once more between the walks; the backward also reads and writes
its float32 share of dw there. It takes two rows at a time where the cache holds the rows of all programs: each share
and the weight then pass half as often. So the forward may go at the speed of a copy, and the backward will not.
`norm.py` has the formulas, and decides by the tables which rows are wide.
"""

from kernels.dispatch import jit, tl


@jit
def wide_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    scale_ptr,
    width,
    x_stride,
    residual_stride,
    eps,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row a program.

    LayerNorm keeps, for each lane, the mean of what it has seen and the squares about it, and joins the lanes at the
    end: one walk finds both, without the cancellation of mean(x²) - mean(x)² (Chan, Golub & LeVeque 1983, sec. 2).
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    lane_mean = tl.zeros((CHUNK,), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, width, CHUNK):
        column = start + lane
        live = column < width
        x = tl.load(x_ptr + row * x_stride + column, live, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * residual_stride + column, live, other=0.0).to(tl.float32)
            # The statistics are of the sum as stored: the backward reads it back and must see the same numbers.
            total = x.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + row * width + column, total, live)
            x = total.to(tl.float32)
        if CENTRED:
            step = x - lane_mean
            grown = lane_mean + step / (start // CHUNK + 1)
            squares += tl.where(live, step * (x - grown), 0.0)
            lane_mean = tl.where(live, grown, lane_mean)
        else:
            squares += x * x
    mean = 0.0
    if CENTRED:
        count = (width - lane + CHUNK - 1) // CHUNK  # columns that the lane has seen
        mean = tl.sum(lane_mean * count, 0) / width
        squares += count * (lane_mean - mean) * (lane_mean - mean)
        tl.store(mean_ptr + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    tl.store(scale_ptr + row, scale)
    again_ptr = x_ptr + row * x_stride
    if HAS_RESIDUAL:
        again_ptr = total_ptr + row * width
        tl.debug_barrier()  # what other threads of the program have stored is read
    for start in range(0, width, CHUNK):
        column = start + lane
        live = column < width
        x = tl.load(again_ptr + column, live, other=0.0).to(tl.float32)
        y = (x - mean) * scale * tl.load(weight_ptr + column, live, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + column, live, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), live)


@jit
def wide_backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    scale_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    width,
    dy_stride,
    dtotal_stride,
    x_stride,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DTOTAL: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each program walks many rows, some at a time, and keeps its share of dw and db in memory."""
    mine = tl.program_id(0).to(tl.int64) * width
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = (tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        row_is_live = row < num_rows
        scale = tl.load(scale_ptr + row, row_is_live, other=0.0)
        mean = tl.load(mean_ptr + row, row_is_live, other=0.0) if CENTRED else 0.0
        g_normal = tl.zeros((ROWS, CHUNK), tl.float32)
        g_total = tl.zeros((ROWS, CHUNK), tl.float32)
        for start in range(0, width, CHUNK):
            column = start + tl.arange(0, CHUNK)
            column_is_live = column < width
            live = row_is_live & column_is_live[None, :]
            x = tl.load(x_ptr + row * x_stride + column[None, :], live, other=0.0).to(tl.float32)
            g = tl.load(dy_ptr + row * dy_stride + column[None, :], live, other=0.0).to(tl.float32)
            g *= tl.load(weight_ptr + column, column_is_live, other=0.0).to(tl.float32)[None, :]
            g_normal += g * ((x - mean) * scale)
            g_total += g
        mean_g_normal = tl.sum(g_normal, 1)[:, None] / width
        mean_g = tl.sum(g_total, 1)[:, None] / width if CENTRED else 0.0
        for start in range(0, width, CHUNK):
            column = start + tl.arange(0, CHUNK)
            column_is_live = column < width
            live = row_is_live & column_is_live[None, :]
            x = tl.load(x_ptr + row * x_stride + column[None, :], live, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + row * dy_stride + column[None, :], live, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + column, column_is_live, other=0.0).to(tl.float32)[None, :]
            normal = (x - mean) * scale
            dx = (dy * weight - normal * mean_g_normal - mean_g) * scale
            if HAS_DTOTAL:
                arrived = tl.load(dtotal_ptr + row * dtotal_stride + column[None, :], live, other=0.0)
                dx += arrived.to(tl.float32)
            tl.store(dx_ptr + row * width + column[None, :], dx.to(dx_ptr.dtype.element_ty), live)
            dweight = tl.load(dweight_ptr + mine + column, column_is_live, other=0.0)
            tl.store(dweight_ptr + mine + column, dweight + tl.sum(dy * normal, 0), column_is_live)
            if HAS_BIAS:
                dbias = tl.load(dbias_ptr + mine + column, column_is_live, other=0.0)
                tl.store(dbias_ptr + mine + column, dbias + tl.sum(dy, 0), column_is_live)

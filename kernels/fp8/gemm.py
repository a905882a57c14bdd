"""Products of 8-bit floats with scales: tensorwise, and blockwise by 128 along the contracted dim.

    y[i, j] = sum over groups g of sa[i, g] sb[j, g] · (sum over the 128 columns of g of a[i, k] b[j, k])
The inner sum is made by the tensor cores, whose 8-bit accumulator keeps about 14 bits on Hopper; every 128 columns it
is taken out, scaled and added in float32 (DeepSeek-V3, arXiv:2412.19437, sec. 3.3.2). Tensorwise products are promoted
as often.
"""

import torch
from torch import Tensor

from kernels import dispatch, tuning
from kernels.fp8.quantize import GROUP, Quantized
from kernels.language import TensorDescriptor, cdiv, jit, tl


def fp8_matmul_reference(a: Quantized, b: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """`a bᵀ` in plain torch, in float32 or float64."""
    return a.dequantize(dtype) @ b.dequantize(dtype).t()


@jit
def swizzled(program, tiles_m, tiles_n, BAND: tl.constexpr):
    """Tile coordinates in bands of `BAND` rows of tiles, so that neighbouring programs share operands in cache."""
    band = program // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = program % (BAND * tiles_n)
    return band * BAND + within % height, within // height


@jit
def scales_of_tile(scales, strides, first, index, count, group, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """A group's scales: of each row of a tile, or one for all of them; 1 where the whole matrix has one."""
    scale = 1.0
    if ROWS == 1:
        scale = tl.load(scales + index.to(tl.int64) * strides[0] + group * strides[1], index < count, other=0.0)
    elif ROWS == GROUP:
        # A tile of rows lies within one block: tiles are no taller than 128 and start at multiples of their height.
        scale = tl.load(scales + first // GROUP * strides[0] + group * strides[1])
    return scale


def settles(device: torch.device) -> bool:
    """Whether products that are scaled one by one are taken out behind a barrier: on Blackwell.

    There one thread starts a product, and its sums lie in memory of the whole program. Triton 3.6 and 3.7 let the next
    product overwrite what other warps have not read (triton-lang/triton, pull request 10263, puts barriers there).
    The price is that copies no longer run ahead.
    """
    return tuning.architecture(device) == "sm_100"


@jit
def taken_out(part, SETTLE: tl.constexpr):
    """A product that every warp has taken out before one of them starts the next (`settles`)."""
    if SETTLE:
        tl.debug_barrier()
    return part


@jit
def scaled_sum(total, part, a, b, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr):
    """total + part · a · b, with one multiplication and addition an element where only one side has a scale a row."""
    if A_ROWS == 1 and B_ROWS == 1:
        total += part * a[:, None] * b[None, :]
    elif A_ROWS == 1:
        total += part * (a * b)[:, None]
    elif B_ROWS == 1:
        total += part * (a * b)[None, :]
    elif A_ROWS == 0 and B_ROWS == 0:
        total += part
    else:
        total += part * (a * b)
    return total


@jit
def _fp8_matmul_kernel(
    a_desc,
    b_desc,
    a_scales,
    a_strides,
    b_scales,
    b_strides,
    out_ptr,
    m,
    n,
    k,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
    GROUP: tl.constexpr,
    SETTLE: tl.constexpr,
):
    tile_m, tile_n = swizzled(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), BAND)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(tl.cdiv(k, GROUP)):
        a = a_desc.load([tile_m * BLOCK_M, group * GROUP])
        b = b_desc.load([tile_n * BLOCK_N, group * GROUP])
        part = taken_out(tl.dot(a, b.T, out_dtype=tl.float32), SETTLE)
        a_scale = scales_of_tile(a_scales, a_strides, tile_m * BLOCK_M, row, m, group, A_ROWS, GROUP)
        b_scale = scales_of_tile(b_scales, b_strides, tile_n * BLOCK_N, column, n, group, B_ROWS, GROUP)
        total = scaled_sum(total, part, a_scale, b_scale, A_ROWS, B_ROWS)
    if A_ROWS == 0:
        total *= tl.load(a_scales)
    if B_ROWS == 0:
        total *= tl.load(b_scales)
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    live = (row < m)[:, None] & (column < n)[None, :]
    if ACCUMULATE:
        total += tl.load(out_ptr + at, live, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), live)


def _check(a: Quantized, b: Quantized, accumulate_into: Tensor | None) -> None:
    if a.values.shape[1] != b.values.shape[1]:
        raise ValueError(
            f"a {tuple(a.values.shape)} and b {tuple(b.values.shape)} contract their last dims, which differ"
        )
    shape = (a.values.shape[0], b.values.shape[0])
    if accumulate_into is not None and (accumulate_into.shape != shape or not accumulate_into.is_contiguous()):
        raise ValueError(f"accumulate_into {tuple(accumulate_into.shape)} must be contiguous {shape}")


def _reads(x: Tensor) -> bool:
    """Whether the copy engine can read x: rows 16 bytes apart, neighbours in memory."""
    return x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0


def fp8_matmul(
    a: Quantized, b: Quantized, *, out_dtype: torch.dtype = torch.bfloat16, accumulate_into: Tensor | None = None
) -> Tensor:
    """`a bᵀ` of quantised matrices.

    Args:
        a: values `[m, k]`; any of the three kinds of scales.
        b: values `[n, k]`; any kind (a weight `[out, in]` as it lies).
        out_dtype: bfloat16, float16 or float32; float64 takes the plain path.
        accumulate_into: `[m, n]` contiguous, of one of these dtypes, that the product is added into, in place;
            `out_dtype` is then ignored.

    Returns:
        `[m, n]`, or `accumulate_into`.

    Raises:
        ValueError: shapes that do not belong together.
    """
    _check(a, b, accumulate_into)
    m, k = a.values.shape
    n = b.values.shape[0]
    dtype = out_dtype if accumulate_into is None else accumulate_into.dtype
    fast = dispatch.runs_triton(a.scales) and dtype != torch.float64 and bool(m and n and k)
    if not (fast and _reads(a.values) and _reads(b.values)):
        product = fp8_matmul_reference(a, b, dispatch.statistics_dtype(dtype))
        return product.to(out_dtype) if accumulate_into is None else accumulate_into.add_(product)
    out = accumulate_into
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=a.values.device)
    config = tuning.select("fp8_matmul", a.values.device)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    assert max(block_m, block_n) <= GROUP, "a block scale must cover a whole tile"
    descriptors = (
        TensorDescriptor.from_tensor(a.values, [block_m, GROUP]),
        TensorDescriptor.from_tensor(b.values, [block_n, GROUP]),
    )
    kinds = {"A_ROWS": a.rows_per_scale, "B_ROWS": b.rows_per_scale, "ACCUMULATE": accumulate_into is not None}
    kinds["SETTLE"] = settles(out.device)
    inputs = (*descriptors, a.scales, a.scales.stride(), b.scales, b.scales.stride(), out, m, n, k)
    grid = (cdiv(m, block_m) * cdiv(n, block_n),)
    _fp8_matmul_kernel[grid](*inputs, **kinds, GROUP=GROUP, **config)
    return out

"""GEMMs of experts over rows sorted by expert, and weight gradients added to float32 main
gradients.

A grouped GEMM is one GEMM per expert, for which the host need not know how many rows each has:

    forward          y[r] = W[e] x[r]          for the rows r of expert e
    input gradient   dx[r] = W[e]ᵀ dy[r]
    weight gradient  dW[e] = sum over the rows r of e of dy[r] x[r]ᵀ
The grid is the largest that any distribution of rows needs: ceil(rows / tile) + experts tiles of
rows. A program finds its expert by counting how many experts end before it. Rows past the last
expert's get zeros from separate programs; programs beyond those return. Rows of a tile that
belong to the next expert are computed and not stored. Empty experts have no tile in the first two
GEMMs and a gradient of zero in the third. (MegaBlocks, arXiv:2211.15841, sec. 5, solves the same
with block-sparse matrices.)

A linear layer y = x Wᵀ has dW = dyᵀ x. Its main gradient is float32 while dy and x may be bfloat16:
the GEMM accumulates in float32, and its result is never rounded to bfloat16 (Micikevicius et al.,
arXiv:1710.03740, sec. 3).
"""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.kernels import choice, dispatch, tuning
from megatron5d.kernels.choice import AUTO, GroupedRequest, Settings
from megatron5d.kernels.dispatch import (
    HALF_DTYPES,
    FirstOrderFunction,
    cdiv,
    jit,
    next_power_of_2,
    statistics_dtype,
    tl,
)
from megatron5d.kernels.tuning import (
    by_pointers,
    matrix,
    needs_mma_barrier,
    read_by_all_warps,
    readable,
    swizzled,
    tiles_of,
)

# Multiplications from which a CPU's bfloat16 units pay: starting them takes as long as fewer.
_LEAST_FOR_UNITS = 1 << 23


def expert_lanes(count: int) -> int:
    """Lanes that look for a tile's expert; fewer than a warp's would need separate binaries."""
    return max(next_power_of_2(count), 32)


def host_offsets(offsets: Tensor, rows: int) -> list[int]:
    """The offsets on the host; equal shares for meta tensors, which have no values."""
    if offsets.is_meta:
        experts = len(offsets) - 1
        return [rows * e // experts for e in range(experts + 1)]
    return offsets.tolist()


def grouped_matmul_reference(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Computes `x[rows of e] W[e]ᵀ` in plain torch, one GEMM per expert; syncs with the host."""
    bounds = host_offsets(offsets, x.shape[0])
    products = [x[lo:hi] @ w.t() for lo, hi, w in zip(bounds, bounds[1:], weight)]
    return torch.cat([*products, x.new_zeros(x.shape[0] - bounds[-1], weight.shape[1])])


def _by_torch(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Multiplies x by `[E, in, out]`; on the CPU by torch's `grouped_mm` where it supports them.

    On the meta device, where memory is forecast, it allocates what the CPU would: the output alone.
    """
    _, k, n = matrices.shape
    supported = (
        (x.is_cpu or x.is_meta)
        and x.dtype == matrices.dtype != torch.float64
        and x.numel()
        and x.is_contiguous()
        and not (k % 8 or n % 8 or x.data_ptr() % 16 or matrices.data_ptr() % 16)
        and matrices.stride() in ((k * n, n, 1), (k * n, 1, k))
    )
    if not supported:
        return grouped_matmul_reference(x, matrices.mT, offsets)
    if x.is_meta:
        return x.new_empty(x.shape[0], n)
    y = F.grouped_mm(x, matrices, offs=offsets[1:].int())
    if (last := int(offsets[-1])) < x.shape[0]:
        y[last:] = 0
    return y


def _add_matmul(grad: Tensor, a: Tensor, b: Tensor, accumulate: bool = True) -> None:
    """Computes `grad += a b`, or `grad = a b`, in plain torch, in the dtype of grad.

    A CPU's bfloat16 units multiply widened bfloat16 exactly as well; their sums are float32.
    """
    beta = int(accumulate)  # with 0 the values of grad are not read
    if a.dtype == grad.dtype:
        grad.addmm_(a, b, beta=beta)
        return
    mkldnn: Any = torch.backends.mkldnn
    previous = mkldnn.matmul.fp32_precision
    try:
        if a.dtype == torch.bfloat16 and a.numel() * b.shape[1] >= _LEAST_FOR_UNITS:
            mkldnn.matmul.fp32_precision = "bf16"
        grad.addmm_(a.to(grad.dtype), b.to(grad.dtype), beta=beta)
    finally:
        mkldnn.matmul.fp32_precision = previous


def grouped_weight_grad_reference(
    dy: Tensor, x: Tensor, offsets: Tensor, main_grad: Tensor, *, accumulate: bool = True
) -> None:
    """Computes `main_grad[e] += dyᵀ x` over the rows of e, in plain torch."""
    bounds = host_offsets(offsets, x.shape[0])
    sizes = [hi - lo for lo, hi in zip(bounds, bounds[1:])]
    if bounds[-1] < x.shape[0]:
        dy, x = dy[: bounds[-1]], x[: bounds[-1]]
    dy_of_experts, x_of_experts = dy.t().split_with_sizes(sizes, 1), x.split_with_sizes(sizes)
    for grad, expert_dy, expert_x in zip(main_grad.unbind(), dy_of_experts, x_of_experts):
        if expert_x.shape[0] or not accumulate:
            _add_matmul(grad, expert_dy, expert_x, accumulate)


@jit
def expert_of(tile, offsets_ptr, num_experts, rows, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """A tile's expert, its first row, and the end of the expert's rows.

    If there are more lanes than experts, the rows past the last offset belong to expert
    num_experts; tiles beyond them have an expert of num_experts or more, and 0 as the end.
    """
    lane = tl.arange(0, EXPERTS)
    is_expert = lane <= num_experts
    first = tl.load(offsets_ptr + lane, is_expert, other=0).to(tl.int32)
    last = tl.load(offsets_ptr + lane + 1, lane < num_experts, other=0).to(tl.int32)
    last = tl.where(lane == num_experts, rows, last)
    tiles = tl.where(is_expert, (last - first + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((is_expert & (ends <= tile)).to(tl.int32), 0)
    selected = lane == expert
    row = tl.sum(tl.where(selected, first + (tile - (ends - tiles)) * BLOCK_M, 0), 0)
    return expert, row, tl.sum(tl.where(selected, last, 0), 0)


@jit
def _store_rows(y_ptr, tile, row, last, column, n):
    """Stores the rows before `last` of a tile of y."""
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(y_ptr + at, tile, (row < last)[:, None] & (column < n)[None, :])


# These change with every batch of tokens.
@jit(do_not_specialize=["num_tiles", "num_experts", "rows"])
def _rows_kernel(
    x_tiles,
    w_tiles,
    x_scales_ptr,
    w_scales_ptr,
    y_ptr,
    offsets_ptr,
    num_tiles,
    num_experts,
    rows,
    n,
    k,
    w_rows,
    SCALED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    CUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    SETTLE: tl.constexpr,
    POINTERS: tl.constexpr,
):
    tile_m, tile_n = swizzled(tl.program_id(0), num_tiles, tl.cdiv(n, BLOCK_N), BAND)
    expert, first, last = expert_of(tile_m, offsets_ptr, num_experts, rows, BLOCK_M, EXPERTS)
    column = tile_n * BLOCK_N
    row = first + tl.arange(0, BLOCK_M)
    if expert >= num_experts:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        _store_rows(y_ptr, zeros, row, last, column + tl.arange(0, BLOCK_N), n)
        return
    base = expert * w_rows
    x_matrix = matrix(x_tiles, rows, k, BLOCK_M, BLOCK_K, POINTERS)
    if TRANSPOSED:
        w_matrix = matrix(w_tiles, num_experts * w_rows, n, BLOCK_K, BLOCK_N, POINTERS)
    else:
        w_matrix = matrix(w_tiles, num_experts * w_rows, k, BLOCK_N, BLOCK_K, POINTERS)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        x = x_matrix.load([first, step * BLOCK_K])
        if SCALED:
            w = w_matrix.load([base + column, step * BLOCK_K])
            product = read_by_all_warps(tl.dot(x, w.T, out_dtype=tl.float32), SETTLE)
            groups = tl.cdiv(k, BLOCK_K)
            scale = tl.load(x_scales_ptr + row.to(tl.int64) * groups + step, row < last, other=0.0)
            blocks = tl.cdiv(n, BLOCK_K)
            block = (expert.to(tl.int64) * blocks + column // BLOCK_K) * groups + step
            total += product * (scale * tl.load(w_scales_ptr + block))[:, None]
        elif TRANSPOSED:
            w = w_matrix.load([base + step * BLOCK_K, column])
            # The last tile ends in the next expert's rows, whose infinities times zeros of x are
            # not zero.
            if CUT:
                live = step * BLOCK_K + tl.arange(0, BLOCK_K) < k
                w = tl.where(live[:, None], w, tl.zeros_like(w))
            total = tl.dot(x, w, total)
        else:
            total = tl.dot(x, w_matrix.load([base + column, step * BLOCK_K]).T, total)
    _store_rows(y_ptr, total, row, last, column + tl.arange(0, BLOCK_N), n)


@jit(do_not_specialize=["accumulate"])
def _weight_grad_kernel(
    dy_tiles,
    x_tiles,
    grad_ptr,
    offsets_ptr,
    n,
    k,
    accumulate,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BAND: tl.constexpr,
    POINTERS: tl.constexpr,
):
    tile_n, tile_k = swizzled(tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K), BAND)
    expert = tl.program_id(1).to(tl.int64)
    first = tl.load(offsets_ptr + expert).to(tl.int32)
    last = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    end = first + (last - first) // BLOCK_R * BLOCK_R  # of full tiles
    dy_matrix = matrix(dy_tiles, last, n, BLOCK_R, BLOCK_N, POINTERS)
    x_matrix = matrix(x_tiles, last, k, BLOCK_R, BLOCK_K, POINTERS)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for row in range(first, end, BLOCK_R):
        dy = dy_matrix.load([row, tile_n * BLOCK_N])
        x = x_matrix.load([row, tile_k * BLOCK_K])
        total = tl.dot(dy.T, x, total)
    if end < last:
        # The last tile ends in another expert's rows. Both sides are cleared, because zero times
        # infinity is not zero.
        live = (end + tl.arange(0, BLOCK_R) < last)[:, None]
        dy = dy_matrix.load([end, tile_n * BLOCK_N])
        x = x_matrix.load([end, tile_k * BLOCK_K])
        dy = tl.where(live, dy, tl.zeros_like(dy))
        x = tl.where(live, x, tl.zeros_like(x))
        total = tl.dot(dy.T, x, total)
    out = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    live = (out < n)[:, None] & (column < k)[None, :]
    at = expert * n * k + out.to(tl.int64)[:, None] * k + column[None, :]
    previous = tl.load(grad_ptr + at, live & (accumulate != 0), other=0.0)
    tl.store(grad_ptr + at, previous + total, live)


def launch_rows(
    x, weight, offsets, n: int, k: int, transposed: bool, scales: tuple | None, out_dtype
) -> Tensor:
    """Computes y `[rows, n]` from x `[rows, k]` and weight `[E, n, k]`, transposed `[E, k, n]`."""
    rows, experts = x.shape[0], weight.shape[0]
    config = tuning.select("grouped_matmul_fp8" if scales else "grouped_matmul", x.device)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    y = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    w_tile = [block_k, block_n] if transposed else [block_n, block_k]
    operands = tiles_of(x, [block_m, block_k]), tiles_of(weight.flatten(0, 1), w_tile)
    num_tiles = cdiv(rows, block_m) + experts
    x_scales, w_scales = scales or (offsets, offsets)
    _rows_kernel[(num_tiles * cdiv(n, block_n),)](
        *operands,
        x_scales,
        w_scales,
        y,
        offsets,
        num_tiles,
        experts,
        rows,
        n,
        k,
        weight.shape[1],
        SCALED=scales is not None,
        TRANSPOSED=transposed,
        CUT=transposed and k % block_k != 0,
        EXPERTS=expert_lanes(experts + 1),  # one more lane for the rows past the last offset
        SETTLE=needs_mma_barrier(x.device),
        POINTERS=by_pointers(x.device),
        **config,
    )
    return y


def _fast(x: Tensor, weight: Tensor) -> bool:
    return (
        dispatch.runs_triton(x)
        and x.dtype == weight.dtype
        and x.dtype in HALF_DTYPES
        and weight.is_contiguous()
    )


def _library(x: Tensor, weight: Tensor, settings: Settings) -> ModuleType | None:
    """Module of the library that multiplies x by each expert's transposed matrix; None = ours."""
    capability = choice.capability_of(x)
    if not (capability and x.numel() and x.dtype == weight.dtype and x.stride(-1) == 1):
        return None
    experts, n, k = weight.shape
    request = GroupedRequest(capability, x.dtype, x.shape[0], experts, n, k)
    return choice.provider(request, settings)


def grouped_rows(x: Tensor, weight: Tensor, offsets: Tensor, settings: Settings = AUTO) -> Tensor:
    """Computes `grouped_matmul`, not differentiable."""
    if (library := _library(x, weight, settings)) is not None:
        return library.grouped_matmul(x, weight, offsets)
    if _fast(x, weight) and readable(x) and readable(weight[0]):
        _, n, k = weight.shape
        return launch_rows(x, weight, offsets, n, k, False, None, x.dtype)
    return _by_torch(x, weight.mT, offsets)


def grouped_input_grad(
    dy: Tensor, weight: Tensor, offsets: Tensor, settings: Settings = AUTO
) -> Tensor:
    """Computes `dx[r] = W[e]ᵀ dy[r]`.

    Args:
        dy: `[rows, n]` sorted by expert.
        weight: `[E, n, k]`.
        offsets, settings: as in `grouped_matmul`.

    Returns:
        `[rows, k]`.
    """
    if (library := _library(dy, weight.mT, settings)) is not None:
        return library.grouped_matmul(dy, weight.mT, offsets)
    if _fast(dy, weight) and readable(dy) and readable(weight[0]):
        _, n, k = weight.shape
        return launch_rows(dy, weight, offsets, k, n, True, None, dy.dtype)
    return _by_torch(dy, weight, offsets)


def grouped_weight_grad(
    dy: Tensor, x: Tensor, offsets: Tensor, main_grad: Tensor, *, accumulate: bool = True
) -> None:
    """Computes `main_grad[e] += sum over the rows of e of dy xᵀ`, in place.

    Args:
        dy: `[rows, n]` sorted by expert.
        x: `[rows, k]`.
        offsets: as in `grouped_matmul`.
        main_grad: `[E, n, k]` contiguous, float32 (or float64).
        accumulate: False: the sums are written over `main_grad`, whose values are not read.
    """
    fast = dispatch.runs_triton(dy) and dy.dtype == x.dtype and dy.dtype in HALF_DTYPES
    fast = fast and main_grad.dtype == torch.float32
    if not (fast and readable(dy) and readable(x) and main_grad.is_contiguous()):
        grouped_weight_grad_reference(dy, x, offsets, main_grad, accumulate=accumulate)
        return
    experts, n, k = main_grad.shape
    config = tuning.select("grouped_weight_grad", dy.device)
    operands = (
        tiles_of(dy, [config["BLOCK_R"], config["BLOCK_N"]]),
        tiles_of(x, [config["BLOCK_R"], config["BLOCK_K"]]),
    )
    grid = (cdiv(n, config["BLOCK_N"]) * cdiv(k, config["BLOCK_K"]), experts)
    sizes = (n, k, int(accumulate))
    _weight_grad_kernel[grid](
        *operands, main_grad, offsets, *sizes, POINTERS=by_pointers(x.device), **config
    )


class _GroupedMatmul(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, weight, offsets, settings):
        ctx.save_for_backward(x, weight, offsets)
        ctx.settings = settings
        return grouped_rows(x, weight, offsets, settings)

    @staticmethod
    def backward(ctx, dy):
        x, weight, offsets = ctx.saved_tensors
        dy = dy.contiguous()
        main_grad = torch.zeros(
            weight.shape, dtype=statistics_dtype(weight.dtype), device=weight.device
        )
        grouped_weight_grad(dy, x, offsets, main_grad)
        dx = grouped_input_grad(dy, weight, offsets, ctx.settings)
        return dx, main_grad.to(weight.dtype), None, None


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, settings: Settings = AUTO) -> Tensor:
    """Computes `y[r] = W[e] x[r]` for rows sorted by expert, differentiable.

    Args:
        x: `[rows, k]` sorted by expert.
        weight: `[E, n, k]`.
        offsets: `[E + 1]` integers on the device, from 0: expert e has the rows
            [offsets[e], offsets[e + 1]). Rows past the last offset are padding and give zeros.
        settings: which library may compute it on a GPU.

    Returns:
        `[rows, n]` in the dtype of x.
    """
    return _GroupedMatmul.apply(x, weight, offsets, settings)


def accumulate_weight_grad_reference(
    main_grad: Tensor, dy: Tensor, x: Tensor, *, accumulate: bool = True
) -> None:
    """Computes `main_grad += dyᵀ x` in plain torch, without copies if the dtypes are equal."""
    _add_matmul(main_grad, dy.t(), x, accumulate)


def accumulate_weight_grad_triton(
    main_grad: Tensor, dy: Tensor, x: Tensor, *, accumulate: bool = True
) -> None:
    """Computes `main_grad += dyᵀ x` as the weight gradient of one expert that has all rows."""
    offsets = torch.tensor([0, dy.shape[0]], dtype=torch.int32).to(dy.device, non_blocking=True)
    grouped_weight_grad(dy, x, offsets, main_grad[None], accumulate=accumulate)


def accumulate_weight_grad(
    main_grad: Tensor, dy: Tensor, x: Tensor, *, accumulate: bool = True
) -> None:
    """Adds the weight gradient `dyᵀ x` to `main_grad`, in place.

    On a GPU the vendor's library does so in one call, which can write float32 from narrower inputs.

    Args:
        main_grad: `[out, in]`, float32 or float64.
        dy: `[n, out]`, the gradient of the output; bfloat16, float16 or the main gradient's dtype.
        x: `[n, in]`, the layer's input; same dtype as `dy`.
        accumulate: False: the gradient is written over `main_grad`, whose values are not read.

    Raises:
        ValueError: the shapes do not fit.
    """
    if dy.shape[0] != x.shape[0] or main_grad.shape != (dy.shape[1], x.shape[1]):
        raise ValueError(
            "a weight gradient requires main_grad [out, in], dy [n, out], x [n, in] "
            f"(got {tuple(main_grad.shape)}, {tuple(dy.shape)}, {tuple(x.shape)})"
        )
    beta = int(accumulate)
    if dy.dtype == main_grad.dtype:
        main_grad.addmm_(dy.t(), x, beta=beta)
    elif dy.is_meta and dispatch.PLANNED.get() is not None:
        return  # one GEMM in place allocates nothing
    elif not dispatch.runs_triton(dy):
        accumulate_weight_grad_reference(main_grad, dy, x, accumulate=accumulate)
    elif dy.is_cuda and main_grad.is_contiguous():
        torch.addmm(main_grad, dy.t(), x, beta=beta, out_dtype=main_grad.dtype, out=main_grad)
    else:
        accumulate_weight_grad_triton(main_grad, dy, x, accumulate=accumulate)

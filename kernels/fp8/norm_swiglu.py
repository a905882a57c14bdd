"""SwiGLU and norms whose result is stored in FP8 only, and the gradient of SwiGLU in FP8.

These feed FP8 GEMMs: SwiGLU a down-projection, a norm an up-projection. The backward of the
up-projection reads the gradient of SwiGLU twice, by rows and transposed for its weight gradient.

The wide result is never stored: it is computed in registers, rounded to the dtype that it would
have been stored in, and quantized in 1×128 groups. So the result is that of the two operations one
after the other, at a third of the traffic (bfloat16 in, FP8 out, instead of in, out, in, out). A
second kernel transposes the gradient of SwiGLU, [2f] a token, because a single kernel for both FP8
forms took 1.04 ms instead of 0.46 ms on an H200, for 8,192 tokens and f = 14,336.
"""

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.activation import (
    activation_backward,
    activation_reference,
    swiglu_with_derivatives,
)
from megatron5d.kernels.choice import AUTO, Settings
from megatron5d.kernels.dispatch import cdiv, jit, load_float32, rows_of, tl
from megatron5d.kernels.fp8.quantize import (
    E4M3,
    GROUP,
    Quantized,
    amax_along,
    quantize_reference,
    quantize_rows,
    quantize_tile,
    store_quantized_rows,
)
from megatron5d.kernels.fp8.transpose import fp8_transpose
from megatron5d.kernels.norm import (
    launch_config,
    norm_forward,
    norm_reference,
    normalize,
    scale_and_shift,
)

MAX_WIDTH = 16384  # of the rows that one pass can take; wider ones take two


@jit(do_not_specialize=["rows"])  # an expert's number of rows changes with every batch
def _swiglu_kernel(
    gate_up_ptr,
    weights_ptr,
    values_ptr,
    scales_ptr,
    rows,
    width,
    stride,
    WEIGHTED: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Processes one group of columns of some rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1).to(tl.int64)
    column = group * GROUP + tl.arange(0, GROUP)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    pointers = gate_up_ptr + row[:, None] * stride + column[None, :]
    gate, up = load_float32(pointers, mask), load_float32(pointers + width, mask)
    y = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        y *= load_float32(weights_ptr + row, row < rows)[:, None]
    # Round as if the result had been stored in its wide dtype.
    y = y.to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    values_ptr += row[:, None] * width + column[None, :]
    scales_ptr += row[:, None] * tl.cdiv(width, GROUP) + group
    store_quantized_rows(y, values_ptr, scales_ptr, mask, (row < rows)[:, None], POWERS_OF_TWO)


@jit(do_not_specialize=["rows"])
def _swiglu_backward_kernel(
    dy_ptr,
    gate_up_ptr,
    values_ptr,
    scales_ptr,
    rows,
    width,
    dy_stride,
    stride,
    POWERS_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Processes one group of columns of some rows, in both halves."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    group, groups = tl.program_id(1), tl.num_programs(1)
    column = group * GROUP + tl.arange(0, GROUP)[None, :]
    mask = row < rows
    gate = load_float32(gate_up_ptr + row * stride + column, mask)
    up = load_float32(gate_up_ptr + row * stride + width + column, mask)
    dy = load_float32(dy_ptr + row * dy_stride + column, mask)
    _, dgate, dup = swiglu_with_derivatives(gate, up)
    DTYPE: tl.constexpr = gate_up_ptr.dtype.element_ty
    dgate = (dy * dgate).to(DTYPE).to(tl.float32)
    dup = (dy * dup).to(DTYPE).to(tl.float32)
    values_ptr += row * (2 * width) + column
    scales_ptr += row * (2 * groups) + group
    store_quantized_rows(dgate, values_ptr, scales_ptr, mask, mask, POWERS_OF_TWO)
    store_quantized_rows(dup, values_ptr + width, scales_ptr + groups, mask, mask, POWERS_OF_TWO)


@jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    values_ptr,
    scales_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    width,
    stride,
    eps,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Normalizes whole rows, then quantizes them group by group."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    row_mask = row < rows
    mask = row_mask[:, None] & (column < width)[None, :]
    x = load_float32(x_ptr + row[:, None] * stride + column[None, :], mask)
    y = normalize(x, mask, width, eps, mean_ptr + row, rstd_ptr + row, row_mask, CENTERED)
    y = scale_and_shift(y, weight_ptr, bias_ptr, column, column < width, HAS_BIAS)
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    # Quantize each group of 128 columns with a separate scale.
    blocks = tl.reshape(y, (ROWS, WIDTH // GROUP, GROUP))
    amax = amax_along(blocks, 2)[:, :, None]
    values, scale = quantize_tile(blocks, amax, values_ptr.dtype.element_ty, POWERS_OF_TWO)
    values = tl.reshape(values, (ROWS, WIDTH))
    tl.store(values_ptr + row[:, None] * width + column[None, :], values, mask)
    groups, group = tl.cdiv(width, GROUP), tl.arange(0, WIDTH // GROUP)
    scale = tl.reshape(scale, (ROWS, WIDTH // GROUP))
    group_mask = row_mask[:, None] & (group < groups)[None, :]
    tl.store(scales_ptr + row[:, None] * groups + group[None, :], scale, group_mask)


def _outputs(x: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocates values `[rows, width]` and their scales, for the rows of x."""
    values = x.new_empty(x.shape[0], width, dtype=dtype)
    return values, x.new_empty(x.shape[0], cdiv(width, GROUP), dtype=torch.float32)


def swiglu_quantized(
    gate_up: Tensor,
    dtype: torch.dtype = E4M3,
    *,
    weights: Tensor | None = None,
    powers_of_two: bool = False,
) -> Quantized:
    """Computes `quantize_rows` of SwiGLU in one pass, without a gradient.

    Args:
        gate_up: `[..., 2f]`, any floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.
        weights: `[rows]`, by which the rows are multiplied; None = 1.
        powers_of_two: round the scales up to powers of two.

    Returns:
        values `[rows, f]`, scales `[rows, ceil(f/128)]`.

    Raises:
        ValueError: the last dim is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"swiglu splits the last dim into halves (gate, up), so its size must be even "
            f"(got {gate_up.shape[-1]})"
        )
    x = rows_of(gate_up)
    rows, width = x.shape[0], x.shape[1] // 2
    if not dispatch.runs_triton(x):
        y = activation_reference(x, "swiglu", weights)
        return quantize_reference(y, 1, dtype, powers_of_two)
    values, scales = _outputs(x, width, dtype)
    config = tuning.select("fp8_swiglu", x.device)
    grid = (cdiv(rows, config["ROWS"]), cdiv(width, GROUP))
    factors = x if weights is None else weights.contiguous()
    config |= {"WEIGHTED": weights is not None, "POWERS_OF_TWO": powers_of_two, "GROUP": GROUP}
    _swiglu_kernel[grid](x, factors, values, scales, rows, width, x.stride(0), **config)
    return Quantized(values, scales, 1)


def swiglu_backward_quantized(
    dy: Tensor, gate_up: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> tuple[Quantized, Quantized]:
    """Computes `quantize_rows` of the gradient of SwiGLU in one pass, and `fp8_transpose` of it.

    Args:
        dy: `[..., f]`.
        gate_up: `[..., 2f]`, the input. The passes run one by one for float64, and if f is not
            divisible by 128.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scales up to powers of two.

    Returns:
        values `[rows, 2f]` with scales `[rows, ceil(2f/128)]`, and values `[2f, G·128]` with scales
        `[2f, G]` for G = ceil(rows/128) groups of tokens.
    """
    dy, x = rows_of(dy), rows_of(gate_up)
    rows, width = dy.shape
    if not dispatch.runs_triton(x) or width % GROUP:
        dx, _ = activation_backward(dy, x, "swiglu")
        q = quantize_rows(dx, dtype, powers_of_two=powers_of_two)
    else:
        values, scales = _outputs(x, 2 * width, dtype)
        config = tuning.select("fp8_swiglu_backward", x.device)
        grid = (cdiv(rows, config["ROWS"]), width // GROUP)
        config |= {"POWERS_OF_TWO": powers_of_two, "GROUP": GROUP}
        sizes = (rows, width, dy.stride(0), x.stride(0))
        _swiglu_backward_kernel[grid](dy, x, values, scales, *sizes, **config)
        q = Quantized(values, scales, 1)
    return q, fp8_transpose(q, powers_of_two=powers_of_two)


def norm_quantized(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype = E4M3,
    *,
    centered: bool,
    powers_of_two: bool = False,
    settings: Settings = AUTO,
) -> tuple[Quantized, tuple[Tensor, Tensor]]:
    """Computes `quantize_rows` of RMSNorm, or with `centered` of LayerNorm, in one pass, without a
    gradient.

    Args:
        x: `[..., h]`, any floating dtype.
        weight: `[h]`, any floating dtype.
        bias: `[h]` or None.
        eps: added to the mean of squares.
        dtype: float8_e4m3fn or float8_e5m2.
        centered: the norm is LayerNorm.
        powers_of_two: round the scales up to powers of two.
        settings: which library may compute the norm of rows too wide for one pass.

    Returns:
        values `[rows, h]` with scales `[rows, ceil(h/128)]`, and the statistics for
        `norm_backward`: mean (only if `centered`) and rstd `[rows]`, float32 (float64 for float64).
    """
    x = rows_of(x)
    rows, width = x.shape
    if not dispatch.runs_triton(x):
        y = norm_reference(x, weight, bias, eps=eps, centered=centered)
        return quantize_reference(y, 1, dtype, powers_of_two), _statistics(x, eps, centered)
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    if width > MAX_WIDTH:
        y, _, mean, rstd = norm_forward(x, None, weight, bias, eps, centered, settings)
        return quantize_rows(y, dtype, powers_of_two=powers_of_two), (mean, rstd)
    values, scales = _outputs(x, width, dtype)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centered else rstd
    config = launch_config("fp8_rms_norm", x, GROUP)
    grid = (cdiv(rows, config["ROWS"]),)
    config |= {"CENTERED": centered, "HAS_BIAS": bias is not None}
    config |= {"POWERS_OF_TWO": powers_of_two, "GROUP": GROUP}
    pointers = (x, weight, weight if bias is None else bias, values, scales, mean, rstd)
    _norm_kernel[grid](*pointers, rows, width, x.stride(0), eps, **config)
    return Quantized(values, scales, 1), (mean, rstd)


def _statistics(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """Computes mean and rstd of each row in plain torch; rstd in place of a mean not `centered`."""
    wide = x.to(dispatch.statistics_dtype(x.dtype))
    mean = wide.mean(-1)
    squares = (wide - mean[:, None] if centered else wide).square()
    rstd = torch.rsqrt(squares.mean(-1) + eps)
    return mean if centered else rstd, rstd

"""Operations whose result is wanted in FP8 only: SwiGLU before a down-projection, a norm before an
up-projection; and the gradient of SwiGLU, which the backward of the up-projection reads by rows,
and transposed for its weight gradient.

The wide result is never written: it is computed in registers, rounded to the dtype that it would
have been stored in, and quantised in 1×128 groups. So the outcome is that of the two operations one
after the other, at a third of the traffic (bfloat16 in, FP8 out, instead of in, out, in, out). The
gradient of SwiGLU, [2f] a token, is transposed by a second kernel: one that wrote both FP8 forms at
once took 1.04 ms instead on an H200, for 8,192 tokens and f = 14,336.
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
from megatron5d.kernels.dispatch import cdiv, jit, load_float32, next_power_of_2, rows_of, tl
from megatron5d.kernels.fp8.quantize import (
    E4M3,
    GROUP,
    Quantized,
    fp8_transpose,
    largest,
    quantize_reference,
    quantize_rows,
    quantized,
)
from megatron5d.kernels.norm import norm_forward, normalize, scale_and_shift
from megatron5d.kernels.plain_norm import norm_reference

# of rows that a program holds whole; the norm of wider ones is written, and quantised from memory
MAX_WIDTH = 16384


@jit
def _store_quantized(
    x, values_ptr, scales_ptr, live, known, LARGEST: tl.constexpr, POWERS_OF_TWO: tl.constexpr
):
    """Stores one group of columns of some rows in FP8, and its scales."""
    values, scale = quantized(
        x, largest(x, 1)[:, None], LARGEST, POWERS_OF_TWO, values_ptr.dtype.element_ty
    )
    tl.store(values_ptr, values, live)
    tl.store(scales_ptr, scale, known)


@jit(do_not_specialize=["rows"])
def _swiglu_kernel(
    gate_up_ptr,
    weights_ptr,
    values_ptr,
    scales_ptr,
    rows,
    width,
    stride,
    WEIGHTED: tl.constexpr,
    LARGEST: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Processes one group of columns of some rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1).to(tl.int64)
    column = group * GROUP + tl.arange(0, GROUP)
    live = (row < rows)[:, None] & (column < width)[None, :]
    at = gate_up_ptr + row[:, None] * stride + column[None, :]
    gate = load_float32(at, live)
    up = load_float32(at + width, live)
    y = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        y *= load_float32(weights_ptr + row, row < rows)[:, None]
    y = y.to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    values_ptr += row[:, None] * width + column[None, :]
    scales_ptr += row[:, None] * tl.cdiv(width, GROUP) + group
    _store_quantized(y, values_ptr, scales_ptr, live, (row < rows)[:, None], LARGEST, POWERS_OF_TWO)


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
    LARGEST: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Processes one group of columns of some rows, in both halves."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    group, groups = tl.program_id(1), tl.num_programs(1)
    column = group * GROUP + tl.arange(0, GROUP)[None, :]
    live = row < rows
    gate = load_float32(gate_up_ptr + row * stride + column, live)
    up = load_float32(gate_up_ptr + row * stride + width + column, live)
    dy = load_float32(dy_ptr + row * dy_stride + column, live)
    _, slope_gate, slope_up = swiglu_with_derivatives(gate, up)
    DTYPE: tl.constexpr = gate_up_ptr.dtype.element_ty
    d_gate, d_up = (
        (dy * slope_gate).to(DTYPE).to(tl.float32),
        (dy * slope_up).to(DTYPE).to(tl.float32),
    )
    values_ptr += row * (2 * width) + column
    scales_ptr += row * (2 * groups) + group
    _store_quantized(d_gate, values_ptr, scales_ptr, live, live, LARGEST, POWERS_OF_TWO)
    _store_quantized(
        d_up, values_ptr + width, scales_ptr + groups, live, live, LARGEST, POWERS_OF_TWO
    )


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
    LARGEST: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Normalises whole rows, then quantises them group by group."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    x = load_float32(x_ptr + row[:, None] * stride + column[None, :], mask)
    y = normalize(x, mask, width, eps, mean_ptr + row, rstd_ptr + row, row < rows, CENTERED)
    y = scale_and_shift(y, weight_ptr, bias_ptr, column, column < width, HAS_BIAS)
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    blocks = tl.reshape(y, (ROWS, WIDTH // GROUP, GROUP))
    amax = largest(blocks, 2)[:, :, None]
    values, scale = quantized(blocks, amax, LARGEST, POWERS_OF_TWO, values_ptr.dtype.element_ty)
    values = tl.reshape(values, (ROWS, WIDTH))
    tl.store(values_ptr + row[:, None] * width + column[None, :], values, mask)
    groups, group = tl.cdiv(width, GROUP), tl.arange(0, WIDTH // GROUP)
    scale = tl.reshape(scale, (ROWS, WIDTH // GROUP))
    group_mask = (row < rows)[:, None] & (group < groups)[None, :]
    tl.store(scales_ptr + row[:, None] * groups + group[None, :], scale, group_mask)


def _outputs(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    values = torch.empty(rows, width, dtype=dtype, device=device)
    return values, torch.empty(rows, cdiv(width, GROUP), dtype=torch.float32, device=device)


def swiglu_quantized(
    gate_up: Tensor,
    dtype: torch.dtype = E4M3,
    *,
    weights: Tensor | None = None,
    powers_of_two: bool = False,
) -> Quantized:
    """Computes `quantize_rows(swiglu(gate_up))` in one pass; not differentiable.

    Args:
        gate_up: `[..., 2f]`, any floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.
        weights: `[rows]`, what each row is multiplied by ; None = 1.
        powers_of_two: round the scales up to powers of two.

    Returns:
        values `[rows, f]`, scales `[rows, ceil(f/128)]`.

    Raises:
        ValueError: the last dim is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"swiglu splits the last dim in two halves (gate, up); {gate_up.shape[-1]} is odd"
        )
    x = rows_of(gate_up)
    rows, width = x.shape[0], x.shape[1] // 2
    if not dispatch.runs_triton(x):
        return quantize_reference(
            activation_reference(x, "swiglu", weights), 1, dtype, powers_of_two
        )
    values, scales = _outputs(rows, width, dtype, x.device)
    config = tuning.select("fp8_swiglu", x.device)
    flags = {
        "WEIGHTED": weights is not None,
        "LARGEST": torch.finfo(dtype).max,
        "POWERS_OF_TWO": powers_of_two,
        "GROUP": GROUP,
    }
    grid = (cdiv(rows, config["ROWS"]), cdiv(width, GROUP))
    factors = x if weights is None else weights.contiguous()
    _swiglu_kernel[grid](x, factors, values, scales, rows, width, x.stride(0), **flags, **config)
    return Quantized(values, scales, 1)


def swiglu_backward_quantized(
    dy: Tensor, gate_up: Tensor, dtype: torch.dtype = E4M3, *, powers_of_two: bool = False
) -> tuple[Quantized, Quantized]:
    """Computes the gradient of `swiglu`, quantised by `quantize_rows` in one pass, and
    `fp8_transpose` of that.

    Args:
        dy: `[..., f]`.
        gate_up: `[..., 2f]`, the input; a float64 one, and an f that 128 does not divide, take the
            passes one by one.
        dtype: float8_e4m3fn or float8_e5m2.
        powers_of_two: round the scales up to powers of two.

    Returns:
        values `[rows, 2f]` with scales `[rows, ceil(2f/128)]`, and values `[2f, G·128]` with scales
        `[2f, G]` for G = ceil(rows/128) groups of tokens.
    """
    dy, x = rows_of(dy), rows_of(gate_up)
    rows, width = dy.shape
    if not dispatch.runs_triton(x) or width % GROUP:
        plain = quantize_rows(
            activation_backward(dy, x, "swiglu")[0], dtype, powers_of_two=powers_of_two
        )
        return plain, fp8_transpose(plain, powers_of_two=powers_of_two)
    values, scales = _outputs(rows, 2 * width, dtype, x.device)
    flags = {"LARGEST": torch.finfo(dtype).max, "POWERS_OF_TWO": powers_of_two, "GROUP": GROUP}
    config = tuning.select("fp8_swiglu_backward", x.device)
    grid = (cdiv(rows, config["ROWS"]), width // GROUP)
    _swiglu_backward_kernel[grid](
        dy, x, values, scales, rows, width, dy.stride(0), x.stride(0), **flags, **config
    )
    plain = Quantized(values, scales, 1)
    return plain, fp8_transpose(plain, powers_of_two=powers_of_two)


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
    """Computes `quantize_rows(rms_norm(x))`, or with `centered` of `layer_norm`, in one pass; not
    differentiable.

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
        values `[rows, h]` with scales `[rows, ceil(h/128)]`, and what the backward of the norm
        needs: mean (without `centered`, nothing) and 1 / scale `[rows]`, float32 (float64 for
        float64).
    """
    x = rows_of(x)
    rows, width = x.shape
    if not dispatch.runs_triton(x):
        wide = x.to(dispatch.statistics_dtype(x.dtype))
        mean = wide.mean(-1) if centered else None
        squares = (wide if mean is None else wide - mean[:, None]).square()
        rstd = torch.rsqrt(squares.mean(-1) + eps)
        y = norm_reference(x, weight, bias, eps=eps, centered=centered)
        return quantize_reference(y, 1, dtype, powers_of_two), (
            rstd if mean is None else mean,
            rstd,
        )
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    if width > MAX_WIDTH:
        y, _, mean, rstd = norm_forward(x, None, weight, bias, eps, centered, settings)
        return quantize_rows(y, dtype, powers_of_two=powers_of_two), (mean, rstd)
    values, scales = _outputs(rows, width, dtype, x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centered else rstd
    config = tuning.select("fp8_rms_norm", x.device, width=width)
    config["WIDTH"] = max(GROUP, next_power_of_2(width))
    config["ROWS"] = max(1, config.pop("ELEMENTS") // config["WIDTH"])
    flags = {"CENTERED": centered, "HAS_BIAS": bias is not None, "POWERS_OF_TWO": powers_of_two}
    pointers = (x, weight, weight if bias is None else bias, values, scales, mean, rstd)
    sizes = (rows, width, x.stride(0), eps)
    grid = (cdiv(rows, config["ROWS"]),)
    _norm_kernel[grid](
        *pointers, *sizes, **flags, LARGEST=torch.finfo(dtype).max, GROUP=GROUP, **config
    )
    return Quantized(values, scales, 1), (mean, rstd)
